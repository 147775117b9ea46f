"""Commands of README and docs are read by the programs that they call, without being run."""

from __future__ import annotations

import functools
import importlib
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import pytest

from octavo.cli.main import COMMANDS, OTHER_COMMANDS, load_command
from octavo.cli.parsing import Parser
from octavo.core.foreign import OTHER_FLAGS
from tests.docs.snippets import PAGES, ROOT, Command, commands

EVERY = list(dict.fromkeys(command for page in PAGES for command in commands(page)))


class Refused(Exception):
    """A parser refuses its arguments; its message."""


@pytest.fixture(autouse=True)
def parsers_that_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parsers raise what they would print, and find the files that commands name."""

    def refuse(self: Parser, message: str) -> NoReturn:
        raise Refused(message)

    monkeypatch.setattr(Parser, "error", refuse)
    monkeypatch.chdir(tmp_path)
    for command in EVERY:
        for word in command.words[1:]:
            if re.fullmatch(r"[\w-]+\.(json|lark|gbnf|txt)", word):
                (tmp_path / word).write_text("{}")


@functools.cache
def parser(name: str) -> Any:
    return load_command(name).make_parser()


@functools.cache
def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


@functools.cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def read_octavo(words: tuple[str, ...]) -> str | None:
    """Why the command is wrong; None if the program takes it. Without flags it may be its name only."""
    if not words or words[0] in ("--help", "--version", "COMMAND"):
        return None
    if words[0] in ("run", "help"):
        words = ("chat", *words[1:2])
    words = (*OTHER_COMMANDS.get(words[0], words[:1]), *words[1:])
    if words[0] not in COMMANDS:
        return f"there is no command {words[0]!r}"
    try:
        parser(words[0]).read(words[1:])
    except SystemExit as e:
        return None if e.code == 0 else "the parser ends the program"
    except Refused as e:
        is_name = "are required" in str(e) and not any(word.startswith("-") for word in words)
        return None if is_name else str(e)
    return None


def read_python(words: tuple[str, ...]) -> str | None:
    """A module or script that exists, and flags that it knows."""
    if words[0] == "-m":
        if words[1] == "octavo":
            return read_octavo(words[2:])
        if words[1] == "pytest":
            return read_paths(words[2:])
        return None if importlib.util.find_spec(words[1]) else f"there is no module {words[1]}"
    if not words[0].startswith("scripts/"):
        return None  # the reader's own
    script = ROOT / words[0]
    if not script.exists():
        return f"there is no {words[0]}"
    source = script.read_text(encoding="utf-8")
    unknown = [word for word in words[1:] if word.startswith("--") and f'"{word.split("=")[0]}"' not in source]
    return f"{words[0]} has no {unknown}" if unknown and "add_engine_flags" not in source else None


def read_paths(words: tuple[str, ...]) -> str | None:
    """Files of the repository that are there."""
    paths = [re.split(r"[:\[]", word)[0] for word in words if re.match(r"(tests|deploy|scripts|docs)/", word)]
    missing = [path for path in paths if not path.isupper() and "ROOM" not in path and not (ROOT / path).exists()]
    return f"there is no {missing}" if missing else None


def read_make(words: tuple[str, ...]) -> str | None:
    """Targets of the Makefile."""
    named = [word for word in words if re.fullmatch(r"[a-z][a-z-]+", word)]
    unknown = [word for word in named if word not in targets()]
    return f"there is no target {unknown}" if unknown else None


def read_pip(words: tuple[str, ...]) -> str | None:
    """Extras of the package."""
    asked = {
        extra for word in words for found in re.findall(r"octavo\[([\w,-]+)\]", word) for extra in found.split(",")
    }
    return f"there is no extra {asked - extras()}" if asked - extras() else None


READERS = {"octavo": read_octavo, "python": read_python, "make": read_make, "pip": read_pip}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_read_by_their_programs(page: Path) -> None:
    wrong = [
        f"{page.name}:{command.line}: {' '.join(command.words)}: {why}"
        for command in EVERY
        if command.page == page.name and (why := READERS.get(command.words[0], read_paths)(command.words[1:]))
    ]
    assert not wrong, "\n".join(wrong)


def test_commands_are_found_where_they_stand() -> None:
    counts = Counter(command.words[0] for command in EVERY)
    assert counts["octavo"] > 150 and counts["python"] > 15 and counts["make"] > 5 and counts["curl"] > 5, counts


@pytest.mark.parametrize(
    "words",
    [
        ("octavo", "serve", "m", "--no-such-flag"),
        ("octavo", "swerve", "m"),
        ("octavo", "simulate", "plan", "--ttft", "1"),
        ("python", "scripts/no_such.py"),
        ("python", "scripts/try_wheel.py", "--extras"),
        ("python", "-m", "pytest", "tests/no_such.py"),
        ("make", "no-such"),
        ("pip", "install", "octavo[no]"),
        ("docker", "compose", "-f", "deploy/no.yml", "up"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_found(words: tuple[str, ...]) -> None:
    command = Command("page.md", 1, words)
    assert READERS.get(command.words[0], read_paths)(command.words[1:]) is not None


#: Flags of other programs that pages speak of, beside those in tables for people who come from elsewhere.
FOREIGN_FLAGS = {"--gpus", "--ipc", "--shm-size", "--nproc-per-node", "--nproc_per_node", "--build-arg"}


def test_flags_that_pages_name_alone_exist() -> None:
    known = {*FOREIGN_FLAGS, *OTHER_FLAGS}
    for name in COMMANDS:
        makers = [parser(name), *(make() for make in parser(name).kinds.values() if make is not None)]
        known |= {flag for each in makers for flag in each._option_string_actions}
    known |= {
        flag for file in (ROOT / "scripts").glob("*.py") for flag in re.findall(r'"(--[a-z-]+)"', file.read_text())
    }
    wrong = []
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            # The first column of such tables has the other program's flags.
            ours = line.split(" | ", 1)[-1] if page.name.startswith("coming-from") and line.startswith("|") else line
            for flag in re.findall(r"`(--[a-z][a-z_-]+)", ours):
                if flag not in known:
                    wrong.append(f"{page.name}:{number}: {flag}")
    assert not wrong, "\n".join(wrong)
