"""The base of the parts of the engine's options, and options that are mappings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.core.near_names import did_you_mean


class OptionPart(BaseModel):
    """A part: unknown names are refused, and nothing changes after it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)


def read_mapping(value: Any, example: str) -> Any:
    """The fields that an option gives, as a mapping or as one in JSON or YAML; without those that are None.

    Anything else that ``OptionPart`` or None is comes back as it is.

    Raises:
        ValueError: it is no mapping.
    """
    if isinstance(value, str):
        import yaml  # rarely needed

        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"it must be a mapping such as {example}") from None
    if value is None or isinstance(value, OptionPart):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"it must be a mapping such as {example}")
    return {str(name): field for name, field in value.items() if field is not None}


def make_part(kind: type[OptionPart], fields: Mapping[str, Any]) -> OptionPart:
    """The part with these fields.

    Raises:
        ValueError: a field is unknown or wrong, with its name, its value and what would be right.
    """
    names = list(kind.model_fields)
    for name in fields:
        if name not in names:
            raise ValueError(f"unknown field {name!r}; {did_you_mean(name, names)}")
    try:
        return kind(**fields)
    except ValidationError as e:
        raise ValueError("; ".join(readable(dict(error)) for error in e.errors())) from None


def readable(error: dict[str, Any]) -> str:
    """An error of pydantic in words: the field, what is wrong, and its value."""
    where = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}, not {error['input']!r}" if where else message
