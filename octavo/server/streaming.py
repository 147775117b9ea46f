"""Server-sent events: a response that is sent while it is generated, as fast as the client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.api_errors import ApiError, as_api_error
from octavo.server.cancellation import cancel_tasks, wait_for_disconnect
from octavo.server.large_answers import encode_in_slices
from octavo.server.logging import log_fields
from octavo.server.protocol_base import ResponseModel

DONE = b"data: [DONE]\n\n"
#: Seconds that sending an error at the end of a stream may take.
_ERROR_SEND_TIMEOUT = 5.0


def event(content: ResponseModel) -> bytes:
    """One event."""
    return b"data: " + content.encode() + b"\n\n"


def large_event(content: ResponseModel) -> bytes:
    """As ``event``, of a content that may be large or have a ``LazyList`` in it."""
    return b"data: " + encode_in_slices(content) + b"\n\n"


class EventStream(Response):
    """A response of server-sent events.

    A failure before the first event is an ordinary error response with its status; a later one is an event of its own,
    without ``[DONE]`` after it. A disconnect or the deadline closes the generator and so aborts the request. The
    access log's line says how it ended: complete, error or aborted.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        deadline: float | None,
        failure: Callable[[ApiError], bytes] = lambda error: b"data: " + error.body() + b"\n\n",
    ) -> None:
        """Owns ``events`` and closes it; ``deadline`` on the loop's clock, None: none.

        ``failure`` makes the event of an error.
        """
        # Proxies must not buffer the stream.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._deadline = deadline
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until they end or the client disconnects."""
        log_fields(scope)["stream"] = "aborted"  # unless it ends
        writer = asyncio.ensure_future(self._write(scope, receive, send))
        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({writer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            await cancel_tasks(writer, disconnect)

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with asyncio.timeout_at(self._deadline), aclosing(self._events) as events:
                async for data in events:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        started = True
                    # Blocks while the client does not read.
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            log_fields(scope)["stream"] = "complete"
        except Exception as e:
            error = as_api_error(e)
            log_fields(scope).update(stream="error", error=error.code or error.kind)
            if not started:
                await error.response(scope)(scope, receive, send)
                return
            # A client that does not read cannot block this for long; then the server closes the connection.
            async with asyncio.timeout(_ERROR_SEND_TIMEOUT):
                await send({"type": "http.response.body", "body": self._failure(error)})
