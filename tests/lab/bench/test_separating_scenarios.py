"""The scenarios that separate policies, simulated: what each policy is for, in figures that are the same every time."""

from __future__ import annotations

import itertools
import random
from functools import cache

import numpy as np
import pytest

from octavo.config.engine_config import make_config
from octavo.lab.bench.policies.lab import Lab
from octavo.lab.bench.policies.places import Simulated
from octavo.lab.bench.policies.policy_figures import PolicyFigures
from octavo.lab.bench.policies.separating import SEPARATING, Mixture
from octavo.lab.simulate.step_profile import load_profile
from octavo.lab.workloads.lengths import Constant, Uniform


@cache
def lab(scenario: str, *policies: str, aging_limit: float = 60.0) -> dict[str, PolicyFigures]:
    """Means over one run of the demo profile, by policy."""
    places = [Simulated(load_profile("smollm2-135m-2-cores"))]
    lab = Lab(places, lambda _, changes: make_config(model="none", aging_limit=aging_limit, **changes), seed=0)
    return {row.policy: row.mean for row in lab.run([SEPARATING[scenario]], policies, 1, lambda row: None)}


@pytest.mark.parametrize("name", SEPARATING)
def test_scenarios_are_the_same_for_the_same_seed_and_offer_the_load_they_name(name: str) -> None:
    scenario = SEPARATING[name]
    items = list(scenario.make(2.0, 3))
    assert items == list(scenario.make(2.0, 3)) != list(scenario.make(2.0, 4))
    assert all(a.at <= b.at for a, b in itertools.pairwise(items))
    make_config(model="m", **scenario.options, scheduling_policy="static")
    if scenario.load is not None and scenario.inputs is not None:
        # Tokens a second of the items, and of the capacity's lengths at the named load.
        offered = sum(i.output_len for i in items) / items[-1].at
        assert scenario.outputs is not None
        assert offered == pytest.approx(scenario.load * 2.0 * scenario.outputs.mean, rel=0.35)


def test_a_mixture_draws_each_part_in_proportion() -> None:
    mixture = Mixture(((3.0, Constant(10)), (1.0, Uniform(20, 40))))
    rng = random.Random(0)
    drawn = [mixture.draw(rng) for _ in range(4000)]
    assert mixture.mean == 15.0 and mixture.most == 40
    assert np.mean(drawn) == pytest.approx(15, rel=0.03) and drawn.count(10) == pytest.approx(3000, rel=0.05)


@pytest.mark.slow
def test_a_modest_user_waits_a_tenth_as_long_under_fair_while_another_floods() -> None:
    found = lab("greedy-and-modest", "fcfs", "fair")
    fcfs, fair = found["fcfs"].user_latency, found["fair"].user_latency
    assert fair["modest"] < fcfs["modest"] / 10
    assert fair["greedy"] < 1.15 * fcfs["greedy"]
    assert found["fair"].requests_per_s > 0.99 * found["fcfs"].requests_per_s


@pytest.mark.slow
def test_at_110_percent_the_goodput_of_deadline_is_several_times_that_of_fcfs() -> None:
    found = lab("deadlines-110", "fcfs", "deadline")
    fcfs, deadline = found["fcfs"].goodput_per_s, found["deadline"].goodput_per_s
    assert fcfs is not None and deadline is not None
    assert deadline > 3 * fcfs
    assert found["deadline"].failed == 0, "nothing is dropped"


def test_interactive_requests_overtake_batch_work_under_static() -> None:
    found = lab("priorities", "fcfs", "static")
    assert found["static"].user_latency["interactive"] < found["fcfs"].user_latency["interactive"] / 10
    assert found["static"].user_latency["batch"] < 2 * found["fcfs"].user_latency["batch"]


def test_swapping_beats_recomputing_in_the_same_memory_where_blocks_are_few() -> None:
    recompute, swap = (lab(f"few-blocks-{mode}", "fcfs")["fcfs"] for mode in ("recompute", "swap"))
    options = [SEPARATING[f"few-blocks-{mode}"].options for mode in ("recompute", "swap")]
    assert [o["num_gpu_blocks_override"] + o["num_host_blocks_override"] for o in options] == [192, 192]
    assert min(recompute.preemptions, swap.preemptions) > 100
    assert swap.mean_latency < 0.9 * recompute.mean_latency


@pytest.mark.slow
def test_lengths_that_depend_on_nothing_known_are_no_case_for_srpt() -> None:
    found = lab("heavy-tailed-90", "fcfs", "srpt", "sjf")
    tau = found["srpt"].tau
    assert tau is not None and abs(tau) < 0.2
    assert found["srpt"].mean_latency < 1.1 * found["fcfs"].mean_latency
    assert found["sjf"].mean_latency > found["fcfs"].mean_latency / 2, "nor would an oracle halve it"


@pytest.mark.slow
def test_services_of_their_own_lengths_are_ranked_and_the_median_falls_to_a_third() -> None:
    found = lab("services-90", "fcfs", "srpt")
    tau = found["srpt"].tau
    assert tau is not None and tau > 0.4
    assert found["srpt"].mean_latency < found["fcfs"].mean_latency / 1.3
    assert found["srpt"].p50_latency < found["fcfs"].p50_latency / 3


@pytest.mark.slow
def test_under_services_at_90_percent_srpt_halves_the_mean_latency_of_fcfs() -> None:
    found = lab("services-90-long", "fcfs", "srpt", "sjf", aging_limit=90.0)
    fcfs, srpt, oracle = found["fcfs"], found["srpt"], found["sjf"]
    assert srpt.mean_latency < fcfs.mean_latency / 2
    assert srpt.p99_latency < 1.5 * fcfs.p99_latency
    assert srpt.mean_latency < 1.3 * oracle.mean_latency
