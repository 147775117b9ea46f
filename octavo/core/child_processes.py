"""What processes that an engine starts for itself say of their logs and errors, and that they end with it."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import msgspec

from octavo.core.errors import OctavoError, SequenceError, reported_error


def end_with(other: Any, clean_up: Callable[[], object] = lambda: None) -> None:
    """Ends this process when the other side of a socket has closed it, whatever this one does then.

    ``clean_up`` is called before. A thread waits for that; nothing is read from the socket here.
    """
    closed = getattr(select, "POLLRDHUP", 0)  # a half that was closed
    poll = select.poll()
    poll.register(other, closed)

    def wait() -> None:
        while not any(events & (closed | select.POLLHUP | select.POLLERR) for _, events in poll.poll()):
            time.sleep(0.05)
        clean_up()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class LogMessage(msgspec.Struct, tag=True, array_like=True):
    """A log message for logger "octavo" of the process that has started this one."""

    level: int
    text: str


class _LogSender(logging.Handler):
    def __init__(self, send: Callable[[LogMessage], object]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(LogMessage(record.levelno, self.format(record)))  # with the traceback, if it has one


def send_logs(level: int, send: Callable[[LogMessage], object]) -> None:
    """From now on messages of logger "octavo" from ``level`` on are given to ``send``, from any thread, and no others.

    The process that gets them writes them as it writes its own.
    """
    logger = logging.getLogger("octavo")
    logger.handlers, logger.propagate = [_LogSender(send)], False
    logger.setLevel(level)


class Failure(msgspec.Struct, array_like=True):
    """An exception of another process: the name of its class, its message, and of a ``SequenceError`` the sequence."""

    kind: str
    message: str
    seq_id: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The failure that says of an exception what can be said to another process."""
        return cls(type(error).__name__, str(error), getattr(error, "seq_id", None))

    @property
    def is_known(self) -> bool:
        """Whether it is an error that is raised on purpose, with a message for users."""
        return type(self.error()).__name__ == self.kind

    def error(self) -> OctavoError:
        """The exception; see ``reported_error``."""
        error = reported_error(self.kind, self.message)
        if isinstance(error, SequenceError):
            error.seq_id = self.seq_id
        return error
