"""When requests arrive."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.core.errors import ConfigError
from octavo.lab.workloads.draws import poisson
from octavo.lab.workloads.specs import SpecForm, parse, require

DAY = 86_400.0


class Arrivals(ABC):
    """A process of arrivals."""

    @abstractmethod
    def times(self, rng: random.Random) -> Iterator[float]:
        """Times in seconds after the start, ascending, without end."""

    @property
    @abstractmethod
    def mean_rate(self) -> float:
        """Arrivals a second on average; infinite if all arrive at once."""

    @abstractmethod
    def __str__(self) -> str:
        """As reports show it."""


@dataclass(frozen=True)
class Gamma(Arrivals):
    """Gaps that are gamma distributed, of mean 1 / rate; the first request arrives at 0.

    ``burstiness`` is the shape: 1 is a Poisson process, less is burstier, more is more even, infinity is a fixed gap.
    The gaps' deviation over their mean is 1 / sqrt(burstiness).
    """

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        require(self.burstiness > 0, f"a burstiness must be above 0, not {self.burstiness:g}")

    def times(self, rng: random.Random) -> Iterator[float]:
        """See ``Arrivals``."""
        now, gap, shape = 0.0, 1 / self.rate, self.burstiness
        while True:
            yield now
            if shape == 1:
                now += rng.expovariate(self.rate)
            else:
                now += gap if math.isinf(shape) else rng.gammavariate(shape, gap / shape)

    @property
    def mean_rate(self) -> float:
        """See ``Arrivals``."""
        return self.rate

    def __str__(self) -> str:
        names = {1.0: "poisson", math.inf: "fixed"}
        return f"{names.get(self.burstiness, f'gamma of shape {self.burstiness:g}')}, {self.rate:g}/s"


@dataclass(frozen=True)
class AtOnce(Arrivals):
    """All at 0."""

    def times(self, rng: random.Random) -> Iterator[float]:
        """See ``Arrivals``."""
        while True:
            yield 0.0

    @property
    def mean_rate(self) -> float:
        """See ``Arrivals``."""
        return math.inf

    def __str__(self) -> str:
        return "all at once"


@dataclass(frozen=True)
class Ticks(Arrivals):
    """Gaps of whole ticks whose number is Poisson distributed: several requests share a tick if the rate is high.

    The arrivals of the classical scheduling lab, in ticks of a millisecond.
    """

    rate: float
    #: Seconds.
    tick: float = 0.001

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        require(0 < self.tick < math.inf, f"a tick must be above 0 seconds, not {self.tick:g}")
        require(self.rate * self.tick >= 1e-9, "TICK is too short for this RATE")

    def times(self, rng: random.Random) -> Iterator[float]:
        """See ``Arrivals``."""
        gaps, ticks = poisson(1 / (self.rate * self.tick)), 0
        while True:
            yield ticks * self.tick
            ticks += gaps.draw(rng)

    @property
    def mean_rate(self) -> float:
        """See ``Arrivals``."""
        return self.rate

    def __str__(self) -> str:
        return f"gaps of Poisson distributed ticks, {self.rate:g}/s"


class Varying(Arrivals):
    """A Poisson process whose rate changes, by thinning one of the largest rate (Lewis and Shedler 1979)."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest rate."""

    @abstractmethod
    def rate_at(self, now: float) -> float:
        """The rate at this time, in arrivals a second."""

    def times(self, rng: random.Random) -> Iterator[float]:
        """See ``Arrivals``."""
        now, largest = 0.0, self.largest
        while True:
            now += rng.expovariate(largest)
            if rng.random() * largest < self.rate_at(now):
                yield now


@dataclass(frozen=True)
class Day(Varying):
    """A rate that swings like a cosine between ``low``, at time 0, and ``high``, half a period later."""

    low: float
    high: float
    #: Seconds.
    period: float = DAY

    def __post_init__(self) -> None:
        _check_rate(self.high)
        require(0 <= self.low <= self.high, "LOW must be from 0 to HIGH")
        require(0 < self.period < math.inf, f"a period must be above 0 seconds, not {self.period:g}")

    @property
    def mean_rate(self) -> float:
        """See ``Arrivals``."""
        return (self.low + self.high) / 2

    @property
    def largest(self) -> float:
        """See ``Varying``."""
        return self.high

    def rate_at(self, now: float) -> float:
        """See ``Varying``."""
        return self.mean_rate - (self.high - self.low) / 2 * math.cos(2 * math.pi * now / self.period)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}/s over {self.period:g} s"


@dataclass(frozen=True)
class Steps(Varying):
    """Rates one after another, each for ``seconds``, and again from the first."""

    seconds: float
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        require(0 < self.seconds < math.inf, f"a step must last more than 0 seconds, not {self.seconds:g}")
        require(all(0 <= rate < math.inf for rate in self.rates), "rates must be from 0")
        require(max(self.rates, default=0) > 0, "a rate above 0 is needed")

    @property
    def mean_rate(self) -> float:
        """See ``Arrivals``."""
        return sum(self.rates) / len(self.rates)

    @property
    def largest(self) -> float:
        """See ``Varying``."""
        return max(self.rates)

    def rate_at(self, now: float) -> float:
        """See ``Varying``."""
        return self.rates[int(now / self.seconds) % len(self.rates)]

    def __str__(self) -> str:
        return f"{', '.join(f'{rate:g}' for rate in self.rates)}/s, {self.seconds:g} s each"


#: Most rates of ``steps``: an hour each for four weeks.
_MOST_STEPS = 672
_FORMS: dict[str, SpecForm[Arrivals]] = {
    "poisson": SpecForm("poisson:RATE", (1,), Gamma),
    "gamma": SpecForm("gamma:RATE,BURSTINESS", (2,), Gamma),
    "fixed": SpecForm("fixed:RATE", (1,), lambda rate: Gamma(rate, math.inf)),
    "at-once": SpecForm("at-once", (0,), AtOnce),
    "ticks": SpecForm("ticks:RATE[,SECONDS]", (1, 2), Ticks),
    "day": SpecForm("day:LOW,HIGH[,PERIOD]", (2, 3), Day),
    "steps": SpecForm(
        "steps:SECONDS,RATE,RATE,...",
        tuple(range(2, _MOST_STEPS + 2)),
        lambda seconds, *rates: Steps(seconds, rates),
    ),
}
_TAKE_RATE = ("poisson", "gamma", "fixed", "ticks")


def parse_arrivals(text: str, rate: float | None = None, burstiness: float | None = None) -> Arrivals:
    """``poisson:4``, ``gamma:4,0.5``, ``fixed:10``, ``at-once``, ``ticks:1000``, ``day:1,9,3600``, ``steps:60,2,9``.

    ``poisson``, ``gamma``, ``fixed`` and ``ticks`` alone take ``rate``, of which infinity is all at once; ``gamma``,
    and ``poisson`` as it is its default, take ``burstiness`` too.

    Raises:
        ConfigError: it is none of these, or a rate or burstiness is missing or given twice.
    """
    kind = text.strip()
    if kind not in _TAKE_RATE:
        if rate is not None or burstiness is not None:
            raise ConfigError(f"arrivals {kind!r} hold their rate and burstiness: leave out --rate and --burstiness")
        return parse(text, _FORMS, "an arrival process")
    if rate is None:
        raise ConfigError(f"arrivals {kind!r} need a rate: --rate, or {_FORMS[kind].usage}")
    if burstiness is not None and kind in ("fixed", "ticks"):
        raise ConfigError(f"arrivals {kind!r} have no burstiness: leave out --burstiness, or name gamma")
    if rate == math.inf:
        return AtOnce()
    if kind == "ticks":
        return Ticks(rate)
    return Gamma(rate, math.inf if kind == "fixed" else 1.0 if burstiness is None else burstiness)


def _check_rate(rate: float) -> None:
    require(0 < rate < math.inf, f"a rate must be above 0 and finite, not {rate:g}")
