"""Grammars of a worker: compiled beside the steps, and the tokens that they force."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from octavo.core.errors import OctavoError
from octavo.core.failures import GRAMMAR, SequenceFailure
from octavo.core.request import AnyTask, Generate
from octavo.kernels.forward_batch import ForwardBatch, ForwardOutput
from octavo.runner.input_batch import StepInputs
from octavo.runner.preparers import Preparer
from octavo.runner.row_feature import RowFeature
from octavo.sampling.logits_processors import CompiledGrammar

if TYPE_CHECKING:
    from octavo.grammar.matcher import GrammarTokenizer
    from octavo.runner.model_runner import QueuedStep
    from octavo.runner.preparers import PreparerContext


class GrammarPreparer(Preparer):
    """Compiles grammars; builds the vocabulary before the first one.

    A pipeline stage that does not sample compiles nothing, and reports each grammar at once.
    """

    #: A slow grammar does not delay others; llguidance releases the interpreter's lock.
    num_threads = 2

    def __init__(self, context: PreparerContext) -> None:
        super().__init__()
        self._folder, self._own_tokenizer = context.folder, context.options.tokenizer
        self._vocab_size, self._eos_token_ids = context.config.vocab_size, context.config.eos_token_ids
        self._samples = context.samples
        self._tokenizer: GrammarTokenizer | None = None
        self._lock = threading.Lock()

    def prepare(self, payload: bytes) -> CompiledGrammar | None:
        if not self._samples:
            return None
        # Late, so that a start does not wait for the imports.
        from octavo.grammar.matcher import GrammarTokenizer, compile_grammar
        from octavo.loader.resolve import resolve_tokenizer
        from octavo.loader.tokenizer_files import load_backend

        with self._lock:
            if self._tokenizer is None:
                own = self._own_tokenizer
                backend, _ = load_backend(self._folder if own is None else resolve_tokenizer(own))
                self._tokenizer = GrammarTokenizer(backend, self._vocab_size, self._eos_token_ids)
        return CompiledGrammar(compile_grammar(payload.decode(), self._tokenizer), self._tokenizer)

    def failure(self, payload: bytes, error: Exception) -> SequenceFailure:
        from octavo.grammar.matcher import GrammarError

        if isinstance(error, GrammarError | OctavoError):
            return SequenceFailure(f"the grammar cannot be used: {error}", GRAMMAR)
        return SequenceFailure(f"the grammar could not be compiled: {type(error).__name__}: {error}")

    def find_for(self, task: AnyTask) -> CompiledGrammar | None:
        """The compiled grammar of a task; None if it has none, or this worker does not sample."""
        grammar = task.grammar if isinstance(task, Generate) else None
        compiled: CompiledGrammar | None = None if grammar is None or not self._samples else self.find(grammar.key)
        return compiled


class ForcedTokens(RowFeature):
    """Reports the tokens that grammars force after the sampled ones (jump-forward decoding)."""

    def after_step(self, inputs: StepInputs, batch: ForwardBatch, output: ForwardOutput, step: QueuedStep) -> None:
        if len(inputs.sampling) and self.worker.sampler.may_force(inputs.rows[inputs.sampling]):
            step.on_tokens.append(lambda: self._report(step))

    def _report(self, step: QueuedStep) -> None:
        batch, sampler = self.worker.batch, self.worker.sampler
        rows = {seq_id: row for seq_id in step.result.seq_ids if (row := batch.find_row(seq_id)) is not None}
        forced = {seq_id: tokens for seq_id, row in rows.items() if (tokens := sampler.forced_tokens(row))}
        step.result.forced_tokens = forced
