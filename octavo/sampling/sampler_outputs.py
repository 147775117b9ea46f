"""Outputs of the sampler: tokens on the device immediately, host values after ``wait``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import PositionLogprobs
from octavo.kernels.sampling import NO_TOKEN, PendingLogprobs


class RowError(Exception):
    """One sequence cannot continue; the message says why."""


class RowFailure(Exception):
    """What was raised while one row was processed, by a fault that is not the request's: nothing of the step counts."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(f"row {row}: {type(error).__name__}: {error}")
        self.row, self.error = row, error


@dataclass(slots=True)
class SamplerOutput:
    """Sampled tokens of a step. The keys of the dictionaries are indices in the batch, not rows of the table.

    ``token_ids`` int64 [n] is 0 at the indices in ``errors``: such a sequence has no token and ends.
    """

    token_ids: NDArray[np.int64]
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class PendingSamplerOutput:
    """The sampled tokens of a step, which the device may still be computing.

    It holds all inputs of the step, so later changes of the rows do not affect it.
    """

    __slots__ = ("_failed", "_fetched", "_scored", "tokens")

    def __init__(
        self,
        tokens: Any,
        fetched: Callable[[], NDArray[np.int64]],
        failed: dict[int, str] | None = None,
        scored: Sequence[tuple[NDArray[np.int64], PendingLogprobs]] = (),
    ) -> None:
        #: int64 [n] where the logits are, ready in stream order; negative where there is no token (``NO_TOKEN``).
        self.tokens = tokens
        self._fetched = fetched
        self._failed = failed
        self._scored = scored

    def wait(self) -> SamplerOutput:
        """The output on the host; may be called repeatedly."""
        chosen = self._fetched()
        output = SamplerOutput(chosen)
        if self._failed or min(chosen.tolist(), default=0) < 0:
            none = {i: NO_TOKEN[int(chosen[i])] for i in np.flatnonzero(chosen < 0).tolist()}
            output.errors = none | (self._failed or {})
            output.token_ids = chosen.copy()
            output.token_ids[list(output.errors)] = 0
        for which, logprobs in self._scored:
            for i, position in zip(which.tolist(), logprobs.wait(), strict=True):
                # The first is the sampled token's; others are those that the request lists.
                if i not in output.errors and (own := output.logprobs.setdefault(i, position)) is not position:
                    own.add(position)
        return output
