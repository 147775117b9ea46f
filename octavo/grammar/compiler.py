"""Grammars of the requests of one frontend: compiled once, kept by content.

What a client sends is compiled on trial in processes of their own: a small schema can keep llguidance busy for minutes,
and a deep one ends the process that compiles it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.structured_outputs import Grammar, StructuredOutputsParams
from octavo.grammar.check_process import CheckAnswer, CheckRequest, read_message, write_message
from octavo.grammar.digest import digest

#: Bytes of grammars, and of messages about those that cannot be compiled, that are kept.
CACHE_BYTES = 64 << 20
NUM_THREADS = 32
#: Processes; as many slow grammars do not yet hold up others.
NUM_PROCESSES = 2
OPTION = "structured_outputs_compile_seconds"


@dataclass
class GrammarStats:
    """What a compiler has done so far; forms that it knew do not count."""

    compiled: int = 0
    refused: int = 0
    #: Of its processes together.
    seconds: float = 0.0


class GrammarCompiler:
    """Turns forms into grammars; from any thread."""

    def __init__(self, special_tokens: Collection[str] = (), vocab_size: int = 0, seconds: float = 5.0) -> None:
        """``special_tokens``, ``vocab_size``, ``seconds``: see ``CheckRequest``."""
        #: For event loops: threads of its own, so that a slow grammar does not hold up what other threads are for. They
        #: wait for the processes, and for forms that another compiles.
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="octavo-grammar")
        #: The one used last comes first, so that more are started only where one is busy.
        self._checkers: queue.LifoQueue[Checker] = queue.LifoQueue()
        for _ in range(NUM_PROCESSES):
            self._checkers.put(Checker(sorted(special_tokens), vocab_size, seconds))
        self._cache: OrderedDict[str, CheckAnswer] = OrderedDict()
        #: Forms that are being compiled, for other requests with the same.
        self._compiling: dict[str, Future[CheckAnswer]] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        self.stats = GrammarStats()

    @property
    def num_compiling(self) -> int:
        """Forms that are being compiled or wait for a process."""
        return len(self._compiling)

    def cached(self, params: StructuredOutputsParams) -> Grammar | None:
        """The grammar of a form that was compiled before; None: it was not.

        Raises:
            InvalidRequestError: as ``compile``.
        """
        key = digest(params)
        with self._lock:
            answer = self._look_up(key)
        return None if answer is None else _grammar_of(answer)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a form; the first time, this takes from a millisecond to the limit.

        Raises:
            InvalidRequestError: naming the field and the place of the error.
        """
        key = digest(params)
        with self._lock:
            answer = self._look_up(key)
            known = self._compiling.get(key)
            if answer is None and known is None:
                future = self._compiling[key] = Future()
        if answer is not None:
            return _grammar_of(answer)
        if known is not None:
            return _grammar_of(known.result())
        checker = self._checkers.get()
        start = time.monotonic()
        try:
            answer = checker.check(params)
        except BaseException as e:
            future.set_exception(e)
            raise
        else:
            self._keep(key, answer, time.monotonic() - start)
            future.set_result(answer)
        finally:
            self._checkers.put(checker)
            del self._compiling[key]
        return _grammar_of(answer)

    def _look_up(self, key: str) -> CheckAnswer | None:
        if key in self._cache:
            self._cache.move_to_end(key)
        return self._cache.get(key)

    def _keep(self, key: str, answer: CheckAnswer, seconds: float) -> None:
        with self._lock:
            self.stats.seconds += seconds
            self.stats.compiled += answer.grammar is not None
            self.stats.refused += answer.grammar is None
            self._cache[key] = answer
            self._bytes += _size(answer)
            while self._bytes > CACHE_BYTES:
                _, old = self._cache.popitem(last=False)
                self._bytes -= _size(old)


class Checker:
    """One process that compiles grammars, started when the first comes, and anew after one that it did not survive."""

    def __init__(self, special_tokens: list[str], vocab_size: int, seconds: float) -> None:
        self._special_tokens = special_tokens
        self._vocab_size = vocab_size
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._decode = msgspec.msgpack.Decoder(CheckAnswer).decode

    def check(self, params: StructuredOutputsParams) -> CheckAnswer:
        """The grammar of a form, or what is wrong with it."""
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
            weakref.finalize(self, _end, self._process)
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            write_message(process.stdin, CheckRequest(params, self._special_tokens, self._vocab_size, self._seconds))
            return self._decode(read_message(process.stdout))
        except (EOFError, OSError):
            _end(process)
            return CheckAnswer(error=f"structured_outputs.{params.form} {self._reason(process.returncode)}")

    def _reason(self, code: int) -> str:
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            return f"takes more than {self._seconds:g} seconds to compile, the limit of this engine ({OPTION})"
        if code in (-signal.SIGSEGV, -signal.SIGBUS):
            return "is nested too deeply to be compiled"
        return "takes too much memory to be compiled"


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(os.path.abspath(part) for part in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "octavo.grammar.check_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        process_group=0,  # Ctrl-C is for this process alone
    )


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


def _grammar_of(answer: CheckAnswer) -> Grammar:
    if answer.grammar is None:
        raise InvalidRequestError(answer.error)
    return answer.grammar


def _size(answer: CheckAnswer) -> int:
    return 500 + len(answer.error) + (0 if answer.grammar is None else len(answer.grammar.source))
