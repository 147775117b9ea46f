"""What ``octavo simulate`` shows of one run or of several under different policies: tables, drawings, one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError
from octavo.lab.plots import drawings
from octavo.lab.plots.report import Report
from octavo.lab.plots.style import save
from octavo.lab.simulate.figures import Completions, Latency, RunFigures
from octavo.lab.simulate.step_profile import StepProfile

#: What becomes of the origin of a profile in a title.
ORIGINS = {"computed": " (computed, not measured)", "fitted": ""}
_LATENCIES = ("ttft", "tpot", "itl", "e2e")
#: Figures of a run that a report shows in a table of their own, and what they are called.
COUNTS = {
    "requests": "requests",
    "seconds": "seconds",
    "requests_per_s": "requests/s",
    "input_tokens": "prompt tokens",
    "output_tokens": "output tokens",
    "output_tokens_per_s": "output tokens/s",
    "goodput_requests_per_s": "goodput, requests/s",
    "goodput_share": "share within targets",
    "steps": "steps",
    "preemptions_by_recompute": "preemptions by recompute",
    "preemptions_by_swap": "preemptions by swap",
    "recomputed_tokens": "recomputed tokens",
    "prefix_hit_tokens": "prompt tokens found in the prefix cache",
    "mean_running": "requests running, on average",
    "mean_blocks_used": "KV blocks used, on average",
    "num_blocks": "KV blocks",
}


@dataclass(frozen=True)
class PolicyRun:
    """A workload under one policy: its figures, and the times of its requests."""

    policy: str
    figures: RunFigures
    done: Completions


def _of(name: str, part: str) -> Callable[[RunFigures], float | None]:
    def value(figures: RunFigures) -> float | None:
        latency: Latency | None = getattr(figures, name)
        return None if latency is None else getattr(latency, part)

    return value


#: Columns of a comparison.
_COLUMNS: dict[str, Callable[[RunFigures], float | None]] = {
    "requests/s": lambda f: f.requests_per_s,
    "tokens/s": lambda f: f.output_tokens_per_s,
    "ttft mean": _of("ttft", "mean"),
    "ttft p99": _of("ttft", "p99"),
    "tpot mean": _of("tpot", "mean"),
    "tpot p99": _of("tpot", "p99"),
    "e2e mean": _of("e2e", "mean"),
    "e2e p50": _of("e2e", "p50"),
    "e2e p99": _of("e2e", "p99"),
    "goodput": lambda f: f.goodput_requests_per_s,
    "preempted": lambda f: f.preemptions_by_recompute + f.preemptions_by_swap,
}


def comparison(runs: Sequence[PolicyRun]) -> tuple[list[str], list[list[Any]]]:
    """Headers and rows of a table with a line for each policy; latencies in seconds."""
    columns = {name: value for name, value in _COLUMNS.items() if any(value(run.figures) is not None for run in runs)}
    return ["policy", *columns], [[run.policy, *(value(run.figures) for value in columns.values())] for run in runs]


def comparison_text(runs: Sequence[PolicyRun]) -> list[str]:
    """The table for a terminal."""
    headers, rows = comparison(runs)
    cells = [headers, *([row[0], *("-" if value is None else f"{value:.5g}" for value in row[1:])] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        f"{line[0]:{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in cells
    ]


def draw(runs: Sequence[PolicyRun]) -> dict[str, tuple[Any, str]]:
    """Figures of matplotlib with their captions, by name.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    latencies = {run.policy: {kind: getattr(run.done, kind) for kind in drawings.LATENCIES} for run in runs}
    pictures = {"latencies": (drawings.distributions(latencies), "Cumulative distributions of latencies.")}
    for run in runs:
        of, end = ("", "") if len(runs) == 1 else (f"-{run.policy.replace(':', '.')}", f" under {run.policy}")
        figures, service = run.figures, run.figures.service
        timeline = drawings.timeline(figures.series, figures.num_blocks)
        pictures[f"timeline{of}"] = (timeline, f"Queues and KV blocks over time{end}.")
        if service is not None:
            bound = service.bound if run.policy == "fair" else None
            drawn = drawings.service(service.seconds, service.users, service.difference, bound)
            more = " Dashed: the published bound, which holds without ageing." if bound is not None else ""
            pictures[f"service{of}"] = (
                drawn,
                f"Service of users over time{end}: tokens of prompts, and twice those of outputs, by weight.{more}",
            )
    return pictures


def write_plots(drawn: Mapping[str, tuple[Any, str]], folder: Path) -> None:
    """Writes each figure as a PNG into a folder, which is made if there is none.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"cannot make the folder {folder}: {e.strerror}") from None
    for name, (figure, _) in drawn.items():
        save(figure, folder / f"{name}.png")


def make_report(
    profile: StepProfile,
    runs: Sequence[PolicyRun],
    drawn: Mapping[str, tuple[Any, str]],
    command: Sequence[str],
    options: Mapping[str, Any],
) -> Report:
    """The report of these runs."""
    report = Report(f"Simulation of {profile.model} on {profile.device}{ORIGINS[profile.origin]}", command, options)
    report.text(
        "The scheduler and the block manager of Octavo on a virtual clock; the time of each step follows from the "
        "profile of the model on the device."
    )
    if len(runs) > 1:
        report.heading("The policies side by side")
        report.table(*comparison(runs), caption="Latencies in seconds: mean and percentiles over requests.")
        report.figure(*drawn["latencies"])
    for run in runs:
        figures = run.figures
        report.heading(run.policy if len(runs) > 1 else f"Latencies under {run.policy}")
        rows = [[name, *_parts(getattr(figures, name))] for name in _LATENCIES]
        report.table(["seconds", *Latency.__struct_fields__], rows)
        for name, (figure, caption) in drawn.items():
            if name.endswith(f"-{run.policy.replace(':', '.')}") or len(runs) == 1:
                report.figure(figure, caption)
        counts = [[title, getattr(figures, name)] for name, title in COUNTS.items()]
        failed = [[f"ended otherwise: {reason}", count] for reason, count in figures.failed.items()]
        report.table(["figure", "value"], [row for row in counts if row[1] is not None] + failed)
    return report


def _parts(latency: Latency | None) -> list[float | None]:
    parts = Latency.__struct_fields__
    return [None] * len(parts) if latency is None else [getattr(latency, part) for part in parts]
