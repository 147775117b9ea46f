"""Grammars of the requests of one frontend: compiled once, kept by content.

What a client sends is compiled on trial in the sandbox: a small schema can keep llguidance busy for minutes, and a deep
one ends the process that compiles it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future

import msgspec

from octavo.config.options import StructuredOutputsConfig
from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import Grammar, StructuredOutputsParams
from octavo.core.stats import GrammarStats
from octavo.process.sandbox import Sandbox
from octavo.process.sandbox_process import SandboxAnswer, SandboxCall

# Forms as the frontend has them: their names in caches, and what is asked and answered when one is compiled on trial.

#: Most bytes of a form as a request gives it, and as it is written in llguidance's notation.
MAX_BYTES = 1 << 20
#: Most keywords that are reported as left out, and most characters of the place of each.
MAX_RELAXED = 100
LONGEST_PATH = 300


class CheckRequest(msgspec.Struct):
    """A form to compile."""

    params: StructuredOutputsParams
    #: Texts that the tokenizer has as a token of its own.
    special_tokens: list[str]
    #: Grammars may name tokens by their ids.
    vocab_size: int


class CheckAnswer(msgspec.Struct):
    """Its grammar, or what is wrong with it."""

    grammar: Grammar | None = None
    error: str = ""
    #: Places of keywords that it does not obey, and leaves out.
    relaxed: list[str] = []


def digest(params: StructuredOutputsParams) -> str:
    """The name of a form in caches: equal where all fields are equal, the order of properties among them.

    Raises:
        InvalidRequestError: the form has a value that JSON has not, is too deep, or too large.
    """
    try:
        content = msgspec.json.encode(params)
    except (TypeError, ValueError, RecursionError, OverflowError) as e:
        raise InvalidRequestError(f"structured_outputs.{params.form} cannot be written as JSON: {e}") from None
    if len(content) > MAX_BYTES:
        raise InvalidRequestError(
            f"structured_outputs.{params.form} has {len(content)} bytes as JSON; at most {MAX_BYTES} are compiled"
        )
    return hashlib.blake2b(content, digest_size=16).hexdigest()


#: Bytes of grammars, and of messages about those that cannot be compiled, that are kept.
CACHE_BYTES = 64 << 20
#: Most characters of a line of the log.
_LONGEST_MESSAGE = 1000
OPTION = "structured_outputs_compile_seconds"

logger = logging.getLogger(__name__)


class GrammarCompiler:
    """Turns forms into grammars; from any thread."""

    def __init__(
        self,
        sandbox: Sandbox,
        special_tokens: Collection[str] = (),
        vocab_size: int = 0,
        seconds: float = 5.0,
        defaults: StructuredOutputsConfig | None = None,
    ) -> None:
        """``special_tokens``, ``vocab_size``: see ``CheckRequest``; ``seconds``: see ``SandboxCall``.

        ``defaults``: of what forms leave open.
        """
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
        """The grammar of a form; the first time, this takes from a millisecond to the limit.

        Raises:
            InvalidRequestError: naming the field and the place of the error.
        """
        future = self._submit(params, "")
        try:
            return _grammar_of(future.result())
        finally:
            future.cancel()  # after Ctrl-C nobody waits for it

    async def compile_for(self, client: str, params: StructuredOutputsParams) -> Grammar:
        """``compile`` in the turn of a client, for an event loop; to cancel it drops the form.

        Raises:
            InvalidRequestError: as ``compile``.
            ClientLimitError: the client has taken its seconds.
        """
        return _grammar_of(await asyncio.wrap_future(self._submit(params, client)))

    def relaxed(self, params: StructuredOutputsParams) -> list[str]:
        """Places of the keywords of a compiled form that its outputs are not held to; none if it is not kept."""
        known = self._look_up(digest(self.resolved(params)))
        return [] if known is None else known.relaxed

    def resolved(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """The form, in which the engine's options say what it leaves open."""
        spaces, closes = params.disable_any_whitespace, params.disable_additional_properties
        if spaces is None:
            spaces = self._defaults.disable_any_whitespace and params.whitespace_pattern is None
        if closes is None:
            closes = self._defaults.disable_additional_properties
        return msgspec.structs.replace(params, disable_any_whitespace=spaces, disable_additional_properties=closes)

    def _submit(self, params: StructuredOutputsParams, client: str) -> Future[CheckAnswer]:
        params = self.resolved(params)
        key = digest(params)
        if (known := self._look_up(key)) is not None:
            done: Future[CheckAnswer] = Future()
            done.set_result(known)
            return done
        content = msgspec.json.encode(CheckRequest(params, self._special_tokens, self._vocab_size))

        def read(answer: SandboxAnswer) -> CheckAnswer:
            if answer.failure:
                refused = CheckAnswer(error=f"structured_outputs.{params.form} {self._reason(answer)}")
                return self._keep(key, refused, answer.seconds)
            checked = msgspec.json.decode(answer.content, type=CheckAnswer)
            if checked.relaxed:
                shown = " ".join(map(ascii, checked.relaxed))[:_LONGEST_MESSAGE]
                logger.warning("structured_outputs.%s: outputs are not held to these keywords: %s", params.form, shown)
            return self._keep(key, checked, answer.seconds)

        call = SandboxCall("octavo.grammar.sources:check", content, self._seconds)
        future = self._sandbox.submit(call, read, client=client, key=key)
        self._count_waiting(1)
        future.add_done_callback(lambda _: self._count_waiting(-1))
        return future

    def _count_waiting(self, change: int) -> None:
        with self._lock:
            self.stats.waiting += change

    def _reason(self, answer: SandboxAnswer) -> str:
        if answer.failure == "time":
            return f"takes more than {self._seconds:g} seconds to compile, the limit of this engine ({OPTION})"
        if answer.failure == "depth":
            return "is nested too deeply to be compiled"
        if answer.failure == "memory":
            return "takes too much memory to be compiled"
        return f"cannot be compiled: {answer.details}"

    def _look_up(self, key: str) -> CheckAnswer | None:
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def _keep(self, key: str, answer: CheckAnswer, seconds: float) -> CheckAnswer:
        """Keeps an answer, if there is none yet; the one that is kept."""
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
    if answer.grammar is None:
        raise InvalidRequestError(answer.error)
    return answer.grammar


def _size(answer: CheckAnswer) -> int:
    return (
        500
        + len(answer.error)
        + sum(map(len, answer.relaxed))
        + (0 if answer.grammar is None else len(answer.grammar.source))
    )
