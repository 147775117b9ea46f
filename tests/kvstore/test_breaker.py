"""The circuit breaker."""

from __future__ import annotations

import logging

import pytest

from octavo.kvstore.breaker import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker("the service", clock)
    for _ in range(FAILURES):
        assert breaker.allows()
        breaker.failed("no route")
    return breaker


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker("the service")
    for _ in range(10):
        breaker.failed("lost")
        breaker.succeeded()
        assert breaker.allows() and not breaker.trouble


def test_one_caller_tries_after_each_pause_and_pauses_grow_to_a_limit() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert breaker.trouble == "no route"
    pauses = []
    for _ in range(8):
        began = clock.now
        while not breaker.allows():
            clock.now += 0.5
        assert not breaker.allows()
        pauses.append(clock.now - began)
        breaker.failed("still no route")
    assert pauses == sorted(pauses) and pauses[0] == FIRST_PAUSE and pauses[-1] == LONGEST_PAUSE
    assert breaker.trouble == "still no route"


def test_a_success_closes_it_and_pauses_begin_anew() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += FIRST_PAUSE
    assert breaker.allows()
    breaker.failed("lost")
    clock.now += 2 * FIRST_PAUSE
    assert breaker.allows()
    breaker.succeeded()
    assert not breaker.trouble and breaker.allows() and breaker.allows()
    for _ in range(FAILURES):
        breaker.failed("lost")
    clock.now += FIRST_PAUSE
    assert breaker.allows()


def test_each_change_of_state_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo")
    clock = Clock()
    breaker = opened(clock)
    for _ in range(5):
        clock.now += LONGEST_PAUSE
        assert breaker.allows()
        breaker.failed("no route")
    breaker.succeeded()
    breaker.succeeded()
    assert [record.getMessage() for record in caplog.records] == [
        "the service is not used for now: no route",
        "the service is used again",
    ]
