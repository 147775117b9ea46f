"""Large bodies: what is in them is counted before anything is made of it, and they are read beside the event loop.

JSON of 8 MB can hold four million values. To parse and validate them takes seconds, in calls that give no other thread
a turn, not even the event loop. To count them takes a hundredth of it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import did_you_mean
from octavo.server.fields import REFUSED
from octavo.server.http.errors import ApiError, invalid, unsupported
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from octavo.server.state import state_of

if TYPE_CHECKING:
    from octavo.server.state import ServerState


# Requests as models: which mistake in a body is told, and what becomes of fields that the model does not know.

M = TypeVar("M", bound=BaseModel)

_ROUTES: dict[type[BaseModel], str] = {
    CompletionRequest: "/v1/completions",
    ChatCompletionRequest: "/v1/chat/completions",
}


def read_model(kind: type[M], value: Any, service: ServerState) -> M:
    """A request's model.

    Unknown fields that say nothing are left out; with ``unknown_fields: ignore`` the others too, and those that are
    known and not supported, and they are logged once.

    Args:
        kind: the model of the route.
        value: the body, parsed; unknown fields that are left out are deleted from it.
        service: the service.

    Raises:
        ApiError: 400, naming the first field that is wrong and what is wrong with it.
    """
    context = {"sees_images": service.images.are_seen}
    while True:
        try:
            return kind.model_validate(value, context=context)
        except ValidationError as e:
            errors = e.errors(include_url=False)
        left_out = [error for error in errors if _may_be_left_out(error, service)]
        for error in reversed(left_out):  # entries of a list: the last one first, as the others move up
            _delete(value, error["loc"])
            if error["type"] == REFUSED or not _says_nothing(error):
                service.note_unknown(str(error["loc"][-1]))
        if not left_out:
            raise _told(kind, value, errors)


def _may_be_left_out(error: ErrorDetails, service: ServerState) -> bool:
    """Whether a field may be: an unknown one, or one that is known here and not supported."""
    if error["type"] == REFUSED:  # which values of supported fields may be too, such as the type of a part
        return service.options.unknown_fields == "ignore" and bool(error["ctx"].get("is_field"))
    if error["type"] != "extra_forbidden":
        return False
    return _says_nothing(error) or service.options.unknown_fields == "ignore"


def _says_nothing(error: ErrorDetails) -> bool:
    """Whether an unknown field is null, or, within another, empty."""
    value = error["input"]
    return value is None or (len(error["loc"]) > 1 and (value is False or value in ("", [], {})))


def _delete(value: Any, where: Sequence[int | str]) -> None:
    """Deletes a field that exists."""
    path = _path(value, where, exists=True)
    assert path
    *holder, name = path
    for part in holder:
        value = value[part]
    del value[name]


def _path(value: Any, where: Sequence[int | str], *, exists: bool) -> list[int | str] | None:
    """The place of an error without the names of the members of unions, which are no fields of the value.

    None: there is no such place, where it has to exist.
    """
    if not where:
        return []
    first, *rest = where
    is_entry = isinstance(value, list) and isinstance(first, int) and first < len(value)
    if is_entry or (isinstance(value, dict) and first in value):
        below = _path(value[first], rest, exists=exists)
        if below is not None:
            return [first, *below]
    if rest:
        return _path(value, rest, exists=exists)
    return None if exists else [first] if isinstance(value, dict) else []


def _told(kind: type[BaseModel], value: Any, errors: Sequence[ErrorDetails]) -> ApiError:
    """The error that says most: of the first field that is wrong, the one that lies deepest."""
    if not errors[0]["loc"]:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        return ApiError(400, message, code="invalid_json")
    of_field = [error for error in errors if error["loc"][0] == errors[0]["loc"][0]]
    error = max(of_field, key=lambda error: (error["type"] == REFUSED, len(error["loc"])))
    path = _path(value, error["loc"], exists=True) or _path(value, error["loc"], exists=False) or error["loc"]
    place, field = _place(path), str(path[0])[:100]
    if error["type"] == "extra_forbidden":
        message = f"{place}: the field is unknown here" if len(path) > 1 else _unknown(kind, field)
        return invalid(field, message, "unknown_parameter")
    if error["type"] == REFUSED:
        return unsupported(field, f"{place} is not supported{error['msg']}")
    if error["type"] == "union_tag_invalid":
        name, tag, tags = (str(error["ctx"][part]) for part in ("discriminator", "tag", "expected_tags"))
        return unsupported(field, f"{place}.{name.strip(chr(39))} is not supported: {tag[:100]!r} is none of {tags}")
    return invalid(field, f"{place}: {_words(error)}")


def _words(error: ErrorDetails) -> str:
    """What is wrong with a value, and the value where it is one of a few that it may be."""
    if error["type"] in ("missing", "union_tag_not_found"):
        return "it is missing" if error["type"] == "missing" else f"it has no {error['ctx']['discriminator']}"
    value = f", not {error['input']!r:.100}" if error["type"] == "literal_error" else ""
    return f"{error['msg'].removeprefix('Value error, ')}{value}"


def _unknown(kind: type[BaseModel], name: str) -> str:
    """Where a field exists that the route does not know, or what its name may have been meant to be."""
    if route := next((route for model, route in _ROUTES.items() if name in model.model_fields), None):
        hint = f"it is of {route}"
    else:
        hint = did_you_mean(name, kind.model_fields, "/docs lists all fields", written=str)
    return f"unknown field {name!r}; {hint}"


def _place(path: Sequence[int | str]) -> str:
    """Such as ``messages[0].role``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part[:100]}" for part in path).removeprefix(".")


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
            service = state_of(request)
            if self.task is not None:
                service.require(self.task)
            if len(body) < LARGE:
                parsed = read_body(kind, body, service)
            else:
                parsed = await _in_thread(read_large, kind, body, service)
            return await handle(ReadRequest(request, body, parsed))

        return read_and_handle


async def run_in_thread_if_large(request: Request, call: Callable[..., T], *args: Any) -> T:
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


def read_large(kind: type[BaseModel], body: bytes, service: ServerState) -> BaseModel:
    """As ``read_body``; what is in the body is counted first.

    Raises:
        ApiError: 400, there is too much in it; or as ``read_body``.
    """
    _then_rest(check_size, body, max(MAX_ENTRIES, 2 * service.llm.max_model_len))
    return _then_rest(read_body, kind, body, service)


def read_body(kind: type[BaseModel], body: bytes, service: ServerState) -> BaseModel:
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
