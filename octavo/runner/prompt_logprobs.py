"""``PromptLogprobs``: logprobs of the tokens of prompts (``SamplingParams.prompt_logprobs``)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from octavo.core.plan import NewSequence, SequenceResult
from octavo.kernels.forward_batch import ForwardBatch, ForwardOutput
from octavo.kernels.sampling import PendingLogprobs
from octavo.runner.input_batch import StepInputs
from octavo.runner.row_feature import RowFeature

if TYPE_CHECKING:
    from octavo.runner.loaded_model import LoadedModel
    from octavo.runner.model_runner import QueuedStep

#: Rows of prompt logits computed at once, unless the backend says how many.
_PROMPT_ROWS = 128


class PromptLogprobs(RowFeature):
    """Scores the prompts of the sequences that ask for ``prompt_logprobs``."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        #: By sequence id: number of most likely tokens to return at each position.
        self._counts: dict[int, int] = {}

    def add(self, sequence: NewSequence, row: int) -> None:
        if sequence.task.prompt_logprobs is not None:
            self._counts[sequence.seq_id] = sequence.task.prompt_logprobs

    def forget(self, seq_id: int, row: int) -> None:
        self._counts.pop(seq_id, None)

    def reads_hidden(self) -> bool:
        return bool(self._counts)

    def after_step(self, inputs: StepInputs, batch: ForwardBatch, output: ForwardOutput, step: QueuedStep) -> None:
        """Queues the logprobs of the prompt tokens that follow the positions computed in this step."""
        if not self._counts:
            return
        table, sampler, loaded = self.worker.batch.tokens, self.worker.sampler, self._loaded
        offsets = inputs.arrays["query_start_loc"]
        for i, seq_id in enumerate(inputs.seq_ids):
            count = self._counts.get(seq_id)
            if count is None:
                continue
            row, num_prompt = int(inputs.rows[i]), int(table.num_prompt[inputs.rows[i]])
            # Virtual tokens of an adapter have no logprobs, nor has the token after them.
            virtual = int(np.count_nonzero(table.ids[row, :num_prompt] >= loaded.config.vocab_size))
            start = max(int(inputs.starts[i]), virtual)
            stop = min(int(inputs.ends[i]), num_prompt - 1)  # the token after the last one is generated
            scored = []
            rows_at_once = sampler.rows_at_once or _PROMPT_ROWS
            for low in range(start, stop, rows_at_once):
                high = min(low + rows_at_once, stop)
                first = int(offsets[i]) + low - int(inputs.starts[i])
                if loaded.loras is not None:
                    loaded.loras.use(np.full(high - low, row))
                logits = loaded.network.logits(output.hidden[first : first + high - low])
                scored.append(sampler.start_prompt_logprobs(logits, table.ids[row, low + 1 : high + 1], count))
                del logits  # before the next ones are computed
            if scored:
                extra = step.extra(seq_id)
                extra.prompt_start = start + 1
                step.on_wait.append(partial(_receive, extra, scored))


def _receive(extra: SequenceResult, scored: list[PendingLogprobs]) -> None:
    extra.prompt_logprobs = [position for logprobs in scored for position in logprobs.wait()]
