"""Compiles the grammars of requests once and caches them by content (vLLM: the structured output manager).

A client's schema is compiled on trial in the sandbox: a small schema can keep llguidance busy for minutes, and a deeply
nested one crashes the process that compiles it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import msgspec

from octavo.config.options import StructuredOutputsConfig
from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import Grammar, StructuredOutputsParams
from octavo.core.stats import GrammarStats
from octavo.process.sandbox import Sandbox
from octavo.process.sandbox_process import SandboxAnswer, SandboxCall

#: Maximum bytes of a request's schema or grammar, and of the grammar in llguidance's notation.
MAX_BYTES = 1 << 20
#: Maximum number of relaxed keywords to report, and maximum characters of each path.
MAX_RELAXED = 100
LONGEST_PATH = 300
CACHE_BYTES = 64 << 20
_LONGEST_MESSAGE = 1000
OPTION = "structured_outputs_compile_seconds"

logger = logging.getLogger(__name__)


class CheckRequest(msgspec.Struct):
    """What the sandbox compiles on trial."""

    params: StructuredOutputsParams
    #: Texts that are single tokens of the tokenizer.
    special_tokens: list[str]
    #: Grammars may name tokens by id.
    vocab_size: int


class CheckAnswer(msgspec.Struct):
    """A compiled grammar, or an error."""

    grammar: Grammar | None = None
    #: ``InvalidRequestError.data``.
    error: dict[str, Any] | None = None
    #: JSON pointers of keywords that the grammar does not enforce.
    relaxed: list[str] = []


def digest(params: StructuredOutputsParams) -> str:
    """A cache key; raises InvalidRequestError if the parameters are not JSON, or have more than ``MAX_BYTES``."""
    try:
        content = msgspec.json.encode(params)
    except (TypeError, ValueError, RecursionError, OverflowError) as e:
        raise InvalidRequestError(f"cannot be written as JSON: {e}", path=f"structured_outputs.{params.form}") from None
    if len(content) > MAX_BYTES:
        raise InvalidRequestError(
            f"has {len(content)} bytes as JSON; at most {MAX_BYTES} are compiled",
            path=f"structured_outputs.{params.form}",
        )
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class GrammarCompiler:
    """Turns ``StructuredOutputsParams`` into grammars; thread-safe."""

    def __init__(
        self,
        sandbox: Sandbox,
        special_tokens: Collection[str] = (),
        vocab_size: int = 0,
        seconds: float = 5.0,
        defaults: StructuredOutputsConfig | None = None,
    ) -> None:
        """``defaults``: of parameters that requests leave out; ``seconds``: processor time limit of one grammar."""
        self._sandbox = sandbox
        self._special_tokens = sorted(special_tokens)
        self._vocab_size = vocab_size
        self._seconds = seconds
        self._defaults = defaults or StructuredOutputsConfig()
        self._cache: OrderedDict[str, CheckAnswer] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.stats = GrammarStats()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a request; raises InvalidRequestError with the field and path of an error."""
        future = self._submit(params, "")
        try:
            return _grammar_of(future.result())
        finally:
            future.cancel()  # Ctrl-C leaves no waiter

    async def compile_for(self, client: str, params: StructuredOutputsParams) -> Grammar:
        """``compile`` in a client's turn; also raises ClientLimitError. Cancelling it drops the job."""
        return _grammar_of(await asyncio.wrap_future(self._submit(params, client)))

    def relaxed(self, params: StructuredOutputsParams) -> list[str]:
        """JSON pointers of keywords that the cached grammar does not enforce; empty if it is not cached."""
        cached = self._look_up(digest(self.resolved(params)))
        return [] if cached is None else cached.relaxed

    def resolved(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """The parameters with the engine's defaults filled in."""
        spaces, closes = params.disable_any_whitespace, params.disable_additional_properties
        if spaces is None:
            spaces = self._defaults.disable_any_whitespace and params.whitespace_pattern is None
        if closes is None:
            closes = self._defaults.disable_additional_properties
        return msgspec.structs.replace(params, disable_any_whitespace=spaces, disable_additional_properties=closes)

    def _submit(self, params: StructuredOutputsParams, client: str) -> Future[CheckAnswer]:
        params = self.resolved(params)
        key = digest(params)
        if (cached := self._look_up(key)) is not None:
            done: Future[CheckAnswer] = Future()
            done.set_result(cached)
            return done
        content = msgspec.json.encode(CheckRequest(params, self._special_tokens, self._vocab_size))

        def read(answer: SandboxAnswer) -> CheckAnswer:
            if answer.failure:
                limit = f"{self._seconds:g} seconds to compile, the limit of this engine ({OPTION})"
                reason = {
                    "time": f"takes more than {limit}",
                    "depth": "is nested too deeply to be compiled",
                    "memory": "takes too much memory to be compiled",
                }.get(answer.failure, f"cannot be compiled: {answer.details}")
                refused = CheckAnswer(error={"problem": reason, "path": f"structured_outputs.{params.form}"})
                return self._keep(key, refused, answer.seconds)
            checked = msgspec.json.decode(answer.content, type=CheckAnswer)
            if checked.relaxed:
                shown = " ".join(map(ascii, checked.relaxed))[:_LONGEST_MESSAGE]
                logger.warning("structured_outputs.%s: these keywords are not enforced: %s", params.form, shown)
            return self._keep(key, checked, answer.seconds)

        call = SandboxCall("octavo.grammar.sources:check", content, self._seconds)
        future = self._sandbox.submit(call, read, client=client, key=key)
        self._count_waiting(1)
        future.add_done_callback(lambda _: self._count_waiting(-1))
        return future

    def _count_waiting(self, change: int) -> None:
        with self._lock:
            self.stats.waiting += change

    def _look_up(self, key: str) -> CheckAnswer | None:
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def _keep(self, key: str, answer: CheckAnswer, seconds: float) -> CheckAnswer:
        """Caches an answer unless another thread has; returns the cached one."""
        with self._lock:
            if key not in self._cache:
                self._cache[key] = answer
                self._bytes += _size(answer)
                self.stats.seconds += seconds
                self.stats.compiled += answer.grammar is not None
                self.stats.refused += answer.grammar is None
            answer = self._cache[key]
            while self._bytes > CACHE_BYTES:
                _, old = self._cache.popitem(last=False)
                self._bytes -= _size(old)
        return answer


def _grammar_of(answer: CheckAnswer) -> Grammar:
    if answer.error is not None:
        raise InvalidRequestError(**answer.error)
    assert answer.grammar is not None
    return answer.grammar


def _size(answer: CheckAnswer) -> int:
    source = "" if answer.grammar is None else answer.grammar.source
    return 500 + sum(map(len, (source, str(answer.error), *answer.relaxed)))
