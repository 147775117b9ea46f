"""Decode steps as CUDA graphs: a step is one launch instead of several hundred.

A graph has fixed shapes and addresses. So there is one for each of a list of batch sizes, all with the same input
buffers, and a batch is padded to the next size: a padding row has slot -1 (nothing is written) and an empty context
(nothing is read), see ``forward_batch``. Graphs share one memory pool, as no two of them run at once.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.arrays import ArrayMaker
from octavo.kernels.forward_batch import ARRAYS, BatchSize, Forward, ForwardBatch, ForwardOutput, padding_batch

logger = logging.getLogger("octavo")

#: Records the work of a function on the device, and returns a function that replays it and the recorded function's
#: output, which each replay overwrites.
Record = Callable[[Callable[[], ForwardOutput]], tuple[Callable[[], None], ForwardOutput]]
#: Dimensions that equal the number of rows in a decode step.
_ROWS = frozenset("TSN")


def graph_sizes(max_seqs: int) -> list[int]:
    """Batch sizes with a graph: closer to each other for small batches, where padding costs more."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_seqs, 32)]
    return [size for size in sizes if size < max_seqs] + [max_seqs]


class GraphedForward:
    """A network's forward that replays decode steps and runs others eagerly.

    Owns the graphs and their inputs. Invariant: from row ``_filled`` on, the inputs are padding. A replay overwrites
    the last output, so work that reads an output must be queued on the same stream before the next replay.
    """

    def __init__(
        self,
        forward: Forward,
        record: Record,
        largest: BatchSize,
        kernels: ArrayMaker,
        *,
        sizes: Sequence[int] | None = None,
        adapters: bool = False,
    ) -> None:
        """A graph is captured at the first batch of its size, unless ``capture_all`` comes before.

        ``sizes``: the batch sizes with a graph, by default ``graph_sizes`` of the most sequences. ``adapters``: whether
        steps may have them, for which there are graphs of their own.
        """
        self._forward = forward
        self._record = record
        self._sizes = sorted(set(sizes)) if sizes else graph_sizes(largest.sequences)
        self._kinds = (True, False) if adapters else (False,)
        #: By size, and whether the step has adapters.
        self._graphs: dict[tuple[int, bool], tuple[Callable[[], None], ForwardOutput]] = {}
        self._filled = 0
        rows = largest.sequences
        self._inputs = padding_batch(replace(largest, tokens=rows, sampled=rows), kernels)
        #: Seconds that capturing has taken so far.
        self.capture_seconds = 0.0

    def capture_all(self) -> None:
        """Captures every graph now."""
        for size, has_adapters in self._all():
            self._capture(size, has_adapters)
        logger.info("captured %d CUDA graphs in %.1f s", len(self._graphs), self.capture_seconds)

    def _all(self) -> list[tuple[int, bool]]:
        """Size and adapters of every graph, the largest first, so that the others fit into its memory."""
        return [(size, kind) for size in reversed(self._sizes) for kind in self._kinds]

    def total_bytes(self, in_use: Callable[[], int]) -> int:
        """Bytes of the device that all graphs will take; ``in_use`` tells those in use.

        Two are captured. The first brings the memory that all share, and the second tells what each takes of its own,
        which is the driver's and much the same for all: they have the same launches.
        """
        first, *others = self._all()
        before = in_use()
        self._capture(*first)
        with_first = in_use()
        total = sum(array.nbytes for array in self._inputs.arrays()) + max(0, with_first - before)
        if others:
            self._capture(*others[-1])
            total += len(others) * max(0, in_use() - with_first)
        return total

    def __call__(self, batch: ForwardBatch) -> ForwardOutput:
        """The network's output for the step."""
        rows = len(batch.token_ids)
        decodes_alone = batch.num_decodes == rows and batch.all_sampled and not batch.has_spans
        if not decodes_alone or not 0 < rows <= self._sizes[-1]:
            return self._forward(batch)
        size = self._sizes[bisect_left(self._sizes, rows)]
        if (size, batch.has_adapters) not in self._graphs:
            self._capture(size, batch.has_adapters)
            logger.debug(
                "captured the CUDA graph of decode steps of up to %d; %d graphs in %.1f s so far",
                size,
                len(self._graphs),
                self.capture_seconds,
            )
        replay, output = self._graphs[size, batch.has_adapters]
        self._fill(batch, rows)
        replay()
        return output.first(rows, rows)

    def _fill(self, batch: ForwardBatch, rows: int) -> None:
        """Copies the step's inputs to the graphs' buffers, and clears rows that a larger step has filled."""
        pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for array, buffer, given in zip(ARRAYS, self._inputs.arrays(), batch.arrays(), strict=True):
            if array.padding is not None:  # else the values are the indices in every decode step
                targets, sources = pairs.setdefault(array.dtype, ([], []))
                targets.append(buffer[tuple(slice(n) for n in given.shape)])
                sources.append(given)
        for targets, sources in pairs.values():
            torch._foreach_copy_(targets, sources)
        if rows < self._filled:
            self._clear(rows)
        self._filled = rows

    def _clear(self, first: int) -> None:
        for array, buffer in zip(ARRAYS, self._inputs.arrays(), strict=True):
            if array.padding is not None:
                self._rows(array.dims, buffer, slice(first, self._filled)).fill_(array.padding)
        self._filled = min(first, self._filled)

    @staticmethod
    def _rows(dims: str, buffer: Tensor, rows: slice) -> Tensor:
        """A view of these rows."""
        return buffer[tuple(rows if dim in _ROWS else slice(None) for dim in dims)]

    def _capture(self, size: int, has_adapters: bool) -> None:
        """Records a step of ``size`` padding rows, which read and write no block."""
        start = time.perf_counter()
        self._clear(0)
        batch = replace(self._inputs, num_decodes=size, has_adapters=has_adapters)
        for array, buffer in zip(ARRAYS, self._inputs.arrays(), strict=True):
            view = buffer[: size + 1] if array.dims == "s" else self._rows(array.dims, buffer, slice(size))
            setattr(batch, array.name, view)
        self._graphs[size, has_adapters] = self._record(lambda: self._forward(batch))
        self.capture_seconds += time.perf_counter() - start


class CudaGraphs:
    """Records CUDA graphs that share one memory pool. A recorded function is called twice."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], ForwardOutput]) -> tuple[Callable[[], None], ForwardOutput]:
        """See ``Record``."""
        # Once without recording, so that kernels are compiled and loaded and libraries allocate their workspaces.
        run()
        graph = torch.cuda.CUDAGraph()
        # Entering waits for the device. thread_local: other threads may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return graph.replay, output
