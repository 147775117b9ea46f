"""Server-sent events: an answer that is written while it grows, as fast as its reader reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.answers import Answer
from octavo.server.errors import as_api_error
from octavo.server.generation import disconnected, end_tasks

DONE = b"data: [DONE]\n\n"
#: Seconds that sending an error at the end of a stream may take.
_LAST_WORDS = 5.0


def event(answer: Answer) -> bytes:
    """One event."""
    return b"data: " + answer.encode() + b"\n\n"


class EventStream(Response):
    """An answer in events.

    What fails before the first event is an ordinary error, with its status; later it is an event of its own, after
    which no ``[DONE]`` comes. A client that goes away, or the deadline, ends the generator and with it the request.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], deadline: float) -> None:
        """Takes over ``events``; ``deadline`` on the loop's clock."""
        # Proxies that buffer would hold back what is there to be read.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the events until they end or the client is gone."""
        writer = asyncio.ensure_future(self._write(scope, receive, send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            await end_tasks(writer, gone)

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with asyncio.timeout_at(self._deadline), aclosing(self._events) as events:
                async for data in events:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        started = True
                    # Waits while the client does not read.
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except Exception as e:
            error = as_api_error(e)
            if not started:
                await error.response()(scope, receive, send)
                return
            # Who does not read will not read this either; without it the server closes the connection.
            async with asyncio.timeout(_LAST_WORDS):
                await send({"type": "http.response.body", "body": b"data: " + error.body() + b"\n\n"})
