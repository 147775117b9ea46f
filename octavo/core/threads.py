"""Calls in threads whose end is waited for, so that what they use can be closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def finish_in_thread(function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """As ``asyncio.to_thread``, but if this is cancelled, the thread has ended when ``CancelledError`` comes.

    For calls that use what the caller closes afterwards, such as a file: libraries in C read on through a closed
    handle, which ends the whole process. A result that nobody takes any more is closed, if it has ``close``.
    """
    call = partial(copy_context().run, function, *args, **keywords)
    # A future and not a task: the end of an event loop cancels all tasks.
    future = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:  # cancelled once more, which changes nothing
                continue
        if future.exception() is None and (close := getattr(future.result(), "close", None)) is not None:
            close()
        raise
