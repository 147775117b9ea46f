"""Adapters of a worker without a model: a load takes some steps, and every rule of the plan is checked."""

from __future__ import annotations

from octavo.core.adapters import AdapterRef
from octavo.core.option_parts import AdapterOptions
from octavo.core.plan import StepPlan, StepResult


def lora(key: str) -> AdapterRef:
    """A LoRA adapter that the fake worker knows."""
    return AdapterRef(key, f"name of {key}", f"path/of/{key}", 8)


def prompt_adapter(key: str) -> AdapterRef:
    """One that takes no slot."""
    return AdapterRef(key, f"name of {key}", f"path/of/{key}", 0, 4)


def adapter_options(max_loras: int, max_cpu_loras: int | None = None, max_prompt_adapters: int = 2) -> AdapterOptions:
    """Both kinds enabled, and room for so many."""
    return AdapterOptions(
        enable_lora=True,
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
        enable_prompt_adapter=True,
        max_prompt_adapters=max_prompt_adapters,
    )


class FakeAdapters:
    """The worker's adapters."""

    def __init__(self, options: AdapterOptions | None = None, steps_per_load: int = 0) -> None:
        self.num_slots, self.num_host, self.num_prompts = 0, 0, 0
        if options is not None:
            self.num_slots, self.num_host = options.max_loras, options.num_host_loras
            self.num_prompts = options.max_prompt_adapters
        #: Steps that the reader needs for one adapter, while others wait.
        self.steps_per_load = steps_per_load
        #: By key: the message with which its load fails.
        self.failing: dict[str, str] = {}
        #: Those that failed, until they are dropped.
        self.failed: set[str] = set()
        self.host: dict[str, AdapterRef] = {}
        self.slots: dict[int, str] = {}
        #: Loads under way, in order, and the steps that the first has had.
        self.loading: dict[str, AdapterRef] = {}
        self._steps = 0
        self._loaded: list[str] = []
        self._errors: dict[str, str] = {}
        self.num_waits = 0
        #: Whether a step failed: then plans may repeat what is done.
        self.may_repeat = False

    def apply(self, plan: StepPlan) -> None:
        """Drops, begins loads, and places; waits if the plan says so."""
        for key in plan.adapters_to_drop:
            assert key in self.host or key in self.failed or self.may_repeat, f"{key} is dropped, but is not there"
            self.failed.discard(key)
            self.host.pop(key, None)
            self.slots = {slot: k for slot, k in self.slots.items() if k != key}
        for ref in plan.adapters_to_load:
            known = ref.key in self.host or ref.key in self.loading
            assert not known or self.may_repeat, f"{ref.key} is loaded twice"
            if ref.key in self.host:
                self._loaded.append(ref.key)
            elif ref.key not in self._errors:
                self.loading.setdefault(ref.key, ref)
        for slot, key in plan.adapters_to_place:
            assert key in self.host and self.host[key].rank, f"{key} is placed, but is not in host memory"
            assert 0 <= slot < self.num_slots
            self.slots = {s: k for s, k in self.slots.items() if s != slot}
            assert key not in self.slots.values(), f"{key} has two slots"
            self.slots[slot] = key
        there = [*self.host.values(), *self.loading.values()]
        assert sum(ref.rank > 0 for ref in there) <= self.num_host, "more LoRA adapters than host memory may hold"
        assert sum(ref.rank == 0 for ref in there) <= self.num_prompts, "more prompt adapters than memory may hold"
        self._read(plan.awaits_adapter)

    def _read(self, waits: bool) -> None:
        """One step's worth of reading; all of it for the first, if the step waits."""
        self.num_waits += waits
        assert not waits or self.loading or self._loaded or self._errors, "waits for nothing"
        if not self.loading:
            return
        self._steps += 1
        if waits or self._steps > self.steps_per_load:
            self._steps = 0
            key = next(iter(self.loading))
            ref = self.loading.pop(key)
            if key in self.failing:
                self._errors[key] = self.failing[key]
                self.failed.add(key)
            else:
                self.host[key] = ref
                self._loaded.append(key)

    def report(self, result: StepResult) -> None:
        """Adds what has become of loads."""
        result.loaded_adapters, self._loaded = self._loaded, []
        result.adapter_errors, self._errors = self._errors, {}

    def lose_report(self) -> None:
        """A step has failed: what its result was to report is lost."""
        self._loaded, self._errors = [], {}
        self.may_repeat = True

    def check_computes(self, keys: list[str | None]) -> None:
        """Every adapter of a step's rows can be used."""
        placed = set(self.slots.values())
        for key in {key for key in keys if key is not None}:
            assert key in self.host, f"{key} is not in host memory"
            assert key in placed or not self.host[key].rank, f"{key} has no slot"
