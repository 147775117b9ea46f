"""A step while it is scheduled (``Step``): its chunks, their blocks, and the ``StepPlan`` made of it."""

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
    from octavo.scheduler.state import SchedulingState


#: Sequences of one group, each with its number of tokens to compute.
Chunks = list[tuple[Sequence, int]]


@dataclass(slots=True, eq=False)
class Decodes:
    """Columns of sequences that decode one token each, in their running order: what plans and results need."""

    seqs: list[Sequence] = field(default_factory=list)
    seq_ids: list[int] = field(default_factory=list)
    group_ids: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    #: Stop tokens of all sequences, maybe also of some that have left.
    stop_token_ids: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.seqs)

    def copy(self) -> Decodes:
        columns = Decodes(self.seqs.copy(), self.seq_ids.copy(), self.group_ids.copy(), self.indexes.copy())
        columns.token_ids, columns.stop_token_ids = self.token_ids.copy(), self.stop_token_ids
        return columns

    def extend(self, seqs: list[Sequence]) -> None:
        self.seqs += seqs
        self.seq_ids += [seq.seq_id for seq in seqs]
        self.group_ids += [seq.group.group_id for seq in seqs]
        self.indexes += [seq.index for seq in seqs]
        self.token_ids += [seq.token_ids for seq in seqs]
        stop_token_ids = {seq.stop_token_ids for seq in seqs}
        if stop_token_ids != {self.stop_token_ids}:
            self.stop_token_ids = self.stop_token_ids.union(*stop_token_ids)

    def remove(self, position: int) -> None:
        for column in (self.seqs, self.seq_ids, self.group_ids, self.indexes, self.token_ids):
            del column[position]


_NO_DECODES = Decodes()


class Step(msgspec.Struct, eq=False):
    """One step while it is scheduled. A scheduled sequence has its blocks and keeps them until the step is done."""

    now: float
    #: Tokens that may still be scheduled, and tokens of encoder inputs (vLLM's ``SchedulingBudget``).
    budget: int
    encoder_budget: int = 0
    #: Tokens taken from ``budget`` for tokens that grammars have forced.
    forced_budget: int = 0
    #: Whether it was planned with all results known, so that drafts could be proposed.
    may_draft: bool = False
    #: ``SchedulingState.num_ended`` before the step.
    num_ended: int = 0
    #: Sequences that decode one token. The first of them are ``steady``: they go on as in the step before.
    decodes: Decodes = _NO_DECODES
    steady: Decodes = _NO_DECODES
    #: Positions in both of those whose tokens need a closer look: they sample their last token, or are beams.
    apart: list[int] = []
    steady_apart: list[int] = []
    #: Decodes with drafts behind their token.
    drafted: list[tuple[Sequence, list[int]]] = []
    #: Decodes that also compute the tokens that a grammar has forced.
    extended: Chunks = []
    prefills: Chunks = []
    #: Sequences that fill blocks in this step, and their computed tokens after it.
    filled: Chunks = []
    #: Groups with prefill chunks in this step.
    prefill_groups: list[SequenceGroup] = []
    #: Groups whose prompt chunks have their part of the budget, in order, and the tokens.
    prompts: list[tuple[SequenceGroup, int]] = []
    #: Prefill groups that end with this step: their prompt is computed and nothing is sampled.
    completed: list[SequenceGroup] = []
    table_changes: list[TableChange] = []
    forks: list[Fork] = []
    #: (child, parent): forked in this step; the child samples from the parent's logits.
    forked_children: list[tuple[Sequence, Sequence]] = []
    #: Groups whose encoder output enters the plan, and the outputs that this step computes.
    with_contexts: list[SequenceGroup] = []
    encoded: list[CrossContext] = []
    #: Groups whose blocks this step moves to the host or back.
    swapped_groups: list[SequenceGroup] = []
    #: Blocks that partly computed prompts still need; None until counted.
    reserved: BlocksNeeded | None = None
    admitted: list[SequenceGroup] = []
    #: Whether running groups lacked blocks, so that some were preempted or wait: no group is admitted then.
    blocked_on_memory: bool = False
    #: Whether a step in flight may end a running group, whose blocks are then free; None until computed.
    awaits_blocks: bool | None = None
    #: Whether a group was ended because all blocks are too few for it.
    ended: bool = False
    #: Whether fetched blocks were placed: some blocks are available after the step only.
    placed: bool = False
    #: Tokens of the group that others were preempted for: not in ``budget`` until that group is admitted.
    held_back: int = 0
    num_prompt_tokens: int = 0
    #: Computed tokens that preemption by recompute has lost in this step, and the sequences that ran before.
    lost_tokens: int = 0
    lost_seqs: int = 0

    def add_prompt(self, group: SequenceGroup, chunks: Chunks) -> None:
        """Takes the chunks of a prompt from the budget."""
        tokens = sum([n for _, n in chunks])
        self.budget -= tokens
        self.prompts.append((group, tokens))

    def begin_decodes(self, steady: Decodes, apart: list[int], others: list[Sequence]) -> None:
        """Schedules a token of each steady sequence, and of each of the others."""
        self.decodes = self.steady = steady
        self.apart = self.steady_apart = apart
        self.add_decodes(others)

    def add_decodes(self, seqs: list[Sequence]) -> None:
        if not seqs:
            return
        if self.decodes is self.steady:  # other steps have it too
            self.decodes, self.apart = self.steady.copy(), self.steady_apart.copy()
        for position, seq in enumerate(seqs, len(self.decodes)):
            if seq.num_computed + 2 >= seq.max_length or seq.group.beam is not None:
                self.apart.append(position)
        self.decodes.extend(seqs)


def prompt_limit(queues: SchedulingState, group: SequenceGroup, step: Step) -> int | None:
    """The most tokens of a prompt beside the prompts of a step: by the policy, and by ``ImageTime`` beside decodes."""
    limit = queues.policy.prompt_limit(group, step.prompts) if queues.policy.limits_prompts else None
    images = queues.image_time
    if images is not None and group.request.features and len(queues.running) > len(queues.prefilling):
        most = images.most_tokens(group, step, computes=queues.preparations.num_computing > 0)
        if most is not None:
            limit = most if limit is None else min(limit, most)
    return limit


def prompt_chunks(
    blocks: BlockManager, group: SequenceGroup, budget: int, options: SchedulerOptions, limit: int | None = None
) -> Chunks:
    """The chunks that a prefilling group computes within a budget of tokens and the room behind its windows.

    ``limit``: of ``prompt_limit``, above 0; for prompts that may be cut. A prompt that must be computed whole and
    exceeds the budget of every step has a step of its own.
    """
    held_back = 1 if len(group.seqs) > 1 else 0  # the last token of each: a group samples together
    # Prompts are computed whole without chunked prefill, and by ``prefill_first``: there not after preemption, as with
    # generated tokens a prompt may be too long.
    whole = options.batching == "prefill_first" and not group.totals.num_recomputes
    whole = whole or not options.enable_chunked_prefill
    most = budget
    if not whole:
        most = budget = min(budget, blocks.max_chunk)
        if group.is_long:
            budget = min(budget, options.long_prefill_token_threshold)
        if limit is not None:
            budget = min(budget, limit)
    chunks: Chunks = []
    for seq in group.seqs:
        if seq.shared_prefix is not None:
            continue
        tokens = seq.num_uncomputed - held_back
        fits = tokens <= budget or (whole and budget == options.token_budget)
        n = tokens if fits else 0 if whole else budget
        if not whole and 0 < seq.checkpoint_at - seq.num_computed < n:
            n = seq.checkpoint_at - seq.num_computed
        if 0 < n < tokens and group.request.features:
            n = _with_whole_features(group, seq.num_computed, n, most)
        if n > 0:
            chunks.append((seq, n))
            budget -= n
            most -= n
    return chunks


def _with_whole_features(group: SequenceGroup, start: int, count: int, most: int) -> int:
    """About ``count`` tokens from ``start`` on, at most ``most``, without cutting a feature that is computed whole."""
    end = start + count
    cut = next((f for f in group.request.features if f.is_whole and f.offset < end < f.offset + f.length), None)
    if cut is None:
        return count
    if cut.offset > start:
        return cut.offset - start
    rest = cut.offset + cut.length - start
    return rest if rest <= most else 0


def blocks_still_needed(blocks: BlockManager, group: SequenceGroup) -> BlocksNeeded:
    forks = group.num_pending_forks  # each writes into a block of its own next
    total = forks
    for seq in group.seqs:
        held = seq.shared_prefix[1] if seq.shared_prefix is not None else blocks.num_entries(seq.seq_id)
        total += max(0, blocks.blocks_for(len(seq.token_ids)) - held)
    if group.cross is not None:
        total += group.cross.blocks_needed(blocks)
    return blocks.demand(total, len(group.seqs), group.seq_ids, forks)


def allocate_slots(queues: SchedulingState, work: Chunks, step: Step) -> bool:
    """Allocates the blocks for these tokens (vLLM: ``append_slots``); False and no change if too few are free."""
    blocks = queues.blocks
    short = [(seq, n) for seq, n in work if seq.num_computed + n > seq.slots_end]
    if not short:
        return True

    def behind_windows() -> list[tuple[int, int]]:
        # Computed tokens of other groups may still fall, or their sequences will share blocks behind the window.
        groups = (g for g in queues.running if not (g.awaits_result or (g.prefilling and len(g.seqs) > 1)))
        return [(seq.seq_id, seq.num_computed) for group in groups for seq in group.seqs]

    changes = blocks.grow([(s.seq_id, s.num_computed, s.num_computed + n) for s, n in short], behind_windows)
    if changes is None:
        return False
    step.table_changes += changes
    for seq, n in short:
        end = seq.num_computed + n
        if not seq.group.plans_on_results:  # else it comes here again before its next token
            end = min(blocks.slots_end(end, n), seq.max_length - 1)
        seq.slots_end = end
    return True


def schedule_prefill(queues: SchedulingState, group: SequenceGroup, chunks: Chunks, step: Step) -> None:
    """Schedules chunks whose slots are allocated; forks the group if they complete its prompt."""
    step.prefills += chunks
    step.prefill_groups.append(group)
    step.num_prompt_tokens += sum(n for _, n in chunks)
    parent, n = chunks[0]
    if not group.num_pending_forks or group.beam is not None or parent.num_computed + n < len(parent.token_ids):
        return
    # Parallel sampling: every sequence of the group samples its first token from the prompt's last logits.
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
    """The plan of a scheduled step (vLLM: ``SchedulerOutput``), with the pending block moves and new sequences."""
    plan = StepPlan(step=number)
    if queues.blocks.stored is not None:
        queues.blocks.stored.add_to(plan, step.now, is_busy=bool(queues.running))
    moves = queues.blocks.take_moves()
    plan.blocks_to_swap_out, plan.blocks_to_swap_in = moves.swap_out, moves.swap_in
    plan.blocks_to_copy = moves.copy
    plan.seq_ids = step.decodes.seq_ids.copy()
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
    if queues.new_seqs or queues.unsent_tokens:
        scheduled = set(plan.seq_ids)
        _add_new_sequences(queues, scheduled, plan)
        # Last tokens that the workers did not append; new sequences have theirs already.
        new = {n.seq_id for n in plan.new}
        unsent = [(s, n) for s, n in queues.unsent_tokens if s.status is SequenceStatus.RUNNING and s.seq_id not in new]
        plan.new_tokens = {s.seq_id: s.token_ids[-n:] for s, n in unsent if s.seq_id in scheduled}
        queues.unsent_tokens = [(s, n) for s, n in unsent if s.seq_id not in scheduled]
    for group in step.with_contexts:
        cross = group.cross
        if cross is not None and group.status is SequenceStatus.RUNNING:  # else preempted within the step
            encode = cross.key if cross in step.encoded else None
            plan.contexts.append(NewContext(cross.context_id, cross.num_tokens, encode))
            plan.table_changes += queues.blocks.tables(cross.context_id)
            cross.on_workers = True
    plan.forks += step.forks
    plan.forget, queues.forget = queues.forget, []
    plan.table_changes += step.table_changes
    return plan


def _add_new_sequences(queues: SchedulingState, scheduled: set[int], plan: StepPlan) -> None:
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
    adapter, cross = seq.group.request.adapter, seq.group.cross
    new = NewSequence(seq.seq_id, list(seq.token_ids), seq.num_prompt_tokens, seq.num_computed, task)
    new.adapter = None if adapter is None else adapter.key
    new.context = None if cross is None else cross.context_id
    new.features = seq.group.request.features
    return new


def advance(queues: SchedulingState, step: Step) -> None:
    """Counts the tokens of a step as computed: every later plan starts from there."""
    size, filled = queues.blocks.block_size, step.filled
    for seq in step.decodes.seqs:
        seq.num_computed += 1
    for seq in itertools.islice(step.decodes.seqs, len(step.steady), None):
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
    if queues.blocks.prefixes.keeps_ends:
        for seq in [*(s for s, _ in step.prefills), *(child for child, _ in step.forked_children)]:
            at_end = seq.num_computed == seq.num_prompt_tokens
            if at_end or seq.num_computed == seq.checkpoint_at:
                queues.register_end(seq, of_prompt=at_end)
    for group in step.with_contexts:
        if group.cross is not None and group.status is SequenceStatus.RUNNING:
            group.cross.is_computed = True
    for group in step.prefill_groups:
        if group.prefilling and group.is_prefilled:
            queues.finish_prefill(group)
            if not group.samples:
                step.completed.append(group)


#: Step numbers are kept modulo this: one byte each.
_NUMBERS = 256


class SteadyDecodes:
    """Decodes that go on as in the step before, kept as columns: the cost of a step does not grow with each of them.

    These are the first ``num_groups`` running groups, as far as each decodes one sequence and waits for no result,
    without those whose last token is in flight. Only the step that uses the last of a sequence's slots needs a closer
    look: then its block is full, or its last token is in flight. ``restart`` is called whenever the order of the
    running groups changes, or the tokens that one of them computes next.
    """

    def __init__(self) -> None:
        self.columns = Decodes()
        self.num_groups = 0
        #: Whether a step in flight has the columns too, so that they must be copied before a change.
        self._shared = False
        self._step = 0  # modulo ``_NUMBERS``
        #: Of each sequence, the number of the step that uses its last slot.
        self._last_steps = bytearray()

    def restart(self) -> None:
        if self.num_groups:
            self.columns, self._shared, self.num_groups = Decodes(), False, 0
            self._last_steps.clear()

    def extend(self, running: SequenceOf[SequenceGroup]) -> None:
        if self.num_groups == len(running):
            return
        seqs = []
        for group in itertools.islice(running, self.num_groups, None):
            if not _is_steady(group):
                break
            self.num_groups += 1
            seq = group.seqs[0]
            if seq.num_computed + 1 < seq.max_length:  # else its last token is in flight
                seqs.append(seq)
        if seqs:
            self._own_columns().extend(seqs)
            self._last_steps += bytes(map(self._last_step, seqs))

    def leave(self, position: int, group: SequenceGroup) -> None:
        """Removes the group that was at this position of the running groups."""
        if position < self.num_groups:
            self.num_groups -= 1
            if group.seqs[0] in self.columns.seqs:  # else its last token is in flight
                self._remove(self.columns.seqs.index(group.seqs[0]))

    def without_slots(self) -> list[int]:
        """Positions of sequences that have used their last slot, or whose slots exceeded ``_NUMBERS``."""
        return self._with_last_step(self._step)

    def schedule(self, without_slots: list[int]) -> tuple[Decodes, list[int], list[int]]:
        """Schedules a token of each sequence; the sequences at ``without_slots`` have got new slots.

        Returns the columns for that step, which must not be changed; the positions of the sequences that use their last
        slot in it; and of those among them that sample their last token in it.
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

    def _own_columns(self) -> Decodes:
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
    """Whether a group decodes one sequence, and its next token depends on no result."""
    if group.prefilling or len(group.seqs) != 1 or group.num_pending_forks or group.drafts or group.plans_on_results:
        return False
    seq = group.seqs[0]
    return group.beam is None and seq.num_computed + 1 >= len(seq.token_ids)
