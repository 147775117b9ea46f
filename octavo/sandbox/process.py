"""A process with limits: what a client sends may crash, fill the memory or never end here.

``Process`` starts it as ``python -m octavo.sandbox.process``. It reads calls from its standard input and writes answers
to its standard output, each with its length before it, and ends with its input.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import IO, Literal

import msgspec

#: The engine's steps go first.
NICENESS = 10
#: Memory that a process may take for calls, in bytes.
MAX_MEMORY = 1 << 30
#: Of a busy machine: so many times the seconds of processor time may pass.
_PATIENCE = 4
#: Less than threads of workers have, in which the same grammar is compiled again.
STACK_BYTES = 1 << 20
_LENGTH_BYTES = 4


class SandboxCall(msgspec.Struct):
    """A function to call."""

    #: ``module:name`` of a function that takes bytes and returns bytes.
    function: str
    content: bytes
    #: Seconds of processor time after which the process is killed.
    seconds: float


class SandboxAnswer(msgspec.Struct):
    """What the function returned, or why it did not."""

    content: bytes = b""
    #: It took too long, needed too much memory or too deep a stack, or raised an exception.
    failure: Literal["", "time", "memory", "depth", "error"] = ""
    #: The exception.
    details: str = ""
    #: Seconds of processor time that it took; of a process that has ended, at most.
    seconds: float = 0.0


class Process:
    """One process, started with the first call, and anew after one that it did not survive."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        #: Ends the last process that was started.
        self._stop: Callable[[], object] = lambda: None
        self._decode = msgspec.msgpack.Decoder(SandboxAnswer).decode

    @property
    def is_running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and not self._killed and self._process.poll() is None

    def start(self) -> None:
        """Starts it if it is not running."""
        if not self.is_running:
            self._stop()
            self._killed, self._process = False, _start()
            self._stop = weakref.finalize(self, _end, self._process)

    def call(self, call: SandboxCall) -> SandboxAnswer:
        """Calls a function in the process, which is running; takes at most a few times the seconds of the call."""
        process, begin = self._process, time.monotonic()
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            _write(process.stdin, call)
            return self._decode(_read(process.stdout))
        except (EOFError, OSError):
            _end(process)
            return SandboxAnswer(
                failure=_failure(process.returncode), seconds=min(time.monotonic() - begin, call.seconds)
            )

    def kill(self) -> None:
        """Ends the process and its call; from any thread."""
        assert self._process is not None
        self._killed = True
        self._process.kill()


def _failure(code: int) -> Literal["time", "memory", "depth"]:
    if code in (-signal.SIGPROF, -signal.SIGALRM):
        return "time"
    return "depth" if code in (-signal.SIGSEGV, -signal.SIGBUS) else "memory"


def _start() -> subprocess.Popen[bytes]:
    from octavo.core.start_process import start_process  # not needed in the process itself

    pipe = subprocess.PIPE
    return start_process("octavo.sandbox.process", stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, if it has not ended, without losing its exit code."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    process.kill()
    process.wait()


def _write(stream: IO[bytes], message: msgspec.Struct) -> None:
    content = msgspec.msgpack.encode(message)
    stream.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes:
    """The next message; raises EOFError if there is none."""
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    content = stream.read(length)
    if not content:
        raise EOFError
    return content


# --- within the process ----------------------------------------------------------------------------------------------


def main() -> None:
    """Answers calls until the input ends."""
    # A supervisor's signal reaches every process of a service: a call that it ended would count as too much memory.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    _limit_memory()
    decode = msgspec.msgpack.Decoder(SandboxCall).decode
    while True:
        try:
            call = decode(_read(sys.stdin.buffer))
        except EOFError:
            return
        _write(sys.stdout.buffer, _answer(call))


def _answer(call: SandboxCall) -> SandboxAnswer:
    module, _, name = call.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    begin = time.process_time()
    _limit_time(call.seconds)
    try:
        answer = SandboxAnswer(function(call.content))
    except MemoryError:
        answer = SandboxAnswer(failure="memory")
    except RecursionError:
        answer = SandboxAnswer(failure="depth")
    except Exception as e:
        answer = SandboxAnswer(failure="error", details=f"{type(e).__name__}: {e}")
    _limit_time(0)
    answer.seconds = time.process_time() - begin
    return answer


def _limit_time(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * _PATIENCE)


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    for limit, value in ((resource.RLIMIT_AS, taken + MAX_MEMORY), (resource.RLIMIT_STACK, STACK_BYTES)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if __name__ == "__main__":
    main()
