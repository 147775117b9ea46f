"""Counts of what the scheduler did, since it was made."""

from __future__ import annotations

from octavo.core.stats import SchedulerState


class SchedulerStats(SchedulerState, gc=False):
    """A state of the queues and blocks, and totals up to it."""

    #: Totals of tokens that were computed.
    prefill_tokens: int = 0
    decode_tokens: int = 0
    #: Total.
    copied_blocks: int = 0
    #: Slots of used blocks that hold no token, now.
    empty_slots: int = 0
