"""The dense kernels compiled for a Hopper GPU, without one: what Triton's interpreter does not see.

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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

_OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "maxnreg"}
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
#: A Hopper multiprocessor.
REGISTERS, SHARED_BYTES = 65536, 227 * 1024


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


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Named calls of the public functions with the shapes of an 8B model."""
    from octavo.kernels.triton import activation, matmul, norm, quant, quantize, rotary

    half = torch.bfloat16
    x = torch.empty(2048, 4096, dtype=half)
    weight = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0)).to(half)
    residual = torch.empty(2048, 4096)
    heads = x.view(2048, 32, 128)
    yield "rms_norm", lambda: norm.rms_norm(x, weight[0], 1e-5)
    yield "rms_norm heads", lambda: norm.rms_norm(heads[:, :8], weight[0, :128], 1e-5)
    yield "silu_and_mul", lambda: activation.silu_and_mul(x)
    yield "gelu_and_mul", lambda: activation.gelu_and_mul(x, "none")
    yield "gelu_and_mul tanh", lambda: activation.gelu_and_mul(x)
    positions, cos_sin = torch.zeros(2048, dtype=torch.int64), torch.zeros(64, 128)
    yield "rotary", lambda: rotary.rotary(heads[:, :24], heads[:, 24:], positions, cos_sin)
    for rows in (1, 2048):
        some = x[:rows]
        yield f"matmul {rows}", lambda some=some: matmul.matmul(some, weight, None, torch.float32)  # type: ignore[misc]
        yield (
            f"matmul residual {rows}",
            lambda rows=rows: matmul.matmul(x[:rows], weight, weight[0], residual=residual[:rows]),  # type: ignore[misc]
        )
    yield "matmul float16", lambda: matmul.matmul(x[:1].half(), weight.half())
    yield "matmul float32", lambda: matmul.matmul(x[:1].float(), weight.float())
    yield "matmul odd", lambda: matmul.matmul(x[:1, :1003], weight[:, :1003])
    for kind in ("int8", "int4", "fp8"):
        packed = quantize.quantize(weight, kind)
        for rows in (1, 2048):
            for fixed in (True, False):
                yield (
                    f"{kind} {'fixed' if fixed else 'fast'} {rows}",
                    lambda packed=packed, rows=rows, fixed=fixed: quant.quantized_matmul(  # type: ignore[misc]
                        x[:rows], packed, None, residual[:rows], deterministic=fixed
                    ),
                )
        yield f"{kind} float16", lambda packed=packed: quant.quantized_matmul(x[:1].half(), packed)  # type: ignore[misc]
        yield f"{kind} float32", lambda packed=packed: quant.quantized_matmul(x[:1].float(), packed)  # type: ignore[misc]
    wide = torch.randn(28672, 512, generator=torch.Generator().manual_seed(0)).to(half)
    packed_wide = quantize.quantize(wide, "int8")
    yield "matmul wide 1", lambda: matmul.matmul(x[:1, :512], wide)
    yield "int8 fixed wide 1", lambda: quant.quantized_matmul(x[:1, :512], packed_wide)
    yield "int8 fast wide 1", lambda: quant.quantized_matmul(x[:1, :512], packed_wide, deterministic=False)
    small = quantize.quantize(weight[:576, :576], "int4")
    yield "int4 groups of 32", lambda: quant.quantized_matmul(x[:1, :576], small)


def compile_launches(case: str, call: Callable[[], object]) -> list[Compiled]:
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
        compiled.append(
            Compiled(
                case,
                kernel.fn.__name__,
                list(grid),
                result.metadata.num_warps,
                int(usage["REG"]),
                int(usage["STACK"]) + int(usage["LOCAL"]),
                result.metadata.shared,
                instructions,
            )
        )
    return compiled


def _source(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What Triton specialises a launch on: types, multiples of 16, ones, and arguments that are not there."""
    from triton.compiler import ASTSource

    bound = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value, name = bound[parameter.name], parameter.name
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
            signature[name] = "constexpr"
            constants[(i,)] = value
            continue
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            aligned = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
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


def test_no_register_is_spilled(compiled: list[Compiled]) -> None:
    assert {(c.case, c.kernel): c.stack for c in compiled if c.stack} == {}


def test_pointwise_kernels_read_and_write_16_bytes_at_once(compiled: list[Compiled]) -> None:
    for case in ("rms_norm", "silu_and_mul", "gelu_and_mul", "gelu_and_mul tanh"):
        (kernel,) = [c for c in compiled if c.case == case]
        assert kernel.count("LDG.E.128"), kernel
        assert kernel.count("STG.E.128") == kernel.count("STG"), kernel


def test_products_of_half_precision_use_wgmma_and_wide_asynchronous_loads(compiled: list[Compiled]) -> None:
    products = [c for c in compiled if c.kernel in ("_matmul_kernel", "_quantized_kernel")]
    for product in products:
        if "float32" not in product.case:
            assert all(name.startswith("HGMMA.64x") for name in product.matrix_instructions), product
            assert product.matrix_instructions, product
        if "odd" not in product.case:
            assert product.count("LDGSTS.E.BYPASS.128"), product


def test_the_number_of_rows_does_not_change_the_instruction_of_a_deterministic_product(
    compiled: list[Compiled],
) -> None:
    by_case = {c.case: c for c in compiled if c.kernel != "_combine_kernel"}
    for few, many in (
        ("matmul 1", "matmul 2048"),
        ("matmul residual 1", "matmul residual 2048"),
        *((f"{kind} fixed 1", f"{kind} fixed 2048") for kind in ("int8", "int4", "fp8")),
    ):
        assert by_case[few].matrix_instructions == by_case[many].matrix_instructions
        assert by_case[few].warps == by_case[many].warps
        assert len(by_case[few].matrix_instructions) == 1


def test_products_of_few_rows_share_a_multiprocessor(compiled: list[Compiled]) -> None:
    """So that the loads of one go on while another waits: what hides the latency of memory."""
    for product in compiled:
        if product.kernel in ("_matmul_kernel", "_quantized_kernel") and product.case.split()[-1] == "1":
            assert product.programs_at_once >= 2, product
            assert product.programs[0] * product.programs[1] >= 200, product


def test_codes_are_widened_without_slow_conversions(compiled: list[Compiled]) -> None:
    for product in compiled:
        if product.kernel == "_quantized_kernel" and "float32" not in product.case:
            assert not product.count("F2F."), product
            assert not product.count("I2F.S"), product
            assert not product.count("I2F.U8"), product


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    print(json.dumps([asdict(c) for case, call in launches() if wanted in case for c in compile_launches(case, call)]))
