"""Queues of groups that do not run."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies import FirstComeFirstServed, Policy

#: (key, arrival, stamp, group): the stamp tells the current entry of a group from its stale ones.
_Entry = tuple[Any, tuple[float, int], int, SequenceGroup]
#: Stale entries allowed before they are cleared out, beyond the number of groups present.
_SLACK = 64


class Ordered(ABC):
    """Groups of which the first goes first: the oldest if it is urgent, else the first in the policy's order."""

    def __init__(self, aging_limit: float | None) -> None:
        self._aging_limit = aging_limit

    def peek(self, now: float) -> SequenceGroup | None:
        """The first group, or None if there is none; ``now`` on the clock of the arrival times."""
        if self._aging_limit is not None:
            oldest = self.earliest()
            if oldest is not None and (oldest.urgent or now - oldest.request.arrival_time > self._aging_limit):
                oldest.urgent = True
                return oldest
        return self.first_by_key()

    @abstractmethod
    def earliest(self) -> SequenceGroup | None:
        """The group that arrived first, or None if there is none."""

    @abstractmethod
    def first_by_key(self) -> SequenceGroup | None:
        """The first in the policy's order, however long others wait; None if there is none."""


class GroupQueue(Ordered):
    """Groups that do not run, in the policy's order; the cost of its methods does not grow with its length.

    With an ``aging_limit``, a group that arrived longer ago becomes *urgent*: urgent groups go before all others, in
    order of arrival. So from then on no later arrival goes before it, whatever the policy.
    """

    def __init__(self, policy: Policy, aging_limit: float | None) -> None:
        """``aging_limit`` in seconds; None: no group becomes urgent."""
        super().__init__(aging_limit)
        self._policy = policy
        self._by_key: list[_Entry] = []
        # Under first come, first served both orders are the same.
        self._by_arrival: list[_Entry] = self._by_key if type(policy) is FirstComeFirstServed else []
        self._stamps: dict[int, int] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group.group_id in self._stamps

    def push(self, group: SequenceGroup) -> None:
        """Adds a group in its order. In order of arrival this takes constant time."""
        self._pushes += 1
        self._stamps[group.group_id] = self._pushes
        entry = (self._policy.key(group), group.arrival, self._pushes, group)
        heapq.heappush(self._by_key, entry)
        if self._by_arrival is not self._by_key:
            heapq.heappush(self._by_arrival, (group.arrival, *entry[1:]))

    def earliest(self) -> SequenceGroup | None:
        """As ``Ordered``."""
        return self._first(self._by_arrival)

    def first_by_key(self) -> SequenceGroup | None:
        """As ``Ordered``."""
        return self._first(self._by_key)

    def groups(self) -> list[SequenceGroup]:
        """All groups, in no order."""
        return [entry[3] for entry in self._by_arrival if self._is_present(entry)]

    def remove(self, group: SequenceGroup) -> None:
        """Removes a group from any position; its entries become stale and are skipped later."""
        del self._stamps[group.group_id]
        for heap in (self._by_key, self._by_arrival):
            if len(heap) > 2 * len(self._stamps) + _SLACK:  # some may never be reached
                heap[:] = [entry for entry in heap if self._is_present(entry)]
                heapq.heapify(heap)

    def _first(self, heap: list[_Entry]) -> SequenceGroup | None:
        while heap:
            if self._is_present(heap[0]):
                return heap[0][3]
            heapq.heappop(heap)
        return None

    def _is_present(self, entry: _Entry) -> bool:
        return self._stamps.get(entry[3].group_id) == entry[2]


@dataclass(slots=True)
class _Lane:
    #: By arrival; stale entries are skipped later.
    groups: list[_Entry] = field(default_factory=list)
    #: Its current entry among the lanes; earlier ones are stale.
    listed: _Entry | None = None


class LaneQueue(GroupQueue):
    """A queue in which keys may grow while groups wait, such as what a user has been served.

    Groups of one lane go in order of arrival, so only the first of each lane is compared with others. A lane whose key
    has grown is noticed when it comes first: then it is put back where it belongs. So a step costs as much as there are
    lanes that were served, however many groups wait in them.
    """

    def __init__(self, policy: Policy, aging_limit: float | None) -> None:
        """As ``GroupQueue``."""
        super().__init__(policy, aging_limit)
        self._lanes: dict[Hashable, _Lane] = {}
        #: By group id, where each is, whatever the policy would say now.
        self._names: dict[int, Hashable] = {}

    def push(self, group: SequenceGroup) -> None:
        """As ``GroupQueue``."""
        self._pushes += 1
        self._stamps[group.group_id] = self._pushes
        entry = (group.arrival, group.arrival, self._pushes, group)
        heapq.heappush(self._by_arrival, entry)
        name = self._names[group.group_id] = self._policy.lane(group)
        lane = self._lanes.setdefault(name, _Lane())
        heapq.heappush(lane.groups, entry)
        if self._first(lane.groups) is group:
            self._list(lane)

    def remove(self, group: SequenceGroup) -> None:
        """As ``GroupQueue``."""
        super().remove(group)
        name = self._names.pop(group.group_id)
        lane = self._lanes[name]
        if self._first(lane.groups) is None:
            del self._lanes[name]
        elif lane.listed is not None and lane.listed[3] is group:
            self._list(lane)
        if len(lane.groups) > 2 * len(self._stamps) + _SLACK:
            lane.groups = [entry for entry in lane.groups if self._is_present(entry)]
            heapq.heapify(lane.groups)

    def _list(self, lane: _Lane) -> None:
        lane.listed = self._entry_of(lane)
        heapq.heappush(self._by_key, lane.listed)

    def _entry_of(self, lane: _Lane) -> _Entry:
        arrival, _, stamp, group = lane.groups[0]
        return self._policy.key(group), arrival, stamp, group

    def first_by_key(self) -> SequenceGroup | None:
        """As ``Ordered``."""
        heap = self._by_key
        compared = set[int]()  # each once: a key may be another one whenever it is asked for
        while heap:
            entry = heap[0]
            lane = self._lanes.get(self._names.get(entry[3].group_id))
            if lane is None or lane.listed is not entry:
                heapq.heappop(heap)
                continue
            current = self._entry_of(lane)
            if current[0] == entry[0] or id(lane) in compared:
                return entry[3]
            compared.add(id(lane))
            lane.listed = current
            heapq.heapreplace(heap, current)
        return None


def make_queue(policy: Policy, aging_limit: float | None) -> GroupQueue:
    """The queue that this policy needs."""
    return (LaneQueue if policy.waiting_keys_grow else GroupQueue)(policy, aging_limit)
