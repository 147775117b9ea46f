"""A step while it is scheduled: what its groups compute, the blocks for it, and the plan made of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from octavo.config.options import SchedulerOptions
from octavo.core.plan import Fork, NewContext, NewSequence, StepPlan, TableChange
from octavo.core.request import Generate, SequenceStatus
from octavo.memory.block_manager import BlockManager
from octavo.memory.kv_group import BlocksNeeded
from octavo.scheduler.groups import CrossContext, Sequence, SequenceGroup
from octavo.speculation.drafter import BY_WORKER

if TYPE_CHECKING:
    from octavo.scheduler.queues import SchedulingState


# Decodes that go on as in the step before, kept as columns, so that a step does little for each of them.

#: Steps are numbered modulo this, so that a byte holds the number.
_NUMBERS = 256


@dataclass(slots=True, eq=False)
class Columns:
    """What plans and results need of sequences that decode one token each, in the order in which they run."""

    seqs: list[Sequence] = field(default_factory=list)
    seq_ids: list[int] = field(default_factory=list)
    group_ids: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    #: The stop tokens of all of them, perhaps with those of some that have left.
    stop_token_ids: frozenset[int] = frozenset()

    def copy(self) -> Columns:
        """Columns of the same sequences."""
        columns = Columns(self.seqs.copy(), self.seq_ids.copy(), self.group_ids.copy(), self.indexes.copy())
        columns.token_ids, columns.stop_token_ids = self.token_ids.copy(), self.stop_token_ids
        return columns

    def extend(self, seqs: list[Sequence]) -> None:
        """Adds sequences behind the others."""
        self.seqs += seqs
        self.seq_ids += [seq.seq_id for seq in seqs]
        self.group_ids += [seq.group.group_id for seq in seqs]
        self.indexes += [seq.index for seq in seqs]
        self.token_ids += [seq.token_ids for seq in seqs]
        self.stop_token_ids = self.stop_token_ids.union(*{seq.stop_token_ids for seq in seqs})

    def remove(self, position: int) -> None:
        """Removes the sequence at a position; its stop tokens stay."""
        for column in (self.seqs, self.seq_ids, self.group_ids, self.indexes, self.token_ids):
            del column[position]


class SteadyDecodes:
    """Owns the columns of the first running groups, as far as each decodes one sequence and needs no result for it.

    In a step each of them computes a token, and nothing is to be done for one alone but in the step that uses the last
    of its slots: then its block is full, or its last token is in flight. So these steps are known before.

    Invariants: the columns are those of the first ``num_groups`` running groups, without the sequences whose last token
    is in flight. For each of them ``_last_steps`` has the number of the step that uses the last of its slots.
    Who changes the order of the running groups, or the tokens that one of them computes next, says so.
    """

    def __init__(self) -> None:
        self.columns = Columns()
        self.num_groups = 0
        #: Whether a step in flight has the columns, too, so that they must not change.
        self._shared = False
        #: Number of the last step that was scheduled.
        self._step = 0
        self._last_steps = bytearray()

    def restart(self) -> None:
        """Forgets all groups; the next ``extend`` finds those that decode."""
        if self.num_groups:
            self.columns, self._shared, self.num_groups = Columns(), False, 0
            self._last_steps.clear()

    def extend(self, running: SequenceOf[SequenceGroup]) -> None:
        """Adds the groups behind those that it has, up to one that does something else than these."""
        if self.num_groups == len(running):
            return
        groups = list(itertools.takewhile(_is_steady, itertools.islice(running, self.num_groups, None)))
        seqs = [group.seqs[0] for group in groups if not group.seqs[0].is_ending]
        self.num_groups += len(groups)
        if seqs:
            self._own_columns().extend(seqs)
            self._last_steps += bytes(map(self._last_step, seqs))

    def leave(self, position: int, group: SequenceGroup) -> None:
        """The group that was at a position of the running ones runs no more."""
        if position < self.num_groups:
            self.num_groups -= 1
            if group.seqs[0] in self.columns.seqs:  # else its last token is in flight
                self._remove(self.columns.seqs.index(group.seqs[0]))

    def without_slots(self) -> list[int]:
        """Positions of those that have used their last slot, and of others that had more slots than a byte can say."""
        return self._with_last_step(self._step)

    def schedule(self, without_slots: list[int]) -> tuple[Columns, list[int], list[int]]:
        """The next step computes a token of each, for which all have slots: those ``without_slots`` got new ones.

        Returns the columns for that step, which must not be changed, the positions of the sequences that use the last
        of their slots in it, and of those among them that sample their last token in it: these are in no later step.
        """
        columns = self.columns
        for position in without_slots:
            self._last_steps[position] = self._last_step(columns.seqs[position])
        self._step = (self._step + 1) % _NUMBERS
        self._shared = True
        last = self._with_last_step(self._step)
        ending = [p for p in last if columns.seqs[p].num_computed + 2 >= columns.seqs[p].max_length]
        for position in reversed(ending):
            self._remove(position)
        return columns, last, ending

    def _with_last_step(self, step: int) -> list[int]:
        """Positions of the sequences whose last slot is used by this step."""
        find, positions = self._last_steps.find, []
        position = find(step)
        while position >= 0:
            positions.append(position)
            position = find(step, position + 1)
        return positions

    def _last_step(self, seq: Sequence) -> int:
        slots = seq.slots_end - seq.num_computed
        if not 0 <= slots < _NUMBERS:
            slots = 0 if slots < 0 else _NUMBERS - 1
        return (self._step + slots) % _NUMBERS

    def _own_columns(self) -> Columns:
        if self._shared:
            self.columns, self._shared = self.columns.copy(), False
        return self.columns

    def _remove(self, position: int) -> None:
        columns = self._own_columns()
        stop_token_ids = columns.seqs[position].stop_token_ids
        columns.remove(position)
        del self._last_steps[position]
        if stop_token_ids != columns.stop_token_ids:
            columns.stop_token_ids = frozenset().union(*{seq.stop_token_ids for seq in columns.seqs})


def _is_steady(group: SequenceGroup) -> bool:
    """Whether it decodes one sequence, and what it computes next depends on no result."""
    if group.prefilling or len(group.seqs) != 1 or group.num_pending_forks or group.drafts or group.plans_on_results:
        return False
    seq = group.seqs[0]
    return group.beam is None and seq.num_computed + 1 >= len(seq.token_ids)


#: Tokens to compute of some sequences of one group.
Chunks = list[tuple[Sequence, int]]
_NO_COLUMNS = Columns()


class Step(msgspec.Struct, eq=False):
    """What is scheduled so far. A scheduled sequence has its blocks and keeps them until the step is done."""

    now: float
    #: Tokens that may still be scheduled; and tokens of encoders' inputs.
    budget: int
    encoder_budget: int = 0
    #: Of what was taken from it: for forced tokens.
    forced_budget: int = 0
    #: Whether drafts were proposed for it, as the results of all steps before it were known.
    may_draft: bool = False
    decodes: list[Sequence] = []
    #: The first of them, which go on as in the step before, and the positions of those that sample their last token.
    steady: Columns = _NO_COLUMNS
    ending: list[int] = []
    #: How many sequences had ended before the step.
    num_ended: int = 0
    #: Decodes with drafts behind their token.
    drafted: list[tuple[Sequence, list[int]]] = []
    #: Decodes that compute the tokens which a grammar has forced, too.
    extended: Chunks = []
    prefills: Chunks = []
    #: Sequences that fill blocks in this step, and how many of their tokens are computed after it.
    filled: Chunks = []
    #: Groups with prefill chunks in this step.
    prefill_groups: list[SequenceGroup] = []
    #: Those of them that end with this step: their prompt is computed and nothing is sampled.
    completed: list[SequenceGroup] = []
    table_changes: list[TableChange] = []
    forks: list[Fork] = []
    #: (child, parent): forked in this step; the child samples from the parent's logits.
    forked_children: list[tuple[Sequence, Sequence]] = []
    #: Groups whose encoder's output the workers learn of, and that of those of which it is computed in this step.
    with_contexts: list[SequenceGroup] = []
    encoded: list[CrossContext] = []
    #: Groups whose blocks this step moves to the host or back.
    swapped_groups: list[SequenceGroup] = []
    #: Blocks that partly computed prompts still need; None until counted.
    reserved: BlocksNeeded | None = None
    #: Groups that were admitted, for the first time or again.
    admitted: list[SequenceGroup] = []
    #: Whether running groups lacked blocks, so that some were preempted or wait: no group is admitted.
    blocked_on_memory: bool = False
    #: Whether a step in flight may end a running group, whose blocks are then free; None until it is asked.
    awaits_blocks: bool | None = None
    #: Whether a group was ended because it does not fit all blocks.
    ended: bool = False
    #: Of ``budget``, tokens of the group that others were preempted for; taken from it until that group is admitted.
    held_back: int = 0
    num_prompt_tokens: int = 0


def prompt_chunks(blocks: BlockManager, group: SequenceGroup, budget: int, options: SchedulerOptions) -> Chunks:
    """The chunks that a prefilling group computes within a budget of tokens, and of blocks beside its windows.

    Of several sequences, none computes its last token yet: a group samples together, when all are prefilled. A prompt
    that is computed whole and is longer than any step's budget has a step of its own.
    """
    held_back = 1 if len(group.seqs) > 1 else 0
    # ``prefill_first`` does so, too, but not after preemption: with generated tokens a prompt may be too long.
    whole = not options.enable_chunked_prefill or (
        options.batching == "prefill_first" and not group.totals.num_recomputes
    )
    most = budget
    if not whole:
        most = budget = min(budget, blocks.max_chunk)
        if group.is_long:
            budget = min(budget, options.long_prefill_token_threshold)
    chunks: Chunks = []
    for seq in group.seqs:
        if seq.shared_prefix is not None:
            continue
        tokens = seq.num_uncomputed - held_back
        fits = tokens <= budget or (whole and budget == options.token_budget)
        n = tokens if fits else 0 if whole else budget
        if 0 < n < tokens and group.request.features:
            n = _with_whole_features(group, seq.num_computed, n, most)
        if n > 0:
            chunks.append((seq, n))
            budget -= n
            most -= n
    return chunks


def _with_whole_features(group: SequenceGroup, start: int, count: int, most: int) -> int:
    """About ``count`` tokens from ``start`` on, at most ``most``, that end in no feature which is computed whole."""
    end = start + count
    cut = next((f for f in group.request.features if f.is_whole and f.offset < end < f.offset + f.length), None)
    if cut is None:
        return count
    if cut.offset > start:
        return cut.offset - start
    rest = cut.offset + cut.length - start
    return rest if rest <= most else 0


def restore_sharing(queues: SchedulingState, group: SequenceGroup) -> None:
    """After preemption by recompute: shares blocks between sequences of a group again, as soon as they are computed."""
    for seq in group.seqs:
        if seq.shared_prefix is None:
            continue
        earlier, count = seq.shared_prefix
        if earlier.shared_prefix is None and earlier.num_computed >= count * queues.blocks.block_size:
            if queues.blocks.fork_prefix(earlier.seq_id, seq.seq_id, count):
                seq.num_computed = count * queues.blocks.block_size
            seq.shared_prefix = None
            seq.slots_end = 0
            queues.new_seqs.append(seq)


def blocks_still_needed(blocks: BlockManager, group: SequenceGroup) -> BlocksNeeded:
    """What a group still needs until its tokens are computed and it has forked."""
    forks = group.num_pending_forks  # each writes into a block of its own next
    total = forks
    for seq in group.seqs:
        held = seq.shared_prefix[1] if seq.shared_prefix is not None else blocks.num_entries(seq.seq_id)
        total += max(0, blocks.blocks_for(len(seq.token_ids)) - held)
    if group.cross is not None:
        total += group.cross.blocks_needed(blocks)
    return blocks.demand(total, len(group.seqs), group.seq_ids, forks)


def allocate_slots(queues: SchedulingState, work: Chunks, step: Step) -> bool:
    """Allocates the blocks for the tokens of these sequences; False and no change if too few are free."""
    blocks = queues.blocks
    short = [(seq, n) for seq, n in work if seq.num_computed + n > seq.slots_end]
    if short:
        writes = [(s.seq_id, s.num_computed, s.num_computed + n) for s, n in short]
        changes = blocks.grow(writes, lambda: _behind_windows(queues))
        if changes is None:
            return False
        step.table_changes += changes
        for seq, n in short:
            end = seq.num_computed + n
            if not seq.group.plans_on_results:  # else it comes here again before its next token
                end = min(blocks.slots_end(end, n), seq.max_length - 1)
            seq.slots_end = end
    return True


def _behind_windows(queues: SchedulingState) -> list[tuple[int, int]]:
    """Running sequences that may hold more than their windows, and how many of their tokens are computed.

    That number may still fall where drafts await their result, and where sequences are to share a beginning again they
    share what is behind the window, too.
    """
    groups = (g for g in queues.running if not (g.awaits_result or (g.prefilling and len(g.seqs) > 1)))
    return [(seq.seq_id, seq.num_computed) for group in groups for seq in group.seqs]


def schedule_prefill(queues: SchedulingState, group: SequenceGroup, chunks: Chunks, step: Step) -> None:
    """Schedules chunks whose slots are allocated; forks the group if they complete its prompt."""
    step.prefills += chunks
    step.prefill_groups.append(group)
    step.num_prompt_tokens += sum(n for _, n in chunks)
    parent, n = chunks[0]
    if group.num_pending_forks and group.beam is None and parent.num_computed + n == len(parent.token_ids):
        _fork_prompt(queues, parent, step)


def _fork_prompt(queues: SchedulingState, parent: Sequence, step: Step) -> None:
    """Parallel sampling: every sequence of the group samples its first token from the prompt's last logits."""
    group = parent.group
    if parent.on_workers:
        changes = [c for c in step.table_changes if c.seq_id == parent.seq_id]
    else:  # the workers do not hold the parent's table yet
        changes = queues.blocks.tables(parent.seq_id)
    for index in range(1, group.num_pending_forks + 1):
        child = queues.fork(parent, index)
        child.on_workers = True
        group.seqs.append(child)
        step.forks.append(Fork(parent.seq_id, child.seq_id, _seed(child)))
        step.table_changes += [TableChange(child.seq_id, c.index, c.blocks, c.group) for c in changes]
        step.forked_children.append((child, parent))
    group.num_pending_forks = 0


def make_plan(queues: SchedulingState, step: Step, number: int) -> StepPlan:
    """The plan of a scheduled step; takes the pending block moves and new sequences with it."""
    moves = queues.blocks.take_moves()
    plan = StepPlan(step=number, blocks_to_swap_out=moves.swap_out, blocks_to_swap_in=moves.swap_in)
    plan.blocks_to_copy = moves.copy
    _add_tokens(step, plan)
    if queues.new_seqs or queues.unsent_tokens:
        scheduled = set(plan.seq_ids)
        _add_new_sequences(queues, scheduled, plan)
        _add_new_tokens(queues, scheduled, plan)
    if step.with_contexts:
        _add_contexts(queues, step, plan)
    plan.forks += step.forks
    plan.forget, queues.forget = queues.forget, []
    plan.table_changes += step.table_changes
    return plan


def _add_tokens(step: Step, plan: StepPlan) -> None:
    """Adds the scheduled sequences, and how many tokens of each are computed."""
    plan.seq_ids = step.steady.seq_ids.copy()
    plan.seq_ids += [s.seq_id for s in itertools.islice(step.decodes, len(plan.seq_ids), None)]
    plan.num_tokens = [1] * len(plan.seq_ids)
    for seq, drafts in step.drafted:
        plan.seq_ids.append(seq.seq_id)
        plan.num_tokens.append(1 + len(drafts))
        if drafts[0] == BY_WORKER:
            plan.num_drafts[seq.seq_id] = len(drafts)
        else:
            plan.drafts[seq.seq_id] = drafts
    for chunks in (step.extended, step.prefills):
        if chunks:
            plan.seq_ids += [s.seq_id for s, _ in chunks]
            plan.num_tokens += [n for _, n in chunks]


def advance(queues: SchedulingState, step: Step) -> None:
    """Counts the tokens of a step as computed, as they are for every later plan."""
    size, filled = queues.blocks.block_size, step.filled
    for seq in step.decodes:
        seq.num_computed += 1
    for seq in itertools.islice(step.decodes, len(step.steady.seqs), None):
        if not seq.num_computed % size:
            filled.append((seq, seq.num_computed))
    for seq, drafts in step.drafted:
        seq.num_computed += 1 + len(drafts)
    for chunks in (step.extended, step.prefills):
        for seq, n in chunks:
            seq.num_computed += n
            filled.append((seq, seq.num_computed))
    for child, parent in step.forked_children:
        child.num_computed = parent.num_computed
    for group in step.with_contexts:
        if group.cross is not None and group.status is SequenceStatus.RUNNING:
            group.cross.is_computed = True
    for group in step.prefill_groups:
        if group.prefilling and group.is_prefilled:
            queues.finish_prefill(group)
            if not group.samples:
                step.completed.append(group)


def _add_contexts(queues: SchedulingState, step: Step, plan: StepPlan) -> None:
    """Adds what newly admitted groups attend to; one that was preempted within the step has none."""
    for group in step.with_contexts:
        cross = group.cross
        if cross is None or group.status is not SequenceStatus.RUNNING:
            continue
        encode = cross.key if cross in step.encoded else None
        plan.contexts.append(NewContext(cross.context_id, cross.num_tokens, encode))
        plan.table_changes += queues.blocks.tables(cross.context_id)
        cross.on_workers = True


def _add_new_sequences(queues: SchedulingState, scheduled: set[int], plan: StepPlan) -> None:
    """Adds the scheduled sequences that the workers do not hold, whole or as forks."""
    later = []
    for seq in queues.new_seqs:
        if seq.on_workers or seq.status is not SequenceStatus.RUNNING:
            continue
        if seq.seq_id not in scheduled:
            later.append(seq)
            continue
        if seq.fork_of is not None and seq.fork_of.on_workers:
            plan.forks.append(Fork(seq.fork_of.seq_id, seq.seq_id, _seed(seq)))
        else:
            plan.new.append(_new_sequence(seq))
            plan.table_changes += queues.blocks.tables(seq.seq_id)
        seq.fork_of = None
    for seq_id in [n.seq_id for n in plan.new] + [f.child for f in plan.forks]:
        queues.sequences[seq_id].on_workers = True
    queues.new_seqs = later


def _add_new_tokens(queues: SchedulingState, scheduled: set[int], plan: StepPlan) -> None:
    """Adds last tokens that the workers did not append; sequences that are new in this plan have theirs."""
    new = {n.seq_id for n in plan.new}
    unsent = queues.unsent_tokens
    running = [(s, n) for s, n in unsent if s.status is SequenceStatus.RUNNING and s.seq_id not in new]
    plan.new_tokens = {s.seq_id: s.token_ids[-n:] for s, n in running if s.seq_id in scheduled}
    queues.unsent_tokens = [(s, n) for s, n in running if s.seq_id not in scheduled]


def _seed(seq: Sequence) -> int:
    task = seq.group.request.task
    return task.sequence_seed(seq.index) if isinstance(task, Generate) else 0


def _new_sequence(seq: Sequence) -> NewSequence:
    task = seq.group.request.task
    if isinstance(task, Generate) and seq.index:
        task = msgspec.structs.replace(task, seed=_seed(seq))
    if isinstance(task, Generate) and task.grammar is not None:
        # The workers have compiled it, and its source may be long.
        grammar = msgspec.structs.replace(task.grammar, source="") if task.samples else None
        task = msgspec.structs.replace(task, grammar=grammar)
    adapter = seq.group.request.adapter
    key = adapter.key if adapter is not None else None
    cross = seq.group.cross
    return NewSequence(
        seq.seq_id,
        list(seq.token_ids),
        seq.num_prompt_tokens,
        seq.num_computed,
        task,
        key,
        None if cross is None else cross.context_id,
        seq.group.request.features,
    )
