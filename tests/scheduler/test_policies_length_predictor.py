"""The predictor of output lengths: it ranks requests by what they are known by, and corrects itself while they run."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from octavo.core.request import EngineCoreRequest, Generate, RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.lab.bench.policies.kendall import kendall_tau
from octavo.scheduler import policies as length_predictor
from octavo.scheduler.policies import LengthPredictor, features_of

Traffic = list[tuple[EngineCoreRequest, int]]


def request(prompt: list[int], user: str = "", max_tokens: int | None = 2000) -> EngineCoreRequest:
    task = Generate(SamplingParams(max_tokens=max_tokens), 0, [0])
    return EngineCoreRequest(group_id=0, prompt_token_ids=prompt, task=task, options=RequestOptions(user=user))


def traffic(seed: int, count: int, log_length: Callable[[int, int, int], float], noise: float) -> Traffic:
    """Requests of 20 users with 8 beginnings of prompts; the length depends on user, beginning and prompt length."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        user, prefix, length = rng.randrange(20), rng.randrange(8), rng.randint(20, 400)
        prompt = [prefix + 1] * 16 + [rng.randrange(100) for _ in range(length - 16)]
        tokens = int(math.exp(rng.gauss(log_length(user, prefix, length), noise)))
        requests.append((request(prompt, f"user {user}"), max(1, tokens)))
    return requests


def ranking(requests: Traffic) -> tuple[float, float]:
    """Kendall's tau of predictions at arrival with the lengths: of the second half, and of those remembered."""
    predictor = LengthPredictor()
    predicted = []
    for known, length in requests:
        features = features_of(known)
        predicted.append(predictor.log_length(features))
        predictor.learn(features, length)
    half = len(requests) // 2
    recent, lengths = zip(*predictor.recent, strict=True)
    return kendall_tau(predicted[half:], [length for _, length in requests[half:]]), kendall_tau(recent, lengths)


@pytest.mark.parametrize(
    "log_length",
    [
        lambda user, prefix, length: 1 + 0.8 * math.log(length),
        lambda user, prefix, length: 3 + user * 37 % 20 / 10 + prefix * 3 % 8 / 6,
        *(
            pytest.param(log_length, marks=pytest.mark.slow)
            for log_length in (
                lambda user, prefix, length: 3 + user * 37 % 20 / 6,
                lambda user, prefix, length: 3 + prefix * 3 % 8 / 3,
                lambda user, prefix, length: 3 + (user * prefix) % 7 / 2,
            )
        ),
    ],
    ids=["prompt length", "user and prefix", "user", "prefix", "user with prefix"],
)
def test_requests_are_ranked_nearly_as_well_as_their_noise_allows(log_length: Callable[[int, int, int], float]) -> None:
    requests = traffic(1, 2000, log_length, 0.5)
    clean = traffic(1, 2000, log_length, 0.0)  # lengths without the noise: the best that can be known
    half = len(requests) // 2
    best = kendall_tau([n for _, n in clean[half:]], [n for _, n in requests[half:]])
    tau, reported = ranking(requests)
    assert tau > 0.85 * best > 0.2
    assert reported == pytest.approx(tau, abs=0.1)


def test_lengths_that_depend_on_nothing_known_are_not_ranked() -> None:
    assert abs(ranking(traffic(1, 2000, lambda *_: 4.0, 1.0))[0]) < 0.1


def test_a_change_of_lengths_is_learned() -> None:
    predictor = LengthPredictor()
    features = features_of(request([1] * 30, "me"))
    for length in [20] * 500 + [400] * 100:
        predictor.learn(features, length)
    assert math.exp(predictor.log_length(features)) == pytest.approx(400, rel=0.2)


def test_what_outlives_its_prediction_is_expected_to_go_on() -> None:
    predictor, rng = LengthPredictor(), random.Random(2)
    features = features_of(request([1] * 30))
    lengths = [max(1, int(rng.lognormvariate(4.0, 1.0))) for _ in range(4000)]
    for length in lengths:
        predictor.learn(features, length)
    log_length, generated = predictor.log_length(features), 0
    while generated < 1000:
        total, again = predictor.expected(log_length, generated)
        rest = [n for n in lengths if n > generated]
        if len(rest) > 50:
            assert total == pytest.approx(sum(rest) / len(rest), rel=0.25)
        assert total >= generated + 1
        assert again > generated
        generated = max(generated + 1, math.ceil(again))
    assert predictor.expected(log_length, 10**6)[0] > 10**6


def test_its_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_predictor, "_MAX_WEIGHTS", 50)
    predictor = LengthPredictor()
    for i in range(200):
        predictor.learn(features_of(request([i] * 20, f"user {i}")), 10)
    assert len(predictor._weights) <= 50
    assert ("user", "user 199") in predictor._weights
    assert None in predictor._weights


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=40))
def test_kendalls_tau_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    xs, ys = zip(*pairs, strict=True)
    expected = kendalltau(xs, ys).statistic
    assert kendall_tau(xs, ys) == pytest.approx(0.0 if math.isnan(expected) else expected)


@pytest.mark.slow
def test_a_request_costs_less_than_20_microseconds() -> None:
    requests = traffic(1, 4000, lambda user, *_: 3 + user / 10, 0.5)
    predictor = LengthPredictor()
    times = []
    for batch in (requests[i : i + 500] for i in range(0, len(requests), 500)):
        start = time.process_time()
        for known, length in batch:
            features = features_of(known)
            predictor.expected(predictor.log_length(features))
            predictor.learn(features, length)
        times.append((time.process_time() - start) / len(batch))
    assert min(times) < 20e-6
