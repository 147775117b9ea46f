"""The inputs of a step on the device, with tokens that steps in flight sample there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.arrays import Array
from octavo.kernels.forward_batch import ARRAYS, ForwardBatch
from octavo.kernels.interface import Kernels
from octavo.runner.step_inputs import FlatInputs


class Send(Protocol):
    """Takes arrays to the device; where that is the host's own memory, they may be changed when the step is done."""

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[Array]:
        """The same arrays (int64, then int32) on the device, in order; valid until the step is done."""
        ...


@dataclass(slots=True)
class SampledTokens:
    """Tokens that were sampled by a step in flight: their ids are on the device only."""

    #: int64 [n] where the sampler has them; a negative one stands for no token.
    token_ids: Any
    #: Where they belong among this step's tokens, and which of ``token_ids`` each is: [m].
    targets: NDArray[np.int64]
    sources: NDArray[np.int64]

    def is_all(self, num_tokens: int) -> bool:
        """Whether they are all of the step's ``num_tokens``, in order: the same sequences as before decode."""
        count = len(self.sources)
        return count == num_tokens == len(self.token_ids) and bool((self.sources == np.arange(count)).all())


def to_device(inputs: FlatInputs, pending: Sequence[SampledTokens], send: Send, kernels: Kernels) -> ForwardBatch:
    """Sends a step's arrays, and puts tokens that are on the device already in their places there, in this order."""
    batch = ForwardBatch.of(
        send([inputs.arrays[array.name] for array in ARRAYS]),
        num_decodes=inputs.num_decodes,
        max_seq_len=inputs.max_seq_len,
        all_sampled=inputs.all_sampled,
        has_adapters=inputs.has_adapters,
        has_spans=inputs.has_spans,
    )
    count = len(inputs.arrays["token_ids"])
    for tokens in pending:
        if tokens.is_all(count):
            batch.token_ids = kernels.as_token_ids(tokens.token_ids)
        else:
            kernels.put_tokens(batch.token_ids, tokens.targets, tokens.token_ids, tokens.sources)
    return batch
