"""The sampler over batches of rows: every parameter, batches, preemption, errors."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.failures import SequenceFailure
from octavo.core.plan import PositionLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.sampling import ROWS_AT_ONCE, SamplingBackend, position_logprobs
from octavo.kernels.torch_backend import TorchLogits
from octavo.sampling.logits_processors import RowError, SamplerOutput, TokenMask
from tests.sampling.sampler_rows import VOCAB, Rows, failing, gaussian, greedy, shy


@pytest.fixture(params=["numpy", "compiled"], autouse=True, scope="module")
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test holds for both."""
    if request.param == "compiled":
        pytest.importorskip("octavo._cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "make_backend", {"numpy": TorchLogits, "compiled": compiled_sampling}[request.param])
        yield


def compiled_sampling(vocab_size: int) -> SamplingBackend:
    from octavo.kernels.cpu.array import CpuArray
    from octavo.kernels.cpu.sampling import CompiledSampling

    class OfTensors(CompiledSampling):
        def prepare(self, logits: Any) -> CpuArray:
            return super().prepare(CpuArray.over(logits.float().contiguous().numpy()))

    return OfTensors()


def set_threads(count: int) -> None:
    """Of everything that computes."""
    torch.set_num_threads(count)
    if importlib.util.find_spec("octavo._cpu") is not None:
        importlib.import_module("octavo._cpu").set_threads(count)


def descending(vocab: int = VOCAB) -> Tensor:
    """Token 0 is the most likely, then 1, ..."""
    return -torch.arange(vocab, dtype=torch.float32) * 0.1


# Greedy


def test_greedy_takes_the_most_likely_and_the_lowest_id_of_equals() -> None:
    rows = Rows()
    logits = torch.zeros(3, VOCAB)
    logits[0, 7] = logits[0, 90] = 2.0
    logits[1, 199] = 1.0
    for row in range(3):
        rows.add(row, greedy())
    output = rows.step(logits, [0, 1, 2])
    assert output.token_ids.tolist() == [7, 199, 0]
    assert (output.logprobs, output.errors) == ({}, {})


def test_ties_are_settled_alike_on_every_path() -> None:
    logits = torch.zeros(VOCAB)
    logits[[50, 60, 70]] = 5.0
    for params in (
        greedy(),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-9),
        greedy(logprobs=2),
        greedy(min_p=0.1),
    ):
        rows = Rows()
        rows.add(0, params)
        rows.add(1, SamplingParams())
        assert rows.one(logits) == 50
        assert rows.step(torch.stack([logits, logits]), [1, 0]).token_ids[1] == 50


def test_a_temperature_near_zero_is_greedy_and_a_low_one_nearly() -> None:
    logits = gaussian(VOCAB)
    for temperature in (1e-300, 1e-6, 1e-5, 1e-4):
        rows = Rows()
        rows.add(0, SamplingParams(temperature=temperature))
        assert rows.one(logits) == int(logits.argmax())


def test_an_enormous_temperature_still_samples_unmasked_tokens_only() -> None:
    rows = Rows()
    rows.add(0, SamplingParams(temperature=1e308, allowed_token_ids=[3, 5, 8]))
    assert {rows.one(gaussian(VOCAB)) for _ in range(40)} == {3, 5, 8}


def test_half_precision_logits_are_accepted() -> None:
    rows = Rows()
    rows.add(0, greedy())
    assert rows.one(descending().to(torch.bfloat16)) == 0


# Parameters


def test_allowed_tokens() -> None:
    rows = Rows()
    rows.add(0, greedy(allowed_token_ids=[9, 4, 100, 10**6]))
    assert rows.one(descending()) == 4


def test_single_bad_words_are_never_sampled() -> None:
    rows = Rows()
    rows.add(0, greedy(bad_words=["x"]), bad_words=[[0], [2], [10**6]])
    assert rows.one(descending()) == 1


def test_longer_bad_words_are_masked_at_their_last_token_after_matching_output() -> None:
    rows = Rows()
    # The prompt ends with the phrase's start, which does not count.
    rows.add(0, greedy(bad_words=["x"]), prompt=[5, 6], bad_words=[[5, 6, 0], [9, 9, 9, 9, 9]])
    assert rows.one(descending()) == 0
    rows.append(0, 5)
    assert rows.one(descending()) == 0
    rows.append(0, 5)
    rows.append(0, 6)
    assert rows.one(descending()) == 1
    assert rows.one(descending()) == 0


def test_min_tokens_hold_stop_tokens_back() -> None:
    rows = Rows()
    rows.add(0, greedy(min_tokens=3), stop=[0, 1])
    assert [rows.one(descending()) for _ in range(5)] == [2, 2, 2, 0, 0]


def test_logit_bias() -> None:
    rows = Rows()
    rows.add(0, greedy(logit_bias={150: 100.0, 7: -100.0, 10**6: 5.0}))
    assert rows.one(descending()) == 150
    rows.add(0, greedy(logit_bias={0: -100.0}))
    assert rows.one(descending()) == 1


def test_bias_does_not_bring_a_forbidden_token_back() -> None:
    rows = Rows()
    rows.add(0, greedy(logit_bias={0: 100.0, 1: 50.0}, allowed_token_ids=[1, 2]))
    assert rows.one(descending()) == 1


def captured(params: SamplingParams, logits: Tensor, prompt: list[int], outputs: list[int]) -> NDArray[np.float32]:
    """The row after the edits, which ``start`` makes in place."""
    rows = Rows()
    rows.add(0, params, prompt=prompt, outputs=outputs)
    batch = logits[None].clone()
    rows.sampler.start(batch, np.array([0])).wait()
    return batch[0].numpy()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 100),
    repetition=st.sampled_from([1e-300, 0.5, 1.0, 1.3, 1e300]),
    frequency=st.sampled_from([-2.0, 0.0, 0.7]),
    presence=st.sampled_from([-1.0, 0.0, 2.0]),
)
def test_penalties_are_the_documented_arithmetic(
    seed: int, repetition: float, frequency: float, presence: float
) -> None:
    rng = np.random.default_rng(seed)
    prompt, outputs = rng.integers(0, 40, 12).tolist(), rng.integers(20, 60, 20).tolist()
    logits = gaussian(VOCAB, seed=seed)
    params = greedy(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
    expected = logits.numpy().astype(np.float64)
    for token in set(prompt) | set(outputs):
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(outputs):
        expected[token] -= frequency * outputs.count(token) + presence
    largest = float(np.finfo(np.float32).max)
    expected = np.clip(expected, -largest, largest).astype(np.float32)
    assert (captured(params, logits, prompt, outputs) == expected).all()


def test_penalties_count_many_tokens_incrementally() -> None:
    rows = Rows(vocab=1000, max_len=600)
    rows.add(0, greedy(frequency_penalty=2.0))
    logits = descending(1000)
    counts = np.zeros(1000, np.int64)
    for _ in range(500):
        expected = int(np.argmax((logits.numpy() - 2.0 * counts).astype(np.float32)))
        assert rows.one(logits) == expected
        counts[expected] += 1
    assert np.count_nonzero(counts) > 64


def test_logits_processors_of_two_and_three_arguments() -> None:
    seen: list[Any] = []

    def two(outputs: list[int], logits: Tensor) -> Tensor:
        seen.append((outputs, logits.dtype, tuple(logits.shape)))
        logits[0] = -math.inf
        return logits

    class Three:
        def __call__(self, prompt: list[int], outputs: list[int], logits: Tensor) -> Tensor:
            seen.append((prompt, outputs))
            return torch.where(torch.arange(VOCAB) == 1, -math.inf, logits).double()

    rows = Rows()
    rows.add(0, greedy(logits_processors=[two, Three()]), prompt=[8, 9], outputs=[4])
    assert rows.one(descending()) == 2
    assert seen == [([4], torch.float32, (VOCAB,)), ([8, 9], [4])]


def test_a_processor_may_force_a_token_with_infinity_and_sees_raw_logits() -> None:
    raw = gaussian(VOCAB)

    def force(outputs: list[int], logits: Tensor) -> Tensor:
        assert torch.equal(logits, raw)
        logits[77] = math.inf
        return logits

    for temperature in (0.0, 1.0):
        rows = Rows()
        rows.add(0, SamplingParams(temperature=temperature, logits_processors=[force], logit_bias={1: 100}))
        assert rows.one(raw) == 77


def test_masks_are_applied_before_filters() -> None:
    """top_k counts what masks have left."""
    rows = Rows()
    rows.add(0, SamplingParams(top_k=2, allowed_token_ids=[10, 20, 30]))
    assert {rows.one(torch.zeros(VOCAB)) for _ in range(40)} == {10, 20}


# Seeds


def draws(seed: int, params: SamplingParams, count: int = 30) -> list[int]:
    rows = Rows()
    rows.add(0, params, seed=seed)
    return [rows.one(gaussian(VOCAB)) for _ in range(count)]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=20, top_p=0.95)])
def test_a_seed_fixes_the_tokens_and_another_changes_them(params: SamplingParams) -> None:
    assert draws(5, params) == draws(5, params)
    assert len({tuple(draws(seed, params)) for seed in (0, 1, 5, 2**32, 2**64 - 1)}) == 5


def test_positions_draw_differently() -> None:
    assert len(set(draws(0, SamplingParams()))) > 5


# Logprobs


def test_logprobs_are_of_the_raw_distribution_and_the_chosen_token() -> None:
    logits = gaussian(VOCAB)
    expected = torch.log_softmax(logits.double(), -1)
    order = logits.argsort(descending=True).tolist()
    for params in (
        SamplingParams(temperature=0.3, top_k=5, logprobs=3),
        greedy(logprobs=3, logit_bias={order[9]: 100.0}),
        greedy(logprobs=3, logits_processors=[lambda outputs, x: -x]),
    ):
        rows = Rows()
        rows.add(0, params)
        output = rows.step(logits[None], [0])
        token, found = int(output.token_ids[0]), output.logprobs[0]
        assert found.token_id == token
        assert found.rank == order.index(token) + 1
        assert found.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert found.top_ids == order[:3]
        assert found.top_logprobs == pytest.approx(expected[order[:3]].tolist(), abs=1e-5)


def test_only_rows_that_ask_get_logprobs() -> None:
    rows = Rows()
    rows.add(0, greedy())
    rows.add(3, greedy(logprobs=0))
    rows.add(5, SamplingParams())
    output = rows.step(gaussian(3, VOCAB), [5, 3, 0])
    assert list(output.logprobs) == [1]
    assert (output.logprobs[1].rank, output.logprobs[1].top_ids) == (1, [])


def test_rows_that_only_want_the_most_likely_token_in_batches_of_any_size() -> None:
    """Buffers of one batch size must not affect the next, and a result must not change with the next call."""
    rows = Rows(rows=70, vocab=97)
    earlier: list[tuple[SamplerOutput, list[int]]] = []
    for seed, count in enumerate((1, 3, 2, 64, 1, 65, 0, 5)):
        logits = torch.from_numpy(np.random.default_rng(seed).integers(-9, 9, (count, 97)).astype(np.float32))
        expected = logits.numpy().argmax(axis=1).tolist()  # with many ties, of which the lowest wins
        failing = {i: "NaN" for i in range(2, count, 7)} | {i: "infinite" for i in range(3, count, 7)}
        for i, kind in failing.items():
            logits[i, i] = math.nan if kind == "NaN" else math.inf
            expected[i] = 0
        output = rows.sampler.start(logits, np.arange(count)).wait()
        assert sorted(output.errors) == sorted(failing)
        assert all(kind in output.errors[i].text for i, kind in failing.items())
        earlier.append((output, expected))
    assert [output.token_ids.tolist() for output, _ in earlier] == [expected for _, expected in earlier]


def test_prompt_logprobs_is_position_by_position() -> None:
    logits = gaussian(4, VOCAB)
    targets = np.array([3, 1, 4, 1], np.int32)
    sampler = Rows().sampler
    found = sampler.start_prompt_logprobs(logits, targets, 2).wait()
    for row, token, logprobs in zip(logits.numpy(), targets.tolist(), found, strict=True):
        expected = position_logprobs(row, token, 2)
        assert (logprobs.token_id, logprobs.rank, logprobs.top_ids) == (token, expected.rank, expected.top_ids)
        assert logprobs.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert logprobs.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)
    assert sampler.start_prompt_logprobs(logits, torch.from_numpy(targets), 2).wait() == found
    assert sampler.start_prompt_logprobs(logits[1:2], targets[1:2], 2).wait() == found[1:2]


@pytest.mark.parametrize(
    "logits", [[0.0, -math.inf, 1.0], [math.nan, 0.0, 1.0], [-math.inf] * 3, [math.inf, 0.0, 0.0], [3e38, -3e38, 0.0]]
)
def test_logprobs_are_the_same_finite_numbers_whatever_the_logits(logits: list[float]) -> None:
    sampler = Rows(vocab=3).sampler
    row = torch.tensor([logits])
    found = sampler.start_prompt_logprobs(row, [1], 5).wait()[0]
    expected = position_logprobs(row[0].numpy(), 1, 5)
    assert (found.rank, found.top_ids) == (expected.rank, expected.top_ids)
    assert [found.logprob, *found.top_logprobs] == pytest.approx([expected.logprob, *expected.top_logprobs], abs=1e-6)


# Errors


BAD: dict[str, tuple[SamplingParams, str]] = {
    "raises": (greedy(logits_processors=[failing]), "failing failed: RuntimeError: out of ideas"),
    "wrong arguments": (greedy(logits_processors=[lambda: 0]), "TypeError"),
    "wrong shape": (SamplingParams(logits_processors=[lambda o, x: x[1:]]), r"shape \[200\], not \[199\]"),
    "no tensor": (SamplingParams(logits_processors=[lambda o, x: None]), "tensor of logits, not NoneType"),
    "NaN from a processor": (greedy(logits_processors=[lambda o, x: x * math.nan]), "NaN"),
    "all masked": (SamplingParams(logits_processors=[lambda o, x: x - math.inf]), "masked"),
    "none allowed": (greedy(allowed_token_ids=[10**6], logprobs=1), "masked"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_fails_alone(name: str) -> None:
    params, message = BAD[name]
    logits = gaussian(5, VOCAB)
    good = {0: greedy(), 1: SamplingParams(top_p=0.9, logprobs=2), 3: greedy(repetition_penalty=1.2), 4: greedy()}

    def run(with_bad: bool) -> SamplerOutput:
        rows = Rows()
        for row, p in good.items():
            rows.add(row, p, seed=row)
        rows.add(2, params if with_bad else greedy())
        return rows.step(logits, [0, 1, 2, 3, 4])

    bad, fine = run(True), run(False)
    assert list(bad.errors) == [2]
    assert re.search(message, bad.errors[2].text)
    assert 2 not in bad.logprobs
    assert [bad.token_ids[i] for i in good] == [fine.token_ids[i] for i in good]
    assert bad.logprobs == fine.logprobs


def test_a_mask_that_fails_fails_its_row_alone() -> None:
    class Lost(TokenMask):
        def bitmask(self, token_ids: NDArray[np.int32]) -> NDArray[np.uint32]:
            raise RowError(f"no way on after {token_ids.tolist()}")

    rows = Rows()
    rows.add(0, SamplingParams(allowed_token_ids=[9]))
    rows.add(1, greedy(allowed_token_ids=[5], logprobs=1))
    rows.add(2, greedy(bad_words=["x"]), bad_words=[[0]])
    rows.sampler._processors[1]._masks.append(Lost())
    output = rows.step(descending().repeat(3, 1), [0, 1, 2])
    assert output.errors == {1: SequenceFailure("no way on after [1, 2, 3]")}
    assert output.token_ids.tolist() == [9, 0, 1]
    assert output.logprobs == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [greedy(), SamplingParams(logprobs=1), SamplingParams(top_k=3)])
def test_broken_logits_fail_their_row_alone(value: float, params: SamplingParams) -> None:
    rows = Rows()
    logits = gaussian(3, VOCAB)
    if value == -math.inf:
        logits[1] = value
    else:
        logits[1, 20] = value
    for row in range(3):
        rows.add(row, params)
    output = rows.step(logits, [0, 1, 2])
    assert list(output.errors) == [1]
    assert output.token_ids[1] == 0
    assert 1 not in output.logprobs


def test_a_processor_cannot_reach_other_rows_or_its_own_afterwards() -> None:
    kept: list[Tensor] = []

    def keep(outputs: list[int], logits: Tensor) -> Tensor:
        kept.append(logits)
        return logits.clone()

    rows = Rows()
    rows.add(0, greedy(logits_processors=[keep]))
    rows.add(1, greedy())
    batch = gaussian(2, VOCAB)
    expected = batch.argmax(-1).tolist()
    assert rows.step(batch, [0, 1]).token_ids.tolist() == expected
    rows.sampler.start(batch, np.array([0, 1])).wait()
    before = batch.clone()
    kept[-1].fill_(9.0)
    assert torch.equal(batch, before)


def test_a_removed_row_asks_for_nothing() -> None:
    rows = Rows()
    rows.add(0, SamplingParams(logit_bias={5: 100.0}, logprobs=2, temperature=2.0))
    rows.sampler.remove(0)
    rows.add(0, greedy())
    output = rows.step(descending()[None], [0])
    assert (output.token_ids.tolist(), output.logprobs) == ([0], {})
    rows.sampler.remove(5)


# Independence of the batch


REQUESTS: list[tuple[SamplingParams, dict[str, Any]]] = [
    (greedy(), {}),
    (greedy(logprobs=5), {}),
    (SamplingParams(logprobs=3), {}),
    (SamplingParams(temperature=0.7, top_k=50, top_p=0.9, logprobs=0), {}),
    (SamplingParams(top_p=0.6), {}),
    (SamplingParams(min_p=0.05, temperature=1.4, logprobs=2), {}),
    (SamplingParams(repetition_penalty=1.3, logprobs=1), {"outputs": [7, 7, 9]}),
    (greedy(frequency_penalty=0.5), {"outputs": [4, 5]}),
    (SamplingParams(presence_penalty=1.5, top_k=40), {}),
    (SamplingParams(logit_bias={3: 4.0}, min_tokens=8), {"stop": [3, 10]}),
    (SamplingParams(bad_words=["x"], top_p=0.99, logprobs=4), {"bad_words": [[1], [5, 6], [3, 4, 5]]}),
    (greedy(logits_processors=[shy], logprobs=2), {}),
    (SamplingParams(allowed_token_ids=list(range(0, 200, 3)), temperature=5.0), {}),
    # Few tokens, so that each comes often.
    (SamplingParams(frequency_penalty=0.8, presence_penalty=0.5, allowed_token_ids=list(range(9))), {}),
]


def outcome(output: SamplerOutput, i: int) -> tuple[int, PositionLogprobs | None]:
    return int(output.token_ids[i]), output.logprobs.get(i)


@settings(max_examples=30, deadline=None)
@given(
    picks=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=2, max_size=8),
    vocab=st.sampled_from([200, 1031, 40000]),
    seed=st.integers(0, 100),
    threads=st.sampled_from([1, 2]),
)
def test_a_row_samples_the_same_in_any_batch(picks: list[int], vocab: int, seed: int, threads: int) -> None:
    """Tokens and logprobs equal to the bit, alone and in a batch, at another row, with another number of threads."""
    steps = 3
    logits = gaussian(steps, len(picks), vocab, seed=seed)
    together = Rows(vocab=vocab)
    order = np.random.default_rng(seed).permutation(len(picks)).tolist()
    for i, pick in enumerate(picks):
        params, more = REQUESTS[pick]
        together.add(order[i], params, seed=seed + i, **more)
    before = torch.get_num_threads()
    try:
        set_threads(threads)
        outputs = [together.step(logits[s], order) for s in range(steps)]
        set_threads(3 - threads)
        for i, pick in enumerate(picks):
            alone = Rows(rows=1, vocab=vocab)
            params, more = REQUESTS[pick]
            alone.add(0, params, seed=seed + i, **more)
            for s in range(steps):
                assert outcome(alone.step(logits[s, i : i + 1], [0]), 0) == outcome(outputs[s], i)
    finally:
        set_threads(before)


def test_many_rows_with_logprobs_and_edits_sample_as_alone() -> None:
    """More of them than a backend copies at once, among others."""
    count = 2 * ROWS_AT_ONCE + 5
    logits, together = gaussian(count, VOCAB, seed=1), Rows(rows=count)
    kinds: list[dict[str, Any]] = [
        {"logprobs": 2, "logit_bias": {3: 4.0}}, {"repetition_penalty": 1.3, "logprobs": 1}, {"logprobs": 1}, {},
        {"logprobs": 0, "frequency_penalty": 0.5, "temperature": 0.0}, {"logit_bias": {5: 2.0}, "logprobs": 3},
    ]  # fmt: skip
    chosen = [SamplingParams(**kinds[i % len(kinds)]) for i in range(count)]
    for i, params in enumerate(chosen):
        together.add(i, params, seed=i)
    together.add(7, SamplingParams(logits_processors=[failing], logprobs=1))
    output = together.step(logits, list(range(count)))
    assert [*output.errors] == [7]
    for i, params in enumerate(chosen):
        alone = Rows(rows=1)
        alone.add(0, params, seed=i)
        if i != 7:
            assert outcome(alone.step(logits[i : i + 1], [0]), 0) == outcome(output, i)


@pytest.mark.parametrize("pick", range(len(REQUESTS)))
def test_a_preempted_sequence_continues_with_the_same_tokens(pick: int) -> None:
    params, more = REQUESTS[pick]
    steps = 14
    logits = gaussian(steps, VOCAB, seed=pick)
    steady, moved = Rows(), Rows()
    for rows in (steady, moved):
        rows.add(0, params, seed=3, **more)
    row = 0
    for s in range(steps):
        if s in (5, 6, 10):  # preempted: resumes at another row, which had another sequence before
            known = moved.tokens.ids[row, : moved.tokens.num_tokens[row]].tolist()
            moved.sampler.remove(row)
            row += 1
            moved.add(row, SamplingParams(frequency_penalty=2.0, logprobs=1), outputs=[1, 2])
            moved.one(logits[s], row)
            moved.sampler.remove(row)
            moved.add(row, params, prompt=known[:3], **{**more, "outputs": known[3:]}, seed=3)
        here, there = steady.step(logits[s][None], [0]), moved.step(logits[s][None], [row])
        assert outcome(here, 0) == outcome(there, 0)


@pytest.mark.parametrize("forked_at", [1, *(pytest.param(step, marks=pytest.mark.slow) for step in (0, 9))])
@pytest.mark.parametrize("pick", range(len(REQUESTS)))
def test_a_fork_samples_as_if_it_had_been_added_with_its_own_seed(pick: int, forked_at: int) -> None:
    """It, its parent and its own child, which is forked later, go different ways; the rows had other owners before."""
    params, more = REQUESTS[pick]
    outputs = more.get("outputs", [])
    seeds = {0: 3, 1: 8, 2: 2**64 + 5}
    logits = gaussian(20, VOCAB, seed=pick)
    ours = Rows()
    for row in (1, 2):
        ours.add(row, SamplingParams(frequency_penalty=2.0, logprobs=1, logit_bias={9: 50.0}), outputs=[1, 2])
    ours.add(0, params, seed=3, **more)

    def fork(parent: int, child: int) -> None:
        for array in (ours.tokens.ids, ours.tokens.num_tokens, ours.tokens.num_prompt):
            array[child] = array[parent]
        ours.sampler.fork(parent, child, seeds[child])

    added: dict[int, Rows] = {}
    for s in range(20):
        for parent, child, at in ((0, 1, forked_at), (1, 2, forked_at + 4)):
            if s == at:
                fork(parent, child)
        running = [row for row, at in ((0, 0), (1, forked_at), (2, forked_at + 4)) if s >= at]
        for row in running:
            if row not in added:
                known = ours.tokens.ids[row, 3 : ours.tokens.num_tokens[row]].tolist()
                added[row] = Rows()
                added[row].add(5, params, seed=seeds[row], **{**more, "outputs": known if row else outputs})
        output = ours.step(logits[s].repeat(len(running), 1), running)
        for i, row in enumerate(running):
            assert outcome(output, i) == outcome(added[row].step(logits[s][None], [5]), 0)


def test_greedy_batches_touch_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    for row in range(4):
        rows.add(row, greedy(top_k=5, top_p=0.5, min_p=0.2))  # idle without a temperature
    refuse: Callable[..., Any] = lambda *a: pytest.fail("a greedy batch needs no more than argmax")  # noqa: E731
    for name in ("_process", "_logprobs"):
        monkeypatch.setattr(rows.sampler, name, refuse)
    rows.step(gaussian(4, VOCAB), [0, 1, 2, 3])


# Late and repeated sampling

READING = {"penalties", "phrases", "custom"}
ASKED: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "nothing": (greedy(), {}),
    "a draw": (SamplingParams(top_k=9, logprobs=1), {}),
    "bias": (greedy(logit_bias={3: 4.0}), {}),
    "allowed": (SamplingParams(allowed_token_ids=[3, 4, 9]), {}),
    "min_tokens": (SamplingParams(min_tokens=8), {"stop": [3, 10]}),
    "bad words of one token": (greedy(bad_words=["x"]), {"bad_words": [[0], [1]]}),
    "penalties": (greedy(presence_penalty=0.5), {}),
    "phrases": (greedy(bad_words=["x"]), {"bad_words": [[0], [5, 6]]}),
    "custom": (greedy(logits_processors=[lambda outputs, logits: logits]), {}),
}


@pytest.mark.parametrize("name", ASKED)
def test_which_rows_need_to_know_their_tokens(name: str) -> None:
    rows = Rows()
    params, more = ASKED[name]
    rows.add(0, greedy())
    rows.add(1, params, **more)
    assert not rows.sampler.needs_tokens(np.array([0]))
    assert rows.sampler.needs_tokens(np.array([0, 1])) == (name in READING)
    rows.sampler.fork(1, 2, seed=9)
    assert rows.sampler.needs_tokens(np.array([2])) == (name in READING)
    rows.sampler.remove(1)
    assert not rows.sampler.needs_tokens(np.array([0, 1]))


@pytest.mark.parametrize("name", sorted(ASKED.keys() - READING))
def test_a_row_that_does_not_need_its_tokens_does_not_depend_on_them(name: str) -> None:
    params, more = ASKED[name]
    outcomes = []
    for last in (5, 150):
        rows = Rows()
        rows.add(0, params, seed=1, **more)
        rows.append(0, last)
        outcomes.append(outcome(rows.step(gaussian(1, VOCAB), [0]), 0))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("pick", range(len(REQUESTS)))
def test_a_row_sampled_at_several_places_is_as_if_step_by_step(pick: int) -> None:
    """Drafts are verified in one call, of which two are taken and one is not; then the row goes on."""
    params, more = REQUESTS[pick]
    logits = gaussian(7, VOCAB, seed=pick)
    steady, spread = Rows(), Rows()
    for rows in (steady, spread):
        rows.add(0, params, seed=3, **more)
        rows.add(1, greedy(), seed=4)
        rows.step(logits[:1], [0])
    expected = [outcome(steady.step(logits[s][None], [0]), 0) for s in range(1, 6)]
    start = int(spread.tokens.num_tokens[0])
    drafts = [expected[0][0], expected[1][0], (expected[2][0] + 1) % VOCAB]
    spread.tokens.ids[0, start : start + 3] = drafts
    places = start + np.arange(4)
    found = spread.sampler.start(
        logits[[1, 2, 0, 3, 4]].clone(), np.array([0, 0, 1, 0, 0]), np.array([*places[:2], 3, *places[2:]])
    ).wait()
    assert [outcome(found, i) for i in (0, 1, 3)] == expected[:3]
    spread.tokens.ids[0, start : start + 3] = [token for token, _ in expected[:3]]
    spread.tokens.num_tokens[0] = start + 3
    assert [outcome(spread.step(logits[s][None], [0]), 0) for s in (4, 5)] == expected[3:]
