"""Queues of groups some of which wait until something is prepared for them: these are passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from octavo.scheduler.group_queue import GroupQueue, Ordered, make_queue
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies import Policy
from octavo.scheduler.preparation_pool import PreparationState, Prepared


class PreparedQueue(Ordered):
    """Groups that do not run, in the policy's order; the first is that of those which may be admitted.

    A group is in ``ready``, or in a lane: a queue of all groups that need the same thing. There it is while the thing
    is not prepared, and always if the thing is scarce, so that its place may go to others. So passing over groups costs
    nothing, however many wait: what is looked at are the lanes of scarce things. Of several scarce things it is one
    that is not there yet.
    """

    def __init__(
        self,
        policy: Policy,
        aging_limit: float | None,
        needs: Callable[[SequenceGroup], list[Prepared]],
        order: Callable[[SequenceGroup], tuple[Any, ...]],
    ) -> None:
        """``needs``: what a group has to have prepared; ``order`` compares groups of different lanes."""
        super().__init__(aging_limit)
        self._policy, self._needs, self._order = policy, needs, order
        #: Groups that wait for nothing, and need nothing scarce.
        self.ready = make_queue(policy, aging_limit)
        #: By key, with what the groups need: lanes that are closed until it is prepared, and those of scarce things.
        self._unprepared: dict[str, tuple[Prepared, GroupQueue]] = {}
        self._scarce: dict[str, tuple[Prepared, GroupQueue]] = {}
        #: By group id: the lane of a group that is in one.
        self._lane_of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.ready) + len(self._lane_of)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self.ready or group.group_id in self._lane_of

    def push(self, group: SequenceGroup) -> None:
        """Adds a group in its order."""
        needs = self._needs(group) if group.preparations else ()
        plenty = (t for t in needs if not t.pool.limits.is_scarce)
        thing, lanes = next((t for t in plenty if t.state is not PreparationState.READY), None), self._unprepared
        if thing is None:
            scarce = [t for t in needs if t.pool.limits.is_scarce]
            missing = (t for t in scarce if not t.is_usable)
            thing, lanes = next(missing, scarce[0] if scarce else None), self._scarce
        if thing is None:
            self.ready.push(group)
            return
        if thing.key not in lanes:
            lanes[thing.key] = thing, make_queue(self._policy, self._aging_limit)
        lanes[thing.key][1].push(group)
        self._lane_of[group.group_id] = thing.key

    def remove(self, group: SequenceGroup) -> None:
        """Removes a group from any position."""
        key = self._lane_of.pop(group.group_id, None)
        if key is None:
            self.ready.remove(group)
            return
        lanes = self._unprepared if key in self._unprepared else self._scarce
        lane = lanes[key][1]
        lane.remove(group)
        if not len(lane):
            del lanes[key]

    def moved(self, group: SequenceGroup) -> None:
        """What the group needs has changed: it goes where it now belongs."""
        self.remove(group)
        self.push(group)

    def earliest(self) -> SequenceGroup | None:
        """The group that arrived first, whatever it waits for; None if there is none."""
        lanes = (lane for lanes in (self._unprepared, self._scarce) for _, lane in lanes.values())
        return _earliest([self.ready.earliest(), *(lane.earliest() for lane in lanes)])

    def first_by_key(self) -> SequenceGroup | None:
        """The first that may be admitted in the policy's order, however long others wait."""
        return self._first(queue.first_by_key() for queue in self._open())

    def peek(self, now: float) -> SequenceGroup | None:
        """The first group that may be admitted."""
        if not self._scarce:
            return self.ready.peek(now)
        return self._first(queue.peek(now) for queue in self._open())

    def peek_blocked(self, now: float) -> SequenceGroup | None:
        """Of the groups that wait for something scarce, the one that arrived first, if it is urgent.

        What is being prepared for them has its place.
        """
        if self._aging_limit is None:
            return None
        lacking = (lane for thing, lane in self._scarce.values() if not (thing.is_usable or thing.is_preparing))
        oldest = _earliest(lane.earliest() for lane in lacking)
        if oldest is None or now - oldest.request.arrival_time <= self._aging_limit:
            return None
        oldest.urgent = True
        return oldest

    def first_in_lane(self, key: str, now: float) -> SequenceGroup | None:
        """The first of the groups in this lane; None if there is none."""
        lane = self._unprepared.get(key) or self._scarce.get(key)
        return None if lane is None else lane[1].peek(now)

    def _open(self) -> list[GroupQueue]:
        return [self.ready, *(lane for thing, lane in self._scarce.values() if thing.is_usable)]

    def _first(self, groups: Iterable[SequenceGroup | None]) -> SequenceGroup | None:
        return min((g for g in groups if g is not None), key=self._order, default=None)


def _earliest(groups: Iterable[SequenceGroup | None]) -> SequenceGroup | None:
    return min((g for g in groups if g is not None), key=lambda g: g.arrival, default=None)
