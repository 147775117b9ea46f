"""Who comes in: from waiting or swapped to running."""

from __future__ import annotations

from octavo.core.config import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.memory.block_manager import AllocStatus
from octavo.memory.prefix_chain import PrefixChain
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Step, blocks_to_come, grow, prompt_chunks, rejoin, take_prefill


class Admission:
    """Lets groups in, in order: who cannot come in yet is not overtaken, but for long prompts by short ones."""

    def __init__(self, options: SchedulerOptions, queues: Queues, preemption: Preemption) -> None:
        self._options, self._queues, self._preemption = options, queues, preemption
        self._blocks = queues.blocks

    def refusal(self, group: SequenceGroup) -> str | None:
        """Why a new group could never run, or None."""
        prompt = len(group.request.prompt_token_ids)
        limit = self._options.max_num_batched_tokens
        if self._options.batching == "prefill_first" and prompt > limit:
            return (
                f"the prompt has {prompt} tokens, but with batching=prefill_first a prompt is computed in one step of "
                f"at most max_num_batched_tokens={limit}"
            )
        if group.width > self._options.max_num_seqs:
            return f"it needs {group.width} sequences at once, but max_num_seqs is {self._options.max_num_seqs}"
        full, rest = divmod(prompt, self._blocks.block_size)
        needed = full + group.width * self._blocks.blocks_for(rest + group.samples)
        if self._blocks.can_allocate(needed, num_seqs=group.width) is AllocStatus.NEVER:
            return (
                f"a prompt of {prompt} tokens with {group.width} sequences needs at least {needed} KV cache blocks, "
                f"but there are {self._blocks.num_blocks}"
            )
        return None

    # --- the unified order ------------------------------------------------------------------------------------------

    def admit(self, step: Step) -> None:
        """Brings groups in, swapped and waiting ones in one order, while budget, rows and blocks last."""
        queues = self._queues
        while step.budget > 0 and queues.rows < self._options.max_num_seqs:
            group = self.first(step.now)
            if group is None:
                return
            back = group.status is SequenceStatus.SWAPPED
            if not (self.swap_in_group(group, step) if back else self.start(group, step)):
                return

    def first(self, now: float) -> SequenceGroup | None:
        """Who comes in next, of the swapped and the waiting."""
        if not self._queues.num_outside:
            return None
        open_, held_back = self._waiting_heads(now)
        swapped = self._queues.swapped.head(now)
        return self._foremost([*open_, swapped] if swapped is not None else open_, held_back)

    def next_waiting(self, now: float) -> SequenceGroup | None:
        """Who of the waiting is next; long prompts stand back while as many as allowed are being computed."""
        return self._foremost(*self._waiting_heads(now))

    def _waiting_heads(self, now: float) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
        """The first short and the first long prompt: those that may begin, and those that a limit holds back."""
        options, queues = self._options, self._queues
        short, long = queues.waiting.head(now), queues.waiting_long.head(now)
        heads = [g for g in (short, long) if g is not None]
        most = options.max_num_partial_prefills
        if most is not None and len(queues.prefilling) >= most:
            return [], heads
        if long is None or sum(g.is_long for g in queues.prefilling) < options.max_long_partial_prefills:
            return heads, []
        return heads[:-1], [long]

    def _foremost(self, groups: list[SequenceGroup], held_back: list[SequenceGroup]) -> SequenceGroup | None:
        """The first in order; nobody, if that would overtake one that is held back and has waited too long."""
        order = self._queues.order
        best = min(groups, key=order, default=None)
        if best is None or any(g.urgent and order(g) < order(best) for g in held_back):
            return None
        return best

    # --- one group --------------------------------------------------------------------------------------------------

    def start(self, group: SequenceGroup, step: Step) -> bool:
        """Begins a waiting group, or one preempted by recompute, with what the prefix cache holds of it."""
        blocks = self._blocks
        if self._queues.rows + group.width > self._options.max_num_seqs or self.awaits_tokens(group):
            return False
        reserved_blocks = self._reserved_blocks(step)
        if not self._fits(group, 1, reserved_blocks):
            return False  # most often seen without a look into the prefix cache
        first = group.seqs[0]
        match = blocks.match(first.token_ids, self._chain(group)) if self._may_use_cache(group) else None
        needed = blocks_to_come(blocks, group)
        if match is not None:
            # One found in part is copied before it is written if there is room, so a match never costs more.
            needed += min(0, blocks.cost(match) - match.num_full)
        if not self._fits(group, needed, reserved_blocks):
            return False
        first.num_computed = match.num_tokens if match is not None else 0
        if not prompt_chunks(group, step.budget, self._options) and not _nothing_left(group):
            first.num_computed = 0
            return False
        if match is not None:
            blocks.adopt(first.seq_id, match)
        if group.first_scheduled_time is None:
            group.first_scheduled_time = step.now
            group.num_cached_tokens = first.num_computed
        self._queues.run(group)
        self._go_on(group, step)
        return True

    def swap_in_group(self, group: SequenceGroup, step: Step) -> bool:
        """Swaps a group in and lets it go on in this step."""
        blocks = self._blocks
        if self._queues.rows + group.width > self._options.max_num_seqs or len(group.seqs) > step.budget:
            return False
        if self.awaits_tokens(group):
            return False
        reserved_blocks = self._reserved_blocks(step)
        moved = blocks.blocks_to_swap_in(group.seq_ids)
        to_grow = len(group.seqs) if self._queues.running else 0
        if not self._fits(group, moved + to_grow, reserved_blocks) or not blocks.swap_in(group.seq_ids):
            return False
        step.moved.append(group)
        self._queues.run(group)
        self._go_on(group, step)
        return True

    def awaits_tokens(self, group: SequenceGroup) -> bool:
        """Whether it was preempted while steps were in flight that are so still: the workers need its tokens."""
        return group.resumable_after > self._queues.last_result

    def _go_on(self, group: SequenceGroup, step: Step) -> None:
        """Schedules a group that has just come in, if budget and blocks allow."""
        queues = self._queues
        step.admitted.append(group)
        rejoin(queues, group)
        if group.prefilling and len(group.seqs) > 1 and group.is_prefilled:
            queues.prefilled(group)
        if group.prefilling:
            chunks = prompt_chunks(group, step.budget, self._options)
            if chunks and grow(queues, chunks, step):
                take_prefill(queues, group, chunks, step)
                step.budget -= sum(n for _, n in chunks)
        elif len(group.seqs) <= step.budget and grow(queues, [(s, 1) for s in group.seqs], step):
            step.decodes += group.seqs
            step.budget -= len(group.seqs)

        if group.prefilling and step.reserved_blocks is not None:
            step.reserved_blocks += blocks_to_come(self._blocks, group)

    def _reserved_blocks(self, step: Step) -> int:
        """Blocks that prompts half computed will still take; counted once a step, as many may come in."""
        if step.reserved_blocks is None:
            step.reserved_blocks = sum(blocks_to_come(self._blocks, g) for g in self._queues.prefilling)
        return step.reserved_blocks

    def _fits(self, group: SequenceGroup, needed: int, reserved_blocks: int) -> bool:
        num_seqs = self._queues.rows + group.width
        # Alone on the machine a group may use the watermark too, or one as long as the pool would never run.
        if not self._queues.running:
            return self._blocks.fits(needed, reserved_blocks, num_seqs)
        return self._blocks.can_allocate(needed, reserved_blocks, num_seqs) is AllocStatus.OK

    def _may_use_cache(self, group: SequenceGroup) -> bool:
        """Whoever wants logprobs of the prompt needs its logits, so all of it is computed."""
        return group.request.task.prompt_logprobs is None

    def _chain(self, group: SequenceGroup) -> PrefixChain:
        """Names its blocks once, however often it is looked up before it fits."""
        token_ids = group.seqs[0].token_ids
        if group.chain is None:
            group.chain = self._blocks.chain(token_ids, group.context, group.features)
        else:
            group.chain.extend(token_ids, len(token_ids) // self._blocks.block_size)  # it may come back longer
        return group.chain

    # --- priority ---------------------------------------------------------------------------------------------------

    def make_room(self, step: Step) -> SequenceGroup | None:
        """Preempts running groups for a waiting one of strictly better priority; returns it if anybody was put out."""
        queues = self._queues
        group = self.first(step.now)
        if group is None or group.status is SequenceStatus.SWAPPED:
            return None
        while queues.running and not self._would_fit(group):
            lower = [
                g
                for g in queues.running
                if g.priority > group.priority and queues.order(g) > queues.order(group) and not g.awaits_result
            ]
            if not lower:
                break
            self._preemption.preempt(self._preemption.victim(lower, step.now), step)
        return group if step.blocked_on_memory else None

    def _would_fit(self, group: SequenceGroup) -> bool:
        rows = self._queues.rows + group.width <= self._options.max_num_seqs
        reserved_blocks = sum(blocks_to_come(self._blocks, g) for g in self._queues.prefilling)
        return rows and self._fits(group, blocks_to_come(self._blocks, group), reserved_blocks)


def _nothing_left(group: SequenceGroup) -> bool:
    """Whether several sequences have no chunk to compute before others can share what has been found."""
    return len(group.seqs) > 1 and all(s.resume is not None or s.num_uncomputed == 1 for s in group.seqs)
