"""The pointwise CPU kernels against float64, and a row's result against the same row among others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.backends import cpu_settings

_cpu: Any = pytest.importorskip("octavo._cpu")

DTYPES = {torch.float32: _cpu.Dtype.f32, torch.bfloat16: _cpu.Dtype.bf16}
#: Relative error of a result: a few float32 operations, or one rounding to bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}

dtypes = st.sampled_from(list(DTYPES))
seeds = st.integers(0, 2**31)
row_counts = st.integers(0, 9)
widths = st.one_of(st.integers(1, 70), st.sampled_from([128, 576, 1000]))


@pytest.fixture(params=_cpu.available_isas().floats, autouse=True, scope="module")
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    with cpu_settings(isa=request.param):
        yield


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, size: Tensor | float | None = None) -> None:
    """Within the rounding of actual's type, relative to the expected value, or to ``size`` where terms cancel."""
    limit = TOLERANCE[actual.dtype] * (expected.abs() if size is None else size) + 1e-37
    error = (actual.double() - expected).abs()
    assert not error.isnan().any() and bool((error <= limit).all()), float((error / limit).max())


def run(op: Any, tokens: int, **arrays: Tensor) -> None:
    op.run(_cpu.Step(tokens, **{name: array.data_ptr() for name, array in arrays.items()}))


# --- norms ----------------------------------------------------------------------------------------------------------


def norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, layer: bool) -> Tensor:
    x = x.double()
    if layer:
        x = x - x.mean(-1, keepdim=True)
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()
    return normed if bias is None else normed + bias.double()


@settings(max_examples=60, deadline=None)
@given(row_counts, st.integers(1, 3), widths, dtypes, dtypes, dtypes, st.booleans(), st.booleans(), seeds)
def test_norms_of_strided_heads(
    tokens: int,
    heads: int,
    width: int,
    x_type: torch.dtype,
    w_type: torch.dtype,
    out_type: torch.dtype,
    layer: bool,
    biased: bool,
    seed: int,
) -> None:
    rows = randn(seed, tokens, heads + 2, width, dtype=x_type, scale=3.0)
    x = rows[:, 1 : heads + 1]
    weight, bias = randn(seed + 1, width, dtype=w_type), randn(seed + 2, width, dtype=w_type)
    out = torch.empty(tokens, heads, width, dtype=out_type)
    common = (
        DTYPES[w_type],
        out.data_ptr(),
        DTYPES[out_type],
        width,
        1e-5,
        heads,
        width,
    )
    start = (x.data_ptr(), DTYPES[x_type], (heads + 2) * width, weight.data_ptr())
    has_bias = layer and biased
    op = _cpu.layer_norm(*start, bias.data_ptr() if biased else 0, *common) if layer else _cpu.rms_norm(*start, *common)
    run(op, tokens)
    expected = norm_reference(x, weight, bias if has_bias else None, 1e-5, layer=layer)
    # Subtracting a mean loses bits that the mean had: errors are relative to the terms.
    size = expected.abs() + (weight.double().abs() * 4 + (bias.double().abs() if has_bias else 0) if layer else 0)
    if layer and width < 8:
        size = size * 50  # a few values close to each other: their mean cancels nearly all of them
    assert_near(out, expected, size)


def test_norm_in_place_writes_only_its_heads() -> None:
    rows = randn(0, 5, 4, 24, dtype=torch.bfloat16)
    before, weight = rows.clone(), randn(1, 24)
    x = rows[:, 1:3]
    op = _cpu.rms_norm(
        x.data_ptr(), _cpu.Dtype.bf16, 96, weight.data_ptr(), _cpu.Dtype.f32, x.data_ptr(), _cpu.Dtype.bf16,
        24, 1e-6, 2, 24, 96, 24,
    )  # fmt: skip
    run(op, 5)
    assert_near(x, norm_reference(before[:, 1:3], weight, None, 1e-6, layer=False))
    assert torch.equal(rows[:, 0], before[:, 0]) and torch.equal(rows[:, 3], before[:, 3])


# --- activations ----------------------------------------------------------------------------------------------------


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return x * torch.special.erfc(-x / math.sqrt(2)) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    # 1 + tanh(u) = 2 / (1 + e^-2u), which does not cancel where x is far below zero.
    return x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": torch.relu,
    "swiglu_oai": lambda x: x.clamp(max=7) / (1 + torch.exp(-1.702 * x.clamp(max=7))),
    "relu2": lambda x: torch.relu(x).square(),
}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(ACTIVATIONS)), st.booleans(), row_counts, widths, dtypes, st.integers(0, 5), seeds)
def test_activations(name: str, gated: bool, tokens: int, width: int, dtype: torch.dtype, gap: int, seed: int) -> None:
    x = randn(seed, tokens, width * (1 + gated) + gap, dtype=dtype, scale=3.0)
    out = torch.empty(tokens, width, dtype=dtype)
    activation = getattr(_cpu.Activation, name)
    run(_cpu.activate(x.data_ptr(), x.stride(0), out.data_ptr(), width, DTYPES[dtype], activation, gated), tokens)
    gate = x[:, :width].double()
    up = x[:, width : 2 * width].double() if gated else torch.ones(())
    if gated and name == "swiglu_oai":
        up = up.clamp(-7, 7) + 1
    expected = ACTIVATIONS[name](gate) * up
    # The exponent of e^-u carries the rounding of u, and where it overflows little is left of the result.
    size = expected.abs() * (1 + (2 * gate * gate if name != "silu" else gate.abs())) + 1e-30
    assert_near(out, expected, size + (1e-8 / TOLERANCE[dtype] * up.abs() if name == "gelu" else 0))


def test_gelu_is_that_of_float64() -> None:
    x = torch.cat([torch.linspace(-14, 14, 200_001), -torch.logspace(-20, 1, 1000), torch.logspace(-20, 1, 1000)])
    out = torch.empty_like(x)
    run(_cpu.activate(x.data_ptr(), 0, out.data_ptr(), len(x), _cpu.Dtype.f32, _cpu.Activation.gelu), 1)
    expected = gelu(x.double())
    error = (out.double() - expected).abs()
    assert float((error / expected.abs().clamp(min=1e-300))[x > -2].nan_to_num().max()) < 5e-7
    assert float((error / expected.abs())[(x <= -2) & (x > -3)].max()) < 1.5e-6
    assert float(error[x <= -3].max()) < 1e-8


@pytest.mark.parametrize("name", sorted({*ACTIVATIONS} - {"relu2"}))  # whose squares are beyond float32
def test_activations_of_extreme_values(name: str) -> None:
    infinity = float("inf")
    x = torch.tensor([0.0, -0.0, 1e-30, 3e38, infinity, -200.0, -1e4, -3e38, float("nan"), 88.0, -88.0])
    out = torch.empty_like(x)
    activation = getattr(_cpu.Activation, name)
    run(_cpu.activate(x.data_ptr(), 11, out.data_ptr(), 11, _cpu.Dtype.f32, activation), 1)
    greatest = 7.0 if name == "swiglu_oai" else infinity
    clamped = min(greatest, 88.0)
    np.testing.assert_allclose(out[[0, 1, 2, 9]], [0.0, 0.0, 1e-30 if name == "relu" else 5e-31, clamped], rtol=1e-5)
    assert out[8].isnan()
    assert bool((out[5:8].abs() < 1e-30).all()) and abs(float(out[10])) < 1e-30
    assert out[[3, 4]].tolist() == pytest.approx([min(greatest, 3e38), greatest], rel=1e-5)


# --- embedding, rotary ----------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(row_counts, widths, dtypes, dtypes, seeds)
def test_embedding(tokens: int, width: int, dtype: torch.dtype, out_type: torch.dtype, seed: int) -> None:
    table = randn(seed, 11, width, dtype=dtype)
    ids = torch.randint(11, (tokens,), generator=torch.Generator().manual_seed(seed))
    out = torch.empty(tokens, width, dtype=out_type)
    run(
        _cpu.embedding(table.data_ptr(), len(table), width, out.data_ptr(), DTYPES[dtype], DTYPES[out_type]),
        tokens,
        token_ids=ids,
    )
    assert torch.equal(out, table[ids].to(out_type))


@settings(max_examples=60, deadline=None)
@given(row_counts, st.integers(1, 5), st.integers(1, 3), st.integers(1, 20), st.integers(0, 20), dtypes, seeds)
def test_rotary(tokens: int, heads: int, kv_heads: int, half: int, rest: int, dtype: torch.dtype, seed: int) -> None:
    head_dim = 2 * half + rest
    qkv = randn(seed, tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    before = qkv.double()
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    positions = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(seed))
    cos_sin = randn(seed + 1, 50, 2 * half)
    stride = qkv.stride(0)
    op = _cpu.rotary(
        q.data_ptr(),
        stride,
        k.data_ptr(),
        stride,
        heads,
        kv_heads,
        head_dim,
        2 * half,
        cos_sin.data_ptr(),
        DTYPES[dtype],
    )
    run(op, tokens, positions=positions)
    cos, sin = cos_sin[positions].double()[:, None].chunk(2, dim=-1)
    first, second, still = before[:, : heads + kv_heads].split([half, half, rest], dim=-1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin, still), dim=-1)
    terms = torch.cat(
        ((first * cos).abs() + (second * sin).abs(), (second * cos).abs() + (first * sin).abs(), still.abs()), dim=-1
    )
    rotated = qkv[:, : heads + kv_heads]
    assert_near(rotated, expected, expected.abs() + 2**-16 * terms if dtype == torch.bfloat16 else terms)
    assert torch.equal(rotated[..., 2 * half :].double(), still)
    assert torch.equal(v.double(), before[:, heads + kv_heads :])


@settings(max_examples=60, deadline=None)
@given(
    row_counts,
    st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any),
    st.integers(1, 4),
    st.booleans(),
    dtypes,
    seeds,
)
def test_rotary_sections_turn_as_whole_heads_of_each_position(
    tokens: int, sections: list[int], axes: int, equal: bool, dtype: torch.dtype, seed: int
) -> None:
    """Bit for bit: the pairs of a section are those of a head that is rotated by the position of its axis alone."""
    heads, kv_heads, half = 3, 2, sum(sections)
    positions = torch.randint(50, (axes, tokens), generator=torch.Generator().manual_seed(seed))
    if equal:
        positions[:] = positions[:1].clone()
    cos_sin = randn(seed + 1, 50, 2 * half)

    def rotated(positions: Tensor, sections: list[int]) -> Tensor:
        qkv = randn(seed, tokens, heads + kv_heads, 2 * half, dtype=dtype)
        q, k = qkv.split([heads, kv_heads], dim=1)
        sizes = heads, kv_heads, 2 * half, 2 * half
        both = q.data_ptr(), qkv.stride(0), k.data_ptr(), qkv.stride(0)
        op = _cpu.rotary(*both, *sizes, cos_sin.data_ptr(), DTYPES[dtype], sections=sections, axes=axes)
        if sections:
            op.run(_cpu.Step(tokens, rotary_positions=positions.data_ptr(), rotary_stride=positions.stride(0)))
        else:
            run(op, tokens, positions=positions)
        return qkv.unflatten(2, (2, half))

    whole = [rotated(axis.contiguous(), []).split(sections, dim=3) for axis in positions]
    parts = [whole[i % axes][i] for i in range(len(sections))]
    assert torch.equal(rotated(positions, sections), torch.cat(parts, dim=3))


def test_rotary_refuses_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="even, from 0 to head_dim"):
        _cpu.rotary(0, 0, 0, 0, 1, 1, 8, 3, 0, _cpu.Dtype.f32)
    for sections in ([2, 1], [5, -1], [1, 1, 1, 1, 0]):
        with pytest.raises(ValueError, match="rotary sections"):
            _cpu.rotary(0, 0, 0, 0, 1, 1, 8, 8, 0, _cpu.Dtype.f32, sections=sections)


# --- logits ---------------------------------------------------------------------------------------------------------


def argmax(logits: Tensor) -> list[int]:
    out = torch.empty(len(logits), dtype=torch.int64)
    _cpu.argmax(logits.data_ptr(), *logits.shape, out.data_ptr())
    return out.tolist()


@settings(max_examples=60, deadline=None)
@given(row_counts, widths, st.integers(1, 4), seeds)
def test_argmax_takes_the_first_of_equals(rows: int, width: int, values: int, seed: int) -> None:
    logits = torch.randint(-values, 1, (rows, width), generator=torch.Generator().manual_seed(seed)).float()
    assert argmax(logits) == [int(np.argmax(row.numpy())) for row in logits]


@pytest.mark.parametrize("width", [1, 7, 16, 50])
def test_argmax_of_unusual_rows(width: int) -> None:
    for place in {0, width // 2, width - 1}:
        row = torch.zeros(1, width)
        row[0, place] = float("nan")
        assert argmax(row) == [-1]
        row = torch.full((1, width), -float("inf"))
        assert argmax(row) == [0]
        row[0, place] = -1e30
        assert argmax(row) == [place]


@settings(max_examples=40, deadline=None)
@given(row_counts, widths, st.sampled_from([0.1, 3.0, 40.0]), seeds)
def test_logsumexp(rows: int, width: int, scale: float, seed: int) -> None:
    logits = randn(seed, rows, width, scale=scale)
    logits[:, 1::3] = -float("inf")
    out = torch.empty(rows, dtype=torch.float64)
    _cpu.logsumexp(logits.data_ptr(), rows, width, out.data_ptr())
    torch.testing.assert_close(out, torch.logsumexp(logits.double(), -1), rtol=3e-7, atol=3e-7)


def test_logsumexp_of_unusual_rows() -> None:
    infinity, nan = float("inf"), float("nan")
    logits = torch.zeros(4, 19)
    logits[0] = -infinity
    logits[1, 18], logits[2, 3], logits[3, 17] = nan, nan, infinity
    out = torch.empty(4, dtype=torch.float64)
    _cpu.logsumexp(logits.data_ptr(), 4, 19, out.data_ptr())
    np.testing.assert_array_equal(out, [-infinity, nan, nan, infinity])


# --- invariance -----------------------------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_others_or_on_threads() -> None:
    """Enough rows that two threads share them; each row alone gives the same bits."""
    tokens, width = 40, 1003
    x, weight = randn(0, tokens, 2 * width, dtype=torch.bfloat16), randn(1, width, dtype=torch.bfloat16)
    half = x[:, :width].contiguous()
    bf16 = _cpu.Dtype.bf16

    def results(rows: slice) -> list[Tensor]:
        count = len(range(*rows.indices(tokens)))
        part, half_part = x[rows].contiguous(), half[rows].contiguous()
        normed, activated = (torch.empty(count, width, dtype=torch.bfloat16) for _ in range(2))
        logits = half_part.float()
        ops = [
            _cpu.rms_norm(half_part.data_ptr(), bf16, width, weight.data_ptr(), bf16,
                          normed.data_ptr(), bf16, width, 1e-5),
            _cpu.activate(part.data_ptr(), 2 * width, activated.data_ptr(), width, bf16, _cpu.Activation.silu, True),
        ]  # fmt: skip
        for op in ops:
            run(op, count)
        logsumexps = torch.empty(count, dtype=torch.float64)
        _cpu.logsumexp(logits.data_ptr(), count, width, logsumexps.data_ptr())
        return [normed, activated, logsumexps]

    _cpu.set_threads(1)
    whole = results(slice(None))
    _cpu.set_threads(2)
    for one_thread, two_threads in zip(whole, results(slice(None)), strict=True):
        assert torch.equal(one_thread, two_threads)
    for row in range(tokens):
        for all_rows, alone in zip(whole, results(slice(row, row + 1)), strict=True):
            assert torch.equal(all_rows[row : row + 1], alone)
