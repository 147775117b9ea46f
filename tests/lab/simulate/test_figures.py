"""Figures of a run: exact where they can be, and of bounded size."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from octavo.lab.simulate.figures import Completions, Gaps, Latency, Series, rates
from octavo.lab.workloads.work_items import WorkItem


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


def test_goodput_counts_requests_within_all_their_targets() -> None:
    done = Completions()

    def item(ttft: float | None = None, tpot: float | None = None) -> WorkItem:
        return WorkItem(at=0, input_len=5, output_len=5, ttft_target=ttft, tpot_target=tpot)

    assert rates(done, Gaps())["goodput_share"] is None
    done.add(0, item(), 0.0, 9.0, 10.0, 5)  # without targets: neither good nor bad
    assert rates(done, Gaps())["goodput_requests_per_s"] is None
    done.add(1, item(ttft=1.0, tpot=0.25), 0.0, 1.0, 2.0, 5)  # both just met
    done.add(2, item(ttft=1.0, tpot=0.25), 0.0, 1.0, 2.5, 5)  # tokens too slow
    done.add(3, item(ttft=1.0), 0.0, 1.5, 1.6, 5)
    done.add(4, item(tpot=0.01), 2.0, 20.0, 20.0, 1)  # one token has none after it
    done.fail(item(ttft=50.0), "error")
    done.fail(item(), "error")
    found = rates(done, Gaps())
    assert (done.with_targets, done.met_targets) == (5, 2)
    assert found["goodput_share"] == 0.4 and found["goodput_requests_per_s"] == 2 / 20.0
    assert found["requests"] == 5 and found["failed"] == {"error": 2}
