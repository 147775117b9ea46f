"""Applies the result of a step: appends tokens, ends sequences and groups, chooses beams."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from octavo.core.engine_outputs import AdmissionStats, EngineCoreOutputs, GroupOutput, SequenceOutput
from octavo.core.plan import SequenceResult, StepResult
from octavo.core.request import Generate, SequenceStatus
from octavo.memory.block_manager import AllocStatus
from octavo.scheduler.beam_search import Candidates
from octavo.scheduler.drafting import Drafting
from octavo.scheduler.groups import Sequence, SequenceGroup
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Step


class Results:
    """Applies step results to the queues."""

    def __init__(self, queues: Queues, max_model_len: int, drafting: Drafting | None = None) -> None:
        self._queues = queues
        self._drafting = drafting
        self._max_model_len = max_model_len

    def update(self, step: Step, result: StepResult) -> EngineCoreOutputs:
        """Appends sampled tokens, adds full blocks to the prefix cache, ends what has finished."""
        for seq, num_computed in step.filled:
            self._register(seq, num_computed)
        outputs = EngineCoreOutputs([_admission(g) for g in step.admitted])
        beams: dict[int, SequenceGroup] = {}
        ended = self._append_tokens(result, outputs.sequences, beams)
        if step.drafted:
            self._resolve_drafts(step)
        if self._drafting is not None:
            outputs.drafts = self._drafting.observe(step, result)
        if result.forced_tokens:
            ended += self._append_forced(result, outputs.sequences)
        if result.extras:
            ended += self._add_prompt_extras(result, outputs.sequences)
        for seq in ended:
            self._queues.end_sequence(seq, seq.status)
        for group in beams.values():
            self._choose_beams(group, result.extras, outputs.groups)
        for group in step.completed:
            if group.group_id in self._queues.groups:
                self._complete(group, outputs.groups)
        return outputs

    def _complete(self, group: SequenceGroup, updates: list[GroupOutput]) -> None:
        """Ends a group whose prompt is computed and that samples nothing; pins the prompt if it is a shared prefix."""
        status, error = SequenceStatus.FINISHED_LENGTH, None
        if group.request.options.pin_as is not None:
            if group.status is not SequenceStatus.RUNNING:
                return  # preempted while this step was in flight: computed again
            status, error = self._pin(group, group.request.options.pin_as)
        self._queues.end_group(group, status)
        updates.append(GroupOutput(group.group_id, group.status.value, error))

    def _pin(self, group: SequenceGroup, name: str) -> tuple[SequenceStatus, str | None]:
        """Pins the prompt's blocks; how its group ends, and why if they cannot be."""
        blocks, tokens = self._queues.blocks, group.request.prompt_token_ids
        status = blocks.pin(name, group.seqs[0].seq_id, tokens, group.context, self._max_model_len)
        if status is AllocStatus.NEVER:
            return SequenceStatus.FINISHED_IGNORED, (
                f"its {blocks.blocks_for(len(tokens))} blocks would leave too few for a request of max_model_len="
                f"{self._max_model_len} tokens, which needs {blocks.blocks_for(self._max_model_len)} of the "
                f"{blocks.pinned.capacity}; shorten the prefix, lower max_model_len or give the KV cache more memory"
            )
        if status is AllocStatus.LATER:
            return SequenceStatus.FINISHED_ERROR, "blocks of it were lost while it was computed; add it again"
        return SequenceStatus.FINISHED_LENGTH, None

    def _append_tokens(
        self, result: StepResult, updates: list[SequenceOutput], beams: dict[int, SequenceGroup]
    ) -> list[Sequence]:
        """Appends sampled tokens; returns the sequences that finish, and adds groups of beams to ``beams``."""
        sequences = self._queues.sequences
        ended: list[Sequence] = []
        for seq_id, token, extra in self._append_runs(result, updates) if result.num_tokens else _tokens_of(result):
            seq = sequences.get(seq_id)
            # Aborted while the step ran, or finished by an earlier token of it.
            if seq is None or (ended and seq.status.finished):
                continue
            group = seq.group
            if group.beam is not None:
                beams[group.group_id] = group
                continue
            if extra is not None and extra.error is not None:
                updates.append(_failed(seq, extra))
                ended.append(seq)
                continue
            tokens = seq.token_ids
            tokens.append(token)
            update = SequenceOutput(group.group_id, seq.index, token, extra)
            updates.append(update)
            if token in seq.stop_token_ids or len(tokens) >= seq.max_length:
                _finish(seq, token, update)
                ended.append(seq)
        return ended

    def _append_forced(self, result: StepResult, updates: list[SequenceOutput]) -> list[Sequence]:
        """Appends tokens that grammars force, which are not computed yet; returns the sequences that finish."""
        ended = []
        for seq_id, forced in result.forced_tokens.items():
            seq = self._queues.sequences.get(seq_id)
            if seq is None or seq.status.finished:
                continue
            for token in forced:
                seq.token_ids.append(token)
                update = SequenceOutput(seq.group.group_id, seq.index, token)
                updates.append(update)
                if token in seq.stop_token_ids or len(seq.token_ids) >= seq.max_length:
                    _finish(seq, token, update)
                    ended.append(seq)
                    break
            else:
                seq.free_slots = 0  # so that its next step computes them together
                self._queues.unsent_tokens.append((seq, len(forced)))
        return ended

    def _append_runs(
        self, result: StepResult, updates: list[SequenceOutput]
    ) -> list[tuple[int, int, SequenceResult | None]]:
        """Appends, in one go, the tokens of each sequence that goes on after them and has nothing else in the result.

        Returns the other tokens, as ``_tokens_of`` does.
        """
        sequences, extras, token_ids = self._queues.sequences, result.extras, result.token_ids
        others: list[tuple[int, int, SequenceResult | None]] = []
        end = 0
        for seq_id, count in zip(result.seq_ids, result.num_tokens, strict=True):
            new = token_ids[end : end + count]
            end += count
            seq, extra = sequences.get(seq_id), extras.get(seq_id)
            if seq is None:
                continue
            goes_on = len(seq.token_ids) + count < seq.max_length and seq.stop_token_ids.isdisjoint(new)
            if goes_on and extra is None:
                seq.token_ids += new
                group_id, index = seq.group.group_id, seq.index
                updates += [SequenceOutput(group_id, index, token) for token in new]
                continue
            for i, token in enumerate(new):
                # One token has all that came, such as logprobs of its prompt; of several each has its own logprob.
                own = extra
                if extra is not None and count > 1 and i < len(extra.logprobs):
                    own = SequenceResult([extra.logprobs[i]])
                others.append((seq_id, token, own))
        return others

    def _resolve_drafts(self, step: Step) -> None:
        """Counts accepted tokens but the last as computed; KV entries of rejected drafts will be overwritten.

        Blocks without any other are given back. Those of a sequence that ends with this step enter the prefix cache,
        too, as if it had decoded one token a step.
        """
        sequences, blocks = self._queues.sequences, self._queues.blocks
        size, windows = blocks.block_size, blocks.has_windows
        for seq, drafts in step.drafted:
            group, seq_id = seq.group, seq.seq_id
            if group.status is not SequenceStatus.RUNNING or seq_id not in sequences:
                continue
            end, computed = seq.num_computed, len(seq.token_ids) - 1
            seq.num_computed = computed
            if computed // size > (end - 1 - len(drafts)) // size:
                blocks.register(seq_id, seq.token_ids, computed, group.context, group.features)
            if (end - 1) // size > (computed - 1) // size:
                blocks.shrink(seq_id, computed)
            if not windows and not group.plans_on_results:
                seq.free_slots = min(-computed % size, seq.max_length - 1 - computed)

    def _add_prompt_extras(self, result: StepResult, updates: list[SequenceOutput]) -> list[Sequence]:
        """Adds extras without a token: logprobs of a prompt chunk, or an error. Returns the sequences that failed."""
        ended = []
        sampled = set(result.seq_ids)
        for seq_id, extra in result.extras.items():
            seq = self._queues.sequences.get(seq_id)
            if seq is None or seq_id in sampled or seq.group.beam is not None:
                continue
            if extra.error is not None:
                updates.append(_failed(seq, extra))
                ended.append(seq)
            else:
                updates.append(SequenceOutput(seq.group.group_id, seq.index, None, extra))
        return ended

    def _register(self, seq: Sequence, num_computed: int) -> None:
        """Adds the full blocks of a finished step, whose token ids are all known, to the prefix cache.

        A sequence that was preempted since that step was planned holds them no longer.
        """
        if seq.status is SequenceStatus.RUNNING:
            group = seq.group
            self._queues.blocks.register(seq.seq_id, seq.token_ids, num_computed, group.context, group.features)

    def _choose_beams(
        self, group: SequenceGroup, extras: dict[int, SequenceResult], updates: list[GroupOutput]
    ) -> None:
        """One step of a beam search: which beams survive, which fork, and whether the search is done."""
        assert group.beam is not None
        found = [extras.get(seq.seq_id, SequenceResult()) for seq in group.seqs]
        errors = [e.error for e in found if e.error is not None]
        if errors:
            self._queues.end_group(group, SequenceStatus.FINISHED_ERROR)
            updates.append(GroupOutput(group.group_id, group.status.value, errors[0]))
            return
        candidates = [Candidates(p.top_ids, p.top_logprobs) for e in found for p in e.logprobs]
        assert len(candidates) == len(group.seqs), "a group of beams samples together"
        prompt = len(group.request.prompt_token_ids)
        outcome = group.beam.step(candidates, [s.token_ids[prompt:] for s in group.seqs])
        if outcome.done:
            self._queues.end_group(group, SequenceStatus.FINISHED_STOPPED)
            updates.append(GroupOutput(group.group_id, group.status.value, None, group.beam.hypotheses()))
        else:
            self._fork_survivors(group, outcome.survivors)

    def _fork_survivors(self, group: SequenceGroup, survivors: list[tuple[int, int]]) -> None:
        """The first survivor of a beam replaces it, further ones are forked from it; beams without survivors end."""
        queues, before = self._queues, group.seqs
        taken: set[int] = set()
        after = []
        for parent, _ in survivors:
            if parent in taken:
                child = queues.fork(before[parent], 0)
                child.fork_of = before[parent]
                queues.new_seqs.append(child)
                after.append(child)
            else:
                taken.add(parent)
                after.append(before[parent])
        for (_, token), seq in zip(survivors, after, strict=True):
            seq.token_ids.append(token)
        queues.replace_beams(group, after)


def _tokens_of(result: StepResult) -> Iterable[tuple[int, int, SequenceResult | None]]:
    """The sampled token of each sequence, and what else came with it."""
    if not result.extras:
        return zip(result.seq_ids, result.token_ids, itertools.repeat(None))
    return zip(result.seq_ids, result.token_ids, map(result.extras.get, result.seq_ids), strict=True)


def _finish(seq: Sequence, token: int, update: SequenceOutput) -> None:
    """The sequence ends with this token: a stop token, or the last that its limit allows."""
    seq.status = SequenceStatus.FINISHED_LENGTH
    if token in seq.stop_token_ids:
        seq.status = SequenceStatus.FINISHED_STOPPED
        task = seq.group.request.task
        assert isinstance(task, Generate)
        update.stop_reason = task.stop_reason(token)
    update.finish_reason = seq.status.value


def _failed(seq: Sequence, extra: SequenceResult) -> SequenceOutput:
    seq.status = SequenceStatus.FINISHED_ERROR
    return SequenceOutput(seq.group.group_id, seq.index, None, extra, seq.status.value, None, extra.error)


def _admission(group: SequenceGroup) -> AdmissionStats:
    assert group.first_scheduled_time is not None
    return AdmissionStats(
        group.group_id,
        group.first_scheduled_time,
        group.num_cached_tokens,
        group.num_recomputes,
        group.num_recomputed_tokens,
        group.num_swaps,
        group.num_swapped_blocks,
    )
