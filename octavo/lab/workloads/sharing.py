"""What requests have in common: system prompts, users, targets of latency, conversations."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ConfigError
from octavo.lab.workloads.draws import Weighted, zipf
from octavo.lab.workloads.lengths import Constant, Lengths
from octavo.lab.workloads.specs import SpecForm, parse, require, whole

#: Most system prompts, and most users.
_MOST = 1_000_000


@dataclass(frozen=True)
class SystemPrompts:
    """``count`` texts of ``length`` tokens, one before each request's own prompt; popular ones by Zipf's law.

    The one of rank r is chosen with a probability in proportion to ``r ** -exponent``.
    """

    count: int
    length: int
    exponent: float = 1.0

    def __post_init__(self) -> None:
        require(1 <= self.count <= _MOST, f"COUNT must be from 1 to {_MOST}")
        Constant(self.length)
        _check_exponent(self.exponent)

    def draw(self, rng: random.Random) -> int:
        """The index of one of them; 0 is the most popular."""
        return self._table.draw(rng)

    @functools.cached_property
    def _table(self) -> Weighted:
        return Weighted(zipf(self.count, self.exponent))


@dataclass(frozen=True)
class User:
    """A user: a share of all requests relative to other users' shares, and a weight, the share of service due."""

    name: str
    share: float = 1.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        require(bool(self.name), "a user needs a name")
        _check_share(self.share)
        require(0 < self.weight < math.inf, f"a weight must be above 0, not {self.weight:g}")


@dataclass(frozen=True)
class RequestClass:
    """Requests with the same targets, and their share of all requests relative to other classes' shares."""

    share: float = 1.0
    #: Seconds to the first token, and for each token after it; None: no target.
    ttft_target: float | None = None
    tpot_target: float | None = None
    #: Lower goes first.
    priority: int = 0

    def __post_init__(self) -> None:
        _check_share(self.share)
        for target in (self.ttft_target, self.tpot_target):
            require(target is None or 0 < target < math.inf, "a target must be above 0")


@dataclass(frozen=True)
class Conversations:
    """Sessions of several turns: each prompt is all that was said before and something new."""

    #: How many turns each has.
    turns: Lengths
    #: Mean seconds from a turn's arrival to the next one's, the answer's time included; exponentially distributed.
    think: float = 10.0
    #: A conversation ends before prompt and output of a turn would be longer, in tokens.
    max_context: int = 32_768

    def __post_init__(self) -> None:
        require(0 < self.think < math.inf, f"a think time must be above 0 seconds, not {self.think:g}")
        Constant(self.max_context)


def parse_system_prompts(text: str) -> SystemPrompts:
    """``COUNT,LENGTH`` or ``COUNT,LENGTH,EXPONENT``.

    Raises:
        ConfigError: it is none of these.
    """
    return parse(text, {"": SpecForm("COUNT,LENGTH[,EXPONENT]", (2, 3), _system_prompts)}, "--system-prompts")


def parse_users(text: str) -> tuple[User, ...]:
    """``8`` users alike, ``zipf:8,1.1`` by Zipf's law, or ``NAME=SHARE[:WEIGHT],...``.

    Raises:
        ConfigError: it is none of these.
    """
    if "=" not in text:
        return parse(text, _USERS, "--users")
    users = []
    for word in text.split(","):
        name, _, numbers = word.partition("=")
        try:
            users.append(User(name.strip(), *(float(number) for number in numbers.split(":", 1))))
        except ValueError as e:
            reason = f": {e}" if isinstance(e, ConfigError) else ""
            raise ConfigError(f"--users is NAME=SHARE[:WEIGHT] with commas between, not {word!r}{reason}") from None
    require(len({user.name for user in users}) == len(users), f"--users names a user twice: {text!r}")
    return tuple(users)


def parse_class(text: str) -> RequestClass:
    """``SHARE[,ttft:MS][,tpot:MS][,priority:N]``: targets in milliseconds.

    Raises:
        ConfigError: it is not of this form.
    """
    share, *words = text.split(",")
    fields: dict[str, Any] = {}
    try:
        for word in words:
            name, _, number = word.partition(":")
            key = {"ttft": "ttft_target", "tpot": "tpot_target", "priority": "priority"}[name.strip()]
            fields[key] = int(number) if key == "priority" else float(number) / 1000
        return RequestClass(float(share), **fields)
    except (KeyError, ValueError) as e:
        reason = f": {e}" if isinstance(e, ConfigError) else ""
        usage = "SHARE[,ttft:MS][,tpot:MS][,priority:N]"
        raise ConfigError(f"--request-class is {usage}, not {text!r}{reason}") from None


def _system_prompts(count: float, length: float, exponent: float = 1.0) -> SystemPrompts:
    return SystemPrompts(whole(count), whole(length), exponent)


def _ranked(count: float, exponent: float = 0.0) -> tuple[User, ...]:
    require(1 <= count <= _MOST, f"COUNT must be from 1 to {_MOST}")
    _check_exponent(exponent)
    return tuple(User(f"user-{i}", share) for i, share in enumerate(zipf(whole(count), exponent)))


_USERS: dict[str, SpecForm[tuple[User, ...]]] = {
    "": SpecForm("COUNT", (1,), _ranked),
    "zipf": SpecForm("zipf:COUNT,EXPONENT", (2,), _ranked),
    "named": SpecForm("NAME=SHARE[:WEIGHT],...", (), _ranked),
}


def _check_exponent(exponent: float) -> None:
    require(0 <= exponent <= 10, f"EXPONENT must be from 0 to 10, not {exponent:g}")


def _check_share(share: float) -> None:
    require(0 < share < math.inf, f"a share must be above 0, not {share:g}")
