"""Who has to give up its blocks, and how."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from octavo.core.config import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.core.stats import SchedulerStats
from octavo.memory.content_index import common_prefix
from octavo.scheduler.groups import Sequence, SequenceGroup
from octavo.scheduler.policies import VICTIMS
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Step


class MoveCost:
    """What it costs to move blocks and to compute tokens again, as observed."""

    def __init__(self) -> None:
        #: Seconds to move one block one way, and to prefill one token; None until known.
        self.seconds_per_block: float | None = None
        self.seconds_per_token: float | None = None

    def observe_move(self, blocks: int, seconds: float) -> None:
        """Takes in the time that moving these blocks took."""
        self.seconds_per_block = _smooth(self.seconds_per_block, seconds / blocks)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Takes in the time of a step with mostly prompt tokens."""
        self.seconds_per_token = _smooth(self.seconds_per_token, seconds / tokens)

    def swap_is_cheaper(self, blocks: int, tokens: int) -> bool:
        """Whether moving the blocks out and back takes less time than computing the tokens again."""
        if self.seconds_per_block is None or self.seconds_per_token is None:
            return False
        return 2 * blocks * self.seconds_per_block < tokens * self.seconds_per_token


def _smooth(known: float | None, seen: float) -> float:
    return seen if known is None else 0.8 * known + 0.2 * seen


class Preemption:
    """Puts running groups out, whole: all blocks of a group leave together."""

    def __init__(self, options: SchedulerOptions, queues: Queues, stats: SchedulerStats) -> None:
        self._queues, self._stats = queues, stats
        self._blocks = queues.blocks
        self._mode = options.preemption_mode
        self._choose = VICTIMS[options.preemption_victim]
        self.cost = MoveCost()

    def victim(self, candidates: SequenceOf[SequenceGroup], now: float) -> SequenceGroup:
        """Which of these groups has to go; they are in order, and all after the one that needs the blocks.

        Those that have waited beyond the ageing limit go last, and then the latest first.
        """
        open_ = [g for g in candidates if not self._queues.has_aged(g, now)]
        return self._choose(open_) if open_ else candidates[-1]

    def preempt(self, group: SequenceGroup, step: Step) -> None:
        """Preempts a running group that has been given nothing in this step."""
        step.blocked_on_memory = True
        if self._wants_swap(group) and self._swap_out(group):
            step.moved.append(group)
        else:
            self._recompute(group)

    def _wants_swap(self, group: SequenceGroup) -> bool:
        if self._mode != "auto":
            return self._mode == "swap"
        if len(group.seqs) > 1:
            return True
        seq = group.seqs[0]
        return self.cost.swap_is_cheaper(len(self._blocks.table(seq.seq_id)), seq.num_computed)

    def _swap_out(self, group: SequenceGroup) -> bool:
        if not self._blocks.swap_out(group.seq_ids):
            return False
        group.num_swaps += 1
        moved = self._blocks.blocks_to_swap_in(group.seq_ids)
        group.num_swapped_blocks += moved
        self._stats.preemptions_by_swap += 1
        self._queues.preempt(group, SequenceStatus.SWAPPED)
        return True

    def _recompute(self, group: SequenceGroup) -> None:
        """Gives the blocks up; remembers which full blocks its sequences shared, so that they will again."""
        lost = sum(s.num_computed for s in group.seqs)
        if len(group.seqs) > 1:
            self._remember_sharing(group)
        for seq in group.seqs:
            self._blocks.free(seq.seq_id)
            seq.num_computed = 0
        group.num_recomputes += 1
        group.num_recomputed_tokens += lost
        self._stats.preemptions_by_recompute += 1
        self._stats.recomputed_tokens += lost
        self._queues.preempt(group, SequenceStatus.WAITING)
        group.prefilling = True

    def _remember_sharing(self, group: SequenceGroup) -> None:
        size = self._blocks.block_size
        for i, seq in enumerate(group.seqs):
            if seq.resume is not None:
                continue
            best: tuple[Sequence, int] | None = None
            for earlier in group.seqs[:i]:
                end = min(seq.num_computed, earlier.num_computed)
                shared = common_prefix(seq.token_ids[:end], earlier.token_ids[:end]) // size
                if shared > (best[1] if best else 0):
                    best = (earlier, shared)
            seq.resume = best
