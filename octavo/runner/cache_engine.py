"""``CacheEngine``: the KV cache of one worker, on device and host, and the moves of its blocks (as vLLM's)."""

from __future__ import annotations

import bisect
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.config.kv_spec import GroupShape, KVSpec, LayerGroup, group_layers
from octavo.core.errors import ConfigError
from octavo.core.plan import StepPlan
from octavo.kernels.interface import Kernels, LayerCache
from octavo.runner.input_batch import InputBatch

if TYPE_CHECKING:
    from octavo.runner.block_store import BlockStore

Pairs = list[tuple[int, int]]

#: Once the step is done, the seconds that it waited for its swaps.
SwapSeconds = Callable[[], float]

#: ``measure_swap`` moves about 4 MiB at once, more than the processor's caches hold, and 64 blocks at most.
_SAMPLE_BYTES = 4 << 20
_SAMPLE_BLOCKS = 64
_SAMPLE_ROUNDS = 3


class CacheEngine:
    """Owns the device blocks and the host blocks of all layers.

    A block number means the same block in every layer of a KV group; plans number the blocks of all groups one after
    the other, on device and host. Host blocks have the layout of device blocks, so a swap copies bytes.
    """

    def __init__(self, layers: KVLayers, num_blocks: Sequence[int], num_host_blocks: Sequence[int]) -> None:
        """Allocates all blocks; their numbers are by group."""
        self._layers, self._kernels = layers, layers.kernels
        self._block_bytes = [shape.block_bytes for shape in layers.shapes()]
        self._blocks, self._host_blocks = num_blocks, num_host_blocks
        #: The number that plans give each group's first block.
        self._first = [0, *itertools.accumulate(num_blocks)][:-1]
        self._first_on_host = [0, *itertools.accumulate(num_host_blocks)][:-1]
        self._num_host_blocks = sum(num_host_blocks)
        self._swaps: list[tuple[int, float]] = []
        #: Takes blocks that plans store, and has those that they fetched.
        self.store: BlockStore | None = None
        self.allocate()

    def allocate(self) -> None:
        """Allocates all blocks, filled with zeros."""
        #: By layer.
        self.device = self._layers.make(self._blocks)
        # The system gives memory to a host block when the first swap writes it.
        self._host = self._layers.make_host(self._host_blocks)

    @property
    def network_caches(self) -> list[LayerCache]:
        """The layers of the network."""
        return self._layers.split(self.device)[0]

    @property
    def drafter_caches(self) -> list[LayerCache]:
        return self._layers.split(self.device)[1]

    def release(self) -> None:
        """Frees all blocks, and loses their content, until ``allocate``."""
        self.finish_swaps()
        self.device, self._host = [], []

    def move(self, plan: StepPlan) -> SwapSeconds | None:
        """Moves blocks: to the stores, out, in, from the stores, copies, each in one call for all layers of a group.

        None if the step waits for no swap.
        """
        seconds: SwapSeconds | None = None
        if plan.blocks_to_store:
            self._store(plan.blocks_to_store)
        if plan.blocks_to_swap_out or plan.blocks_to_swap_in:
            seconds = self._swap(plan)
        if plan.blocks_fetched:
            self._place(plan.blocks_fetched)
        if plan.blocks_to_copy:
            for group, pairs in self._by_group(plan.blocks_to_copy, self._first, self._first):
                self._kernels.copy_blocks(self._of_group(self.device, group), pairs)
        return seconds

    def _store(self, named: list[tuple[int, bytes]]) -> None:
        assert self.store is not None, "there are no KV stores"
        for group, pairs in self._numbered_by_group([block for block, _ in named]):
            digests = [named[i][1] for _, i in pairs]
            self.store.save(self._stored(group), group, [block for block, _ in pairs], digests)

    def _place(self, fetched: list[tuple[int, int, int]]) -> None:
        assert self.store is not None, "there are no KV stores"
        for group, pairs in self._numbered_by_group([block for _, _, block in fetched]):
            places = [fetched[i][:2] for _, i in pairs]
            self.store.place(self._stored(group), group, [block for block, _ in pairs], places)

    def _numbered_by_group(self, blocks: list[int]) -> Iterable[tuple[int, Pairs]]:
        """By group: (block within it, index in ``blocks``)."""
        return self._by_group([(block, i) for i, block in enumerate(blocks)], self._first, [0] * len(self._first))

    def _stored(self, group: int) -> list[LayerCache]:
        """The layers of a group that the stores keep."""
        return self._of_group(self._layers.stored(self.device), group)

    def _by_group(self, pairs: Pairs, first_source: list[int], first_target: list[int]) -> Iterable[tuple[int, Pairs]]:
        if len(first_source) == 1:
            return [(0, pairs)]
        groups: dict[int, Pairs] = {}
        for source, target in pairs:
            group = bisect.bisect_right(first_source, source) - 1
            groups.setdefault(group, []).append((source - first_source[group], target - first_target[group]))
        return groups.items()

    def _of_group(self, caches: list[LayerCache], group: int) -> list[LayerCache]:
        return caches if len(self._first) == 1 else [cache for cache in caches if cache.group == group]

    def computes_over(self, tables: NDArray[np.int32], cross_tables: NDArray[np.int32]) -> None:
        """Called before the step whose blocks were moved last, with its block tables [G, S, B] and [X, C]."""

    def take_swaps(self) -> list[tuple[int, float]]:
        """Returns bytes and seconds of each swap that has ended since the last call."""
        swaps, self._swaps = self._swaps, []
        return [swap for swap in swaps if swap[0]]  # a pipeline stage may have no layer of the groups that moved

    def _swap(self, plan: StepPlan) -> SwapSeconds | None:
        start = time.perf_counter()
        num_bytes = self._queue_swaps(plan)
        seconds = time.perf_counter() - start
        self._swaps.append((num_bytes, seconds))
        return lambda: seconds

    def _queue_swaps(self, plan: StepPlan) -> int:
        num_bytes = 0
        out = plan.blocks_to_swap_out, self.device, self._host, self._first, self._first_on_host
        back = plan.blocks_to_swap_in, self._host, self.device, self._first_on_host, self._first
        for moves, sources, targets, first_source, first_target in (out, back):
            for group, pairs in self._by_group(moves, first_source, first_target):
                self._kernels.swap_blocks(self._of_group(sources, group), self._of_group(targets, group), pairs)
                num_bytes += len(pairs) * self._block_bytes[group]
        return num_bytes

    def finish_swaps(self) -> None: ...

    def measure_swap(self) -> float:
        """Seconds to move one block one way, the median of a few moves; 0.0 without host blocks.

        Moves blocks made for the measurement, so the cache keeps its content and host memory is not touched early.
        """
        if not self._num_host_blocks:
            return 0.0
        count = max(1, min(_SAMPLE_BLOCKS, _SAMPLE_BYTES // sum(self._block_bytes)))
        pairs = [(i, i) for i in range(count)]
        counts = [count] * len(self._first)
        device, host = self._layers.make(counts), self._layers.make_host(counts)
        self.finish_swaps()

        def seconds(sources: list[LayerCache], targets: list[LayerCache]) -> float:
            start = time.perf_counter()
            for group in range(len(self._first)):
                self._kernels.swap_blocks(self._of_group(sources, group), self._of_group(targets, group), pairs)
            self.finish_swaps()
            return (time.perf_counter() - start) / count

        taken = [seconds(*way) for _ in range(1 + _SAMPLE_ROUNDS) for way in ((device, host), (host, device))]
        # The first round touches the memory for the first time, which is slow.
        return statistics.median(taken[2:])


@dataclass(frozen=True)
class Workspace:
    """The cache that the layers of an encoder share: keys and values of one step's tokens, of one layer at a time."""

    spec: KVSpec
    blocks: int
    num_layers: int


class KVLayers:
    """Makes the caches of all layers. Knows the KV groups: the layers that share block tables.

    The layers of an encoder are in no group; they share a ``Workspace``. A drafter's layers join the groups of the
    network: each has a cache of its own shape, with a block for each block of the group whose block tables it reads.
    """

    def __init__(
        self,
        kernels: Kernels,
        groups: Sequence[LayerGroup],
        block_size: int,
        drafter: Sequence[KVSpec] = (),
        workspace: Workspace | None = None,
        state_tokens: int | None = None,
        *,
        stores_drafter: bool = False,
        drafter_reads: Sequence[int] = (),
    ) -> None:
        """``groups``: of the network's layers on this rank; ``drafter``: of each layer of the drafter that has a cache.

        ``workspace``: of an encoder, which has no groups, or the groups of its decoder. ``state_tokens``: see
        ``GroupShape``. ``stores_drafter``: whether KV stores keep the drafter's layers. ``drafter_reads``: caches of
        the network that layers of the drafter read.
        """
        self._state_tokens, self.stores_drafter, self._drafter_reads = state_tokens, stores_drafter, drafter_reads
        self.kernels, self.groups, self._block_size = kernels, list(groups), block_size
        self._drafter = find_groups(drafter, [group.spec for group in groups])
        self._workspace = workspace
        self._num_layers = sum(len(group.layers) for group in groups)
        if not groups and workspace is not None:
            self._num_layers = workspace.num_layers

    def shapes(self) -> list[GroupShape]:
        """The groups, with the bytes of a block in all their layers, the drafter's too."""
        return [
            GroupShape(
                self._size(group) + drafts,
                group.spec.window,
                self._state_tokens if group.spec.kind == "state" else None,
            )
            for group, drafts in zip(self.groups, self._drafter_bytes(), strict=True)
        ]

    def block_bytes(self) -> int:
        return sum(shape.block_bytes for shape in self.shapes())

    def stored_bytes(self) -> list[int]:
        """Bytes of a block in all layers that KV stores keep, by group."""
        drafts = self._drafter_bytes() if self.stores_drafter else [0] * len(self.groups)
        return [self._size(group) + more for group, more in zip(self.groups, drafts, strict=True)]

    def stored(self, caches: list[LayerCache]) -> list[LayerCache]:
        """The layers that KV stores keep."""
        return caches if self.stores_drafter else caches[: self._num_layers]

    def drafter_share(self) -> float:
        return sum(self._drafter_bytes()) / self.block_bytes()

    def _drafter_bytes(self) -> list[int]:
        sizes = [0] * len(self.groups)
        for group, index in self._drafter:
            sizes[index] += self._size(group)
        return sizes

    def _size(self, group: LayerGroup) -> int:
        return len(group.layers) * self.kernels.block_bytes(group.spec, group.spec.places(self._block_size))

    def make(self, blocks: Sequence[int]) -> list[LayerCache]:
        """Caches on the device, with this number of blocks of each group: the network's layers, then the drafter's."""
        if self.groups or self._workspace is None:
            return self._make(self.kernels.make_cache, blocks)
        return [self.make_workspace()] * self._num_layers

    def make_workspace(self) -> LayerCache:
        """The cache that the layers of the encoder share, in a group of its own behind the others."""
        assert self._workspace is not None
        spec, blocks = self._workspace.spec, self._workspace.blocks
        cache = self.kernels.make_group_cache(spec, 1, blocks, self._block_size)[0]
        cache.group = len(self.groups)
        return cache

    def workspace_bytes(self) -> int:
        if self._workspace is None:
            return 0
        return self._workspace.blocks * self.kernels.block_bytes(self._workspace.spec, self._block_size)

    def make_host(self, blocks: Sequence[int]) -> list[LayerCache]:
        return self._make(self.kernels.make_host_cache, blocks)

    def _make(
        self, make: Callable[[Sequence[LayerGroup], Sequence[int], int], list[LayerCache]], blocks: Sequence[int]
    ) -> list[LayerCache]:
        caches = make(self.groups, blocks, self._block_size)
        for group in self.groups:
            if group.spec.kind == "state":
                assert self._state_tokens is not None
                for layer in group.layers:
                    caches[layer].state_tokens = self._state_tokens
        groups, counts = [group for group, _ in self._drafter], [blocks[index] for _, index in self._drafter]
        drafts = make(groups, counts, self._block_size)
        for group, index in self._drafter:
            for layer in group.layers:
                drafts[layer].group = index
        return caches + drafts

    def split(self, caches: list[LayerCache]) -> tuple[list[LayerCache], list[LayerCache]]:
        """The caches of the network; and those of the drafter, then those of the network that it reads."""
        return caches[: self._num_layers], caches[self._num_layers :] + [caches[i] for i in self._drafter_reads]


def find_groups(specs: Sequence[KVSpec], network: Sequence[KVSpec]) -> list[tuple[LayerGroup, int]]:
    """Groups a drafter's layers: each group, and the index of the network's KV group whose blocks it uses.

    ``network``: the specs of its KV groups. Blocks behind a window go to other sequences, so each group gets the
    narrowest window that keeps all tokens that its layers attend to.
    """
    windows = [0 if spec.kind == "state" else spec.window for spec in network]
    groups = []
    for group in group_layers(specs):
        window = group.spec.window
        wide = [i for i, kept in enumerate(windows) if kept is None or (window is not None and window <= kept)]
        if not wide:
            longest = max(kept for kept in windows if kept is not None)
            kept_text = f"keeps the last {longest} only" if longest else "has states, and keeps no tokens"
            raise ConfigError(
                f"speculative_config: the drafter attends to {'all tokens' if window is None else f'{window} tokens'}, "
                f"but the model's KV cache {kept_text}; take method 'ngram' or 'suffix'"
            )
        groups.append((group, min(wide, key=lambda i: windows[i] or float("inf"))))
    return groups


class DraftedBlocks:
    """Flags the blocks of one KV group without a window whose tokens a drafter has all computed, for any sequence."""

    def __init__(self, batch: InputBatch, group: int) -> None:
        self._batch, self._group, self._size = batch, group, batch.block_size
        self._first = batch.first_block[group]
        #: By the block numbers of plans, like the numbers on the host.
        self._filled = np.zeros(batch.first_block[-1], dtype=bool)
        self._on_host: set[int] = set()

    def clear(self) -> None:
        self._filled[:] = False
        self._on_host.clear()

    def apply(self, plan: StepPlan) -> None:
        """Follows the moves of a plan, and clears the flags of blocks that get other tokens."""
        filled = self._filled
        for block, on_host in plan.blocks_to_swap_out:
            (self._on_host.add if filled[block] else self._on_host.discard)(on_host)
        for on_host, block in plan.blocks_to_swap_in:
            filled[block] = on_host in self._on_host
        for _, _, block in plan.blocks_fetched:
            filled[block] = False
        for source, target in plan.blocks_to_copy:
            filled[target] = filled[source]
        if plan.table_changes:
            kept = {new.seq_id: new.num_computed // self._size for new in plan.new}
            for change in plan.table_changes:
                if change.group == self._group:
                    filled[change.blocks[max(0, kept.get(change.seq_id, 0) - change.index) :]] = False

    def extend(
        self, rows: NDArray[np.int64], computed: NDArray[np.int64], num_tokens: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Extends the number of computed tokens of each row by the flagged blocks that follow."""
        behind = np.flatnonzero(num_tokens - computed > self._size)
        if not len(behind):
            return computed
        whole = num_tokens[behind] // self._size
        index = np.arange(int(whole.max()))
        blocks = self._batch.block_tables[self._group, rows[behind], : len(index)] + self._first
        filled = self._filled[blocks] | (index < computed[behind, None] // self._size)
        leading = np.logical_and.accumulate(filled & (index < whole[:, None]), axis=1).sum(axis=1)
        extended = computed.copy()
        extended[behind] = np.maximum(computed[behind], leading * self._size)
        return extended

    def fill(self, rows: NDArray[np.int64], before: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Flags the blocks of each row that the tokens from ``before`` to ``ends`` complete."""
        tables = self._batch.block_tables[self._group]
        first, last = before // self._size, ends // self._size
        for i in np.flatnonzero(last > first).tolist():
            self._filled[tables[rows[i], first[i] : last[i]] + self._first] = True
