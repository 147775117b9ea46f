"""Arrivals and lengths against the moments of their distributions; texts that describe them."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.lab.workloads.arrivals import Arrivals, AtOnce, Day, Gamma, Steps, Ticks, parse_arrivals
from octavo.lab.workloads.draws import Weighted, poisson, zipf
from octavo.lab.workloads.lengths import (
    Constant,
    Geometric,
    Lengths,
    Lognormal,
    Poisson,
    Uniform,
    chat_inputs,
    chat_outputs,
    instruct_inputs,
    instruct_outputs,
    parse_inputs,
    parse_outputs,
)

MANY = 40_000


def times(arrivals: Arrivals, count: int = MANY) -> np.ndarray:
    return np.array(list(itertools.islice(arrivals.times(random.Random(5)), count)))


def draws(lengths: Lengths, count: int = MANY) -> np.ndarray:
    rng = random.Random(3)
    return np.array([lengths.draw(rng) for _ in range(count)])


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0), (math.inf, 0.0)])
def test_gaps_keep_rate_and_burstiness(burstiness: float, variation: float) -> None:
    at = times(Gamma(8.0, burstiness))
    gaps = np.diff(at)
    assert at[0] == 0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.03, abs=1e-6)


def test_ticks_are_poisson_distributed() -> None:
    gaps = np.rint(np.diff(times(Ticks(100.0))) / 0.001)
    assert gaps.mean() == pytest.approx(10, rel=0.01) and gaps.var() == pytest.approx(10, rel=0.03)
    dense = np.rint(np.diff(times(Ticks(1000.0))) / 0.001)
    assert (dense == 0).mean() == pytest.approx(math.exp(-1), rel=0.03)


@pytest.mark.parametrize("arrivals", [Day(2, 20, 100), Steps(25, (2, 20, 8, 0))], ids=["day", "steps"])
def test_a_varying_rate_is_kept_at_every_time(arrivals: Day | Steps) -> None:
    at = times(arrivals)
    periods = int(at[-1] // 100)
    at = at[at < 100 * periods]
    assert len(at) / (100 * periods) == pytest.approx(arrivals.mean_rate, rel=0.02)
    found, edges = np.histogram(at % 100, bins=20, range=(0, 100))
    for count, middle in zip(found, (edges[:-1] + edges[1:]) / 2, strict=True):
        # Within a bin the cosine is nearly a line; four deviations of the count.
        expected = arrivals.rate_at(middle) * 5 * periods
        assert count == pytest.approx(expected, rel=0.02, abs=4 * math.sqrt(expected))


def test_all_at_once() -> None:
    assert set(times(AtOnce(), 5)) == {0.0}
    assert parse_arrivals("poisson", math.inf) == AtOnce()


@pytest.mark.parametrize("mean", [0.3, 1, 20, 80, 3000])
def test_poisson_draws_have_mean_and_variance(mean: float) -> None:
    rng = random.Random(1)
    found = np.array([poisson(mean).draw(rng) for _ in range(MANY)])
    assert found.mean() == pytest.approx(mean, rel=0.01, abs=0.02)
    assert found.var() == pytest.approx(mean, rel=0.03)
    if mean == 1:
        for k in range(4):
            assert (found == k).mean() == pytest.approx(math.exp(-1) / math.factorial(k), abs=0.01)


def test_weights_are_kept_and_the_ends_are_reached() -> None:
    table, rng = Weighted(zipf(4, 1.0)), random.Random(2)
    found = np.bincount([table.draw(rng) for _ in range(MANY)], minlength=4) / MANY
    assert found == pytest.approx(np.array([1, 1 / 2, 1 / 3, 1 / 4]) * 12 / 25, abs=0.01)
    assert Weighted([0.0, 1.0, 0.0]).draw(rng) == 1


@pytest.mark.parametrize(
    ("lengths", "deviation"),
    [
        (Constant(7), 0),
        (Uniform(3, 6), math.sqrt(15 / 12)),
        (Poisson(20), math.sqrt(20)),
        (Geometric(30), math.sqrt(30 * 29)),
        (Lognormal(200, 0.3), 200 * math.exp(0.045) * math.sqrt(math.expm1(0.09))),
    ],
    ids=repr,
)
def test_lengths_have_mean_and_deviation(lengths: Lengths, deviation: float) -> None:
    found = draws(lengths)
    assert found.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert found.std() == pytest.approx(deviation, rel=0.02)
    assert found.min() >= 1 and found.max() <= lengths.most


def test_a_uniform_length_reaches_both_ends_alike() -> None:
    found = np.bincount(draws(Uniform(3, 6)), minlength=7) / MANY
    assert found[3:] == pytest.approx(0.25, abs=0.01)


def test_a_lognormal_is_truncated() -> None:
    lengths = Lognormal(200, 0.8, 500)
    found = draws(lengths)
    assert found.max() == 500 and found.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert np.median(found) == pytest.approx(200, rel=0.02)
    assert draws(Lognormal(1, 2.0)).min() == 1
    assert Lognormal(1, 2.0).mean == pytest.approx(np.maximum(1, np.exp(2 * normal())).mean(), rel=0.03)


def normal() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1_000_000)


@pytest.mark.parametrize(
    ("lengths", "mean"),
    [(chat_inputs(), 161.31), (chat_outputs(), 337.99), (instruct_inputs(), 19.31), (instruct_outputs(), 58.45)],
    ids=["chat in", "chat out", "instruct in", "instruct out"],
)
def test_fits_have_the_published_means(lengths: Lognormal, mean: float) -> None:
    assert lengths.mean == pytest.approx(mean, abs=1e-6)
    found = draws(lengths, 100_000)
    assert found.mean() == pytest.approx(mean, rel=0.015)
    assert found.max() <= 2048


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("128", Constant(128)),
        ("constant:5", Constant(5)),
        ("uniform:64,256", Uniform(64, 256)),
        ("poisson:20", Poisson(20)),
        ("geometric:4", Geometric(4)),
        ("lognormal:200,0.8", Lognormal(200, 0.8)),
        ("lognormal:200,0.8,2000", Lognormal(200, 0.8, 2000)),
        ("chat", chat_inputs()),
        ("instruct", instruct_inputs()),
    ],
)
def test_texts_of_lengths(text: str, lengths: Lengths) -> None:
    assert parse_inputs(text) == lengths
    assert parse_outputs("chat") == chat_outputs()


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "1.5", "x", "uniform:9,3", "uniform:3", "normal:9,3", "poisson:0", "poisson:nan", "poisson:1e12"),
        *("lognormal:200", "lognormal:200,-1", "lognormal:inf,1", "lognormal:5,1,0", "chat:3", "geometric:0.5", "1,2"),
        *("constant:inf", "uniform:1,", "128:"),
    ],
)
def test_a_wrong_length_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a length is N, constant:N, uniform:LOW,HIGH") as e:
        parse_inputs(text)
    assert repr(text) in str(e.value)


@pytest.mark.parametrize(
    ("text", "rate", "burstiness", "arrivals", "shown"),
    [
        ("poisson", 4.0, None, Gamma(4.0), "poisson, 4/s"),
        ("poisson:4", None, None, Gamma(4.0), "poisson, 4/s"),
        ("gamma:4,0.5", None, None, Gamma(4.0, 0.5), "gamma of shape 0.5, 4/s"),
        ("gamma", 4.0, 0.5, Gamma(4.0, 0.5), "gamma of shape 0.5, 4/s"),
        ("fixed", 50.0, None, Gamma(50.0, math.inf), "fixed, 50/s"),
        ("at-once", None, None, AtOnce(), "all at once"),
        ("ticks:1000", None, None, Ticks(1000.0), "gaps of Poisson distributed ticks, 1000/s"),
        ("day:1,9", None, None, Day(1, 9), "1 to 9/s over 86400 s"),
        ("steps:60,5,20", None, None, Steps(60, (5, 20)), "5, 20/s, 60 s each"),
    ],
)
def test_texts_of_arrivals(
    text: str, rate: float | None, burstiness: float | None, arrivals: Arrivals, shown: str
) -> None:
    found = parse_arrivals(text, rate, burstiness)
    assert found == arrivals and str(found) == shown


@pytest.mark.parametrize(
    ("text", "rate", "burstiness", "message"),
    [
        ("poisson", None, None, "need a rate"),
        ("poisson:4", 4.0, None, "leave out --rate"),
        ("fixed", 4.0, 2.0, "no burstiness"),
        ("sometimes", None, None, "an arrival process is poisson:RATE"),
        ("poisson:0", None, None, "a rate must be above 0"),
        ("gamma:4,0", None, None, "a burstiness must be above 0"),
        ("day:9,1", None, None, "LOW must be from 0 to HIGH"),
        ("steps:60,0,0", None, None, "a rate above 0"),
        ("steps:0,4", None, None, "more than 0"),
        ("ticks:1,1e-12", None, None, "too short"),
    ],
)
def test_wrong_arrivals_are_refused(text: str, rate: float | None, burstiness: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arrivals(text, rate, burstiness)
