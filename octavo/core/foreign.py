"""What options, keywords, parameters and request fields of other engines mean here: ``foreign.json``.

Each row has places (``options``, ``keywords``, ``prompt``, classes of parameters, models of request bodies), names that
callers use there, and the reason. ``without_effect``: accepted with any value; ``flags`` are options that are on or
off. ``refused``: accepted if they are null, or have a value that asks for what happens anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from octavo.core.errors import ConfigError, InvalidRequestError, UnexpectedKeywordError, did_you_mean


class Foreign(NamedTuple):
    """The accepted values beside None (None: any value), and why others are refused, or why it has no effect."""

    accepted: tuple[Any, ...] | None
    reason: str

    @property
    def boolean(self) -> bool:
        """Whether it is a flag without a value."""
        return isinstance(self.default, bool)

    @property
    def default(self) -> Any:
        """The first accepted value."""
        return next(iter(self.accepted or ()), None)

    def accepts(self, value: object) -> bool:
        if value is None or self.accepted is None:  # None counts as not given
            return True
        # bool is a subclass of int, but True is no number here.
        return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in self.accepted)

    def refusal(self, name: str, value: object) -> str | None:
        """Why the value is not accepted, or None if it is."""
        if self.accepts(value):
            return None
        *first, last = map(repr, self.accepted or (None,))
        allowed = f"{', '.join(first)} or {last}" if first else last
        return f"{name} must be {allowed}, not {value!r}" + (f": {self.reason}" if self.reason else "")


class _Table(msgspec.Struct):
    without_effect: list[tuple[str, str, str]]
    refused: list[tuple[str, str | dict[str, list[Any]], str]]
    other_names: dict[str, str]
    other_values: dict[str, dict[str, str]]
    #: Flags of other engines, and ours, with a value or without: of several, the first one that the command has.
    other_flags: list[tuple[str, str]]
    #: Our flag -> values of another engine's flag -> ours.
    flag_values: dict[str, dict[str, str]]
    #: Flags without a counterpart, and what to do instead.
    absent_flags: list[tuple[str, str]]


def _by_place(table: _Table) -> dict[str, dict[str, Foreign]]:
    places: dict[str, dict[str, Foreign]] = {}
    for where, names, reason in table.without_effect:
        for place in where.split():
            entry = Foreign((False, True) if place == "flags" else None, reason)
            places.setdefault(place, {}).update(dict.fromkeys(names.split(), entry))
    for where, fields, reason in table.refused:
        accepted = dict.fromkeys(fields.split(), ()) if isinstance(fields, str) else fields
        for place in where.split():
            entries = {name: Foreign(tuple(values), reason) for name, values in accepted.items()}
            places.setdefault(place, {}).update(entries)
    return places


_table = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=_Table)
#: Name -> meaning, by place.
FOREIGN = _by_place(_table)
FOREIGN_OPTIONS = FOREIGN["flags"] | FOREIGN["options"]
#: Other names of options, and of an option's values.
OTHER_NAMES, ALIASES = _table.other_names, _table.other_values
#: Flag of another engine -> our flags, and our flag -> other values -> our values.
OTHER_FLAGS = {name: ours.split() for names, ours in _table.other_flags for name in names.split()}
FLAG_VALUES = _table.flag_values
#: Flag without a counterpart -> what to do instead.
ABSENT_FLAGS = {name: instead for names, instead in _table.absent_flags for name in names.split()}


def own_value(name: str, value: Any) -> Any:
    """The option's value by its name here: ``float16`` for ``half`` and for ``torch.float16``."""
    if type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    return ALIASES.get(name, {}).get(value, value) if isinstance(value, str) else value


def own_name(name: str) -> str:
    """The option's name here."""
    return OTHER_NAMES.get(name, name)


def own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one source by their names here; raises ConfigError if two names mean one option."""
    by_name: dict[str, Any] = {}
    for name, value in options.items():
        if own_name(name) in by_name:
            raise ConfigError(f"option {own_name(name)!r} is given twice, by different names")
        by_name[own_name(name)] = value
    return by_name


def own_options(options: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The options without ``FOREIGN_OPTIONS``, by their names here; raises ConfigError for refused values."""
    values = {}
    for name, value in options.items():
        if name in FOREIGN_OPTIONS:
            if (problem := FOREIGN_OPTIONS[name].refusal(name, value)) is not None:
                raise ConfigError(problem if sources is None else f"{problem} (from {sources[name]})")
        else:
            values[name] = own_value(name, value)
    return values


def check_foreign(caller: str, keyword: str, value: object, place: str, names: Iterable[str]) -> None:
    """Accepts a keyword of other engines that asks for what happens anyway.

    Args:
        caller: such as ``generate``, for the error.
        place: of ``FOREIGN``.
        names: the keywords that the caller takes.

    Raises:
        UnexpectedKeywordError: no engine has it.
        InvalidRequestError: it is refused.
    """
    meaning = FOREIGN.get(place, {}).get(keyword)
    if meaning is None:
        hint = did_you_mean(keyword, sorted(names))
        raise UnexpectedKeywordError(f"{caller}() got an unexpected keyword argument {keyword!r}; {hint}")
    if (problem := meaning.refusal(keyword, value)) is not None:
        raise InvalidRequestError(problem)


class ForeignKeywords(msgspec.StructMeta):
    """Metaclass of parameters that users write: keywords are checked by ``FOREIGN`` of the class's name."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **keywords: Any) -> Any:
            others = [name for name in keywords if name not in cls.__struct_fields__]
            for name in others:
                check_foreign(cls.__name__, name, keywords.pop(name), cls.__name__, cls.__struct_fields__)
            return super().__call__(*args, **keywords)
