"""Messages of one or several lines, their history file, and the times of answers, for ``octavo chat``."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

#: Begins and ends a message of several lines.
BLOCK = '"""'

PROMPT, CONTINUED = "> ", "... "

#: Completions of a line's last word, each with its description.
Completions = Callable[[str], list[tuple[str, str]]]


class Typed(NamedTuple):
    """A message, or a command such as ``/clear``."""

    text: str
    is_command: bool = False


def read_messages(read_line: Callable[[str], str]) -> Iterator[Typed]:
    with suppress(EOFError):
        while True:
            yield read_message(read_line)


def read_message(read_line: Callable[[str], str]) -> Typed:
    """The next non-empty message: a line, lines between triple quotes, or lines joined by backslashes at their ends.

    ``read_line(prompt)`` returns a line or raises EOFError, which completes a message of several lines.
    """
    while True:
        line = read_line(PROMPT).strip()
        lines = [line]
        with suppress(EOFError):
            if line.startswith(BLOCK):
                line = line[len(BLOCK) :]
                while not line.endswith(BLOCK):
                    lines.append(line := read_line(CONTINUED).rstrip())
            else:
                while line.endswith("\\"):
                    lines[-1] = line[:-1]
                    lines.append(line := read_line(CONTINUED).rstrip())
        typed = as_typed("\n".join(lines))
        if typed.text:
            return typed


def is_open(text: str) -> bool:
    """Whether triple quotes are open at the end of the text."""
    text = text.strip()
    return text.startswith(BLOCK) and not text[len(BLOCK) :].endswith(BLOCK)


def as_typed(text: str) -> Typed:
    """A typed text without its triple quotes; a quoted text is never a command."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").strip()  # invalid UTF-8
    if text.startswith(BLOCK):
        return Typed(text[len(BLOCK) :].removesuffix(BLOCK).strip("\n"))
    return Typed(text, text.startswith("/") and "\n" not in text)


#: Most texts in the file, and most characters of one.
MAX_TEXTS, MAX_CHARACTERS = 1000, 20_000
#: Bytes to read, from the file's end.
_MAX_BYTES = 8 << 20


def default_path() -> Path:
    """The user's history file, below ``XDG_STATE_HOME`` if it is set."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "octavo" / "chat_history.jsonl"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "octavo" / "chat_history.jsonl"


class HistoryFile:
    """The history file, with mode 0600; several conversations may share it.

    ``load`` cuts it to ``MAX_TEXTS``. If it cannot be used, ``failure`` says why, and nothing more is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: str | None = None

    def load(self) -> list[str]:
        """The texts, oldest first, without invalid lines; cuts a file that is too long."""
        try:
            with self._opened() as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _MAX_BYTES))
                lines = file.read().splitlines(keepends=True)
                if len(lines) > MAX_TEXTS or size > _MAX_BYTES:
                    lines = lines[-MAX_TEXTS:]
                    file.truncate(0)
                    file.write(b"".join(lines))
        except OSError as e:
            self._fail(e)
            return []
        texts = []
        for line in lines:
            with suppress(ValueError):
                texts.append(json.loads(line))
        return [text for text in texts if isinstance(text, str)]

    def append(self, text: str) -> None:
        if self.failure is not None or len(text) > MAX_CHARACTERS:
            return
        try:
            with self._opened() as file:
                file.write(json.dumps(text).encode() + b"\n")
        except OSError as e:
            self._fail(e)

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        """The file, locked and open for reading and appending."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.path, "a+b", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            os.fchmod(file.fileno(), 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _fail(self, error: OSError) -> None:
        self.failure = f"messages are not remembered: {self.path}: {error.strerror}"


@dataclass
class AnswerTimes:
    """Tokens of an answer and their times on the user's side, in seconds of ``time.monotonic()``."""

    asked: float
    first: float | None = None
    last: float | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    _num_first: int = 0

    def add(self, num_tokens: int, num_cached_tokens: int) -> None:
        self.num_cached_tokens = num_cached_tokens
        if not num_tokens:
            return
        self.last = time.monotonic()
        if self.first is None:
            self.first, self._num_first = self.last, num_tokens
        self.num_tokens += num_tokens

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first is None else self.first - self.asked

    @property
    def decoded(self) -> tuple[int, float]:
        """(tokens after those of the first step, seconds that they took)."""
        if self.first is None or self.last is None:
            return 0, 0.0
        return self.num_tokens - self._num_first, self.last - self.first

    def __str__(self) -> str:
        tokens, seconds = self.decoded
        rate = f", {tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else ""
        first = f"; first after {self.time_to_first_token:.2f} s" if self.time_to_first_token is not None else ""
        cached = f", {self.num_cached_tokens} of them cached" if self.num_cached_tokens else ""
        return f"{_tokens(self.num_tokens)}{rate}{first}; prompt of {_tokens(self.num_prompt_tokens)}{cached}"


def summary(answers: Sequence[AnswerTimes]) -> str:
    tokens = sum(times.decoded[0] for times in answers)
    seconds = sum(times.decoded[1] for times in answers)
    rate = f", {tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else ""
    firsts = [first for times in answers if (first := times.time_to_first_token) is not None]
    average = f"; first after {sum(firsts) / len(firsts):.2f} s on average" if firsts else ""
    number = "1 answer" if len(answers) == 1 else f"{len(answers)} answers"
    return f"{number}, {_tokens(sum(times.num_tokens for times in answers))}{rate}{average}"


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"
