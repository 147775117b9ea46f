"""What runs look like: functions of plain data, each of which returns a figure of matplotlib.

Series are columns: ``seconds`` (ascending) and, by name, values of equal length; each value holds until the next.
Names of runs are mostly policies; equal names in equal order have equal colors. Without matplotlib: ``ConfigError``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.lab.plots.style import load_matplotlib, styled

Values = Sequence[float] | np.ndarray
Columns = Mapping[str, Values]
#: Titles of latencies.
LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end-to-end latency"}
#: Most points of a cumulative distribution.
_MOST_POINTS = 500
#: A distribution is heavy-tailed whose maximum is so many times its median.
_HEAVY_TAIL = 20.0
_LIMIT_COLOR = "#d62728"


def timeline(series: Columns, num_blocks: int = 0) -> Any:
    """Queues and blocks over time.

    Args:
        series: ``waiting``, ``running`` and ``swapped`` requests and ``blocks_used``.
        num_blocks: blocks in all, drawn as a line if the run comes near it; 0: unknown.
    """
    with styled():
        figure = load_matplotlib()(figsize=(9, 5))
        queues, blocks = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        names = [name for name in ("waiting", "running", "swapped") if any(series[name]) or name != "swapped"]
        draw_over_time(queues, {name: series[name] for name in ("seconds", *names)}, "requests")
        most = max(series["blocks_used"], default=0)
        limit = num_blocks if most > num_blocks / 4 else None
        draw_over_time(blocks, {name: series[name] for name in ("seconds", "blocks_used")}, "KV blocks used", limit)
        if num_blocks:
            blocks.set_title(f"at most {most / num_blocks:.1%} of {num_blocks:,} blocks", loc="left")
        queues.set_xlabel("")
        return figure


def distributions(runs: Mapping[str, Mapping[str, Values]], names: Mapping[str, str] = LATENCIES) -> Any:
    """Cumulative distributions of latencies, a panel for each kind and a line for each run.

    Args:
        runs: by run, seconds by kind (``ttft``, ``tpot``, ``e2e``); a kind without values in any run has no panel.
        names: titles of the kinds, in their order.
    """
    kinds = [kind for kind in names if any(len(latencies.get(kind, ())) for latencies in runs.values())]
    with styled():
        figure = load_matplotlib()(figsize=(3.4 * max(len(kinds), 1), 3.6))
        panels = np.atleast_1d(figure.subplots(1, max(len(kinds), 1), sharey=True))
        for axes, kind in zip(panels, kinds, strict=False):
            draw_cumulative(axes, names[kind], {name: latencies.get(kind, ()) for name, latencies in runs.items()})
        panels[0].set_ylabel("share of requests")
        _legend_below(figure, panels[0], len(runs))
        return figure


def goodput(
    loads: Values,
    runs: Columns,
    *,
    loads_are: str = "load (share of capacity)",
    values_are: str = "goodput (requests/s)",
) -> Any:
    """Goodput against load, a line for each run.

    Args:
        loads: ascending.
        runs: by run, a value for each load; NaN: not run.
        loads_are: label of the loads.
        values_are: label of the values; shares from 0 to 1 have it say ``share``.
    """
    with styled():
        figure = load_matplotlib()(figsize=(7, 4))
        axes = figure.subplots()
        for name, values in runs.items():
            axes.plot(loads, values, marker="o", markersize=4, label=name)
        axes.set_xlabel(loads_are)
        axes.set_ylabel(values_are)
        axes.set_ylim(bottom=0)
        _percent(axes.xaxis, "share" in loads_are)
        _percent(axes.yaxis, "share" in values_are)
        _legend_below(figure, axes, len(runs))
        return figure


def curves(runs: Mapping[str, tuple[Values, Values]], x_is: str, y_is: str, most: float) -> Any:
    """A line for each run, whose (x, y) are points of its own; y is shown up to ``most``."""
    with styled():
        figure = load_matplotlib()(figsize=(7, 4))
        axes = figure.subplots()
        for name, (x, y) in runs.items():
            axes.plot(x, y, marker="o", markersize=4, label=name)
        axes.set_xlabel(x_is)
        axes.set_ylabel(y_is)
        axes.set_xlim(left=0)
        axes.set_ylim(0, most)
        _legend_below(figure, axes, len(runs))
        return figure


def service(seconds: Values, users: Columns, difference: Values | None = None, bound: float | None = None) -> Any:
    """Service of users over time: whether each has the share that is due.

    Args:
        seconds: of the samples.
        users: by user, tokens served so far, divided by the user's weight.
        difference: the largest difference in service between two users who both had requests waiting.
        bound: of that difference, drawn as a line.
    """
    with styled():
        figure = load_matplotlib()(figsize=(9, 3 if difference is None else 5))
        panels = np.atleast_1d(figure.subplots(1 if difference is None else 2, 1, sharex=True))
        draw_over_time(panels[0], {"seconds": seconds, **users}, "service / weight (tokens)")
        if difference is not None:
            panels[0].set_xlabel("")
            draw_over_time(panels[1], {"seconds": seconds, "difference": difference}, "difference (tokens)", bound)
            panels[1].set_title("largest difference between users who both had requests waiting", loc="left")
        return figure


def bars(values: Mapping[str, Mapping[str, float]], label: str) -> Any:
    """A panel for each scenario with a bar for each policy.

    Args:
        values: by scenario, by policy; NaN: not run.
        label: what the values are, with their unit.
    """
    columns = min(len(values), 3)
    rows = -(-len(values) // max(columns, 1))
    most = max((len(by_policy) for by_policy in values.values()), default=1)
    with styled():
        figure = load_matplotlib()(figsize=(3.4 * max(columns, 1), max(rows, 1) * (0.7 + 0.24 * most) + 0.3))
        panels = figure.subplots(max(rows, 1), max(columns, 1), squeeze=False).ravel()
        for axes, (scenario, by_policy) in zip(panels, values.items(), strict=False):
            drawn = axes.barh(list(by_policy), list(by_policy.values()), height=0.7)
            for bar, color in zip(drawn, _bar_colors(len(by_policy)), strict=True):
                bar.set_color(color)
            axes.bar_label(drawn, labels=[_short(value) for value in by_policy.values()], padding=3, fontsize=7)
            axes.margins(x=0.18)
            axes.set_xlim(left=0)
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.locator_params(axis="x", nbins=4)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
            axes.set_title(scenario, loc="left")
        for axes in panels[len(values) :]:
            axes.set_visible(False)
        figure.supxlabel(label, fontsize=9)
        return figure


def replicas(series: Columns, load: Values | None = None, load_is: str = "requests/s") -> Any:
    """Replicas of a cluster over time, a line for each state.

    Args:
        series: by state (``serving``, ``starting``, ``failed``, ...), how many.
        load: at each of the samples, drawn below.
        load_is: label of the load.
    """
    with styled():
        figure = load_matplotlib()(figsize=(9, 3 if load is None else 5))
        panels = np.atleast_1d(figure.subplots(1 if load is None else 2, 1, sharex=True))
        draw_over_time(panels[0], series, "replicas")
        if load is not None:
            panels[0].set_xlabel("")
            draw_over_time(panels[1], {"seconds": series["seconds"], "load": load}, load_is)
        return figure


# --- panels ---------------------------------------------------------------------------------------------------------


def draw_over_time(axes: Any, series: Columns, label: str, limit: float | None = None) -> None:
    """Steps over time into a panel, in hours if there are many; ``limit`` is a line across it."""
    seconds = np.asarray(series["seconds"], float)
    hours = len(seconds) > 0 and seconds[-1] > 3 * 3600
    for name, values in series.items():
        if name != "seconds":
            axes.step(seconds / 3600 if hours else seconds, values, where="post", label=name)
    if limit is not None:
        axes.axhline(limit, linestyle="--", color=_LIMIT_COLOR, linewidth=1)
        axes.text(1, limit, f" {_short(limit)}", transform=axes.get_yaxis_transform(), fontsize=8, va="center")
    axes.set_xlabel("time (hours)" if hours else "time (s)")
    axes.set_ylabel(label)
    axes.margins(x=0.01)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    if len(series) > 2:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_cumulative(axes: Any, title: str, runs: Columns) -> None:
    """Cumulative distributions of seconds into a panel; one alone has its p50, p90 and p99 marked.

    In milliseconds if all are below a second; logarithmic if one is heavy-tailed.
    """
    drawn = {name: np.asarray(seconds, float) for name, seconds in runs.items() if len(seconds)}
    ms = all(values.max() < 1 for values in drawn.values())
    heavy = any(values.max() > _HEAVY_TAIL * np.median(values) for values in drawn.values())
    axes.set_title(title, loc="left")
    axes.set_xlabel("milliseconds" if ms else "seconds")
    axes.set_ylim(0, 1.02)
    _percent(axes.yaxis, True)
    if heavy and all(values.min() > 0 for values in drawn.values()):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    for name in runs:
        if name not in drawn:
            axes.plot([], [], label=name)  # so that every panel has the same colors
            continue
        values, shares = cumulative(drawn[name] * (1000 if ms else 1))
        axes.step(values, shares, where="post", label=name)
        for percent in (50, 90, 99) if len(runs) == 1 else ():
            value = float(np.percentile(drawn[name], percent)) * (1000 if ms else 1)
            axes.axvline(value, linestyle=":", color="gray", linewidth=1)
            axes.text(value, percent / 100 - 0.07, f" p{percent} {_short(value)}", fontsize=7)


def cumulative(values: np.ndarray, most: int = _MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """(values in ascending order, share of all that are at most each); at most ``most`` of them, the last included."""
    ordered = np.sort(values)
    if len(ordered) > most:
        ranks = np.unique(np.linspace(0, len(ordered) - 1, most).round().astype(int))
    else:
        ranks = np.arange(len(ordered))
    return ordered[ranks], (ranks + 1) / len(ordered)


def _legend_below(figure: Any, axes: Any, runs: int) -> None:
    if runs > 1:
        # Rows of equal length.
        columns = -(-runs // -(-runs // 6))
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _percent(axis: Any, percent: bool) -> None:
    if percent:
        axis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _bar_colors(count: int) -> list[str]:
    import matplotlib

    colors = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    return [colors[i % len(colors)] for i in range(count)]


def _short(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
