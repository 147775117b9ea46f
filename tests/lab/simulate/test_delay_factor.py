"""What ``scheduler_delay_factor`` trades, simulated: the rate under a limit against the first token."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from octavo.cli.main import main
from octavo.core.errors import ConfigError
from octavo.lab.commands import simulate_delay
from octavo.lab.simulate.delay_factor import DelayPoint, DelaySetting, find_point
from octavo.lab.simulate.step_profile import format_profile
from octavo.lab.workloads.lengths import Uniform
from tests.lab.simulate.test_profile import profile

#: A step takes about as long for one token as for 64, so that prompts gathered in one step cost less.
STEPS = profile(max_model_len=256, kv_cache_tokens=40_000, products=[[1, 0.008], [64, 0.009], [256, 0.02]])


def setting(limit: float) -> DelaySetting:
    return DelaySetting(STEPS, Uniform(4, 20), Uniform(4, 40), 80, limit)


def test_a_delay_buys_throughput_with_first_tokens() -> None:
    points = [find_point(setting(0.011), factor) for factor in (0.0, 2.0)]
    none, delayed = points
    assert delayed.rate > 1.05 * none.rate and delayed.mean_ttft > 1.2 * none.mean_ttft
    for point in points:
        assert point.mean_tpot <= 0.011
        figures = setting(0.011).run(point.factor, point.rate)
        assert figures.tpot is not None and figures.tpot.mean == point.mean_tpot
        above = setting(0.011).run(point.factor, 1.5 * point.rate).tpot
        assert above is not None and above.mean > 0.011
    assert find_point(setting(0.011), 2.0) == delayed


@pytest.mark.parametrize(("limit", "message"), [(1e-3, "larger --tpot-limit"), (10.0, "smaller --tpot-limit")])
def test_a_limit_that_no_rate_or_every_rate_keeps_is_refused(limit: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_point(setting(limit), 0.0)


def test_the_command_prints_a_table_or_its_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    file.write_bytes(format_profile(STEPS))
    words = ["simulate", "delay", "--profile", str(file), "--input-len", "uniform:4,20", "--output-len", "uniform:4,40"]
    words += ["--num-requests", "80", "--tpot-limit", "11", "--factors", "0,2"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0", "2"]
    assert main([*words, "--json", "-"]) == 0
    points = [msgspec.convert(p, DelayPoint) for p in json.loads(capsys.readouterr().out)["points"]]
    assert points[0] == find_point(setting(0.011), 0.0) and lines[2].split()[1] == f"{points[0].rate:.2f}"
    pytest.importorskip("matplotlib")
    [axes] = simulate_delay.draw(points).axes
    assert list(axes.lines[0].get_ydata()) == [p.output_tokens_per_s for p in points]
    assert [text.get_text() for text in axes.texts] == ["0", "2"]


@pytest.mark.parametrize("words", [["--factors", "a"], ["--factors", "-1"], ["--tpot-limit", "0"], ["extra"]])
def test_a_wrong_call_is_refused(words: list[str]) -> None:
    try:
        code = main(["simulate", "delay", *words])
    except SystemExit as e:  # of argparse
        code = int(e.code or 0)
    assert code == 2
