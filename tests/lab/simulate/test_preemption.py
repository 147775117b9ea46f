"""Swapping against recomputing: the same memory for both, and what a link and a block size make of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.lab.simulate.step_profile import format_profile, load_profile
from octavo.lab.simulate.swap_or_recompute import (
    SHARED_LOADS,
    Load,
    Runs,
    across_link,
    at_equal_memory,
    one_preemption,
    with_link,
)
from octavo.lab.simulate.work import StepWork
from octavo.lab.workloads.lengths import Uniform
from tests.lab.simulate.test_profile import profile

#: Decodes bound by reading weights, prompts by computing.
CPU = profile(products=[[1, 0.01], [16, 0.01], [256, 0.16]], moved=1e-6, kv_bytes_per_token=1000, device_type="cpu")
LOAD = Load("small", Uniform(16, 64), Uniform(32, 96), 40, 48)


def rates(runs: Runs) -> list[float]:
    return [run.requests_per_s for run in runs.runs]


def test_host_blocks_are_taken_from_the_same_memory() -> None:
    found = list(at_equal_memory(CPU, LOAD, range(2)))
    assert {runs.device_blocks + runs.host_blocks for runs in found} == {LOAD.blocks}
    assert {runs.host_blocks for runs in found} == {0, 2, 4, 8, 12, 16, 24}
    for runs in found:
        assert len(runs.runs) == 2 and runs.mode == ("swap" if runs.host_blocks else "recompute")
        assert all((f.preemptions_by_swap > 0) == (runs.host_blocks > 0) for f in runs.runs)


@pytest.mark.slow
def test_a_sixth_of_the_blocks_on_the_host_helps_and_half_of_them_hurts() -> None:
    fitted = load_profile("smollm2-135m-epyc-2-cores")
    by_host = {
        (runs.host_blocks, runs.prefix_cache): runs.runs[0]
        for runs in at_equal_memory(fitted, SHARED_LOADS[0], [0], (0, 1 / 6, 1 / 2))
    }
    none, sixth, half = (by_host[host, True] for host in (0, 32, 96))
    assert sixth.requests_per_s > 1.05 * none.requests_per_s > 1.15 * half.requests_per_s
    assert none.running > sixth.running > half.running
    without = by_host[0, False]  # nothing of what was given up is found again
    assert without.requests_per_s < none.requests_per_s


def test_the_seconds_of_a_swap_count_copies_and_bytes() -> None:
    linked = with_link(CPU, 2.0, copies=3, seconds_per_copy=1e-5)
    assert linked.moved == 1000 / 2e9 and linked.transfer == pytest.approx(3e-5)
    assert linked.seconds(StepWork(transfers=4, moved=64)) == pytest.approx(CPU.fixed + 4 * 3e-5 + 64 * 5e-7)
    assert linked.scaled(2).transfer == 2 * linked.transfer


def test_one_preemption_by_swap_takes_longer_in_small_blocks_and_recomputing_does_not() -> None:
    one = one_preemption(with_link(CPU, 2.0, copies=80, seconds_per_copy=5e-6), 100)
    assert one.recompute == CPU.seconds(StepWork(tokens=100, chunks=1, pairs=5050))
    assert one.swap[1] == pytest.approx(2 * 100 * (80 * 5e-6 + 5e-7))
    assert one.swap[16] == pytest.approx(2 * (7 * 80 * 5e-6 + 7 * 16 * 5e-7)), "whole blocks are moved"
    assert one.swap[1] > one.swap[4] > one.swap[16]


def test_across_a_link_many_copies_of_small_blocks_make_swapping_lose() -> None:
    gpu = profile(kv_cache_tokens=512, products=[[1, 0.01], [64, 0.01], [256, 0.04]], kv_bytes_per_token=1000)
    slow = with_link(gpu, 1.0, copies=80, seconds_per_copy=2e-5)
    [recompute], [swap], [auto] = (
        rates(across_link(slow, LOAD, 1, mode, [0])) for mode in ("recompute", "swap", "auto")
    )
    assert swap < 0.9 * recompute and auto == pytest.approx(recompute, rel=0.02)
    fast = with_link(gpu, 100.0, copies=1, seconds_per_copy=1e-6)
    assert rates(across_link(fast, LOAD, 16, "swap", [0])) > rates(across_link(fast, LOAD, 16, "recompute", [0]))


def test_the_command_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cpu.json").write_bytes(format_profile(CPU))
    words = ["simulate", "preemption", "--profile", str(tmp_path / "cpu.json"), "--repeats", "2"]
    assert main([*words, "--num-requests", "2"]) == 0
    text = capsys.readouterr().out
    assert text.count("| 0 | ") == 3 and "2 requests at once, 192 blocks in all" in text and "1.000 ± 0.000" in text


@pytest.mark.slow
def test_the_command_writes_every_run(tmp_path: Path) -> None:
    gpu = profile(device_type="gpu", kv_cache_tokens=4096)
    (tmp_path / "gpu.json").write_bytes(format_profile(gpu))
    words = ["simulate", "preemption", "--profile", str(tmp_path / "gpu.json"), "--repeats", "2", "--copies", "1"]
    assert main([*words, "--num-requests", "2", "--json", str(tmp_path / "out.json")]) == 0
    [[alone, *loads]] = json.loads((tmp_path / "out.json").read_text())["profiles"].values()
    assert [len(record["figures"]["swap"]) for record in alone["records"]] == [9, 9, 9] and len(loads) == 2
    for part in loads:
        assert all(len(record["figures"]["runs"]) == 2 for record in part["records"])


@pytest.mark.parametrize(
    "words",
    [
        ["--copies", "1,x"],
        ["--copies", "0"],
        ["--link-gb-s", "0"],
        ["--repeats", "0"],
        ["--num-requests", "0"],
        ["extra"],
    ],
)
def test_a_wrong_call_is_refused(words: list[str]) -> None:
    assert main(["simulate", "preemption", *words]) == 2
