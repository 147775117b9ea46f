"""Queues of groups that run with adapters: a group whose adapter cannot be used yet is passed over."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from octavo.scheduler.adapters import Adapter, AdapterPool, Adapters, AdapterState
from octavo.scheduler.group_queue import GroupQueue, Ordered, make_queue
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies import FirstComeFirstServed, Policy

#: (key, arrival, number, the name of a lane): the number tells entries of one group apart.
_Entry = tuple[Any, tuple[float, int], int, str]
#: Stale entries allowed before they are cleared out, beyond the number of lanes.
_SLACK = 64


class _Heads:
    """The first groups of several lanes, in one order. Only the heads of lanes are compared, and these seldom."""

    def __init__(self, first: Callable[[GroupQueue], SequenceGroup | None], key: Callable[[SequenceGroup], Any]):
        self._first, self._key = first, key
        self._lanes: dict[str, GroupQueue] = {}
        self._heap: list[_Entry] = []
        #: The current entry of each lane; others are stale. Its group goes no later than the lane's head.
        self._listed: dict[str, _Entry] = {}
        self._numbers = itertools.count()

    def list(self, name: str, lane: GroupQueue) -> None:
        """Adds a lane, or notices that its head has changed."""
        self._lanes[name] = lane
        head = self._first(lane)
        assert head is not None
        listed, key = self._listed.get(name), self._key(head)
        if listed is not None and listed[:2] <= (key, head.arrival):
            return
        self._listed[name] = entry = (key, head.arrival, next(self._numbers), name)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._listed) + _SLACK:  # some may never be reached
            self._heap = list(self._listed.values())
            heapq.heapify(self._heap)

    def discard(self, name: str) -> None:
        """Removes a lane, if it is there."""
        self._lanes.pop(name, None)
        self._listed.pop(name, None)

    def first(self) -> SequenceGroup | None:
        """The first of all heads."""
        heap = self._heap
        compared = set[str]()  # each once, as in ``LaneQueue``
        while heap:
            entry = heap[0]
            name = entry[3]
            if self._listed.get(name) is not entry:
                heapq.heappop(heap)
                continue
            head = self._first(self._lanes[name])
            if head is None:
                heapq.heappop(heap)
                self.discard(name)
                continue
            key = self._key(head)
            if entry[:2] == (key, head.arrival) or name in compared:
                return head
            compared.add(name)
            # The head has left its lane, or its key has grown.
            self._listed[name] = entry = (key, head.arrival, next(self._numbers), name)
            heapq.heapreplace(heap, entry)
        return None


class _Board(Ordered):
    """The lanes of adapters in one state: their first group costs the same however many lanes there are."""

    def __init__(self, policy: Policy, aging_limit: float | None) -> None:
        super().__init__(aging_limit)
        self._by_arrival = _Heads(GroupQueue.earliest, lambda group: group.arrival)
        self._by_key = self._by_arrival
        self._orders = [self._by_arrival]
        if type(policy) is not FirstComeFirstServed:
            self._by_key = _Heads(lambda lane: lane.first_by_key(), policy.key)
            self._orders.append(self._by_key)

    def list(self, name: str, lane: GroupQueue) -> None:
        for heads in self._orders:
            heads.list(name, lane)

    def discard(self, name: str) -> None:
        for heads in self._orders:
            heads.discard(name)

    def earliest(self) -> SequenceGroup | None:
        return self._by_arrival.first()

    def first_by_key(self) -> SequenceGroup | None:
        return self._by_key.first()


class AdapterQueue(Ordered):
    """Groups that do not run, in the policy's order; of those with an adapter, the first that can use it now.

    Each adapter has a lane, a queue of its own, so that passing over its groups costs nothing, however many wait: the
    lanes of adapters in one state are on one board, from which they move when the state changes. Groups keep their
    order in the lane, and lanes theirs on the board.
    """

    def __init__(
        self,
        policy: Policy,
        aging_limit: float | None,
        adapters: Adapters,
        order: Callable[[SequenceGroup], tuple[Any, ...]],
    ) -> None:
        """``order`` compares groups of different lanes."""
        super().__init__(aging_limit)
        self._policy, self._adapters, self._order = policy, adapters, order
        #: Groups without an adapter.
        self.base = make_queue(policy, aging_limit)
        self._lanes: dict[str, GroupQueue] = {}
        self._boards = {
            (id(pool), state): _Board(policy, aging_limit) for pool in adapters.pools for state in AdapterState
        }
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, group: SequenceGroup) -> bool:
        lane = self._lane(group)
        return lane is not None and group in lane

    def push(self, group: SequenceGroup) -> None:
        """Adds a group in its order."""
        self._size += 1
        ref = group.request.adapter
        if ref is None:
            self.base.push(group)
            return
        lane = self._lanes.get(ref.key)
        if lane is None:
            lane = self._lanes[ref.key] = make_queue(self._policy, self._aging_limit)
        lane.push(group)
        adapter = self._adapters.pool(ref).add_waiting(ref)
        self._board(adapter.pool, adapter.state).list(ref.key, lane)

    def remove(self, group: SequenceGroup) -> None:
        """Removes a group from any position."""
        self._size -= 1
        ref = group.request.adapter
        if ref is None:
            self.base.remove(group)
            return
        lane = self._lanes[ref.key]
        lane.remove(group)
        pool = self._adapters.pool(ref)
        if not len(lane):
            del self._lanes[ref.key]
            self._board(pool, pool.adapters[ref.key].state).discard(ref.key)
        pool.remove_waiting(ref.key)

    def earliest(self) -> SequenceGroup | None:
        """The group that arrived first, whatever its adapter's state, or None if there is none."""
        first = [self.base.earliest(), *(board.earliest() for board in self._boards.values())]
        return min((g for g in first if g is not None), key=lambda g: g.arrival, default=None)

    def first_by_key(self) -> SequenceGroup | None:
        """The first that can be admitted in the policy's order, however long others wait."""
        return self._first([queue.first_by_key() for queue in self._open()])

    def peek(self, now: float) -> SequenceGroup | None:
        """The first group that runs without adapter, or whose adapter has a slot or can be given one."""
        return self._first([queue.peek(now) for queue in self._open()])

    def peek_blocked(self, now: float) -> SequenceGroup | None:
        """Of the groups that are passed over, the one that arrived first, if it is urgent."""
        first = [board.earliest() for board in self._closed()]
        oldest = min((g for g in first if g is not None), key=lambda g: g.arrival, default=None)
        if oldest is None or self._aging_limit is None or now - oldest.request.arrival_time <= self._aging_limit:
            return None
        oldest.urgent = True
        return oldest

    def peek_state(self, pool: AdapterPool, state: AdapterState, now: float) -> SequenceGroup | None:
        """The first group whose adapter is in this state."""
        return self._board(pool, state).peek(now)

    def lane_of(self, key: str) -> GroupQueue | None:
        """The groups with this adapter; None if there is none."""
        return self._lanes.get(key)

    def _lane(self, group: SequenceGroup) -> GroupQueue | None:
        ref = group.request.adapter
        return self.base if ref is None else self._lanes.get(ref.key)

    def _open(self) -> list[Ordered]:
        queues: list[Ordered] = [self.base]
        for pool in self._adapters.pools:
            queues.append(self._board(pool, AdapterState.READY))
            if pool.can_place:
                queues.append(self._board(pool, AdapterState.LOADED))
        return queues

    def _closed(self) -> list[_Board]:
        boards = []
        for pool in self._adapters.pools:
            boards += [self._board(pool, AdapterState.UNLOADED), self._board(pool, AdapterState.LOADING)]
            if not pool.can_place:
                boards.append(self._board(pool, AdapterState.LOADED))
        return boards

    def _first(self, groups: list[SequenceGroup | None]) -> SequenceGroup | None:
        return min((g for g in groups if g is not None), key=self._order, default=None)

    def _board(self, pool: AdapterPool, state: AdapterState) -> _Board:
        return self._boards[id(pool), state]

    def on_change(self, adapter: Adapter, before: AdapterState) -> None:
        """An adapter's state was ``before``: its lane moves to another board."""
        lane = self._lanes.get(adapter.key)
        if lane is not None:
            self._board(adapter.pool, before).discard(adapter.key)
            self._board(adapter.pool, adapter.state).list(adapter.key, lane)
