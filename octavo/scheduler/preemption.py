"""Preemption: which group gives up its blocks, and whether they are swapped out or recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

from octavo.core.config import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.core.stats import SchedulerStats
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Step

#: By ``preemption_victim``: what is least of the group to preempt; None: the last in order is preempted. Among equals
#: it is the last, too. Computed tokens are those to recompute, and stand for blocks.
_VICTIM_KEYS: dict[str, Callable[[SequenceGroup], int] | None] = {
    "last": None,
    "least_computed": lambda group: group.num_computed,
    "most_blocks": lambda group: -group.num_computed,
}


class MoveCost:
    """Observed cost of swapping blocks and of recomputing tokens."""

    def __init__(self) -> None:
        #: Seconds to move a byte one way, and to prefill one token; None until observed.
        self.seconds_per_byte: float | None = None
        self.seconds_per_token: float | None = None

    def observe_move(self, num_bytes: int, seconds: float) -> None:
        """Adds an observation: so many bytes were moved in ``seconds``. Blocks of KV groups differ in size."""
        self.seconds_per_byte = _smooth(self.seconds_per_byte, seconds / num_bytes)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Adds an observation: a step of ``tokens``, most of them of prompts, took ``seconds``."""
        self.seconds_per_token = _smooth(self.seconds_per_token, seconds / tokens)

    def swap_is_cheaper(self, num_bytes: int, tokens: int) -> bool:
        """Whether moving the bytes out and back takes less time than recomputing ``tokens``; False until observed."""
        if self.seconds_per_byte is None or self.seconds_per_token is None:
            return False
        return 2 * num_bytes * self.seconds_per_byte < tokens * self.seconds_per_token


def _smooth(average: float | None, observed: float) -> float:
    return observed if average is None else 0.8 * average + 0.2 * observed


class Preemption:
    """Preempts running groups whole: all blocks of a group are given up together."""

    def __init__(self, options: SchedulerOptions, queues: Queues, stats: SchedulerStats) -> None:
        self._queues, self._stats = queues, stats
        self._blocks = queues.blocks
        self._mode = options.preemption_mode
        self._key = _VICTIM_KEYS[options.preemption_victim]
        self.cost = MoveCost()

    def victims(self, candidates: SequenceOf[SequenceGroup], now: float) -> Iterator[SequenceGroup]:
        """The groups to preempt, one after the other: ``candidates`` are in order, and after the one that needs blocks.

        Groups beyond the ageing limit are preempted only when no other is left, the last in order first.
        """
        has_aged = self._queues.has_aged
        young = (g for g in reversed(candidates) if not has_aged(g, now))
        yield from young if self._key is None else sorted(young, key=self._key)
        yield from (g for g in reversed(candidates) if has_aged(g, now))

    def preempt(self, group: SequenceGroup, step: Step, displaced_by: SequenceGroup | None = None) -> None:
        """Preempts a running group that is not scheduled in this step; ``displaced_by``: the one that it is for."""
        group.preempted_for = None if displaced_by is None else displaced_by.group_id
        step.blocked_on_memory = True
        if self._wants_swap(group) and self._swap_out(group):
            step.swapped_groups.append(group)
        else:
            self._recompute(group)

    def recompute_all(self) -> None:
        """Sets back every group that holds blocks, on the device or the host: its tokens are computed again."""
        groups = self._queues.groups.values()
        for group in [g for g in groups if g.status is SequenceStatus.SWAPPED]:
            self._lose(group)
            self._queues.move(group, SequenceStatus.WAITING)
            group.prefilling = True
        for group in reversed(self._queues.running.copy()):
            self._recompute(group)

    def _wants_swap(self, group: SequenceGroup) -> bool:
        if group.request.task.is_kept_by_workers:
            return False
        if self._mode == "by_sequences":  # Kwon et al. 2023, section 4.5; those that it will fork into count
            return group.num_seqs > 1
        if self._mode != "auto":
            return self._mode == "swap"
        if len(group.seqs) > 1:
            return True
        return self.cost.swap_is_cheaper(sum(map(self._blocks.held_bytes, group.holder_ids)), group.num_recomputed)

    def _swap_out(self, group: SequenceGroup) -> bool:
        # An encoder's output that this very step is to compute is not in its blocks yet.
        is_computed = group.cross is None or group.cross.is_computed
        if not is_computed or not self._blocks.swap_out(group.holder_ids):
            return False
        group.totals.num_swaps += 1
        group.totals.num_swapped_blocks += sum(self._blocks.blocks_to_swap_in(group.holder_ids))
        self._stats.preemptions_by_swap += 1
        self._queues.requeue(group, SequenceStatus.SWAPPED)
        return True

    def _recompute(self, group: SequenceGroup) -> None:
        """Frees the blocks; records which full blocks the sequences share, so that they share them again."""
        self._lose(group)
        self._queues.requeue(group, SequenceStatus.WAITING)
        group.prefilling = True

    def _lose(self, group: SequenceGroup) -> None:
        if len(group.seqs) > 1:
            self._record_sharing(group)
        lost = group.num_recomputed
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
        """Which sequence's full blocks each one shares: those of the prompt, or more, which the block ids tell.

        They tell it without a look at the tokens, as a block is in the tables of several only until one writes to it.
        """
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
            best = (other, count) if count > of_prompt else (first, of_prompt)
            seq.shared_prefix = best if best[1] else None
