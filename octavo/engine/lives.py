"""The lives of requests, as events for those who watch an engine: admitted, computed, preempted, ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from octavo.core.plan import StepPlan
from octavo.core.request import SequenceStatus
from octavo.core.stats import MAX_LIFE_EVENTS, LifeEvent
from octavo.scheduler.groups import Sequence, SequenceGroup
from octavo.scheduler.scheduler import Scheduler


@dataclass(slots=True, eq=False)
class _Life:
    group: SequenceGroup
    #: All that it has had, by index; of beams those at the time.
    seqs: dict[int, Sequence] = field(default_factory=dict)
    has_run: bool = False
    # Totals at the last event:
    recomputed_tokens: int = 0
    swapped_blocks: int = 0

    def num_output_tokens(self) -> int:
        group = self.group
        if group.beam is not None:
            return sum(len(hypothesis.token_ids) for hypothesis in group.beam.hypotheses())
        prompt = len(group.request.prompt_token_ids)
        return sum(len(seq.token_ids) - prompt for seq in self.seqs.values())


class LifeRecorder:
    """Owns the events since they were last taken. Its work grows with what changes, not with the running sequences."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._events: deque[LifeEvent] = deque(maxlen=MAX_LIFE_EVENTS)
        self._lives: dict[int, _Life] = {}
        self._num_ended = scheduler.queues.num_ended

    def clear(self) -> None:
        """Nobody watches."""
        self._events.clear()
        self._lives.clear()

    def take(self, groups: Iterable[SequenceGroup]) -> list[LifeEvent]:
        """The events since the last call; ``groups``: all unfinished ones, whose ends are told from now on."""
        events = list(self._events)
        self._events.clear()
        for group in groups:
            self._life(group)
        return events

    def _life(self, group: SequenceGroup) -> _Life:
        life = self._lives.get(group.group_id)
        if life is None or life.group is not group:
            totals = group.totals
            life = _Life(group, {seq.index: seq for seq in group.seqs})
            life.has_run = group.status is not SequenceStatus.WAITING
            life.recomputed_tokens, life.swapped_blocks = totals.num_recomputed_tokens, totals.num_swapped_blocks
            self._lives[group.group_id] = life
        return life

    def preempted(self, group: SequenceGroup, step: int) -> None:
        life, totals, now = self._life(group), group.totals, self._clock()
        lost, moved = totals.num_recomputed_tokens, totals.num_swapped_blocks
        number, cause = group.group_id, group.preempted_for
        if group.status is SequenceStatus.SWAPPED:
            self._events.append(LifeEvent("swap", now, step, number, moved - life.swapped_blocks, preempted_for=cause))
        else:
            self._events.append(
                LifeEvent("recompute", now, step, number, lost - life.recomputed_tokens, preempted_for=cause)
            )
        life.recomputed_tokens, life.swapped_blocks = lost, moved

    def planned(self, plan: StepPlan) -> None:
        """Records who is admitted, and the chunks of prompts. To be called before the step is submitted."""
        step, now = self._scheduler.step_of(plan), self._clock()
        for group in step.admitted:
            self._admitted(group, now, plan.step, sum(n for seq, n in step.prefills if seq is group.seqs[0]))
        for child, _ in step.forked_children:
            self._life(child.group).seqs[child.index] = child
        for seq, n in step.prefills:
            left = max(0, len(seq.token_ids) - seq.num_computed)
            self._events.append(LifeEvent("prompt", now, plan.step, seq.group.group_id, n, left))

    def _admitted(self, group: SequenceGroup, now: float, step: int, chunk: int) -> None:
        life, why = self._life(group), ""
        if group.request.progress is not None and not life.has_run:
            why = "resume"
        elif group.totals.num_recomputes or group.totals.num_swaps:
            why = "recompute" if chunk or group.prefilling else "swap"
        life.has_run = True
        found = max(0, group.seqs[0].num_computed - chunk)
        self._events.append(
            LifeEvent("admit", now, step, group.group_id, found, arrival=group.request.arrival_time, why=why)
        )

    def stepped(self) -> None:
        """Records the groups that have ended since the last call. To be called after each step."""
        queues = self._scheduler.queues
        if queues.num_ended == self._num_ended:
            return
        self._num_ended, now = queues.num_ended, self._clock()
        for number, life in [*self._lives.items()]:
            if number in queues.groups:
                continue
            del self._lives[number]
            status = life.group.status
            if status.finished:
                tokens = life.num_output_tokens()
                self._events.append(LifeEvent("end", now, queues.last_step, number, tokens, why=status.value))
