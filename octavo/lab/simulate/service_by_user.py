"""Service of users over time, and how far it differs between those who wait; bounded memory."""

from __future__ import annotations

import itertools
from collections import Counter

from octavo.lab.simulate.engine import SimulatedEngine, SimulatedRequest
from octavo.lab.simulate.figures import Series, ServiceByUser
from octavo.scheduler.policies import OUTPUT_WEIGHT, PROMPT_WEIGHT

#: Users whose service is recorded: the first that are seen.
MOST_USERS = 12
_MOST_SAMPLES = 512


class ServiceRecorder:
    """Samples the service of users of one engine; a prompt counts from its request's first token on."""

    def __init__(self) -> None:
        names = tuple(f"{what} {i}" for what in ("served", "waits") for i in range(MOST_USERS))
        self.series = Series(names, _MOST_SAMPLES)
        #: Of users whose service is recorded.
        self.slots: dict[str, int] = {}
        #: By slot: weights, and the service of requests that have ended.
        self._weights = [1.0] * MOST_USERS
        self._served = [0.0] * MOST_USERS
        self._longest = 0

    def ended(self, request: SimulatedRequest) -> None:
        """Takes a request of a user that has ended."""
        user = request.item.user
        assert user is not None
        self._longest = max(self._longest, request.item.input_len)
        slot = self._slot(user)
        if slot is not None:
            self._weights[slot] = request.item.weight
            self._served[slot] += _service(request)

    def sample(self, engine: SimulatedEngine) -> None:
        """Adds a sample; takes time for each request that has a token, not for all that wait."""
        self.series.add(engine.now, *self._values(engine))

    def service(self, engine: SimulatedEngine) -> ServiceByUser | None:
        """What was recorded, up to now; None if no request had a user."""
        if not self.slots:
            return None
        columns = self.series.columns()
        if not columns["seconds"] or columns["seconds"][-1] < engine.now:
            for column, value in zip(columns.values(), (engine.now, *self._values(engine)), strict=True):
                column.append(value)
        slots = range(len(self.slots))
        served = [[value / self._weights[i] for value in columns[f"served {i}"]] for i in slots]
        waits = [columns[f"waits {i}"] for i in slots]
        difference = [0.0] * len(columns["seconds"])
        for i, j in itertools.combinations(slots, 2):
            found = _largest_changes(served[i], served[j], [a * b for a, b in zip(waits[i], waits[j], strict=True)])
            difference = list(map(max, difference, found))
        cache = engine.blocks.num_blocks * engine.options.block_size
        bound = 2 * max(PROMPT_WEIGHT * self._longest, OUTPUT_WEIGHT * cache) / min(self._weights[: len(slots)])
        all_wait = map(all, zip(*waits, strict=True))
        moments = itertools.dropwhile(lambda of: not of[1], zip(columns["seconds"], all_wait, strict=True))
        until = [seconds for seconds, _ in itertools.takewhile(lambda of: of[1], moments)]
        by_user = dict(zip(self.slots, served, strict=True))
        return ServiceByUser(columns["seconds"], by_user, difference, bound, until[-1] if until else 0.0)

    def _values(self, engine: SimulatedEngine) -> list[float]:
        """By slot, what was served so far; and 1 for those who have requests waiting or swapped, 0 for the others."""
        served, waits, running = list(self._served), [0.0] * MOST_USERS, Counter[str]()
        for request in engine.started.values():
            slot = None if request.item.user is None else self._slot(request.item.user)
            if slot is not None:
                served[slot] += _service(request)
        for group in engine.scheduler.queues.running:
            running[group.request.options.user] += 1
        for user in itertools.islice(engine.open_by_user, MOST_USERS):
            self._slot(user)
        for user, slot in self.slots.items():
            waits[slot] = float(engine.open_by_user[user] > running[user])
        return served + waits

    def _slot(self, user: str) -> int | None:
        """The user's; None if there are too many before."""
        slot = self.slots.get(user)
        if slot is None and len(self.slots) < MOST_USERS:
            slot = self.slots[user] = len(self.slots)
        return slot


def _service(request: SimulatedRequest) -> float:
    """Not by weight; a prompt counts from the first token on."""
    return (PROMPT_WEIGHT * request.item.input_len if request.tokens else 0.0) + OUTPUT_WEIGHT * request.tokens


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
