"""Objects within a request's body, taken apart by name: what is left over at the end is refused, not ignored."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar, overload

from octavo.server.api_errors import ApiError, unsupported

T = TypeVar("T")
D = TypeVar("D")

_REQUIRED: Any = object()
_NAMES = {str: "a text", bool: "true or false", int: "an integer", float: "a number", dict: "an object", list: "a list"}


def wrong(where: str, message: str) -> ApiError:
    """The error for a value at a place such as ``input[0].content``, whose first part is the field's name."""
    return ApiError(400, f"{where}: {message}", param=_field(where), code="invalid_value")


def not_supported(where: str, message: str) -> ApiError:
    """The error for what is well-formed and not supported."""
    return unsupported(_field(where), f"{where} is not supported: {message}")


class BodyPart:
    """An object of a body, and its place."""

    def __init__(self, where: str, value: Any) -> None:
        """``where`` is the place, such as ``tools[0]``.

        Raises:
            ApiError: 400, the value is no object.
        """
        if not isinstance(value, dict):
            raise wrong(where, "it must be an object")
        self.where = where
        # Null stands for the default everywhere.
        self._left = {name: entry for name, entry in value.items() if entry is not None}

    def at(self, name: str) -> str:
        """The place of a field."""
        return f"{self.where}.{name[:100]}"

    @overload
    def take(self, name: str, kind: type[T]) -> T: ...

    @overload
    def take(self, name: str, kind: type[T], default: D) -> T | D: ...

    def take(self, name: str, kind: type[Any], default: Any = _REQUIRED) -> Any:
        """A field's value, which must be of this type; without a default it must be there.

        Raises:
            ApiError: 400, naming the place.
        """
        if name not in self._left:
            if default is not _REQUIRED:
                return default
            raise wrong(self.at(name), "it is missing")
        value = self._left.pop(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise wrong(self.at(name), f"it must be {_NAMES.get(kind, kind.__name__)}")
        return value

    def take_any(self, name: str, default: Any = None) -> Any:
        """A field's value of whatever type."""
        return self._left.pop(name, default)

    def choice(self, name: str, known: Collection[str]) -> str:
        """A text that must be there, and is one of these.

        Raises:
            ApiError: 400, naming the place and those that are known.
        """
        value = self.take(name, str)
        if value not in known:
            raise wrong(self.at(name), f"{value[:100]!r} is none of {', '.join(sorted(known))}")
        return value

    def refuse_rest(self, *harmless: str, reason: str = "the field is unknown here") -> None:
        """Refuses the fields that were not taken, but for harmless ones, and false or empty values.

        Raises:
            ApiError: 400, naming the first.
        """
        for name, value in self._left.items():
            if name not in harmless and value not in (False, "", [], {}):
                raise not_supported(self.at(name), reason)


def entries(where: str, value: Any) -> list[BodyPart]:
    """The objects of a list.

    Raises:
        ApiError: 400, it is no list, or holds something else.
    """
    if not isinstance(value, list):
        raise wrong(where, "it must be a list")
    return [BodyPart(f"{where}[{i}]", entry) for i, entry in enumerate(value)]


def _field(where: str) -> str:
    return where.split(".", 1)[0].split("[", 1)[0]
