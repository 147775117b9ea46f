"""The plot of ``octavo bench serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.serve_client import Outcome
from octavo.bench.serve_report import Report, gaps
from octavo.core.errors import ConfigError


def load_matplotlib() -> Any:
    """Matplotlib's ``Figure``, which draws without a display.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'octavo[plot]'") from None
    return Figure


def plot(report: Report, outcomes: list[Outcome], path: Path) -> None:
    """Writes a PNG: latencies as cumulative shares, and tokens and open requests over time.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure = load_matplotlib()(figsize=(12, 8), layout="constrained")
    (first, inter), (total, timeline) = figure.subplots(2, 2)
    good = [outcome for outcome in outcomes if outcome.error is None]
    _cumulative(first, "time to first token, ms", [o.ttft for o in good])
    _cumulative(inter, "gap between chunks, ms", gaps(good))
    _cumulative(total, "end to end, ms", [o.e2e for o in good])
    _timeline(timeline, outcomes)
    figure.suptitle(
        f"{report.model}, {report.arrivals}: {report.requests_per_s:.2f} requests/s, "
        f"{report.output_tokens_per_s:.0f} output tokens/s, {report.rejected} rejected, "
        f"{sum(report.errors.values())} failed"
    )
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as e:
        raise ConfigError(f"cannot write --plot {path}: {e.strerror}") from None


def _cumulative(axes: Any, title: str, seconds: list[float]) -> None:
    axes.set_xlabel(title)
    axes.set_ylabel("share of them")
    axes.grid(alpha=0.3)
    if seconds:
        values = np.sort(np.asarray(seconds) * 1000)
        axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post")
        for share in (50, 90, 99):
            value = float(np.percentile(values, share))
            axes.axvline(value, linestyle=":", color="gray")
            axes.text(value, share / 100, f" p{share} {value:.1f}", fontsize=8)


def _timeline(axes: Any, outcomes: list[Outcome]) -> None:
    start = min(o.sent for o in outcomes)
    end = max(o.ended for o in outcomes)
    edges = np.linspace(start, max(end, start + 1e-6), 101)
    chunks = np.concatenate([np.asarray(o.chunks) for o in outcomes])
    rate = np.histogram(chunks, edges)[0] / np.diff(edges)
    axes.step(edges[:-1] - start, rate, where="post", color="tab:blue")
    axes.set_xlabel("seconds")
    axes.set_ylabel("chunks/s", color="tab:blue")
    axes.grid(alpha=0.3)
    sent = _count_until(edges[:-1], [o.sent for o in outcomes])
    ended = _count_until(edges[:-1], [o.ended for o in outcomes])
    right = axes.twinx()
    right.step(edges[:-1] - start, sent - ended, where="post", color="tab:orange")
    right.set_ylabel("open requests", color="tab:orange")
    right.set_ylim(bottom=0)


def _count_until(edges: Any, times: list[float]) -> Any:
    """Number of times at or before each edge."""
    return np.searchsorted(np.sort(times), edges, side="right")
