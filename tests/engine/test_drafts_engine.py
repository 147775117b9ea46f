"""Guesses at tokens to come change no bit of an answer (CPU kernels, a small model)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.engine import core
from octavo.scheduler.groups import Sequence
from octavo.speculation.drafter import DraftedSequence, Drafter
from octavo.speculation.speculator import Speculator

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


def load(folder: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "kernels": "cpu",
        "block_size": 4,
        "num_gpu_blocks_override": 200,
        "max_num_seqs": 16,
        "watermark": 0.0,
    }
    return LLM(str(folder), max_model_len=128, **{**defaults, **options})


def everything(outputs: list[RequestOutput]) -> Any:
    return [
        [(o.token_ids, o.text, o.finish_reason, o.cumulative_logprob, o.logprobs) for o in output.outputs]
        for output in outputs
    ]


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
    assert everything(found) == everything(outputs)
    assert drafter.proposed > 50
    if not options:
        assert llm.llm_engine.core.times.steps < max(len(c.token_ids) for o in outputs for c in o.outputs)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batching": "prefill_first", "max_num_batched_tokens": 128},
        {"num_gpu_blocks_override": 40, "preemption_mode": "recompute", "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 40, "preemption_mode": "swap", "num_host_blocks_override": 100},
    ],
    ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_drafters_of_the_option(tiny_model: Path, plain: Any, method: str, options: dict[str, Any]) -> None:
    llm = load(tiny_model, speculative_config={"method": method, "adaptive": False}, **options)
    assert everything(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == plain
    assert everything(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == plain  # ``suffix`` knows the answers now
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and 0 < stats.accepted_tokens <= stats.draft_tokens


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Any:
    """The answers without drafts."""
    return everything(load(tiny_model).generate(PROMPTS, PARAMS, use_tqdm=False))
