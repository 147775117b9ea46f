"""Continuous batching under one token budget: decodes first, then prefill chunks, first come first served."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.core.plan import NewSequence, SequenceResult, StepPlan, StepResult
from octavo.core.request import Sequence, SequenceRequest, SequenceStatus
from octavo.memory.block_manager import BlockManager


@dataclass(slots=True)
class SequenceUpdate:
    """What a step did to one sequence; ``status`` is a finished one at its end."""

    sequence: Sequence
    token_id: int | None
    extra: SequenceResult | None = None
    stop_reason: int | None = None
    error: str | None = None

    @property
    def seq_id(self) -> int:
        """The sequence's id."""
        return self.sequence.seq_id


@dataclass(slots=True)
class _Step:
    """A plan being made: tokens and new blocks by sequence, in order."""

    budget: int
    scheduled: dict[Sequence, int] = field(default_factory=dict)
    new_blocks: dict[Sequence, list[int]] = field(default_factory=dict)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: bool = False

    def take(self, sequence: Sequence, num_tokens: int, blocks: list[int]) -> None:
        self.scheduled[sequence] = num_tokens
        self.budget -= num_tokens
        if blocks:
            self.new_blocks[sequence] = blocks

    def drop(self, sequence: Sequence) -> None:
        self.budget += self.scheduled.pop(sequence, 0)
        self.new_blocks.pop(sequence, None)


class Scheduler:
    """Owns the queues: ``waiting`` and ``running``, both in order of arrival.

    Invariants: a sequence is in exactly one queue until it finishes; only running ones hold blocks; every running
    sequence arrived before every waiting one.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_chunked_prefill: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Limits as in ``EngineConfig``; ``max_model_len`` tokens must fit the blocks."""
        if blocks.blocks_for(max_model_len) > blocks.pool.num_blocks:
            raise ValueError(f"max_model_len {max_model_len} does not fit {blocks.pool.num_blocks} blocks")
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._clock = clock
        self._sequences: dict[int, Sequence] = {}
        self._forget: list[int] = []
        self._steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished, or the workers still have to forget one."""
        return bool(self._sequences)

    def add(self, request: SequenceRequest) -> None:
        """Puts a new sequence at the end of the waiting queue; its prompt must be shorter than ``max_model_len``."""
        sequence = Sequence(request)
        self._sequences[sequence.seq_id] = sequence
        self.waiting.append(sequence)

    def finish(self, seq_id: int, status: SequenceStatus) -> Sequence | None:
        """Ends a sequence in any state and frees all it holds; None if it has ended already."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return None
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        self._release(sequence, status)
        return sequence

    # --- one step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decides what the next step computes."""
        step = _Step(self.max_num_batched_tokens)
        decodes = [s for s in self.running if s.num_uncomputed == 1]
        prefills = [s for s in self.running if s.num_uncomputed > 1]
        for sequence in decodes + prefills:
            self._continue(sequence, step)
        if not step.preempted:  # who was just put out must not be overtaken by who never ran
            self._admit(step)
        return self._plan(step)

    def _continue(self, sequence: Sequence, step: _Step) -> None:
        """Schedules a running sequence, preempting the latest arrivals while blocks are missing."""
        num_tokens = self._chunk(sequence, step.budget)
        if not num_tokens:
            return
        while sequence.status is SequenceStatus.RUNNING:
            blocks = self.blocks.grow(sequence.seq_id, sequence.num_computed + num_tokens)
            if blocks is not None:
                step.take(sequence, num_tokens, blocks)
                return
            self._preempt(self.running[-1], step)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of this sequence that the budget takes now."""
        if sequence.num_uncomputed <= budget:
            return sequence.num_uncomputed
        return budget if self.enable_chunked_prefill else 0

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        """Preemption by recompute: the blocks go, the tokens stay, and it waits before all who never ran."""
        self.running.remove(sequence)
        step.drop(sequence)
        step.preempted = True
        self.blocks.free(sequence.seq_id)
        self._forget.append(sequence.seq_id)
        sequence.num_computed = 0
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _admit(self, step: _Step) -> None:
        """Moves waiting sequences to running, in order, while budget, rows and blocks last."""
        promised = sum(self.blocks.missing(s.seq_id, len(s.token_ids)) for s in self.running if s.num_uncomputed > 1)
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            num_tokens = self._chunk(sequence, step.budget)
            known = len(sequence.token_ids)
            # Alone on the machine a sequence may use the watermark too, or one as long as the pool would never run.
            if not num_tokens or (self.running and not self.blocks.can_admit(known, promised)):
                return
            blocks = self.blocks.grow(sequence.seq_id, num_tokens)
            assert blocks is not None, "a sequence that was admitted has room for its first chunk"
            promised += self.blocks.blocks_for(known) - len(blocks)
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.status = SequenceStatus.RUNNING
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time = self._clock()
            step.admitted.append(sequence)
            step.take(sequence, num_tokens, blocks)

    def _plan(self, step: _Step) -> StepPlan:
        self._steps += 1
        forget, self._forget = self._forget, []
        # A one-token chunk is a decode to the kernels; those rows come first.
        order = sorted(step.scheduled.items(), key=lambda item: item[1] > 1)
        return StepPlan(
            step=self._steps,
            forget=forget,
            new=[_introduce(s) for s in step.admitted],
            new_blocks=[(s.seq_id, blocks) for s, blocks in step.new_blocks.items()],
            seq_ids=[s.seq_id for s, _ in order],
            num_tokens=[n for _, n in order],
        )

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Takes in what the plan brought: counts computed tokens, appends sampled ones, finishes, frees."""
        for seq_id, num_tokens in zip(plan.seq_ids, plan.num_tokens, strict=True):
            sequence = self._sequences.get(seq_id)
            if sequence is not None:  # it may have been aborted while the step ran
                sequence.num_computed += num_tokens
        sampled = dict(zip(result.seq_ids, result.token_ids, strict=True))
        updates = []
        ended = False
        for seq_id in plan.seq_ids:
            sequence = self._sequences.get(seq_id)
            extra = result.extras.get(seq_id)
            token = sampled.get(seq_id)
            if sequence is None or (token is None and extra is None):
                continue
            update = SequenceUpdate(sequence, token, extra)
            self._take_in(update)
            updates.append(update)
            if sequence.status.finished:
                self._release(sequence, sequence.status)
                ended = True
        if ended:  # one pass, however many ended
            self.running = [s for s in self.running if s.status is SequenceStatus.RUNNING]
        return updates

    def _take_in(self, update: SequenceUpdate) -> None:
        """Appends the token and decides whether the sequence has ended."""
        sequence = update.sequence
        if update.extra is not None and update.extra.error is not None:
            update.error = update.extra.error
            update.token_id = None
            sequence.status = SequenceStatus.FINISHED_ERROR
            return
        token = update.token_id
        if token is None:
            return
        sequence.token_ids.append(token)
        params = sequence.request.params
        if token in sequence.stop_token_ids:
            sequence.status = SequenceStatus.FINISHED_STOPPED
            update.stop_reason = token if token in (params.stop_token_ids or ()) else None
        elif sequence.num_output_tokens == params.max_tokens or len(sequence.token_ids) >= self.max_model_len:
            sequence.status = SequenceStatus.FINISHED_LENGTH

    def fail(self, plan: StepPlan, message: str) -> list[SequenceUpdate]:
        """Ends with an error every sequence of a plan that could not be executed; the others go on."""
        updates = []
        for seq_id in plan.seq_ids:
            sequence = self.finish(seq_id, SequenceStatus.FINISHED_ERROR)
            if sequence is not None:
                updates.append(SequenceUpdate(sequence, None, error=message))
        return updates

    def _release(self, sequence: Sequence, status: SequenceStatus) -> None:
        held = self.blocks.table(sequence.seq_id)
        if held:
            self._forget.append(sequence.seq_id)
        self.blocks.free(sequence.seq_id)
        sequence.status = status
        del self._sequences[sequence.seq_id]


def _introduce(sequence: Sequence) -> NewSequence:
    request = sequence.request
    return NewSequence(
        seq_id=sequence.seq_id,
        token_ids=list(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed=sequence.num_computed,
        params=request.params,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids,
        bad_words_ids=request.bad_words_ids,
    )
