"""Sampling within a step: which rows, at which positions, and what grammars force behind them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from octavo.core.errors import SequenceError
from octavo.kernels.forward_batch import ForwardOutput
from octavo.runner.input_batch import InputBatch
from octavo.runner.pending import PendingTokens, QueuedStep
from octavo.runner.step_inputs import StepInputs
from octavo.sampling.sampler import Sampler
from octavo.sampling.sampler_outputs import RowFailure


class StepSampler:
    """Samples for the sequences of a step whose last known token is computed, and for those just forked from them."""

    def __init__(self, batch: InputBatch, sampler: Sampler, in_flight: Iterable[QueuedStep], *, jumps: bool) -> None:
        """``in_flight``: the steps that are, oldest first, at any time. With ``jumps`` steps report forced tokens."""
        self._batch, self._sampler, self._in_flight, self._jumps = batch, sampler, in_flight, jumps

    def sample(self, inputs: StepInputs, output: ForwardOutput, step: QueuedStep) -> None:
        """Queues the sampling of a step whose forward is queued, and counts the tokens as known."""
        assert output.logits is not None
        chosen, forked = inputs.sampling, inputs.forked
        rows, seq_ids = inputs.rows, inputs.seq_ids
        if len(chosen) != len(rows):
            rows, seq_ids = rows[chosen], [seq_ids[i] for i in chosen.tolist()]
        if forked is not None:
            seq_ids = seq_ids + forked.seq_ids
            rows = np.concatenate([rows, forked.rows])
        step.result.seq_ids = seq_ids
        sampled, positions, drafted = rows, None, inputs.drafted
        if drafted is not None:
            sampled = np.repeat(rows, drafted.counts)
            positions = self._batch.tokens.num_tokens[sampled] + drafted.offsets
        if self._sampler.needs_tokens(rows):
            for earlier in self._in_flight:
                earlier.receive()
        try:
            sample = self._sampler.start(output.logits, sampled, positions)
        except RowFailure as e:
            raise SequenceError.of(seq_ids[rows.tolist().index(e.row)], e.error) from e.error
        step.sampled = PendingTokens(sample, self._batch.advance(inputs, rows), drafted)
        if self._jumps and self._sampler.may_force(rows):
            step.find_forced = self._find_forced

    def _find_forced(self, seq_ids: list[int]) -> dict[int, list[int]]:
        """Tokens that grammars force after the known ones of these sequences, as far as there are any."""
        rows = {seq_id: row for seq_id in seq_ids if (row := self._batch.find_row(seq_id)) is not None}
        return {seq_id: tokens for seq_id, row in rows.items() if (tokens := self._sampler.forced_tokens(row))}
