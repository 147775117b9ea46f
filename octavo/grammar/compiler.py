"""Grammars of the requests of one frontend: compiled once, kept by content."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from octavo.core.structured_outputs import Grammar, StructuredOutputsParams
from octavo.grammar.compile import digest, make_grammar

#: Bytes of sources that are kept.
CACHE_BYTES = 64 << 20


class GrammarCompiler:
    """Turns forms into grammars; from any thread."""

    def __init__(self, special_tokens: Collection[str] = ()) -> None:
        #: For event loops: threads of its own, so that a slow grammar does not hold up what other threads are for.
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="octavo-grammar")
        self._special_tokens = frozenset(special_tokens)
        self._cache: OrderedDict[str, Grammar] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def cached(self, params: StructuredOutputsParams) -> Grammar | None:
        """The grammar of a form that was compiled before.

        Raises:
            InvalidRequestError: as ``compile``.
        """
        key = digest(params)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a form; the first time, this takes from under a millisecond to seconds.

        Raises:
            InvalidRequestError: naming the field and the place of the error.
        """
        grammar = self.cached(params)
        if grammar is None:
            grammar = make_grammar(params, self._special_tokens)
            self._keep(grammar)
        return grammar

    def _keep(self, grammar: Grammar) -> None:
        with self._lock:
            if grammar.key in self._cache:
                return
            self._cache[grammar.key] = grammar
            self._bytes += len(grammar.source)
            while self._bytes > CACHE_BYTES:
                _, old = self._cache.popitem(last=False)
                self._bytes -= len(old.source)
