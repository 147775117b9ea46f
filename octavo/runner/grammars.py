"""The grammars of one worker: compiled beside its steps, kept as the plans say."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path

from octavo.core.config import EngineConfig
from octavo.core.errors import OctavoError
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import AnyTask, Generate
from octavo.core.structured_outputs import UNUSABLE, Grammar
from octavo.grammar.matcher import GrammarError, GrammarTokenizer, compile_grammar
from octavo.loader.tokenizer_backend import load_backend
from octavo.sampling.grammar_mask import CompiledGrammar

#: Seconds that a step without other work waits for a grammar, after which the scheduler looks for new requests.
_WAIT = 0.02


class GrammarStore:
    """Obeys the plans: which grammars are compiled and kept is decided there.

    Two threads compile, so that a slow grammar does not hold up others, while llguidance leaves the interpreter to the
    steps. The vocabulary is made before the first grammar. One that cannot be compiled is an error of that one alone.
    """

    def __init__(self, options: EngineConfig, config: ModelConfig, folder: Path, *, samples: bool = True) -> None:
        """Without ``samples``, in a pipeline stage that is not the last, nothing is compiled, and all is reported."""
        self._folder = folder if options.tokenizer is None else Path(options.tokenizer)
        self._vocab_size, self._eos_token_ids = config.vocab_size, config.eos_token_ids
        self._samples = samples
        self._compiled: dict[str, CompiledGrammar] = {}
        self._compiling: dict[str, Future[CompiledGrammar]] = {}
        # It ends its threads when this store is no longer referred to.
        self._compiler: ThreadPoolExecutor | None = None
        #: Of the threads.
        self._tokenizer: GrammarTokenizer | None = None
        self._lock = threading.Lock()

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        """Does what the plan says of grammars, and adds to the result what is known since the last one."""
        for key in plan.grammars_to_drop:
            self._compiled.pop(key, None)
            if (compiling := self._compiling.pop(key, None)) is not None:
                compiling.cancel()
        for key in plan.grammars_to_cancel:
            if key in self._compiling:
                self._compiling[key].cancel()
        for grammar in plan.grammars_to_compile:
            if grammar.key in self._compiled or not self._samples:
                result.compiled_grammars.append(grammar.key)
            elif grammar.key not in self._compiling:
                self._compiler = self._compiler or ThreadPoolExecutor(2, "grammars")
                self._compiling[grammar.key] = self._compiler.submit(self._compile, grammar)
        if self._compiling:
            if plan.awaits_grammar and not result.compiled_grammars:
                wait(self._compiling.values(), _WAIT, FIRST_COMPLETED)
            self._receive(result)

    def _receive(self, result: StepResult) -> None:
        for key in [key for key, future in self._compiling.items() if future.done()]:
            try:
                self._compiled[key] = self._compiling.pop(key).result()
            except (GrammarError, OctavoError) as e:
                result.grammar_errors[key] = f"{UNUSABLE}{e}"
            except CancelledError:
                result.grammar_errors[key] = "no request waited for the grammar"
            except Exception as e:
                result.grammar_errors[key] = f"the grammar could not be compiled: {type(e).__name__}: {e}"
            else:
                result.compiled_grammars.append(key)

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

    # --- the threads ------------------------------------------------------------------------------------------------

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        with self._lock:
            if self._tokenizer is None:
                backend, _ = load_backend(self._folder)
                self._tokenizer = GrammarTokenizer(backend, self._vocab_size, self._eos_token_ids)
        return CompiledGrammar(compile_grammar(grammar.source, self._tokenizer), self._tokenizer)
