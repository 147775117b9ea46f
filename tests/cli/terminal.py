"""A terminal for tests: a pseudo-terminal with a program in it, and what stands on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyte

from tests.busy_machine import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
#: Runs a command in a session that the terminal controls: the first one that a leader of a session opens.
_IN_SESSION = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execvp(sys.argv[1], sys.argv[1:])"

CTRL_C, CTRL_D, UP, ENTER = "\x03", "\x04", "\x1b[A", "\r"


def pasted(text: str) -> str:
    """What a terminal with bracketed paste sends."""
    return f"\x1b[200~{text}\x1b[201~"


class Screen:
    """What a terminal shows of the bytes that it is given, with the lines that have left it."""

    def __init__(self, width: int, height: int) -> None:
        self._screen: Any = pyte.HistoryScreen(width, height, history=100_000, ratio=0.5)
        self._stream: Any = pyte.ByteStream(self._screen)

    def feed(self, data: bytes) -> None:
        """Takes bytes."""
        self._stream.feed(data)

    @property
    def lines(self) -> list[str]:
        """All lines, without spaces at their ends, up to the cursor's."""
        width = self._screen.columns
        gone = ["".join(row[x].data for x in range(width)) for row in self._screen.history.top]
        shown = self._screen.display[: self._screen.cursor.y + 1]
        return [line.rstrip() for line in [*gone, *shown]]

    @property
    def text(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)


class Terminal:
    """A program that runs in a terminal of its own, from which Ctrl-C reaches it."""

    def __init__(self, command: Sequence[str], width: int = 80, height: int = 24, **environ: str) -> None:
        self.screen, self.output = Screen(width, height), b""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("OCTAVO_") or k == "OCTAVO_CACHE"}
        inherited.pop("NO_COLOR", None)
        env = {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", **environ}
        self.process = subprocess.Popen(
            [sys.executable, "-ISc", _IN_SESSION, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        """Keys are pressed."""
        os.write(self._ours, text.encode())

    def wait(self, seen: Callable[[str], bool] | str) -> str:
        """Reads until the screen's text has this, or is as it should be; the text."""
        is_seen = seen if callable(seen) else (lambda text: seen in text)
        last = time.monotonic() + PATIENCE
        while not is_seen(self.screen.text):
            assert time.monotonic() < last, f"waited in vain: {self.screen.text}"
            assert self._read(), f"the program has ended: {self.screen.text}"
        return self.screen.text

    def end(self) -> int:
        """Reads up to the end of the program: its exit code."""
        last = time.monotonic() + PATIENCE
        while self._read():
            assert time.monotonic() < last, f"it does not end: {self.screen.text}"
        return self.process.wait(timeout=PATIENCE)

    def _read(self) -> bool:
        """Reads what is there within a moment; false at the end."""
        if not select.select([self._ours], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._ours, 65_536)
        except OSError:  # Linux says so that nobody has the other side open
            return False
        self.output += data
        self.screen.feed(data)
        return bool(data)
