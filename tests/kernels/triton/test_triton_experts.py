"""Grouped products of experts, against float64; the order of their sums."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import gguf
import numpy as np
import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.kernels.interface import PackedExperts, RoutingSpec
from octavo.kernels.torch_backend import PlainExperts
from octavo.kernels.triton.backend import TritonKernels
from octavo.kernels.triton.experts import sort_pairs
from octavo.kernels.weight_rows import GGUFRows
from tests.kernels.test_cpu_experts import in_float64, matrices, pack, rows, run
from tests.kernels.torch_facade import of_torch
from tests.torch_types import engine_dtype

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def make(gate_up: list[Tensor], down: list[Tensor], shared: int = 0, **options: Any) -> PackedExperts:
    kernels = of_torch(TritonKernels(DEVICE, deterministic=True))
    return kernels.pack_experts(*pack(kernels, on_device(gate_up), on_device(down), **options), shared)


def test_weights_may_be_factors_of_the_inputs() -> None:
    gate_up, down = matrices(40, [24] * 5)
    arguments = x, chosen, weights, add = rows(9, 40, 5, 2)
    kernels = of_torch(TritonKernels(DEVICE, deterministic=True))
    packed = pack(kernels, on_device(gate_up), on_device(down))
    expected = add.double()
    for slot in range(2):
        scaled = x * weights[:, slot, None]
        expected += in_float64(scaled, chosen[:, slot, None], torch.ones(9, 1), torch.zeros(9, 40), gate_up, down)
    found = run(kernels.pack_experts(*packed, weighs_input=True), on_device(arguments))
    torch.testing.assert_close(found.cpu().double(), expected, atol=1e-5, rtol=0)


def test_pairs_are_sorted_into_tiles_of_one_expert() -> None:
    chosen = torch.tensor([[2, 0], [0, 3], [3, 0]], device=DEVICE)
    pairs, experts = sort_pairs(chosen, 4, 2)
    assert pairs.tolist() == [1, 2, 5, 6, 0, 6, 3, 4, 6, 6]
    assert experts.tolist() == [0, 0, 2, 3, -1]


@pytest.mark.parametrize(
    ("dtype", "hidden", "inner"),
    [
        (torch.float32, 40, 24),
        (torch.bfloat16, 40, 24),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((torch.bfloat16, 136, 72), (torch.float16, 40, 24))),
    ],
)
def test_experts_against_float64(dtype: torch.dtype, hidden: int, inner: int) -> None:
    count, slots = 5, 2
    gate_up, down = matrices(hidden, [inner] * (count - 1) + [2 * inner + 8], dtype)
    arguments = rows(33, hidden, count - 1, slots, dtype)
    x, chosen, weights, add = arguments
    # The last expert is shared.
    arguments[1] = chosen = torch.cat((chosen, torch.full((33, 1), count - 1, dtype=torch.int32)), 1)
    arguments[2] = weights = torch.cat((weights, weights.sum(1, keepdim=True)), 1)
    expected = in_float64(x, chosen, weights, add, gate_up, down)
    near = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    found = run(make(gate_up, down, shared=1), on_device(arguments))
    torch.testing.assert_close(found.cpu().double(), expected, atol=near, rtol=0)


def test_experts_with_biases_and_a_clamped_activation() -> None:
    kernels = of_torch(TritonKernels(DEVICE, deterministic=True))
    gate_up, down = map(on_device, matrices(40, [24] * 4))
    biases = [torch.linspace(-20, 20, 48, device=DEVICE).roll(5 * i) for i in range(4)]
    packed = [kernels.pack(pair[0].chunk(2), pair[1], gated=True) for pair in zip(gate_up, biases, strict=True)]
    packed_down = [kernels.pack([matrix]) for matrix in down]
    arguments = on_device(rows(21, 40, 4, 2))
    found = run(kernels.pack_experts(packed, packed_down, activation="swiglu_oai"), arguments)
    expected = run(PlainExperts(packed, packed_down, "swiglu_oai"), arguments)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_experts_without_gates() -> None:
    kernels = of_torch(TritonKernels(DEVICE, deterministic=True))
    up, down = map(on_device, matrices(40, [24] * 4))
    packed = [kernels.pack([matrix[:24]]) for matrix in up]
    packed_down = [kernels.pack([matrix]) for matrix in down]
    arguments = on_device(rows(21, 40, 4, 2))
    found = run(kernels.pack_experts(packed, packed_down, activation="relu2"), arguments)
    torch.testing.assert_close(found, run(PlainExperts(packed, packed_down, "relu2"), arguments), atol=1e-5, rtol=1e-5)


def test_rows_are_rounded_to_the_type_of_the_matrices() -> None:
    """Networks without a norm before the experts give them the residual stream, float32."""
    packed = make(*matrices(72, [40] * 3, torch.bfloat16))
    x, chosen, weights, add = on_device(rows(9, 72, 3, 2))
    found = packed(x, chosen, weights, add.clone())
    assert torch.equal(found, packed(x.to(torch.bfloat16), chosen, weights, add.clone()))


def test_a_row_does_not_depend_on_the_others() -> None:
    packed = make(*matrices(72, [40] * 3, torch.bfloat16))
    arguments = on_device(rows(40, 72, 3, 2, torch.bfloat16))
    together = run(packed, arguments)
    for first, last in ((0, 1), (39, 40), (20, 31)):
        assert torch.equal(run(packed, arguments, slice(first, last)), together[first:last])
    x, chosen, weights, add = arguments
    assert torch.equal(packed(x, chosen.flip(1), weights.flip(1), add.clone()), together)  # nor on the order of slots


def test_experts_that_no_row_chose_are_not_touched() -> None:
    gate_up, down = matrices(48, [32] * 6)
    arguments = on_device(rows(9, 48, 3, 2))
    expected = run(make(gate_up, down), arguments)
    for unused in (*gate_up[3:], *down[3:]):
        unused.fill_(float("nan"))
    assert torch.equal(run(make(gate_up, down), arguments), expected)


def test_routing_is_that_of_the_reference() -> None:
    logits = torch.randn(9, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    experts, weights = TritonKernels(DEVICE).route(logits, RoutingSpec(3, renormalize=True))
    assert experts.tolist() == logits.topk(3).indices.tolist()
    torch.testing.assert_close(weights, logits.topk(3).values.softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_mxfp4_are_those_of_their_values(dtype: torch.dtype) -> None:
    """Apart from the order of sums; the inputs are no multiple of a step. A row's bits do not depend on the others."""
    hidden, inner, random = 96, 32, np.random.default_rng(0)
    kernels = of_torch(TritonKernels(DEVICE, deterministic=True))

    def blocks(rows: int, columns: int) -> GGUFRows:
        values = random.standard_normal((rows, columns)).astype(np.float32)
        return GGUFRows("MXFP4", gguf.quants.quantize(values, gguf.GGMLQuantizationType.MXFP4), columns, 32)

    gate_up = [[blocks(inner, hidden), blocks(inner, hidden)] for _ in range(3)]
    down = [blocks(hidden, inner) for _ in range(3)]
    own: Any = TritonKernels(DEVICE, deterministic=True)
    assert all(map(own.has_products, down))
    number = engine_dtype(dtype)
    bias = random.standard_normal((3, 2 * inner)).astype(np.float32)
    results = []
    for values_of in (lambda part: part, lambda part: part.dequantize()):
        first = [
            own.pack([*map(values_of, parts)], one, dtype=number, gated=True)
            for parts, one in zip(gate_up, bias, strict=True)
        ]
        second = [own.pack([values_of(part)], dtype=number) for part in down]
        experts = kernels.pack_experts(first, second, activation="swiglu_oai")
        x, chosen, weights, add = on_device(rows(20, hidden, 3, 2, dtype))
        results.append(
            (experts(x, chosen, weights, add.clone()), first[0](x, activation="silu"), second[0](x[:, :inner]))
        )
        one = slice(7, 8)
        assert torch.equal(experts(x[one], chosen[one], weights[one], add[one].clone()), results[-1][0][one])
    for ours, theirs in zip(*results, strict=True):
        near = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near * float(theirs.abs().max()))
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2])


def test_experts_that_are_quantised_otherwise_are_refused() -> None:
    with pytest.raises(ConfigError, match="products of experts of MXFP4, and of none that are quantised otherwise"):
        make(*matrices(64, [64] * 2), quantization="int8")
