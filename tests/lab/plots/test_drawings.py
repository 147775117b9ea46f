"""Drawings show the data that they are given; without matplotlib the error names the extra."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.lab.plots import drawings
from octavo.lab.plots.style import as_svg, save

SECONDS = [0.0, 1.0, 2.5, 7.0]
SERIES: dict[str, list[float]] = {
    "seconds": SECONDS,
    "waiting": [0, 5, 9, 1],
    "running": [1, 2, 2, 2],
    "swapped": [0, 0, 0, 0],
    "blocks_used": [10, 60, 90, 20],
}
LATENCIES = {"ttft": [0.3, 0.1, 0.2], "tpot": [0.01], "e2e": [3.0, 1.0, 0.5]}


@pytest.fixture(autouse=True)
def _matplotlib(request: pytest.FixtureRequest) -> None:
    if "without_matplotlib" not in request.fixturenames:
        pytest.importorskip("matplotlib")


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_a_timeline_shows_queues_and_blocks_and_leaves_out_what_is_always_empty() -> None:
    queues, blocks = drawings.timeline(SERIES, 100).axes
    assert lines(queues) == {name: (SECONDS, SERIES[name]) for name in ("waiting", "running")}
    assert lines(blocks)["blocks_used"] == (SECONDS, SERIES["blocks_used"])
    assert any(line.get_ydata()[0] == 100 for line in blocks.get_lines())  # all blocks, as it comes near
    assert "90.0% of 100" in blocks.get_title(loc="left")
    swapped: dict[str, list[float]] = {**SERIES, "swapped": [0, 1, 0, 0]}
    assert lines(drawings.timeline(swapped).axes[0])["swapped"] == (SECONDS, [0, 1, 0, 0])


def test_distributions_are_the_sorted_values_of_each_run() -> None:
    other = {"ttft": [0.5, 0.25], "tpot": [], "e2e": [9.0, 8.0]}
    ttft, tpot, e2e = drawings.distributions({"fcfs": LATENCIES, "srpt": other}).axes
    assert lines(ttft) == {"fcfs": ([100, 200, 300], [1 / 3, 2 / 3, 1]), "srpt": ([250, 500], [0.5, 1])}
    assert ttft.get_xlabel() == "milliseconds" and ttft.get_ylabel() == "share of requests"
    assert lines(tpot)["fcfs"] == ([10], [1]) and lines(tpot)["srpt"] == ([], [])
    assert lines(e2e)["fcfs"] == ([0.5, 1, 3], [1 / 3, 2 / 3, 1]) and e2e.get_xlabel() == "seconds"
    colors = [[line.get_color() for line in axes.get_lines()] for axes in (ttft, tpot, e2e)]
    assert colors[0] == colors[1] == colors[2] and colors[0][0] != colors[0][1]


def test_only_a_heavy_tail_is_drawn_on_a_logarithmic_axis() -> None:
    heavy = {"a": {"e2e": [*range(1, 30), 5000.0]}, "b": {"e2e": [2.0, 3.0]}}
    assert drawings.distributions(heavy).axes[0].get_xscale() == "log"
    assert drawings.distributions({"b": heavy["b"]}).axes[0].get_xscale() == "linear"


def test_a_run_alone_has_its_percentiles_marked() -> None:
    values = np.random.default_rng(1).exponential(2.0, 5000)
    axes = drawings.distributions({"fcfs": {"e2e": values}}).axes[0]
    marked = sorted(line.get_xdata()[0] for line in axes.get_lines()[1:])
    assert marked == pytest.approx(np.percentile(values, (50, 90, 99)))
    x, y = axes.get_lines()[0].get_data()
    assert len(x) <= 500 and (x[-1], y[-1]) == (values.max(), 1.0)
    assert np.interp(0.9, y, x) == pytest.approx(np.percentile(values, 90), rel=0.01)


def test_goodput_and_replicas_and_bars_and_service() -> None:
    axes = drawings.goodput([0.7, 0.9, 1.1], {"fcfs": [1, 2, 1.5], "deadline": [1, 2, 2.2]}).axes[0]
    assert lines(axes) == {"fcfs": ([0.7, 0.9, 1.1], [1, 2, 1.5]), "deadline": ([0.7, 0.9, 1.1], [1, 2, 2.2])}

    scenarios = {"dense": {"fcfs": 1.0, "srpt": 2.0}, "sparse": {"fcfs": 3.0, "srpt": float("nan")}}
    panels = drawings.bars(scenarios, "seconds").axes
    for axes, (name, values) in zip(panels, scenarios.items(), strict=True):
        assert axes.get_title(loc="left") == name
        assert [bar.get_width() for bar in axes.patches] == pytest.approx(list(values.values()), nan_ok=True)
        assert [tick.get_text() for tick in axes.get_yticklabels()] == list(values)

    serving, load = drawings.replicas({"seconds": SECONDS, "serving": [1, 2, 3, 3]}, [9, 8, 7, 6]).axes
    assert lines(serving) == {"serving": (SECONDS, [1, 2, 3, 3])} and lines(load)["load"] == (SECONDS, [9, 8, 7, 6])

    users = {"alice": [0, 1, 2, 3], "bob": [0, 4, 8, 9]}
    served, difference = drawings.service(SECONDS, users, [0, 3, 6, 6], 50).axes
    assert lines(served) == {name: (SECONDS, values) for name, values in users.items()}
    assert lines(difference)["difference"] == (SECONDS, [0, 3, 6, 6])
    assert difference.get_lines()[1].get_ydata()[0] == 50 and difference.get_ylim()[1] > 50


def test_long_runs_are_drawn_in_hours() -> None:
    axes = drawings.replicas({"seconds": [0, 7200, 86400], "serving": [1, 2, 3]}).axes[0]
    assert lines(axes)["serving"][0] == [0, 2, 24] and axes.get_xlabel() == "time (hours)"


def test_users_settings_of_matplotlib_change_nothing() -> None:
    import matplotlib

    plain = as_svg(drawings.goodput([1, 2], {"fcfs": [1, 2]}))
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "black", "font.size": 30}):
        assert as_svg(drawings.goodput([1, 2], {"fcfs": [1, 2]})) == plain


def test_images_are_the_same_each_time(tmp_path: Path) -> None:
    for suffix, begin in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        files = [tmp_path / f"{name}{suffix}" for name in "ab"]
        for file in files:
            save(drawings.goodput([1, 2], {"fcfs": [1, 2]}), file)
        assert files[0].read_bytes() == files[1].read_bytes() and files[0].read_bytes().startswith(begin)
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        save(drawings.goodput([1], {}), tmp_path / "a.pdf")
    with pytest.raises(ConfigError, match="cannot write the image"):
        save(drawings.goodput([1], {}), tmp_path / "none" / "a.png")


def test_without_matplotlib_the_error_names_the_extra(without_matplotlib: None) -> None:
    with pytest.raises(ConfigError, match=r"octavo\[plot\]: .* install 'matplotlib"):
        drawings.timeline(SERIES)
