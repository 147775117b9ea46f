"""Offline throughput: the same random prompts for each batch size, greedy, to a fixed length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.bench.steady import BatchRun, run_batch
from octavo.core.sampling_params import SamplingParams
from octavo.models.sizes import kv_bytes_per_token, outline, weight_bytes_read

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore
    from octavo.engine.llm import LLM

#: Tokens that each request of a warm-up generates on a GPU: kernels are compiled and graphs captured meanwhile.
_WARM_UP_TOKENS = 4


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
    #: Share of step time that no kernel used: scheduling, batch building, sampling, bookkeeping. None where kernels are
    #: not timed: on a GPU nobody waits for them.
    share_outside_kernels: float | None
    #: Of the steps in which the whole batch decodes: their mean time in ms; on a GPU the share of it in which the
    #: device had nothing to do; and the share of the given bandwidth that reading weights and KV cache once a step is.
    decode_step_ms: float
    device_idle_share: float | None
    share_of_bandwidth: float | None


def measure(
    llm: LLM, batches: list[int], input_len: int, output_len: int, seed: int = 0, bandwidth_gb_s: float | None = None
) -> Iterator[BatchFigures]:
    """Runs each batch once after a warm-up, no prompt twice; on a CPU the engine should have ``time_kernels`` on.

    ``bandwidth_gb_s`` is what the device reads at best, if that is known.
    """
    engine, rng = llm.llm_engine, random.Random(seed)
    core, times = engine.core, engine.times

    def run(count: int, tokens: int) -> BatchRun:
        prompts = [[rng.randrange(core.model_config.vocab_size) for _ in range(input_len)] for _ in range(count)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return run_batch(engine, prompts, params)

    run(1, output_len)
    for batch in batches:
        if times.device:
            run(batch, min(_WARM_UP_TOKENS, output_len))
        before = times.total, times.kernels
        done = run(batch, output_len)
        total, kernels = times.total - before[0], times.kernels - before[1]
        decoding = done.seconds - done.prefill_seconds
        yield BatchFigures(
            batch=batch,
            input_len=input_len,
            output_len=output_len,
            seconds=done.seconds,
            prefill_seconds=done.prefill_seconds,
            prefill_tokens_per_s=batch * input_len / done.prefill_seconds,
            decode_tokens_per_s=batch * (output_len - 1) / decoding if output_len > 1 else 0.0,
            output_tokens_per_s=batch * output_len / done.seconds,
            share_outside_kernels=1 - kernels / total if core.options.time_kernels else None,
            decode_step_ms=done.step_seconds * 1e3,
            device_idle_share=done.idle_share,
            share_of_bandwidth=share_of_bandwidth(core, done, bandwidth_gb_s) if bandwidth_gb_s else None,
        )


def share_of_bandwidth(core: EngineCore, run: BatchRun, bandwidth_gb_s: float) -> float | None:
    """Bytes that a steady step has to read, over those that could be read meanwhile; None without such a step."""
    if not run.steady or core.options.quantization == "gguf":  # whose bits a weight only the file knows
        return None
    return step_bytes(core, run) / (run.step_seconds * bandwidth_gb_s * 1e9)


def step_bytes(core: EngineCore, run: BatchRun) -> float:
    """Bytes that a steady step has to read: every matrix once, and each sequence's KV entries once."""
    options = core.options
    network = outline(core.model_config, core.dtype, options.quantization, options.kv_cache_dtype)
    return weight_bytes_read(network) + run.batch * run.context * kv_bytes_per_token(network)
