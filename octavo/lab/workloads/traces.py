"""Traces: files of requests with their times.

A CSV file with a header, which names columns for time, input and output tokens, or JSONL.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from octavo.core.errors import ConfigError
from octavo.lab.workloads.lengths import MOST_TOKENS

#: Most requests that are read, against a file given by mistake.
MOST_LINES = 30_000_000
#: Longest line in characters: a prompt of millions of tokens.
MOST_CHARACTERS = 64 << 20
#: Names of columns in lower case; the first of each is that of the public Azure LLM inference traces.
COLUMNS = (
    ("timestamp", "arrival_time", "arrival"),
    ("contexttokens", "input_tokens", "input_len"),
    ("generatedtokens", "output_tokens", "output_len"),
)


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, the first at 0; without prompts 16 bytes each."""

    name: str
    #: Seconds.
    at: array[float]
    #: Tokens. An input of 0 is a text of unknown length.
    inputs: array[int]
    outputs: array[int]
    #: Given prompts by position.
    prompts: dict[int, str | tuple[int, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.at)


@dataclass(slots=True)
class _Line:
    at: float
    input_len: int
    output_len: int
    prompt: str | tuple[int, ...] | None = None


def read_trace(path: Path, most: int | None = None) -> Trace:
    """Reads a trace; ``most``: as many requests from the start of the file.

    A CSV file has a column of each row of ``COLUMNS``, in any order and case; times are seconds or ISO 8601 (without an
    offset: UTC). A line of JSONL is ``{"timestamp": SECONDS, "prompt": TEXT or [ID, ...], "output_len": N}``, or has
    ``"input_len": N`` in place of the prompt; without any timestamps all arrive at 0.

    Raises:
        ConfigError: the file cannot be read, or a line is not of this form; the message names the line.
    """
    at, inputs, outputs = array("d"), array("i"), array("i")
    prompts: dict[int, str | tuple[int, ...]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            for line in itertools.islice(_lines(path, stream), most):
                if len(at) == MOST_LINES:
                    raise ConfigError(f"the trace {path} has more than {MOST_LINES} requests: ask for fewer")
                if line.prompt is not None:
                    prompts[len(at)] = line.prompt
                at.append(line.at)
                inputs.append(line.input_len)
                outputs.append(line.output_len)
    except OSError as e:
        raise ConfigError(f"cannot read the trace {path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the trace {path}: it is not UTF-8 text") from None
    if not at:
        raise ConfigError(f"the trace {path} holds no request")
    order = sorted(range(len(at)), key=at.__getitem__)
    first = at[order[0]]
    return Trace(
        path.name,
        array("d", (at[i] - first for i in order)),
        array("i", (inputs[i] for i in order)),
        array("i", (outputs[i] for i in order)),
        {new: prompts[old] for new, old in enumerate(order) if old in prompts} if prompts else {},
    )


def _lines(path: Path, stream: IO[str]) -> Iterator[_Line]:
    """The requests of the file, which is JSONL if its first line that is not blank begins with a brace."""
    numbered = ((number, line) for number, line in _bounded(path, stream) if line.strip())
    head = next(numbered, None)
    if head is None:
        return
    if head[1].lstrip().startswith("{"):
        for number, line in itertools.chain([head], numbered):
            yield _json_line(path, number, line)
        return
    names = [name.strip().lower() for name in next(csv.reader([head[1]]))]
    columns = [next((names.index(name) for name in aliases if name in names), None) for aliases in COLUMNS]
    if None in columns:
        raise ConfigError(
            f"{path}, line {head[0]}: needs a header with columns for time, input and output tokens, such as "
            f"arrival_time,input_tokens,output_tokens or TIMESTAMP,ContextTokens,GeneratedTokens, not {head[1][:80]!r}"
        )
    for number, line in numbered:
        words = next(csv.reader([line]))
        yield _csv_line(path, number, [words[c] if c is not None and c < len(words) else "" for c in columns])


def _bounded(path: Path, stream: IO[str]) -> Iterator[tuple[int, str]]:
    for number in itertools.count(1):
        line = stream.readline(MOST_CHARACTERS)
        if not line:
            return
        if len(line) == MOST_CHARACTERS:
            raise ConfigError(f"{path}, line {number}: longer than {MOST_CHARACTERS} characters")
        yield number, line


def _csv_line(path: Path, number: int, words: list[str]) -> _Line:
    try:
        line = _Line(_seconds(words[0].strip()), int(words[1]), int(words[2]))
    except ValueError:
        line = _Line(math.nan, 0, 0)
    if math.isfinite(line.at) and 1 <= line.input_len <= MOST_TOKENS and 1 <= line.output_len <= MOST_TOKENS:
        return line
    raise ConfigError(
        f"{path}, line {number}: a request has a time (seconds or ISO 8601) and 1 to {MOST_TOKENS} tokens of input and "
        f"of output, not {', '.join(map(repr, words))}"
    )


def _seconds(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        time = datetime.datetime.fromisoformat(word)
        return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()


class _JsonLine(msgspec.Struct):
    output_len: int
    timestamp: float = 0.0
    prompt: str | list[int] | None = None
    input_len: int | None = None


_decode = msgspec.json.Decoder(_JsonLine).decode


def _json_line(path: Path, number: int, line: str) -> _Line:
    try:
        entry = _decode(line)
    except msgspec.DecodeError as e:
        raise ConfigError(f"{path}, line {number}: {e}") from None
    prompt = tuple(entry.prompt) if isinstance(entry.prompt, list) else entry.prompt
    input_len = len(prompt) if isinstance(prompt, tuple) else entry.input_len or 0
    lengths_hold = 0 <= input_len <= MOST_TOKENS and 1 <= entry.output_len <= MOST_TOKENS
    if not (prompt or (prompt is None and input_len)) or not lengths_hold:
        raise ConfigError(
            f"{path}, line {number}: needs a prompt or input_len, and output_len, of 1 to {MOST_TOKENS} tokens"
        )
    return _Line(entry.timestamp, input_len, entry.output_len, prompt)
