"""The rows of running sequences, and the flat inputs of a step built from them without a loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import NewSequence, StepPlan
from octavo.kernels.interface import AttentionBatch
from octavo.runner.token_table import TokenTable


@dataclass(slots=True)
class StepInputs:
    """Flat tensors of one step (T tokens of S sequences, no padding)."""

    #: int64 [T]
    token_ids: Tensor
    attention: AttentionBatch
    #: Row of each sequence, in the order of the plan: [S].
    rows: NDArray[np.int64]
    #: First position computed, and one past the last: [S].
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    #: Where each sequence's tokens begin in the flat tensors: [S + 1].
    offsets: NDArray[np.int64]
    #: Index into the plan's sequences of those that sample: their last known token is computed.
    sampling: NDArray[np.int64]


class InputBatch:
    """Owns a row for each sequence that the worker holds: its tokens, its block table, how much is computed.

    Invariant: a sequence keeps its row from the plan that introduces it to the plan that forgets it.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        """Sizes the rows: ``max_model_len`` tokens each."""
        self.block_size = block_size
        self.tokens = TokenTable(max_num_seqs, max_model_len)
        # Zeros are virtual until written: a long context that nobody uses costs nothing.
        self.block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._rows: dict[int, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_rows(self) -> int:
        """Sequences held."""
        return len(self._rows)

    def row(self, seq_id: int) -> int:
        """The row of a held sequence."""
        return self._rows[seq_id]

    def add(self, sequence: NewSequence) -> int:
        """Gives a new sequence its row."""
        row = self._free.pop()
        self._rows[sequence.seq_id] = row
        known = len(sequence.token_ids)
        self.tokens.ids[row, :known] = sequence.token_ids
        self.tokens.num_tokens[row] = known
        self.tokens.num_prompt[row] = sequence.num_prompt_tokens
        self.num_computed[row] = sequence.num_computed
        self.num_blocks[row] = 0
        return row

    def forget(self, seq_id: int) -> int | None:
        """Takes the row back; None if the sequence was never met."""
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def append_blocks(self, seq_id: int, blocks: list[int]) -> None:
        """Extends a sequence's block table."""
        row = self._rows[seq_id]
        held = self.num_blocks[row]
        self.block_tables[row, held : held + len(blocks)] = blocks
        self.num_blocks[row] = held + len(blocks)

    def build(self, plan: StepPlan) -> StepInputs:
        """The flat inputs of a plan whose changes have been applied."""
        rows = np.array([self._rows[s] for s in plan.seq_ids], dtype=np.int64)
        lengths = np.array(plan.num_tokens, dtype=np.int64)
        starts = self.num_computed[rows]
        ends = starts + lengths
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        token_rows = np.repeat(rows, lengths)
        blocks = self.block_tables[token_rows, positions // self.block_size].astype(np.int64)
        max_seq_len = int(ends.max())
        attention = AttentionBatch(
            query_start=torch.from_numpy(offsets.astype(np.int32)),
            seq_lens=torch.from_numpy(ends.astype(np.int32)),
            block_tables=torch.from_numpy(self.block_tables[rows, : -(-max_seq_len // self.block_size)]),
            slots=torch.from_numpy(blocks * self.block_size + positions % self.block_size),
            positions=torch.from_numpy(positions),
            num_decodes=int((lengths == 1).sum()),
            max_query_len=int(lengths.max()),
            max_seq_len=max_seq_len,
            block_size=self.block_size,
        )
        return StepInputs(
            token_ids=torch.from_numpy(self.tokens.ids[token_rows, positions].astype(np.int64)),
            attention=attention,
            rows=rows,
            starts=starts,
            ends=ends,
            offsets=offsets,
            sampling=np.flatnonzero(ends == self.tokens.num_tokens[rows]),
        )

    def advance(self, inputs: StepInputs, sampled: NDArray[np.int64]) -> None:
        """Counts the step's tokens as computed and appends the sampled ones."""
        self.num_computed[inputs.rows] = inputs.ends
        rows = inputs.rows[inputs.sampling]
        # The last token that the context length allows ends the sequence: it needs no place.
        room = self.tokens.num_tokens[rows] < self.tokens.ids.shape[1]
        rows, sampled = rows[room], sampled[room]
        self.tokens.ids[rows, self.tokens.num_tokens[rows]] = sampled
        self.tokens.num_tokens[rows] += 1
