"""Server-sent events: a response that is sent while it is generated, as fast as the client reads."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.core.outputs import RequestOutput
from octavo.server.http.errors import ApiError, as_api_error, renamed_outputs
from octavo.server.logging import log_fields

if TYPE_CHECKING:
    from octavo.server.chat import Chat, ChoiceEvents
    from octavo.server.fields import ResponseModel


# Work that ends when the client disconnects or a deadline passes.


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


# Large answers: made and encoded beside the event loop, in slices.

T = TypeVar("T")

#: Logprobs from which on an answer is large; fewer take some milliseconds.
LARGE = 4096
#: Entries of a list that are encoded at once.
_SLICE = 64

#: A single thread: an answer waits rather than the event loop.
_writer = ThreadPoolExecutor(1, thread_name_prefix="octavo-answers")


class LazyList:
    """A list in an answer whose entries are made when they are encoded, so that they never exist all at once."""

    def __init__(self, items: Sequence[Any], convert: Callable[[Any], Any]) -> None:
        """``convert`` makes an entry of an item."""
        self._items, self._convert = items, convert

    def slices(self) -> Iterator[list[Any]]:
        """The entries in their order, a few at a time."""
        for start in range(0, len(self._items), _SLICE):
            yield [self._convert(item) for item in self._items[start : start + _SLICE]]


def encode_in_slices(value: Any) -> bytes:
    """A response as JSON, without fields that were not set, as ``ResponseModel.encode`` has it."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        given = value.model_fields_set
        value = {name: getattr(value, name) for name in type(value).model_fields if name in given}
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
        # Of many each is small.
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
    """How many logprobs there are in outputs: of the tokens of prompts and completions, and of the likeliest ones."""
    lists = [output.prompt_logprobs for output in outputs]
    lists += [completion.logprobs for output in outputs for completion in output.outputs]  # type: ignore[misc]
    # Positions of one list have about as many.
    return sum(len(found) * len(found[-1] or ()) for found in lists if found)


async def run_if_large(size: int, call: Callable[..., T], *args: Any) -> T:
    """The result of a call that makes an answer with ``size`` logprobs; in another thread if that is large."""
    if size < LARGE:
        return call(*args)
    return await asyncio.get_running_loop().run_in_executor(_writer, copy_context().run, call, *args)


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


# A request in the engine and its response: whole, or as a stream of events.

Event = dict[str, Any]


class PendingResponse(ABC):
    """What every route that generates does with a request: one of the two methods is called, once."""

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

    #: Fields of a chat to those of the route.
    names: ClassVar[Mapping[str, str]]

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    @abstractmethod
    def grow(self, choice: ChoiceEvents) -> list[Event]:
        """Takes an increment of the choice: the events that tell of it."""

    @abstractmethod
    def encode(self) -> bytes:
        """The response as far as it has grown, as JSON."""

    async def complete(self) -> bytes:
        """See ``PendingResponse``."""
        async with aclosing(renamed_outputs(self.chat, self.names)) as outputs:
            async for choice in outputs:
                self.grow(choice)
        return self.encode()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """See ``PendingResponse``."""
        async with aclosing(renamed_outputs(self.chat, self.names)) as outputs:
            async for choice in outputs:
                if events := self.grow(choice):
                    yield b"".join(map(encode_event, events))


def encode_event(event: Event) -> bytes:
    """As a server-sent event, with its type as name."""
    data = json.dumps(event, separators=(",", ":"))  # in ASCII: see ApiError.body
    return f"event: {event['type']}\ndata: {data}\n\n".encode()
