"""The lab's tables: by policy and by scenario in Markdown, all figures in CSV and JSON."""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

import msgspec

from octavo.lab.bench.policies.lab import ScenarioRow
from octavo.lab.bench.policies.policy_figures import PolicyFigures
from octavo.lab.bench.steady import median_and_range

#: Most users that have a column of their own in Markdown.
_USERS = 4


def markdown(rows: Sequence[ScenarioRow], about: dict[str, str], notes: Sequence[str] = ()) -> str:
    """Both tables of each place; ``about``: by place, what ran there; ``notes``: lines at the end."""
    parts = []
    for place, text in about.items():
        here = [row for row in rows if row.place == place]
        parts.append(f"## {place}: {text}; {averaged(here)}")
        parts += _tables("By policy", "scenario", here, lambda row: row.policy, lambda row: row.scenario)
        parts += _tables("By scenario", "policy", here, lambda row: row.scenario, lambda row: row.policy)
    return "\n\n".join([*parts, *notes]) + "\n"


def averaged(rows: Sequence[ScenarioRow]) -> str:
    """How figures of these rows were averaged."""
    repeats = max((len(row.runs) for row in rows), default=0)
    return f"medians of {repeats} runs [least, largest]" if repeats > 1 else "one run"


def _tables(
    title: str,
    first: str,
    rows: Sequence[ScenarioRow],
    group: Callable[[ScenarioRow], str],
    label: Callable[[ScenarioRow], str],
) -> Iterable[str]:
    yield f"### {title}"
    for name in dict.fromkeys(map(group, rows)):
        lines = [row for row in rows if group(row) == name]
        titles, cells = compared(lines)
        yield f"**{name}**\n\n" + markdown_table(
            [first, *titles],
            [[label(r) + "*" * r.is_disturbed, *c] for r, c in zip(lines, cells, strict=True)],
        )


def compared(rows: Sequence[ScenarioRow]) -> tuple[list[str], list[list[str]]]:
    """Titles of the columns in which any of these rows has a figure, and the cells of each row."""
    columns = _columns([row.mean for row in rows])
    return list(columns), [list(_cells(row, columns)) for row in rows]


def markdown_table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table in Markdown: the first column to the left, the others to the right."""
    marks = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in itertools.chain((header, marks), body))


#: Markdown column -> figure.
_ALWAYS = {
    "total s": "seconds",
    "requests/s": "requests_per_s",
    "mean latency s": "mean_latency",
    "p50": "p50_latency",
    "p99": "p99_latency",
    "mean TTFT s": "mean_ttft",
    "p50 TTFT": "p50_ttft",
    "p99 TTFT": "p99_ttft",
    "preemptions": "preemptions",
}
_SOMETIMES = {
    "failed": "failed",
    "goodput": "goodput_share",
    "good requests/s": "goodput_per_s",
    "tau": "tau",
    "oracle's tau": "oracle_tau",
}
#: Shown as a share.
_SHARES = {"goodput_share"}


def _columns(means: Sequence[PolicyFigures]) -> dict[str, str]:
    """Those that hold something; users as ``user:NAME``."""
    columns = dict(_ALWAYS)
    columns |= {title: name for title, name in _SOMETIMES.items() if any(_holds(mean, name) for mean in means)}
    users = sorted(set().union(*(mean.user_latency for mean in means)))
    if 1 < len(users) <= _USERS:
        columns |= {f"mean latency of {user}": f"user:{user}" for user in users}
    return columns


def _holds(mean: PolicyFigures, name: str) -> bool:
    return bool(mean.failed) if name == "failed" else getattr(mean, name) is not None


def _cells(row: ScenarioRow, columns: dict[str, str]) -> Iterable[str]:
    for name in columns.values():
        kind, _, user = name.partition(":")
        values = [run.user_latency.get(user) if kind == "user" else getattr(run, name) for run in row.runs]
        held = [value for value in values if value is not None]
        yield median_and_range(held, "{:.1%}".format if name in _SHARES else number) if held else "-"


def number(value: float) -> str:
    """Three digits or more; whole numbers as such."""
    if value == int(value):
        return str(int(value))
    size = abs(value)
    return f"{value:.{1 if size >= 10 else 2 if size >= 1 else 3}f}"


def spread(values: Sequence[float], cell: Callable[[float], str] = number) -> str:
    """Their mean and, of several, the standard deviation (of a sample), each as ``cell`` writes it."""
    mean = cell(statistics.fmean(values))
    return f"{mean} ± {cell(statistics.stdev(values))}" if len(values) > 1 else mean


def as_json(rows: Sequence[ScenarioRow], about: dict[str, str], settings: dict[str, Any]) -> bytes:
    """All figures: of each run with its conditions, medians, means and standard deviations."""
    return msgspec.json.encode(
        {
            **settings,
            "places": about,
            "rows": [
                {
                    "place": row.place,
                    "scenario": row.scenario,
                    "policy": row.policy,
                    "capacity": row.capacity,
                    "median": row.median,
                    "mean": row.mean,
                    "deviation": row.deviation,
                    "runs": row.runs,
                    "conditions": [run.as_json() for run in row.guarded],
                    "disturbed": row.is_disturbed,
                }
                for row in rows
            ],
        }
    )


def write_csv(rows: Sequence[ScenarioRow], stream: IO[str]) -> None:
    """A line for each place, scenario and policy: each figure's mean, its standard deviation, and its median."""
    names = [name for name in PolicyFigures.__struct_fields__ if name != "user_latency"]
    users = sorted(set().union(*(row.mean.user_latency for row in rows)))
    titles = [*names, *(f"latency of {user}" for user in users)]
    writer = csv.writer(stream, lineterminator="\n")
    more = [f"{title} {what}" for what in ("deviation", "median") for title in titles]
    writer.writerow(["place", "scenario", "policy", "capacity", "repeats", *titles, *more, "disturbed"])
    for row in rows:
        values = [
            value
            for figures in (row.mean, row.deviation, row.median)
            for value in (
                *(getattr(figures, name) for name in names),
                *(figures.user_latency.get(user) for user in users),
            )
        ]
        fixed = [row.place, row.scenario, row.policy, row.capacity, len(row.runs)]
        writer.writerow([*fixed, *values, int(row.is_disturbed)])
