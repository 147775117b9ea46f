"""What a step brought: tokens appended, sequences and groups ended, beams chosen."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.plan import SequenceResult, StepResult
from octavo.core.request import SequenceStatus
from octavo.scheduler.beam_search import Candidates, Hypothesis
from octavo.scheduler.chunks import is_prefilled
from octavo.scheduler.groups import Sequence, SequenceGroup
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Step


@dataclass(slots=True)
class SequenceUpdate:
    """What a step did to one sequence; its ``status`` is a finished one at its end."""

    sequence: Sequence
    token_id: int | None
    extra: SequenceResult | None = None
    stop_reason: int | None = None
    error: str | None = None


@dataclass(slots=True)
class GroupUpdate:
    """The end of a whole group: its hypotheses if it was a beam search, or why it failed."""

    group: SequenceGroup
    hypotheses: list[Hypothesis] | None = None
    error: str | None = None


Update = SequenceUpdate | GroupUpdate


class Results:
    """Takes results into the queues."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def take_in(self, step: Step, result: StepResult) -> list[Update]:
        """Counts computed tokens, appends sampled ones, ends what has come to its end."""
        self._count(step)
        updates: list[Update] = []
        extras, sequences = result.extras, self._queues.sequences
        ended: list[Sequence] = []
        beams: dict[int, SequenceGroup] = {}
        for seq_id, token in zip(result.seq_ids, result.token_ids, strict=True):
            seq = sequences.get(seq_id)
            if seq is None:  # aborted while the step ran
                continue
            if seq.group.beam is not None:
                beams[seq.group.group_id] = seq.group
                continue
            tokens = seq.token_ids
            tokens.append(token)
            update = SequenceUpdate(seq, token)
            updates.append(update)
            if token in seq.stop_token_ids:
                seq.status = SequenceStatus.FINISHED_STOPPED
                update.stop_reason = token if token in (seq.group.request.params.stop_token_ids or ()) else None
                ended.append(seq)
            elif len(tokens) >= seq.max_length:
                seq.status = SequenceStatus.FINISHED_LENGTH
                ended.append(seq)
        if extras:
            self._add_extras(updates, extras, ended)
        for seq in ended:
            self._queues.end_sequence(seq, seq.status)
        for group in beams.values():
            updates += self._choose_beams(group, extras)
        for group in step.prefill_groups:
            if group.prefilling and group.status is SequenceStatus.RUNNING and is_prefilled(group):
                self._queues.prefilled(group)
        return updates

    def _count(self, step: Step) -> None:
        """The plan's tokens have their KV entries now; blocks that became full are offered to the prefix cache."""
        blocks = self._queues.blocks
        size = blocks.block_size
        for seq in step.decodes:
            seq.num_computed += 1
            if not seq.num_computed % size:
                self._register(seq)
        for seq, n in step.prefills:
            seq.num_computed += n
            self._register(seq)
        for child, parent in step.followers:
            child.num_computed = parent.num_computed

    def _register(self, seq: Sequence) -> None:
        if seq.status is SequenceStatus.RUNNING:
            salt = seq.group.request.cache_salt
            self._queues.blocks.register(seq.seq_id, seq.token_ids, seq.num_computed, salt)

    def _add_extras(self, updates: list[Update], extras: dict[int, SequenceResult], ended: list[Sequence]) -> None:
        """Logprobs to the tokens they belong to; the logprobs of a prompt come without a token too."""
        left = dict(extras)
        for update in updates:
            assert isinstance(update, SequenceUpdate)
            update.extra = left.pop(update.sequence.seq_id, None)
        for seq_id, extra in left.items():
            seq = self._queues.sequences.get(seq_id)
            if seq is not None and seq.group.beam is None:
                updates.append(SequenceUpdate(seq, None, extra))
        for update in updates:
            assert isinstance(update, SequenceUpdate)
            if update.extra is not None and update.extra.error is not None:
                update.error, update.token_id, update.stop_reason = update.extra.error, None, None
                if update.sequence not in ended:
                    ended.append(update.sequence)
                update.sequence.status = SequenceStatus.FINISHED_ERROR

    def _choose_beams(self, group: SequenceGroup, extras: dict[int, SequenceResult]) -> list[Update]:
        """One step of a beam search: who survives, who forks, and whether it is over."""
        assert group.beam is not None
        found = [extras.get(seq.seq_id, SequenceResult()) for seq in group.seqs]
        errors = [e.error for e in found if e.error is not None]
        if errors:
            self._queues.end_group(group, SequenceStatus.FINISHED_ERROR)
            return [GroupUpdate(group, error=errors[0])]
        candidates = [Candidates(e.logprobs.top_ids, e.logprobs.top_logprobs) for e in found if e.logprobs is not None]
        assert len(candidates) == len(group.seqs), "a group of beams samples together"
        prompt = len(group.request.prompt_token_ids)
        outcome = group.beam.step(candidates, [s.token_ids[prompt:] for s in group.seqs])
        if outcome.done:
            self._queues.end_group(group, SequenceStatus.FINISHED_STOPPED)
            return [GroupUpdate(group, hypotheses=group.beam.hypotheses())]
        self._replace_beams(group, outcome.survivors)
        return []

    def _replace_beams(self, group: SequenceGroup, survivors: list[tuple[int, int]]) -> None:
        """The first survivor of a beam goes on in its place, further ones fork off it, the others end."""
        queues, before = self._queues, group.seqs
        taken: set[int] = set()
        after = []
        for parent, _ in survivors:
            if parent in taken:
                child = queues.fork(before[parent], 0)
                child.fork_of = before[parent]
                queues.newcomers.append(child)
                after.append(child)
            else:
                taken.add(parent)
                after.append(before[parent])
        for (_, token), seq in zip(survivors, after, strict=True):
            seq.token_ids.append(token)
        queues.replace_beams(group, after)
