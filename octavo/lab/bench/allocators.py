"""Paged against contiguous KV caches on the engine by the clock: Kwon et al. 2023, sections 6.2 to 6.5.

The kernels are those for paged memory throughout: a contiguous reservation is so many blocks that nobody else has. In
static batches (``static-oracle``, ``static-max``) the engine gets one batch at a time, with padded lengths.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.config.engine_config import EngineConfig, make_config
from octavo.core.errors import ConfigError
from octavo.core.sampling_params import BeamSearchParams, SamplingParams
from octavo.engine.llm_engine import LLMEngine
from octavo.lab.bench.restartable import RestartableCore, restarted, start
from octavo.lab.bench.steady import Guard, GuardedRun
from octavo.lab.simulate.allocators.comparison import BASELINES
from octavo.lab.simulate.allocators.contiguous import ContiguousBlocks, reserving
from octavo.lab.simulate.allocators.static_batches import STATIC, StaticBatching, take_batch
from octavo.lab.simulate.engine import SimulatedEngine, run
from octavo.lab.simulate.figures import RunFigures
from octavo.lab.simulate.run import Recorder
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.workloads.lengths import Lengths, Uniform
from octavo.lab.workloads.tokens import token_ids
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload
from octavo.memory.block_manager import BlockManager

_BLOCK_SIZE = 16
#: The paged KV cache with ``max_num_seqs=auto``; the other runs have a fixed maximum.
PAGED_AUTO = "paged-auto"
#: Requests before what is counted.
_WARM_UP = 4


@dataclass(frozen=True)
class AllocatorCase:
    """Requests that are all there at the start, and as much memory as Max needs for ``width`` sequences, two at least.

    So memory binds before the processor does: a step of some ten sequences takes hardly longer on two cores than one of
    one, as weights are read.
    """

    name: str
    requests: int
    inputs: Lengths
    outputs: Lengths
    #: The context that Max reserves.
    context: int = 256
    #: Sequences of a request: samples, or beams.
    width: int = 1
    beams: bool = False
    #: Tokens that all prompts begin with, beside ``inputs``.
    shared: int = 0

    @property
    def num_blocks(self) -> int:
        """Of the KV cache."""
        return max(2, self.width) * self.context // _BLOCK_SIZE

    def items(self, seed: int, share: float = 1.0) -> list[WorkItem]:
        """The requests, or this share of them; each fits the context."""
        load = Workload(
            requests=max(1, round(self.requests * share)), inputs=self.inputs, outputs=self.outputs, seed=seed
        )
        prefix = ((f"{seed}/examples", self.shared),) if self.shared else ()
        return [msgspec.structs.replace(i, input_len=self.shared + i.input_len, prefix=prefix) for i in load]

    def params(self, item: WorkItem, number: int) -> SamplingParams | BeamSearchParams:
        """Of a request that generates its length and not less."""
        length = item.output_len
        if self.beams:
            return BeamSearchParams(beam_width=self.width, max_tokens=length, ignore_eos=True)
        heat = 0.0 if self.width == 1 else 1.0
        return SamplingParams(
            n=self.width, temperature=heat, seed=number, max_tokens=length, ignore_eos=True, detokenize=False
        )


_SHORT = Uniform(8, 32), Uniform(8, 48)
#: Lengths relative to the context as in the paper: short as Alpaca's, long as ShareGPT's; samples and beams on Alpaca
#: (6.3); translation with one example and with five (6.4: 80 and 341 tokens); chat with its history (6.5).
CASES = {
    case.name: case
    for case in (
        AllocatorCase("short", 64, *_SHORT),
        AllocatorCase("long", 20, Uniform(16, 96), Uniform(16, 128)),
        *(AllocatorCase(f"samples-{n}", 72 // n, *_SHORT, width=n) for n in (2, 4, 6)),
        *(AllocatorCase(f"beams-{n}", 72 // n, *_SHORT, width=n, beams=True) for n in (2, 4, 6)),
        AllocatorCase("one-shot", 32, *_SHORT, shared=80),
        AllocatorCase("five-shot", 20, *_SHORT, context=512, shared=341),
        AllocatorCase("chat", 16, Uniform(96, 320), Uniform(16, 128), context=512),
    )
}


class AllocatorRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a case with one allocator."""

    case: str
    allocator: str
    seed: int
    seconds: float
    requests_per_s: float
    #: While requests wait, on average over time: sequences in a step, and the share of slots that hold a token.
    sequences: float
    filled: float
    preemptions: int
    #: As the simulator has it, with a profile, of cases without beams: requests a second.
    simulated: float | None = None


def make_options(options: EngineConfig, cases: Sequence[AllocatorCase]) -> EngineConfig:
    """The engine's, with the context and the memory that the cases need.

    Raises:
        ConfigError: an option that the comparison sets is given.
    """
    sets = {
        "block_size": _BLOCK_SIZE,
        "max_model_len": max(case.context for case in cases),
        "num_gpu_blocks_override": max(case.num_blocks for case in cases),
        "num_host_blocks_override": 0,
        "max_num_seqs": 64,
        "adapt_num_seqs": False,
        "enable_prefix_caching": True,
        "async_scheduling": False,
    }
    given = options.model_dump(exclude_unset=True)
    if clash := sorted(given.keys() & sets.keys()):
        raise ConfigError(f"octavo bench allocators sets {', '.join(clash)}: leave them out")
    return make_config(**given, **sets)


def measure(
    options: EngineConfig,
    cases: Sequence[AllocatorCase],
    *,
    repeats: int,
    guard: Guard,
    share: float = 1.0,
    profile: StepProfile | None = None,
) -> Iterator[GuardedRun[AllocatorRun]]:
    """Each case with each allocator, once in each repeat, in every second one backwards.

    Args:
        options: as ``make_options`` made them.
        cases: what to run.
        repeats: with seeds from ``options.seed`` on.
        guard: repeats runs that were disturbed.
        share: of each case's requests.
        profile: of this engine, for what the simulator says of the same requests.
    """
    core, engine = start(options)
    try:
        engine = use_allocator(core, engine, cases[0], "paged")
        _run(engine, cases[0], "paged", cases[0].items(options.seed)[:_WARM_UP], options.seed)

        def run(case: AllocatorCase, allocator: str, items: Sequence[WorkItem], seed: int) -> AllocatorRun:
            nonlocal engine
            engine = use_allocator(core, engine, case, allocator)
            figures = _run(engine, case, allocator, items, seed)
            if profile is not None and not case.beams:
                rate = simulated_rate(profile, engine.core.options, case, allocator, items)
                figures = msgspec.structs.replace(figures, simulated=rate)
            return figures

        for repeat in range(repeats):
            seed = options.seed + repeat
            for case in cases:
                items = case.items(seed, share)
                jobs = {
                    f"{allocator} ({case.name}, seed {seed})": functools.partial(run, case, allocator, items, seed)
                    for allocator in baselines(case)
                }
                yield from guard.measure(jobs, backwards=repeat % 2 == 1)
    finally:
        core.shutdown()


def baselines(case: AllocatorCase) -> tuple[str, ...]:
    """What a case is run with. The sequences of one request share their prompt, which static batches do not know."""
    contiguous = (name for name in BASELINES if name != "paged" and (case.width == 1 or name not in STATIC))
    return ("paged", PAGED_AUTO, *contiguous)


def use_allocator(core: RestartableCore, engine: LLMEngine, case: AllocatorCase, allocator: str) -> LLMEngine:
    """An engine in place of an idle one, with this memory: empty blocks, as many as the case has."""

    def make(sizes: Any, block_size: int, **settings: Any) -> BlockManager:
        return _manager(case, allocator, lambda: core.scheduler.queues)(case.num_blocks, block_size, **settings)

    core.block_manager = make
    return restarted(core, engine, {"adapt_num_seqs": allocator == PAGED_AUTO})


def _manager(case: AllocatorCase, allocator: str, queues: Any) -> Any:
    """What makes the blocks, called as ``BlockManager`` is."""
    if allocator in ("paged", PAGED_AUTO):
        return BlockManager
    if allocator in STATIC:
        return lambda *sizes, **settings: BlockManager(*sizes, **{**settings, "prefix_caching": False})

    def make(num_blocks: int, block_size: int, **settings: Any) -> ContiguousBlocks:
        reserve = reserving(allocator, case.context, queues)
        return ContiguousBlocks(num_blocks, block_size, reserve=reserve, **{**settings, "prefix_caching": False})

    return make


def _run(engine: LLMEngine, case: AllocatorCase, allocator: str, items: Sequence[WorkItem], seed: int) -> AllocatorRun:
    ids = (0, engine.core.model_config.vocab_size - 1)
    scheduler, slots = engine.core.scheduler, case.num_blocks * _BLOCK_SIZE
    sequences = filled = waited = 0.0
    left, batch = list(items), None
    start = time.perf_counter()
    while left:
        if allocator in STATIC:
            batch = take_batch(left, allocator, case.num_blocks, _BLOCK_SIZE, case.context)
        taken = left if batch is None else batch.padded
        left = left[len(taken) :]
        for number, item in enumerate(taken):
            engine.add_request(str(number), token_ids(item, ids), case.params(item, number), streaming=False)
        while engine.has_unfinished_requests():
            before, ended = time.perf_counter(), 0
            progress = _progress(engine)
            for output in engine.step():
                ended += len(output.outputs)
                if any(completion.finish_reason != "length" for completion in output.outputs):
                    reasons = [completion.error or completion.finish_reason for completion in output.outputs]
                    raise ConfigError(f"{case.name} with {allocator}: request {output.request_id} ended with {reasons}")
            seconds = time.perf_counter() - before
            stats = scheduler.stats()
            if stats.num_waiting or left:
                waited += seconds
                sequences += seconds * (scheduler.queues.num_running_seqs + ended)
                tokens = stats.blocks_used * _BLOCK_SIZE - stats.empty_slots
                filled += seconds * (tokens if batch is None else batch.tokens(progress)) / slots
    total = time.perf_counter() - start
    return AllocatorRun(
        case=case.name,
        allocator=allocator,
        seed=seed,
        seconds=total,
        requests_per_s=len(items) / total,
        sequences=sequences / waited if waited else 0.0,
        filled=filled / waited if waited else 0.0,
        preemptions=scheduler.counts().preemptions_by_recompute,
    )


def _progress(engine: LLMEngine) -> int:
    """Tokens computed of the sequence that is furthest."""
    running = engine.core.scheduler.queues.running
    return max((seq.num_computed for group in running for seq in group.seqs), default=0)


def simulated_rate(
    profile: StepProfile, options: EngineConfig, case: AllocatorCase, allocator: str, items: Sequence[WorkItem]
) -> float:
    """Requests a second of the same requests and memory in the simulator; not of beams."""
    return simulate_case(profile, options, case, allocator, items).requests_per_s


def simulate_case(
    profile: StepProfile, options: EngineConfig, case: AllocatorCase, allocator: str, items: Sequence[WorkItem]
) -> RunFigures:
    """The same requests and memory in the simulator; ``options`` as ``make_options`` made them."""
    changes = {
        "num_gpu_blocks_override": case.num_blocks,
        "enable_prefix_caching": allocator in ("paged", PAGED_AUTO),
        "adapt_num_seqs": allocator == PAGED_AUTO,
    }
    recorder = Recorder()
    engine: SimulatedEngine = SimulatedEngine(
        profile,
        options.model_copy(update=changes),
        make_blocks=_manager(case, allocator, lambda: engine.scheduler.queues),
        samples=case.width,
    )
    if allocator in STATIC:
        StaticBatching(engine, allocator).run(items, recorder.ended, recorder.sample)
    else:
        run(engine, items, recorder.ended, recorder.sample)
    return recorder.figures(engine)
