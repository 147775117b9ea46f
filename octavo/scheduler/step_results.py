"""Applies the result of a step (vLLM's ``update_from_output``): appends tokens, ends sequences, chooses beams."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import msgspec

from octavo.core.failures import SequenceFailure
from octavo.core.plan import EngineCoreOutputs, GroupOutput, SequenceOutput, SequenceResult, StepResult
from octavo.core.request import BeamUpdate, Generate, SequenceStatus
from octavo.memory.kv_group import AllocStatus
from octavo.scheduler.concurrency import ConcurrencyLimit
from octavo.scheduler.groups import Candidates, Sequence, SequenceGroup
from octavo.scheduler.running import Drafting
from octavo.scheduler.state import SchedulingState
from octavo.scheduler.step import Step


class Results:
    def __init__(
        self,
        queues: SchedulingState,
        max_model_len: int,
        drafting: Drafting | None = None,
        concurrency: ConcurrencyLimit | None = None,
    ) -> None:
        self._queues, self._max_model_len = queues, max_model_len
        self._drafting, self._concurrency = drafting, concurrency

    def update(self, step: Step, result: StepResult, outputs: EngineCoreOutputs) -> None:
        """``outputs`` gets each token as it is appended, so that it is right even if this raises."""
        self._register_filled(step)
        for group in step.with_contexts:
            if group.cross is not None and group.status is SequenceStatus.RUNNING:
                group.cross.register(self._queues.blocks)
        outputs.admissions += [msgspec.structs.replace(group.totals) for group in step.admitted]
        beams: dict[int, SequenceGroup] = {}
        ended = self._append_sampled(step, result, outputs, beams)
        if step.drafted:
            self._resolve_drafts(step)
        if self._drafting is not None:
            outputs.drafts = self._drafting.observe(step, result)
        if result.forced_tokens:
            ended += self._append_forced(result, outputs.sequences)
        for seq in ended:
            if self._concurrency is not None:
                self._concurrency.observe_end(len(seq.token_ids))
            self._queues.end_sequence(seq, seq.status)
        for group in beams.values():
            self._choose_beams(group, result.extras, outputs)
        for group in step.completed:
            if group.group_id in self._queues.groups:
                self._complete(group, outputs.groups)

    def _complete(self, group: SequenceGroup, updates: list[GroupOutput]) -> None:
        """Ends a group whose prompt is computed and that samples nothing; pins the prompt if it is a shared prefix."""
        status, error = SequenceStatus.FINISHED_LENGTH, None
        blocks, tokens, name = self._queues.blocks, group.request.prompt_token_ids, group.request.options.pin_as
        if name is not None:
            if group.status is not SequenceStatus.RUNNING:
                return  # preempted while this step was in flight: computed again
            beside = blocks.demand(blocks.blocks_for(self._max_model_len))
            pinned = blocks.pinned.add(name, group.seqs[0].seq_id, tokens, group.context, beside)
            if pinned is AllocStatus.NEVER:
                status, needed = SequenceStatus.FINISHED_IGNORED, blocks.blocks_for(self._max_model_len)
                error = (
                    f"its {blocks.blocks_for(len(tokens))} blocks would leave too few for a request of max_model_len="
                    f"{self._max_model_len} tokens, which needs {needed} of the {blocks.pinned.capacity}; shorten the "
                    "prefix, lower max_model_len or give the KV cache more memory"
                )
            elif pinned is AllocStatus.LATER:
                status = SequenceStatus.FINISHED_ERROR
                error = "blocks of it were lost while it was computed; add it again"
        self._queues.end_group(group, status)
        failure = None if error is None else SequenceFailure(error)
        updates.append(GroupOutput(group.group_id, group.status.value, failure))

    def _append_sampled(
        self, step: Step, result: StepResult, outputs: EngineCoreOutputs, beams: dict[int, SequenceGroup]
    ) -> list[Sequence]:
        """Returns the sequences that end, and adds groups of beams to ``beams``."""
        sequences, extras = self._queues.sequences, result.extras
        ended: list[Sequence] = []
        several = result.num_tokens or result.seq_ids[: len(step.decodes)] != step.decodes.seq_ids
        for seq_id, new in _tokens_of(result) if several else self._append_decodes(step, result, outputs):
            seq = sequences.get(seq_id)
            if seq is None:  # aborted while the step ran
                continue
            group, extra = seq.group, extras.get(seq_id)
            if group.beam is not None:
                if new:
                    beams[group.group_id] = group
                continue
            update = SequenceOutput(group.group_id, seq.index, new, extra)
            outputs.sequences.append(update)
            if extra is not None and extra.error is not None:
                new = update.token_ids = new[:-1]
                seq.status = SequenceStatus.FINISHED_ERROR
                update.finish_reason = seq.status.value
            _append(seq, new, update)
            if update.finish_reason is not None:
                ended.append(seq)
        return ended

    def _append_decodes(
        self, step: Step, result: StepResult, outputs: EngineCoreOutputs
    ) -> Iterable[tuple[int, list[int]]]:
        """Appends the tokens of the decodes that continue, which are nearly all; returns the other tokens."""
        decodes, count = step.decodes, len(step.decodes)
        tokens, apart, extras = result.token_ids[:count], step.apart, result.extras
        if not decodes.stop_token_ids.isdisjoint(tokens):
            apart = [*apart, *(i for i, seq in enumerate(decodes.seqs) if tokens[i] in seq.stop_token_ids)]
        if self._queues.num_ended > step.num_ended:
            unfinished = self._queues.sequences
            apart = [*apart, *(i for i, seq_id in enumerate(decodes.seq_ids) if seq_id not in unfinished)]
        if extras:
            apart = [*apart, *(i for i, seq_id in enumerate(decodes.seq_ids) if seq_id in extras)]
        if apart:
            apart, decodes = sorted({*apart}), decodes.copy()
            for position in reversed(apart):
                decodes.remove(position)
                del tokens[position]
        for token_ids, token in zip(decodes.token_ids, tokens, strict=True):
            token_ids.append(token)
        outputs.group_ids, outputs.indexes, outputs.token_ids = decodes.group_ids.copy(), decodes.indexes.copy(), tokens
        positions = [*apart, *range(count, len(result.seq_ids))]
        left = [(result.seq_ids[i], [result.token_ids[i]]) for i in positions]
        return itertools.chain(left, _without_tokens(result)) if extras else left

    def _append_forced(self, result: StepResult, updates: list[SequenceOutput]) -> list[Sequence]:
        """Appends uncomputed tokens that grammars force; returns the sequences that end."""
        ended = []
        for seq_id, forced in result.forced_tokens.items():
            seq = self._queues.sequences.get(seq_id)
            if seq is None or seq.status.finished:
                continue
            update = SequenceOutput(seq.group.group_id, seq.index, forced)
            updates.append(update)
            _append(seq, forced, update)
            if update.finish_reason is not None:
                ended.append(seq)
            else:
                seq.slots_end = 0  # so that its next step computes them together
                self._queues.unsent_tokens.append((seq, len(forced)))
                self._queues.steady.restart()
        return ended

    def _resolve_drafts(self, step: Step) -> None:
        """Counts accepted tokens but the last as computed; blocks with rejected drafts alone are freed.

        Blocks of a sequence that ends with this step enter the prefix cache, as if it had decoded one token a step.
        """
        sequences, blocks = self._queues.sequences, self._queues.blocks
        size = blocks.block_size
        for seq, drafts in step.drafted:
            group, seq_id = seq.group, seq.seq_id
            if group.status is not SequenceStatus.RUNNING or seq_id not in sequences:
                continue
            end, computed = seq.num_computed, len(seq.token_ids) - 1
            seq.num_computed = computed
            if computed // size > (end - 1 - len(drafts)) // size:
                blocks.prefixes.register(seq_id, seq.token_ids, computed, group.context, group.features)
            if (end - 1) // size > (computed - 1) // size:
                blocks.shrink(seq_id, computed)
            if not group.plans_on_results:
                seq.slots_end = min(blocks.slots_end(computed, 1 + len(drafts)), seq.max_length - 1)

    def _register_filled(self, step: Step) -> None:
        prefixes = self._queues.blocks.prefixes
        if not prefixes.enabled:
            return
        for seq, num_computed in step.filled:
            if seq.status is SequenceStatus.RUNNING:  # else preempted since: it holds no blocks
                group = seq.group
                prefixes.register(seq.seq_id, seq.token_ids, num_computed, group.context, group.features)

    def _choose_beams(
        self, group: SequenceGroup, extras: dict[int, SequenceResult], outputs: EngineCoreOutputs
    ) -> None:
        assert group.beam is not None
        results = [extras.get(seq.seq_id, SequenceResult()) for seq in group.seqs]
        errors = [e.error for e in results if e.error is not None]
        if errors:
            self._queues.end_group(group, SequenceStatus.FINISHED_ERROR)
            outputs.groups.append(GroupOutput(group.group_id, group.status.value, errors[0]))
            return
        candidates = [Candidates(p.top_ids, p.top_logprobs) for e in results for p in e.logprobs]
        assert len(candidates) == len(group.seqs), "a group of beams samples together"
        num_prompt_tokens = len(group.request.prompt_token_ids)
        outcome = group.beam.step(candidates, [s.token_ids for s in group.seqs], num_prompt_tokens)
        if outcome.done:
            self._queues.end_group(group, SequenceStatus.FINISHED_STOPPED)
            outputs.groups.append(GroupOutput(group.group_id, group.status.value, None, group.beam.hypotheses()))
        else:
            hypotheses = group.beam.hypotheses() if outcome.completed else None
            outputs.beams.append(BeamUpdate(group.group_id, outcome.survivors, outcome.cumulative_logprobs, hypotheses))
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


def _tokens_of(result: StepResult) -> Iterator[tuple[int, list[int]]]:
    """The sampled tokens of each sequence; none for a sequence with other results alone."""
    if result.num_tokens:
        tokens = iter(result.token_ids)
        new = [list(itertools.islice(tokens, count)) for count in result.num_tokens]
    else:
        new = [[token] for token in result.token_ids]
    return itertools.chain(zip(result.seq_ids, new, strict=True), _without_tokens(result))


def _without_tokens(result: StepResult) -> Iterator[tuple[int, list[int]]]:
    """The sequences that have other results only, such as prompt logprobs."""
    seq_ids = set(result.seq_ids)
    return ((seq_id, []) for seq_id in result.extras if seq_id not in seq_ids)


def _append(seq: Sequence, new: list[int], update: SequenceOutput) -> None:
    tokens, stops = seq.token_ids, seq.stop_token_ids
    if len(tokens) + len(new) < seq.max_length and stops.isdisjoint(new):
        tokens += new
        return
    new = new[: seq.max_length - len(tokens)]
    end = next((i for i, token in enumerate(new) if token in stops), None)
    seq.status = SequenceStatus.FINISHED_LENGTH
    if end is not None:
        new = new[: end + 1]
        seq.status = SequenceStatus.FINISHED_STOPPED
        task = seq.group.request.task
        assert isinstance(task, Generate)
        update.stop_reason = task.stop_reason(new[-1])
    tokens += new
    update.token_ids, update.finish_reason = new, seq.status.value
