"""Runs a batch and looks at the steps in which all of it decodes: between the last prompt and the first end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.core.errors import WorkerError

if TYPE_CHECKING:
    from octavo.core.outputs import RequestOutput
    from octavo.core.sampling_params import SamplingParams
    from octavo.engine.llm_engine import LLMEngine

#: Steps at either end of the window that are left out: one step may be in flight, planned before the window or past it.
_MARGIN = 2


@dataclass(frozen=True)
class _Call:
    """One call of the engine's ``step``."""

    seconds: float
    prefill_tokens: int
    decode_tokens: int
    #: Tokens computed up to here, over all sequences.
    computed: int
    #: Seconds in which the device computed, and in which it had nothing to do (0 on a CPU).
    device: float
    idle: float


@dataclass(frozen=True)
class BatchRun:
    """What came of a batch."""

    outputs: list[RequestOutput]
    #: From the first request to the last token, and until each had its first token.
    seconds: float
    prefill_seconds: float
    batch: int
    #: The steps in which every sequence decoded and nothing else happened.
    steady: list[_Call] = field(repr=False)

    @property
    def step_seconds(self) -> float:
        """Mean time of a steady step; 0 if there was none."""
        return sum(c.seconds for c in self.steady) / len(self.steady) if self.steady else 0.0

    @property
    def context(self) -> float:
        """Mean tokens in context of a sequence in a steady step."""
        return sum(c.computed for c in self.steady) / len(self.steady) / self.batch if self.steady else 0.0

    @property
    def device_seconds(self) -> float:
        """Mean time that the device computed in a steady step; 0 on a CPU."""
        return sum(c.device for c in self.steady) / len(self.steady) if self.steady else 0.0

    @property
    def idle_share(self) -> float | None:
        """Share of the time of steady steps in which the device had nothing to do; None on a CPU."""
        idle, device = sum(c.idle for c in self.steady), sum(c.device for c in self.steady)
        return idle / (idle + device) if device else None


def run_batch(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> BatchRun:
    """Runs the prompts to their end. The engine must have nothing else to do.

    Raises:
        WorkerError: one of them ended with an error.
    """
    counts, times = engine.core.scheduler.counts, engine.times
    base = counts().prefill_tokens + counts().decode_tokens
    outputs: dict[str, RequestOutput] = {}
    calls: list[_Call] = []
    clock, start = time.monotonic(), time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params, streaming=False)
    while engine.has_unfinished_requests():
        prefill, decode = counts().prefill_tokens, counts().decode_tokens
        device, idle, began = times.device, times.idle, time.perf_counter()
        for output in engine.step():
            outputs[output.request_id] = output
        ended, now = time.perf_counter(), counts()
        calls.append(
            _Call(
                seconds=ended - began,
                prefill_tokens=now.prefill_tokens - prefill,
                decode_tokens=now.decode_tokens - decode,
                computed=now.prefill_tokens + now.decode_tokens - base,
                device=times.device - device,
                idle=times.idle - idle,
            )
        )
    ordered = [outputs[str(i)] for i in range(len(prompts))]
    failed = next((o.outputs[0].error for o in ordered if o.outputs[0].finish_reason == "error"), None)
    if failed is not None:
        raise WorkerError(f"a measured request failed: {failed}")
    first = max((o.metrics.first_token_time or clock) for o in ordered) - clock
    steady = [c for c in calls if c.decode_tokens == len(prompts) and not c.prefill_tokens]
    return BatchRun(ordered, time.perf_counter() - start, first, len(prompts), steady[_MARGIN:-_MARGIN])
