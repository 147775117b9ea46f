"""Bodies of requests: read and validated by pydantic; large ones are counted first and read in a thread.

JSON of 8 MB can hold four million values. Parsing and validating them takes seconds, in calls that give no other thread
a turn, not even the event loop; counting them takes a hundredth of it.

msgspec would be imported and decode faster, but (0.22) it tells the first mistake only, without its value ("Expected
`int`, got `str` - at `$.a`"), and its unions allow neither two lists (a prompt is texts or token ids) nor two objects
without a tag. The options are models of pydantic in any case. Processor time of the imports, the least of five
(``python -c "import time; t = time.process_time(); import pydantic; print(time.process_time() - t)"``): pydantic
0.028 s, msgspec 0.019 s, starlette.applications 0.058 s, fastapi 0.188 s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from octavo.core.errors import did_you_mean
from octavo.process.children import WorkThread
from octavo.server.fields import REFUSED
from octavo.server.http.errors import NOT_AN_OBJECT, UNSUPPORTED, ApiError, invalid
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from octavo.server.state import models_of, state_of

if TYPE_CHECKING:
    from octavo.config.server_options import ServerOptions


M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

_ROUTES: dict[type[BaseModel], str] = {
    CompletionRequest: "/v1/completions",
    ChatCompletionRequest: "/v1/chat/completions",
}


class BodyRules(Protocol):
    """How bodies are read: by a ``ServerState``, or for requests about no model by a ``ModelSet``."""

    @property
    def options(self) -> ServerOptions: ...
    @property
    def sees_images(self) -> bool: ...
    @property
    def max_model_len(self) -> int: ...
    def note_unknown(self, name: str) -> None: ...


def read_model(kind: type[M], value: Any, service: BodyRules) -> M:
    """A request's model.

    Unknown fields that are null or empty are left out. With ``unknown_fields: ignore`` all unknown and unsupported
    fields are, and each is logged once. They are deleted from ``value``, the parsed body.
    """
    context = {"sees_images": service.sees_images}
    while True:
        try:
            return kind.model_validate(value, context=context)
        except ValidationError as e:
            errors = e.errors(include_url=False)
        left_out = [error for error in errors if _may_be_left_out(error, service)]
        for error in reversed(left_out):  # the last entry of a list first, as later ones move up
            path = _path(value, error["loc"], exists=True)
            assert path
            *holder, name = path
            reduce(getitem, holder, value).pop(name)
            if error["type"] == REFUSED or not _is_empty(error):
                service.note_unknown(str(error["loc"][-1]))
        if not left_out:
            raise _error_to_report(kind, value, errors)


def _may_be_left_out(error: ErrorDetails, service: BodyRules) -> bool:
    """Whether the field is unknown, or unsupported, and the options or its value allow to leave it out."""
    if error["type"] == REFUSED:  # the values of supported fields can be refused too, such as the type of a part
        return service.options.unknown_fields == "ignore" and bool(error["ctx"].get("is_field"))
    if error["type"] != "extra_forbidden":
        return False
    return _is_empty(error) or service.options.unknown_fields == "ignore"


def _is_empty(error: ErrorDetails) -> bool:
    """Whether an unknown field is null or, within another, empty."""
    value = error["input"]
    return value is None or (len(error["loc"]) > 1 and (value is False or value in ("", [], {})))


def _path(value: Any, where: Sequence[int | str], *, exists: bool) -> list[int | str] | None:
    """The path of an error without the members of unions, which are no fields; None: it does not exist, but has to."""
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


def _error_to_report(kind: type[BaseModel], value: Any, errors: Sequence[ErrorDetails]) -> ApiError:
    """The deepest error of the first field that is wrong."""
    if not errors[0]["loc"]:
        return ApiError(400, NOT_AN_OBJECT, code="invalid_json")
    of_field = [error for error in errors if error["loc"][0] == errors[0]["loc"][0]]
    error = max(of_field, key=lambda error: (error["type"] == REFUSED, len(error["loc"])))
    path = _path(value, error["loc"], exists=True) or _path(value, error["loc"], exists=False) or error["loc"]
    place, field = _place(path), str(path[0])[:100]
    if error["type"] == "extra_forbidden":
        message = f"{place}: the field is unknown here" if len(path) > 1 else _describe_unknown(kind, field)
        return invalid(field, message, "unknown_parameter")
    if error["type"] == REFUSED:
        return invalid(field, f"{place} is not supported{error['msg']}", UNSUPPORTED)
    if error["type"] == "union_tag_invalid":
        name, tag, tags = (str(error["ctx"][part]) for part in ("discriminator", "tag", "expected_tags"))
        message = f"{place}.{name.strip(chr(39))} is not supported: {tag[:100]!r} is none of {tags}"
        return invalid(field, message, UNSUPPORTED)
    if error["type"] == "missing":
        problem = "it is missing"
    elif error["type"] == "union_tag_not_found":
        problem = f"it has no {error['ctx']['discriminator']}"
    else:
        value = f", not {error['input']!r:.100}" if error["type"] == "literal_error" else ""
        problem = f"{error['msg'].removeprefix('Value error, ')}{value}"
    return invalid(field, f"{place}: {problem}")


def _describe_unknown(kind: type[BaseModel], name: str) -> str:
    """Names the route that has the field, or a field with a similar name."""
    route = next((route for model, route in _ROUTES.items() if name in model.model_fields), None)
    near = did_you_mean(name, kind.model_fields, "/docs lists all fields", written=str)
    return f"unknown field {name!r}; {f'it is of {route}' if route else near}"


def _place(path: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part[:100]}" for part in path).removeprefix(".")


#: Bytes from which on a body is large; a smaller one is read in a few milliseconds whatever it holds.
LARGE = 64 << 10
#: Most texts (names of fields included), objects and lists in a body.
MAX_PARTS = 1 << 16
#: Most entries of all lists and objects, such as token ids; or twice the context, where that is more.
MAX_ENTRIES = 1 << 19

_reader = WorkThread("bodies")


async def read_request(request: Request, kind: type[M], task: str | None = None) -> M:
    """The body of a request whose model must support the ``task``; a large one is read in a thread."""
    body = await request.body()
    if "json" not in request.headers.get("content-type", "") and getattr(kind, "needs_content_type", True):
        raise ApiError(400, NOT_AN_OBJECT, code="invalid_json")
    models = models_of(request)
    service: BodyRules
    if models is not None and "service" not in request.scope["state"]:
        service = models
    else:
        service = state_of(request)
        if task is not None:
            service.require(task)
    if len(body) < LARGE:
        return read_body(kind, body, service)
    request.state.has_large_body = True
    return await _reader.run(_read_large, kind, body, service)


async def run_in_thread_if_large(request: Request, call: Callable[..., T], *args: Any) -> T:
    """The result of a call whose time grows with the request's body; it runs in a thread if the body is large."""
    is_large = getattr(request.state, "has_large_body", False)
    return await _reader.run(_then_rest, call, *args) if is_large else call(*args)


def _then_rest(call: Callable[..., T], *args: Any) -> T:
    """The result of a call that gives other threads no turn; the event loop then has a turn as long as the call."""
    begun = time.perf_counter()
    try:
        return call(*args)
    finally:
        time.sleep(time.perf_counter() - begun)


def _read_large(kind: type[M], body: bytes, service: BodyRules) -> M:
    _then_rest(check_size, body, max(MAX_ENTRIES, 2 * service.max_model_len))
    return _then_rest(read_body, kind, body, service)


def read_body(kind: type[M], body: bytes, service: BodyRules) -> M:
    try:
        # check_size counts UTF-8; JSON in another encoding shows it by its first bytes.
        value = json.loads(body if len(body) < LARGE else body.decode("utf-8", "surrogatepass"))
    except json.JSONDecodeError as e:
        raise ApiError(400, f"the body is not valid JSON: {e.msg} at character {e.pos}", code="invalid_json") from None
    except (ValueError, RecursionError) as e:
        reasons = {RecursionError: "it is nested too deeply", UnicodeDecodeError: "it is not in UTF-8"}
        reason = reasons.get(type(e), "a number has too many digits")
        raise ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from None
    return read_model(kind, value, service)


def check_size(body: bytes, max_entries: int = MAX_ENTRIES) -> None:
    """Refuses a body with too many values, counted up to the mistake at which a parser would stop."""
    # Once escaped quotes are removed, each quote begins or ends a text. (A pair of backslashes escapes no quote.)
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts, entries = plain.count(b'"') // 2, 0
    if parts <= MAX_PARTS:
        outside = b"".join(plain.split(b'"')[::2])
        parts += outside.count(b"{") + outside.count(b"[")
        entries = outside.count(b",")
    limits = ((parts, MAX_PARTS, "texts, objects and lists"), (entries, max_entries, "entries of lists"))
    for count, most, noun in limits:
        if count > most:
            message = f"the body holds more than {most} {noun}; send it in several requests"
            raise ApiError(400, message, code="too_many_values")
