"""The workload of ``octavo bench serve``: prompts of random or traced lengths, arrival times."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.errors import ConfigError

#: English words that, with the space before them, are one token for most tokenizers.
_COMMON = (
    "the of and to in is that for on with as are this be from or have an they which one you were all their there been "
    "many some so these would other into has more two like him see time could no make than first its who now people "
    "my made over did down only way find use may water long little very after words just where most know get through "
    "back much before go good new write our used me man too any day same right look think also around another came "
    "come work three word must because does part even place well such here take why things help put years different "
    "away again off went old number great tell men say small every found still between name should home big give air"
)
WORDS = _COMMON.split()
#: Longest prompt or output.
MOST_TOKENS = 10_000_000
#: Most lines of a trace file, against a file given by mistake.
MOST_LINES = 10_000_000


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send."""

    prompt: str | list[int]
    #: Tokens to generate; exact if the server honours ``ignore_eos``.
    output_len: int
    #: Seconds after the start of the run, for open-loop arrivals.
    at: float = 0.0


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens.

    fixed (a): always a. uniform (a, b): every integer from a to b. lognormal (a, b): median a, and b the standard
    deviation of the logarithm; at least 1 and at most ``most``.
    """

    kind: str
    a: float
    b: float = 0.0
    most: int = MOST_TOKENS

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """``128``, ``uniform:64,256``, ``lognormal:200,0.8`` or ``lognormal:200,0.8,2000`` (with a most).

        Raises:
            ConfigError: it is none of these.
        """
        kind, _, rest = text.rpartition(":")
        kind = kind or "fixed"
        try:
            numbers = [float(word) for word in rest.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in {"fixed": (1,), "uniform": (2,), "lognormal": (2, 3)}.get(kind, ()) or not _valid(
            kind, numbers
        ):
            raise ConfigError(
                f"a length is N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MOST], of at least 1 token, not {text!r}"
            )
        most = int(numbers[2]) if len(numbers) == 3 else MOST_TOKENS
        return cls(kind, numbers[0], numbers[1] if len(numbers) > 1 else 0.0, most)

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        if self.kind == "lognormal":
            return min(max(round(rng.lognormvariate(math.log(self.a), self.b)), 1), self.most)
        return int(self.a)


@dataclass(frozen=True)
class Prompts:
    """Makes random prompts that differ but for an optional shared prefix."""

    #: Token ids instead of text.
    as_ids: bool
    #: Smallest and largest token id.
    id_range: tuple[int, int] = (1000, 8000)
    #: Length of the shared prefix, in tokens.
    shared: int = 0

    def make(self, length: int, rng: random.Random, number: int) -> str | list[int]:
        """A prompt of ``length`` token ids, or of ``length`` words of about a token each."""
        shared = random.Random(0)
        common = min(self.shared, length)
        if self.as_ids:
            return self._ids(shared, common) + self._ids(rng, length - common)
        words = shared.choices(WORDS, k=common) + rng.choices(WORDS, k=length - common)
        # Short texts could be equal by chance and hit a prefix cache.
        if length > common:
            words[common] = str(number)
        return " ".join(words)

    def _ids(self, rng: random.Random, count: int) -> list[int]:
        low, high = self.id_range
        return [rng.randint(low, high) for _ in range(count)]


def arrival_times(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Arrival times in seconds, unbounded, ``rate`` a second on average.

    The gaps are gamma distributed with shape ``burstiness``: 1 is a Poisson process, less is burstier, more is more
    even, and infinity is a fixed gap. The first request arrives at 0; with an infinite rate all do.
    """
    now = 0.0
    while True:
        yield now
        if math.isinf(rate):
            continue
        now += 1 / rate if math.isinf(burstiness) else rng.gammavariate(burstiness, 1 / (rate * burstiness))


def synthetic(count: int, inputs: Lengths, outputs: Lengths, prompts: Prompts, rng: random.Random) -> list[Request]:
    """Requests of random lengths, all at time 0."""
    return [Request(prompts.make(inputs.draw(rng), rng, i), outputs.draw(rng)) for i in range(count)]


def at_times(requests: list[Request], times: Iterator[float]) -> list[Request]:
    """The same requests, arriving at these times."""
    return [Request(request.prompt, request.output_len, at) for request, at in zip(requests, times, strict=False)]


def read_trace(path: Path, prompts: Prompts, rng: random.Random, most: int | None = None) -> list[Request]:
    """Requests of a JSONL file, in the order of their times, the first at 0.

    A line is ``{"timestamp": SECONDS, "prompt": TEXT or [ID, ...], "output_len": N}``, or has ``"input_len": N`` for a
    random prompt of that length in place of the prompt. Without any timestamps all arrive at 0.

    Raises:
        ConfigError: the file cannot be read, or a line is not of this form; the message names the line.
    """
    requests = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(itertools.islice(lines, MOST_LINES), 1):
                if line.strip():
                    requests.append(_trace_line(path, number, line, prompts, rng))
                if len(requests) == most:
                    break
    except OSError as e:
        raise ConfigError(f"cannot read the trace {path}: {e.strerror}") from None
    if not requests:
        raise ConfigError(f"the trace {path} holds no request")
    requests.sort(key=lambda request: request.at)
    first = requests[0].at
    return [Request(request.prompt, request.output_len, request.at - first) for request in requests]


def _valid(kind: str, numbers: list[float]) -> bool:
    """Whether these are valid parameters of a distribution of lengths."""
    if not all(math.isfinite(number) for number in numbers) or not 1 <= numbers[0] <= MOST_TOKENS:
        return False
    if kind == "lognormal":
        return numbers[1] >= 0 and (len(numbers) == 2 or 1 <= numbers[2] <= MOST_TOKENS)
    return all(number.is_integer() for number in numbers) and numbers == sorted(numbers) and numbers[-1] <= MOST_TOKENS


class _TraceLine(msgspec.Struct):
    output_len: int
    timestamp: float = 0.0
    prompt: str | list[int] | None = None
    input_len: int | None = None


def _trace_line(path: Path, number: int, line: bytes, prompts: Prompts, rng: random.Random) -> Request:
    try:
        found = msgspec.json.decode(line, type=_TraceLine)
    except msgspec.DecodeError as e:
        raise ConfigError(f"{path}, line {number}: {e}") from None
    prompt = found.prompt
    if prompt is None and found.input_len is not None and found.input_len >= 1:
        prompt = prompts.make(found.input_len, rng, number)
    if not prompt or found.output_len < 1:
        raise ConfigError(f"{path}, line {number}: needs a prompt or input_len, and output_len, of at least 1 token")
    return Request(prompt, found.output_len, found.timestamp)


def extra_fields(text: str) -> dict[str, Any]:
    """The JSON object of ``--extra-body``.

    Raises:
        ConfigError: it is not a JSON object.
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(f"--extra-body is not JSON: {e}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"--extra-body must be a JSON object, not {text!r}")
    return fields
