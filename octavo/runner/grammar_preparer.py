"""The grammars of one worker: compiled beside its steps, kept as the plans say."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.core.errors import OctavoError
from octavo.core.request import AnyTask, Generate
from octavo.core.structured_outputs import UNUSABLE
from octavo.runner.preparers import Preparer, PreparerContext
from octavo.sampling.grammar_mask import CompiledGrammar

if TYPE_CHECKING:
    from octavo.grammar.matcher import GrammarTokenizer


class GrammarPreparer(Preparer):
    """Compiles grammars; the vocabulary is made before the first one.

    A pipeline stage that does not sample compiles nothing, and has all at once.
    """

    #: A slow grammar does not hold up others, while llguidance leaves the interpreter to the steps.
    num_threads = 2

    def __init__(self, context: PreparerContext) -> None:
        tokenizer = context.options.tokenizer
        self._folder = context.folder if tokenizer is None else Path(tokenizer)
        self._vocab_size, self._eos_token_ids = context.config.vocab_size, context.config.eos_token_ids
        self._samples = context.samples
        self._compiled: dict[str, CompiledGrammar | None] = {}
        #: Of the threads.
        self._tokenizer: GrammarTokenizer | None = None
        self._lock = threading.Lock()

    def prepare(self, payload: bytes) -> CompiledGrammar | None:
        """See ``Preparer``."""
        if not self._samples:
            return None
        # Imported here, so that a start does not wait for it.
        from octavo.grammar.matcher import GrammarTokenizer, compile_grammar
        from octavo.loader.tokenizer_backend import load_backend

        with self._lock:
            if self._tokenizer is None:
                backend, _ = load_backend(self._folder)
                self._tokenizer = GrammarTokenizer(backend, self._vocab_size, self._eos_token_ids)
        return CompiledGrammar(compile_grammar(payload.decode(), self._tokenizer), self._tokenizer)

    def message(self, payload: bytes, error: Exception) -> str:
        """See ``Preparer``."""
        from octavo.grammar.matcher import GrammarError

        if isinstance(error, GrammarError | OctavoError):
            return f"{UNUSABLE}{error}"
        return f"the grammar could not be compiled: {type(error).__name__}: {error}"

    def keep(self, key: str, thing: CompiledGrammar | None) -> None:
        """See ``Preparer``."""
        self._compiled[key] = thing

    def drop(self, key: str) -> None:
        """See ``Preparer``."""
        del self._compiled[key]

    def find(self, task: AnyTask) -> CompiledGrammar | None:
        """The grammar of a task, which a result has reported; None if it has none, or nothing is sampled here.

        Raises:
            RuntimeError: it was not compiled, or dropped since.
        """
        grammar = task.grammar if isinstance(task, Generate) else None
        if grammar is None or not self._samples:
            return None
        if grammar.key not in self._compiled:
            raise RuntimeError(f"grammar {grammar.key} is not compiled")
        return self._compiled[grammar.key]
