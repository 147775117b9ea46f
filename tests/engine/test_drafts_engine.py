"""Guesses at tokens to come change no bit of an answer (CPU kernels, a small model)."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import BeamSearchParams
from octavo.engine import core
from octavo.scheduler.groups import Sequence
from octavo.speculation.drafter import DraftedSequence, Drafter
from octavo.speculation.speculator import Speculator
from tests.random_mixes import random_mix
from tests.whole_outputs import all_of

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

PROMPTS = ["The quick brown fox", "a", "lists of numbers: 1, 2, 3", "Once upon a time in a land", "x = y +"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=25, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=2, top_p=0.9, max_tokens=30, ignore_eos=True, logprobs=1, min_tokens=9),
    SamplingParams(temperature=0.7, seed=4, max_tokens=35, ignore_eos=True, logprobs=1, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, seed=5, max_tokens=35, frequency_penalty=0.5, bad_words=["ab"], stop=["q"]),
]


class Remembering(Drafter):
    """Guesses what a run without guesses gave, and spoils some of it."""

    def __init__(self, answers: dict[tuple[tuple[int, ...], int], list[int]]) -> None:
        self._answers, self._rng = answers, random.Random(6)
        self.accepted = self.proposed = 0

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        assert isinstance(sequence, Sequence)
        prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
        known = len(sequence.token_ids) - sequence.num_prompt_tokens
        guesses = self._answers[prompt, sequence.index][known : known + min(num_tokens, self._rng.randrange(5))]
        if guesses and self._rng.random() < 0.4:
            guesses[self._rng.randrange(len(guesses))] ^= 1
        self.proposed += len(guesses)
        return guesses


class Rubbish(Drafter):
    """Any tokens at all."""

    def __init__(self) -> None:
        self._rng = random.Random(7)

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        return [self._rng.randrange(100) for _ in range(self._rng.randrange(2 * num_tokens))]


class Right(Remembering):
    """Always right."""

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        assert isinstance(sequence, Sequence)
        prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
        known = len(sequence.token_ids) - sequence.num_prompt_tokens
        return self._answers[prompt, sequence.index][known : known + num_tokens]


class Failing(Right):
    """Fails now and then."""

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        if self._rng.random() < 0.05:
            raise RuntimeError("no idea")
        return super().propose(sequence, num_tokens)


def load(folder: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "kernels": "cpu",
        "block_size": 4,
        "num_gpu_blocks_override": 200,
        "max_num_seqs": 16,
        "watermark": 0.0,
    }
    return LLM(str(folder), max_model_len=128, **{**defaults, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 40, "preemption_mode": "recompute"},
        {"num_gpu_blocks_override": 40, "preemption_mode": "swap", "num_host_blocks_override": 100},
        {"max_num_batched_tokens": 17, "kv_cache_dtype": "int8"},
    ],
    ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_bit_for_bit_the_answers_without_guesses(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    kind = {"kv_cache_dtype": options.get("kv_cache_dtype", "auto")}
    outputs = load(tiny_model, **kind).generate(PROMPTS, PARAMS, use_tqdm=False)
    answers = {(tuple(o.prompt_token_ids), c.index): list(c.token_ids) for o in outputs for c in o.outputs}
    drafter = Remembering(answers)
    monkeypatch.setattr(core, "make_speculator", lambda _: Speculator(drafter, 4, adaptive=False))
    llm = load(tiny_model, **options)
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert all_of(found) == all_of(outputs)
    assert drafter.proposed > 50
    if not options:
        assert llm.llm_engine.core.times.steps < max(len(c.token_ids) for o in outputs for c in o.outputs)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"batching": "prefill_first", "max_num_batched_tokens": 128}, marks=pytest.mark.slow),
        pytest.param(
            {"num_gpu_blocks_override": 40, "preemption_mode": "recompute", "enable_prefix_caching": False},
            marks=pytest.mark.slow,
        ),
        {"num_gpu_blocks_override": 40, "preemption_mode": "swap", "num_host_blocks_override": 100},
    ],
    ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_drafters_of_the_option(tiny_model: Path, plain: Any, method: str, options: dict[str, Any]) -> None:
    llm = load(tiny_model, speculative_config={"method": method, "adaptive": False}, **options)
    assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == plain
    assert all_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == plain  # ``suffix`` knows the answers now
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and 0 < stats.accepted_tokens <= stats.draft_tokens


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Any:
    """The answers without drafts."""
    return all_of(load(tiny_model).generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.parametrize("kind", ["rubbish", "right", "failing"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_whatever_a_drafter_does(
    tiny_model: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, kind: str, adaptive: bool
) -> None:
    outputs = load(tiny_model).generate(PROMPTS, PARAMS, use_tqdm=False)
    answers = {(tuple(o.prompt_token_ids), c.index): list(c.token_ids) for o in outputs for c in o.outputs}
    drafter: Drafter = Rubbish() if kind == "rubbish" else (Right if kind == "right" else Failing)(answers)
    monkeypatch.setattr(core, "make_speculator", lambda _: Speculator(drafter, 5, adaptive=adaptive))
    llm = load(tiny_model)
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert all_of(found) == plain
    if not adaptive:
        drafted = [o.metrics.num_draft_tokens for o in found]
        accepted = [o.metrics.num_accepted_draft_tokens for o in found]
        assert max(drafted) > 0 and (accepted == drafted) == (kind != "rubbish")
        stats = llm.llm_engine.core.scheduler.stats().speculation
        assert stats is not None and (stats.draft_tokens, stats.accepted_tokens) == (sum(drafted), sum(accepted))
        positions = itertools.zip_longest(*(o.metrics.accepted_per_position for o in found), fillvalue=0)
        totals = [*map(sum, positions)]
        assert totals == stats.accepted_per_position[: len(totals)]
        for each in (o.metrics for o in found):
            assert list(each.drafted_per_position) == sorted(each.drafted_per_position, reverse=True)
            pairs = zip(each.drafted_per_position, each.accepted_per_position, strict=False)
            assert all(accepted <= drafted for drafted, accepted in pairs)


def test_logprobs_of_a_prompt_whose_last_chunk_is_computed_beside_drafts(tiny_model: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    prompts = ["ab " * 3, "ab " * 4, "The quick brown fox " * 3]
    wanted = load(tiny_model).generate(prompts, params, use_tqdm=False)
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    llm = load(tiny_model, speculative_config=drafts, max_num_batched_tokens=17)
    found = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt_logprobs for o in found] == [o.prompt_logprobs for o in wanted]
    assert sum(o.metrics.num_draft_tokens for o in found) > 20


def test_a_processor_of_a_user_is_called_once_a_token_and_beams_are_as_ever(tiny_model: Path) -> None:
    calls: list[int] = []

    def counting(token_ids: list[int], logits: Any) -> Any:
        calls.append(len(token_ids))
        return logits

    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logits_processors=[counting])
    beams = BeamSearchParams(beam_width=3, max_tokens=12)
    llms = [load(tiny_model), load(tiny_model, speculative_config={"method": "ngram", "adaptive": False})]
    plain, found = (llm.generate(PROMPTS[:1], params, use_tqdm=False) for llm in llms)
    assert all_of(plain) == all_of(found)
    assert calls == 2 * list(range(12))
    one, other = (llm.beam_search([{"prompt": PROMPTS[0]}], beams)[0].sequences for llm in llms)
    assert [b.tokens for b in one] == [b.tokens for b in other]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_mixes(tiny_model: Path, seed: int) -> None:
    rng = random.Random(seed)
    options, prompts, params = random_mix(rng)
    config = {
        "method": rng.choice(["ngram", "suffix"]),
        "num_speculative_tokens": rng.choice([1, 3, 7, 12]),
        "prompt_lookup_min": rng.choice([1, 2]),
        "adaptive": rng.random() < 0.3,
    }
    wanted = all_of(load(tiny_model).generate(prompts, params, use_tqdm=False))
    llm = load(tiny_model, speculative_config=config, **options)
    for _ in range(2):
        assert all_of(llm.generate(prompts, params, use_tqdm=False)) == wanted


ALONE = {"method": "prediction", "adaptive": False}


@pytest.mark.parametrize("config", [None, {"method": "ngram"}, ALONE])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_predicted_outputs(tiny_model: Path, plain: Any, config: dict[str, Any] | None, async_scheduling: bool) -> None:
    right = [list(tokens) for ((tokens, *_), *_), _ in plain]
    edited = [[*ids[:7], 3, 5, *ids[9:]] for ids in right]
    llm = load(tiny_model, speculative_config=config, async_scheduling=async_scheduling)
    for predictions in (right, edited, [[9] * 500] * 5, ["any text", None, "", right[3], None]):
        found = llm.generate(PROMPTS, PARAMS, prediction=predictions, use_tqdm=False)
        assert all_of(found) == plain
        if config is ALONE and predictions in (right, edited):
            assert found[0].metrics.num_accepted_draft_tokens > 20
    if config is ALONE:
        assert [o.metrics.num_draft_tokens > 0 for o in found] == [False, False, False, True, False]
    if config is None:
        assert not any(o.metrics.num_draft_tokens for o in (found[1], found[2], found[4]))
    assert llm.llm_engine.core.scheduler.queues.num_drafted_groups == 0


def test_predictions_of_chats_and_wrong_ones(tiny_model: Path) -> None:
    llm = load(tiny_model, speculative_config=ALONE)
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    wanted = llm.chat("hello", greedy, use_tqdm=False)[0].outputs[0]
    (found,) = llm.chat("hello", greedy, prediction=list(wanted.token_ids), use_tqdm=False)
    assert found.outputs[0].token_ids == wanted.token_ids
    assert found.metrics.num_accepted_draft_tokens > 20
    wrong: Any
    for wrong, words in ((7, "text or a list of token ids"), ([-1], "from 0 to"), (["a", "b"], "not 2 of them")):
        with pytest.raises(InvalidRequestError, match=words):
            llm.chat("hello", greedy, prediction=wrong, use_tqdm=False)


def test_beams_beside_drafts(tiny_model: Path) -> None:
    work: list[SamplingParams | BeamSearchParams] = [*PARAMS, BeamSearchParams(beam_width=3, max_tokens=20)]
    prompts = [*PROMPTS, "beams"]
    wanted = all_of(load(tiny_model).generate(prompts, work, use_tqdm=False))
    llm = load(tiny_model, speculative_config={"method": "ngram", "prompt_lookup_min": 1, "adaptive": False})
    assert all_of(llm.generate(prompts, work, use_tqdm=False)) == wanted
