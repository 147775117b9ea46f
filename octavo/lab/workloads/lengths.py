"""Distributions of lengths in tokens, and of numbers of turns."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass

from octavo.lab.workloads.draws import poisson
from octavo.lab.workloads.specs import SpecForm, parse, require, whole

#: Longest prompt or output.
MOST_TOKENS = 10_000_000


class Lengths(ABC):
    """A distribution of whole numbers from 1."""

    @abstractmethod
    def draw(self, rng: random.Random) -> int:
        """One of them."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Their mean; rounding to whole numbers, which moves it by less than half a token, is left out."""

    @property
    @abstractmethod
    def most(self) -> int:
        """The largest that may be drawn."""


@dataclass(frozen=True)
class Constant(Lengths):
    """Always the same."""

    length: int

    def __post_init__(self) -> None:
        _check_length(self.length)

    def draw(self, rng: random.Random) -> int:
        """See ``Lengths``."""
        return self.length

    @property
    def mean(self) -> float:
        """See ``Lengths``."""
        return self.length

    @property
    def most(self) -> int:
        """See ``Lengths``."""
        return self.length


@dataclass(frozen=True)
class Uniform(Lengths):
    """Every whole number from ``low`` to ``high``, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_length(self.low)
        _check_length(self.high)
        require(self.low <= self.high, "LOW must not be above HIGH")

    def draw(self, rng: random.Random) -> int:
        """See ``Lengths``."""
        return self.low + int(rng.random() * (self.high - self.low + 1))

    @property
    def mean(self) -> float:
        """See ``Lengths``."""
        return (self.low + self.high) / 2

    @property
    def most(self) -> int:
        """See ``Lengths``."""
        return self.high


@dataclass(frozen=True)
class Poisson(Lengths):
    """Poisson distributed around ``around``; 0 becomes 1."""

    around: float

    def __post_init__(self) -> None:
        require(0 < self.around <= MOST_TOKENS, f"MEAN must be above 0 and at most {MOST_TOKENS}")

    def draw(self, rng: random.Random) -> int:
        """See ``Lengths``."""
        return max(1, poisson(self.around).draw(rng))

    @property
    def mean(self) -> float:
        """See ``Lengths``."""
        return self.around + math.exp(-self.around)

    @property
    def most(self) -> int:
        """See ``Lengths``."""
        return math.ceil(self.around + 12 * math.sqrt(self.around) + 12)


@dataclass(frozen=True)
class Geometric(Lengths):
    """As many as the trials up to the first success, ``around`` on average: the distribution without memory."""

    around: float

    def __post_init__(self) -> None:
        require(1 <= self.around <= MOST_TOKENS, f"MEAN must be from 1 to {MOST_TOKENS}")

    def draw(self, rng: random.Random) -> int:
        """See ``Lengths``."""
        if self.around == 1:
            return 1
        drawn = 1 + int(math.log(1.0 - rng.random()) / math.log1p(-1 / self.around))
        return min(drawn, MOST_TOKENS)

    @property
    def mean(self) -> float:
        """See ``Lengths``."""
        return self.around

    @property
    def most(self) -> int:
        """See ``Lengths``."""
        return MOST_TOKENS


@dataclass(frozen=True)
class Lognormal(Lengths):
    """Lognormal with this median, ``sigma`` the standard deviation of the logarithm; longer ones become ``most``."""

    median: float
    sigma: float
    most: int = MOST_TOKENS

    def __post_init__(self) -> None:
        require(math.isfinite(self.median) and 1 <= self.median <= MOST_TOKENS, f"MEDIAN must be 1 to {MOST_TOKENS}")
        require(math.isfinite(self.sigma) and self.sigma >= 0, "SIGMA must be at least 0")
        _check_length(self.most)

    def draw(self, rng: random.Random) -> int:
        """See ``Lengths``."""
        exponent = self.sigma * rng.gauss(0.0, 1.0)
        # Beyond this any median is above the largest length, and exp might overflow.
        return self.most if exponent > 50 else max(1, min(self.most, round(self.median * math.exp(exponent))))

    @property
    def mean(self) -> float:
        """See ``Lengths``: of min(x, most), and x below 1 counted as 1."""
        if self.sigma == 0:
            return min(self.median, self.most)
        low, high = (math.log(bound / self.median) / self.sigma for bound in (1, self.most))
        whole = self.median * math.exp(self.sigma**2 / 2)
        middle = whole * (_normal(high - self.sigma) - _normal(low - self.sigma))
        return _normal(low) + middle + self.most * (1 - _normal(high))

    @classmethod
    def of_mean(cls, mean: float, sigma: float, most: int) -> Lognormal:
        """The one whose mean after truncation is ``mean``, which must be well below ``most``."""
        low, high = 1.0, float(most)
        for _ in range(60):  # the mean rises with the median
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, sigma, most).mean < mean else (low, middle)
        return cls(low, sigma, most)


#: Fits of published lengths. Means: Kwon et al. 2023 (PagedAttention), figure 11, of ShareGPT (chat) and Alpaca
#: (instruct); truncated at 2,048 tokens, the context of the models of that evaluation (OPT). The paper prints no
#: deviations. Those of chat follow from median and 90th percentile of LMSYS-Chat-1M in Agrawal et al. 2024 (Vidur),
#: table of workloads: 417 and 1,678 tokens for prompts, 139 and 484 for outputs. Alpaca's are assumed: its outputs as
#: wide as those of chat, its prompts narrow, as the figure shows them.
_MOST_PUBLISHED = 2048
#: The 90th percentile of the normal distribution.
_Z90 = 1.2815515655446004
_PROMPT_SIGMA = math.log(1678 / 417) / _Z90
_OUTPUT_SIGMA = math.log(484 / 139) / _Z90


def chat_inputs() -> Lognormal:
    """Prompts of ShareGPT: mean 161.31 tokens (Kwon et al. 2023, figure 11), sigma 1.09 (see above)."""
    return Lognormal.of_mean(161.31, _PROMPT_SIGMA, _MOST_PUBLISHED)


def chat_outputs() -> Lognormal:
    """Outputs of ShareGPT: mean 337.99 tokens (Kwon et al. 2023, figure 11), sigma 0.97 (see above)."""
    return Lognormal.of_mean(337.99, _OUTPUT_SIGMA, _MOST_PUBLISHED)


def instruct_inputs() -> Lognormal:
    """Prompts of Alpaca: mean 19.31 tokens (Kwon et al. 2023, figure 11), sigma 0.5 (assumed)."""
    return Lognormal.of_mean(19.31, 0.5, _MOST_PUBLISHED)


def instruct_outputs() -> Lognormal:
    """Outputs of Alpaca: mean 58.45 tokens (Kwon et al. 2023, figure 11), sigma 0.97 (assumed)."""
    return Lognormal.of_mean(58.45, _OUTPUT_SIGMA, _MOST_PUBLISHED)


_FORMS: dict[str, SpecForm[Lengths]] = {
    "": SpecForm("N", (1,), lambda n: Constant(whole(n))),
    "constant": SpecForm("constant:N", (1,), lambda n: Constant(whole(n))),
    "uniform": SpecForm("uniform:LOW,HIGH", (2,), lambda low, high: Uniform(whole(low), whole(high))),
    "poisson": SpecForm("poisson:MEAN", (1,), Poisson),
    "geometric": SpecForm("geometric:MEAN", (1,), Geometric),
    "lognormal": SpecForm(
        "lognormal:MEDIAN,SIGMA[,MOST]",
        (2, 3),
        lambda median, sigma, most=float(MOST_TOKENS): Lognormal(median, sigma, whole(most)),
    ),
}
_INPUTS: dict[str, SpecForm[Lengths]] = {
    **_FORMS,
    "chat": SpecForm("chat", (0,), chat_inputs),
    "instruct": SpecForm("instruct", (0,), instruct_inputs),
}
_OUTPUTS: dict[str, SpecForm[Lengths]] = {
    **_FORMS,
    "chat": SpecForm("chat", (0,), chat_outputs),
    "instruct": SpecForm("instruct", (0,), instruct_outputs),
}


def parse_inputs(text: str) -> Lengths:
    """Lengths of prompts: ``128``, ``uniform:64,256``, ``lognormal:200,0.8,2000``, ``chat`` and so on.

    Raises:
        ConfigError: it is no distribution of lengths.
    """
    return parse(text, _INPUTS, "a length")


def parse_outputs(text: str) -> Lengths:
    """Lengths of outputs; ``chat`` and ``instruct`` are others than for prompts.

    Raises:
        ConfigError: it is no distribution of lengths.
    """
    return parse(text, _OUTPUTS, "a length")


def parse_turns(text: str) -> Lengths:
    """Numbers of turns of a conversation: as lengths, without the fits of published ones.

    Raises:
        ConfigError: it is none of these.
    """
    return parse(text, _FORMS, "a number of turns")


def _check_length(length: int) -> None:
    require(1 <= length <= MOST_TOKENS, f"{length} is not from 1 to {MOST_TOKENS}")


def _normal(x: float) -> float:
    """The distribution function of the normal distribution."""
    return (1 + math.erf(x / math.sqrt(2))) / 2
