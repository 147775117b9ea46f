"""A step that is queued on the device and not yet known on the host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from octavo.core.plan import SequenceResult, StepResult
from octavo.runner.input_batch import InputBatch
from octavo.runner.step_inputs import DraftedTokens, NewTokens

if TYPE_CHECKING:
    from octavo.kernels.sampling import PendingLogprobs
    from octavo.sampling.sampler_outputs import PendingSamplerOutput, SamplerOutput


class StepTimer(Protocol):
    """Times what a device does beside the host."""

    def wait(self) -> tuple[float, float]:
        """Waits for the step's work; the seconds that it took, and those that the device was idle before it."""
        ...


@dataclass(slots=True)
class PendingTokens:
    """The tokens of a step that come from the sampler, and where they belong."""

    sample: PendingSamplerOutput
    new: NewTokens
    drafted: DraftedTokens | None


@dataclass(slots=True)
class PendingPrompt:
    """Logprobs of the tokens of a prompt that follow those of a step."""

    seq_id: int
    #: Position of the first of them.
    start: int
    parts: list[PendingLogprobs]


class QueuedStep:
    """A step that the device may still be computing; ``wait`` for it, in the order of submission."""

    def __init__(self, result: StepResult, batch: InputBatch, in_flight: deque[QueuedStep]) -> None:
        """Not yet in flight: the runner appends it when all of its work is queued."""
        self.result = result
        self.sampled: PendingTokens | None = None
        self.prompts: list[PendingPrompt] = []
        #: By sequence id: what was made of its prompt, float32; or why nothing was.
        self.pooled: dict[int, np.ndarray] = {}
        self.failed: dict[int, str] = {}
        #: The tokens that grammars force after those that are known now, by sequence id.
        self.find_forced: Callable[[list[int]], dict[int, list[int]]] | None = None
        self.swap_seconds: Callable[[], float] | None = None
        self.timer: StepTimer | None = None
        self._batch = batch
        self._in_flight = in_flight
        self._received = False

    def wait(self) -> StepResult:
        """The result of the plan; its tokens are in the token table from now on. To be called once.

        Raises:
            RuntimeError: an earlier step was not waited for, or this one was already; or the device failed.
        """
        if not self._in_flight or self._in_flight[0] is not self:
            raise RuntimeError(f"step {self.result.step} is not the oldest one in flight: wait in order, and once")
        self._in_flight.popleft()
        start, result = time.perf_counter(), self.result
        for prompt in self.prompts:
            extra = self._extra(prompt.seq_id)
            extra.prompt_start = prompt.start
            extra.prompt_logprobs = [position for part in prompt.parts for position in part.wait()]
        for seq_id, vector in self.pooled.items():
            self._extra(seq_id).pooled = vector.tobytes()
        for seq_id, message in self.failed.items():
            self._extra(seq_id).error = message
        self.receive()
        if self.timer is not None:
            result.device_seconds, result.idle_seconds = self.timer.wait()
        result.seconds = max(result.seconds + time.perf_counter() - start, result.device_seconds)
        if self.swap_seconds is not None:
            result.swap_seconds = min(self.swap_seconds(), result.seconds - result.device_seconds)
        return result

    def receive(self) -> None:
        """Waits for the step's tokens alone; from now on they are in the token table."""
        if self.sampled is None or self._received:
            return
        self._received = True
        result, output = self.result, self.sampled.sample.wait()
        if self.sampled.drafted is not None:
            self._accept(self.sampled.drafted, output)
        else:
            self._fill(self.sampled.new, output)
        if self.find_forced is not None:
            result.forced_tokens = self.find_forced(result.seq_ids)

    def _fill(self, new: NewTokens, output: SamplerOutput) -> None:
        """Takes one token for each sequence."""
        result = self.result
        result.token_ids = output.token_ids.tolist()
        self._batch.fill(new, output.token_ids)
        for i, logprobs in output.logprobs.items():
            self._extra(result.seq_ids[i]).logprobs = [logprobs]
        for i, message in output.errors.items():
            self._extra(result.seq_ids[i]).error = message

    def _accept(self, drafted: DraftedTokens, output: SamplerOutput) -> None:
        """Accepts the sampled tokens that agree with the drafts, and the token after them."""
        result, start = self.result, 0
        accepted = drafted.accept(output.token_ids.tolist())
        for seq_id, tokens, count in zip(result.seq_ids, accepted, drafted.counts.tolist(), strict=True):
            taken = range(start, start + len(tokens))
            failed = next((i for i in taken if i in output.errors), None)
            if failed is not None:
                taken = range(start, failed + 1)
                self._extra(seq_id).error = output.errors[failed]
                del tokens[len(taken) :]
            result.token_ids += tokens
            result.num_tokens.append(len(tokens))
            self._batch.accept(seq_id, tokens)
            if logprobs := [output.logprobs[i] for i in taken if i in output.logprobs]:
                self._extra(seq_id).logprobs = logprobs
            start += count

    def _extra(self, seq_id: int) -> SequenceResult:
        return self.result.extras.setdefault(seq_id, SequenceResult())
