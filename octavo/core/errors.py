"""Every error that Octavo raises on purpose.

Each class also derives from the built-in exception that a caller would guess: ``except ValueError`` catches a bad
value, ``except OctavoError`` all errors. Messages have the problem, the value, and a correct alternative.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

#: First words of problems that are told of the place itself: "seed must be ..." without a colon.
_PREDICATES = frozenset((
    "are", "at", "becomes", "begins", "cannot", "continues", "exclude", "excludes", "goes", "has", "have",
    "holds", "is", "leaves", "may", "must", "names", "needs", "takes", "together", "was",
))  # fmt: skip


def _told_of(place: object, problem: str) -> str:
    return f"{place}{' ' if problem.partition(' ')[0] in _PREDICATES else ': '}{problem}"


class OctavoError(Exception):
    """Base of all errors raised on purpose by Octavo.

    ``problem`` is a sentence, or what is to be said of ``file`` ("cannot be read"), the file or folder at fault.
    """

    def __init__(self, problem: str = "", *, file: str | Path | None = None) -> None:
        super().__init__(problem)
        self.problem, self.file = problem, file

    def __str__(self) -> str:
        return self.problem if self.file is None else _told_of(self.file, self.problem)

    @property
    def data(self) -> dict[str, Any]:
        """Keywords that make the same error in another process."""
        return {"problem": self.problem, "file": None if self.file is None else str(self.file)}


class ConfigError(OctavoError, ValueError):
    """An engine option is unknown, out of range, or contradicts another."""


#: ``kind`` of errors about a prompt, or a prompt with its output, that is longer than the model's context.
CONTEXT_LENGTH = "context_length_exceeded"


class InvalidRequestError(OctavoError, ValueError):
    """A prompt or its sampling parameters cannot be served; only this request fails.

    The message is made of the attributes, so that a caller with other names for the fields can change ``path``:

    >>> str(InvalidRequestError("must be at least 0", path="temperature", got=-1))
    'temperature must be at least 0, not -1'
    >>> str(InvalidRequestError("there is no call 'a' before it", path="input[2].call_id"))
    "input[2].call_id: there is no call 'a' before it"
    """

    def __init__(
        self,
        problem: str,
        *,
        path: str | None = None,
        got: object = ...,
        kind: str = "invalid_value",
        also: Sequence[str] = (),
    ) -> None:
        """
        Args:
            problem: a sentence, or what is to be said of the path ("must be at least 0").
            path: the field, such as ``messages[1].content``; None: the error is not about one.
            got: its value; ``...``: the problem has it, or there is none.
            kind: ``code`` of the error in HTTP responses.
            also: paths of further fields, of which the problem tells together with the first.
        """
        super().__init__(problem)
        self.path, self.got, self.kind, self.also = path, got, kind, also

    def __str__(self) -> str:
        text = self.problem if self.got is ... else f"{self.problem}, not {self.got!r:.200}"
        if self.path is None:
            return text
        place = f"{self.path} and {', '.join(self.also)}" if self.also else self.path
        return _told_of(place, text)

    @property
    def field(self) -> str | None:
        """The first name of the path."""
        return None if self.path is None else self.path.partition(".")[0].partition("[")[0]

    @property
    def data(self) -> dict[str, Any]:
        """As for all errors; the value becomes text of the problem."""
        problem = self.problem if self.got is ... else f"{self.problem}, not {self.got!r:.200}"
        return {"problem": problem, "path": self.path, "kind": self.kind, "also": list(self.also)}

    def at(self, path: str | None, also: Sequence[str] | None = None) -> Self:
        """The same error at another path."""
        error = type(self).__new__(type(self), *self.args)
        error.__dict__.update(self.__dict__, path=path, also=self.also if also is None else also)
        return error

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The error at the path that a caller knows; ``names``: beginnings of paths here -> their names there."""

        def renamed(path: str) -> str:
            begin = path
            while begin and begin not in names:
                begin = begin[: max(begin.rfind("."), begin.rfind("["), 0)]
            return names[begin] + path[len(begin) :] if begin else path

        return self if self.path is None else self.at(renamed(self.path), [renamed(path) for path in self.also])


class UnexpectedKeywordError(InvalidRequestError, TypeError):
    """A keyword that a class or method does not take; the message has the nearest one that it takes."""


class AudioError(InvalidRequestError):
    """A recording is not audio, damaged, empty, or beyond a limit."""


class ClientLimitError(OctavoError, RuntimeError):
    """A client is over its limit; ``retry_after``: seconds until it may send the next request."""

    def __init__(self, problem: str, retry_after: int) -> None:
        super().__init__(problem)
        self.retry_after = retry_after

    @property
    def data(self) -> dict[str, Any]:
        return {"problem": self.problem, "retry_after": self.retry_after}


class SandboxError(OctavoError, RuntimeError):
    """Processes of the sandbox were killed from outside while they worked on a request, which is not to blame."""


class ModelNotFoundError(OctavoError, FileNotFoundError):
    """The model is no folder, file, built-in name or reachable hub id."""


class DownloadError(OctavoError, OSError):
    """A model could not be downloaded, or its files are not the expected ones."""


class UnsupportedModelError(OctavoError, ValueError):
    """The checkpoint's architecture, or one of its settings, is not supported."""


class WeightError(OctavoError, ValueError):
    """A weight file or tensor is missing, truncated, or has the wrong shape or type."""


class AdapterError(OctavoError, ValueError):
    """An adapter's files are missing, changed or invalid, or do not fit the model; ``field``: of the request."""

    def __init__(self, problem: str, *, file: str | Path | None = None, field: str | None = None) -> None:
        super().__init__(problem, file=file)
        self.field = field

    @property
    def data(self) -> dict[str, Any]:
        return {**super().data, "field": self.field}


class AdapterNotFoundError(AdapterError):
    """No adapter of this name is loaded."""


class AdapterConflictError(AdapterError):
    """The name of an adapter is taken, or the adapter is in use or being unloaded."""


class TokenizerError(OctavoError, ValueError):
    """The tokenizer or the chat template is missing, unreadable or failed."""


class InsufficientMemoryError(OctavoError, MemoryError):
    """The weights or the smallest useful KV cache do not fit; the message has the required memory."""


class WorkerError(OctavoError, RuntimeError):
    """A worker failed in a step, whose requests end with an error."""


class SequenceError(WorkerError):
    """A step failed because of one of its sequences; the message is that of the exception."""

    seq_id: int | None = None

    @classmethod
    def of(cls, seq_id: int, error: Exception) -> Self:
        sequence_error = cls(f"{type(error).__name__}: {error}")
        sequence_error.seq_id = seq_id
        return sequence_error


class UnrecordableError(OctavoError, RuntimeError):
    """A recorded step cannot hold an operation of the network, and would leave it out when it is replayed."""


class EngineStateError(OctavoError, RuntimeError):
    """The engine sleeps, or is asked to sleep while requests are unfinished."""


class EngineDeadError(OctavoError, RuntimeError):
    """The engine's process or a worker has ended; unfinished and new requests fail."""


class EngineKilledError(EngineDeadError):
    """A process of the engine was killed or stopped by a signal from outside: no request is to blame."""


def reported_error(kind: str, message: str, data: Mapping[str, Any] | None = None) -> OctavoError:
    """An exception that another process reported by class name; ``WorkerError`` for classes of other packages.

    ``data``: of an ``OctavoError``.
    """
    error_class = globals().get(kind)
    if isinstance(error_class, type) and issubclass(error_class, OctavoError):
        return error_class(**data) if data else error_class(message)
    return WorkerError(f"{kind}: {message}")


_MEMORY_TEXTS = (
    "allocate memory", "out of memory", "failed to map segment", "can't start new thread",
    "resource temporarily unavailable",
)  # fmt: skip


def as_memory_error(error: Exception) -> InsufficientMemoryError | None:
    """Our error for a library's error about exhausted memory, address space or threads; None for others."""
    if isinstance(error, OctavoError) or not isinstance(error, (MemoryError, OSError, RuntimeError, ImportError)):
        return None
    text = str(error)
    ran_out = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not ran_out and not any(phrase in text.lower() for phrase in _MEMORY_TEXTS):
        return None
    line = next((line for line in text.splitlines() if any(phrase in line.lower() for phrase in _MEMORY_TEXTS)), text)
    return InsufficientMemoryError(
        f"memory ran out ({type(error).__name__}: {line.strip()}); 'octavo info' shows what there is and what limits it"
    )


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Raises ``InsufficientMemoryError`` in place of libraries' errors, see ``as_memory_error``."""
    try:
        yield
    except Exception as e:
        if (memory_error := as_memory_error(e)) is None:
            raise
        raise memory_error from e


def did_you_mean(
    name: str,
    names: Iterable[str],
    otherwise: str | None = None,
    *,
    cutoff: float = 0.6,
    written: Callable[[str], str] = repr,
) -> str:
    """A hint such as ``did you mean 'fcfs'?``, or ``otherwise`` (default: all names) if no name is similar."""
    names = list(names)
    for near in difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
        return f"did you mean {written(near)}?"
    return f"known: {', '.join(names)}" if otherwise is None else otherwise
