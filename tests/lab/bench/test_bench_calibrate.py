"""``octavo bench calibrate`` and ``simulation``: fits recover what is known, and run on a tiny model."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.cli.main import main
from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError
from octavo.kvstore.disk import DiskStore
from octavo.lab.bench import calibrate_disk, validate
from octavo.lab.bench.calibrate import MeasuredStep, fit_profile, median_steps, relative_fit
from octavo.lab.bench.calibrate_server import overhead
from octavo.lab.bench.serve_client import RequestOutcome
from octavo.lab.simulate.step_profile import Overhead, StoreCosts, load_profile
from octavo.lab.simulate.work import StepWork
from octavo.lab.workloads.arrivals import Gamma
from octavo.lab.workloads.lengths import Constant
from octavo.lab.workloads.workload import Workload
from tests.lab.simulate.test_profile import PROFILE, profile


def test_a_fit_is_the_best_of_all_subsets_of_its_terms() -> None:
    """Of relative errors, all within the tail that counts by squares."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        a = rng.normal(size=(int(rng.integers(3, 12)), 4))
        b = rng.uniform(0.5, 2.0, size=len(a))
        relative, best = a / b[:, None], np.inf
        for columns in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in range(5)):
            x = np.zeros(4)
            if columns:
                x[list(columns)] = np.linalg.lstsq(relative[:, columns], np.ones(len(b)), rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(relative @ x - 1)))
        fitted = relative_fit(a, b, tail=1e9)
        assert (fitted >= 0).all()
        assert np.linalg.norm(relative @ fitted - 1) == pytest.approx(best, rel=1e-6)


def test_without_scipy_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match=r"a fit needs scipy, which is not installed: .*octavo\[lab\]"):
        relative_fit(np.ones((3, 1)), np.ones(3))


def test_a_fit_recovers_the_costs_behind_noisy_steps() -> None:
    rng = random.Random(5)
    known = profile(products=[[1, 0.008], [8, 0.008], [512, 0.4]], fixed=0)
    steps = []
    for _ in range(600):
        decodes, chunks = rng.choice((0, 1, 4, 16, 64)), rng.choice((0, 0, 1, 2))
        prompt = chunks * rng.randrange(2, 200)
        work = StepWork(
            tokens=decodes + prompt,
            decodes=decodes,
            context=decodes * rng.randrange(10, 2000),
            chunks=chunks,
            pairs=prompt * rng.randrange(100, 2000),
            sampled=decodes + chunks,
        )
        if work.tokens:
            disturbed = 3.0 if rng.random() < 0.03 else rng.uniform(0.98, 1.02)
            steps.append(MeasuredStep(work, known.seconds(work) * disturbed))
    facts = {name: PROFILE[name] for name in ("model", "device", "device_type", "max_model_len")}
    facts |= {"kv_cache_tokens": 1000, "kv_bytes_per_token": 1, "moved": 0.0, "copied": 0.0}
    found = fit_profile(steps, **facts)
    assert found.errors["all"].median < 0.015 and found.errors["all"].steps == len(steps)
    assert {"decode", "mixed", "prefill"} < set(found.errors)
    assert found.context == pytest.approx(known.context, rel=0.05)
    assert found.pairs == pytest.approx(known.pairs, rel=0.1)
    for tokens in (1, 8, 64, 400):
        work = StepWork(tokens=tokens, decodes=tokens, sampled=tokens)
        assert found.seconds(work) == pytest.approx(known.seconds(work), rel=0.05)


def test_the_same_step_of_several_rounds_has_its_median_time() -> None:
    a, b = StepWork(tokens=1, decodes=1, context=9, sampled=1), StepWork(tokens=4, chunks=1, pairs=10)
    rounds = [
        [MeasuredStep(a, 1.0), MeasuredStep(b, 5.0)],
        [MeasuredStep(a, 9.0), MeasuredStep(b, 4.0)],
        [MeasuredStep(a, 2.0), MeasuredStep(a, 7.0)],
    ]
    assert median_steps(rounds) == [MeasuredStep(a, 2.0), MeasuredStep(b, 4.5), MeasuredStep(a, 7.0)]


def test_what_a_server_adds_is_what_the_steps_do_not_explain() -> None:
    known, added = profile(offline=Overhead(request=1e-4)), Overhead(request=1e-4, step=2e-3, answer=3e-3, arrival=3e-3)

    def answers(count: int) -> list[RequestOutcome]:
        gap = known.seconds(StepWork(count, count, count * 32, 0, 0, count)) + added.step
        first = known.seconds(StepWork(16, 0, 0, 1, 136, 1)) + added.step + added.request + added.arrival + added.answer
        chunks = array("d", [5.0 + first + i * gap for i in range(33)])
        return [RequestOutcome(due=5.0, sent=5.0, ended=chunks[-1], chunks=chunks, output_tokens=33)]

    found = overhead(known, answers(1), answers(8))
    assert msgspec.structs.astuple(found) == pytest.approx(msgspec.structs.astuple(added))
    slower = profile(products=[(1, 1.0), (10, 2.0)])
    assert overhead(slower, answers(1), answers(8)) == Overhead()


def test_a_simulation_follows_a_pace_that_changes() -> None:
    known = profile()
    items = Workload(requests=30, arrivals=Gamma(4.0, math.inf), inputs=Constant(20), outputs=Constant(5))
    options = make_config(model="none")
    slow, twice, later = (
        np.asarray(done.e2e)
        for done in (
            validate._simulated(known.scaled(2.0), options, items),
            validate._simulated(known, options, items, [2.0], 2.0),
            validate._simulated(known, options, items, [1.0, 1.0], 2.0),
        )
    )
    assert twice == pytest.approx(slow)
    assert later[:10].sum() < slow[:10].sum() and later[-5:] == pytest.approx(slow[-5:], rel=0.01)


def test_a_disk_costs_what_its_calls_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the store's calls advance."""
    now = 0.0
    monkeypatch.setattr(calibrate_disk.time, "perf_counter", lambda: now)

    class Timed(DiskStore):
        def read(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
            nonlocal now
            now += 3e-3 + 2e-6 * sum(value.nbytes for value in values)
            return super().read(keys, values)

        def write(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
            nonlocal now
            now += len(keys) * 3e-3 + 5e-6 * sum(value.nbytes for value in values)
            return super().write(keys, values)

    monkeypatch.setattr(calibrate_disk, "DiskStore", Timed)
    monkeypatch.setattr(calibrate_disk, "_MOST_BLOCKS", 8)
    found = calibrate_disk.calibrate_disk(str(tmp_path / "new"), 5000, rounds=2)
    assert (found.call, found.read, found.write) == pytest.approx((3e-3, 2e-6, 5e-6))
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        calibrate_disk.calibrate_disk(str(tmp_path / "file"), 5000)


def test_a_calibrated_profile_can_be_simulated_and_compared(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "profile.json"
    engine = [str(tiny_model), "--num-gpu-blocks-override", "200", "--max-num-seqs", "16"]
    disk = ["--kv-disk", str(tmp_path / "kv")]
    assert main(["bench", "calibrate", *engine, *disk, "--rounds", "2", "--with-server", "--json", str(file)]) == 0
    found = load_profile(str(file))
    assert (
        found.disk.read > 0
        and found.disk != StoreCosts(call=100e-6, read=4e-10, write=8e-10)
        and not list((tmp_path / "kv").iterdir())
    )
    assert found.origin == "fitted" and found.errors["all"].steps > 100
    assert found.kv_cache_tokens == 3200 and found.offline.request > 0 and found.moved > 0
    assert 0 < found.server.arrival == found.server.answer < 1
    assert main(["simulate", "--profile", str(file), "--input-len", "20", "--output-len", "5", "--json", "-"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert figures["requests"] == 100 and figures["output_tokens"] == 500
    monkeypatch.setattr(validate, "KINDS", {"short": ("uniform:5,30", "uniform:2,10", 1.0)})
    monkeypatch.setattr(validate, "LOADS", (0.5,))
    assert (
        main(
            [
                "bench",
                "simulation",
                *engine,
                "--profile",
                str(file),
                "--seconds",
                "0.1",
                "--rounds",
                "1",
                "--again",
                "0",
            ]
        )
        == 0
    )
    table = capsys.readouterr().out
    assert (
        "short" in table
        and table.count("median error") >= 18
        and "at the pace of each run" in table
        and "p99 e2e" in table
    )
