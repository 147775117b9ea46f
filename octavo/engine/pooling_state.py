"""Requests for vectors and scores while they are open."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.pooling_outputs import Pooled, PoolingOutput, PoolingRequestOutput
from octavo.core.request import Pool
from octavo.core.sampling_params import SamplingParams
from octavo.engine.request_state import RequestState

#: A request for a vector samples nothing.
NO_SAMPLING = SamplingParams(max_tokens=0, seed=0, detokenize=False)


@dataclass(slots=True, eq=False)
class PoolingState(RequestState):
    """A request whose output is what was made of its prompt; it has one, at its end."""

    def _take_new(self) -> Pooled:
        """The output."""
        import numpy as np  # a server that generates does without

        end = self.completions[0].output
        error = end.error
        if error is None and self.pooled is None:
            error = f"the request has ended without a result ({end.finish_reason})"
        data = np.frombuffer(self.pooled or b"" if error is None else b"", np.float32)
        task = self.group.task
        assert isinstance(task, Pool)
        if task.is_by_token and len(data):
            data = data.reshape(len(self.prompt_token_ids) + self.num_virtual_tokens - task.first, -1)
        return PoolingRequestOutput(
            self.request_id, PoolingOutput(data, error), self.prompt, self.prompt_token_ids, self.metrics, self.finished
        )
