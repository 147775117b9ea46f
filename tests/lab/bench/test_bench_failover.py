"""``octavo bench failover``: figures of a run in which a replica was killed, measured and simulated alike."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError
from octavo.lab.bench import failover
from octavo.lab.bench.serve_client import RequestOutcome
from octavo.lab.simulate.cluster.spec import Outage
from tests.lab.simulate.test_profile import profile
from tests.lab.simulate.test_simulated_engine import UNIT, item

OPTIONS = make_config(model="none", data_parallel_size=2)


def outcome(sent: float, *chunks: float) -> RequestOutcome:
    made = RequestOutcome(sent, sent, ended=chunks[-1], chunks=array("d", chunks))
    made.output_tokens = len(chunks)
    return made


def test_the_same_run_has_the_same_figures_measured_and_simulated() -> None:
    """Steps of 1 s; see ``test_a_lost_request_goes_on_with_the_tokens_that_were_sent``."""
    items = [item(0, 10, 4), item(0, 10, 4)]
    simulated = failover._simulated(OPTIONS, profile(**UNIT), items, [Outage(0, 2.5, 100)])
    measured = failover._measured_figures([outcome(0, 1, 2, 4, 5), outcome(0, 1, 2, 3, 4)], 2.5)
    assert simulated.pop("requests moved") == 1
    assert simulated == pytest.approx(measured, rel=0.03), "percentiles of few gaps are interpolated"
    assert measured["itl max"] == 2 and measured["time to recover"] == 2.5


@pytest.mark.parametrize("until", [9.0, pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_the_pace_of_a_run_is_found(until: float) -> None:
    items = [item(i / 4, 40, 30) for i in range(60)]
    slow = failover._simulated(OPTIONS, profile().scaled(2.5), items)
    done = failover._record(OPTIONS, profile().scaled(2.5), items)[1]
    seconds = failover._token_seconds(zip(done.first, done.last, done.outputs, strict=True), until)
    pace = failover._pace(
        OPTIONS, profile(), items, failover._Measured(slow, seconds, [Outage(0, until)] if until < 10 else [])
    )
    assert pace == pytest.approx(2.5, rel=0.01)


def test_requests_leave_a_drained_replica_at_the_end_of_its_step() -> None:
    """Steps of 1 s: with the one that ends at 3 s they have all their tokens."""
    items = [item(0, 10, 3), item(0, 10, 3)]
    kill, drain = (
        failover._simulated(OPTIONS, profile(**UNIT), items, [Outage(0, 2.5, 100, planned=planned)])
        for planned in (False, True)
    )
    assert (kill["requests moved"], drain["requests moved"]) == (1, 0)
    assert (kill["time to recover"], drain["time to recover"]) == (1.5, 0.5)


def test_replicas_are_restarted_one_after_the_other() -> None:
    items = [item(i / 2, 10, 6) for i in range(12)]
    outages = [Outage(0, 2.5, 3, planned=True), Outage(1, 6.0, 3, planned=True)]
    whole, disturbed = (failover._simulated(OPTIONS, profile(**UNIT), items, some) for some in ([], outages))
    assert disturbed["requests moved"] >= 2
    assert disturbed["e2e p99"] >= whole["e2e p99"]


def test_an_unknown_failure_is_refused() -> None:
    with pytest.raises(ConfigError, match="no failure 'fire': it is one of kill, drain, restart"):
        failover.measure(OPTIONS, profile(), 0.5, 10, ["fire"])


def test_a_single_replica_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size must be at least 2"):
        failover.measure(make_config(model="none"), profile(), 0.5, 10)


@pytest.mark.slow
def test_replicas_of_a_server_fail_in_every_way_and_the_simulation_is_compared(tmp_path: Path) -> None:
    call = ["bench", "failover", "smollm2-135m", "--data-parallel-size", "2", "--num-threads", "1", "--seconds", "20"]
    call += ["--num-gpu-blocks-override", "2000", "--load", "0.05", "--failures", "kill,drain,restart"]
    assert main([*call, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    runs = {run["name"]: run for run in found["runs"]}
    assert [*runs] == ["undisturbed", "replica killed", "replica drained", "rolling restart"]
    assert all(run["pace"] > 0 for run in runs.values())
    away = {name: sorted(outage["replica"] for outage in run["outages"]) for name, run in runs.items()}
    assert [*away.values()] == [[], [0], [0], [0, 1]]
    assert 4.0 <= runs["replica drained"]["outages"][0]["seconds"] < 20
    figures = {(f["run"], f["name"]): f for f in found["figures"]}
    assert all((name, "time to recover") in figures for name in runs if name != "undisturbed")
    assert all(f["measured"] > 0 for (run, _), f in figures.items() if run == "undisturbed")
