"""What is prepared on the workers, and when: that of the first waiting groups, before it is needed."""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.core.errors import AdapterError
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import KINDS, EngineCoreRequest, Limits, Preparation, limits_of, preparations_of
from octavo.core.stats import AdapterStats
from octavo.scheduler.groups import SequenceGroup

if TYPE_CHECKING:
    from octavo.scheduler.queues import PreparedQueue


# The things of one kind that workers prepare: which are there, which are in use, which go for others.

#: Most of a kind that are prepared at once. Workers prepare a few at a time, so a longer list would only delay those
#: that are needed sooner.
MAX_PREPARING = 4


class PreparationState(enum.Enum):
    """Where a prepared thing is."""

    WANTED = "wanted"
    PREPARING = "preparing"
    #: In the workers' memory, without the slot that it needs.
    PREPARED = "prepared"
    #: In a slot, or in memory if it needs none. Its groups may run.
    READY = "ready"


@dataclass(slots=True, eq=False)
class Prepared:
    """One thing, and the groups that need it."""

    preparation: Preparation
    pool: PreparationPool = field(repr=False)
    state: PreparationState = PreparationState.WANTED
    slot: int | None = None
    num_running: int = 0
    #: Waiting and swapped groups, by id.
    waiting: dict[int, SequenceGroup] = field(default_factory=dict)
    #: Whether it was asked to stay in memory and slot.
    pinned: bool = False
    #: Orders things by their last admission or end of a group, or by when they were prepared.
    last_used: int = 0

    @property
    def key(self) -> str:
        """The digest of its content."""
        return self.preparation.key

    @property
    def in_use(self) -> bool:
        """Whether it keeps its place: a group runs with it, or it is pinned."""
        return self.num_running > 0 or self.pinned

    @property
    def is_preparing(self) -> bool:
        """Whether the workers are at it."""
        return self.state is PreparationState.PREPARING

    @property
    def is_usable(self) -> bool:
        """Whether a group that needs it may be admitted: it is ready, or it can get a slot."""
        return self.state is PreparationState.READY or (self.state is PreparationState.PREPARED and self.pool.can_place)


@dataclass(slots=True)
class Changes:
    """What the workers are to be told with the next plan."""

    drop: list[str] = field(default_factory=list)
    prepare: list[Preparation] = field(default_factory=list)
    #: By kind and slot: key.
    place: dict[tuple[str, int], str] = field(default_factory=dict)


class PreparationPool:
    """The things of one kind, within its ``Limits``.

    Invariants: one in a slot is in memory; one with running groups has its slot until the last of them is preempted or
    has ended; a pinned one keeps what it has. Of the others the least recently used goes first, and one with waiting
    groups only when no other is left. All methods take constant time, but those that give a slot, which look at all
    slots, and that make room in place of a thing with waiting groups.

    A slot may be given away while steps that read it are in flight, as those of a group that was aborted: workers apply
    plans in their order, and a device computes what is queued on it in that order, so the steps before have read the
    slot when its content is replaced. The same holds for what is dropped.
    """

    def __init__(
        self,
        kind: str,
        limits: Limits,
        changes: Changes,
        stats: AdapterStats,
        on_change: Callable[[Prepared], None] = lambda prepared: None,
    ) -> None:
        """``on_change`` is told of what begins or ceases to be ready."""
        self.kind, self.limits = kind, limits
        self.slots: list[Prepared | None] = [None] * (limits.slots or 0)
        self.on_change = on_change
        self._changes, self._stats = changes, stats
        #: Those that are waited for, used, pinned or in memory, by key.
        self.things: dict[str, Prepared] = {}
        #: In memory and in no use, the least recently used first: those that no group waits for, and the others.
        self._idle: dict[str, Prepared] = {}
        self._awaited: dict[str, Prepared] = {}
        self._free_slots = list(range(len(self.slots)))[::-1]
        #: Slots of things in use.
        self._used_slots: set[int] = set()
        self._uses = itertools.count(1)
        self.num_preparing = self.num_in_memory = 0
        #: As ``Preparation.size`` counts: of all in memory, and of those of ``_idle``.
        self._held = self._idle_size = 0
        #: Those that nothing was begun for and that are needed, in the order in which they were first asked for.
        self.wanted: dict[str, Prepared] = {}
        #: Pinned ones that are not ready yet.
        self.unready_pins: dict[str, Prepared] = {}
        self._num_pinned = 0

    # --- groups that need them --------------------------------------------------------------------------------------

    def find(self, preparation: Preparation) -> Prepared:
        """The thing of a key; a new one if there is none."""
        thing = self.things.get(preparation.key)
        if thing is None:
            thing = self.things[preparation.key] = Prepared(preparation, self)
        return thing

    def add_waiting(self, preparation: Preparation, group: SequenceGroup) -> Prepared:
        """A group that needs it begins to wait."""
        thing = self.find(preparation)
        thing.preparation = preparation  # with the payload, which it may not have kept
        thing.waiting[group.group_id] = group
        if len(thing.waiting) == 1:
            self._classify(thing)
        return thing

    def remove_waiting(self, key: str, group: SequenceGroup) -> None:
        """A group that needs it waits no more."""
        thing = self.things[key]
        del thing.waiting[group.group_id]
        if not thing.waiting:
            self._classify(thing)

    @property
    def can_place(self) -> bool:
        """Whether a slot is free, or in no use: then any thing in memory can get one."""
        return len(self._used_slots) < len(self.slots)

    def acquire(self, key: str) -> None:
        """A group that needs it begins to run: it ``is_usable``."""
        thing = self.things[key]
        if thing.state is PreparationState.READY:
            self._stats.slot_hits += 1
        else:
            self._stats.slot_misses += 1
            self._place(thing)
        thing.num_running += 1
        self._use(thing)

    def release(self, key: str) -> None:
        """A group that needs it runs no more."""
        thing = self.things[key]
        thing.num_running -= 1
        self._use(thing)

    def release_all(self) -> None:
        """No group waits for anything or runs any more."""
        for thing in list(self.things.values()):
            thing.waiting.clear()
            thing.num_running = 0
            self._classify(thing)

    def _use(self, thing: Prepared) -> None:
        thing.last_used = next(self._uses)
        self._classify(thing)

    # --- slots ------------------------------------------------------------------------------------------------------

    def _place(self, thing: Prepared) -> None:
        """Gives a thing in memory a slot: a free one, or that of the least recently used."""
        assert thing.state is PreparationState.PREPARED, f"{thing.key} is not in memory"
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            unused = [other for other in self.slots if other is not None and not other.in_use]
            slot = self._vacate(min(unused, key=lambda other: (bool(other.waiting), other.last_used)))
        self.slots[slot] = thing
        thing.slot = slot
        self._changes.place[self.kind, slot] = thing.key
        thing.state = PreparationState.READY
        self._classify(thing)

    def _vacate(self, thing: Prepared) -> int:
        """Takes its slot from a thing."""
        slot, thing.slot = thing.slot, None
        assert slot is not None and not thing.in_use
        self.slots[slot] = None
        self._changes.place.pop((self.kind, slot), None)
        self._stats.slot_evictions += 1
        thing.state = PreparationState.PREPARED
        return slot

    # --- memory -----------------------------------------------------------------------------------------------------

    @property
    def awaited(self) -> Collection[Prepared]:
        """Those in memory and in no use that groups wait for."""
        return self._awaited.values()

    @property
    def may_begin(self) -> bool:
        """Whether not too many are being prepared."""
        return self.num_preparing < MAX_PREPARING

    def has_room(self, thing: Prepared) -> bool:
        """Whether memory has room for a thing, by itself or if others that nothing waits for are dropped."""
        limit = self.limits.host
        return limit is None or self._held - self._idle_size + thing.preparation.size <= limit

    def begin(self, thing: Prepared) -> None:
        """Begins to prepare a thing; where there ``has_room``, or ``drop`` has made some."""
        limit, size = self.limits.host, thing.preparation.size
        while limit is not None and self._held + size > limit:
            self.drop(next(iter(self._idle.values())))
        self.num_in_memory += 1
        self._held += size
        self.num_preparing += 1
        self._stats.loads += 1
        self._changes.prepare.append(thing.preparation)
        self._set_state(thing, PreparationState.PREPARING)

    def drop(self, thing: Prepared) -> None:
        """Drops a thing in no use from memory, and from its slot if it has one."""
        assert thing.state in (PreparationState.PREPARED, PreparationState.READY) and not thing.in_use
        if thing.slot is not None:
            self._free_slots.append(self._vacate(thing))
        self.num_in_memory -= 1
        self._held -= thing.preparation.size
        self._stats.host_evictions += 1
        self._changes.drop.append(thing.key)
        self._set_state(thing, PreparationState.WANTED)

    def finish(self, key: str) -> None:
        """A thing is in memory now; no effect if it was not being prepared."""
        thing = self._end(key)
        if thing is not None:
            needs_slot = self.limits.slots is not None
            thing.last_used = next(self._uses)
            self._set_state(thing, PreparationState.PREPARED if needs_slot else PreparationState.READY)

    def fail(self, key: str) -> list[SequenceGroup]:
        """A thing could not be prepared, and is not pinned any more: the groups that wait for it."""
        thing = self._end(key)
        if thing is None:
            return []
        self.num_in_memory -= 1
        self._held -= thing.preparation.size
        self._stats.failed_loads += 1
        self._changes.drop.append(key)  # of several workers, some may have prepared it
        self._num_pinned -= thing.pinned
        thing.pinned = False
        self._set_state(thing, PreparationState.WANTED)
        return sorted(thing.waiting.values(), key=lambda group: group.arrival)

    def _end(self, key: str) -> Prepared | None:
        thing = self.things.get(key)
        if thing is None or thing.state is not PreparationState.PREPARING:
            return None
        self.num_preparing -= 1
        return thing

    # --- pins -------------------------------------------------------------------------------------------------------

    def pin(self, preparation: Preparation, name: str) -> None:
        """Keeps a thing in memory and slot from the moment it is there; it is prepared with the next steps.

        Raises:
            AdapterError: so many are pinned that no other could run.
        """
        thing = self.things.get(preparation.key)
        if thing is not None and thing.pinned:
            return
        most = self.limits.slots if self.limits.slots is not None else self.limits.host
        if most is not None and self._num_pinned >= most - 1:
            raise AdapterError(
                f"{name!r} cannot be pinned: {self._num_pinned} adapters are, and one of the {most} places "
                f"({self.limits.option}) stays for others"
            )
        self._set_pinned(self.find(preparation), True)

    def unpin(self, key: str) -> None:
        """Lets a thing go when others need its place; nothing happens if it is not pinned."""
        thing = self.things.get(key)
        if thing is not None and thing.pinned:
            self._set_pinned(thing, False)

    def place_pinned(self) -> None:
        """Gives pinned things in memory the slots that they lack, as far as there are any."""
        for thing in list(self.unready_pins.values()):
            if thing.state is PreparationState.PREPARED and self.can_place:
                self._place(thing)

    def _set_pinned(self, thing: Prepared, pinned: bool) -> None:
        thing.pinned = pinned
        self._num_pinned += 1 if pinned else -1
        self._classify(thing)

    # --- states -----------------------------------------------------------------------------------------------------

    def _set_state(self, thing: Prepared, state: PreparationState) -> None:
        thing.state = state
        self._classify(thing)
        self.on_change(thing)

    def _classify(self, thing: Prepared) -> None:
        """Keeps the sets of unused, used, wanted and pinned things right after a change of this one."""
        key, slot, state = thing.key, thing.slot, thing.state
        if self._idle.pop(key, None) is not None:
            self._idle_size -= thing.preparation.size
        for things in (self._awaited, self.unready_pins):
            things.pop(key, None)
        if slot is not None:
            (self._used_slots.add if thing.in_use else self._used_slots.discard)(slot)
        if thing.pinned and state is not PreparationState.READY:
            self.unready_pins[key] = thing
        if state is PreparationState.WANTED and thing.waiting:
            self.wanted.setdefault(key, thing)
        else:
            self.wanted.pop(key, None)
        if thing.in_use:
            return
        if state in (PreparationState.PREPARED, PreparationState.READY):
            if thing.waiting:
                self._awaited[key] = thing
                return
            # The next request that needs it brings the payload again, which may be large.
            thing.preparation = msgspec.structs.replace(thing.preparation, payload=b"")
            self._idle[key] = thing
            self._idle_size += thing.preparation.size
            if self.limits.idle is not None and len(self._idle) > self.limits.idle:
                self.drop(next(iter(self._idle.values())))
        elif state is PreparationState.WANTED and not thing.waiting:
            self.things.pop(key, None)


logger = logging.getLogger("octavo")


#: States of things that are in the workers' memory.
_IN_MEMORY = (PreparationState.PREPARED, PreparationState.READY)


class Preparations:
    """The pools of all kinds that are enabled, and what the workers are to be told of them.

    Preparations begin in the order in which groups wait, as far as memory has room. What groups wait for makes room
    only for that of a group which goes before all of them: so what is prepared ahead does not displace what is needed
    sooner, and the first group of all can always be served.
    """

    def __init__(self, limits: Mapping[str, Limits] | None = None) -> None:
        """``limits``: by kind. None: of the kinds that no option enables."""
        if limits is None:
            limits = limits_of(None)
        self._changes, self._stats = Changes(), AdapterStats()
        self._adapter_kinds = [name for name in limits if KINDS[name].is_adapter]
        self.pools = {
            name: PreparationPool(
                name, limit, self._changes, self._stats if name in self._adapter_kinds else AdapterStats()
            )
            for name, limit in limits.items()
        }
        self._queues: list[PreparedQueue] = []
        self._order: Callable[[SequenceGroup], tuple[Any, ...]] = lambda group: group.arrival

    def connect(
        self,
        queues: list[PreparedQueue],
        order: Callable[[SequenceGroup], tuple[Any, ...]],
        on_change: Callable[[Prepared], None],
    ) -> None:
        """The queues in which groups wait, how groups are compared, and who is told of what begins or ceases to be
        ready.
        """
        self._queues, self._order = queues, order
        for pool in self.pools.values():
            pool.on_change = on_change

    # --- groups -----------------------------------------------------------------------------------------------------

    def refusal(self, request: EngineCoreRequest) -> AdapterError | None:
        """Why a request cannot run here; None if all it needs is enabled."""
        for preparation in preparations_of(request):
            if preparation.kind not in self.pools:
                kind = KINDS[preparation.kind]
                return AdapterError(f"{kind.noun} needs the option {kind.option}")
        return None

    def needs(self, group: SequenceGroup) -> list[Prepared]:
        """What a group has to have prepared, where it stands."""
        return [self.pools[p.kind].things[p.key] for p in group.preparations]

    def add_waiting(self, group: SequenceGroup) -> None:
        """A group begins to wait."""
        for preparation in group.preparations:
            self.pools[preparation.kind].add_waiting(preparation, group)

    def remove_waiting(self, group: SequenceGroup) -> None:
        """A group waits no more."""
        for preparation in group.preparations:
            self.pools[preparation.kind].remove_waiting(preparation.key, group)

    def may_admit(self, group: SequenceGroup) -> bool:
        """Whether all that a group needs is ready, or can be given its slot."""
        return all(thing.is_usable for thing in self.needs(group))

    def is_scarce(self, group: SequenceGroup) -> bool:
        """Whether a group needs something of which running groups may hold all there is."""
        return any(self.pools[p.kind].limits.is_scarce for p in group.preparations)

    def acquire(self, group: SequenceGroup) -> None:
        """A group that may be admitted begins to run."""
        for preparation in group.preparations:
            self.pools[preparation.kind].acquire(preparation.key)

    def release(self, group: SequenceGroup) -> None:
        """A group runs no more."""
        for preparation in group.preparations:
            self.pools[preparation.kind].release(preparation.key)

    def release_all(self) -> None:
        """No group waits for anything or runs: what is prepared, or being prepared, stays as others would find it."""
        for pool in self.pools.values():
            pool.release_all()

    # --- pins -------------------------------------------------------------------------------------------------------

    def pin(self, preparation: Preparation, name: str) -> None:
        """Keeps something in memory, and in a slot if it needs one; it is prepared with the next steps.

        Raises:
            AdapterError: so many are pinned that no other could run, or its kind is not enabled.
        """
        pool = self.pools.get(preparation.kind)
        if pool is None:
            kind = KINDS[preparation.kind]
            raise AdapterError(f"{kind.noun} needs the option {kind.option}")
        pool.pin(preparation, name)

    def unpin(self, key: str) -> None:
        """Lets something pinned go when others need its place; nothing happens if it is not pinned."""
        for pool in self.pools.values():
            pool.unpin(key)

    def place_pinned(self) -> None:
        """Gives pinned things the slots that they lack."""
        for pool in self.pools.values():
            if pool.unready_pins:
                pool.place_pinned()

    # --- what is begun ----------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Begins what is to be prepared next."""
        for pool in self.pools.values():
            if pool.unready_pins:
                self._begin_pinned(pool, now)
            if pool.wanted and pool.may_begin:
                self._begin_wanted(pool, now)

    def _begin_pinned(self, pool: PreparationPool, now: float) -> None:
        for thing in list(pool.unready_pins.values()):
            may_begin = thing.state is PreparationState.WANTED and pool.may_begin
            if may_begin and self._make_room(pool, thing, None, now):
                pool.begin(thing)

    def _begin_wanted(self, pool: PreparationPool, now: float) -> None:
        heads = ((self._head(thing, now), thing) for thing in pool.wanted.values())
        for head, thing in heapq.nsmallest(len(pool.wanted), heads, key=lambda entry: self._order(entry[0])):
            if not pool.may_begin or not self._make_room(pool, thing, head, now):
                return
            pool.begin(thing)

    def _make_room(self, pool: PreparationPool, wanted: Prepared, group: SequenceGroup | None, now: float) -> bool:
        """Whether memory has room for a thing; drops others that groups wait for, the last in order first.

        That is only done for something pinned (``group`` is None), and for a group that goes before all others that
        wait for what is there.
        """
        if pool.has_room(wanted):
            return True
        if group is not None:
            there = (thing for thing in pool.things.values() if thing.waiting and thing.state in _IN_MEMORY)
            heads = [head for head in (self._head(thing, now) for thing in there) if head is not group]
            if heads and self._order(group) >= min(self._order(head) for head in heads):
                return False
        others = [(self._head(thing, now), thing) for thing in pool.awaited]
        others = [(head, thing) for head, thing in others if head is not group]
        for _, thing in sorted(others, key=lambda entry: self._order(entry[0]), reverse=True):
            pool.drop(thing)
            if pool.has_room(wanted):
                return True
        return False

    def _head(self, thing: Prepared, now: float) -> SequenceGroup:
        """The first of the groups that wait for a thing."""
        lanes = (queue.first_in_lane(thing.key, now) for queue in self._queues)
        heads = [group for group in lanes if group is not None]
        # Groups that wait for several things are in the lane of one of them.
        heads += [group for group in thing.waiting.values() if len(group.preparations) > 1]
        return min(heads or thing.waiting.values(), key=self._order)

    # --- plans and results ------------------------------------------------------------------------------------------

    @property
    def num_preparing(self) -> int:
        """Things that are being prepared."""
        return sum(pool.num_preparing for pool in self.pools.values())

    def add_to(self, plan: StepPlan) -> None:
        """Moves what the workers are to be told into a plan."""
        changes = self._changes
        if changes.drop:
            plan.drop, changes.drop = changes.drop, []
        if changes.prepare:
            plan.prepare, changes.prepare = changes.prepare, []
        if changes.place:
            plan.place = [(slot, key) for (_, slot), key in changes.place.items()]
            changes.place = {}

    def repeat(self, plan: StepPlan) -> None:
        """Tells the workers again what a plan that failed told them, as far as it still holds.

        It is not known how much of it was done, and what was prepared may have been reported in a result that is lost:
        so all that is being prepared is named again. Workers report what they have at once.
        """
        changes, things = self._changes, {key: t for pool in self.pools.values() for key, t in pool.things.items()}
        for key in plan.drop:
            if key not in changes.drop and (key not in things or things[key].state is PreparationState.WANTED):
                changes.drop.append(key)
        changes.prepare = [t.preparation for t in things.values() if t.state is PreparationState.PREPARING]
        for slot, key in plan.place:
            if key in things and things[key].slot == slot:
                changes.place[things[key].pool.kind, slot] = key

    def update(self, plan: StepPlan, result: StepResult) -> list[tuple[SequenceGroup, str, bool]]:
        """Takes what a result says of preparations.

        Returns:
            The groups that cannot run: why, and whether an adapter failed.
        """
        stats, failed = self._stats, []
        if plan.place or (plan.awaits_prepared and self._adapter_kinds):
            stats.seconds += result.prepare_seconds
            stats.longest_seconds = max(stats.longest_seconds, result.prepare_seconds)
        for key in result.prepared:
            for pool in self.pools.values():
                pool.finish(key)
        for key, message in result.prepare_errors.items():
            for name, pool in self.pools.items():
                groups = pool.fail(key)
                if groups and KINDS[name].is_adapter:
                    logger.warning("an adapter could not be loaded: %s", message)
                failed += [(group, message, KINDS[name].is_adapter) for group in groups]
        return failed

    def adapters_in_slots(self) -> list[Prepared]:
        """Those of LoRA in slots, those with most running groups first."""
        things = [thing for name in self._adapter_kinds for thing in self.pools[name].slots if thing is not None]
        return sorted(things, key=lambda thing: (-thing.num_running, thing.slot))

    def adapter_stats(self) -> AdapterStats | None:
        """Where adapters are now, and totals so far; None if no kind of them is enabled."""
        if not self._adapter_kinds:
            return None
        pools, stats = [self.pools[name] for name in self._adapter_kinds], self._stats
        stats.in_host = sum(pool.num_in_memory - pool.num_preparing for pool in pools)
        stats.loading = sum(pool.num_preparing for pool in pools)
        stats.in_slots = sum(thing is not None for pool in pools for thing in pool.slots)
        return msgspec.structs.replace(stats)
