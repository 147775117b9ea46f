"""The server's log: plain or JSON lines with request ids, written without ever blocking the server.

Lines go through a bounded queue to a writer thread. When the disk is full, the reader of a pipe is stuck or gone, or
lines come faster than they can be written, lines are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import uuid
from collections.abc import MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.errors import ConfigError

FORMATS = ("plain", "json")
#: Most lines queued for the writer.
QUEUE_LINES = 10_000
#: Most characters (or token ids) of a prompt that are logged.
PROMPT_CHARACTERS = 2_000

#: Id of the HTTP request that the current task handles; every line that it logs carries the id.
request_id: ContextVar[str | None] = ContextVar("octavo_request_id", default=None)

logger = logging.getLogger("octavo.server")


def new_request_id() -> str:
    """A unique request id."""
    return f"req-{uuid.uuid4().hex}"


def start_logging(log_format: str = "plain", level: str = "info", path: Path | None = None) -> LineWriter:
    """Sends the lines of Octavo, uvicorn and asyncio to standard error, or appends them to the file.

    uvicorn must be run with ``log_config=None``; ``log_access`` replaces its access log.

    Raises:
        ConfigError: there is no such format, or the file cannot be opened.
    """
    if log_format not in FORMATS:
        raise ConfigError(f"log_format must be one of {', '.join(FORMATS)}, not {log_format!r}")
    writer = LineWriter(2 if path is None else _open(path))
    writer.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter())
    for name in ("octavo", "uvicorn", "asyncio"):
        target = logging.getLogger(name)
        target.handlers = [writer]
        target.propagate = False
        target.setLevel(level.upper() if name == "octavo" else logging.WARNING)
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers = []
    logging.getLogger("uvicorn.access").disabled = True
    return writer


def log_access(method: str, path: str, status: int, seconds: float, client: str | None = None, **fields: Any) -> None:
    """Logs an HTTP request that has ended. ``fields`` may hold token counts, never text of the user."""
    logger.info(
        "%s %s",
        method,
        path,
        extra={"fields": {"status": status, "ms": round(seconds * 1000, 1), "client": client, **fields}},
    )


def log_fields(scope: MutableMapping[str, Any]) -> dict[str, Any]:
    """Fields of the access log's line of the request in this ASGI scope; what is added appears there."""
    fields: dict[str, Any] = scope.setdefault("state", {}).setdefault("log_fields", {})
    return fields


def log_prompt(prompt: str | list[int]) -> None:
    """Logs a prompt; to be called only with ``log_prompts``."""
    shown = prompt[:PROMPT_CHARACTERS]
    logger.info("prompt", extra={"fields": {"prompt": shown, "length": len(prompt)}})


class LineWriter(logging.Handler):
    """Writes lines to a file descriptor in a thread.

    Invariant: ``emit`` neither blocks nor raises. Every line is either written or counted in ``dropped``.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        #: Lines lost so far.
        self.dropped = 0
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes | None] = queue.Queue(QUEUE_LINES)
        # Whether an error cut the last line short: the next one then begins with a line end.
        self._torn = False
        self._thread = threading.Thread(target=self._write_all, name="octavo-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Formats in the calling task, where the request id is known; the thread writes."""
        try:
            line = self.format(record) + "\n"
            self._lines.put_nowait(line.encode("utf-8", "backslashreplace"))
        except Exception:
            self.dropped += 1

    def stop(self, timeout: float = 1.0) -> None:
        """Writes queued lines for up to ``timeout`` seconds. Later lines are lost."""
        try:
            self._lines.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except OSError:
                self.dropped += 1

    def _write(self, line: bytes) -> None:
        rest = b"\n" + line if self._torn else line
        while rest:
            written = os.write(self._descriptor, rest)
            self._torn = written > 0
            rest = rest[written:]
        self._torn = False


class PlainFormatter(logging.Formatter):
    """``TIME LEVEL MESSAGE key=value ...``: one line, plus tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        fields = _fields(record)
        words = [_time(record).isoformat(sep=" ", timespec="milliseconds"), record.levelname, _message(record)]
        words += [f"{name}={_plain(value)}" for name, value in fields.items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601), level, logger, message, the fields, request_id, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(_clean(line), enc_hook=str).decode()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as e:
        raise ConfigError(f"cannot write the log file {path}: {e.strerror}") from None


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _message(record: logging.LogRecord) -> str:
    # A path or header sent by a client must not be able to forge a log line.
    return record.getMessage().replace("\r", "\\r").replace("\n", "\\n")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = dict(getattr(record, "fields", {}))
    fields["request_id"] = fields.pop("request_id", None) or request_id.get()
    return {name: value for name, value in fields.items() if value is not None}


def _plain(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


def _clean(value: Any) -> Any:
    """Replaces lone surrogates, which JSON cannot hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {name: _clean(item) for name, item in value.items()}
    return value
