"""Replays the scheduler of an engine to the step that failed there, from the journal in the step's dump.

The scheduler gets the same requests, results and times in the same order, over as many blocks; each plan that it makes
is compared with the engine's. Tokens are fillers. Plans differ where the engine looked at what a dump does not tell:
drafts, preparations (adapters, grammars, images), generated text that a later prompt repeats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError
from octavo.core.outputs import PoolingParams
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import (
    AdmissionStats,
    AnyTask,
    CompletionResumePoint,
    EngineCoreRequest,
    Generate,
    Pool,
    RequestOptions,
    ResumePoint,
    SequenceStatus,
)
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import block_settings
from octavo.engine.step_dumps import Added, Ended, Planned, Received, StepFailure, read_dump
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.groups import Sequence
from octavo.scheduler.scheduler import Scheduler

#: Token ids: one that ends a sequence, one that is sampled, one that no prompt has, and the first of prompts.
_STOP, _SAMPLED, _OTHER, _FIRST = 0, 1, 2, 3
#: Steps in which the requests of a checkpoint come to where they were.
_MOST_CATCH_UP = 1000
#: Tokens to compute of each sequence, by group.
Tokens = dict[int, list[int]]


@dataclass(slots=True)
class ReplayedStep:
    step: int
    #: In the engine, and here.
    recorded: Tokens
    planned: Tokens

    @property
    def is_equal(self) -> bool:
        return self.recorded == self.planned


@dataclass(slots=True)
class Replay:
    failure: StepFailure
    #: The last is the one that failed.
    steps: list[ReplayedStep] = field(default_factory=list)

    @property
    def num_equal(self) -> int:
        return sum(step.is_equal for step in self.steps)

    @property
    def first_difference(self) -> ReplayedStep | None:
        return next((step for step in self.steps if not step.is_equal), None)

    def lines(self) -> list[str]:
        last, failure = self.steps[-1], self.failure
        begin = "the scheduler was idle" if failure.from_idle else "a checkpoint"
        lines = [
            f"step {failure.step} failed: {failure.error}",
            f"replayed {len(self.steps)} steps since {begin}: {self.num_equal} plans are the engine's",
        ]
        if (other := self.first_difference) is not None:
            lines.append(f"step {other.step} is the first that differs: {other.planned} instead of {other.recorded}")
        lines += ["", f"{'request':>8} {'tokens':>8}  in step {last.step}"]
        return lines + [f"{group_id:8} {'+'.join(map(str, counts)):>8}" for group_id, counts in last.planned.items()]


def replay(path: Path) -> Replay:
    """Replays a dump.

    Raises:
        ConfigError: the file is no dump, or has no journal, or one with beam searches.
    """
    failure = read_dump(path)
    if not any(isinstance(event, Planned) for event in failure.journal):
        raise ConfigError(f"{path} has no journal of the steps before: the step failed while suspects were computed")
    if any(isinstance(event, Added) and event.kind == "beam" for event in failure.journal):
        raise ConfigError(f"{path} has beam searches, whose plans follow the tokens' logprobs, which it does not have")
    first = _Player(failure, {})
    played = first.play()
    return _Player(failure, first.ahead).play() if any(first.ahead.values()) else played


class _Player:
    def __init__(self, failure: StepFailure, fewer: dict[int, int]) -> None:
        """``fewer``: by group, the tokens to leave out, so that all of a checkpoint are where they were together."""
        options = make_config(**{"model": "replayed", **failure.options})
        self._failure, self._now, self._fewer = failure, 0.0, fewer
        #: By group: tokens that it had too many when all of a checkpoint were computed.
        self.ahead: dict[int, int] = {}
        self._blocks = BlockManager(failure.groups, failure.block_size, **block_settings(options))
        ahead = failure.max_in_flight > 1
        self._scheduler = Scheduler(
            self._blocks,
            options,
            failure.max_model_len,
            runs_ahead=ahead,
            num_stages=options.pipeline_parallel_size,
            clock=lambda: self._now,
        )
        #: Plans in flight, each with the sequences that sample in it.
        self._in_flight: dict[int, tuple[StepPlan, list[Sequence]]] = {}

    def play(self) -> Replay:
        #: The running groups of the checkpoint, and the tokens that they have.
        played, opened = Replay(self._failure), dict[int, int]()
        self._fill_cache()
        for event in self._failure.journal:
            if isinstance(event, Added) and event.status == "running":
                opened[event.group_id] = max((count for _, count in event.progress), default=0)
            elif opened and not (isinstance(event, Added) and event.status):
                self._catch_up(opened)
                opened = {}
            match event:
                case Added():
                    self._now = event.at
                    self._scheduler.add(self._request(event))
                case Ended(group_id, None):
                    self._scheduler.finish_group(group_id)
                case Ended(group_id, int(index)):
                    self._scheduler.finish_sequence(group_id, index)
                case Planned():
                    self._now = event.at
                    if self._in_flight and not self._scheduler.can_run_ahead:
                        continue  # the engine had something to compute ahead
                    played.steps.append(ReplayedStep(event.step, dict(event.tokens), self._plan(event.step)))
                case Received():
                    self._now = event.at
                    if event.step in self._in_flight:
                        self._receive(event)
        return played

    def _fill_cache(self) -> None:
        """Computes the beginnings of prompts that the engine had in its prefix cache when the journal begins."""
        journal, size = self._failure.journal, self._failure.block_size
        waiting = {event.group_id: event for event in journal if isinstance(event, Added)}
        known: set[int] = set()  # tokens of full blocks of prompts, each of which tells all before it
        for plan in (event for event in journal if isinstance(event, Planned)):
            new = [waiting.pop(group_id) for group_id, _ in plan.tokens if group_id in waiting]
            for event in new:
                beginning = _prompt(event)[: event.num_cached]
                if beginning and beginning[-1] not in known:
                    self._compute(-event.group_id - 1, beginning + [_OTHER] * (-len(beginning) % size))
            known.update(*(_prompt(event)[: event.num_tokens // size * size] for event in new))

    def _compute(self, number: int, prompt: list[int]) -> None:
        task = Pool(PoolingParams(task="embed"))
        self._scheduler.add(EngineCoreRequest(group_id=number, prompt_token_ids=prompt, task=task))
        while self._scheduler.has_work:
            self._plan(number)
            self._receive(Received(number, self._now))

    def _request(self, added: Added) -> EngineCoreRequest:
        task: AnyTask = Pool(PoolingParams(task="embed"))
        if added.kind == "generate":
            params = SamplingParams(n=added.n, max_tokens=added.max_tokens, ignore_eos=True, detokenize=False)
            task = Generate(params, seed=0, stop_token_ids=[_STOP])
        request = EngineCoreRequest(
            group_id=added.group_id,
            prompt_token_ids=_prompt(added),
            task=task,
            arrival_time=added.arrival,
            options=RequestOptions(priority=added.priority, user=str(added.user) if added.user else ""),
        )
        # At a checkpoint the last token is sampled again, in the step that computes the others.
        fewer = (added.status == "running") + self._fewer.get(added.group_id, 0)
        begun = [CompletionResumePoint(i, [_SAMPLED] * (count - fewer)) for i, count in added.progress if count > fewer]
        if begun:
            request.progress = ResumePoint(begun, totals=AdmissionStats(added.group_id))
        return request

    def _catch_up(self, running: dict[int, int]) -> None:
        queues = self._scheduler.queues
        for number in range(_MOST_CATCH_UP):
            groups = [queues.groups[i] for i in running if i in queues.groups]
            if not any(group.prefilling or group.status is not SequenceStatus.RUNNING for group in groups):
                break
            self._plan(-1 - number)
            self._receive(Received(-1 - number, self._now))
        for group in groups:
            tokens = len(group.seqs[0].token_ids) - group.seqs[0].num_prompt_tokens
            self.ahead[group.group_id] = tokens - running[group.group_id]

    def _plan(self, step: int) -> Tokens:
        plan, queues = self._scheduler.schedule(), self._scheduler.queues
        tokens: Tokens = {}
        sampled = []
        for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
            seq = queues.sequences[seq_id]
            tokens.setdefault(seq.group.group_id, []).append(count)
            if seq.group.request.task.samples and seq.num_computed >= len(seq.token_ids):
                sampled.append(seq)
        sampled += [queues.sequences[fork.child] for fork in plan.forks if fork.child not in plan.seq_ids]
        self._in_flight[step] = plan, sampled
        return tokens

    def _receive(self, received: Received) -> None:
        """The result as the journal tells it: one token for each sequence, where it says nothing else."""
        plan, sampled = self._in_flight.pop(received.step)
        told = {(group_id, index): (count, reason) for group_id, index, count, reason in received.sequences}
        result = StepResult(plan.step)
        for seq in sampled:
            count, reason = told.get((seq.group.group_id, seq.index), (1, None))
            result.seq_ids.append(seq.seq_id)
            result.num_tokens.append(max(1, count))
            result.token_ids += [_SAMPLED] * (max(1, count) - 1) + [_STOP if reason == "stop" else _SAMPLED]
        if result.num_tokens.count(1) == len(result.num_tokens):
            result.num_tokens = []
        self._scheduler.update(plan, result)
        for group_id, _ in received.groups:  # failed preparations, policies that raised
            self._scheduler.finish_group(group_id)
        for (group_id, index), (_, reason) in told.items():
            if reason == "error":
                self._scheduler.finish_sequence(group_id, index)


def _prompt(added: Added) -> list[int]:
    return [_FIRST + number for first, count in added.prompt for number in range(first, first + count)]
