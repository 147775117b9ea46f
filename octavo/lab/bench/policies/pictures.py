"""The lab's drawings, and its report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.lab.bench.policies.lab import ScenarioRow
from octavo.lab.bench.policies.scenarios import Scenario
from octavo.lab.bench.policies.tables import averaged, compared
from octavo.lab.plots import drawings
from octavo.lab.plots.report import Report


def draw(rows: Sequence[ScenarioRow], scenarios: Sequence[Scenario]) -> dict[str, tuple[Any, str]]:
    """Figures of matplotlib with their captions, by name: ``KIND-PLACE`` or ``KIND-PLACE-SCENARIO``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pictures: dict[str, tuple[Any, str]] = {}
    for place in dict.fromkeys(row.place for row in rows):
        here = {(row.scenario, row.policy): row for row in rows if row.place == place}
        names = list(dict.fromkeys(scenario for scenario, _ in here))
        means = {name: {r.policy: r.median.mean_latency for r in here.values() if r.scenario == name} for name in names}
        pictures[f"mean-latency-{place}"] = (drawings.bars(means, "mean latency (s)"), f"Mean latency, {place}.")
        for name in names:
            latencies: dict[str, Any] = {r.policy: r.latencies for r in here.values() if r.scenario == name}
            caption = f"Cumulative distributions of latencies, all runs together: {name}, {place}."
            pictures[f"latencies-{place}-{name}"] = (drawings.distributions(latencies), caption)
        for family, members in _families(scenarios).items():
            drawn = _goodput(here, members)
            if drawn is not None:
                pictures[f"goodput-{place}-{family}"] = (drawn, f"Goodput against load: {family}, {place}.")
    return pictures


def _families(scenarios: Sequence[Scenario]) -> dict[str, list[Scenario]]:
    """Scenarios that differ in the load alone, ascending, of those with several loads."""
    families: dict[str, list[Scenario]] = defaultdict(list)
    for scenario in scenarios:
        if scenario.family and scenario.load is not None:
            families[scenario.family].append(scenario)
    return {name: sorted(of, key=lambda s: s.load or 0.0) for name, of in families.items() if len(of) > 1}


def _goodput(here: Mapping[tuple[str, str], ScenarioRow], members: Sequence[Scenario]) -> Any:
    """None without targets."""
    policies = dict.fromkeys(policy for _, policy in here)
    curves: dict[str, list[float]] = {}
    for policy in policies:
        values = [row.median.goodput_per_s if (row := here.get((s.name, policy))) else None for s in members]
        curves[policy] = [math.nan if value is None else value for value in values]
    if all(math.isnan(value) for curve in curves.values() for value in curve):
        return None
    return drawings.goodput([s.load or 0.0 for s in members], curves)


def make_report(
    rows: Sequence[ScenarioRow],
    scenarios: Sequence[Scenario],
    about: Mapping[str, str],
    drawn: Mapping[str, tuple[Any, str]],
    command: Sequence[str],
    options: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> Report:
    """The report: by place the drawings, and each scenario's table; ``about``: by place, what ran there.

    ``notes``: lines about runs that were disturbed.
    """
    report = Report("Scheduling policies compared", command, options)
    report.heading("Scenarios")
    report.table(["scenario", "requests"], [[scenario.name, scenario.about] for scenario in scenarios])
    for note in notes:
        report.text(note)
    for place, text in about.items():
        here = [row for row in rows if row.place == place]
        report.heading(f"{place}: {text}")
        report.text(f"Latencies in seconds, from arrival to the last token; {averaged(here)}.")
        for name, (figure, caption) in drawn.items():
            if name == f"mean-latency-{place}" or name.startswith(f"goodput-{place}-"):
                report.figure(figure, caption)
        for scenario in scenarios:
            lines = [row for row in here if row.scenario == scenario.name]
            titles, cells = compared(lines)
            report.heading(f"{scenario.name}, {place}")
            labels = [row.policy + "*" * row.is_disturbed for row in lines]
            report.table(["policy", *titles], [[label, *c] for label, c in zip(labels, cells, strict=True)])
            report.figure(*drawn[f"latencies-{place}-{scenario.name}"])
    return report
