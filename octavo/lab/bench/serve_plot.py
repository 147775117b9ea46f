"""The drawing and the page of ``octavo bench serve``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from octavo.lab.bench.serve_client import RequestOutcome
from octavo.lab.bench.serve_report import ServeReport, Spread, gaps
from octavo.lab.plots.drawings import draw_cumulative
from octavo.lab.plots.report import Report
from octavo.lab.plots.style import load_matplotlib, styled


def draw(report: ServeReport, outcomes: list[RequestOutcome]) -> Any:
    """A figure of matplotlib: latencies as cumulative shares, and tokens and open requests over time.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    with styled():
        figure = load_matplotlib()(figsize=(12, 8))
        (first, inter), (total, timeline) = figure.subplots(2, 2)
        good = [outcome for outcome in outcomes if outcome.error is None]
        draw_cumulative(first, "time to first token", {"": [o.ttft for o in good]})
        draw_cumulative(inter, "gap between chunks", {"": gaps(good)})
        draw_cumulative(total, "end-to-end latency", {"": [o.e2e for o in good]})
        _timeline(timeline, outcomes)
        figure.suptitle(
            f"{report.model}, {report.arrivals}: {report.requests_per_s:.2f} requests/s, "
            f"{report.output_tokens_per_s:.0f} output tokens/s, {report.rejected} rejected, "
            f"{sum(report.errors.values())} failed"
        )
        return figure


def make_page(report: ServeReport, drawn: Any, command: Sequence[str], options: Mapping[str, Any]) -> Report:
    """The report as a page with its drawing; ``command`` and ``options`` repeat the run."""
    page = Report(f"{report.model} under load: {report.arrivals}", command, options)
    page.text(f"Latencies and rates as the client of {report.base_url} ({report.endpoint}) saw them.")
    figures = msgspec.structs.asdict(report)
    spreads = [(name.removesuffix("_ms"), figures.pop(name)) for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")]
    rows = [[name, *msgspec.structs.astuple(spread)] for name, spread in spreads if spread is not None]
    page.table(["milliseconds", *Spread.__struct_fields__], rows)
    page.figure(drawn, "Cumulative distributions of latencies; chunks received, and open requests, over time.")
    kinds = [(f"failed: {kind}", count) for kind, count in report.errors.items()]
    limits = [(f"goodput limit of {name}, ms", limit) for name, limit in report.goodput_limits_ms.items()]
    shown = [(name, value) for name, value in figures.items() if isinstance(value, int | float)]
    page.table(["figure", "value"], [*shown, *limits, *kinds])
    return page


def _timeline(axes: Any, outcomes: list[RequestOutcome]) -> None:
    start = min(o.sent for o in outcomes)
    end = max(o.ended for o in outcomes)
    edges = np.linspace(start, max(end, start + 1e-6), 101)
    chunks = np.concatenate([np.asarray(o.chunks) for o in outcomes])
    rate = np.histogram(chunks, edges)[0] / np.diff(edges)
    axes.step(edges[:-1] - start, rate, where="post", color="tab:blue")
    axes.set_xlabel("time (s)")
    axes.set_ylabel("chunks/s", color="tab:blue")
    axes.set_ylim(bottom=0)
    sent = _count_until(edges[:-1], [o.sent for o in outcomes])
    ended = _count_until(edges[:-1], [o.ended for o in outcomes])
    right = axes.twinx()
    right.step(edges[:-1] - start, sent - ended, where="post", color="tab:orange")
    right.set_ylabel("open requests", color="tab:orange")
    right.set_ylim(bottom=0)
    right.grid(visible=False)
    right.spines.right.set_visible(True)


def _count_until(edges: Any, times: list[float]) -> Any:
    """Number of times at or before each edge."""
    return np.searchsorted(np.sort(times), edges, side="right")
