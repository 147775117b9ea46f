"""Offline throughput: batches of random prompts, greedy decoding to given lengths, in guarded rounds.

Figures of decoding come from the steady steps: those in which the whole batch decodes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from octavo.core.errors import WorkerError
from octavo.core.sampling_params import SamplingParams
from octavo.lab.bench.steady import Guard, GuardedRun, Machine
from octavo.lab.simulate.step_costs import weight_bytes_read
from octavo.lab.workloads.lengths import Lengths
from octavo.lab.workloads.tokens import token_ids
from octavo.lab.workloads.work_items import WorkItem, other_content
from octavo.lab.workloads.workload import Workload
from octavo.models.network import build_without_weights, kv_bytes_per_token, state_bytes

if TYPE_CHECKING:
    from octavo.core.outputs import RequestOutput
    from octavo.engine.core import EngineCore
    from octavo.engine.llm import LLM
    from octavo.engine.llm_engine import LLMEngine

#: Tokens that each request of a warm-up generates on a GPU: kernels are compiled and graphs captured meanwhile.
_WARM_UP_TOKENS = 4
#: Steady steps left out at either end, as with async scheduling a step in flight may belong to another phase.
_MARGIN = 2
#: Tokens of the guard's reference: most of its prompt, and most that it generates.
_REFERENCE_PROMPT, _REFERENCE_TOKENS = 16, 4


@dataclass(frozen=True)
class BatchFigures:
    """Times and rates of one batch."""

    batch: int
    #: Mean lengths.
    input_len: float
    output_len: float
    #: Seconds from the first request to the last token.
    seconds: float
    #: Seconds until every prompt had its first token, and prompt tokens a second in that time.
    prefill_seconds: float
    prefill_tokens_per_s: float
    #: Output tokens a second after the first token.
    decode_tokens_per_s: float
    #: Output tokens a second over the whole run, prefill included.
    output_tokens_per_s: float
    #: Share of step time outside kernels: scheduling, batch building, sampling, bookkeeping. None if kernels are not
    #: timed, as on a GPU.
    share_outside_kernels: float | None
    #: Of the steady steps: how many, and the mean context of a sequence in tokens; mean time in ms; on a GPU the share
    #: of it in which the device was idle; the share of the given bandwidth that reading the weights and the KV cache
    #: once takes.
    steady_steps: int
    context: float
    decode_step_ms: float
    device_idle_share: float | None
    share_of_bandwidth: float | None


@dataclass(frozen=True)
class RoundsFigures(BatchFigures):
    """Medians of the rounds of one batch."""

    rounds: int
    #: Of ``seconds``: the least and the largest.
    fastest_seconds: float
    slowest_seconds: float
    #: Conditions of the rounds, see ``GuardedRun.as_json``.
    conditions: list[dict[str, Any]]
    #: Rounds that are not to be trusted.
    disturbed: int


def measure_rounds(
    llm: LLM,
    batches: Sequence[Sequence[WorkItem]],
    bandwidth_gb_s: float | None = None,
    *,
    rounds: int,
    again: int,
    ended: Callable[[], object],
    say: Callable[[str], object],
) -> tuple[list[RoundsFigures], list[str]]:
    """Runs all batches in each round, in every second one backwards; every run has prompts of its own.

    The guard's reference is a request of a few tokens to the model. ``again``, ``ended``, ``say``: see ``Guard``.

    Returns:
        The figures of each batch, and lines about runs that were disturbed.
    """
    engine, numbers = llm.llm_engine, itertools.count()
    first = batches[0][0]
    probe = structs.replace(first, input_len=min(first.input_len, _REFERENCE_PROMPT))

    def reference() -> None:
        _run(engine, [other_content(probe, f"reference {next(numbers)}")], _REFERENCE_TOKENS)

    def run(batch: Sequence[WorkItem]) -> BatchFigures:
        number = next(numbers)
        fresh = [other_content(item, str(number)) for item in batch]
        return measure_batch(engine, fresh, bandwidth_gb_s)

    _warm_up(engine, batches[0])
    guard = Guard(Machine(reference), again=again, ended=ended, say=say)
    by_batch: list[list[GuardedRun[BatchFigures]]] = [[] for _ in batches]
    for number in range(rounds):
        jobs = {
            f"batch {len(batch)} (round {number}, place {place})": functools.partial(run, batch)
            for place, batch in enumerate(batches)
        }
        for place, each in enumerate(guard.measure(jobs, backwards=number % 2 == 1)):
            by_batch[place].append(each)
    return [_over_rounds(runs) for runs in by_batch], guard.report()


def _over_rounds(runs: Sequence[GuardedRun[BatchFigures]]) -> RoundsFigures:
    figures = [dataclasses.asdict(run.result) for run in runs]
    medians: dict[str, Any] = {
        name: None if any(f[name] is None for f in figures) else statistics.median([f[name] for f in figures])
        for name in figures[0]
    }
    seconds = [f["seconds"] for f in figures]
    counted = {name: int(medians[name]) for name in ("batch", "steady_steps")}
    return RoundsFigures(
        **{**medians, **counted},
        rounds=len(runs),
        fastest_seconds=min(seconds),
        slowest_seconds=max(seconds),
        conditions=[run.as_json() for run in runs],
        disturbed=sum(run.is_disturbed for run in runs),
    )


def make_batches(sizes: Iterable[int], inputs: Lengths, outputs: Lengths, seed: int = 0) -> list[list[WorkItem]]:
    """Batches of these sizes, each with prompts of its own."""
    load = Workload(requests=1, inputs=inputs, outputs=outputs, seed=seed)
    return [list(replace(load, requests=size, name=f"batch {i}")) for i, size in enumerate(sizes)]


def measure(
    llm: LLM, batches: Sequence[Sequence[WorkItem]], bandwidth_gb_s: float | None = None
) -> Iterator[BatchFigures]:
    """Runs each batch once after a warm-up with other prompts; on a CPU the engine should have ``time_kernels`` on.

    ``bandwidth_gb_s`` is the measured bandwidth of the device, if it is known.
    """
    _warm_up(llm.llm_engine, batches[0])
    for batch in batches:
        yield measure_batch(llm.llm_engine, batch, bandwidth_gb_s)


def measure_batch(engine: LLMEngine, batch: Sequence[WorkItem], bandwidth_gb_s: float | None = None) -> BatchFigures:
    """Runs one batch on a warm engine."""
    core, times = engine.core, engine.core.times
    if times.device:
        _run(engine, _others(batch), _WARM_UP_TOKENS)
    before = times.total, times.kernels
    done = _run(engine, batch)
    total, kernels = times.total - before[0], times.kernels - before[1]
    prompt_tokens, output_tokens = (sum(getattr(i, name) for i in batch) for name in ("input_len", "output_len"))
    decoding = done.seconds - done.prefill_seconds
    return BatchFigures(
        batch=len(batch),
        input_len=prompt_tokens / len(batch),
        output_len=output_tokens / len(batch),
        seconds=done.seconds,
        prefill_seconds=done.prefill_seconds,
        prefill_tokens_per_s=prompt_tokens / done.prefill_seconds,
        decode_tokens_per_s=(output_tokens - len(batch)) / decoding if output_tokens > len(batch) else 0.0,
        output_tokens_per_s=output_tokens / done.seconds,
        share_outside_kernels=1 - kernels / total if core.options.time_kernels else None,
        steady_steps=len(done.steady),
        context=done.context,
        decode_step_ms=done.step_seconds * 1e3,
        device_idle_share=done.idle_share,
        share_of_bandwidth=share_of_bandwidth(core, done, bandwidth_gb_s) if bandwidth_gb_s else None,
    )


def _run(engine: LLMEngine, batch: Sequence[WorkItem], most: int | None = None) -> BatchRun:
    """``most``: tokens that each generates at most."""
    ids = (0, engine.core.model_config.vocab_size - 1)
    limits = [item.output_len if most is None else min(most, item.output_len) for item in batch]
    return run_batch(engine, [token_ids(item, ids) for item in batch], [greedy(limit) for limit in limits])


def _warm_up(engine: LLMEngine, batch: Sequence[WorkItem]) -> None:
    _run(engine, _others(batch[:1]))


def _others(batch: Sequence[WorkItem]) -> list[WorkItem]:
    return [other_content(item, "warm-up") for item in batch]


def share_of_bandwidth(core: EngineCore, run: BatchRun, bandwidth_gb_s: float) -> float | None:
    """Bytes that a steady step must read, relative to the bandwidth; None if there was no such step."""
    if not run.steady or core.options.quantization == "gguf":  # the bits of a weight depend on the file
        return None
    return step_bytes(core, run) / (run.step_seconds * bandwidth_gb_s * 1e9)


def step_bytes(core: EngineCore, run: BatchRun) -> float:
    """Bytes that a steady step must read or write.

    It reads every matrix (of experts the chosen ones) and all KV entries, and reads and writes the recurrent states.
    """
    options = core.options
    # Where the bandwidth is known, on a GPU, "auto" is never a file's own bits.
    quantization = options.quantization if options.quantization in ("int8", "int4", "fp8") else None
    network = build_without_weights(core.model_config, core.dtype, quantization, options.kv_cache_dtype)
    of_sequence = run.context * kv_bytes_per_token(network) + 2 * state_bytes(network)
    return weight_bytes_read(network, run.batch) + run.batch * of_sequence


@dataclass(frozen=True)
class _TimedStep:
    """One call of the engine's ``step``."""

    seconds: float
    prefill_tokens: int
    decode_tokens: int
    #: Tokens computed so far, over all sequences.
    computed: int
    #: Seconds in which the device computed and was idle (0 on a CPU).
    device: float
    idle: float


@dataclass(frozen=True)
class BatchRun:
    """A batch that has run to its end."""

    #: Seconds from the first request to the last token, and until every request had its first token.
    seconds: float
    prefill_seconds: float
    batch: int
    #: Steps in which every sequence decoded and none was prefilled.
    steady: list[_TimedStep] = field(repr=False)

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a steady step; 0 if there was none."""
        return sum(c.seconds for c in self.steady) / len(self.steady) if self.steady else 0.0

    @property
    def context(self) -> float:
        """Mean context length of a sequence in a steady step, in tokens."""
        return sum(c.computed for c in self.steady) / len(self.steady) / self.batch if self.steady else 0.0

    @property
    def idle_share(self) -> float | None:
        """Share of steady steps in which the device was idle; None on a CPU."""
        idle, device = sum(c.idle for c in self.steady), sum(c.device for c in self.steady)
        return idle / (idle + device) if device else None


def random_prompts(engine: LLMEngine, count: int, length: int, rng: random.Random) -> list[list[int]]:
    """Prompts of random token ids."""
    vocab_size = engine.core.model_config.vocab_size
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy decoding of exactly ``max_tokens`` tokens, without text."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def run_batch(engine: LLMEngine, prompts: list[list[int]], params: Sequence[SamplingParams]) -> BatchRun:
    """Runs the prompts, each with its parameters, to their end; the engine must have no other requests.

    Raises:
        WorkerError: a request ended with an error.
    """
    counts, times = engine.core.scheduler.counts, engine.core.times
    base = counts().prefill_tokens + counts().decode_tokens
    outputs: dict[str, RequestOutput] = {}
    calls: list[_TimedStep] = []
    clock, start = time.monotonic(), time.perf_counter()
    for i, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, wanted, streaming=False)
    while engine.has_unfinished_requests():
        prefill, decode = counts().prefill_tokens, counts().decode_tokens
        device, idle, began = times.device, times.idle, time.perf_counter()
        for output in engine.step():
            outputs[output.request_id] = output
        ended, now = time.perf_counter(), counts()
        calls.append(
            _TimedStep(
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
    return BatchRun(time.perf_counter() - start, first, len(prompts), steady[_MARGIN:-_MARGIN])
