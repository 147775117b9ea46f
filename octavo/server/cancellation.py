"""Work that ends when the client disconnects or a deadline passes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from octavo.server.api_errors import ApiError


async def with_cancellation(receive: Any, work: Coroutine[Any, Any, Any], deadline: float) -> Any:
    """The result of ``work``, which is cancelled when the client disconnects or the deadline passes.

    Args:
        receive: ASGI channel of the request, whose body has been read.
        work: the coroutine to run.
        deadline: on the loop's clock.

    Raises:
        TimeoutError: the deadline has passed.
        ApiError: status 499, the client has disconnected.
    """
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client has closed the connection")
    finally:
        await cancel_tasks(task, disconnect)


async def wait_for_disconnect(receive: Any) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks and waits until all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
