"""Norms, activations and the deterministic product, against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.interface import Activation
from octavo.kernels.triton import matmul
from octavo.kernels.triton.elementwise import activate, rms_norm

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)
#: Relative error of rounding once to a type, and that of a few float32 operations.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5}

#: In float64.
ACTIVATIONS: dict[Activation, Callable[..., Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "swiglu_oai": lambda x: x.clamp(max=7) * torch.sigmoid(1.702 * x.clamp(max=7)),
    "relu2": lambda x: F.relu(x).square(),
}

few = settings(max_examples=8, deadline=None)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def assert_near(actual: Tensor, expected: Tensor, small: float = 1e-6) -> None:
    """Within one rounding to the actual type; ``small`` in absolute terms."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs()
    assert bool((error <= ROUNDING[actual.dtype] * expected.abs() + small).all()), error.max()


@few
@given(st.integers(0, 40), st.integers(1, 700), dtypes, dtypes, seeds)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, out_dtype: torch.dtype, seed: int) -> None:
    x, weight = randn(rows, width, dtype=dtype, seed=seed), randn(width, dtype=out_dtype, seed=seed + 1)
    expected = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    normed = rms_norm(x, weight, 1e-5)
    assert normed.dtype == out_dtype
    assert_near(normed, expected)
    if rows:  # a row's norm does not depend on the others
        assert torch.equal(rms_norm(x[rows // 2 : rows // 2 + 1], weight, 1e-5)[0], normed[rows // 2])


@few
@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 9), st.sampled_from([8, 40, 64, 128]), seeds)
def test_rms_norm_of_heads_that_are_strided(tokens: int, before: int, heads: int, head_dim: int, seed: int) -> None:
    qkv = randn(tokens, before + heads, head_dim, dtype=torch.bfloat16, seed=seed)
    weight = randn(head_dim, dtype=torch.bfloat16, seed=seed + 1)
    x = qkv[:, before:]
    assert_near(rms_norm(x, weight, 1e-6), F.rms_norm(x.double(), (head_dim,), weight.double(), 1e-6))


@pytest.mark.filterwarnings("ignore:overflow encountered")
@few
@given(st.integers(0, 9), st.integers(1, 1500), dtypes, st.sampled_from(list(ACTIVATIONS)), st.booleans(), seeds)
def test_activations(rows: int, inner: int, dtype: torch.dtype, activation: Activation, gated: bool, seed: int) -> None:
    columns = 2 * inner if gated else inner
    x = randn(rows, columns + 3, dtype=dtype, seed=seed, scale=3)[:, :columns]
    up = x[:, inner:].double() if gated else torch.ones(())
    if gated and activation == "swiglu_oai":
        up = up.clamp(-7, 7) + 1
    expected = ACTIVATIONS[activation](x[:, :inner].double()) * up
    assert_near(activate(x, activation, gated=gated), expected, 1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("activation", sorted({*ACTIVATIONS} - {"relu2"}))  # whose squares are beyond float32
def test_activations_of_great_magnitudes_are_finite(activation: Activation) -> None:
    x = torch.tensor([[-1e20, -300.0, 300.0, 1e20, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    expected = torch.tensor([[0.0, 0.0, 300.0, 1e20]], device=DEVICE)
    if activation == "swiglu_oai":  # of gates of 7, times 1 + up
        expected = 2 * expected.clamp(max=7.0)
    torch.testing.assert_close(activate(x, activation, gated=True), expected, atol=0, rtol=1e-5)


def product_bound(x: Tensor, weight: Tensor) -> Tensor:
    """How far sums in float32 may be from the truth."""
    return x.double().abs() @ weight.double().abs().T * 1e-6 + 1e-6


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from([0, 1, 3, 64, 65, 127, 129]),
    st.sampled_from([1, 63, 64, 128, 130, 200]),
    st.sampled_from([1, 31, 64, 100, 256, 640]),
    dtypes,
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_matmul(
    rows: int, columns: int, depth: int, dtype: torch.dtype, has_bias: bool, has_residual: bool, seed: int
) -> None:
    x = randn(rows, depth + 8, dtype=dtype, seed=seed)
    x[:, depth:] = float("nan")  # not x's: nothing may come of it
    x = x[:, :depth]
    weight = randn(columns, depth, dtype=dtype, seed=seed + 1)
    bias = randn(columns, dtype=dtype, seed=seed + 2) if has_bias else None
    residual = randn(rows, columns, seed=seed + 3) if has_residual else None
    expected = x.double() @ weight.double().T
    expected += 0 if bias is None else bias.double()
    expected += 0 if residual is None else residual.double()
    out = matmul.matmul(x, weight, bias, torch.float32, residual)
    assert out.dtype == torch.float32
    assert bool(((out - expected).abs() <= product_bound(x, weight)).all())
    if residual is None:
        assert torch.equal(matmul.matmul(x, weight, bias), out.to(dtype))


@pytest.mark.parametrize("dtype", [DTYPES[-1], *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[:-1])])
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight = randn(140, 520, dtype=dtype), randn(70, 520, dtype=dtype, seed=1)
    whole = matmul.matmul(x, weight, out_dtype=torch.float32)
    for first, last in ((0, 1), (139, 140), (77, 78), (3, 20)):
        assert torch.equal(matmul.matmul(x[first:last], weight, out_dtype=torch.float32), whole[first:last])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="too large for Triton's interpreter")
@pytest.mark.parametrize("columns", [2048, 6144, 28672])
def test_a_row_of_a_large_product_does_not_depend_on_the_others(columns: int) -> None:
    x = randn(3000, 4096, dtype=torch.bfloat16)
    weight = randn(columns, 4096, dtype=torch.bfloat16, seed=1, scale=1 / 64)
    whole = matmul.matmul(x, weight, out_dtype=torch.float32)
    assert bool(((whole - x.double() @ weight.double().T).abs() <= product_bound(x, weight)).all())
    for first, last in ((0, 1), (2999, 3000), (77, 78), (3, 67), (1000, 1500)):
        assert torch.equal(matmul.matmul(x[first:last], weight, out_dtype=torch.float32), whole[first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_that_meet_in_memory_and_in_one_program_give_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = randn(5, 800, dtype=dtype), randn(70, 800, dtype=dtype, seed=1), randn(70, dtype=dtype)
    residual = randn(5, 70, seed=2)
    met = matmul.matmul(x, weight, bias, torch.float32, residual.clone())
    assert matmul.pieces_of(1, 800, 64)[0] > 1
    monkeypatch.setattr(matmul, "_MOST_SPLIT_PROGRAMS", 0)
    assert torch.equal(matmul.matmul(x, weight, bias, torch.float32, residual.clone()), met)


@given(st.integers(1, 2000), st.integers(1, 30000), st.sampled_from([32, 64, 128]))
def test_pieces_cover_k_without_an_empty_one(tile_count: int, depth: int, block: int) -> None:
    pieces, length = matmul.pieces_of(tile_count, depth, block)
    assert (pieces - 1) * length * block < depth <= pieces * length * block
