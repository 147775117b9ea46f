"""Messages of lines: of one, or of several, as they are typed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

#: Begins and ends a message of several lines.
BLOCK = '"""'

PROMPT, CONTINUED = "> ", "... "

#: What may stand where the word stands that is typed, after the words before it, each with what it is.
Completions = Callable[[str], list[tuple[str, str]]]


class Typed(NamedTuple):
    """A message, or a command such as ``/clear``."""

    text: str
    is_command: bool = False


def read_messages(read_line: Callable[[str], str]) -> Iterator[Typed]:
    """The messages of lines; see ``read_message``."""
    with suppress(EOFError):
        while True:
            yield read_message(read_line)


def read_message(read_line: Callable[[str], str]) -> Typed:
    """The next message that is not empty: a line, lines between triple quotes, or lines of which all but the last end
    with a backslash.

    ``read_line(prompt)`` gives a line or raises EOFError, which ends a message that was begun.

    Raises:
        EOFError: no message was begun.
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
    """Whether triple quotes are open at the end of what was typed."""
    text = text.strip()
    return text.startswith(BLOCK) and not text[len(BLOCK) :].endswith(BLOCK)


def as_typed(text: str) -> Typed:
    """What was typed, without quotes around it, and with them never a command."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").strip()  # bytes that are no UTF-8
    if text.startswith(BLOCK):
        return Typed(text[len(BLOCK) :].removesuffix(BLOCK).strip("\n"))
    return Typed(text, text.startswith("/") and "\n" not in text)
