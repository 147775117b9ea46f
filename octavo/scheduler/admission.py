"""Admission: waiting and swapped groups become running groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from octavo.core.config import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.memory.block_manager import AllocStatus
from octavo.memory.kv_group import BlocksNeeded
from octavo.memory.prefix_cache import NO_REFERENCES, PrefixMatch
from octavo.memory.prefix_chain import PrefixChain
from octavo.scheduler.cross_context import CrossContext
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import (
    Step,
    allocate_slots,
    blocks_still_needed,
    prompt_chunks,
    restore_sharing,
    schedule_prefill,
)

_ONE_BLOCK = BlocksNeeded(1)


class CachedBlocks(NamedTuple):
    """What the prefix cache has for a waiting group."""

    #: The beginning of its tokens.
    prefix: PrefixMatch | None
    #: All of what they attend to beside themselves.
    context: PrefixMatch | None


class Admission:
    """Admits groups in order. One that does not fit yet is not overtaken, but short prompts pass long ones."""

    def __init__(self, options: SchedulerOptions, queues: Queues) -> None:
        self._options, self._queues = options, queues
        self._blocks = queues.blocks

    def rejection_reason(self, group: SequenceGroup) -> str | None:
        """Why a new group can never run, or None if it can."""
        prompt = len(group.request.prompt_token_ids)
        limit = self._options.token_budget
        if self._options.batching == "prefill_first" and prompt > limit:
            return (
                f"the prompt has {prompt} tokens, but with batching=prefill_first a prompt is computed in one step of "
                f"at most max_num_batched_tokens={limit}"
            )
        longest = max((f.length for f in group.request.features if f.is_whole), default=0)
        beside_decodes, chunk = limit - self._options.max_num_seqs + 1, self._blocks.max_chunk
        if longest > beside_decodes:
            return (
                f"an image of {longest} tokens is computed in one step, which has room for {beside_decodes} beside "
                f"decodes: set max_num_batched_tokens to {self._options.max_num_seqs + longest} or more, or "
                "max_num_seqs to less"
            )
        if longest > chunk:
            return (
                f"an image of {longest} tokens is computed in one step, but the KV cache has room for {chunk} behind "
                "the windows of its layers: it needs more blocks"
            )
        if group.num_seqs > self._options.max_num_seqs:
            return f"it needs {group.num_seqs} sequences at once, but max_num_seqs is {self._options.max_num_seqs}"
        context = 0 if group.cross is None else group.cross.blocks_needed(self._blocks)
        full, rest = divmod(prompt, self._blocks.block_size)
        own_blocks = self._blocks.blocks_for(rest + group.samples)
        needed = self._blocks.demand(
            context + full + group.num_seqs * own_blocks, own_blocks=(group.num_seqs - 1) * own_blocks
        )
        if self._never_fits(group, needed):
            sharing = replace(needed, blocks=needed.blocks - self._pinned_hits(group))
            if sharing == needed or self._never_fits(group, sharing):
                beside = "" if group.cross is None else f" and an encoder's input of {group.cross.num_tokens}"
                return (
                    f"a prompt of {prompt} tokens{beside} with {group.num_seqs} sequences needs at least "
                    f"{needed.blocks} KV cache blocks, but there are {self._blocks.pinned.capacity}"
                )
        return None

    def _never_fits(self, group: SequenceGroup, needed: BlocksNeeded) -> bool:
        return self._blocks.can_allocate(needed, num_seqs=group.num_seqs) is AllocStatus.NEVER

    def _pinned_hits(self, group: SequenceGroup) -> int:
        """Pinned blocks that it shares."""
        if not self._blocks.state.pinned or not self._may_use_prefix_cache(group):
            return 0
        return self._blocks.prefixes.match(group.seqs[0].token_ids, self._prefix_chain(group)).num_pinned

    # --- the unified order ------------------------------------------------------------------------------------------

    def schedule_waiting(self, step: Step) -> None:
        """Admits swapped and waiting groups, in one order, while token budget, ``max_num_seqs`` and blocks allow."""
        queues = self._queues
        while step.budget > 0 and queues.num_running_seqs < self._options.max_num_seqs:
            group = self.next_group(step.now)
            if group is None:
                return
            swapped = group.status is SequenceStatus.SWAPPED
            if not (self.admit_swapped(group, step) if swapped else self.admit_waiting(group, step)):
                return

    def next_group(self, now: float) -> SequenceGroup | None:
        """The next group to admit, of the swapped and the waiting ones; None if there is none."""
        if not self._queues.num_not_running:
            return None
        eligible, held_back = self._first_waiting(now)
        swapped = self._queues.peek(self._queues.swapped, now)
        return self._first_in_order([*eligible, swapped] if swapped is not None else eligible, held_back)

    def next_waiting(self, now: float) -> SequenceGroup | None:
        """The next waiting group to admit; long prompts are held back by one another."""
        return self._first_in_order(*self._first_waiting(now))

    def _first_waiting(self, now: float) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
        """The first short and the first long prompt: (those that may start, those held back by a limit)."""
        queues, limit = self._queues, self._options.max_num_partial_prefills
        short, long = queues.peek(queues.waiting, now), queues.peek(queues.waiting_long, now)
        candidates = [g for g in (short, long) if g is not None]
        if limit is not None and len(queues.prefilling) >= limit:
            return [], candidates
        if long is None or not any(g.is_long for g in queues.prefilling):
            return candidates, []
        return candidates[:-1], [long]

    def _first_in_order(self, groups: list[SequenceGroup], held_back: list[SequenceGroup]) -> SequenceGroup | None:
        """The first group in order; None if it would overtake an urgent group that is held back."""
        order = self._queues.order
        best = min(groups, key=order, default=None)
        if best is None or any(g.urgent and order(g) < order(best) for g in held_back):
            return None
        return best

    # --- one group --------------------------------------------------------------------------------------------------

    def admit_waiting(self, group: SequenceGroup, step: Step) -> bool:
        """Admits a waiting group (new, or preempted by recompute) with its cached prefix; False if it does not fit."""
        blocks = self._blocks
        if self.has_tokens_in_flight(group):
            return False
        self._queues.on_attempt(group.group_id)
        reserved = self._reserved(step)
        if not self._fits(group, _ONE_BLOCK, reserved):
            return False  # the common case needs no prefix cache lookup
        first = group.seqs[0]
        cached = self.cached(group)
        match, context = cached.prefix, cached.context
        if not self._may_encode(group, context, step) or not self._fits(group, self.needed(group, cached), reserved):
            return False
        first.num_computed = match.num_tokens if match is not None else 0
        if not prompt_chunks(self._blocks, group, step.budget, self._options) and not _awaits_sharing(group):
            first.num_computed = 0
            return False
        if match is not None:
            blocks.prefixes.adopt(first.seq_id, match)
        if group.cross is not None:
            self._give_context(group, group.cross, context, step)
        if group.totals.first_scheduled_time is None:
            group.totals.first_scheduled_time = step.now
            group.totals.num_cached_tokens = first.num_computed
            if group.cross is not None and context is not None:
                group.totals.num_cached_tokens += group.cross.num_tokens
        self._queues.start_running(group)
        self._schedule_admitted(group, step)
        return True

    def _may_encode(self, group: SequenceGroup, context: PrefixMatch | None, step: Step) -> bool:
        """Whether this step has room for a waiting group's encoder input, or the prefix cache has what is made of it.

        What another group of the step has computed is found there by the next one.
        """
        cross = group.cross
        if cross is None or context is not None:
            return True
        if self._blocks.prefixes.enabled and any(other.key == cross.key for other in step.encoded):
            return False
        return cross.num_tokens <= step.encoder_budget or not step.encoded

    def _give_context(self, group: SequenceGroup, cross: CrossContext, match: PrefixMatch | None, step: Step) -> None:
        """Gives a group the blocks of its encoder's output: those of the match, or new ones, to be computed."""
        if match is not None:
            self._blocks.prefixes.adopt(cross.context_id, match)
        else:
            self._blocks.prefixes.adopt(cross.context_id, cross.nothing_found(self._blocks))
            changes = self._blocks.grow([(cross.context_id, 0, cross.num_tokens)])
            assert changes is not None, "its blocks were counted"
            step.encoded.append(cross)
            step.encoder_budget -= cross.num_tokens
        step.with_contexts.append(group)

    def admit_preempting(self, group: SequenceGroup, step: Step) -> None:
        """Admits the waiting group for which others were preempted, with the tokens that are held back for it."""
        step.budget += step.held_back
        self.admit_waiting(group, step)

    def admit_swapped(self, group: SequenceGroup, step: Step) -> bool:
        """Swaps a group in and schedules it in this step; False if it does not fit."""
        blocks = self._blocks
        if len(group.seqs) > step.budget or self.has_tokens_in_flight(group):
            return False
        self._queues.on_attempt(group.group_id)
        for_next_tokens = len(group.seqs) if self._queues.running else 0
        needed = BlocksNeeded(exact=tuple(n + for_next_tokens for n in blocks.blocks_to_swap_in(group.holder_ids)))
        if not self._fits(group, needed, self._reserved(step)) or not blocks.swap_in(group.holder_ids):
            return False
        if group.totals.first_scheduled_time is None:  # received from another engine
            group.totals.first_scheduled_time = step.now
        step.swapped_groups.append(group)
        if group.cross is not None:
            step.with_contexts.append(group)
        self._queues.start_running(group)
        self._schedule_admitted(group, step)
        return True

    def has_tokens_in_flight(self, group: SequenceGroup) -> bool:
        """Whether steps planned before its preemption are still in flight: they may add tokens to it."""
        return group.resumable_after > self._queues.last_result

    def _schedule_admitted(self, group: SequenceGroup, step: Step) -> None:
        """Schedules a group that was just admitted, if budget and blocks allow."""
        queues = self._queues
        step.admitted.append(group)
        restore_sharing(queues, group)
        if group.prefilling and len(group.seqs) > 1 and group.is_prefilled:
            queues.finish_prefill(group)
        if group.prefilling:
            chunks = prompt_chunks(self._blocks, group, step.budget, self._options)
            if chunks and allocate_slots(queues, chunks, step):
                schedule_prefill(queues, group, chunks, step)
                step.budget -= sum(n for _, n in chunks)
        elif len(group.seqs) <= step.budget and allocate_slots(queues, [(s, 1) for s in group.seqs], step):
            step.decodes += group.seqs
            step.budget -= len(group.seqs)

        if group.prefilling and step.reserved is not None:
            step.reserved += blocks_still_needed(self._blocks, group)

    def _reserved(self, step: Step) -> BlocksNeeded:
        """What partly computed prompts still need; counted once a step."""
        if step.reserved is None:
            step.reserved = self._needed_by_prompts()
        return step.reserved

    def _needed_by_prompts(self) -> BlocksNeeded:
        return sum((blocks_still_needed(self._blocks, g) for g in self._queues.prefilling), BlocksNeeded())

    def _fits(self, group: SequenceGroup, needed: BlocksNeeded, reserved: BlocksNeeded) -> bool:
        return self.fits_beside(group, needed, reserved, self._queues.num_running_seqs)

    def fits(self, group: SequenceGroup) -> bool:
        """Whether a waiting group could be admitted now, as far as blocks and ``max_num_seqs`` are concerned."""
        reserved = self._needed_by_prompts()
        if not self._fits(group, _ONE_BLOCK, reserved):
            return False  # needs no prefix cache lookup
        return self._fits(group, self.needed(group, self.cached(group)), reserved)

    def fits_beside(
        self, group: SequenceGroup, needed: BlocksNeeded, reserved: BlocksNeeded, num_running_seqs: int
    ) -> bool:
        """Whether a waiting group that needs these blocks fits beside so many sequences and what they need."""
        num_seqs = num_running_seqs + group.num_seqs
        if num_seqs > self._options.max_num_seqs:
            return False
        # A group that runs alone may use the watermark too; otherwise one as long as the pool would never run.
        if not num_running_seqs:
            return self._blocks.fits(needed, reserved, num_seqs)
        return self._blocks.can_allocate(needed, reserved, num_seqs) is AllocStatus.OK

    def cached(self, group: SequenceGroup) -> CachedBlocks:
        """What the prefix cache has of a waiting group."""
        context = None if group.cross is None else group.cross.find(self._blocks)
        return CachedBlocks(self._match(group), context)

    def _match(self, group: SequenceGroup) -> PrefixMatch | None:
        """The cached beginning of its tokens; None if it may not use it."""
        if not self._may_use_prefix_cache(group):
            return None
        # Blocks that its sequences are to share must be read by all of them.
        shared = min((seq.shared_prefix[1] for seq in group.seqs if seq.shared_prefix is not None), default=None)
        return self._blocks.prefixes.match(group.seqs[0].token_ids, self._prefix_chain(group), shared)

    def needed(
        self, group: SequenceGroup, cached: CachedBlocks, released: Mapping[int, int] = NO_REFERENCES
    ) -> BlocksNeeded:
        """What a waiting group needs beside what is cached, by default as blocks are referred to now (see ``cost``)."""
        needed = blocks_still_needed(self._blocks, group)
        for match in cached:
            if match is not None:
                # A partly matched block is copied before it is written, if blocks are free; so none costs more.
                saved = min(0, self._blocks.prefixes.cost(match, released) - match.num_full)
                needed = replace(needed, blocks=needed.blocks + saved)
        return needed

    def _may_use_prefix_cache(self, group: SequenceGroup) -> bool:
        return not group.request.task.needs_all_tokens

    def _prefix_chain(self, group: SequenceGroup) -> PrefixChain:
        """The digests of its blocks; kept, as a group may be looked up many times before it fits."""
        token_ids = group.seqs[0].token_ids
        if group.chain is None:
            group.chain = self._blocks.prefixes.chain(token_ids, group.context, group.features)
        else:
            group.chain.extend(token_ids, len(token_ids) // self._blocks.block_size)
        return group.chain


def _awaits_sharing(group: SequenceGroup) -> bool:
    """Whether a group of several sequences has no chunk to compute until its sequences share the matched prefix."""
    return len(group.seqs) > 1 and all(s.shared_prefix is not None or s.num_uncomputed == 1 for s in group.seqs)
