"""Adapters in host memory and in slots on the device: which are there, which are in use, which go for others."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from octavo.core.adapters import AdapterRef
from octavo.core.errors import AdapterError
from octavo.core.option_parts import AdapterOptions
from octavo.core.plan import StepPlan
from octavo.core.stats import AdapterStats

#: Most adapters of a kind that are read at once. A worker reads one after the other, so a longer list would only delay
#: those that are needed sooner.
MAX_LOADING = 4


class AdapterState(enum.Enum):
    """Where an adapter is."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    #: In host memory, without the slot that it needs.
    LOADED = "loaded"
    #: In a slot; a prompt adapter, which needs none, in host memory. Its groups may run.
    READY = "ready"


@dataclass(slots=True, eq=False)
class Adapter:
    """One adapter, and the groups that use it."""

    ref: AdapterRef
    pool: AdapterPool = field(repr=False)
    state: AdapterState = AdapterState.UNLOADED
    slot: int | None = None
    num_running: int = 0
    #: Waiting and swapped groups.
    num_waiting: int = 0
    #: Whether it was asked to stay in host memory and slot.
    pinned: bool = False
    #: Orders adapters by their last admission or end of a group, or by when they were loaded.
    last_used: int = 0

    @property
    def key(self) -> str:
        """The digest of its contents."""
        return self.ref.key

    @property
    def in_use(self) -> bool:
        """Whether it keeps its place: a group runs with it, or it is pinned."""
        return self.num_running > 0 or self.pinned


#: Called with an adapter and the state that it had.
Watcher = Callable[[Adapter, AdapterState], None]


@dataclass(slots=True)
class Changes:
    """What the workers are to be told with the next plan."""

    drop: list[str] = field(default_factory=list)
    load: list[AdapterRef] = field(default_factory=list)
    #: By slot: key.
    place: dict[int, str] = field(default_factory=dict)


class AdapterPool:
    """The adapters of one kind: at most ``num_host`` in host memory, of which at most ``num_slots`` have a slot.

    Invariants: one in a slot is in host memory; one with running groups has its slot until the last of them is
    preempted or has ended; a pinned one keeps what it has. Of the others the least recently used goes first, and one
    with waiting groups only when no other is left. All methods take constant time, but those that give a slot, which
    look at all slots, and that make room for a load in place of an adapter with waiting groups.

    A slot may be given away while steps that read it are in flight, as those of a group that was aborted: workers apply
    plans in their order, and a device computes what is queued on it in that order, so the steps before have read the
    slot when its content is replaced. The same holds for what is dropped.
    """

    def __init__(self, num_host: int, num_slots: int | None, changes: Changes, stats: AdapterStats) -> None:
        """``num_slots`` None: adapters of this kind need none."""
        self.num_host = num_host
        self.slots: list[Adapter | None] = [None] * (num_slots or 0)
        #: Told of every change of a state; the queues of the scheduler.
        self.watchers: list[Watcher] = []
        self._needs_slot = num_slots is not None
        self._most_pinned = (num_slots if num_slots is not None else num_host) - 1
        self._changes, self._stats = changes, stats
        #: Those that are waited for, used, pinned or in host memory, by key.
        self.adapters: dict[str, Adapter] = {}
        #: In host memory and in no use, the least recently used first: those that no group waits for, and the others.
        self._idle: dict[str, Adapter] = {}
        self._wanted: dict[str, Adapter] = {}
        self._free_slots = list(range(len(self.slots)))[::-1]
        #: Slots of adapters in use.
        self._used_slots: set[int] = set()
        self._uses = itertools.count(1)
        self.num_loading = self.num_in_host = 0
        #: Pinned ones that are not ready yet.
        self.unready_pins: dict[str, Adapter] = {}
        self._num_pinned = 0

    # --- groups that use them ---------------------------------------------------------------------------------------

    def add_waiting(self, ref: AdapterRef) -> Adapter:
        """A group with this adapter begins to wait."""
        adapter = self._find(ref)
        adapter.num_waiting += 1
        if adapter.num_waiting == 1:
            self._classify(adapter)
        return adapter

    def remove_waiting(self, key: str) -> None:
        """A group with this adapter waits no more."""
        adapter = self.adapters[key]
        adapter.num_waiting -= 1
        if not adapter.num_waiting:
            self._classify(adapter)

    @property
    def can_place(self) -> bool:
        """Whether a slot is free, or in no use: then any adapter in host memory can get one."""
        return len(self._used_slots) < len(self.slots)

    def acquire(self, ref: AdapterRef) -> None:
        """A group with this adapter begins to run: it is ready, or it is loaded and ``can_place``."""
        adapter = self._find(ref)
        if adapter.state is AdapterState.READY:
            self._stats.slot_hits += 1
        else:
            self._stats.slot_misses += 1
            self._place(adapter)
        adapter.num_running += 1
        self._use(adapter)

    def release(self, key: str) -> None:
        """A group with this adapter runs no more."""
        adapter = self.adapters[key]
        adapter.num_running -= 1
        self._use(adapter)

    def _find(self, ref: AdapterRef) -> Adapter:
        adapter = self.adapters.get(ref.key)
        if adapter is None:
            adapter = self.adapters[ref.key] = Adapter(ref, self)
        return adapter

    def _use(self, adapter: Adapter) -> None:
        adapter.last_used = next(self._uses)
        self._classify(adapter)

    # --- slots ------------------------------------------------------------------------------------------------------

    def _place(self, adapter: Adapter) -> None:
        """Gives an adapter in host memory a slot: a free one, or that of the least recently used adapter."""
        assert adapter.state is AdapterState.LOADED, f"{adapter.ref.name} is not in host memory"
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            unused = [a for a in self.slots if a is not None and not a.in_use]
            slot = self._vacate(min(unused, key=lambda a: (a.num_waiting > 0, a.last_used)))
        self.slots[slot] = adapter
        adapter.slot = slot
        self._changes.place[slot] = adapter.key
        self._set_state(adapter, AdapterState.READY)
        self._classify(adapter)

    def _vacate(self, adapter: Adapter) -> int:
        """Takes its slot from an adapter."""
        slot, adapter.slot = adapter.slot, None
        assert slot is not None and not adapter.in_use
        self.slots[slot] = None
        self._changes.place.pop(slot, None)
        self._stats.slot_evictions += 1
        self._set_state(adapter, AdapterState.LOADED)
        return slot

    # --- host memory ------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> Collection[Adapter]:
        """Those in host memory and in no use that groups wait for."""
        return self._wanted.values()

    @property
    def may_load(self) -> bool:
        """Whether not too many are being loaded."""
        return self.num_loading < MAX_LOADING

    @property
    def has_room(self) -> bool:
        """Whether host memory has room for one more, by itself or if one that nothing waits for is dropped."""
        return self.num_in_host < self.num_host or bool(self._idle)

    def load(self, adapter: Adapter) -> None:
        """Begins to load an adapter; where there ``has_room``, or ``drop`` has made some."""
        if self.num_in_host == self.num_host:
            self.drop(next(iter(self._idle.values())))
        self.num_in_host += 1
        self.num_loading += 1
        self._stats.loads += 1
        self._changes.load.append(adapter.ref)
        self._set_state(adapter, AdapterState.LOADING)

    def drop(self, adapter: Adapter) -> None:
        """Drops an adapter in no use from host memory, and from its slot if it has one."""
        assert adapter.state in (AdapterState.LOADED, AdapterState.READY) and not adapter.in_use
        if adapter.slot is not None:
            self._free_slots.append(self._vacate(adapter))
        self.num_in_host -= 1
        self._stats.host_evictions += 1
        self._changes.drop.append(adapter.key)
        self._set_state(adapter, AdapterState.UNLOADED)
        self._classify(adapter)

    def finish_load(self, key: str) -> None:
        """An adapter is in host memory now; no effect if it was not being loaded."""
        adapter = self._end_load(key)
        if adapter is not None:
            self._set_state(adapter, AdapterState.LOADED if self._needs_slot else AdapterState.READY)
            self._use(adapter)

    def fail_load(self, key: str) -> bool:
        """An adapter could not be loaded, and is not pinned any more; whether it was being loaded."""
        adapter = self._end_load(key)
        if adapter is None:
            return False
        self.num_in_host -= 1
        self._stats.failed_loads += 1
        self._changes.drop.append(key)  # of several workers, some may have loaded it
        self._set_state(adapter, AdapterState.UNLOADED)
        if adapter.pinned:
            self._set_pinned(adapter, False)
        self._classify(adapter)
        return True

    def _end_load(self, key: str) -> Adapter | None:
        adapter = self.adapters.get(key)
        if adapter is None or adapter.state is not AdapterState.LOADING:
            return None
        self.num_loading -= 1
        return adapter

    # --- pins -------------------------------------------------------------------------------------------------------

    def pin(self, ref: AdapterRef) -> None:
        """Keeps an adapter in host memory and slot from the moment it is there; it is loaded with the next steps.

        Raises:
            AdapterError: so many are pinned that no other could run.
        """
        known = self.adapters.get(ref.key)
        if known is not None and known.pinned:
            return
        if self._num_pinned >= self._most_pinned:
            limit = "max_loras" if self._needs_slot else "max_prompt_adapters"
            raise AdapterError(
                f"{ref.name!r} cannot be pinned: {self._num_pinned} adapters are, and one of the "
                f"{self._most_pinned + 1} places ({limit}) stays for others"
            )
        self._set_pinned(self._find(ref), True)

    def unpin(self, key: str) -> None:
        """Lets an adapter go when others need its place; nothing happens if it is not pinned."""
        adapter = self.adapters.get(key)
        if adapter is not None and adapter.pinned:
            self._set_pinned(adapter, False)

    def place_pinned(self) -> None:
        """Gives pinned adapters in host memory the slots that they lack, as far as there are any."""
        for adapter in list(self.unready_pins.values()):
            if adapter.state is AdapterState.LOADED and self.can_place:
                self._place(adapter)

    def _set_pinned(self, adapter: Adapter, pinned: bool) -> None:
        adapter.pinned = pinned
        self._num_pinned += 1 if pinned else -1
        self._classify(adapter)

    # --- states -----------------------------------------------------------------------------------------------------

    def _set_state(self, adapter: Adapter, state: AdapterState) -> None:
        before, adapter.state = adapter.state, state
        for watcher in self.watchers:
            watcher(adapter, before)

    def _classify(self, adapter: Adapter) -> None:
        """Keeps the sets of unused, used and pinned adapters right after a change of this one."""
        key, slot = adapter.key, adapter.slot
        self._idle.pop(key, None)
        self._wanted.pop(key, None)
        self.unready_pins.pop(key, None)
        if slot is not None:
            (self._used_slots.add if adapter.in_use else self._used_slots.discard)(slot)
        if adapter.pinned and adapter.state is not AdapterState.READY:
            self.unready_pins[key] = adapter
        if adapter.in_use:
            return
        if adapter.state in (AdapterState.LOADED, AdapterState.READY):
            (self._wanted if adapter.num_waiting else self._idle)[key] = adapter
        elif adapter.state is AdapterState.UNLOADED and not adapter.num_waiting:
            self.adapters.pop(key, None)


class Adapters:
    """The pools of LoRA and of prompt adapters, and what the workers are to be told of both."""

    def __init__(self, options: AdapterOptions) -> None:
        """Pools of the kinds that are enabled."""
        self._changes = Changes()
        self.stats = AdapterStats()
        self.loras = self.prompts = None
        if options.enable_lora:
            self.loras = AdapterPool(options.num_host_loras, options.max_loras, self._changes, self.stats)
        if options.enable_prompt_adapter:
            self.prompts = AdapterPool(options.max_prompt_adapters, None, self._changes, self.stats)
        #: Of the kinds that are enabled.
        self.pools = [pool for pool in (self.loras, self.prompts) if pool is not None]

    def pool(self, ref: AdapterRef) -> AdapterPool:
        """The pool of this adapter's kind.

        Raises:
            AdapterError: this kind is not enabled.
        """
        pool = self.loras if ref.rank else self.prompts
        if pool is None:
            raise AdapterError(
                f"adapter {ref.name!r} is one of {'LoRA' if ref.rank else 'prompt tuning'}, which needs the option "
                f"{'enable_lora' if ref.rank else 'enable_prompt_adapter'}"
            )
        return pool

    @property
    def num_loading(self) -> int:
        """Adapters that are being loaded."""
        return sum(pool.num_loading for pool in self.pools)

    def pin(self, ref: AdapterRef) -> None:
        """Keeps an adapter in host memory, and in a slot if it needs one; it is loaded with the next steps.

        Raises:
            AdapterError: so many are pinned that no other could run, or its kind is not enabled.
        """
        self.pool(ref).pin(ref)

    def unpin(self, key: str) -> None:
        """Lets a pinned adapter go when others need its place; nothing happens if it is not pinned."""
        for pool in self.pools:
            pool.unpin(key)

    def place_pinned(self) -> None:
        """Gives pinned adapters the slots that they lack."""
        for pool in self.pools:
            pool.place_pinned()

    def add_to(self, plan: StepPlan) -> None:
        """Moves what the workers are to be told into a plan."""
        changes = self._changes
        plan.adapters_to_drop, changes.drop = changes.drop, []
        plan.adapters_to_load, changes.load = changes.load, []
        plan.adapters_to_place, changes.place = list(changes.place.items()), {}

    def repeat(self, plan: StepPlan) -> None:
        """Tells the workers again what a plan that failed told them, as far as it still holds.

        It is not known how much of it was done, and what was loaded may have been reported in a result that is lost: so
        all that is being loaded is named again. Workers report what they have at once.
        """
        changes, known = self._changes, {key: adapter for pool in self.pools for key, adapter in pool.adapters.items()}
        for key in plan.adapters_to_drop:
            if key not in changes.drop and (key not in known or known[key].state is AdapterState.UNLOADED):
                changes.drop.append(key)
        changes.load = [a.ref for a in known.values() if a.state is AdapterState.LOADING]
        for slot, key in plan.adapters_to_place:
            if key in known and known[key].slot == slot:
                changes.place[slot] = key

    def counts(self) -> AdapterStats:
        """Where adapters are now, and totals so far."""
        stats = self.stats
        stats.in_host = sum(pool.num_in_host - pool.num_loading for pool in self.pools)
        stats.loading = self.num_loading
        stats.in_slots = sum(slot is not None for slot in self.loras.slots) if self.loras else 0
        return msgspec.structs.replace(stats)
