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
from octavo.core.failures import ADAPTER, SequenceFailure
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import KINDS, EngineCoreRequest, Limits, Preparation, limits_of, preparations_of
from octavo.core.stats import AdapterStats
from octavo.scheduler.groups import SequenceGroup

if TYPE_CHECKING:
    from octavo.scheduler.queue import GroupQueue

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
    #: The step with which workers begin it, 0 before; earlier results may report that it was prepared before.
    first_step: int = 0

    @property
    def key(self) -> str:
        return self.preparation.key

    @property
    def in_use(self) -> bool:
        return self.num_running > 0 or self.pinned

    @property
    def is_scarce(self) -> bool:
        """Whether running groups may hold all places of its kind."""
        return self.pool.limits.is_scarce

    @property
    def is_preparing(self) -> bool:
        return self.state is PreparationState.PREPARING

    @property
    def is_usable(self) -> bool:
        """Whether its groups may be admitted: it is ready, or it can get a slot."""
        return self.state is PreparationState.READY or (self.state is PreparationState.PREPARED and self.pool.can_place)


class PreparationPool:
    """The places for one kind: in the workers' memory, and in slots of their devices if the kind needs them."""

    def __init__(self, kind: str, limits: Limits, stats: AdapterStats) -> None:
        self.kind, self.limits, self.stats = kind, limits, stats
        self.slots: list[Prepared | None] = [None] * (limits.slots or 0)
        self.free_slots = list(range(len(self.slots)))[::-1]
        self.used_slots: set[int] = set()
        #: With waiting groups and not begun, in the order of their first requests.
        self.wanted: dict[str, Prepared] = {}
        #: In memory, not in use and without waiting groups, the least recently used first.
        self.idle: dict[str, Prepared] = {}
        self.num_preparing = 0
        #: Sums of ``Preparation.size``: of all that is in memory or begun, and of ``idle``.
        self.held = self.idle_size = 0

    @property
    def can_place(self) -> bool:
        return len(self.used_slots) < len(self.slots)

    @property
    def may_begin(self) -> bool:
        return self.num_preparing < MAX_PREPARING

    def has_room(self, prepared: Prepared) -> bool:
        """Whether memory has room, by itself or if idle preparations are dropped."""
        limit = self.limits.host
        return limit is None or self.held - self.idle_size + prepared.preparation.size <= limit


class Preparations:
    """All preparations of the enabled kinds, and the changes that the workers learn with the next plan.

    Preparations begin in the order in which groups wait, as far as memory has room. A preparation that groups wait for
    is dropped only for a group that goes before all of them, so the first group of all can always be served.

    Invariants: one in a slot is in memory; one with running groups has its slot until the last of them is preempted or
    has ended; a pinned one keeps its place. The least recently used of the others goes first, and one with waiting
    groups only when no other is left. A slot or memory may be given away while steps in flight read it: workers and
    devices execute plans in order.
    """

    def __init__(self, limits: Mapping[str, Limits] | None = None) -> None:
        """``limits``: by kind. None: of the kinds that no option enables."""
        self._stats, self.pools = AdapterStats(), dict[str, PreparationPool]()
        for kind, limit in (limits_of(None) if limits is None else limits).items():
            stats = self._stats if KINDS[kind].is_adapter else AdapterStats()
            self.pools[kind] = PreparationPool(kind, limit, stats)
        self._adapter_pools = [pool for kind, pool in self.pools.items() if KINDS[kind].is_adapter]
        self._computed_pools = [pool for kind, pool in self.pools.items() if KINDS[kind].is_computed]
        #: Those that are waited for, used, pinned or in memory.
        self.by_key: dict[str, Prepared] = {}
        self._pinned: dict[str, Prepared] = {}
        self._uses = itertools.count(1)
        #: Changes since the last plan; places by pool and slot.
        self._drop: list[str] = []
        self._prepare: list[Preparation] = []
        self._place: dict[tuple[str, int], str] = {}
        self._queues: list[GroupQueue] = []
        self._order: Callable[[SequenceGroup], tuple[Any, ...]] = lambda group: group.arrival
        self._on_change: Callable[[Prepared], None] = lambda prepared: None

    def connect(
        self,
        queues: list[GroupQueue],
        order: Callable[[SequenceGroup], tuple[Any, ...]],
        on_change: Callable[[Prepared], None],
    ) -> None:
        self._queues, self._order, self._on_change = queues, order, on_change

    def refusal(self, request: EngineCoreRequest) -> AdapterError | None:
        disabled = (p.kind for p in preparations_of(request) if p.kind not in self.pools)
        return next(map(_disabled, disabled), None)

    # Groups that wait, run and end.

    def needs(self, group: SequenceGroup) -> list[Prepared]:
        return [self.by_key[p.key] for p in group.preparations]

    def add_waiting(self, group: SequenceGroup) -> None:
        for preparation in group.preparations:
            prepared = self._get(preparation)
            prepared.preparation = preparation  # with the payload, which it may not have kept
            prepared.waiting[group.group_id] = group
            if len(prepared.waiting) == 1:
                self._classify(prepared)

    def _get(self, preparation: Preparation) -> Prepared:
        return self.by_key.get(preparation.key) or self.by_key.setdefault(
            preparation.key, Prepared(preparation, self.pools[preparation.kind])
        )

    def remove_waiting(self, group: SequenceGroup) -> None:
        for prepared in self.needs(group):
            del prepared.waiting[group.group_id]
            if prepared.waiting:
                continue
            if prepared.is_preparing and not prepared.in_use and KINDS[prepared.pool.kind].is_computed:
                self._cancel(prepared)
            else:
                self._classify(prepared)

    def acquire(self, group: SequenceGroup) -> None:
        for prepared in self.needs(group):
            if prepared.state is PreparationState.READY:
                prepared.pool.stats.slot_hits += 1
            else:
                prepared.pool.stats.slot_misses += 1
                self._give_slot(prepared)
            prepared.num_running += 1
            self._use(prepared)

    def release(self, group: SequenceGroup) -> None:
        for prepared in self.needs(group):
            prepared.num_running -= 1
            self._use(prepared)

    def _use(self, prepared: Prepared) -> None:
        prepared.last_used = next(self._uses)
        self._classify(prepared)

    def release_all(self) -> None:
        """No group waits or runs any more: everything prepared, or being prepared, stays for later groups."""
        for prepared in list(self.by_key.values()):
            prepared.waiting.clear()
            prepared.num_running = 0
            self._classify(prepared)

    # Pins.

    def pin(self, preparation: Preparation, name: str) -> None:
        """Keeps a preparation in memory, and in a slot if it needs one; it begins with the next steps.

        Raises:
            AdapterError: all other places are pinned, or its kind is not enabled.
        """
        if (pool := self.pools.get(preparation.kind)) is None:
            raise _disabled(preparation.kind)
        if preparation.key in self._pinned:
            return
        most = pool.limits.slots if pool.limits.slots is not None else pool.limits.host
        num_pinned = sum(prepared.pool is pool for prepared in self._pinned.values())
        if most is not None and num_pinned >= most - 1:
            raise AdapterError(
                f"{name!r} cannot be pinned: {num_pinned} adapters are, and one of the {most} places "
                f"({pool.limits.option}) stays for others"
            )
        prepared = self._pinned[preparation.key] = self._get(preparation)
        prepared.pinned = True
        self._classify(prepared)

    def unpin(self, key: str) -> None:
        if (prepared := self._pinned.pop(key, None)) is not None:
            prepared.pinned = False
            self._classify(prepared)

    def place_pinned(self) -> None:
        """Gives pinned preparations in memory the slots that they lack, as far as there are any."""
        for prepared in self._pinned.values():
            if prepared.state is PreparationState.PREPARED and prepared.pool.can_place:
                self._give_slot(prepared)

    # Preparations that begin, and the room for them.

    def begin(self, now: float) -> None:
        for pool in self.pools.values():
            for prepared in self._pinned.values():
                may_begin = prepared.pool is pool and prepared.state is PreparationState.WANTED and pool.may_begin
                if may_begin and self._make_room(prepared, None, now):
                    self._begin(prepared)
            if not (pool.wanted and pool.may_begin):
                continue
            heads = ((self._head(prepared, now), prepared) for prepared in pool.wanted.values())
            for head, prepared in heapq.nsmallest(len(pool.wanted), heads, key=lambda entry: self._order(entry[0])):
                if not pool.may_begin or not self._make_room(prepared, head, now):
                    break
                self._begin(prepared)

    def _head(self, prepared: Prepared, now: float) -> SequenceGroup:
        parts = (queue.first_waiting_for(prepared.key, now) for queue in self._queues)
        heads = [group for group in parts if group is not None]
        # A group with several preparations is in the part of one of them.
        heads += [group for group in prepared.waiting.values() if len(group.preparations) > 1]
        return min(heads or prepared.waiting.values(), key=self._order)

    def _make_room(self, wanted: Prepared, group: SequenceGroup | None, now: float) -> bool:
        """Whether memory has room; drops preparations that other groups wait for, the last in order first.

        It does so only for a pinned preparation (``group`` is None), and for the first group that waits.
        """
        pool = wanted.pool
        if pool.has_room(wanted):
            return True
        awaited = (p for p in self.by_key.values() if p.pool is pool and p.waiting and p.state in _IN_MEMORY)
        heads = [(head, p) for head, p in ((self._head(p, now), p) for p in awaited) if head is not group]
        if group is not None and any(self._order(group) >= self._order(head) for head, _ in heads):
            return False
        for _, prepared in sorted(heads, key=lambda entry: self._order(entry[0]), reverse=True):
            if not prepared.in_use:
                self._drop_prepared(prepared)
                if pool.has_room(wanted):
                    return True
        return False

    def _begin(self, prepared: Prepared) -> None:
        pool, limit, size = prepared.pool, prepared.pool.limits.host, prepared.preparation.size
        while limit is not None and pool.held + size > limit:
            self._drop_prepared(next(iter(pool.idle.values())))
        pool.held += size
        pool.num_preparing += 1
        pool.stats.loads += 1
        self._prepare.append(prepared.preparation)
        self._set_state(prepared, PreparationState.PREPARING)

    def _cancel(self, prepared: Prepared) -> None:
        prepared.pool.num_preparing -= 1
        prepared.pool.held -= prepared.preparation.size
        self._prepare = [preparation for preparation in self._prepare if preparation.key != prepared.key]
        if prepared.first_step:  # else no worker knows of it
            self._drop.append(prepared.key)
        self._set_state(prepared, PreparationState.WANTED)

    def _drop_prepared(self, prepared: Prepared) -> None:
        pool = prepared.pool
        assert prepared.state in _IN_MEMORY and not prepared.in_use
        if prepared.slot is not None:
            pool.free_slots.append(self._vacate(prepared))
        pool.held -= prepared.preparation.size
        pool.stats.host_evictions += 1
        self._drop.append(prepared.key)
        self._set_state(prepared, PreparationState.WANTED)

    def _give_slot(self, prepared: Prepared) -> None:
        """Gives a preparation in memory a slot: a free one, or that of the least recently used."""
        assert prepared.state is PreparationState.PREPARED, f"{prepared.key} is not in memory"
        pool = prepared.pool
        if pool.free_slots:
            slot = pool.free_slots.pop()
        else:
            unused = [other for other in pool.slots if other is not None and not other.in_use]
            slot = self._vacate(min(unused, key=lambda other: (bool(other.waiting), other.last_used)))
        pool.slots[slot], prepared.slot = prepared, slot
        self._place[pool.kind, slot] = prepared.key
        prepared.state = PreparationState.READY
        self._classify(prepared)

    def _vacate(self, prepared: Prepared) -> int:
        pool, slot = prepared.pool, prepared.slot
        assert slot is not None and not prepared.in_use
        pool.slots[slot] = prepared.slot = None
        self._place.pop((pool.kind, slot), None)
        pool.stats.slot_evictions += 1
        prepared.state = PreparationState.PREPARED
        return slot

    def _set_state(self, prepared: Prepared, state: PreparationState) -> None:
        prepared.state = state
        self._classify(prepared)
        self._on_change(prepared)

    def _classify(self, prepared: Prepared) -> None:
        """Updates the sets of the pool after a change of a preparation, and forgets what nothing needs any more."""
        key, pool, state = prepared.key, prepared.pool, prepared.state
        if pool.idle.pop(key, None) is not None:
            pool.idle_size -= prepared.preparation.size
        if prepared.slot is not None:
            (pool.used_slots.add if prepared.in_use else pool.used_slots.discard)(prepared.slot)
        if state is PreparationState.WANTED and prepared.waiting:
            pool.wanted.setdefault(key, prepared)
        else:
            pool.wanted.pop(key, None)
        if prepared.in_use or prepared.waiting:
            return
        if state in _IN_MEMORY:
            # The next request that needs it brings the payload again, which may be large.
            prepared.preparation = msgspec.structs.replace(prepared.preparation, payload=b"")
            pool.idle[key] = prepared
            pool.idle_size += prepared.preparation.size
            if pool.limits.idle is not None and len(pool.idle) > pool.limits.idle:
                self._drop_prepared(next(iter(pool.idle.values())))
        elif state is PreparationState.WANTED:
            self.by_key.pop(key, None)

    # Plans and results.

    @property
    def num_preparing(self) -> int:
        return sum(pool.num_preparing for pool in self.pools.values())

    @property
    def num_computing(self) -> int:
        """Of kinds that workers compute in steps."""
        return sum(pool.num_preparing for pool in self._computed_pools)

    def add_to(self, plan: StepPlan) -> None:
        if self._drop or self._prepare or self._place:
            plan.drop, plan.prepare = self._drop, self._prepare
            for preparation in self._prepare:
                self.by_key[preparation.key].first_step = plan.step
            plan.place = [(slot, key) for (_, slot), key in self._place.items()]
            self._drop, self._prepare, self._place = [], [], {}

    def repeat(self, plan: StepPlan) -> None:
        """Repeats the changes of a plan that failed, as far as they still hold.

        A lost result may have reported preparations: all that are in progress are named again.
        """
        for key in plan.drop:
            prepared = self.by_key.get(key)
            if key not in self._drop and (prepared is None or prepared.state is PreparationState.WANTED):
                self._drop.append(key)
        self._prepare = [p.preparation for p in self.by_key.values() if p.is_preparing]
        for slot, key in plan.place:
            if (prepared := self.by_key.get(key)) is not None and prepared.slot == slot:
                self._place[prepared.pool.kind, slot] = key

    def update(self, plan: StepPlan, result: StepResult) -> list[tuple[SequenceGroup, SequenceFailure]]:
        """Returns the groups that cannot run, each with the reason."""
        stats, failed = self._stats, []
        if plan.place or (plan.awaits_prepared and self._adapter_pools):
            stats.seconds += result.prepare_seconds
            stats.longest_seconds = max(stats.longest_seconds, result.prepare_seconds)
        for key in result.prepared:
            if (prepared := self._end_preparing(key, plan)) is not None:
                prepared.last_used = next(self._uses)
                needs_slot = prepared.pool.limits.slots is not None
                self._set_state(prepared, PreparationState.PREPARED if needs_slot else PreparationState.READY)
        for key, failure in result.prepare_errors.items():
            if (prepared := self._end_preparing(key, plan)) is not None:
                groups = self._fail(prepared)
                if groups and failure.kind == ADAPTER:
                    logger.warning("an adapter could not be loaded: %s", failure.text)
                failed += [(group, failure) for group in groups]
        return failed

    def _end_preparing(self, key: str, plan: StepPlan) -> Prepared | None:
        prepared = self.by_key.get(key)
        if prepared is None or not prepared.is_preparing or plan.step < prepared.first_step:
            return None  # reported before, or cancelled
        prepared.pool.num_preparing -= 1
        return prepared

    def _fail(self, prepared: Prepared) -> list[SequenceGroup]:
        """Drops a failed preparation, and unpins it; returns the groups that wait for it."""
        prepared.pool.held -= prepared.preparation.size
        prepared.pool.stats.failed_loads += 1
        self._drop.append(prepared.key)  # some of several workers may have prepared it
        prepared.pinned = False
        self._pinned.pop(prepared.key, None)
        self._set_state(prepared, PreparationState.WANTED)
        return sorted(prepared.waiting.values(), key=lambda group: group.arrival)

    # Views.

    def adapters_in_slots(self) -> list[Prepared]:
        adapters = [prepared for pool in self._adapter_pools for prepared in pool.slots if prepared]
        return sorted(adapters, key=lambda adapter: (-adapter.num_running, adapter.slot))

    def adapter_stats(self) -> AdapterStats | None:
        if not (pools := self._adapter_pools):
            return None
        stats = self._stats
        stats.in_host = sum(pool.held - pool.num_preparing for pool in pools)  # the size of an adapter is 1
        stats.loading = sum(pool.num_preparing for pool in pools)
        stats.in_slots = sum(prepared is not None for pool in pools for prepared in pool.slots)
        return msgspec.structs.replace(stats)


def _disabled(kind: str) -> AdapterError:
    return AdapterError(f"{KINDS[kind].noun} needs the option {KINDS[kind].option}")
