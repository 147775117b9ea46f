"""The KV cache of one worker, on the device and on the host, and the moves of blocks within and between the two."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from octavo.core.plan import StepPlan
from octavo.kernels.interface import Kernels, LayerCache

#: Makes the caches of all layers with so many blocks.
MakeCache = Callable[[int], list[LayerCache]]

#: What ``measure_swap`` moves at once: about these bytes, so that it does not measure the processor's own caches, and
#: no more than these blocks.
_SAMPLE_BYTES = 4 << 20
_SAMPLE_BLOCKS = 64
_SAMPLE_ROUNDS = 3


class CacheEngine:
    """Owns the device blocks and the host blocks of all layers.

    A block number means the same block in every layer. Host blocks have the layout of device blocks, so a swap is a
    copy of bytes.
    """

    def __init__(
        self, kernels: Kernels, make: MakeCache, block_bytes: int, num_blocks: int, num_host_blocks: int
    ) -> None:
        """Allocates both.

        Args:
            kernels: what moves blocks.
            make: allocates the caches of all layers.
            block_bytes: bytes of a block, in all layers together.
            num_blocks: blocks on the device.
            num_host_blocks: blocks on the host; 0: nothing can be swapped.
        """
        self._kernels = kernels
        self._make = make
        self._block_bytes = block_bytes
        self._num_host_blocks = num_host_blocks
        #: KV cache of each layer.
        self.device = make(num_blocks)
        # Memory that nothing was swapped to is never touched, so it is not taken from the system.
        self._host = make(num_host_blocks)

    def move(self, plan: StepPlan) -> float:
        """Does the plan's moves: out, in, copies, each in one call for all layers. Seconds that swapping took."""
        seconds = 0.0
        if plan.blocks_to_swap_out or plan.blocks_to_swap_in:
            start = time.perf_counter()
            self._kernels.swap_blocks(self.device, self._host, plan.blocks_to_swap_out)
            self._kernels.swap_blocks(self._host, self.device, plan.blocks_to_swap_in)
            seconds = time.perf_counter() - start
        if plan.blocks_to_copy:
            self._kernels.copy_blocks(self.device, plan.blocks_to_copy)
        return seconds

    def measure_swap(self) -> float:
        """Seconds to move one block one way, the median of a few; 0.0 without host blocks.

        Blocks of the worker's own are left alone: what is in them stays, and host memory is not taken before it is
        needed. Blocks made for the measurement are moved instead, and dropped.
        """
        if not self._num_host_blocks:
            return 0.0
        count = max(1, min(_SAMPLE_BLOCKS, _SAMPLE_BYTES // self._block_bytes))
        pairs = [(i, i) for i in range(count)]
        device, host = self._make(count), self._make(count)

        def seconds(sources: list[LayerCache], targets: list[LayerCache]) -> float:
            start = time.perf_counter()
            self._kernels.swap_blocks(sources, targets, pairs)
            return (time.perf_counter() - start) / count

        taken = [seconds(*way) for _ in range(1 + _SAMPLE_ROUNDS) for way in ((device, host), (host, device))]
        # The first round touches the memory for the first time, which is slow and happens once.
        return statistics.median(taken[2:])
