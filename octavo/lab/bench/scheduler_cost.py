"""Cost of the control plane: ``schedule`` and ``update`` of a step, without a model.

The garbage collector is set as in the process of an engine core, before the sequences are made.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.config.engine_config import EngineConfig, make_config
from octavo.config.options import SchedulerOptions
from octavo.core.errors import ConfigError
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.sampling_params import SamplingParams
from octavo.lab.bench.collector_cost import Collections, settled_collector
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.scheduler import Scheduler
from octavo.speculation.speculator import make_speculator

#: The engine's options that count here: the blocks' and the scheduler's, but for those that the measurement sets.
OPTIONS = frozenset(SchedulerOptions.model_fields) - {"max_num_seqs", "async_scheduling"} | {
    "block_size",
    "watermark",
    "enable_prefix_caching",
    "host_prefix_cache",
    "num_gpu_blocks_override",
    "num_host_blocks_override",
    "speculative_config",
}
#: Token id of every sampled token; not a stop token.
_TOKEN = 7
_PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@dataclass(frozen=True)
class SchedulerFigures:
    """Processor time of a step in which every running sequence decodes one token."""

    policy: str
    #: "repeated": one token over and over, so that with ``speculative_config`` every sequence has drafts, which are
    #: right. "new": tokens among which no draft is found. Steps take as long whatever their rows.
    output: str
    running: int
    waiting: int
    context: int
    #: Median microseconds of ``schedule`` and of ``update`` in a step.
    schedule_us: float
    update_us: float
    steps: int
    #: The slowest step, and the slowest but one in a thousand (only some steps allocate blocks).
    slowest_us: float
    p999_us: float
    #: The slowest step by the clock: with the time in which other processes had the processor.
    slowest_wall_us: float
    us_per_sequence: float
    #: Mean draft tokens of a step.
    draft_tokens: float
    #: Of the garbage collector in these steps: collections of the youngest, the next and all generations, processor
    #: time in all, and of the longest.
    collections: list[int]
    collector_us: float
    longest_collection_us: float


def measure(
    running: int,
    waiting: int,
    context: int,
    options: EngineConfig | None = None,
    steps: int = 1000,
    output: str = "repeated",
) -> SchedulerFigures:
    """Times steps of a scheduler with ``running`` decoding sequences of ``context`` tokens and ``waiting`` requests.

    ``output``: see ``SchedulerFigures``. Of ``options``, those named in ``OPTIONS`` count. By default the token budget
    takes all prompts in one step, and the blocks are as many as the sequences need.

    Raises:
        ConfigError: under these options so many sequences do not run at once.
    """
    options = options or make_config(model="none")
    budget = options.max_num_batched_tokens or running * context
    if budget < running:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) must be at least the number of running sequences ({running}): each "
            "decodes one token a step"
        )
    options = options.model_copy(update={"max_num_seqs": running, "max_num_batched_tokens": budget})
    with settled_collector():
        drafts = options.speculative_config.num_speculative_tokens if options.speculative_config is not None else 0
        decoded = (_steps_of_prompts(options, context) + steps + 2) * (1 + drafts)
        scheduler = _make_scheduler(options, running, context + decoded)
        _fill(scheduler, running, waiting, context)
        with Collections() as collections:
            tokens = itertools.repeat(_TOKEN) if output == "repeated" else itertools.count(_TOKEN + 1)
            times = [_timed_step(scheduler, running, tokens) for _ in range(steps)]
    stats = scheduler.counts().speculation
    drafted = stats.draft_tokens if stats is not None else 0
    schedule, update, wall = zip(*times, strict=True)
    totals = sorted(map(sum, zip(schedule, update, strict=True)))
    schedule_us, update_us = statistics.median(schedule) * 1e6, statistics.median(update) * 1e6
    return SchedulerFigures(
        policy=options.scheduling_policy,
        output=output,
        running=running,
        waiting=waiting,
        context=context,
        schedule_us=schedule_us,
        update_us=update_us,
        steps=steps,
        slowest_us=totals[-1] * 1e6,
        p999_us=totals[-1 - steps // 1000] * 1e6,
        slowest_wall_us=max(wall) * 1e6,
        us_per_sequence=(schedule_us + update_us) / running,
        draft_tokens=drafted / steps,
        collections=collections.counts,
        collector_us=collections.seconds * 1e6,
        longest_collection_us=collections.longest * 1e6,
    )


def _fill(scheduler: Scheduler, running: int, waiting: int, context: int) -> None:
    """Computes the prompts of ``running`` sequences, while ``waiting`` others wait.

    Raises:
        ConfigError: some end before all are computed.
    """
    now = time.monotonic()
    block_size = scheduler.blocks.block_size
    for i in range(running + waiting):
        # Lengths differ, so that not all sequences need a block in the same step; prompts share no prefix.
        prompt = [i] + [_TOKEN] * (context - 1 - i % block_size % context)
        task = Generate(_PARAMS, seed=i)
        scheduler.add(EngineCoreRequest(group_id=i, prompt_token_ids=prompt, task=task, arrival_time=now))
    while scheduler.counts().num_running < running or scheduler.queues.prefilling:
        plan = scheduler.schedule()
        outputs = scheduler.update(plan, sampled(plan, scheduler))
        if outputs.groups or any(update.finish_reason for update in outputs.sequences):
            reason = outputs.groups[0].error if outputs.groups else "some end before the last prompt is computed"
            raise ConfigError(f"under these options {running} sequences of {context} tokens do not run: {reason}")


def _timed_step(scheduler: Scheduler, running: int, tokens: Iterator[int]) -> tuple[float, float, float]:
    """Processor seconds of ``schedule`` and ``update`` in a step of all sequences, and seconds of both on the clock."""
    wall, start = time.perf_counter(), time.thread_time()
    plan = scheduler.schedule()
    scheduled, middle = time.thread_time(), time.perf_counter()
    # Every draft is accepted: it is the one token of prompts and outputs.
    counts = plan.num_tokens if plan.drafts else []
    sampled = list(itertools.islice(tokens, plan.total_tokens if counts else len(plan.seq_ids)))
    result = StepResult(plan.step, list(plan.seq_ids), sampled, counts, seconds=1e-3)
    before_update, later = time.thread_time(), time.perf_counter()
    scheduler.update(plan, result)
    updated, end = time.thread_time(), time.perf_counter()
    assert len(plan.seq_ids) == running, "every running sequence decodes in every step"
    return scheduled - start, updated - before_update, middle - wall + end - later


def _steps_of_prompts(options: EngineConfig, context: int) -> int:
    """Most steps until all prompts are computed, in which the first of them decode already."""
    running, budget = options.max_num_seqs, options.token_budget
    limits = options.max_num_partial_prefills, options.long_prefill_token_threshold, options.scheduler_delay_factor
    if budget >= running * context and not any(limits):
        return 1
    chunk = min(budget - running + 1, options.long_prefill_token_threshold or context)
    return running * -(-context // chunk)


def _make_scheduler(options: EngineConfig, running: int, length: int) -> Scheduler:
    """A scheduler with blocks for ``running`` sequences that grow to ``length`` tokens, or as many as are given."""
    per_sequence = -(-length // options.block_size) + 1
    needed = math.ceil(running * per_sequence / (1 - options.watermark))
    num_blocks = options.num_gpu_blocks_override or needed
    if num_blocks < needed:
        raise ConfigError(
            f"num_gpu_blocks_override ({num_blocks}) must be at least {needed}: the {running} sequences grow to "
            f"{length} tokens"
        )
    blocks = BlockManager(
        num_blocks,
        options.block_size,
        num_host_blocks=options.num_host_blocks_override or 0,
        watermark=options.watermark,
        prefix_caching=options.enable_prefix_caching,
        host_cache=options.host_prefix_cache,
    )
    speculator = make_speculator(options.speculative_config)
    return Scheduler(blocks, options, max_model_len=per_sequence * options.block_size, speculator=speculator)


def sampled(plan: StepPlan, scheduler: Scheduler) -> StepResult:
    """The result of a step without a model: a token for each sequence that awaits one."""
    scheduled = set(plan.seq_ids)
    forked = [fork.child for fork in plan.forks if fork.child not in scheduled]
    awaiting = [seq_id for seq_id in [*plan.seq_ids, *forked] if scheduler.queues.sequences[seq_id].awaits_token]
    counts = [1 + len(plan.drafts.get(seq_id, ())) for seq_id in awaiting] if plan.drafts else []
    return StepResult(plan.step, awaiting, [_TOKEN] * (sum(counts) or len(awaiting)), counts)
