"""Service of users in a simulation: every token is counted once, and the difference is that of users who wait."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.engine_config import make_config
from octavo.lab.simulate import service_by_user
from octavo.lab.simulate.engine import SimulatedEngine, run
from octavo.lab.simulate.run import Recorder, simulate
from octavo.lab.workloads.work_items import WorkItem
from tests.lab.simulate.test_profile import profile
from tests.lab.simulate.test_simulated_engine import UNIT


def item(at: float, user: str | None, weight: float = 1.0, output_len: int = 3) -> WorkItem:
    return WorkItem(at=at, input_len=10, output_len=output_len, user=user, weight=weight)


def test_service_is_prompts_and_twice_the_outputs_by_weight() -> None:
    items = [item(0, "a"), item(0, "b", 2.0), item(0, None), item(3, "a")]
    found = simulate(profile(**UNIT), make_config(model="none"), items).service
    assert found is not None
    assert found.seconds == [1, 2, 3, 4, 5, 6]
    assert found.users == {"a": [12, 14, 16, 28, 30, 32], "b": [6, 7, 8, 8, 8, 8]}
    assert found.difference == [0] * 6  # nobody waited


def test_no_users_no_service() -> None:
    assert simulate(profile(), make_config(model="none"), [item(0, None)]).service is None


@pytest.mark.parametrize(("policy", "fair"), [("fcfs", False), ("fair", True)])
def test_the_difference_of_waiting_users_is_bounded_under_fair_alone(policy: str, fair: bool) -> None:
    options: dict[str, Any] = {"num_gpu_blocks_override": 8, "max_num_seqs": 2, "max_model_len": 64}
    options |= {"scheduling_policy": policy, "aging_limit": None}
    items = [item(0, "flood") for _ in range(120)] + [item(0.5, "modest") for _ in range(40)]
    found = simulate(profile(**UNIT), make_config(model="none", **options), items).service
    assert found is not None
    assert found.bound == 2 * max(10, 2 * 8 * 16)
    assert (max(found.difference) <= found.bound) == fair
    assert found.users["flood"][-1] == 120 * 16 and found.users["modest"][-1] == 40 * 16


def test_preempted_requests_are_counted_once() -> None:
    options: dict[str, Any] = {"num_gpu_blocks_override": 8, "preemption_mode": "recompute", "max_model_len": 100}
    items = [item(0, user, output_len=60) for user in "abcd"]
    found = simulate(profile(), make_config(model="none", **options), items)
    assert found.preemptions_by_recompute > 0 and found.service is not None
    assert {name: values[-1] for name, values in found.service.users.items()} == dict.fromkeys("abcd", 10.0 + 2 * 60)
    assert all(values == sorted(values) for values in found.service.users.values())


def test_users_and_samples_are_bounded_and_nothing_is_left() -> None:
    items = [item(float(i), f"user {i % 40}") for i in range(900)]
    engine, recorder = SimulatedEngine(profile(**UNIT), make_config(model="none")), Recorder()
    run(engine, items, recorder.ended, recorder.sample)
    found = recorder.figures(engine).service
    assert found is not None
    assert list(found.users) == [f"user {i}" for i in range(service_by_user.MOST_USERS)] and len(found.seconds) < 512
    assert not engine.started and not engine.open_by_user
