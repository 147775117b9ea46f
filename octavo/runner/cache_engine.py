"""The KV cache of one worker, on the device and on the host, and the moves of blocks within and between the two."""

from __future__ import annotations

import bisect
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.config.kv_spec import KVSpec, LayerGroup, group_layers
from octavo.core.errors import ConfigError
from octavo.core.plan import StepPlan
from octavo.kernels.interface import Kernels, LayerCache
from octavo.runner.input_batch import InputBatch

#: Makes the caches of all layers with so many blocks of each KV group.
MakeCache = Callable[[Sequence[int]], list[LayerCache]]
#: (source, target).
Pairs = list[tuple[int, int]]

#: Tells, once the step is done, the seconds that it waited for its swaps.
SwapSeconds = Callable[[], float]

#: What ``measure_swap`` moves at once: about these bytes, so that it does not measure the processor's own caches, and
#: no more than these blocks.
_SAMPLE_BYTES = 4 << 20
_SAMPLE_BLOCKS = 64
_SAMPLE_ROUNDS = 3


class CacheEngine:
    """Owns the device blocks and the host blocks of all layers.

    A block number means the same block in every layer of a KV group; plans number the blocks of all groups, one group
    after the other, on the device and on the host. Host blocks have the layout of device blocks, so a swap is a copy of
    bytes.
    """

    def __init__(
        self,
        kernels: Kernels,
        make: MakeCache,
        make_host: MakeCache,
        block_bytes: Sequence[int],
        num_blocks: Sequence[int],
        num_host_blocks: Sequence[int],
    ) -> None:
        """Allocates both.

        Args:
            kernels: what moves blocks.
            make: allocates the caches of all layers on the device.
            make_host: as ``make``, in host memory.
            block_bytes: bytes of a block of each group, in all of its layers.
            num_blocks: blocks of each group on the device.
            num_host_blocks: blocks of each group on the host; 0: nothing can be swapped.
        """
        self._kernels = kernels
        self._make = make
        self._make_host = make_host
        self._block_bytes = block_bytes
        self._blocks, self._host_blocks = num_blocks, num_host_blocks
        self._first = _first_blocks(num_blocks)
        self._first_on_host = _first_blocks(num_host_blocks)
        self._num_host_blocks = sum(num_host_blocks)
        self._swaps: list[tuple[int, float]] = []
        self.allocate()

    def allocate(self) -> None:
        """Takes the memory of all blocks, which are zero."""
        #: KV cache of each layer.
        self.device = self._make(self._blocks)
        # Memory that nothing was swapped to is never touched, so it is not taken from the system.
        self._host = self._make_host(self._host_blocks)

    def release(self) -> None:
        """Gives the memory of all blocks back, with what is in them, until ``allocate``."""
        self.finish_swaps()
        self.device, self._host = [], []

    def move(self, plan: StepPlan) -> SwapSeconds | None:
        """Does the plan's moves: out, in, copies, each in one call for all layers. None if it waits for no swap."""
        seconds: SwapSeconds | None = None
        if plan.blocks_to_swap_out or plan.blocks_to_swap_in:
            seconds = self._swap(plan)
        if plan.blocks_to_copy:
            for group, pairs in self._by_group(plan.blocks_to_copy, self._first, self._first):
                self._kernels.copy_blocks(self._of_group(self.device, group), pairs)
        return seconds

    def _by_group(self, pairs: Pairs, first_source: list[int], first_target: list[int]) -> Iterable[tuple[int, Pairs]]:
        """The moves of each group, in the group's own numbers."""
        if len(first_source) == 1:
            return [(0, pairs)]
        groups: dict[int, Pairs] = {}
        for source, target in pairs:
            group = bisect.bisect_right(first_source, source) - 1
            groups.setdefault(group, []).append((source - first_source[group], target - first_target[group]))
        return groups.items()

    def _of_group(self, caches: list[LayerCache], group: int) -> list[LayerCache]:
        return caches if len(self._first) == 1 else [cache for cache in caches if cache.group == group]

    def computes_over(self, tables: NDArray[np.int32]) -> None:
        """The step whose blocks were moved last is about to be computed over these block tables: [G, S, B]."""

    def take_swaps(self) -> list[tuple[int, float]]:
        """Bytes and seconds of each swap that has ended since the last call."""
        swaps, self._swaps = self._swaps, []
        return [swap for swap in swaps if swap[0]]  # a pipeline stage may have no layer of the groups that moved

    def _swap(self, plan: StepPlan) -> SwapSeconds | None:
        start = time.perf_counter()
        num_bytes = self._queue_swaps(plan)
        seconds = time.perf_counter() - start
        self._swaps.append((num_bytes, seconds))
        return lambda: seconds

    def _queue_swaps(self, plan: StepPlan) -> int:
        """Moves out, then in: how many bytes."""
        num_bytes = 0
        for group, pairs in self._by_group(plan.blocks_to_swap_out, self._first, self._first_on_host):
            self._kernels.swap_blocks(self._of_group(self.device, group), self._of_group(self._host, group), pairs)
            num_bytes += len(pairs) * self._block_bytes[group]
        for group, pairs in self._by_group(plan.blocks_to_swap_in, self._first_on_host, self._first):
            self._kernels.swap_blocks(self._of_group(self._host, group), self._of_group(self.device, group), pairs)
            num_bytes += len(pairs) * self._block_bytes[group]
        return num_bytes

    def finish_swaps(self) -> None:
        """Returns when every swap that was queued is done."""

    def measure_swap(self) -> float:
        """Seconds to move one block one way, the median of a few; 0.0 without host blocks.

        Blocks of the worker's own are left alone: what is in them stays, and host memory is not taken before it is
        needed. Blocks made for the measurement are moved instead, and dropped.
        """
        if not self._num_host_blocks:
            return 0.0
        count = max(1, min(_SAMPLE_BLOCKS, _SAMPLE_BYTES // sum(self._block_bytes)))
        pairs = [(i, i) for i in range(count)]
        counts = [count] * len(self._first)
        device, host = self._make(counts), self._make_host(counts)
        self.finish_swaps()

        def seconds(sources: list[LayerCache], targets: list[LayerCache]) -> float:
            start = time.perf_counter()
            for group in range(len(self._first)):
                self._kernels.swap_blocks(self._of_group(sources, group), self._of_group(targets, group), pairs)
            self.finish_swaps()
            return (time.perf_counter() - start) / count

        taken = [seconds(*way) for _ in range(1 + _SAMPLE_ROUNDS) for way in ((device, host), (host, device))]
        # The first round touches the memory for the first time, which is slow and happens once.
        return statistics.median(taken[2:])


def _first_blocks(counts: Sequence[int]) -> list[int]:
    """The number of each group's first block."""
    return [0, *itertools.accumulate(counts)][:-1]


# The KV caches of a worker's layers: those of the network and, in the same blocks, those of a drafter.


@dataclass(frozen=True)
class Workspace:
    """Keys and values of the layers of an encoder: of the tokens of one step, and of one layer at a time."""

    spec: KVSpec
    blocks: int
    num_layers: int


class KVLayers:
    """Makes the caches of all layers. Owns which layers share block tables.

    The layers of an encoder are in no group: they have one cache together, which is no memory of what was computed.

    A drafter's layers are in no groups of their own: they have caches of their shape, with as many blocks as the group
    of the network whose block tables they read. So a block of that group is larger by theirs.
    """

    def __init__(
        self,
        kernels: Kernels,
        groups: Sequence[LayerGroup],
        block_size: int,
        drafter: Sequence[KVSpec] = (),
        workspace: Workspace | None = None,
    ) -> None:
        """``groups``: of the network's layers on this rank; ``drafter``: of each of the drafter's layers.

        ``workspace``: of an encoder, which has no groups, or has those of the decoder behind it.

        Raises:
            ConfigError: as ``find_groups``.
        """
        self._kernels, self.groups, self._block_size = kernels, list(groups), block_size
        self._drafter = find_groups(drafter, [group.spec.window for group in groups])
        self._workspace = workspace
        self._num_layers = sum(len(group.layers) for group in groups)
        if not groups and workspace is not None:
            self._num_layers = workspace.num_layers

    def group_bytes(self) -> list[tuple[int, int | None]]:
        """For each group: bytes of a block in all its layers, with those of the drafter; and its window."""
        return [
            (self._size(group) + drafts, group.spec.window)
            for group, drafts in zip(self.groups, self._drafter_bytes(), strict=True)
        ]

    def block_bytes(self) -> int:
        """Bytes of a block in all layers of this rank."""
        return sum(size for size, _ in self.group_bytes())

    def drafter_share(self) -> float:
        """What the drafter's layers have of ``block_bytes``."""
        return sum(self._drafter_bytes()) / self.block_bytes()

    def _drafter_bytes(self) -> list[int]:
        sizes = [0] * len(self.groups)
        for group, index in self._drafter:
            sizes[index] += self._size(group)
        return sizes

    def _size(self, group: LayerGroup) -> int:
        return len(group.layers) * self._kernels.block_bytes(group.spec, self._block_size)

    def make(self, blocks: Sequence[int]) -> list[LayerCache]:
        """Caches of so many blocks of each group on the device: the network's layers, then the drafter's."""
        if self.groups or self._workspace is None:
            return self._make(self._kernels.make_cache, blocks)
        return [self.make_workspace()] * self._num_layers

    def make_workspace(self) -> LayerCache:
        """The cache that the layers of the encoder share, of a group of its own behind the others."""
        assert self._workspace is not None
        shared = LayerGroup(self._workspace.spec, (0,))
        cache = self._kernels.make_cache([shared], [self._workspace.blocks], self._block_size)[0]
        cache.group = len(self.groups)
        return cache

    def workspace_bytes(self) -> int:
        """Bytes of ``make_workspace``; 0 without one."""
        if self._workspace is None:
            return 0
        return self._workspace.blocks * self._kernels.block_bytes(self._workspace.spec, self._block_size)

    def make_host(self, blocks: Sequence[int]) -> list[LayerCache]:
        """As ``make``, in host memory."""
        return self._make(self._kernels.make_host_cache, blocks)

    def _make(
        self, make: Callable[[Sequence[LayerGroup], Sequence[int], int], list[LayerCache]], blocks: Sequence[int]
    ) -> list[LayerCache]:
        caches = make(self.groups, blocks, self._block_size)
        own = [group for group, _ in self._drafter]
        drafts = make(own, [blocks[index] for _, index in self._drafter], self._block_size)
        for group, index in self._drafter:
            for layer in group.layers:
                drafts[layer].group = index
        return caches + drafts

    def split(self, caches: list[LayerCache]) -> tuple[list[LayerCache], list[LayerCache]]:
        """Those of the network, and those of the drafter."""
        return caches[: self._num_layers], caches[self._num_layers :]


def find_groups(specs: Sequence[KVSpec], windows: Sequence[int | None]) -> list[tuple[LayerGroup, int]]:
    """The groups of a drafter's layers, and the KV group of the network in whose blocks each is.

    ``windows``: of the network's KV groups. Blocks behind a group's window belong to others, so it is the narrowest
    that keeps what the layers attend to.

    Raises:
        ConfigError: no group keeps enough.
    """
    found = []
    for group in group_layers(specs):
        window = group.spec.window
        wide = [i for i, kept in enumerate(windows) if kept is None or (window is not None and window <= kept)]
        if not wide:
            longest = max(kept for kept in windows if kept is not None)
            raise ConfigError(
                f"speculative_config: the drafter attends to {'all tokens' if window is None else f'{window} tokens'}, "
                f"but the model's KV cache keeps the last {longest} only; take method 'ngram' or 'suffix'"
            )
        found.append((group, min(wide, key=lambda i: windows[i] or float("inf"))))
    return found


# Which blocks of the KV cache hold the entries of a drafter, too: those that it has computed for any sequence.


class DraftedBlocks:
    """Owns a flag for each block of one KV group without a window: whether all of its tokens are computed."""

    def __init__(self, batch: InputBatch, group: int) -> None:
        """``group``: whose blocks the drafter's layers have."""
        self._batch, self._group, self._size = batch, group, batch.block_size
        self._first = batch.first_block[group]
        #: By the numbers that plans have, as are those on the host.
        self._filled = np.zeros(batch.first_block[-1], dtype=bool)
        self._on_host: set[int] = set()

    def clear(self) -> None:
        """The content of all blocks is lost."""
        self._filled[:] = False
        self._on_host.clear()

    def apply(self, plan: StepPlan) -> None:
        """Follows the moves of a plan, and forgets blocks that get other tokens."""
        filled = self._filled
        for block, on_host in plan.blocks_to_swap_out:
            (self._on_host.add if filled[block] else self._on_host.discard)(on_host)
        for on_host, block in plan.blocks_to_swap_in:
            filled[block] = on_host in self._on_host
        for source, target in plan.blocks_to_copy:
            filled[target] = filled[source]
        if plan.table_changes:
            kept = {new.seq_id: new.num_computed // self._size for new in plan.new}
            for change in plan.table_changes:
                if change.group == self._group:
                    filled[change.blocks[max(0, kept.get(change.seq_id, 0) - change.index) :]] = False

    def extend(
        self, rows: NDArray[np.int64], computed: NDArray[np.int64], known: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The tokens of each row that are computed, if ``computed`` are and what lies in filled blocks behind them."""
        behind = np.flatnonzero(known - computed > self._size)
        if not len(behind):
            return computed
        whole = known[behind] // self._size
        index = np.arange(int(whole.max()))
        blocks = self._batch.block_tables[self._group, rows[behind], : len(index)] + self._first
        found = self._filled[blocks] | (index < computed[behind, None] // self._size)
        leading = np.logical_and.accumulate(found & (index < whole[:, None]), axis=1).sum(axis=1)
        extended = computed.copy()
        extended[behind] = np.maximum(computed[behind], leading * self._size)
        return extended

    def fill(self, rows: NDArray[np.int64], before: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """All tokens of each row up to ``ends`` are computed; up to ``before`` they were."""
        tables = self._batch.block_tables[self._group]
        first, last = before // self._size, ends // self._size
        for i in np.flatnonzero(last > first).tolist():
            self._filled[tables[rows[i], first[i] : last[i]] + self._first] = True
