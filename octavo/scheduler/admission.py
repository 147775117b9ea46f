"""Admission: waiting and swapped groups become running groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from octavo.config.options import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.memory.block_manager import Release
from octavo.memory.kv_group import AllocStatus, BlocksNeeded
from octavo.memory.prefix_cache import NO_REFERENCES, PrefixChain, PrefixMatch
from octavo.scheduler.concurrency import ConcurrencyLimit
from octavo.scheduler.fetches import Fetches
from octavo.scheduler.groups import CrossContext, SequenceGroup
from octavo.scheduler.running import Preemption, restore_sharing
from octavo.scheduler.state import SchedulingState
from octavo.scheduler.step import (
    Step,
    allocate_slots,
    blocks_still_needed,
    prompt_chunks,
    prompt_limit,
    schedule_prefill,
)

SHORT = 1.5
_NOTHING, _ONE_BLOCK = BlocksNeeded(), BlocksNeeded(1)


class CachedBlocks(NamedTuple):
    #: None if the group may not use the prefix cache.
    prefix: PrefixMatch | None
    #: Its encoder output, which is cached whole or not at all.
    context: PrefixMatch | None


class Admission:
    """Admits groups in order. A group that does not fit yet is not overtaken, but short prompts pass long ones."""

    def __init__(
        self,
        options: SchedulerOptions,
        queues: SchedulingState,
        concurrency: ConcurrencyLimit | None = None,
        fetches: Fetches | None = None,
    ) -> None:
        """``concurrency``: limits the concurrent sequences further than ``max_num_seqs``."""
        self._options, self._queues, self._concurrency = options, queues, concurrency
        self._blocks, self._fetches = queues.blocks, fetches
        if fetches is not None:
            fetches.connect(self._match, self.fits, queues.pass_over)

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

        def never_fits(needed: BlocksNeeded) -> bool:
            return self._blocks.can_allocate(needed, num_seqs=group.num_seqs) is AllocStatus.NEVER

        if never_fits(needed):
            pinned = 0
            if self._blocks.state.pinned and not group.request.task.needs_all_tokens:
                match = self._blocks.prefixes.match(group.seqs[0].token_ids, self._prefix_chain(group))
                pinned = match.num_pinned
            if not pinned or never_fits(replace(needed, blocks=needed.blocks - pinned)):
                beside = "" if group.cross is None else f" and an encoder's input of {group.cross.num_tokens}"
                return (
                    f"a prompt of {prompt} tokens{beside} with {group.num_seqs} sequences needs at least "
                    + self._blocks.shortage(needed, group.num_seqs)
                )
        return None

    def schedule_waiting(self, step: Step) -> None:
        queues = self._queues
        while step.budget > 0 and queues.num_running_seqs < self._options.max_num_seqs:
            group = self.next_group(step.now)
            if group is None:
                return
            swapped = group.status is SequenceStatus.SWAPPED
            if not (self.admit_swapped(group, step) if swapped else self.admit_waiting(group, step)):
                return

    def next_group(self, now: float) -> SequenceGroup | None:
        """The first waiting or swapped group in order, after those that wait for the KV stores from now on."""
        while (group := self._next_group(now)) is not None and self._is_held(group, now):
            pass
        return group

    def next_waiting(self, now: float) -> SequenceGroup | None:
        while (group := self._first_in_order(*self._first_waiting(now))) is not None and self._is_held(group, now):
            pass
        return group

    def _is_held(self, group: SequenceGroup, now: float) -> bool:
        return self._fetches is not None and not self.has_tokens_in_flight(group) and self._fetches.hold(group, now)

    def _next_group(self, now: float) -> SequenceGroup | None:
        if len(self._queues.groups) == len(self._queues.running):
            return None
        eligible, held_back = self._first_waiting(now)
        swapped = self._queues.peek(self._queues.swapped, now)
        return self._first_in_order([*eligible, swapped] if swapped is not None else eligible, held_back)

    def _first_waiting(self, now: float) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
        """The first short and the first long prompt: those that may start, and those held back by a limit."""
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

    def admit_waiting(self, group: SequenceGroup, step: Step, *, may_pause: bool = False) -> bool:
        """Admits a waiting group (new, or preempted by recompute) with its cached prefix; False if it does not fit.

        ``may_pause``: even if the policy keeps its prompt out of this step.
        """
        blocks = self._blocks
        if self.has_tokens_in_flight(group):
            return False
        limit = prompt_limit(self._queues, group, step)
        if limit == 0 and not may_pause:
            return False
        self._queues.on_attempt(group.group_id)
        reserved = self._reserved(step)
        if not self._fits(group, _ONE_BLOCK, reserved):
            return False  # the common case needs no prefix cache lookup
        first, cross = group.seqs[0], group.cross
        cached = self.cached(group)
        match, context = cached.prefix, cached.context
        if cross is not None and context is None:
            if blocks.prefixes.enabled and any(other.key == cross.key for other in step.encoded):
                return False  # the next step finds it in the prefix cache
            if cross.num_tokens > step.encoder_budget and step.encoded:
                return False
        if not self._fits(group, self.needed(group, cached), reserved):
            return False
        first.num_computed = match.num_tokens if match is not None else 0
        first.checkpoint_at = blocks.prefixes.branch(match) if match is not None else 0
        # Several sequences may have no chunk to compute before they share the matched prefix.
        has_chunk = len(group.seqs) == 1 or any(s.shared_prefix is None and s.num_uncomputed > 1 for s in group.seqs)
        if has_chunk and limit != 0 and not prompt_chunks(blocks, group, step.budget, self._options, limit):
            first.num_computed = 0
            return False
        if match is not None:
            blocks.prefixes.adopt(first.seq_id, match)
            if group.request.options.cache_hints is not None:
                self._hold(group, match, step.now)
        if cross is not None:
            self._give_context(group, cross, context, step)
        if group.totals.first_scheduled_time is None:
            group.totals.first_scheduled_time = step.now
            group.totals.num_cached_tokens = first.num_computed
            if cross is not None and context is not None:
                group.totals.num_cached_tokens += cross.num_tokens
        self._queues.start_running(group)
        self._schedule_admitted(group, step)
        return True

    def _hold(self, group: SequenceGroup, match: PrefixMatch, now: float) -> None:
        """Holds the prefixes that the request asks for; where states are cached, a chunk ends with the longest."""
        request, first = group.request, group.seqs[0]
        hints, virtual = request.options.cache_hints, 0
        assert hints is not None
        if request.adapter is not None and (virtual := request.adapter.num_virtual_tokens):
            hints = hints.shifted(virtual)
        end, client = len(request.prompt_token_ids), request.options.client
        held = self._blocks.retention.obey(hints, client, match.chain, first.token_ids, end, now)
        group.totals.num_held_tokens = held
        if self._blocks.prefixes.keeps_ends and not first.checkpoint_at and match.num_tokens < held < end:
            first.checkpoint_at = held

    def _give_context(self, group: SequenceGroup, cross: CrossContext, match: PrefixMatch | None, step: Step) -> None:
        if match is not None:
            self._blocks.prefixes.adopt(cross.context_id, match)
        else:
            self._blocks.prefixes.adopt(cross.context_id, cross.no_match(self._blocks))
            changes = self._blocks.grow([(cross.context_id, 0, cross.num_tokens)])
            assert changes is not None, "its blocks were counted"
            step.encoded.append(cross)
            step.encoder_budget -= cross.num_tokens
        step.with_contexts.append(group)

    def admit_preempting(self, group: SequenceGroup, step: Step) -> None:
        """Admits the group that ``Displacement.preempt_for_waiting`` has returned."""
        step.budget += step.held_back
        step.prompts = [(other, tokens) for other, tokens in step.prompts if other is not group]
        # With victims gone, the shares by which ``preempt_for_waiting`` asked the policy may be others.
        self.admit_waiting(group, step, may_pause=True)

    def admit_swapped(self, group: SequenceGroup, step: Step) -> bool:
        """Swaps a group in and schedules it in this step; False if it does not fit."""
        blocks = self._blocks
        if len(group.seqs) > step.budget or self.has_tokens_in_flight(group):
            return False
        self._queues.on_attempt(group.group_id)
        needed = self._needed_to_swap_in(group)
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

    def _needed_to_swap_in(self, group: SequenceGroup) -> BlocksNeeded:
        for_next_tokens = len(group.seqs) if self._queues.running else 0
        moved = self._blocks.blocks_to_swap_in(group.holder_ids)
        return BlocksNeeded(exact=tuple(n + for_next_tokens for n in moved))

    def has_tokens_in_flight(self, group: SequenceGroup) -> bool:
        """Whether steps planned before its preemption are still in flight: they may add tokens to it."""
        return group.resumable_after > self._queues.last_result

    def _schedule_admitted(self, group: SequenceGroup, step: Step) -> None:
        queues = self._queues
        step.admitted.append(group)
        restore_sharing(queues, group)
        if group.prefilling and len(group.seqs) > 1 and group.is_prefilled:
            queues.finish_prefill(group)
        if group.prefilling:
            limit = prompt_limit(queues, group, step)
            chunks = [] if limit == 0 else prompt_chunks(self._blocks, group, step.budget, self._options, limit)
            if chunks and allocate_slots(queues, chunks, step):
                schedule_prefill(queues, group, chunks, step)
                step.add_prompt(group, chunks)
        elif len(group.seqs) <= step.budget and allocate_slots(queues, [(s, 1) for s in group.seqs], step):
            step.add_decodes(group.seqs)
            step.budget -= len(group.seqs)

        if group.prefilling and step.reserved is not None:
            step.reserved += blocks_still_needed(self._blocks, group)

    def _reserved(self, step: Step) -> BlocksNeeded:
        """Blocks that partly computed prompts still need; counted once a step."""
        if step.reserved is None:
            step.reserved = self._needed_by_prompts()
        return step.reserved

    def _needed_by_prompts(self) -> BlocksNeeded:
        return sum((blocks_still_needed(self._blocks, g) for g in self._queues.prefilling), BlocksNeeded())

    def _fits(self, group: SequenceGroup, needed: BlocksNeeded, reserved: BlocksNeeded) -> bool:
        return self.fits_beside(group, needed, reserved, self._queues.num_running_seqs)

    def fits(self, group: SequenceGroup) -> bool:
        reserved = self._needed_by_prompts()
        if not self._fits(group, _ONE_BLOCK, reserved):
            return False  # needs no prefix cache lookup
        return self._fits(group, self.needed(group, self.cached(group)), reserved)

    def obstacle(self, now: float) -> str:
        """What the first waiting or swapped group in order, and so each one behind it, waits for.

        "sequences" or "prompts": a limit of those that run or are partly computed; "blocks"; or "step", the next one.
        """
        group = self._next_group(now)
        if group is None:
            return "prompts" if self._first_waiting(now)[1] else "step"
        if not self._has_seats(group, self._queues.num_running_seqs):
            return "sequences"
        if group.status is not SequenceStatus.SWAPPED:
            return "step" if self.fits(group) else "blocks"
        return "step" if self._fits(group, self._needed_to_swap_in(group), self._needed_by_prompts()) else "blocks"

    def fits_beside(
        self, group: SequenceGroup, needed: BlocksNeeded, reserved: BlocksNeeded, num_running_seqs: int
    ) -> bool:
        if not self._has_seats(group, num_running_seqs):
            return False
        num_seqs = num_running_seqs + group.num_seqs
        # A group that runs alone may use the watermark too; otherwise one as long as the pool would never run.
        if not num_running_seqs:
            return self._blocks.fits(needed, reserved, num_seqs)
        return self._blocks.can_allocate(needed, reserved, num_seqs) is AllocStatus.OK

    def _has_seats(self, group: SequenceGroup, num_running_seqs: int) -> bool:
        """Whether the limits of running sequences allow it."""
        num_seqs = num_running_seqs + group.num_seqs
        if num_seqs > self._options.max_num_seqs:
            return False
        if self._concurrency is None:
            return True
        length = round(self._concurrency.expected_length or group.max_length)
        in_the_end = self._blocks.demand(num_seqs * self._blocks.blocks_for(length), num_seqs)
        is_short = self._blocks.can_allocate(in_the_end, num_seqs=num_seqs) is AllocStatus.NEVER
        return self._concurrency.allows(num_running_seqs, group.num_seqs, is_short)

    def cached(self, group: SequenceGroup) -> CachedBlocks:
        return CachedBlocks(self._match(group), None if group.cross is None else group.cross.find(self._blocks))

    def _match(self, group: SequenceGroup) -> PrefixMatch | None:
        if group.request.task.needs_all_tokens:
            return None
        # Blocks that its sequences will share must be readable for all of them.
        shared = min((seq.shared_prefix[1] for seq in group.seqs if seq.shared_prefix is not None), default=None)
        return self._blocks.prefixes.match(group.seqs[0].token_ids, self._prefix_chain(group), shared)

    def needed(
        self, group: SequenceGroup, cached: CachedBlocks, released: Mapping[int, int] = NO_REFERENCES
    ) -> BlocksNeeded:
        """The uncached blocks that a waiting group needs; ``released`` as in ``PrefixCache.cost``."""
        needed = blocks_still_needed(self._blocks, group)
        for match in cached:
            if match is not None:
                # A partly matched block is copied before it is written, if blocks are free; so a hit never costs more.
                saved = min(0, self._blocks.prefixes.cost(match, released) - match.num_full)
                needed = replace(needed, blocks=needed.blocks + saved)
        return needed

    def _prefix_chain(self, group: SequenceGroup) -> PrefixChain:
        token_ids = group.seqs[0].token_ids
        if group.chain is None:
            group.chain = self._blocks.prefixes.chain(token_ids, group.context, group.features)
        else:
            group.chain.extend(token_ids, len(token_ids) // self._blocks.block_size)
        return group.chain


class Displacement:
    """Preempts running groups for a waiting group that the policy puts before them (priority preemption).

    Before it preempts, it takes victims in the order of ``preemption_victim`` until they suffice to admit the waiting
    group in this step, and spares unneeded ones. So none is preempted if the waiting group would still have to wait.
    """

    def __init__(
        self, options: SchedulerOptions, queues: SchedulingState, admission: Admission, preemption: Preemption
    ) -> None:
        self._options, self._queues, self._admission, self._preemption = options, queues, admission, preemption

    def preempt_for_waiting(self, step: Step) -> SequenceGroup | None:
        """Preempts running groups for the first waiting group, and holds back its tokens; returns it if any was.

        A policy that limits prompts has the tokens held back too if the group fits and goes before all running prompts.
        """
        group = self._admission.next_group(step.now)
        if group is None or group.status is SequenceStatus.SWAPPED or self._admission.has_tokens_in_flight(group):
            return None
        victims = self._victims(group, step.now)
        if victims is None or not (victims or self._goes_before_prompts(group)):
            return None
        gone = {victim.group_id for victim in victims}
        if self._is_left_out(group, gone):
            return None
        decoding = sum(g.num_seqs for g in self._queues.running if not (g.prefilling or g.group_id in gone))
        budget = step.budget - (decoding if self._options.batching == "mixed" else 0)
        chunks = prompt_chunks(self._queues.blocks, group, budget, self._options)
        if not chunks:
            return None
        for victim in victims:
            self._preemption.preempt(victim, step, group)
        budget = step.budget
        step.add_prompt(group, chunks)
        step.held_back = budget - step.budget
        return group

    def _is_left_out(self, group: SequenceGroup, gone: set[int]) -> bool:
        """Whether the policy keeps its prompt out of a step with the running prompts that are not ``gone``."""
        queues = self._queues
        if not queues.policy.limits_prompts or self._options.batching != "mixed":
            return False
        prompts = [(other, 1) for other in queues.prefilling if other.group_id not in gone]
        return queues.policy.prompt_limit(group, prompts) == 0

    def _goes_before_prompts(self, group: SequenceGroup) -> bool:
        queues = self._queues
        if not (queues.policy.limits_prompts and queues.prefilling and self._options.batching == "mixed"):
            return False
        return group.prefilling and queues.order(group) < queues.order(queues.prefilling[0])

    def _victims(self, group: SequenceGroup, now: float) -> list[SequenceGroup] | None:
        """The groups to preempt, none if the group fits now; None if it would not fit without all that it displaces."""
        queues = self._queues
        order, displaces = queues.order(group), queues.policy.displaces
        if not queues.running or self._admission.fits(group):
            return []
        lower = [g for g in queues.running if displaces(group, g) and queues.order(g) > order and not g.awaits_result]
        if not lower:
            return None
        room = _Room(self._options, queues, self._admission, group)
        if not room.may_suffice(lower):
            return None
        last, candidates = len(queues.running) - 1, self._preemption.victims(lower, now)
        victims: list[SequenceGroup] = []
        gone: set[int] = set()
        while not room.suffices():
            victim = next(candidates, None)
            if victim is None:
                return None  # all of them are too few
            while queues.running[last].group_id in gone:
                last -= 1
            if queues.has_aged(victim, now) and victim is not queues.running[last]:
                return None  # later ones would go on before it
            victims.append(victim)
            gone.add(victim.group_id)
            room.remove(victim)
        if victims and not queues.has_aged(victims[-1], now):
            # Victims without whom the others suffice are spared; the last one is needed.
            for victim in victims[-2::-1]:
                room.remove(victim, -1)
                if room.suffices():
                    gone.remove(victim.group_id)
                else:
                    room.remove(victim)
        return [victim for victim in victims if victim.group_id in gone]


class _Room:
    """The room for a waiting group when victims are gone and the other running groups have what this step takes."""

    def __init__(
        self, options: SchedulerOptions, queues: SchedulingState, admission: Admission, group: SequenceGroup
    ) -> None:
        self._blocks, self._admission, self._group = queues.blocks, admission, group
        self._cached = admission.cached(group)
        self._release = Release(queues.blocks.groups)
        self._num_seqs = queues.num_running_seqs
        #: By group id: blocks that prompts still need, and blocks for the next tokens of groups that decode first.
        self._needs = {g.group_id: blocks_still_needed(queues.blocks, g) for g in queues.prefilling}
        if options.batching == "mixed":
            decoding = (g for g in queues.running if not g.prefilling)
            for other in (g for g in decoding if len(g.seqs) > 1 or g.seqs[0].num_computed >= g.seqs[0].slots_end):
                ends = [(s, s.num_computed + s.num_uncomputed) for s in other.seqs if not s.is_ending]
                writes = [(s.seq_id, s.num_computed, end) for s, end in ends if s.slots_end < end]
                growth = tuple(kv_group.demand(writes)[0] for kv_group in queues.blocks.groups)
                self._needs[other.group_id] = BlocksNeeded(exact=growth)
        #: The sum over the groups that stay.
        self._reserved = sum(self._needs.values(), BlocksNeeded())

    def remove(self, victim: SequenceGroup, sign: int = 1) -> None:
        """Counts a victim as gone; restores it if ``sign`` is -1."""
        self._release.add(victim.holder_ids, sign)
        self._num_seqs -= sign * victim.num_seqs
        needed = self._needs.get(victim.group_id, _NOTHING)
        self._reserved = self._reserved - needed if sign > 0 else self._reserved + needed

    def may_suffice(self, victims: list[SequenceGroup]) -> bool:
        """``suffices`` without these victims if they share no block: a quick answer where even most are too few."""
        holder_ids = [holder_id for victim in victims for holder_id in victim.holder_ids]
        needs = (self._needs.get(victim.group_id, _NOTHING) for victim in victims)
        held = [sum(map(kv_group.num_held, holder_ids)) for kv_group in self._blocks.groups]
        num_seqs = self._num_seqs - sum(victim.num_seqs for victim in victims)
        return self._fits(self._reserved - sum(needs, _NOTHING), held, num_seqs)

    def suffices(self) -> bool:
        return self._fits(self._reserved, self._release.counts, self._num_seqs)

    def _fits(self, reserved: BlocksNeeded, released: list[int], num_seqs: int) -> bool:
        needed = self._admission.needed(self._group, self._cached, self._release.references)
        return self._admission.fits_beside(
            self._group, needed, reserved - BlocksNeeded(exact=tuple(released)), num_seqs
        )
