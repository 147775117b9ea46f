"""Requests of several sequences: parallel sampling, best of many, beam search; what they share and what they give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchParams, InvalidRequestError, SamplingParams
from octavo.core.failures import KV_CACHE
from octavo.engine.llm_engine import LLMEngine

BLOCK = 16


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> LLM:
    return LLM(str(demo_model), dtype="float32", num_gpu_blocks_override=300, max_model_len=512)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    """For what does not depend on the network."""
    return LLM(str(tiny_model), dtype="float32", num_gpu_blocks_override=64)


@pytest.fixture(autouse=True)
def nothing_is_held_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"llm", "tiny"} & set(request.fixturenames):
        engine = request.getfixturevalue(name).llm_engine
        assert engine.core.blocks.state.used == 0
        assert not engine.has_unfinished_requests()


def tokens(count: int) -> list[int]:
    return [3 + 37 * i % 250 for i in range(count)]


# --- parallel sampling ----------------------------------------------------------------------------------------------


def test_eight_samples_are_the_eight_of_single_requests_with_their_seeds(tiny: LLM) -> None:
    together = tiny.generate("Once upon a time", SamplingParams(n=8, seed=40, max_tokens=24), use_tqdm=False)[0]
    alone = [
        tiny.generate("Once upon a time", SamplingParams(seed=40 + i, max_tokens=24), use_tqdm=False)[0].outputs[0]
        for i in range(8)
    ]
    assert [o.text for o in together.outputs] == [o.text for o in alone]
    assert [o.index for o in together.outputs] == list(range(8))
    assert len({o.text for o in together.outputs}) > 4


def blocks_in_use(engine: LLMEngine) -> Iterator[int]:
    while engine.has_unfinished_requests():
        engine.step()
        yield engine.core.blocks.state.used


@pytest.mark.parametrize("prompt_length", [5, 16, 32, 45])
@pytest.mark.parametrize("n", [1, 2, 8])
def test_samples_use_as_many_blocks_as_the_sharing_predicts(tiny: LLM, n: int, prompt_length: int) -> None:
    engine = tiny.llm_engine
    engine.reset_prefix_cache()
    params = SamplingParams(n=n, seed=0, max_tokens=20, ignore_eos=True)
    engine.add_request("shared", {"prompt_token_ids": tokens(prompt_length)}, params, streaming=False)
    used = list(blocks_in_use(engine))
    assert len(used) == 20
    for step, count in enumerate(used[:-1]):
        held = prompt_length + step  # the token just sampled has no entry yet
        if step == 0:
            expected = -(-held // BLOCK)  # all of the prompt is shared
        else:
            expected = prompt_length // BLOCK + n * (-(-held // BLOCK) - prompt_length // BLOCK)
        assert count == expected, f"after step {step}"


def test_the_prompt_of_several_samples_is_computed_once(tiny: LLM) -> None:
    engine = tiny.llm_engine
    engine.reset_prefix_cache()
    before = engine.core.scheduler.stats().prefill_tokens
    tiny.generate({"prompt_token_ids": tokens(50)}, SamplingParams(n=6, max_tokens=4), use_tqdm=False)
    assert engine.core.scheduler.stats().prefill_tokens - before == 50


def test_best_of_returns_the_likeliest_best_first(tiny: LLM) -> None:
    params: dict[str, Any] = {"seed": 3, "max_tokens": 12, "ignore_eos": True}
    every = tiny.generate("The sea", SamplingParams(n=6, logprobs=0, **params), use_tqdm=False)[0].outputs
    ranked = sorted(every, key=lambda o: -(o.cumulative_logprob or 0.0))
    best = tiny.generate("The sea", SamplingParams(n=2, best_of=6, **params), use_tqdm=False)[0].outputs
    assert [o.token_ids for o in best] == [o.token_ids for o in ranked[:2]]
    assert [o.cumulative_logprob for o in best] == [o.cumulative_logprob for o in ranked[:2]]
    assert [o.index for o in best] == [0, 1]
    assert best[0].logprobs is None


def test_best_of_below_n_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="best_of"):
        SamplingParams(n=3, best_of=2)


def test_a_stop_text_ends_one_sample_and_the_others_go_on(tiny: LLM) -> None:
    plain = tiny.generate("Count:", SamplingParams(n=4, seed=1, max_tokens=40), use_tqdm=False)[0].outputs
    stop = next(word for o in plain for word in re.findall("[!-~]{2}", o.text))
    stopped = tiny.generate("Count:", SamplingParams(n=4, seed=1, max_tokens=40, stop=stop), use_tqdm=False)[0].outputs
    assert any(o.stop_reason == stop for o in stopped)
    for before, after in zip(plain, stopped, strict=True):
        assert after.text == before.text.split(stop)[0]


# --- beam search ----------------------------------------------------------------------------------------------------


def against_transformers(llm: LLM, reference: Any, prompt: list[int], params: BeamSearchParams) -> None:
    ours = llm.beam_search({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs
    theirs = reference.generate(
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        early_stopping=params.early_stopping,
        length_penalty=params.length_penalty,
        output_scores=True,
        return_dict_in_generate=True,
    )
    assert len(ours) == params.beam_width
    for hypothesis, sequence, score in zip(ours, theirs.sequences, theirs.sequences_scores, strict=True):
        generated = sequence[len(prompt) :].tolist()
        assert generated[: len(hypothesis.token_ids)] == hypothesis.token_ids  # what follows is padding
        # Sums of float32 logprobs, which a negative penalty multiplies.
        assert hypothesis.score == pytest.approx(score.item(), abs=1e-4, rel=1e-4)


BEAMS = [
    BeamSearchParams(beam_width=2, max_tokens=24),
    BeamSearchParams(beam_width=4, max_tokens=24, early_stopping=True),
    BeamSearchParams(beam_width=4, max_tokens=20, length_penalty=2.0),
    BeamSearchParams(beam_width=8, max_tokens=16, early_stopping="never", length_penalty=0.5),
    BeamSearchParams(beam_width=8, max_tokens=16, early_stopping=True, length_penalty=-1.0),
]


@pytest.mark.slow  # by default those of a tiny network are
@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("The capital of France is", BEAMS[1]),
        ("def fibonacci(n):", BEAMS[2]),
        ("Q: What is 2 + 2?\nA:", BEAMS[3]),
    ],
    ids=str,
)
def test_beams_are_those_of_transformers(llm: LLM, reference: Any, prompt: str, params: BeamSearchParams) -> None:
    against_transformers(llm, reference, llm.get_tokenizer().encode(prompt), params)


@pytest.fixture(scope="module")
def tiny_reference(tiny_model: Path) -> Any:
    """The tiny model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.mark.parametrize(
    "params",
    [
        *BEAMS,
        *(
            pytest.param(
                BeamSearchParams(beam_width=width, max_tokens=20, early_stopping=early), marks=pytest.mark.slow
            )
            for width in (2, 4, 8)
            for early in (True, False)
        ),
    ],
    ids=str,
)
def test_beams_of_a_tiny_random_model_that_often_ends(tiny: LLM, tiny_reference: Any, params: BeamSearchParams) -> None:
    for length in (3, 17, 30):
        against_transformers(tiny, tiny_reference, [3 + (7 * i) % 40 for i in range(length)], params)


def test_beams_share_their_common_beginning(tiny: LLM) -> None:
    engine = tiny.llm_engine
    engine.reset_prefix_cache()
    params = BeamSearchParams(beam_width=4, max_tokens=40, ignore_eos=True)
    engine.add_request("beams", {"prompt_token_ids": tokens(40)}, params)
    most = max(blocks_in_use(engine))
    assert most < 4 * (-(-80 // BLOCK))
    # Two full blocks of prompt are shared by all; beams that part late share more.
    assert most <= 2 + 4 * 3


def test_beam_search_and_sampling_run_in_one_batch(tiny: LLM) -> None:
    beams, greedy = BeamSearchParams(beam_width=3, max_tokens=10), SamplingParams(temperature=0.0, max_tokens=10)
    both = tiny.generate(["A tree is", "A river is"], [beams, greedy], use_tqdm=False)
    assert len(both[0].outputs) == 3
    assert both[0].outputs[0].score is not None
    assert both[1].outputs[0].text == tiny.generate("A river is", greedy, use_tqdm=False)[0].outputs[0].text


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 1000}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": 10**400}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping"),
    ],
)
def test_bad_beam_search_parameters_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        BeamSearchParams(**fields)


def test_a_group_that_can_never_fit_is_ignored_with_the_blocks_it_needs(tiny_model: Path) -> None:
    small = LLM(str(tiny_model), num_gpu_blocks_override=4, max_model_len=64)
    outputs = small.generate(["Hello", "Hello"], [SamplingParams(n=6), SamplingParams()], use_tqdm=False)
    assert {o.finish_reason for o in outputs[0].outputs} == {"ignored"}
    assert "needs at least 6 KV cache blocks, but there are 4" in (outputs[0].outputs[0].error or "")
    assert outputs[1].outputs[0].finish_reason in ("stop", "length")


def test_a_group_that_outgrows_all_blocks_ends_with_an_error_and_the_others_finish(tiny_model: Path) -> None:
    small = LLM(str(tiny_model), num_gpu_blocks_override=8, max_model_len=128)
    params = [SamplingParams(n=5, max_tokens=100, ignore_eos=True), SamplingParams(max_tokens=40, ignore_eos=True)]
    outputs = small.generate(["Hello", "Hello"], params, use_tqdm=False)
    assert {o.finish_reason for o in outputs[0].outputs} == {"error"}
    assert "outgrown the KV cache of 8 blocks" in (outputs[0].outputs[0].error or "")
    assert [o.error_kind for o in outputs[0].outputs] == [KV_CACHE] * 5 and outputs[0].outputs[0].exceeds_kv_cache
    assert outputs[1].outputs[0].finish_reason == "length" and not outputs[1].outputs[0].exceeds_kv_cache
    assert small.llm_engine.core.blocks.state.used == 0
