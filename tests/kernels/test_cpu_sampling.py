"""The compiled sampling kernels: the tokens that numpy draws, log-softmax in float64, and rows that stand alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special

from tests.kernels.backends import cpu_settings

_cpu: Any = pytest.importorskip("octavo._cpu")

from octavo.kernels import sampling  # noqa: E402
from octavo.kernels.cpu.sampling import choose_tokens, token_logprobs  # noqa: E402
from octavo.kernels.sampling import FILTERS, Filters, NumpySampling, pack_mask  # noqa: E402

OFF = Filters(1.0, 10**9, 1.0, 0.0)
#: Around the sizes of vectors (4 to 16), columns (16 vectors), blocks of the race (256).
SIZES = (1, 2, 7, 16, 63, 64, 255, 256, 257, 500, 1023, 1024, 3000, 5003)
sizes = st.one_of(st.sampled_from(SIZES), st.integers(1, 600))


@pytest.fixture(params=_cpu.available_isas().floats, autouse=True, scope="module")
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    with cpu_settings(isa=request.param):
        yield


def gaussian(seed: int, *shape: int, scale: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def records(*filters: Filters, vocab: int) -> NDArray[np.void]:
    return np.array([astuple(replace(f, top_k=min(f.top_k, vocab))) for f in filters], FILTERS)


def keys(count: int, seed: int = 0) -> NDArray[np.uint32]:
    return sampling.keys(np.arange(seed, seed + count, dtype=np.uint64), np.full(count, 5))


def drawn_by_numpy(
    logits: NDArray[np.float32], filters: NDArray[np.void], hashes: NDArray[np.uint32]
) -> NDArray[np.int64]:
    drawn: NDArray[np.int64] = NumpySampling(logits.shape[1]).choose(logits, filters, hashes)
    return drawn


def on_an_edge(logits: NDArray[np.float32], f: Filters) -> bool:
    """Whether a rounding decides what is kept."""
    z = -np.sort(-logits.astype(np.float64) / f.temperature)
    weights = np.exp(z - z[0])
    if f.min_p > 0 and (np.abs(weights / f.min_p - 1) < 1e-5).any():
        return True
    kept = weights[weights >= f.min_p][: f.top_k]
    mass = np.cumsum(kept) / kept.sum()
    return f.top_p < 1 and bool((np.abs(mass / f.top_p - 1) < 1e-5).any())


DRAWS = 24


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=sizes,
    scale=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0, 1e30]),
    coarse=st.booleans(),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
    temperature=st.sampled_from([1e-5, 0.3, 1.0, 2.5, 100.0, 1e30]),
    top_k=st.sampled_from([10**9, 1, 2, 5, 40, 300, 2000]),
    top_p=st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999]),
    min_p=st.sampled_from([0.0, 1e-6, 0.01, 0.3, 1.0]),
)
def test_the_tokens_that_numpy_draws(
    seed: int,
    vocab: int,
    scale: float,
    coarse: bool,
    masked: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    logits = gaussian(seed, vocab, scale=scale)
    if coarse:  # many ties
        logits = np.round(logits)
    drop = np.random.default_rng(seed + 1).random(vocab) < masked
    drop[seed % vocab] = False
    logits[drop] = -np.inf
    f = replace(OFF, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    with np.errstate(over="ignore"):
        assume(not on_an_edge(logits, f))
    batch = np.repeat(logits[None], DRAWS, axis=0)
    filters = np.repeat(records(f, vocab=vocab), DRAWS)
    expected = drawn_by_numpy(batch, filters, keys(DRAWS, seed))
    assert choose_tokens(batch, filters, keys(DRAWS, seed)).tolist() == expected.tolist()


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
@pytest.mark.parametrize(
    "f",
    [
        OFF,
        replace(OFF, top_k=50),
        replace(OFF, top_k=4000, top_p=0.9),
        replace(OFF, top_p=0.5),
        replace(OFF, top_p=0.95, temperature=0.6),
        replace(OFF, min_p=0.05, temperature=1.5),
    ],
)
def test_the_tokens_that_numpy_draws_from_a_large_vocabulary(f: Filters, scale: float) -> None:
    vocab = 49157
    logits = gaussian(3, 16, vocab, scale=scale)
    filters = np.repeat(records(f, vocab=vocab), 16)
    expected = drawn_by_numpy(logits, filters, keys(16))
    assert choose_tokens(logits, filters, keys(16)).tolist() == expected.tolist()


@settings(max_examples=40, deadline=None)
@given(vocab=sizes, seed=st.integers(0, 1000), density=st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0]))
def test_a_mask_is_as_good_as_minus_infinity_in_the_logits(vocab: int, seed: int, density: float) -> None:
    cycle = (Filters(0.0, 0, 0.0, 0.0), OFF, replace(OFF, top_k=9), replace(OFF, top_p=0.8), replace(OFF, min_p=0.1))
    n = len(cycle)
    filters, hashes = records(*cycle, vocab=vocab), keys(n, seed)
    allowed = np.random.default_rng(seed).random((n, vocab)) < density
    allowed[seed % n] = True
    logits = gaussian(seed, n, vocab)
    if seed % 3 == 0:
        logits[:, seed % vocab] = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    written = np.where(allowed, logits, np.float32(-np.inf))
    mask = np.stack([pack_mask(row) for row in allowed])
    expected = choose_tokens(written, filters, hashes)
    assert choose_tokens(logits, filters, hashes, mask).tolist() == expected.tolist()
    assert logits.view(np.uint32).tolist() == written.view(np.uint32).tolist()


def test_a_mask_of_another_shape_is_refused() -> None:
    filters = records(OFF, OFF, vocab=65)
    for shape in ((2, 2), (1, 3), (2, 4)):
        with pytest.raises(ValueError, match=r"shape \[2, 3\]"):
            choose_tokens(gaussian(0, 2, 65), filters, keys(2), np.zeros(shape, np.uint32))


def test_prefixes_end_where_they_should_among_equals() -> None:
    """With next to no temperature difference among survivors, enough draws yield each of them and no other token."""
    draws = 600
    logits = np.zeros((draws, 300), np.float32)
    logits[:, 100:] = -1.0

    def met(f: Filters) -> list[int]:
        filters = np.repeat(records(replace(f, temperature=1e6), vocab=300), draws)
        return sorted(set(choose_tokens(logits, filters, keys(draws)).tolist()))

    assert met(replace(OFF, top_k=30)) == list(range(30))
    assert met(replace(OFF, top_k=103)) == list(range(103))
    assert met(replace(OFF, top_p=0.05)) == list(range(15))
    assert met(replace(OFF, top_k=40, top_p=0.5)) == list(range(20))
    assert met(replace(OFF, min_p=1.0)) == list(range(100))


def test_a_single_outlier_does_not_affect_the_search() -> None:
    logits = gaussian(1, 1, 20_000, scale=1e-4)
    logits[0, 7], logits[0, 9] = -3e38, -1e30
    for f in (replace(OFF, top_k=15_000), replace(OFF, top_p=0.7)):
        filters = np.repeat(records(f, vocab=20_000), 40)
        batch = np.repeat(logits, 40, axis=0)
        expected = drawn_by_numpy(batch, filters, keys(40))
        assert choose_tokens(batch, filters, keys(40)).tolist() == expected.tolist()


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 1000))
def test_a_temperature_of_zero_takes_the_most_likely(vocab: int, seed: int) -> None:
    logits = np.round(gaussian(seed, 3, vocab, scale=1.0))
    filters = np.zeros(3, FILTERS)
    assert choose_tokens(logits, filters, np.zeros((3, 2), np.uint32)).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("f", [Filters(0.0, 0, 0.0, 0.0), OFF, replace(OFF, top_k=3), replace(OFF, top_p=0.5)])
@pytest.mark.parametrize("vocab", [1, 5, 40, 700])
def test_rows_without_a_choice_say_why(f: Filters, vocab: int) -> None:
    for place in {0, vocab // 2, vocab - 1}:
        logits = gaussian(0, 4, vocab)
        logits[0, place] = np.nan
        logits[1, place] = np.inf
        logits[2] = -np.inf
        chosen = choose_tokens(logits, np.repeat(records(f, vocab=vocab), 4), keys(4))
        assert chosen[:3].tolist() == [-1, -2, -3]
        assert 0 <= chosen[3] < vocab


def test_the_two_zeros_tie() -> None:
    logits = np.array([[-1.0, -0.0, 0.0, -0.0], [-1.0, 0.0, -0.0, 0.0]], np.float32)
    filters = np.repeat(records(replace(OFF, top_k=1), vocab=4), 2)
    assert choose_tokens(logits, filters, keys(2)).tolist() == [1, 1]
    every = np.arange(2)
    assert token_logprobs(logits, every, every, np.full(2, 3))[2].tolist() == [[1, 2, 3]] * 2


@settings(max_examples=40, deadline=None)
@given(
    vocab=sizes,
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.01, 1.0, 5.0, 40.0]),
    coarse=st.booleans(),
    k=st.sampled_from([0, 1, 5, 20, 100, 400]),
)
def test_logprobs_are_log_softmax(vocab: int, seed: int, scale: float, coarse: bool, k: int) -> None:
    logits = gaussian(seed, 4, vocab, scale=scale)
    if coarse:
        logits = np.round(logits)
    rows = np.array([2, 0, 3])
    tokens = np.random.default_rng(seed).integers(0, vocab, 3)
    counts = np.minimum([k, 0, k // 2], vocab)
    logprobs, ranks, top_ids, top_logprobs = token_logprobs(logits, rows, tokens, counts)
    expected = special.log_softmax(logits[rows].astype(np.float64), axis=-1)
    for i, row in enumerate(rows):
        # A distance is rounded to float32 once; weights are within 2e-7.
        assert logprobs[i] == pytest.approx(expected[i, tokens[i]], rel=1e-7, abs=3e-7)
        assert ranks[i] == 1 + np.count_nonzero(logits[row] > logits[row, tokens[i]])
        # The ranking is by distance, in which logits that differ may tie.
        order = np.argsort(logits[row].max() - logits[row], kind="stable")[: counts[i]]
        assert top_ids[i, : counts[i]].tolist() == order.tolist()
        np.testing.assert_allclose(top_logprobs[i, : counts[i]], expected[i, order], rtol=1e-7, atol=3e-7)


def test_logprobs_of_unusual_rows() -> None:
    logits = gaussian(0, 5, 30)
    logits[0, 3], logits[1, 29], logits[2] = np.nan, np.inf, -np.inf
    logits[3, 1:] = -np.inf
    every = np.arange(5)
    logprobs, ranks, top_ids, top_logprobs = token_logprobs(logits, every, np.full(5, 4), np.full(5, 3))
    assert np.isnan(logprobs[:3]).all()
    assert (logprobs[3], ranks[3], top_ids[3].tolist()) == (-math.inf, 2, [0, 1, 2])
    assert top_logprobs[3].tolist() == [0.0, -math.inf, -math.inf]
    assert np.isfinite(logprobs[4])


def test_tokens_and_counts_outside_the_vocabulary_are_refused() -> None:
    logits = gaussian(0, 1, 10)
    one = np.ones(1, np.int64)
    for token in (-1, 10):
        with pytest.raises(ValueError, match=r"in \[0, 10\)"):
            token_logprobs(logits, one * 0, one * token, one)
    for count in (-1, 11):
        with pytest.raises(ValueError, match="count must be"):
            token_logprobs(logits, one * 0, one, one * count)


def test_rows_may_lie_apart_and_a_batch_may_be_empty() -> None:
    wide = gaussian(0, 3, 100)
    part, whole = wide[:, :77], np.ascontiguousarray(wide[:, :77])
    filters = records(OFF, replace(OFF, top_k=4), replace(OFF, top_p=0.5), vocab=77)
    assert choose_tokens(part, filters, keys(3)).tolist() == choose_tokens(whole, filters, keys(3)).tolist()
    every = np.arange(3)
    three = np.full(3, 3)
    for apart, together in zip(
        token_logprobs(part, every, every, three), token_logprobs(whole, every, every, three), strict=True
    ):
        assert apart.tolist() == together.tolist()
    assert choose_tokens(whole[:0], filters[:0], keys(0)).tolist() == []
    with pytest.raises(ValueError, match="contiguous in the last dimension"):
        choose_tokens(wide[:, ::2], filters, keys(3))


def test_a_row_does_not_depend_on_others_or_on_threads() -> None:
    vocab, n = 5003, 24
    logits = gaussian(2, n, vocab)
    cycle = [
        OFF,
        replace(OFF, top_k=20),
        replace(OFF, top_p=0.9),
        Filters(0.0, 0, 0.0, 0.0),
        replace(OFF, min_p=0.1),
        replace(OFF, top_k=3000, top_p=0.8, temperature=2.0),
    ]
    filters, hashes = records(*(cycle * 4), vocab=vocab), keys(n)
    tokens, counts = np.arange(n), np.arange(n) % 7

    def results(rows: slice) -> list[list[Any]]:
        places = np.arange(n)[rows]
        chosen = choose_tokens(logits[rows], filters[rows], hashes[rows])
        logprobs, ranks, ids, best = token_logprobs(logits, places, tokens[rows], counts[rows])
        lists = [(ids[i, :k].tolist(), best[i, :k].tolist()) for i, k in enumerate(counts[rows])]
        return [list(row) for row in zip(chosen.tolist(), logprobs.tolist(), ranks.tolist(), lists, strict=True)]

    _cpu.set_threads(1)
    whole = results(slice(None))
    _cpu.set_threads(2)
    assert results(slice(None)) == whole
    assert [results(slice(i, i + 1))[0] for i in range(n)] == whole
