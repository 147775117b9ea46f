"""The sampling kernels compiled for a Hopper GPU, without one: what Triton's interpreter does not see.

Run as a program, in a process of its own in which Triton compiles, this file prints what became of each launch.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

_OPTIONS = {"num_warps", "num_stages"}
_TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64"}
#: Of common models, the longest that are supported, and a short one; odd sizes cannot be read 16 bytes at a time.
VOCABULARIES = (128_256, 50_257, 262_144, 7)


@dataclass
class Compiled:
    """One launch, as ptxas reports and disassembles it."""

    case: str
    kernel: str
    programs: list[int]
    registers: int
    #: Bytes of spilled registers and of arrays in local memory, a thread.
    stack: int
    shared: int
    instructions: dict[str, int]

    def count(self, prefix: str) -> int:
        """Instructions whose names begin so."""
        return sum(count for name, count in self.instructions.items() if name.startswith(prefix))


def choose(vocab: int) -> None:
    from octavo.kernels.triton.sampling import choose_tokens

    numbers, counts = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.int64)
    keys = torch.zeros(64, 2, dtype=torch.int32)
    choose_tokens(torch.empty(64, vocab), numbers, counts, numbers, numbers, keys)


def score(vocab: int, k: int) -> None:
    from octavo.kernels.triton.logprobs import token_logprobs

    tokens = torch.zeros(64, dtype=torch.int64)
    token_logprobs(torch.empty(64, vocab), tokens, tokens, k)


def compile_launches(case: str, call: Callable[[], None]) -> list[Compiled]:
    """Compiles for sm_90 what a call would launch; nothing runs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    caught: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        caught.append((self, args, kwargs))

    with mock.patch.object(JITFunction, "run", run):
        call()
    compiled = []
    for kernel, args, kwargs in caught:
        options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()}
        grid = kwargs.pop("grid")
        kwargs.pop("warmup")
        result = triton.compile(_source(kernel, args, kwargs), target=GPUTarget("cuda", 90, 32), options=options)
        usage, instructions = _disassemble(result.asm["cubin"])
        stack = int(usage["STACK"]) + int(usage["LOCAL"])
        name, shared = kernel.fn.__name__, result.metadata.shared
        compiled.append(Compiled(case, name, list(grid), int(usage["REG"]), stack, shared, instructions))
    return compiled


def _source(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What Triton specialises a launch on: types, multiples of 16, and ones."""
    from triton.compiler import ASTSource

    bound = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value, name = bound[parameter.name], parameter.name
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            aligned = value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment
        elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            signature[name] = "constexpr"
            constants[(i,)] = value
            continue
        else:
            signature[name] = "i32"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def _disassemble(cubin: bytes) -> tuple[dict[str, str], dict[str, int]]:
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
    return dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)), dict(Counter(names))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Compiled(**fields) for fields in json.loads(done.stdout)]


def test_every_launch_compiles(compiled: list[Compiled]) -> None:
    assert len(compiled) == 2 * (len(VOCABULARIES) + 3)


def test_hardly_a_register_is_spilled(compiled: list[Compiled]) -> None:
    assert {(c.case, c.kernel): c.stack for c in compiled if c.stack > 128} == {}


def test_surveys_fill_the_card_and_read_16_bytes_at_once(compiled: list[Compiled]) -> None:
    surveys = [c for c in compiled if c.kernel == "survey_kernel" and "128256" in c.case]
    assert surveys
    for survey in surveys:
        assert survey.count("LDG.E.128"), survey
        assert survey.registers <= 72, survey  # so that 7 programs of 4 warps share a multiprocessor
        assert survey.programs[0] * survey.programs[1] > 1000


def main() -> None:
    cases: dict[str, Callable[[], None]] = {f"choose {v}": lambda v=v: choose(v) for v in VOCABULARIES}  # type: ignore[misc]
    for k in (0, 1, 100):
        cases[f"score 128256, {k}"] = lambda k=k: score(128_256, k)  # type: ignore[misc]
    print(json.dumps([asdict(c) for case, call in cases.items() for c in compile_launches(case, call)]))


if __name__ == "__main__":
    main()
