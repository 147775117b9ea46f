"""Beam search against transformers, against every possible sequence, and on random tables of probabilities."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.request import Beam, Hypothesis
from octavo.core.sampling_params import BeamSearchParams
from octavo.scheduler.groups import BeamSearch, Candidates

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

EarlyStopping = bool | Literal["never"]
#: Logprobs of every token of the vocabulary after the generated ones.
Table = Callable[[tuple[int, ...]], list[float]]

EARLY_STOPPING: list[EarlyStopping] = [True, False, "never"]
LENGTH_PENALTIES = [0.0, 0.5, 1.0, 2.0, -1.0]


def best(logprobs: list[float], count: int) -> Candidates:
    ids = sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))[:count]
    return Candidates(ids, [logprobs[token] for token in ids])


def drive(search: BeamSearch, table: Table, count: int) -> Iterator[list[tuple[int, ...]]]:
    """Runs a search with so many candidates of each beam to its end; yields the running beams after each step."""
    beams: list[tuple[int, ...]] = [()]
    while beams:
        step = search.step([best(table(beam), count) for beam in beams], [list(beam) for beam in beams])
        assert step.done == (not step.survivors)
        beams = [(*beams[beam], token) for beam, token in step.survivors]
        yield beams


def run(params: BeamSearchParams, stop: set[int], table: Table) -> list[Hypothesis]:
    search = BeamSearch(params, frozenset(stop), params.max_tokens)
    for _ in drive(search, table, Beam(params, list(stop)).num_candidates):
        pass
    return search.hypotheses()


# --- against transformers


VOCABULARY = 40
PAD = 39
PROMPT = [5, 17, 29]


def random_llama(seed: int) -> LlamaForCausalLM:
    """A float32 Llama whose next-token distributions are uneven enough that beams differ in more than noise."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def table_of(model: LlamaForCausalLM) -> Table:
    import torch

    known: dict[tuple[int, ...], list[float]] = {}

    def logprobs(generated: tuple[int, ...]) -> list[float]:
        if generated not in known:
            with torch.inference_mode():
                logits = model(torch.tensor([[*PROMPT, *generated]]), use_cache=False).logits[0, -1]
            known[generated] = torch.log_softmax(logits.float(), dim=-1).tolist()
        return known[generated]

    return logprobs


def generate(model: LlamaForCausalLM, params: BeamSearchParams, stop: set[int]) -> list[tuple[list[int], float]]:
    """What transformers returns: generated tokens, without padding, and scores."""
    import torch

    out = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        early_stopping=params.early_stopping,
        length_penalty=params.length_penalty,
        max_new_tokens=params.max_tokens,
        eos_token_id=sorted(stop) or None,
        pad_token_id=PAD,
        use_cache=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    return [
        (row[len(PROMPT) : len(PROMPT) + length].tolist(), score)
        for row, length, score in zip(out.sequences, lengths, out.sequences_scores.tolist(), strict=True)
    ]


@pytest.fixture(scope="module")
def single_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def likely_tokens(table: Table, count: int) -> set[int]:
    """Tokens that the best beams hold: as stop tokens they come up often, but not at every step."""
    held = run(BeamSearchParams(beam_width=8, max_tokens=8), set(), table)
    common = Counter(token for hypothesis in held for token in hypothesis.token_ids).most_common()
    return {token for token, _ in common[1 : count + 1]}


def check_against_transformers(seed: int, num_stop_tokens: int, max_tokens: int) -> Counter[str]:
    """Compares all settings on one model; returns how often searches and hypotheses ended in which way."""
    model = random_llama(seed)
    table = table_of(model)
    stop = likely_tokens(table, num_stop_tokens)
    seen: Counter[str] = Counter()
    for width, early_stopping, length_penalty in itertools.product([2, 4, 8], EARLY_STOPPING, LENGTH_PENALTIES):
        params = BeamSearchParams(
            beam_width=width, max_tokens=max_tokens, early_stopping=early_stopping, length_penalty=length_penalty
        )
        expected = generate(model, params, stop)
        search = BeamSearch(params, stop, max_tokens)
        steps = len(list(drive(search, table, Beam(params, list(stop)).num_candidates)))
        got = search.hypotheses()
        case = f"stop {stop}, {params}"
        assert [h.token_ids for h in got] == [tokens for tokens, _ in expected], case
        assert [h.score for h in got] == pytest.approx([score for _, score in expected], rel=0, abs=1e-4), case
        seen.update(h.finish_reason for h in got)
        seen["ended early"] += steps < max_tokens
    return seen


@pytest.mark.usefixtures("single_thread")
@pytest.mark.parametrize(("seed", "num_stop_tokens"), [(0, 1), (3, 5)])
def test_equals_transformers(seed: int, num_stop_tokens: int) -> None:
    seen = check_against_transformers(seed, num_stop_tokens, max_tokens=8)
    # All ways to end come up, or the comparison would prove little.
    assert min(seen["stop"], seen["length"], seen["ended early"]) >= 5, seen


@pytest.mark.usefixtures("single_thread")
def test_equals_transformers_without_stop_tokens() -> None:
    assert set(check_against_transformers(4, 0, max_tokens=4)) == {"length", "ended early"}


@pytest.mark.slow
@pytest.mark.usefixtures("single_thread")
@pytest.mark.parametrize("num_stop_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(10, 20))
def test_equals_transformers_on_many_models(seed: int, num_stop_tokens: int) -> None:
    check_against_transformers(seed, num_stop_tokens, max_tokens=16)


@pytest.mark.usefixtures("single_thread")
def test_a_single_new_token_equals_transformers() -> None:
    model = random_llama(0)
    params = BeamSearchParams(beam_width=8, max_tokens=1)
    table = table_of(model)
    stop = set(best(table(()), 8).token_ids[::3])
    expected = generate(model, params, stop)
    got = run(params, stop, table)
    assert [h.token_ids for h in got] == [tokens for tokens, _ in expected]
    assert {h.finish_reason for h in got} == {"stop", "length"}


@pytest.mark.usefixtures("single_thread")
@pytest.mark.parametrize("early_stopping", [True, *(pytest.param(e, marks=pytest.mark.slow) for e in (False, "never"))])
def test_one_beam_is_greedy_as_in_transformers(early_stopping: EarlyStopping) -> None:
    import torch

    reasons = set()
    for seed, num_stop_tokens in itertools.product(range(2), [0, 1, 4]):
        model = random_llama(seed)
        table = table_of(model)
        stop = likely_tokens(table, num_stop_tokens)
        greedy = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            do_sample=False,
            max_new_tokens=8,
            eos_token_id=sorted(stop) or None,
            pad_token_id=PAD,
        )
        params = BeamSearchParams(beam_width=1, max_tokens=8, early_stopping=early_stopping)
        (hypothesis,) = run(params, stop, table)
        assert hypothesis.token_ids == greedy[0, len(PROMPT) :].tolist()
        reasons.add(hypothesis.finish_reason)
    assert reasons == {"stop", "length"}


# --- against every possible sequence


def random_table(seed: int, vocabulary: int, coarse: bool = False) -> Table:
    """Logprobs from a seed; coarse ones are multiples of 1/4, so that sums are exact and often equal."""

    def logprobs(generated: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{seed} {generated}")
        if coarse:
            return [-rng.randint(1, 8) / 4 for _ in range(vocabulary)]
        weights = [rng.random() ** 3 + 1e-3 for _ in range(vocabulary)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return logprobs


def all_sequences(vocabulary: int, stop: set[int], length: int) -> list[tuple[int, ...]]:
    """Every sequence that ends at its first stop token or at the length."""
    return [
        tokens
        for n in range(1, length + 1)
        for tokens in itertools.product(range(vocabulary), repeat=n)
        if not stop & set(tokens[:-1]) and (n == length or tokens[-1] in stop)
    ]


def summed(table: Table, tokens: list[int] | tuple[int, ...]) -> float:
    return math.fsum(table(tuple(tokens[:i]))[token] for i, token in enumerate(tokens))


@pytest.mark.parametrize("length_penalty", LENGTH_PENALTIES)
@pytest.mark.parametrize("seed", range(5))
def test_beams_enough_for_every_sequence_return_them_all_in_order(seed: int, length_penalty: float) -> None:
    table = random_table(seed, vocabulary=3)
    sequences = all_sequences(3, {1}, length=3)
    params = BeamSearchParams(beam_width=32, max_tokens=3, length_penalty=length_penalty, early_stopping="never")
    scores = {tokens: summed(table, tokens) / len(tokens) ** length_penalty for tokens in sequences}
    assert len(sequences) <= params.beam_width
    got = run(params, {1}, table)
    assert [tuple(h.token_ids) for h in got] == sorted(sequences, key=lambda tokens: -scores[tokens])
    assert [h.score for h in got] == pytest.approx([scores[tuple(h.token_ids)] for h in got])


# --- on random tables


def search_by_definition(params: BeamSearchParams, stop: set[int], table: Table, vocabulary: int) -> list[Hypothesis]:
    """The search as transformers defines it, over the whole vocabulary at every step."""
    width, limit, penalty = params.beam_width, params.max_tokens, params.length_penalty
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    complete: list[Hypothesis] = []
    for length in range(1, limit + 1):
        everything = [(total + table(beam)[t], (*beam, t)) for total, beam in beams for t in range(vocabulary)]
        everything.sort(key=lambda item: -item[0])  # stable: beam, then token
        kept = everything[: width * max(2, 1 + len(stop))]
        ending = [item for item in kept[:width] if length == limit or item[1][-1] in stop]
        for total, tokens in ending:
            reason: Literal["stop", "length"] = "stop" if tokens[-1] in stop else "length"
            complete.append(Hypothesis(list(tokens), total, total / length**penalty, reason))
        complete = sorted(complete, key=lambda hypothesis: -hypothesis.score)[:width]
        beams = [item for item in kept if item[1][-1] not in stop][:width]
        assert len(beams) == width
        if len(complete) == width:
            hoped_for = limit if params.early_stopping == "never" and penalty > 0 else length
            if params.early_stopping is True or beams[0][0] / hoped_for**penalty <= complete[-1].score:
                break
    return complete


@st.composite
def searches(draw: st.DrawFn) -> tuple[BeamSearchParams, set[int], int]:
    params = BeamSearchParams(
        beam_width=draw(st.integers(2, 6)),
        max_tokens=draw(st.integers(1, 6)),
        length_penalty=draw(st.sampled_from(LENGTH_PENALTIES)),
        early_stopping=draw(st.sampled_from(EARLY_STOPPING)),
    )
    stop = draw(st.sets(st.integers(0, 6), max_size=4))
    return params, stop, draw(st.integers(max(7, params.beam_width + len(stop)), 14))


@settings(max_examples=150, deadline=None)
@given(searches(), st.integers(0, 2**32))
def test_few_candidates_of_each_beam_decide_as_the_whole_vocabulary(
    case: tuple[BeamSearchParams, set[int], int], seed: int
) -> None:
    params, stop, vocabulary = case
    table = random_table(seed, vocabulary, coarse=True)
    assert run(params, stop, table) == search_by_definition(params, stop, table, vocabulary)


@settings(max_examples=150, deadline=None)
@given(searches(), st.integers(0, 2**32))
def test_a_search_ends_with_as_many_distinct_hypotheses_as_beams(
    case: tuple[BeamSearchParams, set[int], int], seed: int
) -> None:
    params, stop, vocabulary = case
    table = random_table(seed, vocabulary)
    search = BeamSearch(params, frozenset(stop), params.max_tokens)
    steps = list(drive(search, table, Beam(params, list(stop)).num_candidates))
    assert len(steps) <= params.max_tokens
    for length, beams in enumerate(steps[:-1], start=1):
        assert len(set(beams)) == len(beams) == params.beam_width
        assert all(len(beam) == length and not stop & set(beam) for beam in beams)
        totals = [summed(table, beam) for beam in beams]
        assert totals == pytest.approx(sorted(totals, reverse=True))
    found = search.hypotheses()
    assert len({tuple(h.token_ids) for h in found}) == len(found) == params.beam_width
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    for hypothesis in found:
        tokens = hypothesis.token_ids
        assert hypothesis.cumulative_logprob == pytest.approx(summed(table, tokens))
        assert hypothesis.score == pytest.approx(hypothesis.cumulative_logprob / len(tokens) ** params.length_penalty)
        assert not stop & set(tokens[:-1])
        assert hypothesis.finish_reason == ("stop" if tokens[-1] in stop else "length")
        assert hypothesis.finish_reason == "stop" or len(tokens) == params.max_tokens


# --- corners


def test_equal_logprobs_go_to_the_lower_beam_and_token() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=9), frozenset(), 9)
    assert search.step([Candidates([7, 3, 5], [-1.0, -1.0, -1.0])], [[]]).survivors == [(0, 3), (0, 5)]
    second = search.step([Candidates([9, 4], [-2.0, -2.0]), Candidates([1, 0], [-2.0, -2.0])], [[3], [5]])
    assert second.survivors == [(0, 4), (0, 9)]


def test_a_stop_token_outside_the_best_beams_completes_nothing() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=9), frozenset({1}), 9)
    step = search.step([Candidates([4, 5, 1], [-1.0, -2.0, -3.0])], [[]])
    assert step.survivors == [(0, 4), (0, 5)]
    assert search.hypotheses() == []


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "logprob", "done"),
    [
        (True, 1.0, -0.1, True),
        (False, 1.0, -0.1, False),
        (False, 1.0, -0.5, True),  # as good as the worst hypothesis is not better
        (False, 1.0, -0.6, True),
        ("never", 1.0, -0.6, False),  # at the length limit it would score -0.26
        ("never", -1.0, -0.1, False),  # here -4.2, at the length limit -21
        ("never", -1.0, -0.6, True),
    ],
)
def test_when_all_hypotheses_are_complete_the_best_running_beam_decides(
    early_stopping: EarlyStopping, length_penalty: float, logprob: float, done: bool
) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=10, early_stopping=early_stopping, length_penalty=length_penalty)
    search = BeamSearch(params, {1}, 10)
    assert not search.step([Candidates([1, 4, 5], [-1.0, -2.0, -3.0])], [[]]).done
    # The beams sum to -2.0 and -3.0; the second hypothesis, [4, 1], to -2.5.
    step = search.step([Candidates([6, 1], [logprob, -0.5]), Candidates([7, 8], [-9.0, -9.5])], [[4], [5]])
    assert [h.token_ids for h in search.hypotheses()] == [[1], [4, 1]]
    assert step.done is done


def test_the_hypothesis_keeps_its_stop_token_and_its_own_copy() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=2.0), frozenset({1}), 2)
    search.step([Candidates([4, 5, 1], [-1.0, -2.0, -3.0])], [[]])
    beams = [[4], [5]]
    step = search.step([Candidates([1, 4], [-1.0, -2.0]), Candidates([6, 1], [-3.0, -4.0])], beams)
    assert (step.survivors, step.done) == ([], True)
    beams[0].append(0)
    assert search.hypotheses() == [
        Hypothesis([4, 1], -2.0, -0.5, "stop"),
        Hypothesis([4, 4], -3.0, -0.75, "length"),
    ]


@pytest.mark.parametrize(("width", "stop_tokens", "expected"), [(4, 0, 4), (4, 1, 5), (32, 3, 35), (32, 90, 100)])
def test_candidates_needed_are_within_what_a_worker_computes(width: int, stop_tokens: int, expected: int) -> None:
    assert Beam(BeamSearchParams(beam_width=width), list(range(stop_tokens))).num_candidates == expected


@pytest.mark.parametrize("length_penalty", [1e6, -1e6, 400.0, -400.0, 30.0, -30.0])
def test_extreme_length_penalties_still_give_every_hypothesis(length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=length_penalty, early_stopping="never")
    found = run(params, {1, 2}, random_table(0, vocabulary=9))
    assert len({tuple(h.token_ids) for h in found}) == 4


def test_a_step_without_candidates_ends_the_search() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=9), frozenset({1}), 9)
    search.step([Candidates([1, 4, 5], [-1.0, -2.0, -3.0])], [[]])
    step = search.step([Candidates([], []), Candidates([], [])], [[4], [5]])
    assert step.done
    assert [h.token_ids for h in search.hypotheses()] == [[1]]
