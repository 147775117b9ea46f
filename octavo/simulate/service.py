"""Service of users over time, and how far it differs between those who wait; bounded memory."""

from __future__ import annotations

import itertools
from collections import Counter

from octavo.scheduler.policies.fair import OUTPUT_WEIGHT, PROMPT_WEIGHT
from octavo.simulate.engine import SimulatedEngine, SimulatedRequest
from octavo.simulate.figures import Series, Service
from octavo.workloads.items import WorkItem

#: Users whose service is recorded: the first that are seen.
MOST_USERS = 12
_MOST_SAMPLES = 512


class ServiceRecorder:
    """Samples the service of users of one engine; a prompt counts from its request's first token on."""

    def __init__(self) -> None:
        self.series = Series(
            tuple(f"{what} {i}" for what in ("served", "waits") for i in range(MOST_USERS)), _MOST_SAMPLES
        )
        self._slots: dict[str, int] = {}
        self._weights: list[float] = []
        #: By slot, of requests that have ended.
        self._served = [0.0] * MOST_USERS
        self._longest = 0

    def ended(self, request: SimulatedRequest) -> None:
        """Takes a request of a user that has ended."""
        self._longest = max(self._longest, request.item.input_len)
        slot = self._slot(request.item)
        if slot is not None:
            self._served[slot] += self._service(request, slot)

    def sample(self, engine: SimulatedEngine) -> None:
        """Adds what open requests were served; takes time for each that has a token or runs, not for all that wait."""
        served, running = list(self._served), Counter[str]()
        for request in engine.started.values():
            if request.item.user is not None:
                slot = self._slot(request.item)
                if slot is not None:
                    served[slot] += self._service(request, slot)
        for group in engine.scheduler.queues.running:
            running[group.request.user] += 1
        waits = [0.0] * MOST_USERS
        for user, slot in self._slots.items():
            waits[slot] = float(engine.open_by_user[user] > running[user])
        self.series.add(engine.now, *served, *waits)

    def service(self, engine: SimulatedEngine) -> Service | None:
        """What was recorded; None if no request had a user."""
        if not self._slots:
            return None
        columns = self.series.columns()
        served = [columns[f"served {i}"] for i in range(len(self._slots))]
        waits = [columns[f"waits {i}"] for i in range(len(self._slots))]
        difference = [0.0] * len(columns["seconds"])
        for i, j in itertools.combinations(range(len(self._slots)), 2):
            found = _largest_changes(served[i], served[j], [a * b for a, b in zip(waits[i], waits[j], strict=True)])
            difference = list(map(max, difference, found))
        cache = engine.blocks.num_blocks * engine.options.block_size
        bound = 2 * max(PROMPT_WEIGHT * self._longest, OUTPUT_WEIGHT * cache) / min(self._weights)
        return Service(columns["seconds"], dict(zip(self._slots, served, strict=True)), difference, bound)

    def _slot(self, item: WorkItem) -> int | None:
        """The user's; None if there are too many before."""
        assert item.user is not None
        slot = self._slots.get(item.user)
        if slot is None and len(self._slots) < MOST_USERS:
            slot = self._slots[item.user] = len(self._slots)
            self._weights.append(item.weight)
        return slot

    def _service(self, request: SimulatedRequest, slot: int) -> float:
        prompt = request.item.input_len if request.tokens else 0
        return (PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * request.tokens) / self._weights[slot]


def _largest_changes(one: list[float], other: list[float], both_wait: list[float]) -> list[float]:
    """At each moment, how far ``one - other`` moved within an interval that ends then, in which both always wait."""
    changes = []
    least = most = 0.0
    waited = 0.0
    for a, b, wait in zip(one, other, both_wait, strict=True):
        now = a - b
        least, most = (min(least, now), max(most, now)) if waited and wait else (now, now)
        waited = wait
        changes.append(max(now - least, most - now))
    return changes
