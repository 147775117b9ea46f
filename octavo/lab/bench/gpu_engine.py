"""The engine on a GPU: prefill of a long prompt, decoding, batches of requests, profiles of the kernels."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.lab.bench.gpu_scale import Roofline, Row, Scale, batch_name, each
from octavo.lab.bench.offline import BatchRun, greedy, make_batches, measure, random_prompts, run_batch
from octavo.lab.simulate.step_costs import layer_weights, prefill_operations, weight_bytes_read
from octavo.lab.workloads.lengths import Constant
from octavo.models.network import build_without_weights, kv_bytes_per_token, state_bytes

if TYPE_CHECKING:
    from octavo.engine.llm import LLM
    from octavo.engine.llm_engine import LLMEngine

#: Tokens that each request of a warm-up generates, to compile kernels and capture graphs.
_WARM_UP_TOKENS = 6
_PREFILL_ROUNDS = 3
#: Steps that are profiled, and kernels that are listed.
_TRACED_STEPS = 4
_NAMED_KERNELS = 12
#: Gaps between kernels above this many microseconds are reported apart.
_LONG_GAP = 5.0


def profile_part(shape: str, scale: Scale, peak: Roofline) -> Iterator[Row]:
    """Time of each kernel in a step."""
    llm = _load(shape, scale)
    yield from each(
        [
            *((f"trace of decode {n}", partial(_trace_decode, llm, scale, n)) for n in scale.decode_batches),
            ("trace of prefill", partial(_trace_prefill, llm, scale)),
        ]
    )


def _load(shape: str, scale: Scale, **options: Any) -> LLM:
    from octavo.engine.llm import LLM

    return LLM(
        shape,
        load_format="dummy",
        device=scale.device,
        kernels=scale.kernels,
        dtype="bfloat16",
        max_model_len=max(scale.prefill, scale.input_len + scale.output_len) + 16,
        max_num_seqs=max(*scale.batches, *scale.decode_batches),
        max_num_batched_tokens=scale.prefill,
        enable_prefix_caching=False,
        preemption_mode="recompute",
        **{**scale.engine, **options},
    )


def engine_part(shape: str, scale: Scale, peak: Roofline, **options: Any) -> Iterator[Row]:
    """The engine: prefill of a long prompt, decoding, and batches of requests; ``options``: of the engine."""
    start = time.perf_counter()
    llm = _load(shape, scale, **options)
    core = llm.llm_engine.core
    yield "engine ready", time.perf_counter() - start, "s", "LLM(...) with random weights, profiling run included"
    tokens = core.blocks.num_blocks * core.options.block_size
    per_token = kv_bytes_per_token(build_without_weights(core.model_config, core.dtype))
    yield "KV cache", tokens * per_token / 1e9, "GB", f"{tokens} tokens x {per_token} B"
    yield from each(
        [
            ("prefill", partial(_prefill, llm, scale, peak)),
            *((f"decode of {n}", partial(_decode, llm, scale, peak, n)) for n in scale.decode_batches),
            ("throughput", partial(_throughput, llm, scale)),
        ]
    )


def _run(llm: LLM, count: int, length: int, tokens: int, seed: int) -> BatchRun:
    engine = llm.llm_engine
    return run_batch(engine, random_prompts(engine, count, length, random.Random(seed)), [greedy(tokens)] * count)


def _prefill(llm: LLM, scale: Scale, peak: Roofline) -> Iterator[Row]:
    c, n = llm.llm_engine.core.model_config, scale.prefill
    runs = [_run(llm, 1, n, 1, seed) for seed in range(1 + _PREFILL_ROUNDS)][1:]
    seconds = statistics.median(run.prefill_seconds for run in runs)
    network = build_without_weights(c, llm.llm_engine.core.dtype)
    operations, layers = prefill_operations(network, n), sum(spec.kind != "state" for spec in network.kv_specs)
    yield f"prefill {n}", n / seconds, "tok/s", f"{n} tokens / {seconds * 1e3:.2f} ms, median of {len(runs)}"
    if peak.tflops:
        yield (
            f"prefill {n}, share of matrix peak",
            operations / (seconds * peak.tflops * 1e12),
            "of peak",
            f"(2 x {layer_weights(network)} weights x {n} + 4 x {layers} layers x {c.num_heads} heads x "
            f"{c.head_dim} x {n} x {n + 1} / 2 + 2 x {c.vocab_size} x {c.hidden_size}) = "
            f"{operations / 1e12:.4g} TFLOP / ({seconds * 1e3:.2f} ms x {peak.tflops:.4g} TFLOP/s)",
        )


def _decode(llm: LLM, scale: Scale, peak: Roofline, batch: int) -> Iterator[Row]:
    lengths = Constant(scale.context - scale.decode_tokens // 2), Constant(scale.decode_tokens)
    (f,) = measure(llm, make_batches([batch], *lengths, seed=batch), peak.gb_s or None)
    if not f.steady_steps:
        raise RuntimeError(f"in no step all {batch} sequences decoded and nothing else happened")
    name, step_ms = f"decode {batch} x {scale.context}", f.decode_step_ms
    steps = f"mean of {f.steady_steps} steps in which all {batch} decode, at {f.context:.1f} tokens of context"
    yield f"{name}, step", step_ms, "ms", steps
    yield f"{name}, rate", batch / step_ms * 1e3, "tok/s", f"{batch} tokens / {step_ms:.3f} ms"
    if peak.gb_s:
        core = llm.llm_engine.core
        network = build_without_weights(core.model_config, core.dtype)
        weights, cached, states = weight_bytes_read(network, batch), kv_bytes_per_token(network), state_bytes(network)
        of_states = f" + {batch} x 2 x {states} B of states" if states else ""
        yield (
            f"{name}, share of bandwidth",
            f.share_of_bandwidth,
            "of limit",
            f"({weights / 1e9:.4g} GB of weights + {batch} x {f.context:.1f} tokens x {cached} B{of_states}) / "
            f"({step_ms:.3f} ms x {peak.gb_s:.4g} GB/s)",
        )
    if f.device_idle_share is None:
        yield f"{name}, GPU idle", None, "", "not known on a CPU"
    else:
        yield (
            f"{name}, GPU idle",
            f.device_idle_share,
            "of time",
            "between steps / (computing + between them), by events",
        )


def _throughput(llm: LLM, scale: Scale) -> Iterator[Row]:
    batches = make_batches(scale.batches, Constant(scale.input_len), Constant(scale.output_len))
    for f in measure(llm, batches):
        yield (
            batch_name(scale, f.batch),
            f.output_tokens_per_s,
            "tok/s",
            f"{f.batch} x {f.output_len:g} tokens / {f.seconds:.3f} s, prefill of {f.batch} x {f.input_len:g} included",
        )


def _trace_decode(llm: LLM, scale: Scale, batch: int) -> Iterator[Row]:
    """Profiles steps in which all sequences decode, after the graphs have been captured."""
    engine, length = llm.llm_engine, scale.context - scale.decode_tokens // 2
    _run(llm, batch, length, _WARM_UP_TOKENS, seed=300 + batch)
    for i, prompt in enumerate(random_prompts(engine, batch, length, random.Random(400 + batch))):
        engine.add_request(str(i), prompt, greedy(scale.decode_tokens), streaming=False)
    try:
        _step_until_all_decode(engine, batch)
        yield from _trace(f"decode {batch} x {scale.context}", partial(_steps, engine), _TRACED_STEPS, scale.device)
    finally:
        for i in range(batch):
            engine.abort_request(str(i))


def _steps(engine: LLMEngine) -> None:
    for _ in range(_TRACED_STEPS):
        engine.step()


def _step_until_all_decode(engine: LLMEngine, batch: int) -> None:
    counts = engine.core.scheduler.counts
    decoding = 0
    while decoding < 3:
        prefill, decode = counts().prefill_tokens, counts().decode_tokens
        engine.step()
        alike = counts().prefill_tokens == prefill and counts().decode_tokens - decode == batch
        decoding = decoding + 1 if alike else 0
        if not engine.has_unfinished_requests():
            raise RuntimeError(f"the {batch} requests ended before all of them decoded at once")


def _trace_prefill(llm: LLM, scale: Scale) -> Iterator[Row]:
    _run(llm, 1, scale.prefill, 1, seed=500)
    yield from _trace(f"prefill {scale.prefill}", lambda: _run(llm, 1, scale.prefill, 1, seed=501), 1, scale.device)


def _trace(name: str, work: Callable[[], object], steps: int, device: str) -> Iterator[Row]:
    """Time of each kernel in a step, the longest first; on a CPU (smoke test) of each torch operation."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    gpu = device != "cpu"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as traced:
        work()
        if gpu:
            torch.cuda.synchronize()
    times = {
        e.key: (e.self_device_time_total if gpu else e.self_cpu_time_total, e.count) for e in traced.key_averages()
    }
    total = sum(microseconds for microseconds, _ in times.values())
    if not total:
        raise RuntimeError("the profiler saw no kernel")
    yield f"{name}, all kernels", total / steps, "us", f"{total:.0f} us / {steps} steps, traced"
    where = DeviceType.CUDA if gpu else DeviceType.CPU
    spans = [(e.time_range.start, e.time_range.end) for e in traced.events() if e.device_type == where]
    window, short, long = gaps(spans, _LONG_GAP)
    formula = f"{long:.0f} us in gaps of over {_LONG_GAP:.0f} us / {window:.0f} us traced; shorter gaps: {short:.0f} us"
    yield f"{name}, idle in the trace", long / window, "of time", formula
    longest = sorted(times.items(), key=lambda item: -item[1][0])[:_NAMED_KERNELS]
    for key, (microseconds, count) in longest:
        formula = f"{microseconds:.1f} us in {count} launches / {steps} steps; {microseconds / total:.1%} of all; {key}"
        yield f"{name}, {key[:40]}", microseconds / steps, "us", formula


def gaps(spans: list[tuple[float, float]], limit: float) -> tuple[float, float, float]:
    """(time from the first start to the last end, sum of gaps up to ``limit``, sum of longer gaps).

    Kernels of a graph are about a microsecond apart; in a longer gap nothing was queued.
    """
    ordered = sorted(spans)
    end, short, long = ordered[0][1], 0.0, 0.0
    for begin, finish in ordered[1:]:
        gap = max(0.0, begin - end)
        if gap > limit:
            long += gap
        else:
            short += gap
        end = max(end, finish)
    return end - ordered[0][0], short, long
