"""What a worker without a model prepares: each thing takes some steps, and every rule of the plan is checked."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.config.options import AdapterOptions
from octavo.core.failures import ADAPTER, GRAMMAR, SequenceFailure
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import (
    KINDS,
    AdapterRef,
    Limits,
    Preparation,
    adapter_preparation,
    grammar_preparation,
    limits_of,
)
from octavo.core.sampling_params import Grammar

#: What all images in memory may take together.
IMAGE_MEMORY = 7


def lora(key: str) -> AdapterRef:
    """A LoRA adapter that the fake worker knows."""
    return AdapterRef(key, f"name of {key}", f"path/of/{key}", 8)


def prompt_adapter(key: str) -> AdapterRef:
    """One that takes no slot."""
    return AdapterRef(key, f"name of {key}", f"path/of/{key}", 0, 4)


def grammar(name: str) -> Grammar:
    """A grammar that the fake worker knows."""
    return Grammar(f"grammar {name}", f"source of {name}")


def compilation(name: str) -> Preparation:
    """The preparation of a grammar."""
    return grammar_preparation(grammar(name))


def load(ref: AdapterRef) -> Preparation:
    """The preparation of an adapter."""
    return adapter_preparation(ref)


def adapter_options(max_loras: int, max_cpu_loras: int | None = None, max_prompt_adapters: int = 2) -> AdapterOptions:
    """Both kinds enabled, and room for so many."""
    return AdapterOptions(
        enable_lora=True,
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
        enable_prompt_adapter=True,
        max_prompt_adapters=max_prompt_adapters,
    )


def limits_for(options: AdapterOptions | None) -> dict[str, Limits]:
    """Adapters as the options have them, and two grammars and two encoder inputs beside those in use."""
    few = {"grammar": Limits(idle=2), "encoder_input": Limits(idle=2), "image": Limits(host=IMAGE_MEMORY)}
    return {**limits_of(options), **few}


class FakePreparations:
    """The worker's side."""

    def __init__(self, limits: Mapping[str, Limits] | None = None, steps: int = 0) -> None:
        self.limits = limits_for(None) if limits is None else limits
        #: Steps that one thing takes, while others wait.
        self.steps = steps
        #: By key: the message with which it fails.
        self.failing: dict[str, str] = {}
        #: Those that failed, until they are dropped.
        self.failed: set[str] = set()
        self.prepared: dict[str, Preparation] = {}
        self.slots: dict[int, str] = {}
        #: Those under way, in order, and the steps that the first has had.
        self.preparing: dict[str, Preparation] = {}
        self._steps = 0
        self._done: list[str] = []
        self._errors: dict[str, SequenceFailure] = {}
        self.num_begun = self.num_waits = 0
        #: Whether a step failed: then plans may repeat what is done.
        self.may_repeat = False

    def keys(self, kind: str) -> set[str]:
        """What is prepared of a kind."""
        return {key for key, preparation in self.prepared.items() if preparation.kind == kind}

    def apply(self, plan: StepPlan, *, fetches: bool = False) -> None:
        """Drops, begins, and places; waits if the plan says so. ``fetches``: whether blocks are fetched, too."""
        for key in plan.drop:
            cancelled = self.preparing.pop(key, None) is not None
            self._steps = 0 if cancelled and not self.preparing else self._steps
            known = cancelled or key in self.prepared or key in self.failed
            assert known or self.may_repeat, f"{key} is dropped, but is not there"
            self.failed.discard(key)
            self.prepared.pop(key, None)
            self.slots = {slot: k for slot, k in self.slots.items() if k != key}
        for preparation in plan.prepare:
            key = preparation.key
            begun = key in self.prepared or key in self.preparing
            assert not begun or self.may_repeat, f"{key} is prepared twice"
            if key in self.prepared:
                self._done.append(key)
            elif key not in self._errors:
                self.num_begun += key not in self.preparing
                self.preparing.setdefault(key, preparation)
        for slot, key in plan.place:
            assert key in self.prepared, f"{key} is placed, but is not in host memory"
            assert 0 <= slot < (self.limits[self.prepared[key].kind].slots or 0)
            self.slots = {s: k for s, k in self.slots.items() if s != slot}
            assert key not in self.slots.values(), f"{key} has two slots"
            self.slots[slot] = key
        there = [*self.prepared.values(), *self.preparing.values()]
        for kind, limits in self.limits.items():
            count = sum(preparation.size for preparation in there if preparation.kind == kind)
            assert limits.host is None or count <= limits.host, f"more of {kind} than memory may hold"
        self._prepare(plan.awaits_prepared, fetches)

    def _prepare(self, waits: bool, fetches: bool) -> None:
        """One step's worth of work; all of it for the first, if the step waits."""
        self.num_waits += waits
        assert not waits or self.preparing or self._done or self._errors or fetches, "waits for nothing"
        if not self.preparing:
            return
        self._steps += 1
        if waits or self._steps > self.steps:
            self._steps = 0
            key = next(iter(self.preparing))
            preparation = self.preparing.pop(key)
            if key in self.failing:
                kind = ADAPTER if KINDS[preparation.kind].is_adapter else GRAMMAR
                self._errors[key] = SequenceFailure(self.failing[key], kind)
                self.failed.add(key)
            else:
                self.prepared[key] = preparation
                self._done.append(key)

    def report(self, result: StepResult) -> None:
        """Adds what has become of preparations."""
        result.prepared, self._done = self._done, []
        result.prepare_errors, self._errors = self._errors, {}

    def lose_report(self) -> None:
        """A step has failed: what its result was to report is lost."""
        self._done, self._errors = [], {}
        self.may_repeat = True

    def check_computes(self, adapters: list[str | None]) -> None:
        """Every adapter of a step's rows can be used."""
        placed = set(self.slots.values())
        for key in {key for key in adapters if key is not None}:
            assert key in self.prepared, f"{key} is not in host memory"
            assert key in placed or self.prepared[key].kind != "lora", f"{key} has no slot"
