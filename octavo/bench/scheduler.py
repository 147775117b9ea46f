"""Cost of the control plane: ``schedule`` and ``update`` of a step, without a model."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from octavo.core.config import SchedulerOptions
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.sampling_params import SamplingParams
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.scheduler import Scheduler

_BLOCK_SIZE = 16
#: Token id of every sampled token; not a stop token.
_TOKEN = 7


@dataclass(frozen=True)
class SchedulerFigures:
    """Processor time of a step in which every running sequence decodes one token."""

    running: int
    waiting: int
    context: int
    #: Median microseconds of ``schedule`` and of ``update`` in a step.
    schedule_us: float
    update_us: float
    #: The slowest step (only some steps allocate blocks).
    slowest_us: float
    us_per_sequence: float


def measure(running: int, waiting: int, context: int, steps: int = 200, policy: str = "fcfs") -> SchedulerFigures:
    """Times steps of a scheduler with ``running`` decoding sequences of ``context`` tokens and ``waiting`` requests."""
    per_sequence = -(-(context + steps + 2) // _BLOCK_SIZE) + 1
    blocks = BlockManager(running * per_sequence, _BLOCK_SIZE, prefix_caching=True)
    options = SchedulerOptions(
        max_num_seqs=running,
        max_num_batched_tokens=running * context,
        scheduling_policy=policy,
    )
    scheduler = Scheduler(blocks, options, max_model_len=per_sequence * _BLOCK_SIZE)
    for i in range(running + waiting):
        # Lengths differ, so that not all sequences need a block in the same step; prompts share no prefix.
        prompt = [i] + [_TOKEN] * (context - 1 - i % _BLOCK_SIZE)
        scheduler.add(EngineCoreRequest(group_id=i, prompt_token_ids=prompt, task=Generate(_params(steps), seed=i)))
    while scheduler.stats().num_running < running or scheduler.queues.prefilling:
        plan = scheduler.schedule()
        scheduler.update(plan, sampled(plan, scheduler))
    times = []
    for _ in range(steps):
        start = time.thread_time()
        plan = scheduler.schedule()
        scheduled = time.thread_time()
        result = StepResult(plan.step, list(plan.seq_ids), [_TOKEN] * len(plan.seq_ids))
        before_update = time.thread_time()
        scheduler.update(plan, result)
        times.append((scheduled - start, time.thread_time() - before_update))
    assert len(plan.seq_ids) == running, "every running sequence decodes in every step"
    schedule_us, update_us = (statistics.median(t) * 1e6 for t in zip(*times, strict=True))
    return SchedulerFigures(
        running=running,
        waiting=waiting,
        context=context,
        schedule_us=schedule_us,
        update_us=update_us,
        slowest_us=max(a + b for a, b in times) * 1e6,
        us_per_sequence=(schedule_us + update_us) / running,
    )


def _params(steps: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=4 * steps + 1000, ignore_eos=True)


def sampled(plan: StepPlan, scheduler: Scheduler) -> StepResult:
    """The result of a step without a model: a token for each sequence that awaits one."""
    scheduled = set(plan.seq_ids)
    forked = [fork.child for fork in plan.forks if fork.child not in scheduled]
    awaiting = [seq_id for seq_id in [*plan.seq_ids, *forked] if scheduler.queues.sequences[seq_id].awaits_token]
    return StepResult(plan.step, awaiting, [_TOKEN] * len(awaiting))
