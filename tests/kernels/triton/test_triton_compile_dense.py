"""The dense kernels compiled for a Hopper GPU, without one; see ``compiling``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("triton")

import torch

from tests.kernels.triton.compiling import Compiled, compiled, tell

if TYPE_CHECKING:
    from octavo.kernels.triton.backend import TritonKernels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Named calls of the public functions with the shapes of an 8B model."""
    from octavo.kernels.interface import LowRankShape
    from octavo.kernels.triton import elementwise, experts, matmul, quant
    from octavo.kernels.triton.backend import TritonKernels
    from tests.torch_types import engine_dtype

    half = torch.bfloat16
    x = torch.empty(2048, 4096, dtype=half)
    weight = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0)).to(half)
    residual = torch.empty(2048, 4096)
    heads = x.view(2048, 32, 128)
    yield "rms_norm", lambda: elementwise.rms_norm(x, weight[0], 1e-5)
    ids = torch.zeros(2048, dtype=torch.int64)
    yield "embedding", lambda: elementwise.embedding(ids, weight)
    yield "embedding scaled and added", lambda: elementwise.embedding(ids, weight, 7, scale=2.5, add=residual)
    yield "rms_norm heads", lambda: elementwise.rms_norm(heads[:, :8], weight[0, :128], 1e-5)
    for name in ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai"):
        yield f"{name} gated", partial(elementwise.activate, x, name, gated=True)
    yield "gelu", lambda: elementwise.activate(x, "gelu", gated=False)
    for rows in (1, 2048):
        yield f"matmul {rows}", partial(matmul.matmul, x[:rows], weight, None, torch.float32)
        yield (
            f"matmul residual {rows}",
            partial(matmul.matmul, x[:rows], weight, weight[0], torch.float32, residual[:rows]),
        )
    yield "matmul float16", lambda: matmul.matmul(x[:1].half(), weight.half())
    yield "matmul float32", lambda: matmul.matmul(x[:1].float(), weight.float())
    yield "matmul odd", lambda: matmul.matmul(x[:1, :1003], weight[:, :1003])
    for kind in ("int8", "int4", "fp8"):
        packed = quant.quantize(weight, kind)
        for rows in (1, 2048):
            for fixed in (True, False):
                yield (
                    f"{kind} {'fixed' if fixed else 'fast'} {rows}",
                    partial(
                        quant.quantized_matmul, x[:rows], packed, torch.float32, residual[:rows], deterministic=fixed
                    ),
                )
                yield (
                    f"{kind} gated {'fixed' if fixed else 'fast'} {rows}",
                    partial(quant.quantized_gated, x[:rows], packed, deterministic=fixed),
                )
        yield f"{kind} float16", partial(quant.quantized_matmul, x[:1].half(), packed)
        yield f"{kind} float32", partial(quant.quantized_matmul, x[:1].float(), packed)
    for rows in (1, 2048):
        chosen, weights = torch.zeros(rows, 2, dtype=torch.int32), torch.ones(rows, 2)
        group = experts.TritonExperts(
            torch.empty(8, 1024, 4096, dtype=half), torch.empty(8, 4096, 512, dtype=half), (), False
        )
        yield f"experts {rows}", partial(group, x[:rows], chosen, weights, residual[:rows])
        first = torch.empty(8, 1024, 4096 // 32 * 17, dtype=torch.uint8)
        second = torch.empty(8, 4096, 512 // 32 * 17, dtype=torch.uint8)
        of_mxfp4 = experts.TritonExperts(first, second, (), False)
        yield f"experts of mxfp4 {rows}", partial(of_mxfp4, x[:rows], chosen, weights, residual[:rows])
        biased = replace(group, bias=torch.empty(8, 1024, dtype=half), activation="swiglu_oai")
        yield f"experts with biases {rows}", partial(biased, x[:rows], chosen, weights, residual[:rows])
    kernels = TritonKernels("cpu")
    for rank in (16, 64):
        qkv = kernels.adapters.make_low_rank(LowRankShape(4096, (4096, 1024, 1024), 8, rank, engine_dtype(half)))
        for rows in (1, 2048):
            yield f"adapters of rank {rank} {rows}", partial(_low_rank, kernels, qkv, x[:rows])
    table = kernels.adapters.make_low_rank_embedding(LowRankShape(32000, (4096,), 8, 16, engine_dtype(half)))
    yield (
        "adapters of an embedding",
        partial(_low_rank, kernels, table, torch.zeros(8, dtype=torch.int64), residual[:8]),
    )
    wide = torch.randn(28672, 512, generator=torch.Generator().manual_seed(0)).to(half)
    packed_wide = quant.quantize(wide, "int8")
    yield "matmul wide 1", lambda: matmul.matmul(x[:1, :512], wide)
    yield "int8 fixed wide 1", lambda: quant.quantized_matmul(x[:1, :512], packed_wide)
    yield "int8 fast wide 1", lambda: quant.quantized_matmul(x[:1, :512], packed_wide, deterministic=False)
    yield "int8 gated fixed wide 1", lambda: quant.quantized_gated(x[:1, :512], packed_wide)
    small = quant.quantize(weight[:576, :576], "int4")
    yield "int4 groups of 32", lambda: quant.quantized_matmul(x[:1, :576], small)


def _low_rank(kernels: TritonKernels, low_rank: Callable[..., object], *args: torch.Tensor) -> object:
    kernels.adapters.use(torch.zeros(len(args[0]), dtype=torch.int32))
    return low_rank(*args)


@pytest.fixture(scope="module")
def launches() -> list[Compiled]:
    return compiled(__file__)


def test_hardly_a_register_is_spilled(launches: list[Compiled]) -> None:
    # Of gated int4 codes the two registers for which another program would have to go.
    assert {c.case: c.stack for c in launches if c.stack > (8 if "int4 gated fixed" in c.case else 0)} == {}


def test_pointwise_kernels_read_and_write_16_bytes_at_once(launches: list[Compiled]) -> None:
    for case in ("rms_norm", "silu gated", "gelu gated", "gelu_tanh gated", "gelu"):
        (kernel,) = [c for c in launches if c.case == case]
        assert kernel.count("LDG.E.128"), kernel
        assert kernel.count("STG.E.128") == kernel.count("STG"), kernel


def test_products_of_half_precision_use_wgmma_and_wide_asynchronous_loads(launches: list[Compiled]) -> None:
    products = [c for c in launches if c.kernel in ("_matmul_kernel", "_quantized_kernel")]
    for product in products:
        if "float32" not in product.case:
            assert all(name.startswith("HGMMA.64x") for name in product.matrix_instructions), product
            assert product.matrix_instructions, product
        if "odd" not in product.case:
            assert product.count("LDGSTS.E.BYPASS.128"), product


def test_the_number_of_rows_does_not_change_the_instruction_of_a_deterministic_product(
    launches: list[Compiled],
) -> None:
    by_case = {c.case: c for c in launches if c.kernel != "_combine_kernel"}
    for few, many in (
        ("matmul 1", "matmul 2048"),
        ("matmul residual 1", "matmul residual 2048"),
        *((f"{kind} fixed 1", f"{kind} fixed 2048") for kind in ("int8", "int4", "fp8")),
    ):
        assert by_case[few].matrix_instructions == by_case[many].matrix_instructions
        assert by_case[few].warps == by_case[many].warps
        assert len(by_case[few].matrix_instructions) == 1


def test_products_of_few_rows_share_a_multiprocessor(launches: list[Compiled]) -> None:
    """So that the loads of one go on while another waits: what hides the latency of memory."""
    for product in launches:
        if product.kernel in ("_matmul_kernel", "_quantized_kernel") and product.case.split()[-1] == "1":
            assert product.programs_at_once >= 2, product
            assert product.programs[0] * product.programs[1] >= 200, product


def test_codes_are_widened_without_slow_conversions(launches: list[Compiled]) -> None:
    for product in launches:
        if product.kernel == "_quantized_kernel" and "float32" not in product.case:
            if "gated" not in product.case:  # those round their sums, once, on their way to the activation
                assert not product.count("F2F."), product
            assert not product.count("I2F.S"), product
            assert not product.count("I2F.U8"), product


if __name__ == "__main__":
    tell(calls())
