"""Ends engine cores that hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from octavo.core.option_parts import FIRST_STEP_TIMEOUT
from octavo.engine.replica import Replica


async def watch(replicas: Sequence[Replica], step_timeout: float, is_paused: Callable[[], bool]) -> None:
    """Gives up each core that does no step for ``step_timeout`` seconds while it has requests; never returns.

    It looks ten times in that period and counts its own looks, so that a pause of this process does not count, nor
    does a time in which the core had no processor (``Replica.is_hung``).
    """
    while True:
        await asyncio.sleep(step_timeout / 10)
        for replica in replicas:
            patience = step_timeout if replica.num_steps else max(step_timeout, FIRST_STEP_TIMEOUT)
            if is_paused() or not replica.lives:
                replica.seen_steps = -1
            elif replica.is_hung(step_timeout / 10, patience):
                replica.client.give_up(f"the engine's process hangs: no step for {patience:g} s")
