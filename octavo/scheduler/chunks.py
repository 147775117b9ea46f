"""How many tokens of a group's prompts a step computes."""

from __future__ import annotations

from octavo.memory.block_manager import BlockManager
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.options import SchedulerOptions
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Chunks


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
            queues.newcomers.append(seq)


def blocks_to_come(blocks: BlockManager, group: SequenceGroup) -> int:
    """Blocks that a group still takes until its known tokens are computed and it has forked."""
    total = group.unforked  # each writes into a block of its own next
    for seq in group.seqs:
        held = seq.resume[1] if seq.resume is not None else len(blocks.table(seq.seq_id))
        total += max(0, blocks.blocks_for(len(seq.token_ids)) - held)
    return total
