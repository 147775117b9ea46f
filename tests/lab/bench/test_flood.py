"""A flood in the simulator: the victim's first token, and the shares of several floods."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.lab.bench.flood import FloodSetting, jain_index
from octavo.lab.simulate.step_profile import load_profile
from octavo.lab.workloads.lengths import chat_inputs, chat_outputs


def test_jains_index_is_one_for_equal_shares_and_one_in_n_for_a_single_one() -> None:
    assert jain_index([3.0, 3.0, 3.0, 3.0]) == 1.0
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain_index([1.0, 2.0]) == pytest.approx(9 / 10)


def test_fair_keeps_the_first_token_of_a_victim_and_the_shares_of_floods() -> None:
    setting = FloodSetting(
        load_profile("smollm2-135m-2-cores"),
        chat_inputs(),
        chat_outputs(),
        60,
        30,
        {"max_num_seqs": 8},
    )
    fcfs, fair = setting.measure(("fcfs", "fair"), 0, lambda: None)
    assert fair.ratio <= 1.2 < 10 < fcfs.ratio
    assert fair.jain >= 0.98 > 0.6 > fcfs.jain
    assert fair.alone_p99_ttft == pytest.approx(fcfs.alone_p99_ttft, rel=0.05)
    assert fair.output_tokens_per_s >= 0.95 * fcfs.output_tokens_per_s
    assert fair.preemptions > fcfs.preemptions == 0


def test_the_command_writes_a_row_for_each_policy_and_seed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--flood",
        "20",
        "--max-num-seqs",
        "2",
        "--victims",
        "5",
        "--repeats",
        "2",
        "--input-len",
        "50",
        "--output-len",
        "10",
    ]
    assert main(["simulate", "flood", "--policies", "fair,boost", *flags, "--json", "-"]) == 0
    written: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [(f["policy"], f["seed"]) for f in written["figures"]] == [
        ("fair", 0), ("boost", 0), ("fair", 1), ("boost", 1),
    ]  # fmt: skip
