"""Large bodies: what is in them is counted before anything is made of it, and they are read beside the event loop.

JSON of 8 MB can hold four million values. To parse and validate them takes seconds, in calls that give no other thread
a turn, not even the event loop. To count them takes a hundredth of it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.api_errors import ApiError
from octavo.server.request_models import read_model
from octavo.server.service import Service, service_of

T = TypeVar("T")

#: Bytes from which on a body is large; a smaller one is read in a few milliseconds whatever is in it.
LARGE = 64 << 10
#: Most texts (names of fields included), objects and lists in a body.
MAX_PARTS = 1 << 16
#: Most entries of all lists and objects, such as token ids; or twice the context, where that is more.
MAX_ENTRIES = 1 << 19

#: A single thread: of several that wait for their turn after a call, each may come before the event loop.
_reader = ThreadPoolExecutor(1, thread_name_prefix="octavo-bodies")


class ReadRequest(Request):
    """A request whose body has been read; FastAPI gets it as a valid model."""

    def __init__(self, request: Request, body: bytes, parsed: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body
        self._parsed = parsed

    @property
    def is_large(self) -> bool:
        """Whether the body is."""
        return len(self._body) >= LARGE

    async def json(self) -> BaseModel:
        """The body as the model of its route."""
        return self._parsed


class BodyRoute(APIRoute):
    """A route whose bodies are read by ``read_body``: large ones beside the event loop."""

    #: What the model must be able to do; None: nothing.
    task: str | None = None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See ``APIRoute``."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind: Any = self.body_field.field_info.annotation

        async def read_and_handle(request: Request) -> Response:
            body = await request.body()
            # FastAPI refuses what is not declared as JSON, without looking into it.
            if "json" not in request.headers.get("content-type", ""):
                return await handle(request)
            service = service_of(request)
            if self.task is not None:
                service.require(self.task)
            if len(body) < LARGE:
                parsed = read_body(kind, body, service)
            else:
                parsed = await _in_thread(read_large, kind, body, service)
            return await handle(ReadRequest(request, body, parsed))

        return read_and_handle


async def beside_loop(request: Request, call: Callable[..., T], *args: Any) -> T:
    """The result of a call whose time grows with the request's body: if that is large, it is made in another thread."""
    is_large = isinstance(request, ReadRequest) and request.is_large
    return await _in_thread(_then_rest, call, *args) if is_large else call(*args)


async def _in_thread(call: Callable[..., T], *args: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_reader, copy_context().run, call, *args)


def _then_rest(call: Callable[..., T], *args: Any) -> T:
    """The result of a call in which no other thread has a turn; before the next one the event loop has as long."""
    begun = time.perf_counter()
    try:
        return call(*args)
    finally:
        time.sleep(time.perf_counter() - begun)


def read_large(kind: type[BaseModel], body: bytes, service: Service) -> BaseModel:
    """As ``read_body``; what is in the body is counted first.

    Raises:
        ApiError: 400, there is too much in it; or as ``read_body``.
    """
    _then_rest(check_size, body, max(MAX_ENTRIES, 2 * service.llm.max_model_len))
    return _then_rest(read_body, kind, body, service)


def read_body(kind: type[BaseModel], body: bytes, service: Service) -> BaseModel:
    """The body of a request as a model.

    Raises:
        ApiError: 400, it is no JSON, not valid, or has a field that the route does not know.
    """
    try:
        # Of a large body the values were counted as UTF-8; JSON in other encodings is told by its first bytes.
        value = json.loads(body if len(body) < LARGE else body.decode("utf-8", "surrogatepass"))
    except json.JSONDecodeError as e:
        raise ApiError(400, f"the body is not valid JSON: {e.msg} at character {e.pos}", code="invalid_json") from None
    except (ValueError, RecursionError) as e:
        of_kind = {RecursionError: "it is nested too deeply", UnicodeDecodeError: "it is not in UTF-8"}
        reason = of_kind.get(type(e), "a number has too many digits")
        raise ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from None
    return read_model(kind, value, service)


def check_size(body: bytes, max_entries: int = MAX_ENTRIES) -> None:
    """Refuses JSON in which there is too much; whether it is JSON is not looked at.

    Up to its first mistake, where a parser ends, all is counted that a parser would make.

    Raises:
        ApiError: 400.
    """
    # Without escaped ones, each quote begins or ends a text. (A pair of backslashes is one, which escapes no quote.)
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts, entries = plain.count(b'"') // 2, 0
    if parts <= MAX_PARTS:
        outside = b"".join(plain.split(b'"')[::2])
        parts += outside.count(b"{") + outside.count(b"[")
        entries = outside.count(b",")
    for count, most, what in (
        (parts, MAX_PARTS, "texts, objects and lists"),
        (entries, max_entries, "entries of lists"),
    ):
        if count > most:
            message = f"the body holds more than {most} {what}; send it in several requests"
            raise ApiError(400, message, code="too_many_values")
