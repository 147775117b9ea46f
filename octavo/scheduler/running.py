"""Running groups: decodes, prompt chunks, draft tokens, and preemption where blocks are short."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf

from octavo.config.options import SchedulerOptions
from octavo.core.errors import WorkerError
from octavo.core.plan import StepResult
from octavo.core.request import DraftStats, SequenceStatus
from octavo.core.stats import SchedulerStats
from octavo.scheduler.groups import Sequence, SequenceGroup
from octavo.scheduler.state import SchedulingState
from octavo.scheduler.step import Chunks, Step, allocate_slots, prompt_chunks, prompt_limit, schedule_prefill
from octavo.speculation.drafter import BY_WORKER
from octavo.speculation.speculator import Speculator, Waiting


class Running:
    """Schedules running groups. Decodes take their tokens of the budget first; blocks go in the policy's order.

    A group that needs a block preempts groups after it in that order, which are not scheduled yet in this step.
    """

    def __init__(
        self, options: SchedulerOptions, queues: SchedulingState, preemption: Preemption, num_stages: int = 1
    ) -> None:
        self._options, self._queues, self._preemption, self._num_stages = options, queues, preemption, num_stages

    def schedule_running(self, step: Step) -> list[SequenceGroup]:
        """Schedules the running groups; returns those that do not fit even with all blocks to themselves."""
        queues = self._queues
        chunks = self._split_budget(step)
        running, exceeding = queues.running, []
        most_decodes = -(-queues.num_running_seqs // self._num_stages)
        # Slots of these decodes are allocated together: a block is available for each, even if it copies one.
        available = queues.blocks.num_available
        steady = queues.steady
        steady.extend(running)
        without_slots = steady.without_slots()
        if len(without_slots) > available:  # one of them may have to preempt others
            steady.restart()
            without_slots = []
        first = steady.num_groups
        together: Chunks = [(steady.columns.seqs[position], 1) for position in without_slots]
        decodes: list[Sequence] = []  # behind the steady ones
        most_decodes -= len(steady.columns)
        # Preempted groups are behind ``group``, or ``group`` is the last one and preempts itself.
        for position, group in enumerate(itertools.islice(running, first, None), first + 1):
            seqs = group.seqs
            seq = seqs[0]
            if group.prefilling:
                work = chunks.get(group.group_id)
                if work is None:
                    continue
            elif seq.num_computed < seq.slots_end and len(seqs) == 1:  # one more token in its last block
                decodes.append(seq)
                continue
            elif seq.is_ending or group.awaits_result or len(decodes) >= most_decodes:
                continue  # in the last case other pipeline stages decode it
            else:
                work = self._decode(group, step)
                if work[0][1] == 1 and len(together) + len(work) <= available:
                    together += work
                    decodes += [s for s, _ in work]
                    continue
            self._allocate_together(together, step)
            if self._allocate_or_preempt(group, work, position, step):
                if group.prefilling:
                    schedule_prefill(queues, group, work, step)
                elif work[0][1] > 1:
                    step.extended += work
                else:
                    decodes += [s for s, _ in work]
            elif self._blocks_will_be_freed(step):
                step.blocked_on_memory = True
            elif len(running) == 1:
                exceeding.append(group)
            else:
                self._preemption.preempt(group, step)
            available = queues.blocks.num_available
        self._allocate_together(together, step)
        columns, last, ending = steady.schedule(without_slots)
        step.begin_decodes(columns, ending, decodes)
        for position in last:
            seq = columns.seqs[position]
            if not (seq.num_computed + 1) % queues.blocks.block_size:
                step.filled.append((seq, seq.num_computed + 1))
        return exceeding

    def _decode(self, group: SequenceGroup, step: Step) -> Chunks:
        """The next token of each sequence of a group, and the tokens that a grammar has forced behind it."""
        if step.forced_budget:
            seq = group.seqs[0]
            forced = min(step.forced_budget, len(seq.token_ids) - seq.num_computed - 1)
            if forced > 0:
                forced = min(forced, self._queues.blocks.max_chunk - 1)
                step.forced_budget -= forced
                return [(seq, 1 + forced)]
        # Drafts make sequences of a group differ in length.
        return [(s, 1) for s in group.seqs if not s.is_ending]

    def _allocate_together(self, decodes: Chunks, step: Step) -> None:
        if decodes:
            allocated = allocate_slots(self._queues, decodes, step)
            assert allocated, "a sequence takes no more than one block of each group for its next token"
            decodes.clear()

    def _split_budget(self, step: Step) -> dict[int, Chunks]:
        """Takes a token for each decode from the budget, and splits the rest among prefilling groups."""
        queues = self._queues
        if not queues.prefilling:
            step.budget -= queues.num_running_seqs
            self._reserve_forced(step)
            return {}
        for group in list(queues.prefilling):
            restore_sharing(queues, group)
            if group.is_prefilled:  # nothing is left to compute: all is shared, or a sibling has ended
                queues.finish_prefill(group)
        step.budget -= queues.num_running_seqs - sum(g.num_seqs for g in queues.prefilling)
        self._reserve_forced(step)
        chunks: dict[int, Chunks] = {}  # by group id
        for group in queues.prefilling:
            if step.budget <= 0:
                break
            limit = prompt_limit(queues, group, step)
            if limit == 0:
                continue
            work = prompt_chunks(queues.blocks, group, step.budget, self._options, limit)
            if not work:  # it has to be computed whole, and must not be overtaken
                step.budget = 0
                break
            chunks[group.group_id] = work
            step.add_prompt(group, work)
        return chunks

    def _reserve_forced(self, step: Step) -> None:
        """Takes tokens that grammars have forced from the budget, before prompts get the rest."""
        if not self._queues.unsent_tokens:
            return
        # A preempted sequence computes them with its prompt.
        decoding = (s for s, _ in self._queues.unsent_tokens if s.status is SequenceStatus.RUNNING)
        forced = sum(len(s.token_ids) - s.num_computed - 1 for s in decoding if not s.group.prefilling)
        step.forced_budget = max(0, min(forced, step.budget))
        step.budget -= step.forced_budget

    def _allocate_or_preempt(self, group: SequenceGroup, work: Chunks, position: int, step: Step) -> bool:
        """Allocates slots, preempting groups from ``position`` on; False if ``group`` itself must yield or wait."""
        queues, victims = self._queues, None
        while not allocate_slots(queues, work, step):
            if position == len(queues.running) or self._blocks_will_be_freed(step):
                return False
            if victims is None:
                victims = self._preemption.victims(queues.running[position:], step.now)
            self._preemption.preempt(next(victims), step)
        return True

    def _blocks_will_be_freed(self, step: Step) -> bool:
        """Whether a step in flight may end a group: waiting for its blocks beats preempting; looked up once a step."""
        running = self._queues.running
        if step.awaits_blocks is None:
            step.awaits_blocks = any(g.seqs[0].is_ending or g.awaits_result for g in running)
        return step.awaits_blocks or (len(running) == 1 and running[0].seqs[0].awaits_token)


#: By ``preemption_victim``: the group with the least key is preempted, among equals the lowest-priority group. Computed
#: tokens stand for blocks.
_VICTIM_KEYS: dict[str, Callable[[SequenceGroup], int] | None] = {
    "last": None,
    "least_computed": lambda group: group.num_computed,
    "most_blocks": lambda group: -group.num_computed,
}


class MoveCost:
    def __init__(self) -> None:
        #: One way; None until observed.
        self.seconds_per_byte: float | None = None
        self.seconds_per_token: float | None = None

    def observe_move(self, num_bytes: int, seconds: float) -> None:
        self.seconds_per_byte = _smooth(self.seconds_per_byte, seconds / num_bytes)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        self.seconds_per_token = _smooth(self.seconds_per_token, seconds / tokens)

    def swap_is_cheaper(self, num_bytes: int, tokens: int) -> bool:
        """Whether moving the bytes out and back takes less time than recomputing the tokens; False until observed."""
        if self.seconds_per_byte is None or self.seconds_per_token is None:
            return False
        return 2 * num_bytes * self.seconds_per_byte < tokens * self.seconds_per_token


def _smooth(average: float | None, observed: float) -> float:
    return observed if average is None else 0.8 * average + 0.2 * observed


class Preemption:
    """Preempts running groups whole (all-or-nothing eviction: Kwon et al. 2023, section 4.5; vLLM: ``PreemptionMode``).

    By recompute: the blocks are freed and the group waits again. ``Admission.admit_waiting`` admits it like a new one:
    prompt and generated tokens are computed as one prompt, less cached blocks. Its sequences share their blocks again:
    ``_record_sharing`` notes which, ``restore_sharing`` forks them once computed.

    By swap: ``BlockManager.swap_out`` moves the blocks to the host and the group joins the swapped queue. From there
    ``Admission.admit_swapped`` moves them into new device blocks, and the group decodes on.

    Either way the workers forget the sequences, and the plan that resumes them carries them whole (``NewSequence``).
    """

    def __init__(
        self, options: SchedulerOptions, queues: SchedulingState, stats: SchedulerStats, cost: MoveCost
    ) -> None:
        self._queues, self._stats, self._cost = queues, stats, cost
        self._blocks = queues.blocks
        self._mode = options.preemption_mode
        self._key = _VICTIM_KEYS[options.preemption_victim]

    def victims(self, candidates: SequenceOf[SequenceGroup], now: float) -> Iterator[SequenceGroup]:
        """Yields the groups to preempt among ``candidates``, which are in order: those beyond the ageing limit last."""
        has_aged = self._queues.has_aged
        young = (g for g in reversed(candidates) if not has_aged(g, now))
        yield from young if self._key is None else sorted(young, key=self._key)
        yield from (g for g in reversed(candidates) if has_aged(g, now))

    def preempt(self, group: SequenceGroup, step: Step, displaced_by: SequenceGroup | None = None) -> None:
        """Preempts a running group that is not scheduled in this step; maybe for a waiting one."""
        group.preempted_for = None if displaced_by is None else displaced_by.group_id
        step.blocked_on_memory = True
        step.lost_seqs = max(step.lost_seqs, self._queues.num_running_seqs)
        # An encoder's output that this very step is to compute is not in its blocks yet.
        is_computed = group.cross is None or group.cross.is_computed
        if not (is_computed and self._wants_swap(group) and self._blocks.swap_out(group.holder_ids)):
            step.lost_tokens += group.num_recomputed
            self._recompute(group)
            return
        group.totals.num_swaps += 1
        group.totals.num_swapped_blocks += sum(self._blocks.blocks_to_swap_in(group.holder_ids))
        self._stats.preemptions_by_swap += 1
        self._queues.requeue(group, SequenceStatus.SWAPPED)
        step.swapped_groups.append(group)

    def recompute_all(self) -> None:
        """Preempts every group that holds blocks, on the device or the host, by recompute."""
        groups = self._queues.groups.values()
        for group in [g for g in groups if g.status is SequenceStatus.SWAPPED]:
            self._lose(group)
            self._queues.move(group, SequenceStatus.WAITING)
            group.prefilling = True
        for group in reversed(self._queues.running.copy()):
            self._recompute(group)

    def _wants_swap(self, group: SequenceGroup) -> bool:
        if group.request.task.is_kept_by_workers or not (group.samples or group.prefilling):
            return False  # in the last case it has nothing left to compute: it would end with a step in flight
        if self._mode == "by_sequences":  # Kwon et al. 2023, section 4.5; those that it will fork into count
            return group.num_seqs > 1
        if self._mode != "auto":
            return self._mode == "swap"
        if len(group.seqs) > 1:
            return True
        return self._cost.swap_is_cheaper(sum(map(self._blocks.held_bytes, group.holder_ids)), group.num_recomputed)

    def _recompute(self, group: SequenceGroup) -> None:
        self._lose(group)
        self._queues.requeue(group, SequenceStatus.WAITING)
        group.prefilling = True

    def _lose(self, group: SequenceGroup) -> None:
        if len(group.seqs) > 1:
            self._record_sharing(group)
        lost = group.num_recomputed
        for seq in group.seqs:
            self._queues.register_end(seq)
        for holder_id in group.holder_ids:
            self._blocks.free(holder_id)
        for seq in group.seqs:
            seq.num_computed = 0
        if group.cross is not None:
            group.cross.is_computed = False
        group.totals.num_recomputes += 1
        group.totals.num_recomputed_tokens += lost
        self._stats.preemptions_by_recompute += 1
        self._stats.recomputed_tokens += lost

    def _record_sharing(self, group: SequenceGroup) -> None:
        """Notes whose full blocks each sequence shares: those of the prompt, or more, as the block ids show."""
        size, first = self._blocks.block_size, group.seqs[0]
        of_prompt = len(group.request.prompt_token_ids) // size
        layers = self._blocks.groups[0]
        tables = layers.on_host if self._blocks.is_swapped(first.seq_id) else layers.on_device
        common = tables.common_prefixes(group.seq_ids)
        for seq, (position, count) in zip(group.seqs, common, strict=True):
            if seq is first or seq.shared_prefix is not None:
                continue
            other = group.seqs[position]
            count = min(count, seq.num_computed // size, other.num_computed // size)
            other, count = (other, count) if count > of_prompt else (first, of_prompt)
            count -= count % self._blocks.checkpoint_blocks  # there is no state elsewhere
            seq.shared_prefix = (other, count) if count else None


def restore_sharing(queues: SchedulingState, group: SequenceGroup) -> None:
    """After preemption by recompute: sequences of a group share blocks again as soon as these are computed."""
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


class Drafting:
    """Adds draft tokens to a scheduled step: they take the rest of its budget and of the blocks (lookahead slots)."""

    def __init__(
        self, queues: SchedulingState, speculator: Speculator, stats: SchedulerStats, *, runs_ahead: bool
    ) -> None:
        """``runs_ahead``: where drafts bring little, steps may be planned while others are in flight."""
        self._queues, self._speculator, self._stats = queues, speculator, stats
        self._waiting = Waiting() if runs_ahead and speculator.lengths.adaptive else None
        #: Groups that could have drafts at the last call of ``_waits``.
        self._num_groups = 0

    def may_draft(self, in_flight: Mapping[int, Step]) -> bool:
        return not in_flight and self._waits()

    def awaits_results(self, in_flight: Mapping[int, Step]) -> bool:
        """Whether the next step, or one in flight, has drafts: then all groups wait for the accepted tokens."""
        if any(step.drafted for step in in_flight.values()):
            return True
        return self._queues.num_drafted_groups > 0 and self._waits()

    def _waits(self) -> bool:
        if self._waiting is None:
            return True
        num_groups, self._num_groups = self._num_groups, self._queues.num_drafted_groups
        if self._num_groups > num_groups:
            self._waiting.begin()
        return self._waiting.waits

    def reserve(self, budget: int) -> int:
        queues = self._queues
        if not queues.num_drafted_groups or not (queues.prefilling or queues.num_waiting):
            return 0
        return min(budget // 8, self._speculator.lengths.expected)

    def add_drafts(self, step: Step) -> None:
        step.may_draft = True
        if not self._queues.num_drafted_groups or step.blocked_on_memory or step.budget <= 0 or not step.decodes:
            return
        # The workers' logits have a row per token of the budget: drafts take one each, and so do forked children.
        room = step.budget - len(step.forked_children)
        left = min(room, self._speculator.lengths.begin_step(len(step.decodes), step.num_prompt_tokens))
        if left <= 0:
            return
        decodes, drafted, propose = [], [], self._speculator.propose
        others = step.decodes.seqs[len(step.steady) :]  # steady ones are never drafted
        for position, seq in enumerate(others):
            if left <= 0:
                decodes += others[position:]
                break
            # The token behind the last draft is sampled too, and the last one that the limit allows is not computed.
            most = seq.max_length - 2 - seq.num_computed
            if most > left:
                most = left
            # Drafts follow the last token: forced tokens before it may still be uncomputed.
            may = most > 0 and seq.group.drafts and seq.num_computed + 1 == len(seq.token_ids)
            if may and (tokens := propose(seq, most)):
                drafted.append((seq, tokens))
                left -= len(tokens)
            else:
                decodes.append(seq)
        if drafted:
            step.begin_decodes(step.steady, step.steady_apart, decodes)
            step.drafted = drafted
            self._add_slots(step)

    def _add_slots(self, step: Step) -> None:
        """Allocates the lookahead slots of drafted sequences; those without blocks for them decode without drafts."""
        blocks = self._queues.blocks
        short = [
            (s.seq_id, s.num_computed, s.num_computed + 1 + len(t))
            for s, t in step.drafted
            if s.slots_end < s.num_computed + 1 + len(t)
        ]
        lacking = set()
        if short:
            changes = blocks.grow(short)
            if changes is None:
                changes = []
                for write in short:
                    one = blocks.grow([write])
                    if one is None:
                        lacking.add(write[0])
                    else:
                        changes += one
            step.table_changes += changes
        if lacking:
            step.add_decodes([seq for seq, _ in step.drafted if seq.seq_id in lacking])
            step.drafted = [(seq, tokens) for seq, tokens in step.drafted if seq.seq_id not in lacking]
        for seq, _ in step.drafted:
            seq.slots_end = 0  # until it is known how many are accepted

    def observe(self, step: Step, result: StepResult) -> list[DraftStats]:
        """Reports a step's result to the speculator; returns the totals of each group with drafts."""
        if not (step.drafted or self._queues.num_drafted_groups):
            return []
        sequences, groups = self._queues.sequences, dict[int, DraftStats]()
        drafts, num_drafts, num_accepted = [], 0, 0
        num_tokens = result.num_tokens or itertools.repeat(1)
        counts = dict(zip(result.seq_ids, num_tokens, strict=False)) if step.drafted else {}
        for seq, tokens in step.drafted:
            seq_id = seq.seq_id
            drafted = len(tokens) if tokens[0] != BY_WORKER else result.num_drafts.get(seq_id, 0)
            num_drafts += drafted
            if seq_id not in sequences:
                continue
            if not drafted:
                if result.draft_error is not None:
                    self._speculator.fail(seq, WorkerError(result.draft_error))
                continue
            group, accepted = seq.group, counts[seq_id] - 1
            groups[group.group_id] = group.draft_stats = (group.draft_stats or DraftStats(group.group_id)).add(
                drafted, accepted
            )
            num_accepted += accepted
            drafts.append((seq_id, drafted, accepted))
        self._stats.decode_tokens += num_accepted
        self._speculator.observe(drafts)
        if self._speculator.lengths.adaptive:
            self._observe_costs(step, result, num_drafts, num_accepted)
        return list(groups.values())

    def _observe_costs(self, step: Step, result: StepResult, num_drafts: int, num_accepted: int) -> None:
        lengths = self._speculator.lengths
        if result.draft_seconds:
            proposed, catching_up = result.num_drafts.values(), result.draft_catch_up_seconds
            passing, passes = result.draft_seconds - catching_up, max(proposed, default=0)
            lengths.observe_drafting(len(proposed), passes, passing, result.draft_catch_up_tokens, catching_up)
        num_seqs = len(step.decodes) + len(step.drafted)
        seconds = result.seconds - result.swap_seconds - result.draft_seconds - result.compute_seconds
        if step.prefills:
            lengths.observe_prompts(step.num_prompt_tokens + num_seqs + num_drafts, seconds)
        elif num_seqs:
            lengths.observe_step(num_seqs, len(step.drafted), num_drafts, seconds)
            if self._waiting is not None:
                idle = result.idle_seconds / max(seconds, 1e-9)
                self._waiting.observe(step.may_draft, num_accepted / num_seqs, idle)
