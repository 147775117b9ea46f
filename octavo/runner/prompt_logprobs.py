"""Logprobs of the tokens of prompts."""

from __future__ import annotations

import numpy as np

from octavo.core.plan import NewSequence
from octavo.kernels.arrays import Array
from octavo.kernels.interface import Kernels
from octavo.models.network import Network
from octavo.runner.input_batch import InputBatch
from octavo.runner.pending import PendingPrompt, QueuedStep
from octavo.runner.step_inputs import StepInputs
from octavo.sampling.sampler import Sampler

#: Rows of logits computed at once; bounds their memory at 128 x vocabulary x 4 bytes.
_ROWS = 128


class PromptLogprobs:
    """The held sequences whose prompts are scored."""

    def __init__(self, batch: InputBatch, sampler: Sampler, kernels: Kernels, vocab_size: int) -> None:
        self._batch, self._sampler, self._kernels, self._vocab_size = batch, sampler, kernels, vocab_size
        #: By sequence: number of most likely tokens to name at each position.
        self._scored: dict[int, int] = {}

    def add(self, sequence: NewSequence) -> None:
        """A sequence is held from now on."""
        if sequence.task.prompt_logprobs is not None:
            self._scored[sequence.seq_id] = sequence.task.prompt_logprobs

    def forget(self, seq_id: int) -> None:
        """A sequence is held no more."""
        self._scored.pop(seq_id, None)

    def compute(self, model: Network, inputs: StepInputs, hidden: Array, step: QueuedStep) -> None:
        """Begins to score the prompt tokens that follow the positions computed in this step: hidden states [T, E]."""
        if not self._scored:
            return
        table = self._batch.tokens
        offsets = inputs.arrays["query_start_loc"]
        for i, seq_id in enumerate(inputs.seq_ids):
            count = self._scored.get(seq_id)
            if count is None:
                continue
            row, num_prompt = int(inputs.rows[i]), int(table.num_prompt[inputs.rows[i]])
            # Virtual tokens of an adapter have no logprobs, nor has the token after them.
            virtual = int(np.count_nonzero(table.ids[row, :num_prompt] >= self._vocab_size))
            start = max(int(inputs.starts[i]), virtual)
            stop = min(int(inputs.ends[i]), num_prompt - 1)  # the last one's successor is generated
            scored = []
            slot = int(self._batch.adapters[row])
            for low in range(start, stop, _ROWS):
                high = min(low + _ROWS, stop)
                first = int(offsets[i]) + low - int(inputs.starts[i])
                slots = np.full(high - low, slot, np.int32)
                self._kernels.adapters.use(self._kernels.wrap(slots) if slot >= 0 else None)
                logits = model.logits(hidden[first : first + high - low])
                scored.append(self._sampler.start_prompt_logprobs(logits, table.ids[row, low + 1 : high + 1], count))
            if scored:
                step.prompts.append(PendingPrompt(seq_id, start + 1, scored))
