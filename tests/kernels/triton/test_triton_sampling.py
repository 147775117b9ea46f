"""Sampling on the device: the tokens that numpy draws, log-softmax, and rows that stand alone."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special

triton: Any = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from octavo.kernels import sampling as noise  # noqa: E402
from octavo.kernels.sampling import FILTERS, Filters, NumpySampling, pack_mask  # noqa: E402
from octavo.kernels.triton import sampling  # noqa: E402
from octavo.kernels.triton.sampling import MAX_LOGPROBS, token_logprobs, unpack  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
OFF = Filters(1.0, 10**9, 1.0, 0.0)
GREEDY = Filters(0.0, 0, 0.0, 0.0)
#: Around the sizes of columns (32) and of what a program surveys (2048).
SIZES = (2, 7, 31, 32, 33, 64, 200, 1000, 2047, 2048, 2049, 5003)


def gaussian(seed: int, *shape: int, scale: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def records(*filters: Filters, vocab: int) -> NDArray[np.void]:
    return np.array([astuple(replace(f, top_k=min(f.top_k, vocab))) for f in filters], FILTERS)


def keys(count: int, seed: int = 0) -> NDArray[np.uint32]:
    return noise.keys(np.arange(seed, seed + count, dtype=np.uint64), np.full(count, 5))


def on_device(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def as_columns(filters: NDArray[np.void]) -> dict[str, torch.Tensor]:
    return {name: on_device(filters[name]) for name in ("temperature", "top_k", "top_p", "min_p")}


def choose(
    logits: NDArray[np.float32] | torch.Tensor, filters: NDArray[np.void], hashes: NDArray[np.uint32]
) -> list[int]:
    tensor = logits if isinstance(logits, torch.Tensor) else torch.from_numpy(logits)
    key = on_device(np.ascontiguousarray(hashes).view(np.int32))
    return sampling.choose_tokens(tensor.to(DEVICE), **as_columns(filters), keys=key).tolist()


def expected(logits: NDArray[np.float32], filters: NDArray[np.void], hashes: NDArray[np.uint32]) -> list[int]:
    with np.errstate(over="ignore"):
        return NumpySampling(logits.shape[1]).choose(logits.copy(), filters, hashes).tolist()


def on_an_edge(logits: NDArray[np.float32], f: Filters) -> bool:
    """Whether a rounding decides what is kept."""
    z = -np.sort(-logits.astype(np.float64)) / f.temperature
    weights = np.exp(z - z[0])
    if f.min_p > 0 and (np.abs(weights / f.min_p - 1) < 1e-5).any():
        return True
    kept = weights[weights >= f.min_p][: f.top_k]
    mass = np.cumsum(kept) / kept.sum()
    return f.top_p < 1 and bool((np.abs(mass / f.top_p - 1) < 1e-5).any())


def random_row(rng: np.random.Generator, vocab: int) -> tuple[NDArray[np.float32], Filters]:
    """Logits of any shape, often with ties and masked tokens, and filters of any kind."""
    while True:
        logits = (rng.standard_normal(vocab) * rng.choice([0.0, 0.1, 1.0, 4.0, 30.0, 1e30])).astype(np.float32)
        if rng.random() < 0.4:
            logits = np.round(logits)
        masked = rng.random(vocab) < rng.choice([0.0, 0.0, 0.5, 0.99])
        masked[rng.integers(vocab)] = False
        logits[masked] = -np.inf
        f = Filters(
            temperature=float(rng.choice([1e-5, 0.3, 1.0, 2.5, 100.0, 1e30])),
            top_k=int(min(vocab, rng.choice([10**9, 10**9, 1, 2, 5, 40, 300, 2000]))),
            top_p=float(rng.choice([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999])),
            min_p=float(rng.choice([0.0, 0.0, 0.0, 1e-6, 0.01, 0.3, 1.0])),
        )
        with np.errstate(over="ignore"):
            if not on_an_edge(logits, f):
                return logits, f


def check_random_rows(seed: int, vocab: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = [random_row(rng, vocab) for _ in range(rows)]
    logits = np.stack([row for row, _ in drawn])
    filters = records(*(f for _, f in drawn), vocab=vocab)
    found, right = choose(logits, filters, keys(rows, seed)), expected(logits, filters, keys(rows, seed))
    assert {i: (found[i], right[i], drawn[i][1]) for i in range(rows) if found[i] != right[i]} == {}


@pytest.mark.parametrize(
    "vocab", [size if size in (2, 33, 2049) else pytest.param(size, marks=pytest.mark.slow) for size in SIZES]
)
def test_the_tokens_that_numpy_draws(vocab: int) -> None:
    check_random_rows(vocab, vocab, rows=6)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("seed", range(10))
def test_the_tokens_that_numpy_draws_from_many_rows(vocab: int, seed: int) -> None:
    check_random_rows(seed * 10_000 + vocab, vocab, rows=40)


@pytest.mark.parametrize("vocab", [200, pytest.param(5003, marks=pytest.mark.slow)])
def test_the_digits_that_a_gpu_takes_at_once(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter a threshold is settled in longer digits, for speed."""
    monkeypatch.setattr(sampling, "digit_bits", lambda columns: 2)
    check_random_rows(vocab + 1, vocab, rows=3)


LARGE = {
    "all": OFF,
    "top-k": replace(OFF, top_k=50),
    "a long top-k": replace(OFF, top_k=4000, top_p=0.9),
    "top-p": replace(OFF, top_p=0.5),
    "a long top-p": replace(OFF, top_p=0.95, temperature=2.0),
    "min-p": replace(OFF, min_p=0.05, temperature=1.5),
    "greedy": GREEDY,
}


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_the_tokens_that_numpy_draws_from_a_large_vocabulary(scale: float) -> None:
    vocab = 50_000
    logits = gaussian(3, len(LARGE), vocab, scale=scale)
    filters = records(*LARGE.values(), vocab=vocab)
    assert choose(logits, filters, keys(len(LARGE))) == expected(logits, filters, keys(len(LARGE)))


@pytest.mark.slow
def test_ids_up_to_the_last_of_the_largest_vocabulary() -> None:
    vocab = 262_144
    logits = np.full((3, vocab), -5.0, np.float32)
    logits[0, -1] = logits[1, -1] = 9.0
    logits[2, [5, 100_000, vocab - 2, vocab - 1]] = 9.0
    filters = records(GREEDY, OFF, replace(OFF, top_k=3, temperature=1e6), vocab=vocab)
    hashes = np.repeat(keys(1), 3, axis=0)
    assert choose(logits, filters, hashes) == expected(logits, filters, hashes)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(SIZES), st.integers(0, 1000))
def test_greedy_takes_the_most_likely_and_the_lowest_id_of_equals(vocab: int, seed: int) -> None:
    logits = np.round(gaussian(seed, 3, vocab, scale=1.0))
    assert choose(logits, records(*[GREEDY] * 3, vocab=vocab), keys(3)) == logits.argmax(-1).tolist()


@settings(max_examples=4, deadline=None)
@given(
    vocab=st.sampled_from(SIZES),
    seed=st.integers(0, 1000),
    k=st.sampled_from([1, 2, 3, 31, 32, 33, 100, 2048]),
    min_p=st.sampled_from([1e-9, 0.3, math.exp(-1), 1.0]),
)
def test_ties_at_the_end_of_a_prefix_are_settled_by_id(vocab: int, seed: int, k: int, min_p: float) -> None:
    """Exactly, edge or not, as both filters only compare; coarse logits, so that most prefixes end in ties."""
    logits = np.round(gaussian(seed, 6, vocab, scale=1.0))
    each = (replace(OFF, top_k=k, temperature=50.0), replace(OFF, min_p=min_p, temperature=1.0))
    filters = records(*each * 3, vocab=vocab)
    assert choose(logits, filters, keys(6, seed)) == expected(logits, filters, keys(6, seed))


def test_a_share_of_equals_is_counted_exactly() -> None:
    logits = np.zeros((8, 300), np.float32)
    logits[:, 100:] = -1.0
    hot = replace(OFF, temperature=1e6)
    each = (
        replace(hot, top_p=0.05),
        replace(hot, top_k=40, top_p=0.5),
        replace(hot, top_k=103),
        replace(hot, top_p=0.5),
    )
    filters = records(*each * 2, vocab=300)
    assert choose(logits, filters, keys(8)) == expected(logits, filters, keys(8))


def test_a_single_outlier_does_not_affect_the_search() -> None:
    logits = gaussian(1, 4, 3000, scale=1e-4)
    logits[:, 7], logits[:, 9] = -3e38, -1e30
    filters = records(*[replace(OFF, top_k=2500), replace(OFF, top_p=0.7)] * 2, vocab=3000)
    assert choose(logits, filters, keys(4)) == expected(logits, filters, keys(4))


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_next_to_no_temperature_takes_the_most_likely(temperature: float) -> None:
    logits = gaussian(0, 4, 500)
    cold = replace(OFF, temperature=temperature)
    filters = records(cold, replace(cold, top_k=9), replace(cold, top_p=0.9), replace(cold, min_p=0.5), vocab=500)
    assert choose(logits, filters, keys(4)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [2, 40, pytest.param(700, marks=pytest.mark.slow)])
def test_rows_without_a_choice_say_why(vocab: int) -> None:
    for f in (GREEDY, OFF, replace(OFF, top_k=2), replace(OFF, top_p=0.5)):
        for place in (0, vocab - 1):
            logits = gaussian(0, 5, vocab)
            logits[0, place] = logits[1, place] = np.nan
            logits[1, vocab // 2 - 1 if place else vocab - 1] = logits[2, place] = np.inf
            logits[3] = -np.inf
            chosen = choose(logits, np.repeat(records(f, vocab=vocab), 5), keys(5))
            assert chosen[:4] == [-1, -1, -2, -3]
            assert 0 <= chosen[4] < vocab


def test_the_two_zeros_tie() -> None:
    logits = np.array([[-1.0, -0.0, 0.0, -0.0], [-1.0, 0.0, -0.0, 0.0]], np.float32)
    for f in (GREEDY, replace(OFF, top_k=1)):
        assert choose(logits, records(f, f, vocab=4), keys(2)) == [1, 1]
    every = torch.arange(2, device=DEVICE)
    assert unpack(token_logprobs(on_device(logits), every, every, 3), 2)[2].tolist() == [[1, 2, 3]] * 2


def test_a_row_does_not_depend_on_others_or_on_where_it_lies() -> None:
    vocab = 503
    each = [OFF, replace(OFF, top_k=20), replace(OFF, top_p=0.9), GREEDY, replace(OFF, min_p=0.1)]
    wide = torch.from_numpy(gaussian(2, 2 * len(each), 2 * vocab))
    logits, filters, hashes = wide[:, :vocab], records(*each * 2, vocab=vocab), keys(2 * len(each))
    whole = choose(logits, filters, hashes)
    assert choose(logits.contiguous(), filters, hashes) == whole
    for i in range(len(whole)):
        assert choose(logits[i : i + 1], filters[i : i + 1], hashes[i : i + 1]) == whole[i : i + 1]
    assert choose(logits[:0], filters[:0], hashes[:0]) == []


@pytest.mark.parametrize("vocab", [33, *(pytest.param(size, marks=pytest.mark.slow) for size in (31, 2047, 5003))])
def test_a_mask_is_as_good_as_minus_infinity_in_the_logits(vocab: int) -> None:
    each = (GREEDY, OFF, replace(OFF, top_k=9), replace(OFF, top_p=0.8), replace(OFF, min_p=0.1), GREEDY, OFF)
    n = len(each)
    filters, hashes = records(*each, vocab=vocab), keys(n)
    allowed = np.random.default_rng(vocab).random((n, vocab)) < np.array([[0.0, 0.02, 0.5, 0.98, 0.7, 1.0, 1.0]]).T
    logits = gaussian(vocab, n, vocab)
    logits[:, vocab // 2] = [np.nan, np.inf, -np.inf, 0.0, -0.0, np.nan, 2.0]
    written = np.where(allowed, logits, np.float32(-np.inf))
    mask = on_device(np.stack([pack_mask(row) for row in allowed]).view(np.int32))
    given, right, key = on_device(logits), on_device(written), on_device(hashes.view(np.int32))
    found = sampling.choose_tokens(given, **as_columns(filters), keys=key, mask=mask)
    assert found.tolist() == sampling.choose_tokens(right, **as_columns(filters), keys=key).tolist()
    assert given.cpu().numpy().view(np.uint32).tolist() == written.view(np.uint32).tolist()


def test_keys_may_be_wider() -> None:
    logits, filters = gaussian(5, 3, 100), records(OFF, OFF, OFF, vocab=100)
    key = on_device(keys(3).astype(np.int64))
    found = sampling.choose_tokens(on_device(logits), **as_columns(filters), keys=key)
    assert found.tolist() == expected(logits, filters, keys(3))


@triton.jit
def _bits_kernel(key_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.arange(0, SIZE)
    tl.store(out_ptr + token, sampling._random_bits(token, key_ptr).to(tl.int64))


def test_the_noise_is_the_same_bit_for_bit() -> None:
    for key in keys(3, seed=2**40):
        out = torch.empty(4096, dtype=torch.int64, device=DEVICE)
        _bits_kernel[(1,)](on_device(key.view(np.int32)), out, SIZE=4096)
        assert out.tolist() == noise.random_bits(key, noise.mixed_ids(4096)).tolist()


@pytest.mark.gpu
def test_a_captured_choice_follows_its_inputs() -> None:
    vocab = 128_256
    filters = records(OFF, replace(OFF, top_k=50, top_p=0.9), GREEDY, replace(OFF, top_p=0.95), vocab=vocab)
    columns, key = as_columns(filters), on_device(keys(4).view(np.int32))
    logits = torch.zeros(4, vocab, device=DEVICE)
    sampling.choose_tokens(logits, **columns, keys=key)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = sampling.choose_tokens(logits, **columns, keys=key)
    for seed in range(5):
        values = gaussian(seed, 4, vocab)
        logits.copy_(torch.from_numpy(values))
        graph.replay()
        assert chosen.tolist() == expected(values, filters, keys(4))


# Logprobs


@settings(max_examples=6, deadline=None)
@given(
    vocab=st.sampled_from(SIZES),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 0.01, 1.0, 5.0, 40.0]),
    coarse=st.booleans(),
    k=st.sampled_from([0, 1, 5, 20, MAX_LOGPROBS]),
)
def test_logprobs_are_log_softmax(vocab: int, seed: int, scale: float, coarse: bool, k: int) -> None:
    logits = gaussian(seed, 4, vocab, scale=scale)
    if coarse:
        logits = np.round(logits)
    rows, k = np.array([2, 0, 3]), min(k, vocab)
    tokens = np.random.default_rng(seed).integers(0, vocab, 3)
    found = unpack(token_logprobs(on_device(logits), on_device(rows), on_device(tokens), k), 3)
    logprobs, ranks, ids, named = (values.cpu().numpy() for values in found)
    right = special.log_softmax(logits[rows].astype(np.float64), axis=-1)
    for i, row in enumerate(rows):
        assert logprobs[i] == pytest.approx(right[i, tokens[i]], rel=1e-6, abs=1e-6)
        assert ranks[i] == 1 + np.count_nonzero(logits[row] > logits[row, tokens[i]])
        order = np.argsort(-logits[row], kind="stable")[:k]
        assert ids[i].tolist() == order.tolist()
        np.testing.assert_allclose(named[i], right[i, order], rtol=1e-6, atol=1e-6)


def test_logprobs_of_unusual_rows() -> None:
    logits = gaussian(0, 5, 30)
    logits[0, 3], logits[1, 29], logits[2] = np.nan, np.inf, -np.inf
    logits[3, 1:] = -np.inf
    every = torch.arange(5, device=DEVICE)
    tokens = torch.tensor([4, 4, 4, 4, -1], device=DEVICE)
    found = unpack(token_logprobs(on_device(logits), every, tokens, 3), 5)
    logprobs, ranks, ids, named = (values.tolist() for values in found)
    assert [math.isnan(x) for x in logprobs[:3]] == [True] * 3
    assert (logprobs[3], ranks[3], ids[3], named[3]) == (-math.inf, 2, [0, 1, 2], [0.0, -math.inf, -math.inf])
    assert ids[4] == np.argsort(-logits[4], kind="stable")[:3].tolist()


def test_logprobs_of_a_row_do_not_depend_on_the_others() -> None:
    logits = on_device(gaussian(7, 6, 2500))
    rows, tokens = torch.tensor([5, 1, 1], device=DEVICE), torch.tensor([0, 2499, 3], device=DEVICE)
    whole = unpack(token_logprobs(logits, rows, tokens, 4), 3)
    for i in range(3):
        alone = unpack(token_logprobs(logits, rows[i : i + 1], tokens[i : i + 1], 4), 1)
        assert all(torch.equal(a[0], w[i]) for a, w in zip(alone, whole, strict=True))
    assert [len(part) for part in unpack(token_logprobs(logits, rows[:0], tokens[:0], 4), 0)] == [0] * 4


def test_more_than_can_be_named_is_refused() -> None:
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for vocab, k in ((10, 11), (1000, MAX_LOGPROBS + 1)):
        with pytest.raises(ValueError, match=f"not {k}"):
            token_logprobs(torch.zeros(1, vocab, device=DEVICE), one, one, k)
