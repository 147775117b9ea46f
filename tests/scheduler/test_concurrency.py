"""Tests of ``ConcurrencyLimit``, and of a scheduler with ``adapt_num_seqs``."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from octavo.config.engine_config import make_config
from octavo.lab.bench.allocators import CASES, PAGED_AUTO, make_options, simulate_case
from octavo.lab.simulate.step_profile import load_profile
from octavo.scheduler.concurrency import FLOOR, ConcurrencyLimit

#: Seconds of a step with this many sequences.
Curve = Callable[[int], float]


def knee(fixed: float, each: float, at: float, beyond: float) -> Curve:
    """A step takes ``fixed`` and ``each`` for every sequence, and ``beyond`` for each one above ``at``."""
    return lambda n: fixed + each * n + beyond * max(0.0, n - at)


def drive(
    limit: ConcurrencyLimit, curve: Curve, steps: int, *, width: int = 1, noise: Callable[[], float] = lambda: 1.0
) -> int:
    """Runs as many requests of ``width`` sequences as it allows, with more waiting; each ends after some 20 steps.

    Returns the number of sequences at the end.
    """
    ages: list[int] = []
    for step in range(steps):
        ages = [age + 1 for age in ages if age < 20 + age % 3]
        admitted = 0
        while len(ages) * width + width <= 256 and limit.allows(len(ages) * width, width, memory_is_short=True):
            ages.append(step % 7)
            admitted += 1
        running = len(ages) * width
        limit.observe(running, None if admitted else curve(running) * noise())
    return len(ages) * width


def per_token(curve: Curve, num_seqs: int) -> float:
    return curve(num_seqs) / num_seqs


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    fixed=st.floats(1e-3, 0.1),
    each=st.floats(1e-6, 1e-2),
    at=st.integers(4, 200),
    beyond=st.floats(0, 5e-2),
    width=st.sampled_from([1, 2, 4, 6]),
)
def test_a_token_costs_little_more_than_at_the_knee(
    fixed: float, each: float, at: int, beyond: float, width: int
) -> None:
    curve, limit = knee(fixed, each, at, beyond), ConcurrencyLimit(256)
    drive(limit, curve, 500, width=width)
    # A level is half an octave wide, and a line is drawn from one to the next.
    lowest = max(FLOOR // width, 1) * width
    least = min(per_token(curve, n) for n in range(lowest, 257, width))
    reached = max(limit.limit // width, 1) * width
    assert per_token(curve, reached) <= 1.5 * least
    assert FLOOR <= limit.limit <= 256


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 20), slow=st.floats(1.5, 8.0))
def test_a_busy_machine_does_not_push_the_limit_down_for_ever(seed: int, slow: float) -> None:
    rng, curve, limit = random.Random(seed), knee(0.01, 2e-4, 64, 2e-3), ConcurrencyLimit(256)
    drive(limit, curve, 600)
    calm = limit.limit
    assert 45 <= calm <= 91
    drive(limit, curve, 600, noise=lambda: slow if rng.random() < 0.3 else 1.0)  # other processes, now and then
    drive(limit, curve, 600, noise=lambda: slow)  # and all the time
    drive(limit, curve, 1200)
    assert calm / 2 <= limit.limit <= calm * 2


@settings(max_examples=25, deadline=None)
@given(
    most=st.integers(1, 300),
    steps=st.lists(
        st.tuples(st.integers(0, 300), st.one_of(st.none(), st.floats(0, 1e3)), st.floats(0, 10), st.integers(1, 8)),
        max_size=120,
    ),
)
def test_it_is_bounded_never_starves_and_the_same_calls_give_the_same_limits(
    most: int, steps: list[tuple[int, float | None, float, int]]
) -> None:
    def limits() -> list[int]:
        limit, found = ConcurrencyLimit(most), []
        for num_seqs, seconds, lost, width in steps:
            limit.allows(num_seqs, width, memory_is_short=True)
            limit.observe(num_seqs, seconds)
            limit.observe_loss(num_seqs, lost)
            assert min(FLOOR, most) <= limit.limit <= most
            assert limit.allows(0, width, memory_is_short=True)
            found.append(limit.limit)
        return found

    assert limits() == limits()


def test_time_lost_to_preemption_lowers_it_and_fades() -> None:
    curve, limit = knee(0.01, 1e-4, 0, 0.0), ConcurrencyLimit(64)
    drive(limit, curve, 300)
    assert limit.limit == 64
    for _ in range(20):
        limit.observe(64, curve(64))
        limit.observe_loss(64, 0.1)
    assert limit.limit < 64
    drive(limit, curve, 3000)
    assert limit.limit == 64


def test_without_steps_of_decodes_alone_it_rises_all_the_same() -> None:
    limit = ConcurrencyLimit(64)
    for _ in range(200):
        running = limit.limit
        assert limit.allows(running, 1, memory_is_short=True) == (running < limit.limit)
        limit.observe(running, None)
    assert limit.limit == 64


def test_with_memory_to_spare_only_steps_that_were_too_slow_hold_requests_back() -> None:
    limit = ConcurrencyLimit(64)
    assert limit.allows(40, 1, memory_is_short=False)
    for num_seqs, seconds in ((16, 0.010), (64, 0.200)):
        for _ in range(3):
            limit.observe(num_seqs, seconds)
    assert not limit.allows(50, 1, memory_is_short=False)
    assert limit.allows(15, 1, memory_is_short=False)


@pytest.mark.parametrize("name", ["samples-2", "samples-4", "samples-6"])
def test_paging_is_not_below_contiguous_memory_with_an_oracle(name: str) -> None:
    case, profile = CASES[name], load_profile("smollm2-135m-epyc-2-cores")
    options, items = make_options(make_config(model="none"), [case]), CASES[name].items(0, 6)
    auto, fixed, oracle = (simulate_case(profile, options, case, a, items) for a in (PAGED_AUTO, "paged", "oracle"))
    assert auto.requests_per_s > max(fixed.requests_per_s, oracle.requests_per_s)
    assert auto.recomputed_tokens < fixed.recomputed_tokens / 2
