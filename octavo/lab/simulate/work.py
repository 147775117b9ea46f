"""What a step computes and moves, counted from its plan: the variables of a step's cost."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.plan import StepPlan
from octavo.scheduler.groups import Sequence
from octavo.scheduler.state import SchedulingState


@dataclass(slots=True)
class StepWork:
    """The work of one step."""

    #: Rows of the layers' matrix products: tokens of prompts and of decodes.
    tokens: int = 0
    #: Sequences that decode one token, and the tokens of context that they read, their own included.
    decodes: int = 0
    context: int = 0
    #: Chunks of prompts; and, over their tokens, the pairs of one with a token that it attends to, itself included.
    chunks: int = 0
    pairs: int = 0
    #: Rows of the head and of sampling.
    sampled: int = 0
    #: Token slots of the blocks of ``transfers``, and of those that are copied on the device.
    moved: int = 0
    copied: int = 0
    #: Blocks that are swapped out or in, or were fetched from a KV store.
    transfers: int = 0


def count_work(plan: StepPlan, queues: SchedulingState) -> tuple[StepWork, list[Sequence]]:
    """The work of a plan that was just made, and the sequences that sample in it.

    ``queues`` are as the scheduler leaves them: the plan's tokens count as computed. All requests generate. A forked
    sequence samples from the logits of its parent. A chunk of one token counts as a decode: it costs the same.
    """
    by_id, counts = queues.sequences, plan.num_tokens
    seqs = [by_id[seq_id] for seq_id in plan.seq_ids]
    total, block_size = len(seqs), queues.blocks.block_size
    if counts.count(1) == total:
        context = sum([seq.num_computed for seq in seqs])
        work, sampled = StepWork(total, total, context, 0, 0, total), seqs
        # A chunk of one token may leave others of its prompt, or the last tokens of several sequences.
        if queues.prefilling or len(by_id) > len(queues.groups):
            sampled = [seq for seq in seqs if seq.num_computed >= len(seq.token_ids)]
            work.sampled = len(sampled)
    else:
        work = StepWork(sum(counts))
        sampled = []
        for seq, count in zip(seqs, counts, strict=True):
            computed = seq.num_computed
            if count == 1:
                work.decodes += 1
                work.context += computed
            else:
                work.chunks += 1
                work.pairs += count * (computed - count) + count * (count + 1) // 2
            if computed >= len(seq.token_ids):
                sampled.append(seq)
        work.sampled = len(sampled)
    if plan.forks:
        sampled = [*sampled, *(by_id[fork.child] for fork in plan.forks)]
        work.sampled = len(sampled)
    work.transfers = len(plan.blocks_to_swap_out) + len(plan.blocks_to_swap_in) + len(plan.blocks_fetched)
    work.moved = work.transfers * block_size
    work.copied = len(plan.blocks_to_copy) * block_size
    return work, sampled
