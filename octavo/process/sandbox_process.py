"""One process of the sandbox, with limits: a client's data may make it crash, fill its memory or hang.

``Process`` starts ``python -m octavo.process.sandbox_process``, which reads calls from standard input and writes
answers to standard output, each with its length before it, until its input ends.
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

NICENESS = 10
#: Maximum bytes of memory for calls.
MAX_MEMORY = 1 << 30
#: Maximum wall-clock time of a call, as a multiple of its processor time.
_PATIENCE = 4
#: Smaller than the stacks of workers' threads, which compile the same grammars again.
STACK_BYTES = 1 << 20
_LENGTH_BYTES = 4
#: Maximum ``near`` values remembered of a process.
_MOST_NEAR = 16


class SandboxCall(msgspec.Struct):
    """A function call."""

    #: ``module:name`` of a function of ``content`` (and ``data``) that returns bytes.
    function: str
    content: bytes
    seconds: float
    #: Second argument, such as a file; sent without a copy.
    data: bytes | None = None


Failure = Literal["", "time", "memory", "depth", "error", "killed"]


class SandboxAnswer(msgspec.Struct):
    """The function's result, or the reason of its failure."""

    content: bytes = b""
    #: A limit that was exceeded ("depth": of the stack), an exception ("error"), or an outside signal ("killed").
    failure: Failure = ""
    details: str = ""
    #: Processor seconds; an upper bound if the process has ended.
    seconds: float = 0.0


class Process:
    """A process, started by the first call, and again after a call that it did not survive."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self.num_calls = 0
        #: ``near`` values of its latest calls (``Sandbox.submit``).
        self.near: deque[Hashable] = deque(maxlen=_MOST_NEAR)
        #: Ends the last started process.
        self._stop: Callable[[], object] = lambda: None
        self._decode = msgspec.msgpack.Decoder(SandboxAnswer).decode

    @property
    def is_running(self) -> bool:
        return self._process is not None and not self._killed and self._process.poll() is None

    def start(self) -> None:
        if not self.is_running:
            self._stop()
            self._killed, self._process = False, _start()
            self.num_calls = 0
            self.near.clear()
            self._stop = weakref.finalize(self, _end, self._process)

    def call(self, call: SandboxCall) -> SandboxAnswer:
        """Calls a function; takes at most ``_PATIENCE`` times the seconds of the call."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        before = _processor_seconds(process.pid)
        self.num_calls += 1
        try:
            _write(process.stdin, msgspec.msgpack.encode((call.function, call.seconds, call.data is not None)))
            _write(process.stdin, call.content)
            if call.data is not None:
                _write(process.stdin, call.data)
            return self._decode(_read(process.stdout))
        except (EOFError, OSError):
            # The times of a process can be read until ``_end`` reaps it.
            seconds = max(0.0, _processor_seconds(process.pid) - before)
            _end(process)
            # SIGKILL counts as an outside signal even from the OOM killer: a call has less than the machine's memory.
            failure: Failure = _OWN_FAILURES.get(process.returncode, "killed")
            return SandboxAnswer(failure=failure, seconds=min(seconds, call.seconds))

    def kill(self) -> None:
        """Thread-safe."""
        assert self._process is not None
        self._killed = True
        self._process.kill()


#: Exit code if a call did not fit the memory.
_NO_MEMORY = 77
#: A call's own failures by exit code: timers, stack overflow or a bad pointer, ``abort`` of libraries without memory.
_OWN_FAILURES: dict[int, Failure] = {
    -signal.SIGPROF: "time", -signal.SIGALRM: "time",
    -signal.SIGSEGV: "depth", -signal.SIGBUS: "depth", -signal.SIGFPE: "depth",
    -signal.SIGABRT: "memory", -signal.SIGILL: "memory", -signal.SIGTRAP: "memory", _NO_MEMORY: "memory",
}  # fmt: skip


def _start() -> subprocess.Popen[bytes]:
    from octavo.process.start_process import start_process  # not needed in the process itself

    pipe = subprocess.PIPE
    return start_process("octavo.process.sandbox_process", stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)


def _processor_seconds(pid: int) -> float:
    """Processor time of a process so far; 0 if it has been reaped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and reaps it; one that is ending keeps its own exit code."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    process.kill()
    process.wait()


def _write(stream: IO[bytes], content: bytes) -> None:
    stream.write(len(content).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(content)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes:
    prefix = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    content = stream.read(length)
    if len(prefix) < _LENGTH_BYTES or len(content) < length:
        raise EOFError
    return content


# Within the process.


def main() -> None:
    # A supervisor signals all processes of a service; a call that SIGTERM ended would count as out of memory.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    _limit_memory()
    while True:
        try:
            stream = sys.stdin.buffer
            function, seconds, has_data = msgspec.msgpack.decode(_read(stream), type=tuple[str, float, bool])
            content, data = _read(stream), _read(stream) if has_data else None
            call = SandboxCall(function, content, seconds, data)
        except EOFError:
            return
        except MemoryError:  # the pipe may still hold the rest of it
            os._exit(_NO_MEMORY)
        try:
            answer = msgspec.msgpack.encode(_answer(call))
        except MemoryError:
            answer = msgspec.msgpack.encode(SandboxAnswer(failure="memory"))
        del call, content, data
        _write(sys.stdout.buffer, answer)


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
