"""The file of what was typed to ``octavo chat``: a text on a line, as JSON, oldest first."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

#: Texts that are kept, and most characters of one; a longer one is not kept.
MAX_TEXTS, MAX_CHARACTERS = 1000, 20_000
#: Bytes of the file that are read, from its end.
_MAX_BYTES = 8 << 20


def default_path() -> Path:
    """A file in the user's folder for what programs remember: below ``XDG_STATE_HOME`` where it is set."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "octavo" / "chat_history.jsonl"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "octavo" / "chat_history.jsonl"


class HistoryFile:
    """Owns the file, which only its user may read, and which several conversations may share.

    Invariant: it holds at most ``MAX_TEXTS`` when a conversation begins. Where it cannot be used, ``failure`` says why,
    and nothing more is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: str | None = None

    def load(self) -> list[str]:
        """The texts, oldest first; the oldest of too many leave the file, and lines that are none are skipped."""
        try:
            with self._opened() as file:
                lines = _last_lines(file)
        except OSError as e:
            self._fail(e)
            return []
        return [text for line in lines if (text := _text(line)) is not None]

    def append(self, text: str) -> None:
        """Adds a text, unless it is too long."""
        if self.failure is not None or len(text) > MAX_CHARACTERS:
            return
        try:
            with self._opened() as file:
                file.write(json.dumps(text).encode() + b"\n")
        except OSError as e:
            self._fail(e)

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        """The file for this process alone; what is written is appended."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.path, "a+b", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            os.fchmod(file.fileno(), 0o600)  # it may come from elsewhere
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _fail(self, error: OSError) -> None:
        self.failure = f"what is typed is not remembered: {self.path}: {error.strerror}"


def _last_lines(file: IO[bytes]) -> list[bytes]:
    """The last lines of the file, to which it is cut."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MAX_BYTES))
    lines = file.read().splitlines(keepends=True)
    if len(lines) > MAX_TEXTS or size > _MAX_BYTES:
        lines = lines[-MAX_TEXTS:]
        file.truncate(0)
        file.write(b"".join(lines))
    return lines


def _text(line: bytes) -> str | None:
    try:
        text = json.loads(line)
    except ValueError:
        return None
    return text if isinstance(text, str) else None
