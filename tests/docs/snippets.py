"""What README and docs show to be typed: commands, and blocks of Python, JSON, YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
#: Languages of blocks of commands, in which lines that begin with "$ " are commands if any does.
_SHELL = ("", "console", "bash", "sh")
#: First words of commands.
PROGRAMS = ("octavo", "python", "make", "pip", "docker", "kubectl", "systemctl", "curl", "ray", "torchrun", "pytest")
#: Characters of what stands for something else.
_PLACEHOLDERS = ("…", "...")


class Block(NamedTuple):
    """A fenced block."""

    page: str
    line: int
    language: str
    text: str


class Command(NamedTuple):
    """A command, as words: without variables before it, and without what it is piped to or from."""

    page: str
    line: int
    words: tuple[str, ...]


def blocks(page: Path) -> Iterator[Block]:
    """Those of a page."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        indent, language, body = found.groups()
        line = text.count("\n", 0, found.start()) + 2
        yield Block(page.name, line, language, re.sub(f"^{indent}", "", body, flags=re.MULTILINE))


def commands(page: Path) -> Iterator[Command]:
    """All commands of a page, in blocks, in indented lines and between words."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        if block.language in _SHELL:
            for offset, line in typed_lines(block.text):
                yield from _commands(page.name, block.line + offset, line)
    rest = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(rest.splitlines(), 1):
        if line.startswith("    ") and not line.lstrip().startswith(("-", "*", "|", "`")):
            yield from _commands(page.name, number, line.strip())
        for code in _INLINE.findall(line):
            if " " in code:
                yield from _commands(page.name, number, code.replace("\\|", "|"))


def typed_lines(text: str) -> Iterator[tuple[int, str]]:
    """Commands of a block, each with the number of its line: a line, with those that continue it."""
    lines = text.splitlines()
    prompted = any(line.startswith("$ ") for line in lines)
    at = 0
    while at < len(lines):
        begin, line = at, lines[at]
        at += 1
        while line.endswith("\\") and at < len(lines):
            line = line[:-1] + lines[at]
            at += 1
        while line.count("'") % 2 and at < len(lines):  # a quoted text of several lines
            line += "\n" + lines[at]
            at += 1
        if (end := re.search(r"<<\s*'?(\w+)'?", line)) is not None:  # a file that is written out
            while lines[at - 1] != end[1]:
                line += "\n" + lines[at]
                at += 1
        if line.startswith("$ "):
            yield begin, line[2:]
        elif not prompted:
            yield begin, line


def _commands(page: str, number: int, text: str) -> Iterator[Command]:
    if any(mark in text for mark in _PLACEHOLDERS):
        return
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;><")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:  # words between others, with an apostrophe
        return
    one: list[str] = []
    skip = False
    for word in [*words, ";"]:
        if word and set(word) <= set("|&;"):
            yield from _one(page, number, one)
            one, skip = [], False
        elif word and set(word) <= set("><"):
            skip = True
        elif skip:
            skip = False
        else:
            one.append(word)


def _one(page: str, number: int, words: list[str]) -> Iterator[Command]:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        words = words[1:]
    if not words:
        return
    program = words[0].removeprefix(".venv/bin/")
    if program in PROGRAMS and len(words) > 1:
        yield Command(page, number, (program, *words[1:]))
