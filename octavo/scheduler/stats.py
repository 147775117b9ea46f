"""Counts of what the scheduler did, since it was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """A state of the queues and blocks, and totals up to it."""

    # Now:
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    blocks_used: int = 0
    #: Held by nobody, kept for a prefix that may come again.
    blocks_cached: int = 0
    blocks_free: int = 0
    host_blocks_used: int = 0
    #: Slots of used blocks that hold no token.
    empty_slots: int = 0
    # Totals:
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions_by_recompute: int = 0
    preemptions_by_swap: int = 0
    #: Tokens whose KV entries were given up by preemption.
    recomputed_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    copied_blocks: int = 0
    #: Prompt tokens looked up in the prefix cache, and found there.
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
