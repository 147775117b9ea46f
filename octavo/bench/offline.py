"""Offline throughput: the same random prompts for each batch size, greedy, to a fixed length."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.core.outputs import RequestOutput
    from octavo.engine.llm import LLM


@dataclass(frozen=True)
class BatchFigures:
    """What one batch took."""

    batch: int
    input_len: int
    output_len: int
    #: Seconds from the first request to the last token.
    seconds: float
    #: Seconds until every prompt had its first token, and prompt tokens a second in that time.
    prefill_seconds: float
    prefill_tokens_per_s: float
    #: Output tokens after the first, a second, in the time after that.
    decode_tokens_per_s: float
    #: All output tokens by all seconds, prefill included.
    output_tokens_per_s: float
    #: Share of step time that no kernel used: scheduling, batch building, sampling, bookkeeping.
    share_outside_kernels: float


def measure(llm: LLM, batches: list[int], input_len: int, output_len: int, seed: int = 0) -> Iterator[BatchFigures]:
    """Runs each batch once after a warm-up, no prompt twice; the engine should have ``time_kernels`` on."""
    rng = random.Random(seed)
    vocab_size = llm.llm_engine.core.model_config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)

    def run(count: int) -> list[RequestOutput]:
        prompts = [[rng.randrange(vocab_size) for _ in range(input_len)] for _ in range(count)]
        return llm.generate(prompts, params, use_tqdm=False)

    run(1)
    for batch in batches:
        times = llm.llm_engine.times
        before = times.total, times.kernels
        start_clock, start = time.monotonic(), time.perf_counter()
        outputs = run(batch)
        seconds = time.perf_counter() - start
        prefill = max((o.metrics.first_token_time or start_clock) for o in outputs) - start_clock
        total, kernels = times.total - before[0], times.kernels - before[1]
        yield BatchFigures(
            batch=batch,
            input_len=input_len,
            output_len=output_len,
            seconds=seconds,
            prefill_seconds=prefill,
            prefill_tokens_per_s=batch * input_len / prefill,
            decode_tokens_per_s=batch * (output_len - 1) / (seconds - prefill) if output_len > 1 else 0.0,
            output_tokens_per_s=batch * output_len / seconds,
            share_outside_kernels=1 - kernels / total,
        )
