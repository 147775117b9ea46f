"""The policy lab: every scenario under every policy in every place, several times, on a guarded machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.lab.bench.capacity import capacity_of, full_load
from octavo.lab.bench.policies.oracles import ORACLES, scheduling_policy
from octavo.lab.bench.policies.places import Place
from octavo.lab.bench.policies.policy_figures import PlaceOutcome, PolicyFigures, averages, figures, medians
from octavo.lab.bench.policies.scenarios import Scenario
from octavo.lab.bench.steady import Guard, GuardedRun, Still
from octavo.lab.workloads.work_items import WorkItem
from octavo.scheduler.policies import policy_class

#: Options that other policies refuse, and the one they are for.
_OF_POLICIES = {
    "user_weights": "fair",
    "ttft_target": "deadline",
    "tpot_target": "deadline",
    "priority_preemption": "static",
}

#: The engine's options: a place's name, and what a scenario and a policy set, on top of what the command line says.
Configure = Callable[[str, Mapping[str, Any]], EngineConfig]


@dataclass
class ScenarioRow:
    """One scenario under one policy in one place, all repeats."""

    place: str
    scenario: str
    policy: str
    #: Requests a second at full load, of scenarios that look at it.
    capacity: float | None
    runs: list[PolicyFigures] = field(default_factory=list)
    #: Seconds of all requests that ended, of all runs, by kind as ``octavo.lab.plots.drawings.LATENCIES`` names them.
    latencies: dict[str, np.ndarray] = field(default_factory=dict)
    #: The conditions of each run.
    guarded: list[GuardedRun[PlaceOutcome]] = field(default_factory=list)

    def add(self, other: ScenarioRow) -> None:
        """Takes the runs of another row of the same."""
        self.runs += other.runs
        self.guarded += other.guarded
        self.latencies = {kind: np.concatenate([of, other.latencies[kind]]) for kind, of in self.latencies.items()}

    @property
    def is_disturbed(self) -> bool:
        """Whether a run is not to be trusted."""
        return any(run.is_disturbed for run in self.guarded)

    @property
    def median(self) -> PolicyFigures:
        """Medians over repeats."""
        return medians(self.runs)

    @property
    def mean(self) -> PolicyFigures:
        """Averages over repeats."""
        return averages(self.runs)[0]

    @property
    def deviation(self) -> PolicyFigures:
        """Standard deviations over repeats."""
        return averages(self.runs)[1]


class Lab:
    """Runs scenarios; ``configure`` makes the engine's options."""

    def __init__(self, places: Sequence[Place], configure: Configure, seed: int, guard: Guard | None = None) -> None:
        """``guard``: watches the runs by the clock; without one, nothing does."""
        self._places = {place.name: place for place in places}
        self._configure = configure
        self._seed = seed
        self._still = Guard(Still())
        self._guard = guard or self._still
        self._capacities: dict[tuple[object, ...], float] = {}

    def run(
        self,
        scenarios: Sequence[Scenario],
        policies: Sequence[str],
        repeats: int,
        ended: Callable[[ScenarioRow], object],
        begins: Callable[[str, str], object] = lambda place, scenario: None,
    ) -> list[ScenarioRow]:
        """All rows; ``ended`` is called with the row that has got another run.

        ``begins`` is called with a place and a scenario before its policies run.

        Repeats are the outermost loop and policies the innermost, in every second repeat backwards, so that a machine
        that becomes slower or faster meanwhile does so for all policies. Repeat ``i`` has the seed ``seed + i``: all
        policies get the same items.

        Raises:
            ConfigError: a policy is unknown, or a scenario is not possible in a place.
        """
        for policy in policies:
            policy_class(scheduling_policy(policy))
        self._check(scenarios)
        rows: dict[tuple[str, str, str], ScenarioRow] = {}
        for repeat in range(repeats):
            for place in self._places.values():
                for scenario in scenarios:
                    begins(place.name, scenario.name)
                    for row in self._repeat(place, scenario, policies, repeat):
                        kept = rows.setdefault((row.place, row.scenario, row.policy), row)
                        if kept is not row:
                            kept.add(row)
                        ended(kept)
        return list(rows.values())

    def _check(self, scenarios: Sequence[Scenario]) -> None:
        for place in self._places.values():
            hidden = [scenario.name for scenario in scenarios if scenario.max_tokens is not None]
            if hidden and not place.hides_lengths:
                others = ", ".join(scenario.name for scenario in scenarios if scenario.max_tokens is None) or "none"
                raise ConfigError(
                    f"in the place {place.name} requests state the length at which they end, but scenarios hide it: "
                    f"{', '.join(hidden)}; those that do not: {others}"
                )

    def _repeat(self, place: Place, scenario: Scenario, policies: Sequence[str], repeat: int) -> Iterator[ScenarioRow]:
        """Each policy once."""
        capacity = self.capacity(place, scenario)
        items = list(scenario.make(float("inf") if capacity is None else capacity, self._seed + repeat))
        if not items:
            raise ConfigError(f"the scenario {scenario.name} has no requests")

        def run(policy: str) -> PlaceOutcome:
            options = self._configure(place.name, options_for(scenario, policy))
            # Oracles are told what the others are not, see ``Scenario.max_tokens``.
            limit = None if policy in ORACLES else scenario.max_tokens
            outcome = place.run(options, acceptable(items, policy), limit)
            if not len(outcome.done.sent):
                failed = ", ".join(f"{count} {reason}" for reason, count in outcome.done.failed.items())
                raise ConfigError(f"{scenario.name} under {policy}, {place.name}: no request succeeded ({failed})")
            return outcome

        where = f"{place.name}, {scenario.name}, repeat {repeat}"
        jobs = {f"{policy} ({where})": functools.partial(run, policy) for policy in policies}
        runs = self._guard_of(place).measure(jobs, backwards=repeat % 2 == 1)
        for policy, guarded in zip(policies, runs, strict=True):
            done = guarded.result.done
            found = [figures(items, guarded.result)]
            latencies = {"ttft": done.ttft, "e2e": done.e2e}
            yield ScenarioRow(place.name, scenario.name, policy, capacity, found, latencies, [guarded])

    def _guard_of(self, place: Place) -> Guard:
        return self._guard if place.by_the_clock else self._still

    def capacity(self, place: Place, scenario: Scenario) -> float | None:
        """Of the scenario in this place under fcfs, found once for its lengths and options; None: it needs none."""
        inputs, outputs = scenario.inputs, scenario.outputs
        if inputs is None or outputs is None:
            return None
        options = self._configure(place.name, options_for(scenario, "fcfs"))
        key = (place.name, inputs, outputs, options.model_dump_json())
        if key not in self._capacities:
            full = list(full_load(inputs, outputs, self._seed, place.capacity_requests))
            label = f"capacity ({place.name}, {scenario.name})"
            [run] = self._guard_of(place).measure({label: lambda: place.run(options, full, None)})
            self._capacities[key] = capacity_of(run.result.done)
        return self._capacities[key]


def options_for(scenario: Scenario, policy: str) -> dict[str, Any]:
    """The scenario's options with this policy, without those that this policy would refuse."""
    kept = {k: v for k, v in scenario.options.items() if ":" in policy or _OF_POLICIES.get(k, policy) == policy}
    return {**kept, "scheduling_policy": scheduling_policy(policy)}


def acceptable(items: Sequence[WorkItem], policy: str) -> Sequence[WorkItem]:
    """The items without priorities and targets that this policy does not look at, and would refuse."""
    kind = policy_class(scheduling_policy(policy))
    dropped: dict[str, Any] = {} if kind.uses_priority else {"priority": 0}
    if not kind.uses_targets:
        dropped |= {"ttft_target": None, "tpot_target": None}
    return [msgspec.structs.replace(item, **dropped) for item in items] if dropped else items
