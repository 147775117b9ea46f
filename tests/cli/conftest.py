from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator

import pytest

from octavo.cli.main import main


@pytest.fixture(autouse=True)
def clean_surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No option of the environment and no log handler passes from one test to another."""
    for name in os.environ:
        if name.startswith("OCTAVO_") and name != "OCTAVO_CACHE":
            monkeypatch.delenv(name)
    logger, startup = logging.getLogger("octavo"), logging.getLogger("octavo.startup")
    before = logger.handlers, logger.level
    yield
    logger.handlers, logger.level = before
    startup.setLevel(logging.NOTSET)


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the program in this process: ``octavo("generate", ..., stdin=...)`` gives its exit code."""

    def run(*argv: object, stdin: str | bytes = "") -> int:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        return main([str(word) for word in argv])

    return run
