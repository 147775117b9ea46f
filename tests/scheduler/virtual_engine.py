"""The real scheduler and block manager on a virtual clock: output lengths are given, and so is what steps cost."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from octavo.config.options import SchedulerOptions
from octavo.core.plan import StepResult
from octavo.core.request import EngineCoreRequest, Generate, RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.scheduler import Scheduler

EOS, TOKEN = 0, 7
#: Seconds of a step: fixed, a prompt token, a decoding sequence.
STEP, PREFILL, DECODE = 5e-3, 2e-5, 1e-4


@dataclass
class Job:
    """A request whose output has a length that the scheduler does not know, and what became of it."""

    at: float
    prompt: list[int]
    output: int
    user: str = ""
    ttft_target: float | None = None
    tpot_target: float | None = None
    max_tokens: int = 2000
    first: float | None = None
    last: float | None = None
    tokens: int = 0

    @property
    def latency(self) -> float:
        """Seconds from its arrival to its last token."""
        assert self.last is not None
        return self.last - self.at

    def meets(self, ttft: float, tpot: float) -> bool:
        """Whether it was in time."""
        assert self.first is not None and self.last is not None
        per_token = (self.last - self.first) / max(1, self.output - 1)
        return self.first - self.at <= ttft and per_token <= tpot


@dataclass
class VirtualEngine:
    """Serves jobs in order of arrival."""

    policy: str
    blocks: int = 2000
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = 0.0
        defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "scheduling_policy": self.policy}
        options = SchedulerOptions(**{**defaults, **self.options})
        manager = BlockManager(self.blocks, 16, prefix_caching=False)
        self.scheduler = Scheduler(manager, options, min(4000, 16 * self.blocks), clock=lambda: self.now)
        self.jobs: dict[int, Job] = {}
        #: Tokens of prompts in the last step, by user.
        self.prompt_tokens: Counter[str] = Counter()

    def add(self, job: Job) -> None:
        """Queues a job that has arrived."""
        number = len(self.jobs)
        self.jobs[number] = job
        request = EngineCoreRequest(
            group_id=number,
            prompt_token_ids=job.prompt,
            task=Generate(SamplingParams(max_tokens=job.max_tokens), 0, [EOS]),
            arrival_time=job.at,
            options=RequestOptions(user=job.user, ttft_target=job.ttft_target, tpot_target=job.tpot_target),
        )
        self.scheduler.add(request)

    def step(self) -> None:
        """One step; the clock moves by what it costs."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        seqs = [scheduler.queues.sequences[seq_id] for seq_id in plan.seq_ids]
        sampling = [seq for seq in seqs if seq.awaits_token]
        prompts = sum(n for n in plan.num_tokens if n > 1)
        self.prompt_tokens.clear()
        for seq, n in zip(seqs, plan.num_tokens, strict=True):
            self.prompt_tokens[seq.group.request.options.user] += n if n > 1 else 0
        self.prompt_tokens = +self.prompt_tokens
        self.now += STEP + PREFILL * prompts + DECODE * len(sampling)
        tokens = []
        for seq in sampling:
            job = self.jobs[seq.group.group_id]
            job.tokens += 1
            if job.tokens == 1:
                job.first = self.now
            done = job.tokens == job.output
            if done:
                job.last = self.now
            tokens.append(EOS if done else TOKEN)
        scheduler.update(plan, StepResult(plan.step, [s.seq_id for s in sampling], tokens))

    def serve(self, jobs: list[Job]) -> None:
        """All jobs, to the last token."""
        waiting = [(job.at, i, job) for i, job in enumerate(jobs)]
        heapq.heapify(waiting)
        while waiting or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now = max(self.now, waiting[0][0])
            while waiting and waiting[0][0] <= self.now:
                self.add(heapq.heappop(waiting)[2])
            self.step()
