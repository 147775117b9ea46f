"""The policies srpt, boost, fair, deadline and mlfq: what they put first, what they preempt, and what it is worth."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config.options import SchedulerOptions
from octavo.core.request import EngineCoreRequest, Generate, RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.lab.bench.policies.kendall import kendall_tau
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairShare, Policy, ShortestRemaining, load_policy
from octavo.scheduler.queue import GroupQueue
from tests.busy_machine import once_in_three
from tests.scheduler.fake_worker import watch_displacement
from tests.scheduler.virtual_engine import DECODE, PREFILL, STEP, Job, VirtualEngine


def tokens(count: int, first: int = 5) -> list[int]:
    return [first] * count


def running(engine: VirtualEngine) -> list[int]:
    return sorted(group.group_id for group in engine.scheduler.queues.running)


def served(engine: VirtualEngine, jobs: list[Job]) -> list[int]:
    """Numbers of the jobs in the order of their first tokens."""
    engine.serve(jobs)
    return sorted(range(len(jobs)), key=lambda i: (jobs[i].first, i))


def policy_of(engine: VirtualEngine) -> Any:
    return engine.scheduler.queues.policy


def counters_of(policy: FairShare) -> dict[str, float]:
    return {name: user.counter for name, user in policy._users.items()}


# --- the queue of lanes ---------------------------------------------------------------------------------------------


class Growing(Policy):
    """Lanes are users, keys grow at will."""

    waiting_keys_grow = True

    def __init__(self) -> None:
        self.keys = dict.fromkeys("abc", 0)

    def key(self, group: SequenceGroup) -> int:
        return self.keys[group.request.options.user]

    def lane(self, group: SequenceGroup) -> str:
        return group.request.options.user


@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "grow", "peek"]), st.integers(0, 9)), max_size=80))
def test_the_queue_of_lanes_always_has_the_first_group_first(actions: list[tuple[str, int]]) -> None:
    policy = Growing()
    queue, present = (
        GroupQueue(policy, None, lambda group: [], lambda group: (policy.key(group),)),
        dict[int, SequenceGroup](),
    )
    groups = []
    for i in range(10):
        task = Generate(SamplingParams(), 0)
        options = RequestOptions(user="abc"[i % 3])
        request = EngineCoreRequest(
            group_id=i, prompt_token_ids=[1], task=task, arrival_time=i * 7 % 10, options=options
        )
        groups.append(SequenceGroup(request, i, i, 10))
    for action, number in actions:
        group = groups[number]
        if action == "push" and number not in present:
            queue.push(group)
            present[number] = group
        elif action == "remove" and number in present:
            queue.remove(group)
            del present[number]
        elif action == "grow":
            policy.keys[group.request.options.user] += number
        else:
            expected = min(present.values(), key=lambda g: (policy.key(g), g.arrival), default=None)
            assert queue.peek(0.0) is expected
    assert len(queue) == len(present)


# --- srpt -----------------------------------------------------------------------------------------------------------


def teach(engine: VirtualEngine, lengths: dict[str, int]) -> None:
    """Serves short histories of users."""
    start = engine.now
    engine.serve([Job(start, tokens(20), n, user=user) for user, n in lengths.items() for _ in range(12)])


def test_srpt_learns_who_is_short_and_admits_them_first() -> None:
    engine = VirtualEngine("srpt", options={"max_num_seqs": 1})
    teach(engine, {"long": 200, "short": 5})
    base = len(engine.jobs)
    jobs = [Job(engine.now, tokens(20), n, user=user) for user, n in [("long", 200), ("short", 5), ("long", 200)]]
    engine.serve(jobs)
    assert jobs[1].first is not None and jobs[0].first is not None
    assert jobs[1].first < jobs[0].first
    assert len(engine.jobs) == base + 3
    predicted, lengths = zip(*policy_of(engine).predictor.recent, strict=True)
    assert len(lengths) == base + 3
    assert kendall_tau(predicted, lengths) > 0.5


def test_srpt_preempts_for_a_clear_gain_only() -> None:
    engine = VirtualEngine("srpt", options={"max_num_seqs": 1})
    teach(engine, {"long": 200, "short": 5, "middle": 120})
    before = engine.scheduler.stats().preemptions_by_recompute
    for user, length in [("long", 200), ("middle", 120), ("short", 5)]:
        engine.add(Job(engine.now, tokens(20), length, user=user))
        engine.step()
        if user == "middle":
            assert engine.jobs[running(engine)[0]].user == "long"
    assert engine.jobs[running(engine)[0]].user == "short"
    assert engine.scheduler.stats().preemptions_by_recompute == before + 1
    engine.serve([])


def test_srpt_puts_a_request_that_outlives_its_prediction_further_behind() -> None:
    engine = VirtualEngine("srpt", options={"max_num_seqs": 2})
    teach(engine, {"a": 20})
    engine.add(Job(engine.now, tokens(20), 500, user="a"))
    expected = []
    for _ in range(100):
        engine.step()
        expected.append(policy_of(engine).key(engine.scheduler.queues.running[0]))
    assert expected[10] < expected[0]
    assert max(expected[30:]) > expected[0]


def heavy_tailed(seed: int, count: int, load: float, slots: int, burstiness: float) -> list[Job]:
    """Users of different kinds, lognormal lengths, gamma-distributed gaps; ``load``: share of a full batch's rate."""
    rng = random.Random(seed)
    users = [rng.gauss(4.3, 1.2) for _ in range(30)]
    jobs = []
    for _ in range(count):
        user = rng.randrange(30)
        output = min(1900, max(1, int(rng.lognormvariate(users[user], 0.5))))
        prompt = tokens(16, user + 1) + [rng.randrange(1, 1000) for _ in range(rng.randint(10, 200))]
        jobs.append(Job(0.0, prompt, output, user=f"user {user}"))
    work = sum(j.output * (STEP / slots + DECODE) + len(j.prompt) * PREFILL for j in jobs)
    now, shape = 0.0, burstiness**-2
    for job in jobs:
        now += rng.gammavariate(shape, work / load / count / shape)
        job.at = now
    return jobs


def mean_latency(policy: str, jobs: list[Job], **options: Any) -> float:
    own = [replace(job, max_tokens=job.output if policy == "sjf" else job.max_tokens) for job in jobs]
    VirtualEngine(policy, options=options).serve(own)
    return sum(job.latency for job in own) / len(own)


@pytest.mark.parametrize(
    ("seed", "count"), [(5, 300), *(pytest.param(seed, 1000, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))]
)
def test_under_heavy_tails_at_90_percent_srpt_halves_the_mean_latency_of_fcfs(seed: int, count: int) -> None:
    jobs = heavy_tailed(seed, count, load=0.9, slots=4, burstiness=2.0)
    fcfs, srpt, oracle, mlfq = (mean_latency(p, jobs, max_num_seqs=4) for p in ("fcfs", "srpt", "sjf", "mlfq"))
    assert srpt < fcfs / 2
    assert srpt < 1.2 * oracle  # sjf is told the lengths, but does not preempt
    assert mlfq < fcfs


# --- boost ----------------------------------------------------------------------------------------------------------


def test_the_boost_of_a_known_length_is_that_of_gamma_boost() -> None:
    engine = VirtualEngine("boost", options={"max_num_seqs": 1})
    policy = policy_of(engine)
    teach(engine, {"long": 300})
    policy.decay_rate = 0.5
    # A batch of one: the pace is the time of a step over the service of a token.
    assert policy.pace == pytest.approx((STEP + DECODE) / OUTPUT_WEIGHT, rel=0.2)
    keys = []
    for limit in (5, 20):  # so far below what was seen that the length is known
        engine.add(Job(engine.now, tokens(20), limit, user="long", max_tokens=limit))
        group = list(engine.scheduler.queues.groups.values())[-1]
        seconds = policy.pace * (20 * PROMPT_WEIGHT + limit * OUTPUT_WEIGHT)
        boost = group.request.arrival_time - policy.key(group)
        assert boost == pytest.approx(-math.log(-math.expm1(-0.5 * seconds)) / 0.5, rel=0.15)
        keys.append(policy.key(group))
    assert keys[0] < keys[1]
    engine.serve([])


def test_boost_is_the_order_of_arrival_until_a_tail_is_seen() -> None:
    jobs = [Job(0.01 * i, tokens(20 + i), 5 + 7 * i % 11) for i in range(40)]
    assert served(VirtualEngine("boost", options={"max_num_seqs": 1}), jobs) == list(range(40))


def percentile(policy: str, jobs: list[Job], share: float) -> tuple[float, float]:
    """The percentile of latency, and the mean."""
    oracle = policy == "octavo.lab.bench.policies.oracles:OracleSRPT"
    own = [replace(job, max_tokens=job.output if oracle else job.max_tokens) for job in jobs]
    VirtualEngine(policy, options={"max_num_seqs": 4, "aging_limit": None}).serve(own)
    ordered = sorted(job.latency for job in own)
    return ordered[int(share * len(ordered))], sum(ordered) / len(ordered)


def test_boost_has_a_lower_p99_than_an_oracle_and_a_lower_mean_than_first_come_first_served() -> None:
    jobs = heavy_tailed(5, 400, load=0.9, slots=4, burstiness=1.0)
    policies = ("fcfs", "boost", "octavo.lab.bench.policies.oracles:OracleSRPT")
    (fcfs, fcfs_mean), (boost, boost_mean), (oracle, oracle_mean) = (percentile(p, jobs, 0.99) for p in policies)
    assert boost < 0.75 * oracle
    assert oracle_mean < boost_mean < 0.95 * fcfs_mean
    assert boost < 1.15 * fcfs


# --- fair -----------------------------------------------------------------------------------------------------------


def service(engine: VirtualEngine, user: str) -> float:
    """What a user has been served: prompts that were computed, and generated tokens."""
    mine = [job for job in engine.jobs.values() if job.user == user]
    return sum(PROMPT_WEIGHT * len(j.prompt) * (j.first is not None) + OUTPUT_WEIGHT * j.tokens for j in mine)


def largest_difference(policy: str, seed: int, weights: dict[str, float], **options: Any) -> float:
    """Of weighted service of two users over all intervals in which both have requests waiting; ``a`` floods."""
    rng = random.Random(seed)
    engine = VirtualEngine(policy, blocks=60, options={"aging_limit": None, "max_num_seqs": 6, **options})
    for user, count in (("a", 120), ("b", 40), ("c", 10)):
        for _ in range(count):
            engine.add(Job(0.0, tokens(rng.randint(1, 60)), rng.randint(1, 60), user=user))
    differences = []
    while {"a", "b"} <= {
        g.request.options.user for g in engine.scheduler.queues.groups.values() if g.status.value != "running"
    }:
        engine.step()
        differences.append(service(engine, "a") / weights.get("a", 1) - service(engine, "b") / weights.get("b", 1))
    assert len(differences) > 50
    engine.serve([])
    return max(differences) - min(differences)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([{}, {"a": 3.0}, {"b": 2.0, "c": 0.5}]), st.booleans())
def test_between_two_backlogged_users_service_differs_by_no_more_than_the_published_bound(
    seed: int, weights: dict[str, float], prefill_first: bool
) -> None:
    batching = {"batching": "prefill_first" if prefill_first else "mixed"}
    found = largest_difference("fair", seed, weights, user_weights=weights or None, **batching)
    # Sheng et al. 2024, theorem 4.4: prompts of 60 tokens, 60 blocks of 16 tokens.
    assert found <= 2 * max(PROMPT_WEIGHT * 60, OUTPUT_WEIGHT * 60 * 16) / min([*weights.values(), 1])


def test_fair_differs_by_far_less_than_first_come_first_served() -> None:
    fair, fcfs = (largest_difference(policy, 1, {}) for policy in ("fair", "fcfs"))
    assert fair < 6 * 2 * (60 + 2 * 60)  # what can run at once
    assert fcfs > 5 * fair


def test_fair_gives_a_modest_user_a_turn_while_another_floods() -> None:
    for policy, first in [("fcfs", False), ("fair", True)]:
        engine = VirtualEngine(policy, options={"max_num_seqs": 2})
        flood = [Job(0.0, tokens(20), 30, user="a") for _ in range(40)]
        modest = Job(1.0, tokens(20), 30, user="b")
        engine.serve([*flood, modest])
        assert modest.first is not None
        assert (modest.first < 2.0) == first


def test_under_a_flood_beyond_the_ageing_limit_fair_gives_others_their_first_token_at_once() -> None:
    """The flood fills all slots for two minutes, and its requests are older than 60 s from the middle on."""
    jobs = [Job(0.0, tokens(20), 400, user="flood") for _ in range(200)]
    late = [Job(70.0 + 5 * i, tokens(20), 5, user="victim") for i in range(8)]
    engine = VirtualEngine("fair", options={"max_num_seqs": 4})
    engine.serve([*jobs, *late])
    assert engine.now > 100
    assert max((job.first or math.inf) - job.at for job in late) < 4 * STEP


def test_fair_preempts_towards_equal_shares_and_never_back() -> None:
    engine = VirtualEngine("fair", options={"max_num_seqs": 6})
    for user, count in (("a", 12), ("b", 12)):
        for _ in range(count):
            engine.add(Job(engine.now, tokens(20), 300, user=user))
        for _ in range(5):
            engine.step()
    shares = Counter(group.request.options.user for group in engine.scheduler.queues.running)
    assert shares == {"a": 3, "b": 3}
    preempted = engine.scheduler.stats().preemptions_by_recompute
    assert preempted == 3
    for _ in range(100):
        engine.step()
    assert engine.scheduler.stats().preemptions_by_recompute == preempted
    engine.serve([])


def test_fair_displaces_a_request_again_once_it_has_gained_what_it_lost() -> None:
    """Short requests come all the time: each of them could displace a long one above the share of its user."""
    engine = VirtualEngine("fair", options={"max_num_seqs": 3, "preemption_mode": "recompute"})
    for _ in range(3):
        engine.add(Job(0.0, tokens(100), 700, user="long"))
    longs = list(engine.scheduler.queues.groups.values())
    preempted: dict[int, list[int]] = {group.group_id: [] for group in longs}
    for step in range(900):
        if step % 6 == 5:
            engine.add(Job(engine.now, tokens(20), 4, user="short"))
        engine.step()
        for group in longs:
            if group.totals.num_recomputes > len(preempted[group.group_id]):
                preempted[group.group_id].append(group.num_tokens)
    counts = sorted(len(lengths) for lengths in preempted.values())
    assert counts[-1] > 2
    for lengths in preempted.values():
        assert all(after >= 1.5 * before for before, after in itertools.pairwise(lengths))


def test_fair_keeps_the_prompts_of_a_flood_out_of_the_steps_of_others() -> None:
    engine = VirtualEngine("fair", options={"max_num_seqs": 6})
    for _ in range(40):
        engine.add(Job(0.0, tokens(150), 60, user="flood"))
    engine.step()
    assert engine.prompt_tokens == {"flood": 512}, "there is no other user"
    for _ in range(100):
        engine.step()
    engine.add(Job(engine.now, tokens(900), 4, user="victim"))
    steps = []
    for _ in range(60):
        engine.step()
        steps.append(dict(engine.prompt_tokens))
    victims = [step for step in steps if "victim" in step]
    assert len(victims) == 2 and all("flood" not in step for step in victims)
    others = [sum(step.values()) for step in steps if step and "victim" not in step]
    assert max(others) == 512 // 16 and len(others) >= 20, "the flood makes progress in small steps"


def test_fair_lets_a_burst_of_a_light_user_exceed_its_share() -> None:
    engine = VirtualEngine("fair", options={"max_num_seqs": 6})
    for _ in range(60):
        engine.add(Job(0.0, tokens(20), 400, user="flood"))
    for _ in range(700):
        engine.step()
    for _ in range(5):
        engine.add(Job(engine.now, tokens(20), 400, user="victim"))
        engine.step()
    shares = Counter(group.request.options.user for group in engine.scheduler.queues.running)
    assert shares == {"victim": 5, "flood": 1}
    for _ in range(600):  # then it has received as much
        engine.step()
    assert all(job.first is not None for job in engine.jobs.values() if job.user == "victim")


def test_fair_displaces_no_request_for_one_whose_prompt_the_step_leaves_out() -> None:
    """The prompt of a user who runs one sequence keeps that of a user who runs four out of its steps."""
    engine = VirtualEngine("fair", options={"max_num_seqs": 6})
    displaced = watch_displacement(engine.scheduler)
    for _ in range(60):
        engine.add(Job(0.0, tokens(20), 400, user="flood"))
    for _ in range(700):
        engine.step()
    for _ in range(4):
        engine.add(Job(engine.now, tokens(20), 400, user="burst"))
        engine.step()
    engine.add(Job(engine.now, tokens(1800), 4, user="victim"))
    engine.step()
    count = len(displaced)
    assert engine.scheduler.queues.prefilling[0].request.options.user == "victim"
    engine.add(Job(engine.now, tokens(20), 400, user="burst"))
    while engine.scheduler.queues.prefilling:
        engine.step()
        assert len(displaced) == count
    engine.step()
    assert len(displaced) == count + 1, "it has its turn after that prompt"
    engine.serve([])


def test_fair_pays_for_idle_time_with_a_bounded_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    for credit, ahead in ((0.0, 1), (240.0, 3)):  # a request is 80 units
        monkeypatch.setattr("octavo.scheduler.policies._CREDIT", credit)
        engine = VirtualEngine("fair", options={"max_num_seqs": 1})
        engine.serve([Job(0.0, tokens(20), 30, user="a") for _ in range(20)])
        for user in "aaaaabbbbb":
            engine.add(Job(engine.now, tokens(20), 30, user=user))
        engine.serve([])
        late = sorted(list(engine.jobs.values())[20:], key=lambda job: job.first or 0.0)
        order = "".join(job.user for job in late)
        assert max(map(len, order[:6].split("a"))) == ahead, order


def test_fair_does_not_pay_for_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.scheduler.policies._CREDIT", 0.0)
    engine = VirtualEngine("fair", options={"max_num_seqs": 1})
    engine.serve([Job(0.0, tokens(20), 30, user="a") for _ in range(20)])
    late = [Job(engine.now, tokens(20), 30, user=user) for user in "aaaaabbbbb"]
    order = served(engine, late)
    assert [late[i].user for i in order[:6]] in (list("ababab"), list("bababa"))  # b has no credit


def test_fair_counts_what_was_served_once() -> None:
    engine = VirtualEngine("fair", blocks=20, options={"preemption_mode": "recompute"})
    jobs = [Job(0.0, tokens(10 + i), 60, user="ab"[i % 2]) for i in range(10)]
    engine.serve(jobs)
    assert engine.scheduler.stats().preemptions_by_recompute > 0
    counters = counters_of(policy_of(engine))
    for user in "ab":
        assert counters[user] == sum(len(j.prompt) * PROMPT_WEIGHT + 60 * OUTPUT_WEIGHT for j in jobs if j.user == user)


def fair_group(number: int, user: str) -> SequenceGroup:
    prompt = [1] * (1 + number % 7)
    task, options = Generate(SamplingParams(max_tokens=9), 0), RequestOptions(user=user)
    request = EngineCoreRequest(group_id=number, prompt_token_ids=prompt, task=task, options=options)
    return SequenceGroup(request, number, number, 100)


@pytest.mark.parametrize("seed", range(4))
def test_fair_lifts_who_comes_back_to_the_least_of_those_that_wait(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.scheduler.policies._MAX_IDLE", 5)
    monkeypatch.setattr("octavo.scheduler.policies._CREDIT", 0.0)
    rng, policy = random.Random(seed), FairShare({"u3": 5.0}, 512)
    groups: list[SequenceGroup] = []
    for number in range(600):
        user, waiting = f"u{rng.randrange(12)}", {g.request.options.user for g in groups if g.policy_data.waiting}
        before = counters_of(policy)
        group = fair_group(number, user)
        policy.on_arrival(group)
        groups.append(group)
        if user not in waiting and waiting:
            least = min(before[name] for name in waiting)
            assert counters_of(policy)[user] == max(before.get(user, 0.0), least)
        for other in rng.sample(groups, min(len(groups), rng.randrange(4))):
            if not other.policy_data.waiting:
                policy.on_preempt(other)
            elif rng.random() < 0.6:
                policy.on_admit(other)
            else:
                policy.on_end(other)
                groups.remove(other)


def test_the_cost_of_an_arrival_does_not_grow_with_the_users_that_wait() -> None:
    def seconds(policy: FairShare, first: int) -> float:
        arrivals = [fair_group(i, f"u{i}") for i in range(first, first + 500)]
        began = time.thread_time()
        for group in arrivals:
            policy.on_arrival(group)
        return time.thread_time() - began

    def measure() -> dict[str, bool]:
        policy = FairShare({}, 512)
        times = [seconds(policy, first) for first in range(0, 8000, 500)]
        return {f"{times}": min(times[-4:]) < 5 * min(times[:4])}

    once_in_three(measure)


def test_fair_forgets_idle_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.scheduler.policies._MAX_IDLE", 10)
    engine = VirtualEngine("fair")
    engine.serve([Job(float(i), tokens(3), 2, user=f"user {i}") for i in range(50)])
    assert isinstance(policy_of(engine), FairShare)
    assert len(counters_of(policy_of(engine))) <= 11


# --- deadline -------------------------------------------------------------------------------------------------------


def test_deadline_serves_what_can_be_in_time_before_what_is_late_and_what_has_no_target() -> None:
    engine = VirtualEngine("deadline", options={"max_num_seqs": 1})
    engine.now = 10.0
    jobs = [
        Job(10.0, tokens(20), 2, ttft_target=3.0),
        Job(9.0, tokens(20), 2, ttft_target=0.5),  # late
        Job(8.0, tokens(20), 2),
        Job(10.0, tokens(20), 2, ttft_target=1.0),
        Job(9.5, tokens(20), 2, ttft_target=2.0),
    ]
    assert served(engine, jobs) == [3, 4, 0, 2, 1]


def test_deadline_takes_the_targets_of_the_options_for_requests_without() -> None:
    engine = VirtualEngine("deadline", options={"max_num_seqs": 1, "ttft_target": 1.0})
    jobs = [Job(0.0, tokens(20), 2, ttft_target=5.0), Job(0.0, tokens(20), 2)]
    assert served(engine, jobs) == [1, 0]


def test_deadline_preempts_what_has_none_when_half_of_the_time_is_over() -> None:
    engine = VirtualEngine("deadline", options={"max_num_seqs": 1})
    engine.add(Job(0.0, tokens(20), 500))
    engine.step()
    start = engine.now
    engine.add(Job(start, tokens(20), 5, ttft_target=0.4))
    while engine.jobs[1].first is None:
        engine.step()
    assert 0.2 <= engine.jobs[1].first - start <= 0.3
    engine.serve([])
    assert engine.jobs[0].tokens == 500


def test_at_110_percent_deadline_keeps_what_first_come_first_served_loses() -> None:
    goodput = {}
    for policy in ("fcfs", "deadline"):
        jobs = heavy_tailed(2, 500, load=1.1, slots=8, burstiness=1.0)
        for job in jobs if policy == "deadline" else []:
            job.ttft_target, job.tpot_target = 1.0, 0.02
        VirtualEngine(policy, options={"max_num_seqs": 8}).serve(jobs)
        goodput[policy] = sum(job.meets(1.0, 0.02) for job in jobs)
    assert goodput["deadline"] > 1.3 * goodput["fcfs"] > 0


# --- mlfq -----------------------------------------------------------------------------------------------------------


def test_mlfq_joins_by_prompt_and_demotes_by_service() -> None:
    engine = VirtualEngine("mlfq", options={"aging_limit": None})
    for prompt in (10, 64, 65, 300):
        engine.add(Job(0.0, tokens(prompt), 200))
    engine.step()
    levels = {g.group_id: g.policy_data.level for g in engine.scheduler.queues.running}
    assert levels == {0: 0, 1: 0, 2: 1, 3: 3}
    for _ in range(60):
        engine.step()
    levels = {g.group_id: g.policy_data.level for g in engine.scheduler.queues.running}
    assert levels == {0: 1, 1: 1, 2: 2, 3: 3}  # 10 + 2 * 60 tokens: more than 64, less than 64 + 128
    assert running(engine) == [0, 1, 2, 3]
    engine.serve([])


def test_mlfq_preempts_for_an_earlier_queue_after_a_wait() -> None:
    engine = VirtualEngine("mlfq", options={"max_num_seqs": 1, "aging_limit": None})
    engine.add(Job(0.0, tokens(300), 500))
    engine.step()
    engine.add(Job(engine.now, tokens(10), 5))
    steps = 0
    while engine.jobs[1].first is None:
        engine.step()
        steps += 1
    assert steps == 32  # as many steps as the first queue lets it generate tokens
    engine.serve([])
    assert engine.jobs[0].tokens == 500


def test_mlfq_promotes_by_ageing() -> None:
    for limit, expected in [(None, [1, 0]), (24.0, [0, 1])]:
        engine = VirtualEngine("mlfq", options={"max_num_seqs": 1, "aging_limit": limit})
        engine.now = 20.0
        jobs = [Job(9.0, tokens(300), 2), Job(19.0, tokens(10), 2)]  # 3 queues are worth 6 of 24 seconds
        assert served(engine, jobs) == expected


# --- all ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", ["srpt", *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("deadline", "mlfq"))]
)
def test_from_the_ageing_limit_on_no_later_arrival_goes_first(policy: str) -> None:
    """A request that each policy would put last, under a stream of those that it puts first."""
    waits = []
    for limit in (5.0, None):
        engine = VirtualEngine(policy, options={"max_num_seqs": 1, "aging_limit": limit})
        teach(engine, {"long": 300, "short": 3})
        start, target = engine.now, 30.0 if policy == "deadline" else None
        before, last = (Job(start, tokens(400), 1, user="long"), Job(start, tokens(400), 300, user="long"))
        stream = [Job(start + 0.01 * i, tokens(20), 3, user="short", ttft_target=target) for i in range(800)]
        engine.serve([before, *stream, last])
        assert last.first is not None
        waits.append(last.first - start)
    assert waits[0] < 5.5 < waits[1]


def test_settings_of_another_policy_are_refused() -> None:
    for options in ({"user_weights": {"a": 2.0}}, {"ttft_target": 1.0}, {"tpot_target": 1.0}):
        with pytest.raises(ValueError, match="does not look at it"):
            SchedulerOptions(scheduling_policy="fcfs", **options)
    assert SchedulerOptions(scheduling_policy="fair", user_weights="a=2,b=0.5").user_weights == {"a": 2.0, "b": 0.5}
    for wrong in ("a=0", "a", "a=x", "a=inf"):
        with pytest.raises(ValueError, match="user_weights"):
            SchedulerOptions(scheduling_policy="fair", user_weights=wrong)


def test_policies_take_their_settings_from_the_options() -> None:
    policy = load_policy("srpt", SchedulerOptions(max_num_batched_tokens=300))
    assert isinstance(policy, ShortestRemaining)
    assert policy._token_budget == 300
