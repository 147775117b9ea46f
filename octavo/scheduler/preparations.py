"""What is prepared on the workers, and when: that of the first waiting groups, before it is needed."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from octavo.core.errors import AdapterError
from octavo.core.plan import StepPlan, StepResult
from octavo.core.preparation import KINDS, Limits, Preparation, limits_of, preparations_of
from octavo.core.request import EngineCoreRequest
from octavo.core.stats import AdapterStats
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.preparation_pool import Changes, PreparationPool, PreparationState, Prepared
from octavo.scheduler.prepared_queue import PreparedQueue

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
