"""Min-p, top-k, top-p, the draw and the logprobs of one row, against plain float64 references."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special, stats

from octavo.kernels import sampling
from octavo.kernels.sampling import (
    FILTERS,
    FLOOR,
    Drawer,
    Filters,
    NumpySampling,
    best,
    distances,
    pack_mask,
    position_logprobs,
    survivors,
)


def filtered_logits(logits: NDArray[np.float32], filters: Filters) -> NDArray[np.float64]:
    """Tempered logits with maximum 0; -inf for tokens that the filters remove."""
    distance = distances(logits, logits.max())
    ids = np.arange(distance.size) if filters.keep_all(distance.size) else survivors(distance, filters)
    result = np.full(logits.shape, -np.inf)
    result[ids] = -(distance[ids].astype(np.float64) / filters.temperature)
    return result


def filters(size: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(temperature, top_k or size, top_p, min_p)


def reference(logits: NDArray[np.float32], f: Filters) -> NDArray[np.float64]:
    """Filtered, tempered logits by sorting everything, in float64."""
    x = logits.astype(np.float64)
    z = (x - x.max()) / f.temperature
    order = np.argsort(-x, kind="stable")
    kept = order[(np.exp(z[order]) >= f.min_p) & (x[order] > -np.inf)][: f.top_k]
    if f.top_p < 1.0:
        mass = np.cumsum(np.exp(z[kept]))
        kept = kept[: int(np.argmax(mass >= f.top_p * mass[-1])) + 1]
    result = np.full(len(z), -np.inf)
    result[kept] = z[kept]
    return result


def on_an_edge(logits: NDArray[np.float32], f: Filters) -> bool:
    """Whether a rounding decides what is kept, so that the reference need not agree."""
    below, above = (
        np.isfinite(reference(logits, replace(f, top_p=min(f.top_p * x, 1.0), min_p=min(f.min_p * x, 1.0))))
        for x in (1 - 1e-6, 1 + 1e-6)
    )
    return bool((below != above).any())


def gaussian(seed: int, size: int, scale: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([2, 7, 64, 500, 5000]),
    scale=st.sampled_from([0.1, 1.0, 4.0, 30.0]),
    coarse=st.booleans(),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
    temperature=st.sampled_from([0.01, 0.3, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 300, 4999]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.01, 0.3, 1.0]),
)
def test_filtered_distribution_is_the_references(
    seed: int,
    size: int,
    scale: float,
    coarse: bool,
    masked: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    logits = gaussian(seed, size, scale)
    if coarse:  # many ties
        logits = np.round(logits)
    drop = np.random.default_rng(seed + 1).random(size) < masked
    drop[seed % size] = False
    logits[drop] = -np.inf
    f = filters(size, temperature, min(top_k, size), top_p, min_p)
    assume(not on_an_edge(logits, f))
    expected = reference(logits, f)
    result = filtered_logits(logits, f)
    assert (np.isfinite(result) == np.isfinite(expected)).all()
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-5 / temperature)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 20.0])
def test_top_p_alone_over_a_large_vocabulary(top_p: float, scale: float, temperature: float) -> None:
    logits = gaussian(0, 20_000, scale)
    f = filters(logits.size, temperature, top_p=top_p)
    result, expected = filtered_logits(logits, f), reference(logits, f)
    # Weights are float32: among thousands of nearly equal ones the cut may move by a token.
    assert np.isfinite(result).sum() == pytest.approx(np.isfinite(expected).sum(), rel=1e-4)
    both = np.isfinite(result) & np.isfinite(expected)
    np.testing.assert_allclose(result[both], expected[both], rtol=1e-6, atol=1e-5)


def test_ties_at_a_threshold_keep_the_lowest_ids() -> None:
    logits = np.array([1, 2, 1, 1, 2, 1], np.float32)
    assert np.flatnonzero(np.isfinite(filtered_logits(logits, filters(6, top_k=4)))).tolist() == [0, 1, 2, 4]
    even = np.zeros(10, np.float32)
    assert np.flatnonzero(np.isfinite(filtered_logits(even, filters(10, top_p=0.45)))).tolist() == [0, 1, 2, 3, 4]
    assert np.flatnonzero(np.isfinite(filtered_logits(even, filters(10, min_p=1.0)))).tolist() == list(range(10))


def test_the_two_zeros_tie() -> None:
    for logits in (np.array([-0.0, 0.0, -0.0, -1.0], np.float32), np.array([0.0, -0.0, 0.0, -1.0], np.float32)):
        for top in (np.float32(0.0), np.float32(-0.0)):
            assert best(distances(logits, top), 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 63, 64, 1000, 49152])
@pytest.mark.parametrize("k", [1, 5, 100, 700, 49152])
def test_best_is_the_stable_sort(size: int, k: int) -> None:
    distance = (np.round(np.abs(gaussian(size, size)) * 8) / 8).astype(np.float32)
    assert best(distance, k).tolist() == np.argsort(distance, kind="stable")[:k].tolist()


DRAWS = 6000
#: Filters, and logits among which every survivor is likely enough for a chi-square test.
CASES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "temperature 1": (dict(), [0.0, 1.0, 2.0, -1.0, 0.5, -0.0]),
    "hot": (dict(temperature=3.0), [0.0, 4.0, 2.0, -1.0]),
    "cold": (dict(temperature=0.25), [0.0, 0.4, 0.2, -0.1]),
    "top-k": (dict(top_k=3), [0.0, 1.0, 2.0, 1.0, 1.0, -1.0]),
    "top-p": (dict(top_p=0.8), [0.0, 1.0, 2.0, 1.5, 0.1, -1.0]),
    "min-p": (dict(min_p=0.2), [0.0, 1.0, 2.0, 1.5, 0.1, -1.0]),
    "all": (dict(temperature=1.5, top_k=4, top_p=0.9, min_p=0.1), [0.0, 1.0, 2.0, 1.5, 0.1, -1.0]),
    "masked": (dict(), [0.0, -np.inf, 2.0, -np.inf]),
    "even over many": (dict(), [0.0] * 600),
    "even over many, filtered": (dict(top_p=0.9), [0.0] * 800),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_the_distribution(name: str) -> None:
    options, values = CASES[name]
    logits = np.array(values, np.float32)
    f = filters(logits.size, **options)
    drawer = Drawer(logits.size)
    # Half along positions of one seed, half along seeds at one position.
    half = np.arange(DRAWS // 2)
    seeds = np.concatenate([np.full(DRAWS // 2, 11), half]).astype(np.uint64)
    keys = sampling.keys(seeds, np.concatenate([half, np.full(DRAWS // 2, 5)]))
    counts = np.bincount([drawer.draw(logits, logits.max(), f, key) for key in keys], minlength=logits.size)
    expected = special.softmax(filtered_logits(logits, f))
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    assert stats.chisquare(counts[likely], expected[likely] * DRAWS).pvalue > 1e-4


def outright(logits: NDArray[np.float32], f: Filters, key: NDArray[np.uint32]) -> int:
    """The race over every token, in float64."""
    e = sampling.exponential(sampling.random_bits(key, sampling.mixed_ids(logits.size)))
    return int(np.argmin(np.log(e) - filtered_logits(logits, f)))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    scale=st.sampled_from([0.0, 1e-3, 0.5, 3.0, 1e4, 1e30]),
    temperature=st.sampled_from([1e-5, 0.01, 0.7, 1.0, 5.0, 1e30]),
    top_p=st.sampled_from([1.0, 0.99]),
)
def test_the_short_cut_of_the_race_finds_its_winner(seed: int, scale: float, temperature: float, top_p: float) -> None:
    logits = gaussian(seed % 97, 3000, scale)
    f = filters(3000, temperature, top_p=top_p)
    key = sampling.keys(np.array([seed], np.uint64), np.array([3]))[0]
    with np.errstate(over="ignore"):
        assert Drawer(3000).draw(logits, logits.max(), f, key) == outright(logits, f, key)


def test_a_filter_that_removes_losers_only_does_not_change_the_choice() -> None:
    """Noise belongs to the token: the winner still wins among fewer."""
    drawer = Drawer(3000)
    for seed in range(50):
        logits = gaussian(seed, 3000)
        key = sampling.keys(np.array([seed], np.uint64), np.array([3]))[0]
        free = drawer.draw(logits, logits.max(), filters(3000), key)
        kept = filtered_logits(logits, filters(3000, top_k=100))
        if np.isfinite(kept[free]):
            assert drawer.draw(logits, logits.max(), filters(3000, top_k=100), key) == free


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1000), size=st.sampled_from([3, 100, 5000]), k=st.sampled_from([0, 1, 5, 100]))
def test_logprobs_are_log_softmax(seed: int, size: int, k: int) -> None:
    logits = gaussian(seed, size)
    token = seed % size
    expected = special.log_softmax(logits.astype(np.float64))
    result = position_logprobs(logits, token, k)
    order = np.argsort(-logits, kind="stable")
    assert result.token_id == token
    assert result.rank == order.tolist().index(token) + 1
    assert result.top_ids == order[:k].tolist()
    assert result.logprob == pytest.approx(expected[token], abs=1e-5)
    assert result.top_logprobs == pytest.approx(expected[order[:k]].tolist(), abs=1e-5)


def test_rank_counts_strictly_greater_logits() -> None:
    assert position_logprobs(np.array([1, 3, 3, 2], np.float32), 2, 0).rank == 1
    assert position_logprobs(np.array([1, 3, 3, 2], np.float32), 3, 0).rank == 3


@pytest.mark.parametrize(
    "logits", [[0.0, -np.inf, 1.0], [np.nan, 0.0, 1.0], [-np.inf] * 3, [np.inf, 0.0, 0.0], [3e38, -3e38, 0.0]]
)
def test_logprobs_are_finite_numbers_whatever_the_logits(logits: list[float]) -> None:
    result = position_logprobs(np.array(logits, np.float32), 1, 3)
    json.dumps([result.logprob, *result.top_logprobs], allow_nan=False)
    assert all(x >= FLOOR for x in (result.logprob, *result.top_logprobs))
    assert result.rank in (1, 2, 3)


def test_an_impossible_token_has_the_floor() -> None:
    result = position_logprobs(np.array([0.0, -np.inf], np.float32), 1, 2)
    assert (result.logprob, result.rank, result.top_logprobs) == (FLOOR, 2, [0.0, FLOOR])


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 500])
def test_a_mask_is_as_good_as_minus_infinity_in_the_logits(vocab: int) -> None:
    each = [filters(vocab), filters(vocab, top_k=3), filters(vocab, top_p=0.7), Filters(0.0, 0, 0.0, 0.0)]
    n = len(each)
    logits = np.stack([gaussian(i, vocab) for i in range(n)])
    logits[:, vocab // 2] = np.nan
    allowed = np.random.default_rng(vocab).random((n, vocab)) < 0.5
    allowed[0] = True
    written = np.where(allowed, logits, np.float32(-np.inf))
    records = np.array([astuple(f) for f in each], FILTERS)
    keys = sampling.keys(np.arange(n, dtype=np.uint64), np.arange(n))
    mask = np.stack([pack_mask(row) for row in allowed])
    given, backend = logits, NumpySampling(vocab)
    assert backend.choose(given, records, keys, mask).tolist() == backend.choose(written, records, keys).tolist()
    assert np.array_equal(given.view(np.int32), written.view(np.int32))
