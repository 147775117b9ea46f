"""The output file: a line for each row that has been answered, appended by one write, so that a run can be resumed."""

from __future__ import annotations

import fcntl
import os
import stat
import uuid
from collections.abc import Container, Iterator
from pathlib import Path

import msgspec

from octavo.batch.rows import Key
from octavo.core.errors import ConfigError, OctavoError

#: How every line begins.
_PREFIX = b'{"id":"batch_req_'


class Response(msgspec.Struct):
    """The response of a route; an error of the request is one, too."""

    status_code: int
    request_id: str
    #: JSON.
    body: msgspec.Raw


class BatchRowError(msgspec.Struct):
    """Why a row did not reach a route."""

    code: str
    message: str
    #: Number of the line in the input; what identifies a row without ``custom_id``.
    line: int


class Result(msgspec.Struct):
    """A line of the output."""

    id: str
    custom_id: str | None
    response: Response | None
    error: BatchRowError | None

    @property
    def key(self) -> Key | None:
        """What identifies the row in the input; None: nothing does."""
        if self.custom_id is not None:
            return self.custom_id
        return None if self.error is None else self.error.line

    @property
    def failed(self) -> bool:
        """Whether this is an error."""
        return self.response is None or self.response.status_code >= 400


def new_id() -> str:
    """A unique id of a line."""
    return f"batch_req_{uuid.uuid4().hex}"


class ResultFile:
    """The output file, open for appending and locked against other runs.

    Invariant: it holds complete lines; what a kill has left behind the last one is cut off when it is opened.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it, and reads which rows it holds.

        Raises:
            ConfigError: it cannot be written, another run writes to it, or it holds something else than results.
        """
        self._path = path
        #: Whether each row that the file holds has failed.
        self.done: dict[Key, bool] = {}
        self._encoder = msgspec.json.Encoder()
        self._descriptor = self._open()
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def append(self, result: Result) -> None:
        """Adds a line. It is in the file when this returns, even if the process is killed then.

        Raises:
            OctavoError: the disk is full, or writing failed otherwise.
        """
        line = self._encoder.encode(result) + b"\n"
        try:
            written = os.write(self._descriptor, line)
        except OSError as e:
            raise OctavoError(f"cannot write {self._path}: {e.strerror}") from None
        if written < len(line):
            raise OctavoError(f"cannot write {self._path}: no space left")
        if result.key is not None:
            self.done[result.key] = result.failed

    def drop_failed(self, index: Container[Key]) -> None:
        """Removes those of the rows that have failed, so that they are answered again; the file is replaced at once.

        Raises:
            ConfigError: the file cannot be written.
        """
        dropped = {key for key, failed in self.done.items() if failed and key in index}
        copy = self._path.with_name(self._path.name + ".tmp")
        try:
            with copy.open("wb") as stream:
                stream.writelines(line for line, result in self._results() if result and result.key not in dropped)
                stream.flush()
                os.fsync(stream.fileno())
            copy.replace(self._path)
        except OSError as e:
            raise ConfigError(f"cannot write {copy}: {e.strerror}") from None
        before, self._descriptor = self._descriptor, self._open()
        os.close(before)
        for key in dropped:
            del self.done[key]

    def close(self) -> None:
        """Closes the file; its lines are then safe from a loss of power too."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _open(self) -> int:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise ConfigError(f"cannot write {self._path}: {e.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{self._path} must be a file, as it is read when a run goes on")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(f"another run writes to {self._path}") from None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _load(self) -> None:
        size = 0
        for number, (line, result) in enumerate(self._results(), start=1):
            if result is None and not line.endswith(b"\n") and (line.startswith(_PREFIX) or _PREFIX.startswith(line)):
                os.ftruncate(self._descriptor, size)  # a kill has cut it short
                return
            if result is None or result.key is None:
                raise ConfigError(f"line {number} of {self._path} is not a result of a batch; name another output file")
            self.done[result.key] = result.failed
            size += len(line)

    def _results(self) -> Iterator[tuple[bytes, Result | None]]:
        """The lines with what they say; None: the line is incomplete or something else."""
        decoder = msgspec.json.Decoder(Result)
        with self._path.open("rb") as stream:
            for line in stream:
                try:
                    yield line, decoder.decode(line) if line.endswith(b"\n") else None
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    yield line, None
