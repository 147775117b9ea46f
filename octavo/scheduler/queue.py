"""The queue of groups that do not run (``GroupQueue``): in the policy's order, past those that cannot run yet."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies import Policy
from octavo.scheduler.preparations import PreparationState, Prepared

#: Arrivals differ, so groups are never compared.
_Arrived = tuple[tuple[float, int], SequenceGroup]
#: (policy's key, arrival, group).
_Entry = tuple[Any, tuple[float, int], SequenceGroup]
#: Stale entries that a heap keeps in excess of the number of groups.
_SLACK = 64


class GroupQueue:
    """Groups that do not run, in the policy's order; those whose preparations are missing are passed over.

    A group is in the part of the ``Prepared`` that it lacks, or may lack when its turn comes as that is scarce; without
    any, in the part ``ready``. The groups of a part are eligible while its preparation is usable. Those that wait for
    the KV stores are in the part ``held``, never eligible.
    """

    def __init__(
        self,
        policy: Policy,
        aging_limit: float | None,
        needs: Callable[[SequenceGroup], list[Prepared]],
        order: Callable[[SequenceGroup], tuple[Any, ...]],
    ) -> None:
        self._policy, self._aging_limit, self._needs, self._order = policy, aging_limit, needs, order
        self.ready, self._held = _Part(policy), _Part(policy)
        #: By key of the preparation. A plentiful one is never usable here: its groups leave when it is ready.
        self._scarce: dict[str, _PreparedPart] = {}
        self._plentiful: dict[str, _PreparedPart] = {}
        self._part_of: dict[int, _Part] = {}

    def __len__(self) -> int:
        return len(self._part_of)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group.group_id in self._part_of

    def push(self, group: SequenceGroup) -> None:
        part = self.ready
        if group.is_held:
            part = self._held
        elif group.preparations and (prepared := self._first_missing(self._needs(group))) is not None:
            parts = self._scarce if prepared.is_scarce else self._plentiful
            part = parts.setdefault(prepared.key, _PreparedPart(self._policy, prepared))
        part.push(group)
        self._part_of[group.group_id] = part

    @staticmethod
    def _first_missing(needs: list[Prepared]) -> Prepared | None:
        """A missing preparation, a plentiful one first; or one that is scarce, as its place may go to others."""
        scarce = [p for p in needs if p.is_scarce]
        plentiful = (p for p in needs if not p.is_scarce and p.state is not PreparationState.READY)
        return next(plentiful, None) or next((p for p in scarce if not p.is_usable), scarce[0] if scarce else None)

    def remove(self, group: SequenceGroup) -> None:
        part = self._part_of.pop(group.group_id)
        part.remove(group)
        if isinstance(part, _PreparedPart) and not len(part):
            del (self._scarce if part.prepared.is_scarce else self._plentiful)[part.prepared.key]

    def requeue(self, group: SequenceGroup) -> None:
        self.remove(group)
        self.push(group)

    def peek(self, now: float) -> SequenceGroup | None:
        """The first eligible group. One that has waited beyond ``aging_limit`` is *urgent*: it goes first."""
        if not self._scarce:
            return self._first_of(self.ready, now)
        eligible = [self.ready, *(part for part in self._scarce.values() if part.prepared.is_usable)]
        firsts = (self._first_of(part, now) for part in eligible)
        return min((group for group in firsts if group is not None), key=self._order, default=None)

    def peek_ready(self, now: float) -> SequenceGroup | None:
        return self._first_of(self.ready, now)

    def _first_of(self, part: _Part, now: float) -> SequenceGroup | None:
        return self._urgent(part.earliest(), now) or part.first()

    def _urgent(self, group: SequenceGroup | None, now: float) -> SequenceGroup | None:
        limit = self._aging_limit
        if group is None or limit is None or not (group.urgent or now - group.request.arrival_time > limit):
            return None
        group.urgent = True
        return group

    def peek_blocked(self, now: float) -> SequenceGroup | None:
        """The earliest group that waits for a scarce preparation without a place, if it is urgent."""
        # A preparation that has begun has its place.
        blocked = (
            part for part in self._scarce.values() if not (part.prepared.is_usable or part.prepared.is_preparing)
        )
        return self._urgent(_earliest(part.earliest() for part in blocked), now)

    def first_waiting_for(self, key: str, now: float) -> SequenceGroup | None:
        """The first group in the part of a preparation."""
        part = self._plentiful.get(key) or self._scarce.get(key)
        return None if part is None else self._first_of(part, now)

    def earliest(self) -> SequenceGroup | None:
        """The group that arrived first, eligible or not."""
        parts = self.ready, self._held, *self._scarce.values(), *self._plentiful.values()
        return _earliest(part.earliest() for part in parts)


def _earliest(groups: Iterable[SequenceGroup | None]) -> SequenceGroup | None:
    return min((g for g in groups if g is not None), key=lambda g: g.arrival, default=None)


@dataclass(slots=True, eq=False)
class _Lane:
    name: Hashable
    #: A heap.
    groups: list[_Arrived] = field(default_factory=list)
    #: Its current entry in the order; earlier ones are stale.
    entry: _Entry | None = None


class _Part:
    """Groups in the policy's order, as heaps: the cost of a method does not grow with their number.

    Where the keys of waiting groups may grow, such as the service that a user has received, the groups of one lane go
    in order of arrival, so only the first of each lane is compared with others. A lane whose key has grown is put back
    in order when it comes first: a step costs as much as there are lanes that were served. Elsewhere a lane is a group.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[Hashable, _Lane] = {}
        #: By a group's arrival, whatever the policy would say now.
        self._lane_of: dict[tuple[float, int], _Lane] = {}
        self._by_key: list[_Entry] = []
        self._by_arrival: list[_Arrived] = []

    def __len__(self) -> int:
        return len(self._lane_of)

    def push(self, group: SequenceGroup) -> None:
        name = self._policy.lane(group) if self._policy.waiting_keys_grow else group.arrival
        lane = self._lane_of[group.arrival] = self._lanes.get(name) or self._lanes.setdefault(name, _Lane(name))
        arrived = group.arrival, group
        heapq.heappush(lane.groups, arrived)
        heapq.heappush(self._by_arrival, arrived)
        if self._first_of(lane) is group:
            self._enter(lane)

    def remove(self, group: SequenceGroup) -> None:
        lane = self._lane_of.pop(group.arrival)
        if self._first_of(lane) is None:
            del self._lanes[lane.name]
        elif lane.entry is not None and lane.entry[2] is group:
            self._enter(lane)
        # Some stale entries are never reached.
        most, lane_of = 2 * len(self._lane_of) + _SLACK, self._lane_of.get
        if len(self._by_key) > most:
            self._by_key = [e for e in self._by_key if (of := lane_of(e[1])) is not None and of.entry is e]
            heapq.heapify(self._by_key)
        if len(self._by_arrival) > most:
            self._by_arrival = [arrived for arrived in self._by_arrival if arrived[0] in self._lane_of]
            heapq.heapify(self._by_arrival)
        if len(lane.groups) > most:
            lane.groups = [arrived for arrived in lane.groups if lane_of(arrived[0]) is lane]
            heapq.heapify(lane.groups)

    def _first_of(self, lane: _Lane) -> SequenceGroup | None:
        while lane.groups and self._lane_of.get(lane.groups[0][0]) is not lane:
            heapq.heappop(lane.groups)
        return lane.groups[0][1] if lane.groups else None

    def _enter(self, lane: _Lane) -> None:
        arrival, group = lane.groups[0]
        lane.entry = self._policy.key(group), arrival, group
        heapq.heappush(self._by_key, lane.entry)

    def earliest(self) -> SequenceGroup | None:
        heap = self._by_arrival
        while heap and heap[0][0] not in self._lane_of:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def first(self) -> SequenceGroup | None:
        """The first group in the policy's order."""
        heap, keys_grow = self._by_key, self._policy.waiting_keys_grow
        compared = set[int]()  # each lane once: a policy may return another key at each call
        while heap:
            entry = heap[0]
            key, arrival, group = entry
            lane = self._lane_of.get(arrival)
            if lane is None or lane.entry is not entry:
                heapq.heappop(heap)
                continue
            if not keys_grow or id(lane) in compared or (current := self._policy.key(group)) == key:
                return group
            compared.add(id(lane))
            lane.entry = current, arrival, group
            heapq.heapreplace(heap, lane.entry)
        return None


class _PreparedPart(_Part):
    def __init__(self, policy: Policy, prepared: Prepared) -> None:
        super().__init__(policy)
        self.prepared = prepared
