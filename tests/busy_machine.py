"""What lets tests pass on a machine that is slow or busy, while a fault still fails them."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # nothing more is imported: a program that times its own imports imports this module
    from collections.abc import Callable

#: Seconds after which a test says that something hangs. No property is measured by it: a slow machine takes its time.
PATIENCE = 240.0


def once_in_three(measure: Callable[[], dict[str, bool]]) -> None:
    """Asserts that all claims of a measurement of real time hold together in one of three tries.

    A busy machine may spoil one try, hardly three; a fault spoils all. ``measure`` returns the claims, and whether each
    holds; what does not depend on time it asserts itself, and that fails at once.
    """
    broken: list[str] = []
    for _ in range(3):
        broken = [claim for claim, holds in measure().items() if not holds]
        if not broken:
            return
    raise AssertionError(f"three times over, at last: {broken}")


def once(measure: Callable[[], dict[str, bool]]) -> None:
    """Runs a measurement for what it asserts itself; its claims of real time are another test's, see ``tries``."""
    measure()


def held_up(process: int | str = "self") -> float:
    """Seconds for which a process of one thread was ready to run while others had the processors; 0 where unknown.

    Source: the second figure of /proc/PID/schedstat, in nanoseconds (Linux, Documentation/scheduler/sched-stats).
    """
    try:
        with open(f"/proc/{process}/schedstat") as f:
            return int(f.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def eventually(condition: Callable[[], bool], what: Callable[[], str] = lambda: "it did not come true") -> None:
    """Waits for an event that nobody announces; ``what`` says what is wrong when it does not come."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.01)
