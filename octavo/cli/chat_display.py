"""What ``octavo chat`` shows: answers as they grow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from octavo.cli.terminal_text import for_output, is_smart_terminal


class Display(Protocol):
    """A way to show answers."""

    def answer(self) -> AbstractContextManager[Callable[[str], None]]:
        """Within it an answer is shown: the function takes what is added to it."""


class PlainDisplay:
    """Shows text as it comes: as ``for_output`` says."""

    @contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        """See ``Display``."""

        def show(text: str) -> None:
            print(for_output(text), end="", flush=True)

        try:
            yield show
        finally:
            print(flush=True)


def choose_display(*, plain: bool) -> Display:
    """Markdown for a terminal, unless it should be plain or ``NO_COLOR`` is set (https://no-color.org); else text."""
    if plain or os.environ.get("NO_COLOR") or not is_smart_terminal():
        return PlainDisplay()
    return MarkdownDisplay()


class MarkdownDisplay:
    """Shows answers as Markdown on a terminal."""

    @contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        """See ``Display``."""
        from rich.console import Console

        from octavo.cli.chat_markdown import GrowingMarkdown

        with GrowingMarkdown(Console(highlight=False)) as shown:
            yield shown.add
