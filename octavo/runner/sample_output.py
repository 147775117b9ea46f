"""What the sampler gives: tokens on the device at once, everything else once it is waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import PositionLogprobs
from octavo.runner.arithmetic import REASONS


@dataclass(slots=True)
class SampleOutput:
    """What came of the rows of a step; the dictionaries are by index in the batch, not by row.

    ``token_ids`` int64 [n] holds 0 where ``errors`` names the index: that sequence has no token and ends.
    """

    token_ids: NDArray[np.int64]
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def output_of(chosen: NDArray[np.int64], failed: dict[int, str]) -> SampleOutput:
    """What was chosen [n], token 0 and an error where there is none: a key of ``REASONS``, or failed before."""
    output = SampleOutput(chosen)
    if not failed and min(chosen.tolist(), default=0) >= 0:
        return output
    for i in np.flatnonzero(chosen < 0).tolist():
        output.errors[i] = REASONS[int(chosen[i])]
    output.errors.update(failed)
    chosen[list(output.errors)] = 0
    return output


class PendingSample(Protocol):
    """The choice of a step's tokens, which the device may still be busy with.

    Nothing of it depends on what becomes of the rows after it was started.
    """

    @property
    def tokens(self) -> Tensor:
        """int64 [n] on the logits' device, in the order of its current stream; a negative one is no token."""
        ...

    def wait(self) -> SampleOutput:
        """What came of it, on the host; may be called again."""
        ...


class PendingLogprobs(Protocol):
    """Logprobs that the device may still be busy with."""

    def wait(self) -> list[PositionLogprobs]:
        """One for each position asked for; may be called again."""
        ...


class Sampled:
    """A choice made on the host, where there is nothing to wait for."""

    __slots__ = ("_device", "_output")

    def __init__(self, output: SampleOutput, device: torch.device) -> None:
        self._output = output
        self._device = device

    @property
    def tokens(self) -> Tensor:
        """See ``PendingSample``; token 0 where there is none."""
        return torch.from_numpy(self._output.token_ids).to(self._device)

    def wait(self) -> SampleOutput:
        """See ``PendingSample``."""
        return self._output


class Scored:
    """Logprobs computed on the host, where there is nothing to wait for."""

    __slots__ = ("_found",)

    def __init__(self, found: list[PositionLogprobs]) -> None:
        self._found = found

    def wait(self) -> list[PositionLogprobs]:
        """See ``PendingLogprobs``."""
        return self._found
