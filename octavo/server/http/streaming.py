"""Responses that follow the client: cancelled when it leaves, large ones encoded in slices, server-sent events."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.core.outputs import RequestOutput
from octavo.process.children import WorkThread
from octavo.server.http.errors import ApiError, as_api_error
from octavo.server.logging import log_fields

if TYPE_CHECKING:
    from octavo.server.chat import Chat, ChoiceEvents
    from octavo.server.fields import ResponseModel


# Work that ends when the client disconnects or a deadline passes.


async def with_cancellation(receive: Any, work: Coroutine[Any, Any, Any], deadline: float) -> Any:
    """The result of ``work``, which is cancelled when the client disconnects (499) or the deadline passes.

    ``receive``: ASGI channel of the request, whose body has been read. ``deadline``: on the loop's clock.
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
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_tasks(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# Large answers, which are made and encoded in a thread, in slices.

T = TypeVar("T")

#: Logprobs from which on an answer is large; fewer take a few milliseconds.
LARGE = 4096
#: Entries of a list that are encoded at once.
_SLICE = 64

_writer = WorkThread("answers")


@dataclass(frozen=True)
class LazyList:
    """A list in an answer whose entries are made when they are encoded, so that they never exist all at once."""

    items: Sequence[Any]
    #: Makes an entry of an item.
    convert: Callable[[Any], Any]

    def slices(self) -> Iterator[list[Any]]:
        for start in range(0, len(self.items), _SLICE):
            yield [self.convert(item) for item in self.items[start : start + _SLICE]]


def encode_in_slices(value: Any) -> bytes:
    """A response as JSON, without fields that were not set (``ResponseModel.encode``)."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields if name in value.model_fields_set}
    if isinstance(value, LazyList):
        yield from _list(to_json(entries)[1:-1] for entries in value.slices())
    elif isinstance(value, dict):
        separator = b"{"
        for name, entry in value.items():
            yield separator + to_json(name) + b":"
            yield from _pieces(entry)
            separator = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel) and len(value) > _SLICE:
        # Each of many entries is small.
        yield from _list(entry.model_dump_json(exclude_unset=True).encode() for entry in value)
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        yield from _list(b"".join(_pieces(entry)) for entry in value)
    elif isinstance(value, list) and len(value) > _SLICE:
        starts = range(0, len(value), _SLICE)
        yield from _list(to_json(value[start : start + _SLICE])[1:-1] for start in starts)
    else:
        yield to_json(value)


def _list(entries: Iterator[bytes]) -> Iterator[bytes]:
    separator = b"["
    for entry in entries:
        yield separator
        yield entry
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def num_logprobs(outputs: Sequence[RequestOutput]) -> int:
    """Logprobs in outputs: of prompt and generated tokens, and of their likeliest alternatives."""
    lists = [output.prompt_logprobs for output in outputs]
    lists += [completion.logprobs for output in outputs for completion in output.outputs]  # type: ignore[misc]
    # The positions of one list have about the same number.
    return sum(len(positions) * len(positions[-1] or ()) for positions in lists if positions)


async def run_if_large(size: int, call: Callable[..., T], *args: Any) -> T:
    """The result of a call that makes an answer with ``size`` logprobs; large ones are made in a thread."""
    return call(*args) if size < LARGE else await _writer.run(call, *args)


DONE = b"data: [DONE]\n\n"
#: Seconds that sending an error at the end of a stream may take.
_ERROR_SEND_TIMEOUT = 5.0


def event(content: ResponseModel) -> bytes:
    return b"data: " + content.encode() + b"\n\n"


def large_event(content: ResponseModel) -> bytes:
    """``event`` for a content that may be large or hold a ``LazyList``."""
    return b"data: " + encode_in_slices(content) + b"\n\n"


class EventStream(Response):
    """A response of server-sent events; a disconnect or the deadline closes the generator, which aborts the request.

    A failure before the first event is an ordinary error response; a later one is an event, without ``[DONE]``.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        deadline: float | None,
        failure: Callable[[ApiError], bytes] = lambda error: b"data: " + error.body() + b"\n\n",
    ) -> None:
        """Owns ``events``; ``deadline`` is on the loop's clock, None: none; ``failure`` makes the event of an error."""
        # Proxies must not buffer the stream.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._deadline, self._failure = events, deadline, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            # A client that does not read blocks this only for a while; then the server closes the connection.
            async with asyncio.timeout(_ERROR_SEND_TIMEOUT):
                await send({"type": "http.response.body", "body": self._failure(error)})


# A request in the engine and its response: complete, or as a stream of events.

Event = dict[str, Any]


class PendingResponse(ABC):
    """A request of a route that generates; either ``complete`` or ``stream`` is called, once."""

    @abstractmethod
    async def complete(self) -> bytes:
        """The complete response, as JSON."""

    @abstractmethod
    def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed response."""

    def failure(self, error: ApiError) -> bytes:
        """The event of a stream that fails."""
        return b"data: " + error.body() + b"\n\n"

    async def respond(self, request: Request, streams: bool | None, deadline: float) -> Response:
        """The response, until a ``deadline`` on the loop's clock."""
        if streams:
            return EventStream(self.stream(), deadline, self.failure)
        body = await with_cancellation(request.receive, self.complete(), deadline)
        return Response(body, media_type="application/json")


class PendingChat(PendingResponse):
    """A chat with one choice on a route that has its own names of fields, and whose events have names."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    @abstractmethod
    def grow(self, choice: ChoiceEvents) -> list[Event]:
        """Adds an increment of the choice; returns its events."""

    @abstractmethod
    def encode(self) -> bytes:
        """The response as far as it has grown, as JSON."""

    async def complete(self) -> bytes:
        async with aclosing(self.chat.outputs()) as outputs:
            async for [choice] in outputs:
                self.grow(choice)
        return self.encode()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.chat.outputs()) as outputs:
            async for [choice] in outputs:
                if events := self.grow(choice):
                    yield b"".join(map(encode_event, events))


def encode_event(event: Event) -> bytes:
    data = json.dumps(event, separators=(",", ":"))  # in ASCII: see ApiError.body
    return f"event: {event['type']}\ndata: {data}\n\n".encode()
