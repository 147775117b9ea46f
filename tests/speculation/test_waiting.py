"""Whether steps wait for results, by what drafts bring and what waiting costs."""

from __future__ import annotations

import pytest

from octavo.speculation.speculator import Waiting


def share_of_waits(accepted: float, idle: float, steps: int = 1000) -> float:
    waiting, waits = Waiting(), 0
    for _ in range(steps):
        waits += waiting.waits
        waiting.observe(waiting.waits, accepted if waiting.waits else 0.0, idle if waiting.waits else 0.0)
    return waits / steps


CASES = [(0.0, 0.2, 0.1), (0.1, 0.2, 0.1), (0.01, 0.0, 0.1), (0.3, 0.2, 1.0), (0.1, 0.0, 1.0)]


@pytest.mark.parametrize(("accepted", "idle", "waits"), CASES)
def test_steps_wait_where_drafts_bring_more_than_a_device_loses(accepted: float, idle: float, waits: float) -> None:
    assert share_of_waits(accepted, idle) == pytest.approx(waits, abs=0.06)


def test_it_is_seen_when_drafts_begin_to_pay_and_new_sequences_are_tried() -> None:
    waiting = Waiting()
    for _ in range(300):
        waiting.observe(waiting.waits, 0.0, 0.2)
    waits = 0
    for _ in range(60):
        waits += waiting.waits
        waiting.observe(waiting.waits, 4.0 if waiting.waits else 0.0, 0.2)
    assert waits >= 40
    for _ in range(300):
        waiting.observe(waiting.waits, 0.0, 0.2)
    while waiting.waits:
        waiting.observe(True, 0.0, 0.2)
    waiting.begin()
    assert waiting.waits
