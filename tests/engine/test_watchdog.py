"""Which engine cores are taken to hang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from octavo.engine.replicas import Replica


class Waits:
    """Says that the core had no processor for a share of the time since the last look."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def since_last(self, pids: list[int]) -> float:
        assert pids == [1]
        return self.seconds


def replica(held_up: float) -> Replica:
    core: Any = SimpleNamespace(pid=1)
    found = Replica(0, core, restarts=None)  # type: ignore[arg-type]
    waits: Any = Waits(held_up)
    found.waits = waits
    return found


def looks_until_hung(watched: Replica, most: int = 1000) -> int | None:
    return next((look for look in range(most) if watched.is_hung(1.0, 10.0)), None)


def test_a_core_that_could_run_and_does_no_step_hangs_after_its_patience() -> None:
    watched = replica(held_up=0.0)
    watched.open[1] = None  # type: ignore[assignment]
    assert looks_until_hung(watched) == 11


def test_the_time_in_which_it_had_no_processor_does_not_count() -> None:
    watched = replica(held_up=0.9)
    watched.open[1] = None  # type: ignore[assignment]
    found = looks_until_hung(watched)
    assert found is not None and 95 < found < 110
    starved = replica(held_up=1.0)
    starved.open[1] = None  # type: ignore[assignment]
    assert looks_until_hung(starved) is None


def test_a_step_and_the_end_of_all_requests_begin_it_anew() -> None:
    watched = replica(held_up=0.0)
    watched.open[1] = None  # type: ignore[assignment]
    for _ in range(9):
        assert not watched.is_hung(1.0, 10.0)
    watched.num_steps += 1
    assert looks_until_hung(watched) == 11
    watched.open.clear()
    assert looks_until_hung(watched) is None
