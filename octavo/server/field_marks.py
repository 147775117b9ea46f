"""Marks of fields that other servers know and this one does not obey: hints, and fields that are refused.

A field of a request's model without a mark is *obeyed*. A *hint* is accepted with any value, since by its nature it
changes nothing here: labels, marks for caches, wishes about a service's tiers. What would change the answer and cannot
be obeyed is *refused* by its name, with the reason and what to do instead. So no field is ignored that a client relies
on, and no client fails on a field that is harmless. With ``unknown_fields: ignore`` the operator decides otherwise:
refused fields are left out, as unknown ones are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticOmit, core_schema

#: Type of the error of a refused field, which is what it says beside the field's place.
REFUSED = "refused_field"


@dataclass(frozen=True, slots=True)
class Hint:
    """A field that is accepted with any value, without effect."""

    #: Why there is none.
    reason: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Any value."""
        return core_schema.any_schema()

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The reason as the description."""
        return {**handler(schema), "description": f"Accepted, without effect: {self.reason}."}


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused, but for null and for values that ask for what happens anyway."""

    #: What to do instead, or what it is that the server does not do.
    reason: str
    accepted: tuple[Any, ...] = ()

    def check(self, value: Any) -> Any:
        """Refuses a value.

        Raises:
            PydanticCustomError: of the type ``REFUSED``.
        """
        is_bool = isinstance(value, bool)
        if value is None or any(value == allowed and isinstance(allowed, bool) == is_bool for allowed in self.accepted):
            return None
        context = {"besides": self.besides, "reason": self.reason, "is_field": True}
        raise PydanticCustomError(REFUSED, "{besides}: {reason}", context)

    @property
    def besides(self) -> str:
        """The values that are accepted, in words; empty: none that says anything."""
        values = " or ".join(repr(value) for value in self.accepted if value not in ("", [], {}))
        return f", except {values}" if values else ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """See ``check``."""
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The OpenAPI description has no fields that are refused."""
        raise PydanticOmit


Mark = Hint | Refused


def hint(reason: str) -> Any:
    """A field that is accepted with any value; ``reason`` says why it has no effect."""
    return _marked(Hint(reason))


def refused(reason: str, *accepted: Any) -> Any:
    """A field that is refused, but for null and ``accepted`` values; ``reason`` says what to do instead."""
    return _marked(Refused(reason, accepted))


def _marked(mark: Mark) -> Any:
    field: Any = Field(None)
    # Where Field puts its own constraints, such as gt.
    field.metadata.append(mark)
    return field


def marks_of(model: type[BaseModel]) -> dict[str, Mark | None]:
    """The mark of each field of a model; None: it is obeyed."""
    return {
        name: next((mark for mark in field.metadata if isinstance(mark, Hint | Refused)), None)
        for name, field in model.model_fields.items()
    }
