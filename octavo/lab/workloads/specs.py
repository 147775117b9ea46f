"""Distributions as text: ``KIND:NUMBER,NUMBER,...``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from octavo.core.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class SpecForm(Generic[T]):
    """One kind of text and what it makes."""

    #: As shown in messages, such as ``uniform:LOW,HIGH``.
    usage: str
    #: How many numbers may follow the colon.
    counts: tuple[int, ...]
    #: Called with the numbers; raises ConfigError if they are out of range.
    make: Callable[..., T]


def parse(text: str, forms: Mapping[str, SpecForm[T]], what: str) -> T:
    """What the text describes: a kind of ``forms`` and its numbers; a text without a colon is a kind or a number.

    The kind ``""`` is that of a number alone. ``what`` is the subject of the message, such as ``a length``.

    Raises:
        ConfigError: it is none of the forms.
    """
    kind, colon, rest = text.strip().partition(":")
    if not colon and kind not in forms:
        kind, rest = "", kind
    form, reason = forms.get(kind), ""
    if form is not None:
        try:
            numbers = [float(word) for word in rest.split(",")] if rest else []
            if len(numbers) in form.counts:
                return form.make(*numbers)
        except ConfigError as e:
            reason = f": {e}"
        except ValueError:  # not a number: the message shows the forms
            pass
    *usages, last = (form.usage for form in forms.values())
    raise ConfigError(f"{what} is {', '.join(usages)}{' or ' if usages else ''}{last}, not {text!r}{reason}")


def require(holds: bool, rule: str) -> None:
    """Checks a parameter.

    Raises:
        ConfigError: the rule does not hold; it is the message.
    """
    if not holds:
        raise ConfigError(rule)


def whole(number: float) -> int:
    """The number as an integer.

    Raises:
        ConfigError: it is none.
    """
    require(number.is_integer(), f"{number:g} is not a whole number")
    return int(number)
