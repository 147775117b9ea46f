"""Every error that Octavo raises on purpose.

Each class also derives from the built-in exception that a caller would guess, so ``except ValueError`` catches a bad
value and ``except OctavoError`` catches all of them. A message says what was wrong, with which value, and
what would be right.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Callable, Iterable, Iterator
from typing import Self


class OctavoError(Exception):
    """Base of all errors raised on purpose by Octavo."""


class ConfigError(OctavoError, ValueError):
    """An engine option is unknown, out of range, or contradicts another."""


class InvalidRequestError(OctavoError, ValueError):
    """A prompt or its sampling parameters cannot be served; only this request fails."""


class AudioError(InvalidRequestError):
    """A recording cannot be read: it is no audio, damaged, empty, or beyond a limit."""


class ClientLimitError(OctavoError, RuntimeError):
    """A client has used up what this server gives to one; ``retry_after``: seconds until it may go on."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SandboxError(OctavoError, RuntimeError):
    """Processes that checked or decoded what a request brings were ended from outside: the request is not to blame."""


class ModelNotFoundError(OctavoError, FileNotFoundError):
    """The name given for a model is no folder, no file, no built-in name and no reachable hub id."""

    def __str__(self) -> str:  # FileNotFoundError would print its errno form
        return str(self.args[0]) if self.args else ""


class DownloadError(OctavoError, OSError):
    """A model could not be fetched, or what was received is not what was expected."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UnsupportedModelError(OctavoError, ValueError):
    """The checkpoint is readable but its architecture or one of its settings is not supported."""


class WeightError(OctavoError, ValueError):
    """A weight file is missing, truncated, of the wrong shape or type; the message names the tensor or file."""


class AdapterError(OctavoError, ValueError):
    """An adapter cannot be used: its files are missing, changed or wrong, or it does not belong to the model."""


class AdapterNotFoundError(AdapterError):
    """No adapter of this name is loaded."""


class AdapterConflictError(AdapterError):
    """The name of an adapter is taken, or the adapter is in use or being unloaded."""


class TokenizerError(OctavoError, ValueError):
    """The tokenizer or the chat template is missing, unreadable or failed."""


class InsufficientMemoryError(OctavoError, MemoryError):
    """The weights or the smallest useful KV cache do not fit; the message says how much is needed."""


class WorkerError(OctavoError, RuntimeError):
    """A worker failed while it executed a step; the requests of that step end with an error."""


class SequenceError(WorkerError):
    """A step failed at what a worker did for one of its sequences; the message is that of the exception."""

    seq_id: int | None = None

    @classmethod
    def of(cls, seq_id: int, error: Exception) -> Self:
        """The exception of a sequence."""
        made = cls(f"{type(error).__name__}: {error}")
        made.seq_id = seq_id
        return made


class UnrecordableError(OctavoError, RuntimeError):
    """A network computes something that a recorded step cannot hold, so it would be left out of every later step."""


class EngineStateError(OctavoError, RuntimeError):
    """The call is not allowed in this state: the engine sleeps, or is asked to sleep while requests are unfinished."""


class EngineDeadError(OctavoError, RuntimeError):
    """The engine's process or a worker has ended or was shut down; unfinished and new requests fail."""


class EngineKilledError(EngineDeadError):
    """A process of the engine was ended, or stopped, by a signal from outside: nothing that it computed is to blame."""


def reported_error(kind: str, message: str) -> OctavoError:
    """The exception that another process has reported by the name of its class; ``WorkerError`` if it is not ours."""
    error_class = globals().get(kind)
    if isinstance(error_class, type) and issubclass(error_class, OctavoError):
        return error_class(message)
    return WorkerError(f"{kind}: {message}")


#: How libraries say that memory, addresses or threads ran out, where the type of the error does not.
_MEMORY_TEXTS = (
    "allocate memory",
    "out of memory",
    "failed to map segment",
    "can't start new thread",
    "resource temporarily unavailable",
)


def as_memory_error(error: Exception) -> InsufficientMemoryError | None:
    """The error of a library as one of our own, if it says that memory, addresses or threads ran out; else None."""
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
    """Raises ``InsufficientMemoryError`` for the errors of libraries that say so, see ``as_memory_error``."""
    try:
        yield
    except Exception as e:
        memory_error = as_memory_error(e)
        if memory_error is None:
            raise
        raise memory_error from e


# What somebody may have meant who names what is not there.


def did_you_mean(
    name: str,
    names: Iterable[str],
    otherwise: str | None = None,
    *,
    cutoff: float = 0.6,
    written: Callable[[str], str] = repr,
) -> str:
    """A hint such as ``did you mean 'fcfs'?``.

    Args:
        name: what was named.
        names: what is there.
        otherwise: the hint where nothing is like it; default: all names.
        cutoff: least likeness, from 0 to 1.
        written: how the name is written in the hint.
    """
    names = list(names)
    for near in difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
        return f"did you mean {written(near)}?"
    return f"known: {', '.join(names)}" if otherwise is None else otherwise
