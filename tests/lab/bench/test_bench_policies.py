"""``octavo bench policies``: the same requests under every policy in all places, and what its tables say of them."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.cli.main import main
from octavo.config.engine_config import EngineConfig, make_config
from octavo.core.errors import ConfigError, EngineStateError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm_engine import LLMEngine
from octavo.lab.bench.policies import classical, pictures, tables
from octavo.lab.bench.policies.lab import Lab, ScenarioRow, acceptable, options_for
from octavo.lab.bench.policies.places import InProcess, Simulated
from octavo.lab.bench.policies.policy_figures import PlaceOutcome, PolicyFigures, averages, figures
from octavo.lab.bench.policies.scenarios import Scenario
from octavo.lab.bench.restartable import restarted, start
from octavo.lab.bench.steady import Machine, Usage
from octavo.lab.simulate.figures import Completions
from octavo.lab.workloads.lengths import Constant
from octavo.lab.workloads.work_items import WorkItem
from tests.lab.simulate.test_profile import profile


def items_of(capacity: float, seed: int) -> Iterable[WorkItem]:
    """Twelve requests of two users with targets and priorities."""
    for i in range(12):
        yield WorkItem(
            at=i * 0.001,
            input_len=5 + i + seed,
            output_len=2 + i % 5,
            stream=f"{seed}/{i}",
            user="ab"[i % 2],
            priority=i % 3,
            ttft_target=0.05 if i % 2 else None,
            tpot_target=10.0 if i % 3 else None,
        )


TINY = Scenario("tiny", "a few short ones", {"max_num_seqs": 4, "num_gpu_blocks_override": 40}, items_of)


@pytest.fixture
def tiny_scenario(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    monkeypatch.setitem(classical.CLASSICAL, "tiny", TINY)
    return TINY


def test_the_classical_scenarios_are_the_published_ones() -> None:
    sizes = {"dense-short": (1000, 20), "dense-long": (1000, 80), "sparse-short": (100, 20), "sparse-long": (100, 80)}
    assert set(classical.CLASSICAL) == set(sizes)
    for name, (count, tokens) in sizes.items():
        scenario = classical.CLASSICAL[name]
        items = list(scenario.make(float("inf"), 3))
        assert len(items) == count and not scenario.options
        assert items == list(scenario.make(1.0, 3)) != list(scenario.make(1.0, 4))
        for lengths in ([item.input_len for item in items], [item.output_len for item in items]):
            assert np.mean(lengths) == pytest.approx(tokens, rel=0.1)
            assert np.var(lengths) == pytest.approx(tokens, rel=0.5)
        assert items[-1].at == pytest.approx(1.0, rel=0.3)
        assert all(item.at * 1000 == pytest.approx(round(item.at * 1000)) for item in items)
        assert {item.priority for item in items} == {0, 1, 2}


def test_figures_are_those_of_the_requests() -> None:
    items = [
        WorkItem(at=1.0, input_len=4, output_len=3, user="a", ttft_target=0.5),
        WorkItem(at=2.0, input_len=4, output_len=1, user="b", ttft_target=0.5, tpot_target=0.1),
        WorkItem(at=2.0, input_len=4, output_len=5, user="a", tpot_target=0.1),
        WorkItem(at=3.0, input_len=4, output_len=5, user="c"),
        WorkItem(at=3.0, input_len=4, output_len=5, user="c", ttft_target=9.0),
    ]
    done = Completions()
    done.add(1, items[1], 2.0, 2.25, 2.25, 1)
    done.add(0, items[0], 1.0, 2.0, 3.0, 3)
    done.add(2, items[2], 2.0, 3.0, 3.25, 5)
    done.add(3, items[3], 3.0, 4.0, 6.0, 5)
    done.fail(items[4], "error")
    found = figures(items, PlaceOutcome(done, 7, 0.5))
    assert (found.requests, found.failed, found.seconds, found.preemptions) == (5, 1, 5.0, 7)
    assert found.requests_per_s == 4 / 5
    assert found.mean_latency == statistics.fmean([0.25, 2, 1.25, 3])
    assert found.mean_ttft == statistics.fmean([0.25, 1, 1, 1])
    # Met: the second and the third. Not: the first, and the last, which failed; the fourth has no target.
    assert found.goodput_share == 2 / 4 and found.goodput_per_s == 2 / 5
    assert found.user_latency == {"a": (2 + 1.25) / 2, "b": 0.25, "c": 3.0}
    assert found.tau == 0.5 and found.oracle_tau == 1.0


def test_averages_are_taken_figure_by_figure() -> None:
    base = PolicyFigures(**dict.fromkeys(PolicyFigures.__struct_fields__[:11], 1.0), user_latency={"a": 1.0})
    other = msgspec.structs.replace(base, seconds=4.0, user_latency={"a": 2.0, "b": 5.0}, goodput_share=0.5)
    mean, deviation = averages([base, other])
    assert mean.seconds == 2.5 and deviation.seconds == statistics.stdev([1, 4])
    assert mean.user_latency == {"a": 1.5, "b": 5.0} and deviation.user_latency["b"] == 0
    assert mean.goodput_share is None and deviation.requests == 0
    assert averages([base])[0] == base


def test_policies_get_what_they_look_at() -> None:
    items = list(items_of(0, 0))
    assert acceptable(items, "static") == [
        msgspec.structs.replace(item, ttft_target=None, tpot_target=None) for item in items
    ]
    assert all(item.priority == 0 and item.user for item in acceptable(items, "fcfs"))
    assert [item.ttft_target for item in acceptable(items, "deadline")] == [item.ttft_target for item in items]
    scenario = Scenario("s", "", {"user_weights": {"a": 2.0}, "max_num_seqs": 3, "priority_preemption": True}, items_of)
    assert options_for(scenario, "fcfs") == {"max_num_seqs": 3, "scheduling_policy": "fcfs"}
    assert options_for(scenario, "fair") == {
        "max_num_seqs": 3,
        "user_weights": {"a": 2.0},
        "scheduling_policy": "fair",
    }
    for policy in ("fcfs", "fair", "static", "deadline"):
        make_config(model="m", **options_for(scenario, policy))


def simulated_lab(seed: int = 0) -> Lab:
    place = Simulated(profile(max_model_len=256))
    return Lab([place], lambda name, changes: make_config(model="none", **changes), seed)


def test_equal_simulated_labs_give_equal_figures() -> None:
    policies = ["fcfs", "static", "sjf", "srpt", "fair"]

    def run(seed: int) -> list[ScenarioRow]:
        return simulated_lab(seed).run([TINY], policies, 2, lambda row: None)

    rows = run(1)
    assert [row.runs for row in rows] == [row.runs for row in run(1)] != [row.runs for row in run(2)]
    assert [(row.policy, len(row.runs)) for row in rows] == [(policy, 2) for policy in policies]
    by_policy = {row.policy: row.mean for row in rows}
    assert len({mean.mean_latency for mean in by_policy.values()}) > 2 and by_policy["static"] != by_policy["fcfs"]


def test_repeats_are_outermost_and_policies_innermost() -> None:
    seen: list[tuple[str, str, int]] = []
    other = Scenario("other", "", {}, items_of)
    simulated_lab().run([TINY, other], ["fcfs", "sjf"], 2, lambda r: seen.append((r.scenario, r.policy, len(r.runs))))
    assert seen == [(s, p, n) for n in (1, 2) for s in ("tiny", "other") for p in ("fcfs", "sjf")]


def test_the_capacity_is_found_once_and_given() -> None:
    given: list[float] = []

    def make(capacity: float, seed: int) -> Iterable[WorkItem]:
        given.append(capacity)
        return items_of(capacity, seed)

    scenarios = [Scenario(name, "", {"max_num_seqs": 1}, make, Constant(4), Constant(3)) for name in ("a", "b")]
    rows = simulated_lab().run([*scenarios, Scenario("c", "", {}, make)], ["fcfs"], 2, lambda row: None)
    # One at a time: a step for a prompt of four tokens, and two of one token; costs are those of the profile.
    steps = profile()
    prompt = steps.fixed + 0.008 + steps.chunk + steps.sampled + 10 * steps.pairs
    decodes = 2 * (steps.fixed + 0.008 + steps.sampled) + (4 + 5) * steps.context
    assert given[0] == pytest.approx(1 / (prompt + decodes), rel=1e-3)
    assert given == [given[0], given[0], float("inf")] * 2
    assert [row.capacity for row in rows] == [given[0], given[0], None]


def test_lengths_can_be_hidden_from_all_but_the_oracle(tiny_model: Path) -> None:
    """By turns long and short requests, one at a time, all there at the start."""

    def make(capacity: float, seed: int) -> Iterable[WorkItem]:
        return [WorkItem(at=0.0, input_len=8, output_len=2 if i % 2 else 20, stream=f"{i}") for i in range(8)]

    scenario = Scenario("hidden", "", {"max_num_seqs": 1}, make, max_tokens=64)
    place = InProcess("tiny")
    options: dict[str, Any] = {"model": str(tiny_model), "num_gpu_blocks_override": 40, "num_threads": 1}
    lab = Lab(
        [Simulated(profile(max_model_len=256)), place],
        lambda name, changes: make_config(**({"model": "none"} if name == "simulated" else options), **changes),
        0,
    )
    rows = {(row.place, row.policy): row.mean for row in lab.run([scenario], ["fcfs", "sjf"], 1, lambda row: None)}
    place.close()
    for name in ("simulated", "process"):
        assert rows[name, "sjf"].mean_latency < rows[name, "fcfs"].mean_latency
        assert rows[name, "fcfs"].failed == 0
    hidden = [make_config(model="none", **options_for(scenario, policy)) for policy in ("fcfs", "sjf")]
    simulated = Simulated(profile(max_model_len=256))
    orders = [list(simulated.run(o, list(make(0, 0)), 64).done.number) for o in hidden]
    assert orders[0] == orders[1] == list(range(8))


def test_runs_whose_memory_differs_follow_one_another(tiny_model: Path) -> None:
    place = InProcess("tiny")
    items = [WorkItem(at=0.0, input_len=8, output_len=2, stream="0")]
    for blocks in (40, 40, 50, 40):
        options = make_config(model=str(tiny_model), num_gpu_blocks_override=blocks, num_threads=1)
        assert len(place.run(options, items, 64).done.number) == 1
    place.close()


def test_an_engine_restarts_with_its_weights(tiny_model: Path) -> None:
    core, engine = start(make_config(model=str(tiny_model), num_gpu_blocks_override=40, num_threads=1))
    scheduler, executor = core.scheduler, core.executor

    def answer(engine: LLMEngine) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=6)
        engine.add_request("a", [5, 6, 7] * 9, params, streaming=False)
        with pytest.raises(EngineStateError):
            core.restart({})
        while not (outputs := engine.step()):
            pass
        return list(outputs[0].outputs[0].token_ids)

    first = answer(engine)
    engine = restarted(core, engine, {"scheduling_policy": "srpt", "aging_limit": 1.0})
    assert core.scheduler is not scheduler and core.executor is executor
    assert engine.stats().steps == 0 and engine.stats().blocks_cached == 0
    assert answer(engine) == first and engine.stats().prefix_hit_tokens == 0
    with pytest.raises(ConfigError, match="max_num_seqs"):
        core.restart({"max_num_seqs": 3})


def test_all_places_and_their_tables(
    tiny_model: Path, tiny_scenario: Scenario, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(profile(max_model_len=256)))
    given = ["--places", "process,server,simulated", "--policies", "deadline", "--scenarios", "tiny"]
    given += ["--profile", str(tmp_path / "profile.json"), "--repeats", "1", "--num-threads", "1", "--again", "0"]
    written = [tmp_path / "lab.json", tmp_path / "lab.csv"]
    assert (
        main(["bench", "policies", str(tiny_model), *given, "--json", f"{written[0]}", "--csv", f"{written[1]}"]) == 0
    )
    shown = capsys.readouterr().out
    found = json.loads(written[0].read_text())
    assert found["scenarios"] == {"tiny": TINY.about} and set(found["places"]) == {"process", "server", "simulated"}
    assert [row["place"] for row in found["rows"]] == ["process", "server", "simulated"]
    lines = list(csv.DictReader(io.StringIO(written[1].read_text())))
    for row, line in zip(found["rows"], lines, strict=True):
        mean = row["mean"]
        assert mean == row["runs"][0] and mean["failed"] == 0 and mean["requests"] == 12
        assert mean["requests_per_s"] == pytest.approx(12 / mean["seconds"])
        assert 0 < mean["mean_ttft"] < mean["mean_latency"] <= mean["seconds"]
        assert set(mean["user_latency"]) == {"a", "b"}
        assert mean["goodput_per_s"] == pytest.approx(mean["goodput_share"] * 10 / mean["seconds"])
        assert (line["place"], line["policy"]) == (row["place"], row["policy"])
        assert float(line["mean_latency"]) == mean["mean_latency"] and line["repeats"] == "1"
        assert float(line["latency of b"]) == mean["user_latency"]["b"]
        cells = [tables.number(mean[name]) for name in ("seconds", "requests_per_s", "mean_latency", "p50_latency")]
        mark = "*" * row["disturbed"]
        by_policy, by_scenario = (f"| {name}{mark} | {' | '.join(cells)} |" for name in ("tiny", row["policy"]))
        assert shown.count(by_policy) >= 1 and shown.count(by_scenario) >= 1


def test_policies_take_turns_and_disturbed_ones_are_marked(
    tiny_model: Path, tiny_scenario: Scenario, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    before = InProcess.run

    def run(self: InProcess, options: EngineConfig, items: Sequence[WorkItem], limit: int | None) -> PlaceOutcome:
        order.append(options.scheduling_policy)
        return before(self, options, items, limit)

    monkeypatch.setattr(InProcess, "run", run)
    # The machine is slower from the second run of lcfs on.
    monkeypatch.setattr(Machine, "reference", lambda self: 1.2 if len(order) >= 4 else 1.0)
    monkeypatch.setattr(Machine, "usage", lambda self: Usage(0.0, 0, 0.0, 0.0, 0.0))
    words = ["--policies", "fcfs,lcfs,sjf", "--scenarios", "tiny", "--num-threads", "1", "--again", "0"]
    assert main(["bench", "policies", str(tiny_model), *words]) == 0
    assert order == ["fcfs", "lcfs", "sjf", "sjf", "lcfs", "fcfs"], "two repeats by the clock, interleaved"
    shown = capsys.readouterr().out
    assert all(f"| {policy}* |" in shown for policy in ("fcfs", "lcfs", "sjf")) and "| tiny* |" in shown
    assert "* lcfs (process, tiny, repeat 1): reference +20.0%" in shown and "(process, tiny, repeat 0)" not in shown


def test_drawings_and_the_report(tiny_scenario: Scenario, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(profile(max_model_len=256)))
    given = ["--places", "simulated", "--policies", "fcfs,lcfs", "--scenarios", "tiny", "--repeats", "1"]
    given += ["--profile", str(tmp_path / "profile.json")]
    out, plots = tmp_path / "out.html", tmp_path / "plots"
    assert main(["bench", "policies", *given, "--report", str(out), "--plots", str(plots), "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {path.name for path in plots.iterdir()} == {"mean-latency-simulated.png", "latencies-simulated-tiny.png"}
    page = out.read_text()
    assert TINY.about in page and page.count("<svg") == 2
    for row in rows:
        assert tables.number(row["mean"]["p99_latency"]) in page


def test_goodput_is_drawn_against_the_loads_of_a_family() -> None:
    pytest.importorskip("matplotlib")
    pairs = ((0.9, "heavy"), (0.7, "heavy"), (1.0, "light"))
    scenarios = [Scenario(f"{name} {load}", "", {}, items_of, load=load, family=name) for load, name in pairs]
    rows = simulated_lab().run(scenarios, ["fcfs", "deadline"], 1, lambda row: None)
    drawn = pictures.draw(rows, scenarios)
    assert [name for name in drawn if name.startswith("goodput")] == ["goodput-simulated-heavy"]
    (axes,) = drawn["goodput-simulated-heavy"][0].axes
    goodput = {(row.scenario, row.policy): row.mean.goodput_per_s for row in rows}
    for line in axes.lines:
        assert list(line.get_xdata()) == [0.7, 0.9]
        assert list(line.get_ydata()) == [goodput[f"heavy {load}", line.get_label()] for load in (0.7, 0.9)]


def test_tables_show_medians_and_ranges() -> None:
    rows = simulated_lab().run([TINY], ["fcfs", "srpt"], 3, lambda row: None)
    text = tables.markdown(rows, {"simulated": "a model"})
    found = msgspec.json.decode(tables.as_json(rows, {"simulated": "a model"}, {"seed": 0}))
    assert "medians of 3 runs" in text
    for row in found["rows"]:
        latencies = [run["mean_latency"] for run in row["runs"]]
        mean, deviation = statistics.fmean(latencies), statistics.stdev(latencies)
        assert row["mean"]["mean_latency"] == mean and row["deviation"]["mean_latency"] == deviation
        low, median, high = sorted(latencies)
        assert row["median"]["mean_latency"] == median
        assert f"| {tables.number(median)} [{tables.number(low)}, {tables.number(high)}] |" in text
        low, median, high = sorted(run["goodput_share"] for run in row["runs"])
        assert f"| {median:.1%} [{low:.1%}, {high:.1%}] |" in text
        assert (row["mean"]["tau"] is not None) == (row["policy"] == "srpt")
    assert text.count("| fcfs |") == 1 and text.count("**fcfs**") == 1 and "mean latency of a" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--policies", "fcfs,fastest"], "unknown scheduling_policy 'fastest'"),
        (["--policies", "no.module:Policy"], "cannot be imported"),
        (["--scenarios", "sparse"], "no scenario 'sparse'; known: classic"),
        (["--places", "moon"], "no place 'moon'"),
        (["--places", ","], "--places names nothing"),
        (["--repeats", "0"], "--repeats must be at least 1, not 0"),
        (["--scheduling-policy", "srpt"], "name the policies in --policies"),
        (["--places", "process"], "no model given"),
        (["m", "--places", "server", "--scenarios", "sparse-short,heavy-tailed-90"], "hide it: heavy-tailed-90; those"),
        (["--profile", "none-such"], "no profile 'none-such'"),
        (["--csv", "/no/such/folder/x.csv"], "cannot write --csv"),
    ],
)
def test_what_is_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OCTAVO_MODEL", raising=False)
    assert main(["bench", "policies", "--places", "simulated", "--scenarios", "sparse-short", *given]) != 0
    assert message in capsys.readouterr().err


def test_its_kind_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--seconds", "3", "policies"]) != 0
    assert "'policies' must come right after" in capsys.readouterr().err
