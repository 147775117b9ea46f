"""The comparison of allocators: the paged run is the simulator's own, figures are exact, less waste serves more."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest

from octavo.cli.main import main
from octavo.core.errors import ConfigError
from octavo.lab.commands import simulate_allocators
from octavo.lab.simulate.allocators.census import Census
from octavo.lab.simulate.allocators.comparison import (
    ALLOCATORS,
    BASELINES,
    AllocatorComparison,
    Setting,
    compare,
    find_curve,
    make_setting,
    measure,
)
from octavo.lab.simulate.run import simulate
from octavo.lab.simulate.step_profile import format_profile, load_profile
from octavo.lab.workloads.lengths import Constant, Uniform
from tests.lab.simulate.test_profile import profile

LIMIT = 0.02
#: A step takes about as long for 1 sequence as for 64, as where weights are read.
SMALL = profile(
    max_model_len=128, kv_cache_tokens=1000, products=[[1, 0.008], [64, 0.008], [128, 0.016]], sampled=1e-5, context=0
)


def small(seed: int = 0) -> Setting:
    return make_setting(SMALL, Uniform(1, 60), Uniform(1, 30), 60, seed)


@pytest.fixture(scope="module")
def found() -> AllocatorComparison:
    return compare(small(), LIMIT)


def test_the_paged_run_is_that_of_the_simulator() -> None:
    setting = small()
    load = setting.load(30.0)
    measured = measure(setting, "paged", load, Census(0.0, 1.0))
    assert measured.figures == simulate(setting.profile, setting.options, load)
    assert measured.figures.requests == 60


def test_equal_calls_give_equal_figures_and_other_seeds_others(found: AllocatorComparison) -> None:
    again = find_curve(small(), "oracle", LIMIT)
    oracle = found.allocators[1]
    assert again == (oracle.rate, oracle.curve, oracle.throughput)
    assert find_curve(small(1), "oracle", LIMIT) != again


def test_less_waste_serves_more(found: AllocatorComparison) -> None:
    assert [a.allocator for a in found.allocators] == list(BASELINES)
    allocators = found.allocators[: len(ALLOCATORS)]
    assert [a.allocator for a in allocators] == list(ALLOCATORS) == ["paged", "oracle", "pow2", "max"]
    for more, less in itertools.pairwise(allocators):
        assert more.rate >= less.rate and more.batch >= less.batch and more.shares.tokens >= less.shares.tokens
    assert allocators[0].rate > 1.8 * allocators[-1].rate
    assert allocators[-1].batch == pytest.approx(7)  # 62 blocks, extents of 8


def test_static_batches_serve_less_in_the_same_memory(found: AllocatorComparison) -> None:
    by_name = {a.allocator: a for a in found.allocators}
    for name in ("oracle", "max"):
        own, static = by_name[name], by_name[f"static-{name}"]
        assert own.rate > 1.5 * static.rate and own.throughput > 1.3 * static.throughput
        assert own.shares.tokens > static.shares.tokens > 0
    assert by_name["static-oracle"].throughput > by_name["static-max"].throughput
    assert by_name["static-max"].batch <= 7


def test_the_rate_is_the_last_of_the_curve_under_the_limit(found: AllocatorComparison) -> None:
    for a in found.allocators:
        assert [point.rate for point in a.curve] == sorted(point.rate for point in a.curve)
        under = [point.rate for point in a.curve if point.normalized_latency <= LIMIT]
        next_rate = min(point.rate for point in a.curve if point.rate > a.rate)
        assert a.rate in under and next_rate not in under
        assert next_rate < (1.04 if a.allocator in ALLOCATORS else 1.13) * a.rate
        assert sum((a.shares.tokens, a.shares.reserved, a.shares.internal, a.shares.external)) == pytest.approx(1)


def test_requests_longer_than_the_context_are_drawn_again() -> None:
    setting = make_setting(profile(max_model_len=100), Uniform(1, 90), Uniform(1, 90), 500, 0)
    sums = [a + b for a, b in zip(setting.lengths.inputs, setting.lengths.outputs, strict=True)]
    assert len(sums) == 500 and 95 < max(sums) <= 100
    with pytest.raises(ConfigError, match="hardly ever fit"):
        make_setting(profile(max_model_len=100), Constant(90), Constant(90), 2, 0)


@pytest.mark.parametrize(("limit", "message"), [(1e-4, "never under"), (1e6, "always under")])
def test_a_limit_that_no_rate_or_every_rate_meets_is_refused(limit: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_curve(small(), "max", limit)


def test_the_profile_has_the_memory_of_the_paper() -> None:
    opt = load_profile("opt-13b-a100")
    assert opt.kv_bytes_per_token == 2 * 40 * 5120 * 2  # 800 KB (Kwon et al. 2023, section 3)
    assert opt.kv_cache_tokens == (12 << 30) // opt.kv_bytes_per_token == 15728  # 15.7K: table 1
    assert opt.max_model_len == 2048


def test_the_command_prints_a_table_or_the_curves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(format_profile(msgspec.structs.replace(SMALL, kv_cache_tokens=400)))
    words = ["simulate", "allocators", "--profile", str(tmp_path / "p.json"), "--lengths", "instruct", "--rate", "20"]
    words += ["--num-requests", "25", "--latency-limit", "0.014"]
    file = tmp_path / "a.json"
    assert main([*words, "--json", str(file)]) == 0 and capsys.readouterr().out == ""
    result = msgspec.convert(json.loads(file.read_text())["lengths"]["instruct"], AllocatorComparison)
    assert [a.allocator for a in result.allocators] == list(BASELINES)
    assert all(len(a.curve) > 6 for a in result.allocators)
    lines = simulate_allocators.table("instruct", result)
    assert lines[0].startswith("instruct (Alpaca): 25 requests") and "at 20.00 requests/s" in lines[0]
    assert [line.split()[0] for line in lines[2:-1]] == list(BASELINES) and lines[2].split()[2] == "1.00x"
    assert lines[-1].startswith("iteration-level over static batching")


def test_the_curves_are_drawn(found: AllocatorComparison) -> None:
    pytest.importorskip("matplotlib")
    [axes] = simulate_allocators.draw(found).axes
    assert [line.get_label() for line in axes.lines] == list(BASELINES)
    assert list(axes.lines[0].get_xdata()) == [point.rate for point in found.allocators[0].curve]


@pytest.mark.parametrize("words", [["--num-requests", "0"], ["--latency-limit", "-1"], ["--rate", "nan"], ["extra"]])
def test_a_wrong_call_is_refused(words: list[str]) -> None:
    assert main(["simulate", "allocators", *words]) == 2
