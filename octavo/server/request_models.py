"""Requests as models: which mistake in a body is told, and what becomes of fields that the model does not know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from octavo.core.near_names import did_you_mean
from octavo.server.api_errors import ApiError, invalid, unsupported
from octavo.server.field_marks import REFUSED
from octavo.server.protocol import ChatCompletionRequest, CompletionRequest
from octavo.server.service import Service

M = TypeVar("M", bound=BaseModel)

_ROUTES: dict[type[BaseModel], str] = {
    CompletionRequest: "/v1/completions",
    ChatCompletionRequest: "/v1/chat/completions",
}


def read_model(kind: type[M], value: Any, service: Service) -> M:
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


def _may_be_left_out(error: ErrorDetails, service: Service) -> bool:
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
