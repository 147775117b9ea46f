"""The worker under hand-written plans: forks, beams, swaps; a sequence never differs from one that is alone."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from octavo.core.plan import Fork, TableChange
from octavo.core.request import Beam
from octavo.core.sampling_params import BeamSearchParams, SamplingParams
from tests.runner.plan_worker import PROMPT, VOCAB, Worker, greedy, introduce, samples, steps

KINDS: dict[str, dict[str, Any]] = {
    "cpu": {"kernels": "cpu"},
    "cpu, int8 cache": {"kernels": "cpu", "kv_cache_dtype": "int8"},
    "reference": {"kernels": "reference"},
}


@pytest.fixture(scope="module", params=KINDS)
def worker(request: pytest.FixtureRequest, network: Path) -> Worker:
    """Holds no sequence between tests."""
    if KINDS[request.param]["kernels"] == "cpu":
        pytest.importorskip("octavo._cpu")
    return Worker(network, **KINDS[request.param])


# --- parallel sampling ----------------------------------------------------------------------------------------------


def halve(tokens: list[int], logits: Any) -> Any:
    """Less of what came last."""
    if tokens:
        logits[tokens[-1]] -= 3.0
    return logits


REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"params": SamplingParams()},
    "logprobs": {"params": SamplingParams(logprobs=3, top_p=0.9)},
    "penalties": {
        "params": SamplingParams(
            temperature=2.0, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5, logprobs=0
        )
    },
    "min_tokens": {"params": SamplingParams(temperature=5.0, min_tokens=3), "stop": list(range(1, 60))},
    "bad words": {"params": SamplingParams(temperature=5.0, top_k=20), "bad_words": [[4], [11, 12], [50, 51, 52]]},
    "bias and mask": {
        "params": SamplingParams(logit_bias={3: 5.0, 8: 6.0}, allowed_token_ids=[3, 8, 9, 10], min_p=0.01, logprobs=2)
    },
    "processor": {"params": SamplingParams(temperature=0.5, logits_processors=[halve])},
    "greedy": {"params": SamplingParams(temperature=0.0, logprobs=1)},
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize(
    "chunks", [pytest.param([10], marks=pytest.mark.slow), [6, 4]], ids=["one chunk", "two chunks"]
)
def test_forks_at_the_end_of_the_prompt_are_separate_sequences(
    worker: Worker, request_: dict[str, Any], chunks: list[int]
) -> None:
    """Two children get their first tokens from the parent's logits, then a copy each of the block partly filled."""
    expected = [worker.alone(PROMPT, count=7, seed=40 + i, **request_) for i in range(3)]
    results = []
    plan: dict[str, Any] = {
        "new": [introduce(1, PROMPT, seed=40, **request_)],
        "table_changes": [TableChange(1, 0, [50, 9, 70])],
    }
    for tokens in chunks[:-1]:
        results.append(worker.step(seq_ids=[1], num_tokens=[tokens], **plan))
        assert results[-1].seq_ids == []
        plan = {}
    forks = [Fork(1, 3, 42), Fork(1, 2, 41)]
    results.append(worker.step(seq_ids=[1], num_tokens=[chunks[-1]], forks=forks, **plan))
    assert results[-1].seq_ids == [1, 3, 2]
    results.append(
        worker.step(
            blocks_to_copy=[(70, 71), (70, 72)],
            table_changes=[TableChange(2, 0, [50, 9, 71]), TableChange(3, 0, [50, 9, 72])],
            seq_ids=[2, 3, 1],
            num_tokens=[1, 1, 1],
        )
    )
    results.append(worker.step(seq_ids=[3, 1, 2], num_tokens=[1, 1, 1]))
    grown = [TableChange(seq_id, 3, [30 - seq_id]) for seq_id in (1, 2, 3)]
    results.append(worker.step(table_changes=grown, seq_ids=[1, 2, 3], num_tokens=[1, 1, 1]))
    results += [worker.step(seq_ids=[1, 2, 3], num_tokens=[1, 1, 1]) for _ in range(3)]
    worker.step(forget=[1, 2, 3])
    for i, seq_id in enumerate((1, 2, 3)):
        worker.assert_same(steps(results, seq_id), expected[i])


def test_other_sequences_of_the_step_do_not_notice_a_fork(worker: Worker) -> None:
    params = SamplingParams(logprobs=1)
    expected = [worker.alone(PROMPT[:n], params, 2, seed=n) for n in (6, 9)]
    tables = [TableChange(1, 0, [0, 1]), TableChange(2, 0, [2, 3, 4])]
    new = [introduce(1, PROMPT[:6], params, seed=6), introduce(2, PROMPT[:9], params, seed=9)]
    first = worker.step(
        new=new, forks=[Fork(2, 3, 6), Fork(2, 4, 9)], table_changes=tables, seq_ids=[1, 2], num_tokens=[6, 9]
    )
    assert first.seq_ids == [1, 2, 3, 4]
    # A sequence is forked, but not scheduled, while another runs.
    second = worker.step(forks=[Fork(2, 5, 8)], seq_ids=[1], num_tokens=[1])
    assert second.seq_ids == [1]
    third = worker.step(seq_ids=[2], num_tokens=[1])
    worker.step(forget=[1, 2, 3, 4, 5])
    worker.assert_same(steps([first, second], 1), expected[0])
    worker.assert_same(steps([first, third], 2), expected[1])
    worker.assert_same(steps([first], 4), expected[1][:1])


def test_prompt_logprobs_come_once_and_only_for_the_parent(worker: Worker) -> None:
    result = worker.step(
        new=[introduce(1, PROMPT, SamplingParams(prompt_logprobs=0))],
        forks=[Fork(1, 2, 5)],
        table_changes=[TableChange(1, 0, [0, 1, 2])],
        seq_ids=[1],
        num_tokens=[10],
    )
    again = worker.step(table_changes=[TableChange(2, 0, [0, 1, 2])], seq_ids=[2], num_tokens=[1])
    worker.step(forget=[1, 2])
    assert [p.token_id for p in result.extras[1].prompt_logprobs] == PROMPT[1:]
    assert result.seq_ids == [1, 2]
    assert result.extras.keys() == {1}
    assert again.extras == {}


def test_an_error_of_a_child_is_its_own(worker: Worker) -> None:
    calls: list[list[int]] = []

    def fail_the_second_time(tokens: list[int], logits: Any) -> Any:
        calls.append(tokens)
        if len(calls) == 2:
            raise ValueError("no")
        return logits

    params = greedy(logits_processors=[fail_the_second_time], logprobs=0)
    result = worker.step(
        new=[introduce(1, PROMPT, params)],
        forks=[Fork(1, 2, 1), Fork(1, 3, 2)],
        table_changes=[TableChange(1, 0, [0, 1, 2])],
        seq_ids=[1],
        num_tokens=[10],
    )
    worker.step(forget=[1, 2, 3])
    assert {seq_id: extra.error is None for seq_id, extra in result.extras.items()} == {1: True, 2: False, 3: True}
    assert result.token_ids[0] == result.token_ids[2]
    assert calls == [[], [], []]


# --- drafts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_drafts_change_nothing(worker: Worker, request_: dict[str, Any]) -> None:
    """Guesses right, wrong, or right at first: the tokens and logprobs are those of one token a step."""
    [expected, company] = [worker.alone(PROMPT, count=12, seed=40 + i, **request_) for i in range(2)]
    plan: dict[str, Any] = {
        "new": [introduce(i, PROMPT, seed=39 + i, **request_) for i in (1, 2)],
        "table_changes": [TableChange(1, 0, [50, 9, 70, 71, 72, 73]), TableChange(2, 0, [1, 2, 3, 4, 5, 6])],
    }
    results = [worker.step(seq_ids=[1, 2], num_tokens=[10, 10], **plan)]
    found: dict[int, list[Any]] = {1: [], 2: []}
    rng = random.Random(3)
    while len(found[1]) < 12:
        taken = iter(results[-1].token_ids)
        counts = results[-1].num_tokens or [1] * len(results[-1].seq_ids)
        for seq_id, count in zip(results[-1].seq_ids, counts, strict=True):
            extra = results[-1].extras.get(seq_id)
            logprobs = extra.logprobs if extra is not None and extra.logprobs else [None] * count
            found[seq_id] += zip([next(taken) for _ in range(count)], logprobs, strict=True)
        known = len(found[1])
        right = [token for token, _ in expected[known : known + rng.randrange(4)]]
        guesses = right + [rng.randrange(VOCAB) for _ in range(rng.randrange(3))]
        seq_ids = [1] if len(found[2]) >= 12 else [1, 2]
        results.append(
            worker.step(seq_ids=seq_ids, num_tokens=[1 + len(guesses), 1][: len(seq_ids)], drafts={1: guesses})
        )
    worker.step(forget=[1, 2])
    for seq_id, alone in ((1, expected), (2, company)):
        assert [token for token, _ in found[seq_id]][:12] == [token for token, _ in alone][: len(found[seq_id])]
        if worker.options["kernels"] == "cpu":  # torch's own products depend on the number of rows
            assert found[seq_id][:12] == alone[: len(found[seq_id])]
    assert any(max(result.num_tokens, default=1) > 2 for result in results), "no guess was accepted"


# --- beam search ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scratch(worker: Worker) -> Worker:
    """Another worker of the same kind, so that its blocks are not those of the beams."""
    return Worker(worker.folder, **worker.options)


@pytest.mark.parametrize("seed", range(3))
def test_beams_are_sequences_computed_from_scratch(worker: Worker, scratch: Worker, seed: int) -> None:
    """Beams go on at random from beams at random, with other tokens than were sampled; a shared block is copied."""
    rng = random.Random(seed)
    params = greedy(logprobs=4)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
    free = rng.sample(range(96), 96)
    tables = {0: [free.pop() for _ in range(-(-len(prompt) // 4))]}
    tokens = {0: list(prompt)}
    shared = Counter(tables[0])
    result = worker.step(
        new=[introduce(0, prompt, task=Beam(BeamSearchParams(beam_width=4)))],
        table_changes=[TableChange(0, 0, tables[0])],
        seq_ids=[0],
        num_tokens=[len(prompt)],
    )
    copies = 0
    for step in range(10):
        chosen = [(rng.choice(list(tokens)), rng.randrange(VOCAB)) for _ in range(4)]
        plan, tokens, tables = follow(chosen, tokens, tables, shared, free, first_id=10 * (step + 1))
        copies += len(plan["blocks_to_copy"])
        result = worker.step(**plan)
        assert result.seq_ids == plan["seq_ids"]
        for seq_id, sample in samples(result).items():
            expected = scratch.alone(tokens[seq_id], params, 1, num_prompt_tokens=len(prompt))
            worker.assert_same([sample], expected)
    worker.step(forget=list(tokens))
    assert copies > 3


def follow(
    chosen: list[tuple[int, int]],
    tokens: dict[int, list[int]],
    tables: dict[int, list[int]],
    shared: Counter[int],
    free: list[int],
    first_id: int,
) -> tuple[dict[str, Any], dict[int, list[int]], dict[int, list[int]]]:
    """The plan by which each chosen (beam, token) becomes a beam, and the tokens and tables of the new beams."""
    plan: dict[str, Any] = {"forks": [], "new_tokens": {}, "table_changes": [], "blocks_to_copy": []}
    new_tokens: dict[int, list[int]] = {}
    new_tables: dict[int, list[int]] = {}
    for i, (parent, token) in enumerate(chosen):
        beam = parent
        if parent in new_tokens:
            beam = first_id + i
            plan["forks"].append(Fork(parent, beam, 0))
            shared.update(tables[parent])
        new_tokens[beam], new_tables[beam] = [*tokens[parent], token], list(tables[parent])
        plan["new_tokens"][beam] = [token]
    plan["forget"] = [beam for beam in tokens if beam not in new_tokens]
    for beam in plan["forget"]:
        shared.subtract(tables[beam])
    for beam, table in new_tables.items():
        place = (len(new_tokens[beam]) - 1) // 4
        if place < len(table) and shared[table[place]] == 1:
            continue
        block = free.pop()
        if place < len(table):
            plan["blocks_to_copy"].append((table[place], block))
            shared[table[place]] -= 1
        table[place:] = [block]
        shared[block] = 1
        plan["table_changes"].append(TableChange(beam, place, [block]))
    plan["seq_ids"], plan["num_tokens"] = list(new_tokens), [1] * len(new_tokens)
    return plan, new_tokens, new_tables


# --- swapping -------------------------------------------------------------------------------------------------------


def test_a_sequence_that_was_swapped_goes_on_as_if_nothing_had_happened(worker: Worker) -> None:
    params = SamplingParams(logprobs=2, frequency_penalty=0.7)
    expected = worker.alone(PROMPT, params, 6, seed=3)
    results = [
        worker.step(
            new=[introduce(1, PROMPT, params, seed=3)],
            table_changes=[TableChange(1, 0, [5, 6, 7])],
            seq_ids=[1],
            num_tokens=[10],
        )
    ]
    results += [worker.step(seq_ids=[1], num_tokens=[1]) for _ in range(2)]
    known = PROMPT + [token for token, _ in steps(results, 1)]
    assert [r.swap_seconds for r in results] == [0.0, 0.0, 0.0]
    # Another takes the blocks in the same step.
    out = worker.step(
        forget=[1],
        blocks_to_swap_out=[(5, 0), (6, 15), (7, 3)],
        new=[introduce(2, known[::-1], params)],
        table_changes=[TableChange(2, 0, [7, 5, 6, 8])],
        seq_ids=[2],
        num_tokens=[13],
    )
    results.append(
        worker.step(
            forget=[2],
            blocks_to_swap_in=[(0, 7), (15, 20), (3, 5)],
            new=[introduce(1, known, params, seed=3, num_prompt_tokens=10, num_computed=12)],
            table_changes=[TableChange(1, 0, [7, 20, 5, 6])],
            seq_ids=[1],
            num_tokens=[1],
        )
    )
    for moved in (out, results[-1]):
        assert 0.0 < moved.swap_seconds < moved.seconds
    results += [worker.step(seq_ids=[1], num_tokens=[1]) for _ in range(2)]
    worker.step(forget=[1])
    worker.assert_same(steps(results, 1), expected)


def test_a_prefill_that_was_swapped_goes_on_in_its_middle(worker: Worker) -> None:
    params = SamplingParams(prompt_logprobs=0)
    worker.step(
        new=[introduce(1, PROMPT, params)], table_changes=[TableChange(1, 0, [5, 6])], seq_ids=[1], num_tokens=[6]
    )
    worker.step(forget=[1], blocks_to_swap_out=[(5, 2), (6, 1)])
    result = worker.step(
        blocks_to_swap_in=[(2, 6), (1, 5)],
        new=[introduce(1, PROMPT, params, num_computed=6)],
        table_changes=[TableChange(1, 0, [6, 5, 4])],
        seq_ids=[1],
        num_tokens=[4],
    )
    worker.step(forget=[1])
    worker.assert_same(steps([result], 1), worker.alone(PROMPT, params, 1))
    assert result.extras[1].prompt_start == 7
    assert [p.token_id for p in result.extras[1].prompt_logprobs] == PROMPT[7:]


def test_moves_are_timed_as_kernels(network: Path) -> None:
    worker = Worker(network, kernels="reference", time_kernels=True)
    result = worker.step(blocks_to_swap_out=[(1, 2)], blocks_to_copy=[(1, 5)])
    assert result.swap_seconds > 0.0
    assert 0.0 < result.kernel_seconds < result.seconds


def test_the_time_of_a_swap_is_measured(worker: Worker) -> None:
    assert 0.0 < worker.runner.measure_swap() < 1.0
    assert Worker(worker.folder, num_host_blocks=0, **worker.options).runner.measure_swap() == 0.0
