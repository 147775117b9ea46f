"""Figures of a run: exact where they can be, and of bounded size."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from octavo.simulate.figures import Gaps, Latency, Series


def test_percentiles_of_gaps_are_within_half_a_percent() -> None:
    rng, gaps = random.Random(1), Gaps()
    seconds = [rng.lognormvariate(-3, 1.5) for _ in range(5000)]
    for gap in seconds:
        gaps.add(gap, 3)
    found, wanted = gaps.latency(), Latency.of(np.array(seconds))
    assert found is not None and wanted is not None
    assert found.mean == pytest.approx(wanted.mean) and found.max == wanted.max
    for name in ("p50", "p90", "p99"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=0.01)


def test_without_values_there_is_no_latency() -> None:
    assert Gaps().latency() is None and Latency.of(np.array([])) is None


def test_a_series_stays_small_and_covers_the_whole_run() -> None:
    series = Series(("value",), most=64)
    for step in range(100_000):
        if step * 0.5 >= series.next:
            series.add(step * 0.5, step)
    columns = series.columns()
    seconds = columns["seconds"]
    assert 16 <= len(seconds) < 64
    assert seconds[0] == 0 and seconds[-1] > 45_000
    assert all(value == 2 * second for value, second in zip(columns["value"], seconds, strict=True))
    later = [b - a for a, b in itertools.pairwise(seconds)]
    assert max(later) < 4 * min(later)
