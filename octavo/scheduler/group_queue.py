"""A queue of groups in a policy's order, whose cost does not grow with its length."""

from __future__ import annotations

import heapq
from typing import Any

from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies import FirstComeFirstServed, Policy

#: (key, arrival, stamp, group): the stamp tells a group's present entry from those it has left behind.
_Entry = tuple[Any, int, int, SequenceGroup]
#: Entries of groups that have left, beyond as many as those present, before they are cleared out.
_SLACK = 64


class GroupQueue:
    """Owns groups that do not run, in the policy's order.

    With an ``aging_limit``, a group that arrived longer ago becomes *urgent*: urgent groups go before all others, in
    order of arrival. So from then on no later arrival goes before it, whatever the policy.
    """

    def __init__(self, policy: Policy, aging_limit: float | None) -> None:
        """``aging_limit`` in seconds; None lets the policy have its way for ever."""
        self._policy = policy
        self._aging_limit = aging_limit
        self._by_key: list[_Entry] = []
        # First come first served has them in one order.
        self._by_arrival: list[_Entry] = self._by_key if type(policy) is FirstComeFirstServed else []
        self._stamps: dict[int, int] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group.group_id in self._stamps

    def push(self, group: SequenceGroup) -> None:
        """Adds a group in its order. In order of arrival this costs the same however long the queue is."""
        self._pushes += 1
        self._stamps[group.group_id] = self._pushes
        entry = (self._policy.key(group), group.arrival, self._pushes, group)
        heapq.heappush(self._by_key, entry)
        if self._aging_limit is not None and self._by_arrival is not self._by_key:
            heapq.heappush(self._by_arrival, (group.arrival, *entry[1:]))

    def head(self, now: float) -> SequenceGroup | None:
        """Who goes first, or None if the queue is empty; ``now`` on the clock of the arrival times."""
        if self._aging_limit is not None:
            oldest = self._first(self._by_arrival)
            if oldest is not None and (oldest.urgent or now - oldest.request.arrival_time > self._aging_limit):
                oldest.urgent = True
                return oldest
        return self._first(self._by_key)

    def remove(self, group: SequenceGroup) -> None:
        """Takes out a group, wherever it stands; its entries are skipped when they come up."""
        del self._stamps[group.group_id]
        for heap in (self._by_key, self._by_arrival):
            if len(heap) > 2 * len(self._stamps) + _SLACK:  # some may never come up
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
