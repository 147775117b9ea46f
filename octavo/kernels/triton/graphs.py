"""Decode steps as CUDA graphs: a step is one launch instead of several hundred.

A graph has fixed shapes and fixed addresses. So there is one for each of a short list of batch sizes, all of them read
from the same buffers, and a batch is padded to the next size: a padding row has slot -1 (nothing is written) and an
empty context (nothing is read). Graphs share one pool of memory, as no two of them run at once.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.interface import AttentionBatch, Forward

logger = logging.getLogger("octavo")

#: Records what a function does on the device, and gives what does it again and the tensor that the function returned,
#: whose memory each repetition writes.
Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


def graph_sizes(max_seqs: int) -> list[int]:
    """Batch sizes that get a graph: close to each other where a step is short, so that little of it is padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_seqs, 32)]
    return [size for size in sizes if size < max_seqs] + [max_seqs]


class GraphedForward:
    """A network's forward that replays decode steps and passes the others on.

    Owns the graphs and their inputs. Invariant: from row ``_filled`` on, the inputs are padding. What a replay returns
    is overwritten by the next one, so work that reads it must be queued on the same stream before that.
    """

    def __init__(
        self,
        forward: Forward,
        record: Record,
        *,
        max_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device | str,
        at_start: bool = False,
    ) -> None:
        """Captures all graphs at once if ``at_start``, else each when its size is first met."""
        self._forward = forward
        self._record = record
        self._sizes = graph_sizes(max_seqs)
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}
        self._filled = 0
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._token_ids = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self._slots = torch.full((max_seqs,), -1, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self._query_start = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)
        blocks = -(-max_model_len // block_size)
        self._block_tables = torch.zeros(max_seqs, blocks, dtype=torch.int32, device=device)
        #: Seconds that capturing has taken so far.
        self.capture_seconds = 0.0
        if at_start:
            # The largest first: the others then fit into its memory.
            for size in reversed(self._sizes):
                self._capture(size)
            logger.info("captured %d CUDA graphs in %.1f s", len(self._sizes), self.capture_seconds)

    def __call__(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """Hidden states [T, E] of the step's tokens."""
        rows = token_ids.shape[0]
        if batch.num_decodes != rows or not 0 < rows <= self._sizes[-1]:
            return self._forward(token_ids, batch)
        size = self._sizes[bisect_left(self._sizes, rows)]
        if size not in self._graphs:
            self._capture(size)
            logger.debug(
                "captured the CUDA graph of decode steps of up to %d; %d graphs in %.1f s so far",
                size,
                len(self._graphs),
                self.capture_seconds,
            )
        replay, hidden = self._graphs[size]
        self._fill(token_ids, batch, rows)
        replay()
        return hidden[:rows]

    def _fill(self, token_ids: Tensor, batch: AttentionBatch, rows: int) -> None:
        """Copies the step's inputs to where the graphs read them, and makes padding of what a larger step left."""
        torch._foreach_copy_(
            [self._token_ids[:rows], self._positions[:rows], self._slots[:rows]],
            [token_ids, batch.positions, batch.slots],
        )
        self._seq_lens[:rows].copy_(batch.seq_lens)
        self._block_tables[:rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        if rows < self._filled:
            self._clear(rows)
        self._filled = rows

    def _clear(self, first: int) -> None:
        self._slots[first : self._filled].fill_(-1)
        self._seq_lens[first : self._filled].zero_()
        self._filled = min(first, self._filled)

    def _capture(self, size: int) -> None:
        """Records a step of ``size`` rows, all of them padding: what is run for it touches no block."""
        start = time.perf_counter()
        self._clear(0)
        batch = AttentionBatch(
            query_start=self._query_start[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._block_tables[:size],
            slots=self._slots[:size],
            positions=self._positions[:size],
            num_decodes=size,
            max_query_len=1,
            max_seq_len=self._max_model_len,
            block_size=self._block_size,
        )
        token_ids = self._token_ids[:size]
        self._graphs[size] = self._record(lambda: self._forward(token_ids, batch))
        self.capture_seconds += time.perf_counter() - start


class CudaGraphs:
    """Records CUDA graphs that share one pool of memory. What it records is called twice."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See ``Record``."""
        # Once without recording: kernels are compiled and loaded, libraries take their workspaces.
        run()
        graph = torch.cuda.CUDAGraph()
        # Entering waits for the device. Only this thread's calls are watched: others may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return graph.replay, output
