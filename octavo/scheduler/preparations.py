"""Preparations of workers for requests (adapters, grammars, inputs): begun ahead, for the first waiting groups."""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
from collections.abc import Callable, Mapping
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

logger = logging.getLogger("octavo")

#: Most preparations of a kind at once. Workers do a few at a time, so more would only delay those needed sooner.
MAX_PREPARING = 4


class PreparationState(enum.Enum):
    WANTED = "wanted"
    PREPARING = "preparing"
    #: In the workers' memory, without the slot that it needs.
    PREPARED = "prepared"
    #: In a slot, or in memory if it needs none. Its groups may run.
    READY = "ready"


#: States in the workers' memory.
_IN_MEMORY = (PreparationState.PREPARED, PreparationState.READY)


@dataclass(slots=True, eq=False)
class Prepared:
    preparation: Preparation
    pool: PreparationPool = field(repr=False)
    state: PreparationState = PreparationState.WANTED
    slot: int | None = None
    num_running: int = 0
    #: Waiting and swapped groups, by id.
    waiting: dict[int, SequenceGroup] = field(default_factory=dict)
    #: Whether it stays in memory and slot without groups.
    pinned: bool = False
    #: Number of the last admission or end of a group, or of its preparation.
    last_used: int = 0

    @property
    def key(self) -> str:
        return self.preparation.key

    @property
    def in_use(self) -> bool:
        return self.num_running > 0 or self.pinned

    @property
    def is_preparing(self) -> bool:
        return self.state is PreparationState.PREPARING

    @property
    def is_usable(self) -> bool:
        """Whether its groups may be admitted: it is ready, or it can get a slot."""
        return self.state is PreparationState.READY or (self.state is PreparationState.PREPARED and self.pool.can_place)


class Preparations:
    """The pools of all enabled kinds, and the changes that the workers learn with the next plan.

    Preparations begin in the order in which groups wait, as far as memory has room. A preparation that groups wait for
    is dropped only for a group that goes before all of them, so the first group of all can always be served.
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
        self._queues, self._order = queues, order
        for pool in self.pools.values():
            pool.on_change = on_change

    def refusal(self, request: EngineCoreRequest) -> AdapterError | None:
        disabled = (p.kind for p in preparations_of(request) if p.kind not in self.pools)
        return next(map(_disabled, disabled), None)

    def needs(self, group: SequenceGroup) -> list[Prepared]:
        return [self.pools[p.kind].by_key[p.key] for p in group.preparations]

    def add_waiting(self, group: SequenceGroup) -> None:
        for preparation in group.preparations:
            self.pools[preparation.kind].add_waiting(preparation, group)

    def remove_waiting(self, group: SequenceGroup) -> None:
        for prepared in self.needs(group):
            del prepared.waiting[group.group_id]
            if not prepared.waiting:
                prepared.pool.classify(prepared)

    def is_scarce(self, group: SequenceGroup) -> bool:
        """Whether a group needs a preparation whose places running groups may all hold."""
        return any(self.pools[p.kind].limits.is_scarce for p in group.preparations)

    def acquire(self, group: SequenceGroup) -> None:
        for prepared in self.needs(group):
            prepared.pool.acquire(prepared)

    def release(self, group: SequenceGroup) -> None:
        for prepared in self.needs(group):
            prepared.num_running -= 1
            prepared.pool.touch(prepared)

    def release_all(self) -> None:
        """No group waits or runs any more: everything prepared, or being prepared, stays for later groups."""
        for pool in self.pools.values():
            for prepared in list(pool.by_key.values()):
                prepared.waiting.clear()
                prepared.num_running = 0
                pool.classify(prepared)

    def pin(self, preparation: Preparation, name: str) -> None:
        """Keeps a preparation in memory, and in a slot if it needs one; it begins with the next steps.

        Raises:
            AdapterError: all other places are pinned, or its kind is not enabled.
        """
        pool = self.pools.get(preparation.kind)
        if pool is None:
            raise _disabled(preparation.kind)
        pool.pin(preparation, name)

    def unpin(self, key: str) -> None:
        for pool in self.pools.values():
            prepared = pool.by_key.get(key)
            if prepared is not None and prepared.pinned:
                pool.set_pinned(prepared, False)

    def place_pinned(self) -> None:
        """Gives pinned preparations in memory the slots that they lack, as far as there are any."""
        for pool in self.pools.values():
            for prepared in list(pool.unready_pins.values()):
                if prepared.state is PreparationState.PREPARED and pool.can_place:
                    pool.place(prepared)

    def begin(self, now: float) -> None:
        for pool in self.pools.values():
            for prepared in list(pool.unready_pins.values()):
                may_begin = prepared.state is PreparationState.WANTED and pool.may_begin
                if may_begin and self._make_room(pool, prepared, None, now):
                    pool.begin(prepared)
            if not (pool.wanted and pool.may_begin):
                continue
            heads = ((self._head(prepared, now), prepared) for prepared in pool.wanted.values())
            for head, prepared in heapq.nsmallest(len(pool.wanted), heads, key=lambda entry: self._order(entry[0])):
                if not pool.may_begin or not self._make_room(pool, prepared, head, now):
                    break
                pool.begin(prepared)

    def _make_room(self, pool: PreparationPool, wanted: Prepared, group: SequenceGroup | None, now: float) -> bool:
        """Whether memory has room; drops preparations that other groups wait for, the last in order first.

        It does so only for a pinned preparation (``group`` is None), and for the first group that waits.
        """
        if pool.has_room(wanted):
            return True
        if group is not None:
            waited_for = (p for p in pool.by_key.values() if p.waiting and p.state in _IN_MEMORY)
            heads = [head for head in (self._head(prepared, now) for prepared in waited_for) if head is not group]
            if heads and self._order(group) >= min(self._order(head) for head in heads):
                return False
        others = [(self._head(prepared, now), prepared) for prepared in pool.awaited.values()]
        others = [(head, prepared) for head, prepared in others if head is not group]
        for _, prepared in sorted(others, key=lambda entry: self._order(entry[0]), reverse=True):
            pool.drop(prepared)
            if pool.has_room(wanted):
                return True
        return False

    def _head(self, prepared: Prepared, now: float) -> SequenceGroup:
        lanes = (queue.first_in_lane(prepared.key, now) for queue in self._queues)
        heads = [group for group in lanes if group is not None]
        # A group with several preparations is in the lane of one of them.
        heads += [group for group in prepared.waiting.values() if len(group.preparations) > 1]
        return min(heads or prepared.waiting.values(), key=self._order)

    @property
    def num_preparing(self) -> int:
        return sum(pool.num_preparing for pool in self.pools.values())

    def add_to(self, plan: StepPlan) -> None:
        changes = self._changes
        if changes.drop:
            plan.drop, changes.drop = changes.drop, []
        if changes.prepare:
            plan.prepare, changes.prepare = changes.prepare, []
        if changes.place:
            plan.place = [(slot, key) for (_, slot), key in changes.place.items()]
            changes.place = {}

    def repeat(self, plan: StepPlan) -> None:
        """Repeats the changes of a plan that failed, as far as they still hold.

        A lost result may have reported preparations: all that are in progress are named again.
        """
        changes, by_key = self._changes, {key: p for pool in self.pools.values() for key, p in pool.by_key.items()}
        for key in plan.drop:
            if key not in changes.drop and (key not in by_key or by_key[key].state is PreparationState.WANTED):
                changes.drop.append(key)
        changes.prepare = [p.preparation for p in by_key.values() if p.is_preparing]
        for slot, key in plan.place:
            if key in by_key and by_key[key].slot == slot:
                changes.place[by_key[key].pool.kind, slot] = key

    def update(self, plan: StepPlan, result: StepResult) -> list[tuple[SequenceGroup, str, bool]]:
        """Returns the groups that cannot run, each with the error and whether an adapter failed."""
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
        adapters = [prepared for name in self._adapter_kinds for prepared in self.pools[name].slots if prepared]
        return sorted(adapters, key=lambda adapter: (-adapter.num_running, adapter.slot))

    def adapter_stats(self) -> AdapterStats | None:
        if not self._adapter_kinds:
            return None
        pools, stats = [self.pools[name] for name in self._adapter_kinds], self._stats
        stats.in_host = sum(pool.num_in_memory - pool.num_preparing for pool in pools)
        stats.loading = sum(pool.num_preparing for pool in pools)
        stats.in_slots = sum(prepared is not None for pool in pools for prepared in pool.slots)
        return msgspec.structs.replace(stats)


def _disabled(kind: str) -> AdapterError:
    return AdapterError(f"{KINDS[kind].noun} needs the option {KINDS[kind].option}")


@dataclass(slots=True)
class Changes:
    drop: list[str] = field(default_factory=list)
    prepare: list[Preparation] = field(default_factory=list)
    #: By kind and slot: key.
    place: dict[tuple[str, int], str] = field(default_factory=dict)


class PreparationPool:
    """The preparations of one kind, within its ``Limits``; all methods but ``place`` take constant time.

    Invariants: one in a slot is in memory; one with running groups has its slot until the last of them is preempted or
    has ended; a pinned one keeps its place. The least recently used of the others goes first, and one with waiting
    groups only when no other is left.

    A slot or memory may be given away while steps in flight read it: workers and devices execute plans in order.
    """

    def __init__(self, kind: str, limits: Limits, changes: Changes, stats: AdapterStats) -> None:
        self.kind, self.limits = kind, limits
        self.slots: list[Prepared | None] = [None] * (limits.slots or 0)
        self.on_change: Callable[[Prepared], None] = lambda prepared: None
        self._changes, self._stats = changes, stats
        #: Preparations that are waited for, used, pinned or in memory.
        self.by_key: dict[str, Prepared] = {}
        #: In memory and not in use, the least recently used first: without waiting groups, and with some.
        self._idle: dict[str, Prepared] = {}
        self.awaited: dict[str, Prepared] = {}
        self._free_slots = list(range(len(self.slots)))[::-1]
        self._used_slots: set[int] = set()
        self._uses = itertools.count(1)
        self.num_preparing = self.num_in_memory = 0
        #: Sums of ``Preparation.size``: of all in memory, and of ``_idle``.
        self._held = self._idle_size = 0
        #: With waiting groups and not begun, in the order of their first requests.
        self.wanted: dict[str, Prepared] = {}
        self.unready_pins: dict[str, Prepared] = {}
        self._num_pinned = 0

    def add_waiting(self, preparation: Preparation, group: SequenceGroup) -> None:
        prepared = self._get(preparation)
        prepared.preparation = preparation  # with the payload, which it may not have kept
        prepared.waiting[group.group_id] = group
        if len(prepared.waiting) == 1:
            self.classify(prepared)

    def _get(self, preparation: Preparation) -> Prepared:
        prepared = self.by_key.get(preparation.key)
        if prepared is None:
            prepared = self.by_key[preparation.key] = Prepared(preparation, self)
        return prepared

    @property
    def can_place(self) -> bool:
        return len(self._used_slots) < len(self.slots)

    def acquire(self, prepared: Prepared) -> None:
        if prepared.state is PreparationState.READY:
            self._stats.slot_hits += 1
        else:
            self._stats.slot_misses += 1
            self.place(prepared)
        prepared.num_running += 1
        self.touch(prepared)

    def touch(self, prepared: Prepared) -> None:
        prepared.last_used = next(self._uses)
        self.classify(prepared)

    def place(self, prepared: Prepared) -> None:
        """Gives a preparation in memory a slot: a free one, or that of the least recently used."""
        assert prepared.state is PreparationState.PREPARED, f"{prepared.key} is not in memory"
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            unused = [other for other in self.slots if other is not None and not other.in_use]
            slot = self._vacate(min(unused, key=lambda other: (bool(other.waiting), other.last_used)))
        self.slots[slot] = prepared
        prepared.slot = slot
        self._changes.place[self.kind, slot] = prepared.key
        prepared.state = PreparationState.READY
        self.classify(prepared)

    def _vacate(self, prepared: Prepared) -> int:
        slot, prepared.slot = prepared.slot, None
        assert slot is not None and not prepared.in_use
        self.slots[slot] = None
        self._changes.place.pop((self.kind, slot), None)
        self._stats.slot_evictions += 1
        prepared.state = PreparationState.PREPARED
        return slot

    @property
    def may_begin(self) -> bool:
        return self.num_preparing < MAX_PREPARING

    def has_room(self, prepared: Prepared) -> bool:
        """Whether memory has room, by itself or if idle preparations are dropped."""
        limit = self.limits.host
        return limit is None or self._held - self._idle_size + prepared.preparation.size <= limit

    def begin(self, prepared: Prepared) -> None:
        limit, size = self.limits.host, prepared.preparation.size
        while limit is not None and self._held + size > limit:
            self.drop(next(iter(self._idle.values())))
        self.num_in_memory += 1
        self._held += size
        self.num_preparing += 1
        self._stats.loads += 1
        self._changes.prepare.append(prepared.preparation)
        self._set_state(prepared, PreparationState.PREPARING)

    def drop(self, prepared: Prepared) -> None:
        assert prepared.state in _IN_MEMORY and not prepared.in_use
        if prepared.slot is not None:
            self._free_slots.append(self._vacate(prepared))
        self.num_in_memory -= 1
        self._held -= prepared.preparation.size
        self._stats.host_evictions += 1
        self._changes.drop.append(prepared.key)
        self._set_state(prepared, PreparationState.WANTED)

    def finish(self, key: str) -> None:
        prepared = self.by_key.get(key)
        if prepared is not None and prepared.is_preparing:
            self.num_preparing -= 1
            prepared.last_used = next(self._uses)
            needs_slot = self.limits.slots is not None
            self._set_state(prepared, PreparationState.PREPARED if needs_slot else PreparationState.READY)

    def fail(self, key: str) -> list[SequenceGroup]:
        """Drops a failed preparation, and unpins it; returns the groups that wait for it."""
        prepared = self.by_key.get(key)
        if prepared is None or not prepared.is_preparing:
            return []
        self.num_preparing -= 1
        self.num_in_memory -= 1
        self._held -= prepared.preparation.size
        self._stats.failed_loads += 1
        self._changes.drop.append(key)  # some of several workers may have prepared it
        self._num_pinned -= prepared.pinned
        prepared.pinned = False
        self._set_state(prepared, PreparationState.WANTED)
        return sorted(prepared.waiting.values(), key=lambda group: group.arrival)

    def pin(self, preparation: Preparation, name: str) -> None:
        prepared = self.by_key.get(preparation.key)
        if prepared is not None and prepared.pinned:
            return
        most = self.limits.slots if self.limits.slots is not None else self.limits.host
        if most is not None and self._num_pinned >= most - 1:
            raise AdapterError(
                f"{name!r} cannot be pinned: {self._num_pinned} adapters are, and one of the {most} places "
                f"({self.limits.option}) stays for others"
            )
        self.set_pinned(self._get(preparation), True)

    def set_pinned(self, prepared: Prepared, pinned: bool) -> None:
        prepared.pinned = pinned
        self._num_pinned += 1 if pinned else -1
        self.classify(prepared)

    def _set_state(self, prepared: Prepared, state: PreparationState) -> None:
        prepared.state = state
        self.classify(prepared)
        self.on_change(prepared)

    def classify(self, prepared: Prepared) -> None:
        """Updates the sets of idle, awaited, wanted and pinned preparations after a change of this one."""
        key, slot, state = prepared.key, prepared.slot, prepared.state
        if self._idle.pop(key, None) is not None:
            self._idle_size -= prepared.preparation.size
        self.awaited.pop(key, None)
        self.unready_pins.pop(key, None)
        if slot is not None:
            (self._used_slots.add if prepared.in_use else self._used_slots.discard)(slot)
        if prepared.pinned and state is not PreparationState.READY:
            self.unready_pins[key] = prepared
        if state is PreparationState.WANTED and prepared.waiting:
            self.wanted.setdefault(key, prepared)
        else:
            self.wanted.pop(key, None)
        if prepared.in_use:
            return
        if state in _IN_MEMORY:
            if prepared.waiting:
                self.awaited[key] = prepared
                return
            # The next request that needs it brings the payload again, which may be large.
            prepared.preparation = msgspec.structs.replace(prepared.preparation, payload=b"")
            self._idle[key] = prepared
            self._idle_size += prepared.preparation.size
            if self.limits.idle is not None and len(self._idle) > self.limits.idle:
                self.drop(next(iter(self._idle.values())))
        elif state is PreparationState.WANTED and not prepared.waiting:
            self.by_key.pop(key, None)
