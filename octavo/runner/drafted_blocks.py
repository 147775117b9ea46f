"""Which blocks of the KV cache hold the entries of a drafter, too: those that it has computed for any sequence.

So what it has computed of a prompt is found again with the prefix cache, and after a swap. Were a flag wrong, a drafter
would read what is not there, which decides no answer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import StepPlan
from octavo.runner.input_batch import InputBatch


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
