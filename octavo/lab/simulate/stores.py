"""KV stores of simulated engines: which blocks a disk or a shared store holds, and when a fetch ends."""

from __future__ import annotations

import math
from collections import OrderedDict, deque

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.core.stats import StoreTierStats
from octavo.lab.simulate.step_profile import StepProfile, StoreCosts

#: Most bytes that wait to be written, as in a worker; blocks beyond are dropped.
_QUEUE_BYTES = 64 << 20
#: Steps after which a result has the statistics of the stores, if no fetch has ended.
_STATS_EVERY = 16

#: What names a block: the model and its device, and the digest of the block's content. A simulated network has one KV
#: group.
Key = tuple[str, bytes]


class SimulatedStore:
    """A bounded store, in which the least recently used blocks make room; several engines may share it.

    Times are those of the engines' clocks. A block is there from the end of its write.
    """

    def __init__(self, tier: str, max_bytes: int) -> None:
        """``tier``: "disk" or "shared"."""
        self.tier, self.max_bytes = tier, max_bytes
        #: Including blocks that are being written.
        self.held_bytes = 0
        self.evicted = 0
        #: By key: from when on the block is there, and its bytes; the least recently used one first.
        self._blocks: OrderedDict[Key, tuple[float, int]] = OrderedDict()

    def has(self, key: Key, now: float) -> bool:
        """Whether the block is there; it counts as used."""
        if self._blocks.get(key, (math.inf, 0))[0] > now:
            return False
        self._blocks.move_to_end(key)
        return True

    def put(self, key: Key, size: int, end: float) -> bool:
        """Stores a block of so many bytes, which is there from ``end`` on; False: it is stored already."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return False
        self._blocks[key] = end, size
        self.held_bytes += size
        while self.held_bytes > self.max_bytes:
            _, (_, freed) = self._blocks.popitem(last=False)
            self.held_bytes -= freed
            self.evicted += 1
        return True

    def remove(self, key: Key) -> None:
        """Forgets a block, if it is there."""
        self.held_bytes -= self._blocks.pop(key, (0.0, 0))[1]


def make_disk(options: EngineConfig) -> SimulatedStore | None:
    """An empty disk, if the options ask for one."""
    return SimulatedStore("disk", int(options.kv_disk_bytes)) if options.kv_disk is not None else None


def make_shared(profile: StepProfile, options: EngineConfig) -> SimulatedStore | None:
    """An empty shared store, if the options ask for one."""
    return SimulatedStore("shared", profile.shared.max_bytes) if options.kv_store is not None else None


class StoreClient:
    """What a worker does with its stores: one thread reads what fetches ask for, and one writes."""

    def __init__(self, profile: StepProfile, block_size: int, stores: list[SimulatedStore]) -> None:
        """``stores``: the disk before the shared one, as they are asked."""
        self._stores = stores
        self._costs: dict[str, StoreCosts] = {"disk": profile.disk, "shared": profile.shared}
        self._namespace = f"{profile.model} on {profile.device}"
        self._block_bytes = block_size * profile.kv_bytes_per_token
        self._reader_free = self._writer_free = 0.0
        #: By id: the end of a fetch, its blocks, and its seconds.
        self._fetches: dict[int, tuple[float, int, float]] = {}
        #: Writes that wait or run: their ends.
        self._writes: deque[tuple[float, SimulatedStore, Key]] = deque()
        self._stats = {store.tier: StoreTierStats(store.tier, max_bytes=store.max_bytes) for store in stores}

    def begin(self, plan: StepPlan, now: float) -> None:
        """Takes a plan when its step begins."""
        for _, digest in plan.blocks_to_store:
            self._write((self._namespace, digest), now)
        for fetch in plan.fetch:
            self._fetch(fetch.fetch_id, [(self._namespace, digest) for _, digest in fetch.blocks], now)
        for fetch_id in plan.drop_fetches:
            self._fetches.pop(fetch_id, None)

    def _write(self, key: Key, now: float) -> None:
        while self._writes and self._writes[0][0] <= now:
            self._writes.popleft()
        size = self._block_bytes
        for store in self._stores:
            stats, costs = self._stats[store.tier], self._costs[store.tier]
            if len(self._writes) * size >= _QUEUE_BYTES:
                stats.dropped += 1
                continue
            seconds = costs.call + costs.write * size
            end = max(self._writer_free, now) + seconds
            if store.put(key, size, end):
                self._writer_free = end
                self._writes.append((end, store, key))
                stats.written += 1
                stats.bytes_written += size
                stats.write_seconds += seconds

    def _fetch(self, fetch_id: int, keys: list[Key], now: float) -> None:
        """Reads leading blocks, each from the first store that has it."""
        start = max(self._reader_free, now)
        seconds, found = 0.0, 0
        called = set()
        for key in keys:
            for store in self._stores:
                stats, costs = self._stats[store.tier], self._costs[store.tier]
                if store.tier not in called:
                    called.add(store.tier)
                    seconds += costs.call
                stats.asked += 1
                if store.has(key, start):
                    stats.found += 1
                    stats.bytes_read += self._block_bytes
                    stats.read_seconds += costs.read * self._block_bytes
                    seconds += costs.read * self._block_bytes
                    found += 1
                    break
            else:
                break
        self._reader_free = start + seconds
        self._fetches[fetch_id] = self._reader_free, found, seconds

    @property
    def next_end(self) -> float:
        """When the next fetch ends; infinite: none runs."""
        return min((end for end, _, _ in self._fetches.values()), default=math.inf)

    def end(self, result: StepResult, now: float) -> None:
        """Adds to a step's result what has ended by its end."""
        for fetch_id in [fetch_id for fetch_id, (end, _, _) in self._fetches.items() if end <= now]:
            _, found, seconds = self._fetches.pop(fetch_id)
            result.fetched[fetch_id] = found
            if found:
                result.fetch_times.append((found, seconds))
        if result.fetched or not result.step % _STATS_EVERY:
            result.stores = self.stats()

    def stats(self) -> list[StoreTierStats]:
        """Totals of this client, and what the stores hold."""
        return [
            msgspec.structs.replace(self._stats[store.tier], held_bytes=store.held_bytes, evicted=store.evicted)
            for store in self._stores
        ]

    def fail(self, now: float) -> None:
        """The engine fails: what it has not written is lost."""
        for end, store, key in self._writes:
            if end > now:
                store.remove(key)
