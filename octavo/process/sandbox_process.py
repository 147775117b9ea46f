"""A process with limits: what a client sends may crash, fill the memory or never end here.

``Process`` starts it as ``python -m octavo.process.sandbox_process``. It reads calls from its standard input and writes
answers to its standard output, each with its length before it, and ends with its input.
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
from collections import deque
from collections.abc import Callable, Hashable
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
#: Subjects of calls that are remembered of a process.
_MOST_NEAR = 16


class SandboxCall(msgspec.Struct):
    """A function to call."""

    #: ``module:name`` of a function that takes ``content`` (and ``data``) and returns bytes.
    function: str
    content: bytes
    #: Seconds of processor time after which the process is killed.
    seconds: float
    #: A file, say: a second argument of the function, if it is given. It is written as it is, without a copy.
    data: bytes | None = None


Failure = Literal["", "time", "memory", "depth", "error", "killed"]


class SandboxAnswer(msgspec.Struct):
    """What the function returned, or why it did not."""

    content: bytes = b""
    #: It took too long, needed too much memory or too deep a stack, or raised an exception. "killed": its process was
    #: ended by something else, for which the call is not to blame.
    failure: Failure = ""
    #: The exception.
    details: str = ""
    #: Seconds of processor time that it took; of a process that has ended, at most.
    seconds: float = 0.0


class Process:
    """One process, started with the first call, and anew after one that it did not survive."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        #: Calls that the running process has begun.
        self.num_calls = 0
        #: What its latest calls were about (``near`` of ``Sandbox.submit``).
        self.near: deque[Hashable] = deque(maxlen=_MOST_NEAR)
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
            self.num_calls = 0
            self.near.clear()
            self._stop = weakref.finalize(self, _end, self._process)

    def call(self, call: SandboxCall) -> SandboxAnswer:
        """Calls a function in the process, which is running; takes at most a few times the seconds of the call."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        before = _processor_seconds(process.pid)
        self.num_calls += 1
        try:
            _write(process.stdin, msgspec.msgpack.encode(_Header(call.function, call.seconds, call.data is not None)))
            _write(process.stdin, call.content)
            if call.data is not None:
                _write(process.stdin, call.data)
            return self._decode(_read(process.stdout))
        except (EOFError, OSError):
            # Its times can be read until ``_end`` has waited for it.
            seconds = max(0.0, _processor_seconds(process.pid) - before)
            _end(process)
            return SandboxAnswer(failure=_failure(process.returncode), seconds=min(seconds, call.seconds))

    def kill(self) -> None:
        """Ends the process and its call; from any thread."""
        assert self._process is not None
        self._killed = True
        self._process.kill()


#: Signals with which a call ends its process: its timers, a stack or a pointer that leaves the memory, and ``abort`` of
#: libraries that get no memory.
_OWN_SIGNALS: dict[int, Failure] = {
    signal.SIGPROF: "time", signal.SIGALRM: "time",
    signal.SIGSEGV: "depth", signal.SIGBUS: "depth", signal.SIGFPE: "depth",
    signal.SIGABRT: "memory", signal.SIGILL: "memory", signal.SIGTRAP: "memory",
}  # fmt: skip
#: Exit code of a process that could not take a call in for want of memory.
_NO_MEMORY = 77


def _failure(code: int) -> Failure:
    """Why a process has ended during a call.

    SIGKILL counts as nobody's fault also where the kernel sends it for want of memory: the limit of a call ends it
    otherwise, and the machine has less than that.
    """
    return "memory" if code == _NO_MEMORY else _OWN_SIGNALS.get(-code, "killed")


def _start() -> subprocess.Popen[bytes]:
    from octavo.process.children import start_process  # not needed in the process itself

    pipe = subprocess.PIPE
    return start_process("octavo.process.sandbox_process", stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)


def _processor_seconds(pid: int) -> float:
    """Of a process since it was started; 0 if it has been reaped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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


class _Header(msgspec.Struct, array_like=True):
    """What comes before the content of a call."""

    function: str
    seconds: float
    has_data: bool


def _write(stream: IO[bytes], content: bytes) -> None:
    stream.write(len(content).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(content)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes:
    """The next message; raises EOFError if there is none, or not all of it."""
    prefix = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    content = stream.read(length)
    if len(prefix) < _LENGTH_BYTES or len(content) < length:
        raise EOFError
    return content


# --- within the process ----------------------------------------------------------------------------------------------


def main() -> None:
    """Answers calls until the input ends."""
    # A supervisor's signal reaches every process of a service: a call that it ended would count as too much memory.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    _limit_memory()
    while True:
        try:
            call = _read_call(sys.stdin.buffer)
        except EOFError:
            return
        except MemoryError:  # a part of it may still be in the pipe
            os._exit(_NO_MEMORY)
        try:
            answer = msgspec.msgpack.encode(_answer(call))
        except MemoryError:
            answer = msgspec.msgpack.encode(SandboxAnswer(failure="memory"))
        del call
        _write(sys.stdout.buffer, answer)


def _read_call(stream: IO[bytes]) -> SandboxCall:
    header = msgspec.msgpack.decode(_read(stream), type=_Header)
    return SandboxCall(header.function, _read(stream), header.seconds, _read(stream) if header.has_data else None)


def _answer(call: SandboxCall) -> SandboxAnswer:
    module, _, name = call.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    arguments = (call.content,) if call.data is None else (call.content, call.data)
    begin = time.process_time()
    _limit_time(call.seconds)
    try:
        answer = SandboxAnswer(function(*arguments))
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
