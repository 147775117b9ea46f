"""A scheduling policy that ends its process at a request of a certain user: at a place that the name says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies import Policy

#: Users at whose requests the process ends: when one arrives, when its place among the waiting is asked for, when it is
#: admitted, and when it has got 5 tokens.
DEADLY = ("arrival", "key", "admission", "step")


class Deadly(Policy):
    """First come, first served."""

    dynamic = True

    def key(self, group: SequenceGroup) -> Any:
        """No order of its own."""
        _die(group, "key")
        return 0

    def on_arrival(self, group: SequenceGroup) -> None:
        """See ``Policy``."""
        _die(group, "arrival")

    def on_admit(self, group: SequenceGroup) -> None:
        """See ``Policy``."""
        _die(group, "admission")

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        """See ``Policy``."""
        for group in running:
            if any(len(seq.token_ids) >= seq.num_prompt_tokens + 5 for seq in group.seqs):
                _die(group, "step")


def _die(group: SequenceGroup, place: str) -> None:
    if group.request.options.user == place:
        os._exit(3)
