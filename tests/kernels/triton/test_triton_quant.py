"""Quantised weights and their products, against float64."""

from __future__ import annotations

from typing import get_args

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.core.errors import ConfigError, WeightError
from octavo.kernels.interface import Activation
from octavo.kernels.triton.backend import TritonKernels
from octavo.kernels.triton.elementwise import activate
from octavo.kernels.triton.quant import TritonQuantizedLinear, quantize, quantized_gated, quantized_matmul
from tests.kernels.torch_facade import of_torch

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [("int8", None), ("fp8", None), ("int4", 128), ("int4", 32)]
#: Where kinds differ only in how codes are read, which other tests say: by default some of the kinds, with rows.
QUICK = [("int4", 32, 1), ("int8", None, 17)]
ONE_KIND = [("int4", 32), *(pytest.param(*kind, marks=pytest.mark.slow) for kind in KINDS[:-1])]
seeds = st.integers(0, 2**31)


def dequantized(packed: TritonQuantizedLinear) -> Tensor:
    """The values, float32 [N, K]."""
    if packed.kind == "int4":
        codes = torch.cat([(packed.codes >> shift & 15) - 8 for shift in (0, 4, 8, 12)], dim=2)
    else:
        codes = packed.codes.view(torch.int8).unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        codes = codes if packed.kind == "int8" else codes.view(torch.float8_e4m3fn)
    weight = codes.float().transpose(0, 1).flatten(1)
    scales = packed.scales.t()[:, :, None] if packed.group else packed.scales[:, None, None]
    weight = (weight.view(weight.shape[0], scales.shape[1], -1) * scales).flatten(1)
    return weight[: packed.outputs, : packed.inputs]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize(("kind", "bits", "most"), [("int8", 8, 0.5), ("fp8", 8, None)])
def test_codes_of_8_bits_are_the_nearest(kind: str, bits: int, most: float | None) -> None:
    weight = randn(70, 300)
    packed = quantize(weight, kind)
    error = (dequantized(packed) - weight).abs()
    scales = packed.scales[:70, None]
    if most is not None:
        assert bool((error <= scales * most * 1.0001).all())
    else:  # e4m3: 3 bits after the first, down to 2 ** -6; below, steps of 2 ** -9
        assert bool((error <= torch.maximum(weight.abs() * 2**-4, scales * 2**-10) * 1.0001).all())
    assert torch.equal(dequantized(packed).abs().amax(1).sign(), torch.ones(70, device=DEVICE))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 200), st.integers(1, 12), st.sampled_from([None, 32]), seeds)
def test_int4_is_no_worse_than_rounding_to_the_extreme(rows: int, groups: int, group: int | None, seed: int) -> None:
    weight = randn(rows, 32 * groups, seed=seed)
    packed = quantize(weight, "int4", group=group)
    assert packed.group == (group or (128 if groups % 4 == 0 else 32))
    groups_of = weight.view(rows, -1, packed.group)
    scale = groups_of.abs().amax(2, keepdim=True) / 7
    plain = ((groups_of / scale).round() * scale - groups_of).square().sum(2)
    ours = (dequantized(packed).view_as(groups_of) - groups_of).square().sum(2)
    assert bool((ours <= plain * 1.001).all())


def test_rows_that_are_quantised_in_parts_are_as_those_quantised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(300, 256)
    whole = {kind: dequantized(quantize(weight, kind)) for kind in ("int8", "int4", "fp8")}
    monkeypatch.setattr("octavo.kernels.triton.quant._AT_ONCE", 1)
    for kind, expected in whole.items():
        assert torch.equal(dequantized(quantize(weight, kind)), expected)


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_zeros_and_tiny_weights(kind: str, group: int | None) -> None:
    weight = randn(3, 128)
    weight[0] = 0
    weight[1] *= 1e-36
    out = dequantized(quantize(weight, kind, group=group))
    assert torch.equal(out[:2], torch.zeros(2, 128, device=DEVICE))
    assert float((out[2] - weight[2]).norm() / weight[2].norm()) < 0.2


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_no_number_is_refused(kind: str, group: int | None, bad: float) -> None:
    weight = randn(3, 128)
    weight[1, 70] = bad
    with pytest.raises(WeightError, match="infinite"):
        quantize(weight, kind, group=group)


@pytest.mark.parametrize(
    ("kind", "group", "inputs"), [("int5", None, 128), ("int8", 32, 128), ("int4", 64, 128), ("int4", 128, 96)]
)
def test_unknown_kinds_and_groups_are_refused(kind: str, group: int | None, inputs: int) -> None:
    with pytest.raises(ConfigError, match="int4"):
        quantize(randn(3, inputs), kind, group=group)


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from([0, 1, 5, 16, 17, 64, 65, 130]),
    st.sampled_from([1, 100, 128, 129]),
    st.sampled_from([32, 96, 128, 320, 640]),
    st.sampled_from(["int8", "int4", "fp8"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_products(
    rows: int,
    columns: int,
    depth: int,
    kind: str,
    dtype: torch.dtype,
    has_bias: bool,
    has_residual: bool,
    seed: int,
) -> None:
    x = randn(rows, depth + 8, dtype=dtype, seed=seed)
    x[:, depth:] = float("nan")  # not x's: nothing may come of it
    x = x[:, :depth]
    bias = randn(columns, dtype=dtype, seed=seed + 2) if has_bias else None
    residual = randn(rows, columns, seed=seed + 3) if has_residual else None
    packed = quantize(randn(columns, depth, dtype=dtype, seed=seed + 1), kind, bias)
    weight = dequantized(packed).double()
    expected = x.double() @ weight.T
    expected += 0 if bias is None else bias.double()
    expected += 0 if residual is None else residual.double()
    bound = x.double().abs() @ weight.abs().T * 1e-6 + 1e-6
    for deterministic in (True, False):
        start = None if residual is None else residual.clone()
        out = quantized_matmul(x, packed, torch.float32, start, deterministic=deterministic)
        assert out.dtype == torch.float32
        assert bool(((out - expected).abs() <= bound).all())
    if residual is None:
        assert torch.equal(quantized_matmul(x, packed, deterministic=False), out.to(dtype))
    assert not packed.arrivals.any()


@pytest.mark.parametrize(("kind", "group"), ONE_KIND)
def test_a_row_of_a_product_does_not_depend_on_the_others(kind: str, group: int | None) -> None:
    x, packed = randn(80, 640, dtype=torch.bfloat16), quantize(randn(70, 640, seed=1), kind, group=group)
    whole = quantized_matmul(x, packed, torch.float32)
    for first, last in ((0, 1), (79, 80), (33, 34), (3, 75)):
        assert torch.equal(quantized_matmul(x[first:last], packed, torch.float32), whole[first:last])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="too large for Triton's interpreter")
@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("columns", [2048, 6144, 28672])
def test_large_products(kind: str, group: int | None, columns: int) -> None:
    x = randn(2000, 4096, dtype=torch.bfloat16)
    packed = quantize(randn(columns, 4096, seed=1) / 64, kind, group=group)
    weight = dequantized(packed).double()
    expected, bound = x.double() @ weight.T, x.double().abs() @ weight.abs().T * 1e-6 + 1e-6
    whole = quantized_matmul(x, packed, torch.float32)
    assert bool(((whole - expected).abs() <= bound).all())
    for first, last in ((0, 1), (1999, 2000), (77, 78), (3, 67), (1000, 1500)):
        some = quantized_matmul(x[first:last], packed, torch.float32)
        assert torch.equal(some, whole[first:last])
        fast = quantized_matmul(x[first:last], packed, torch.float32, deterministic=False)
        assert bool(((fast - expected[first:last]).abs() <= bound[first:last]).all())
        for _ in range(50):  # programs meet in another order each time
            assert torch.equal(quantized_matmul(x[first:last], packed, torch.float32), some)


@pytest.mark.parametrize(("kind", "group"), ONE_KIND)
def test_pieces_that_meet_in_memory_and_in_one_program_give_the_same_bits(
    kind: str, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, packed = randn(5, 896, dtype=torch.bfloat16), quantize(randn(140, 896, seed=1), kind, group=group)
    met = quantized_matmul(x, packed, torch.float32)
    monkeypatch.setattr("octavo.kernels.triton.matmul._MOST_SPLIT_PROGRAMS", 0)
    assert torch.equal(quantized_matmul(x, packed, torch.float32), met)


@pytest.mark.parametrize(
    ("kind", "group", "rows", "dtype", "most_programs"),
    [
        pytest.param(*kind, *case, marks=[] if (*kind, case[0]) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for case in ((1, torch.bfloat16, 1024), (17, torch.float16, 0))
    ],
)
def test_a_gated_product_has_the_bits_of_product_and_activation(
    kind: str, group: int | None, rows: int, dtype: torch.dtype, most_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.kernels.triton.matmul._MOST_SPLIT_PROGRAMS", most_programs)
    inputs = 544 if group == 32 else 640
    x, bias = randn(rows, inputs, dtype=dtype), randn(256, dtype=dtype, seed=2)
    packed = quantize(randn(256, inputs, seed=1) / 23, kind, bias, group=group)
    for deterministic in (True, False):
        product = quantized_matmul(x, packed, deterministic=deterministic)
        for name in get_args(Activation)[: None if deterministic else 1]:
            together = quantized_gated(x, packed, name, deterministic=deterministic)
            assert torch.equal(together, activate(product, name, gated=True))
    assert not packed.arrivals.any()


@pytest.mark.parametrize("inner", [64, 100])
@pytest.mark.parametrize("quantization", ["int8", None])
@pytest.mark.parametrize("activation", ["silu", pytest.param("gelu_tanh", marks=pytest.mark.slow)])
def test_the_backend_gates_products_of_any_width(inner: int, quantization: str | None, activation: Activation) -> None:
    """And a row to which 0 is added keeps its bits."""
    kernels = of_torch(TritonKernels(DEVICE, deterministic=True))
    x, weight = randn(2, 96, dtype=torch.bfloat16), randn(2 * inner, 96, dtype=torch.bfloat16, seed=1) / 10
    plain = kernels.pack([weight], quantization=quantization)
    gated = kernels.pack(weight.chunk(2), quantization=quantization, gated=True)
    apart = activate(plain(x), activation, gated=True)
    assert torch.equal(gated(x, activation=activation), apart)
    assert gated(x[:0], activation=activation).shape == (0, inner)
    add = randn(2, 2 * inner, seed=2)
    add[1] = 0
    assert torch.equal(plain(x, torch.bfloat16, add)[1], plain(x)[1])
    added = gated(x, None, add, activation)
    assert torch.equal(added[1], apart[1]) and not torch.equal(added[0], apart[0])
    assert torch.equal(added, activate(plain(x, torch.bfloat16, add), activation, gated=True))
    assert torch.equal(plain(x, activation=activation), activate(plain(x), activation, gated=False))


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_is_widened_exactly(kind: str, dtype: torch.dtype) -> None:
    """Products with rows of the identity give back the codes."""
    places = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)[:, places].contiguous()
    if kind == "int8":
        values = codes.view(torch.int8).float().clamp(-127, 127)
    elif kind == "int4":
        values = (codes % 16).float() - 8
    else:
        values = codes.view(torch.float8_e4m3fn).float().nan_to_num(448.0)
    weight = values.to(DEVICE)
    packed = quantize(weight, kind)
    identity = torch.eye(128, dtype=dtype, device=DEVICE)
    assert torch.equal(quantized_matmul(identity, packed, torch.float32), dequantized(packed).T)
    assert torch.allclose(dequantized(packed), weight, rtol=0, atol=0.02 if kind == "int4" else 1e-4)
