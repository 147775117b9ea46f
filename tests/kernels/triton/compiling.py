"""Kernels compiled for a Hopper GPU, without one: what Triton's interpreter does not see. Triton brings the assembler.

Triton compiles only in a process that it was imported in without its interpreter. So a file of such tests is also a
program: it calls ``tell`` with the calls whose launches are to be compiled, and its tests call ``compiled`` with the
file, which runs it.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[3]
#: A Hopper multiprocessor.
REGISTERS, SHARED_BYTES = 65536, 227 * 1024

_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass
class Compiled:
    """One launch, as ptxas reports and disassembles it."""

    case: str
    kernel: str
    programs: list[int]
    warps: int
    registers: int
    #: Bytes of spilled registers and of arrays in local memory, a thread.
    stack: int
    shared: int
    instructions: dict[str, int]

    def count(self, prefix: str) -> int:
        """Instructions whose names begin so."""
        return sum(count for name, count in self.instructions.items() if name.startswith(prefix))

    @property
    def matrix_instructions(self) -> set[str]:
        return {name for name in self.instructions if "MMA.64" in name or name.startswith("HMMA")}

    @property
    def programs_at_once(self) -> int:
        """On one multiprocessor."""
        of_registers = REGISTERS // (-(-self.registers // 8) * 8 * self.warps * 32)
        return min(of_registers, SHARED_BYTES // (self.shared + 1024))


def compiled(program: str, *cases: str) -> list[Compiled]:
    """What a program tells of the launches of these cases, or of all of its cases."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        done = subprocess.run([sys.executable, program, *cases], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    launches = [Compiled(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]
    assert launches
    return launches


def tell(calls: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Prints what becomes of the launches of each call (case, call) that the command line asks for, or of all."""
    wanted = sys.argv[1:]
    launches = [launch for case, call in calls if not wanted or case in wanted for launch in _compile(case, call)]
    print(json.dumps([asdict(launch) for launch in launches]))


def _compile(case: str, call: Callable[[], object]) -> list[Compiled]:
    """Compiles for sm_90 what a call would launch; nothing runs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    caught: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        caught.append((self, args, kwargs | {"grid": grid}))

    with mock.patch.object(JITFunction, "run", run):
        call()
    launches = []
    for kernel, args, kwargs in caught:
        grid = kwargs.pop("grid")
        options = {name: kwargs.pop(name) for name in kwargs.keys() - set(kernel.arg_names)}
        result = triton.compile(_source(kernel, args, kwargs), target=GPUTarget("cuda", 90, 32), options=options)
        usage, instructions = _disassemble(result.asm["cubin"])
        launches.append(
            Compiled(
                case,
                kernel.fn.__name__,
                list(grid),
                result.metadata.num_warps,
                usage["REG"],
                usage["STACK"] + usage["LOCAL"],
                result.metadata.shared,
                instructions,
            )
        )
    return launches


def _source(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What Triton specialises a launch on: types, multiples of 16, ones, and arguments that are not there."""
    from triton.compiler import ASTSource

    bound = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def specialised(parameter: Any, value: Any, path: tuple[int, ...]) -> Any:
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, tuple):
            elements = [specialised(parameter, element, (*path, i)) for i, element in enumerate(value)]
            return type(value)(*elements)
        if isinstance(value, torch.Tensor):
            aligned = value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment
            kind = _TYPES[value.dtype]
        else:
            aligned = isinstance(value, int) and special and value % 16 == 0
            kind = "fp32" if isinstance(value, float) else "i32"
        if aligned:
            attributes[path] = [["tt.divisibility", 16]]
        return kind

    for i, parameter in enumerate(kernel.params):
        signature[parameter.name] = specialised(parameter, bound[parameter.name], (i,))
    return ASTSource(kernel, signature, constants, attributes)


def _disassemble(cubin: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """(registers and bytes by ptxas' names for them, instructions by name)."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, listing = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", listing, re.MULTILINE)
    found = re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)
    return {name: int(value) for name, value in found}, dict(Counter(names))
