"""Grammars of a worker without a model: compiling takes some steps, and every rule of the plan is checked."""

from __future__ import annotations

from octavo.core.plan import StepPlan, StepResult
from octavo.core.structured_outputs import Grammar


def grammar(key: str) -> Grammar:
    """One that the fake worker knows."""
    return Grammar(key, f"source of {key}")


class FakeGrammars:
    """The worker's grammars."""

    def __init__(self, steps_per_grammar: int = 0) -> None:
        #: Steps that one takes, while others wait.
        self.steps_per_grammar = steps_per_grammar
        #: By key: the message with which it fails.
        self.failing: dict[str, str] = {}
        self.compiled: set[str] = set()
        self.failed: set[str] = set()
        #: Those under way, in order.
        self.compiling: dict[str, Grammar] = {}
        self.num_compilations = self.num_waits = 0
        #: Whether a step failed: then plans may repeat what is done.
        self.may_repeat = False
        self._steps = 0
        self._done: list[str] = []
        self._errors: dict[str, str] = {}

    def apply(self, plan: StepPlan) -> None:
        """Drops, and begins to compile; waits if the plan says so."""
        for key in plan.grammars_to_drop:
            assert key in self.compiled or key in self.failed or self.may_repeat, f"{key} is dropped, but is not there"
            self.compiled.discard(key)
            self.failed.discard(key)
        for key in plan.grammars_to_cancel:
            if self.compiling.pop(key, None) is not None:
                self.failed.add(key)
                self._errors[key] = "cancelled"
        for wanted in plan.grammars_to_compile:
            assert wanted.source == f"source of {wanted.key}"
            known = wanted.key in self.compiled or wanted.key in self.compiling
            assert not known or self.may_repeat, f"{wanted.key} is compiled twice"
            if wanted.key in self.compiled:
                self._done.append(wanted.key)
            elif wanted.key not in self._errors:
                self.compiling.setdefault(wanted.key, wanted)
                self.num_compilations += 1
        self._compile(plan.awaits_grammar)

    def _compile(self, waits: bool) -> None:
        self.num_waits += waits
        self._steps = self.steps_per_grammar if waits else self._steps + 1
        while self.compiling and self._steps >= self.steps_per_grammar:
            self._steps -= self.steps_per_grammar
            key = next(iter(self.compiling))
            del self.compiling[key]
            if key in self.failing:
                self.failed.add(key)
                self._errors[key] = self.failing[key]
            else:
                self.compiled.add(key)
                self._done.append(key)

    def lose_report(self) -> None:
        """A step failed: what it would have reported is lost."""
        self.may_repeat = True
        self._done, self._errors = [], {}

    def report(self, result: StepResult) -> None:
        """Adds what is known to a result."""
        result.compiled_grammars, self._done = self._done, []
        result.grammar_errors, self._errors = self._errors, {}
