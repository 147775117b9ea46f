"""A step being made: what its groups compute and the blocks for it, and the plan that comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from octavo.core.config import SchedulerOptions
from octavo.core.plan import Fork, NewSequence, StepPlan, TableChange
from octavo.core.request import Generate, SequenceStatus
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.groups import Sequence, SequenceGroup
from octavo.scheduler.queues import Queues

#: Tokens to compute of some sequences of one group.
Chunks = list[tuple[Sequence, int]]


@dataclass(slots=True)
class Step:
    """What has been decided so far. Who is scheduled here has its blocks and keeps them until the step is done."""

    now: float
    #: Tokens that may still be scheduled.
    budget: int
    decodes: list[Sequence] = field(default_factory=list)
    #: Decodes with drafts behind their token.
    drafted: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    prefills: Chunks = field(default_factory=list)
    #: Sequences that fill blocks in this step, and all their tokens that are computed after it.
    filled: Chunks = field(default_factory=list)
    #: Groups with prefill chunks in this step.
    prefill_groups: list[SequenceGroup] = field(default_factory=list)
    #: Of them, those that end with it: their prompt is computed, and nothing is sampled.
    completed: list[SequenceGroup] = field(default_factory=list)
    changes: list[TableChange] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    #: (child, parent): forked off in this step; they sample from the parent's logits.
    forked_children: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    #: Groups whose blocks this step moves to the host or back.
    moved: list[SequenceGroup] = field(default_factory=list)
    #: Blocks that prompts half computed will still take, once somebody has asked.
    reserved_blocks: int | None = None
    #: Groups that came in, for the first time or again.
    admitted: list[SequenceGroup] = field(default_factory=list)
    #: Whether running groups lacked blocks: some were put out, or must wait, so nobody comes in.
    blocked_on_memory: bool = False
    #: Whether a group was ended because it has outgrown all blocks.
    ended: bool = False
    num_prompt_tokens: int = 0


def prompt_chunks(group: SequenceGroup, budget: int, options: SchedulerOptions) -> Chunks:
    """What a prefilling group computes within a budget of tokens, as options allow to split it.

    Of several sequences, each keeps its last token back: a group samples together, when all have come so far.
    """
    held_back = 1 if len(group.seqs) > 1 else 0
    whole = not options.enable_chunked_prefill or _wants_whole_prompt(group, options)
    if group.is_long and not whole:
        budget = min(budget, options.long_prefill_token_threshold)
    chunks: Chunks = []
    for seq in group.seqs:
        if seq.resume is not None:
            continue
        wanted = seq.num_uncomputed - held_back
        n = wanted if wanted <= budget else 0 if whole else budget
        if n > 0:
            chunks.append((seq, n))
            budget -= n
    return chunks


def _wants_whole_prompt(group: SequenceGroup, options: SchedulerOptions) -> bool:
    """The three-queue order computes prompts whole. What was generated since counts no more: it may be too long."""
    return options.batching == "prefill_first" and not group.num_recomputes


def rejoin(queues: Queues, group: SequenceGroup) -> None:
    """Lets sequences of a group that was preempted by recompute share again what has been computed meanwhile."""
    for seq in group.seqs:
        if seq.resume is None:
            continue
        earlier, count = seq.resume
        if earlier.resume is None and earlier.num_computed >= count * queues.blocks.block_size:
            if queues.blocks.fork_prefix(earlier.seq_id, seq.seq_id, count):
                seq.num_computed = count * queues.blocks.block_size
            seq.resume = None
            seq.room = 0
            queues.new_seqs.append(seq)


def blocks_to_come(blocks: BlockManager, group: SequenceGroup) -> int:
    """Blocks that a group still takes until its known tokens are computed and it has forked."""
    total = group.num_pending_forks  # each writes into a block of its own next
    for seq in group.seqs:
        held = seq.resume[1] if seq.resume is not None else len(blocks.table(seq.seq_id))
        total += max(0, blocks.blocks_for(len(seq.token_ids)) - held)
    return total


def grow(queues: Queues, work: Chunks, step: Step) -> bool:
    """Gives these sequences of one group the blocks for their tokens; False and no change if there are too few."""
    blocks = queues.blocks
    asking = [(seq, n) for seq, n in work if seq.room < n]
    if asking:
        changes = blocks.grow([(s.seq_id, s.num_computed, s.num_computed + n) for s, n in asking])
        if changes is None:
            return False
        step.changes += changes
        for seq, n in asking:
            slots = blocks.blocks_for(seq.num_computed + n) * blocks.block_size
            room = min(slots, seq.max_length - 1) - seq.num_computed
            # Without room it is looked at again before its next token, which a result may have to decide.
            seq.room = n if seq.group.plans_on_results else room
    for seq, n in work:
        seq.room -= n
    return True


def take_prefill(queues: Queues, group: SequenceGroup, chunks: Chunks, step: Step) -> None:
    """Schedules chunks that have their blocks; forks the group if they complete its prompt."""
    step.prefills += chunks
    step.prefill_groups.append(group)
    step.num_prompt_tokens += sum(n for _, n in chunks)
    parent, n = chunks[0]
    if group.num_pending_forks and group.beam is None and parent.num_computed + n == len(parent.token_ids):
        _fork_prompt(queues, parent, step)


def _fork_prompt(queues: Queues, parent: Sequence, step: Step) -> None:
    """Parallel sampling: the prompt's last logits give every sequence of the group its first token."""
    group = parent.group
    if parent.known:
        changes = [c for c in step.changes if c.seq_id == parent.seq_id]
    else:  # the row that the workers copy has no table yet
        changes = queues.blocks.tables(parent.seq_id)
    for index in range(1, group.num_pending_forks + 1):
        child = queues.fork(parent, index)
        child.known = True
        group.seqs.append(child)
        step.forks.append(Fork(parent.seq_id, child.seq_id, _seed(child)))
        step.changes += [TableChange(child.seq_id, c.index, c.blocks, c.group) for c in changes]
        step.forked_children.append((child, parent))
    group.num_pending_forks = 0


def make_plan(queues: Queues, step: Step, number: int) -> StepPlan:
    """The plan of a step that is decided; takes the block moves and the newcomers with it."""
    moves = queues.blocks.take_moves()
    plan = StepPlan(step=number, blocks_to_swap_out=moves.swap_out, blocks_to_swap_in=moves.swap_in)
    plan.blocks_to_copy = moves.copy
    if queues.new_seqs or queues.unsent_tokens:
        scheduled = {s.seq_id for s in step.decodes} | {s.seq_id for s, _ in step.drafted + step.prefills}
        _introduce(queues, scheduled, plan)
        _send_tokens(queues, scheduled, plan)
    plan.forks += step.forks
    plan.forget, queues.forget = queues.forget, []
    plan.table_changes += step.changes
    plan.seq_ids = [s.seq_id for s in step.decodes]
    plan.num_tokens = [1] * len(plan.seq_ids)
    for seq, drafts in step.drafted:
        plan.seq_ids.append(seq.seq_id)
        plan.num_tokens.append(1 + len(drafts))
        plan.drafts[seq.seq_id] = drafts
    if step.prefills:
        plan.seq_ids += [s.seq_id for s, _ in step.prefills]
        plan.num_tokens += [n for _, n in step.prefills]
    return plan


def advance(queues: Queues, step: Step) -> None:
    """Counts the tokens of a step as computed, as they are for all that is planned after it."""
    size, filled = queues.blocks.block_size, step.filled
    for seq in step.decodes:
        seq.num_computed += 1
        if not seq.num_computed % size:
            filled.append((seq, seq.num_computed))
    for seq, drafts in step.drafted:
        seq.num_computed += 1 + len(drafts)
    for seq, n in step.prefills:
        seq.num_computed += n
        filled.append((seq, seq.num_computed))
    for child, parent in step.forked_children:
        child.num_computed = parent.num_computed
    for group in step.prefill_groups:
        if group.prefilling and group.is_prefilled:
            queues.prefilled(group)
            if not group.samples:
                step.completed.append(group)


def _introduce(queues: Queues, scheduled: set[int], plan: StepPlan) -> None:
    """Tells the workers of scheduled sequences that they do not hold."""
    later = []
    for seq in queues.new_seqs:
        if seq.known or seq.status is not SequenceStatus.RUNNING:
            continue
        if seq.seq_id not in scheduled:
            later.append(seq)
            continue
        if seq.fork_of is not None and seq.fork_of.known:
            plan.forks.append(Fork(seq.fork_of.seq_id, seq.seq_id, _seed(seq)))
        else:
            plan.new.append(_new_sequence(seq))
            plan.table_changes += queues.blocks.tables(seq.seq_id)
        seq.fork_of = None
    for seq_id in [n.seq_id for n in plan.new] + [f.child for f in plan.forks]:
        queues.sequences[seq_id].known = True
    queues.new_seqs = later


def _send_tokens(queues: Queues, scheduled: set[int], plan: StepPlan) -> None:
    """Tells the workers the last tokens that they did not append; those just introduced have theirs."""
    introduced = {new.seq_id for new in plan.new}
    running = [s for s in queues.unsent_tokens if s.status is SequenceStatus.RUNNING and s.seq_id not in introduced]
    plan.new_tokens = {s.seq_id: [s.token_ids[-1]] for s in running if s.seq_id in scheduled}
    queues.unsent_tokens = [s for s in running if s.seq_id not in scheduled]


def _seed(seq: Sequence) -> int:
    task = seq.group.request.task
    return task.sequence_seed(seq.index) if isinstance(task, Generate) else 0


def _new_sequence(seq: Sequence) -> NewSequence:
    task = seq.group.request.task
    if isinstance(task, Generate) and seq.index:
        task = msgspec.structs.replace(task, seed=_seed(seq))
    return NewSequence(seq.seq_id, list(seq.token_ids), seq.num_prompt_tokens, seq.num_computed, task)
