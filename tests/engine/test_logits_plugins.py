"""Logits processors that an engine is started with, and the arguments by which requests ask for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, LogitsProcessorPlugin, SamplingParams
from octavo.core.errors import ConfigError, InvalidRequestError

HERE = "tests.engine.test_logits_plugins"


class Only(LogitsProcessorPlugin):
    """Allows the tokens from one id to another."""

    arguments = ("lowest", "highest")

    def make(self, params: SamplingParams) -> Any:
        """The processor of a request."""
        given = params.extra_args or {}
        lowest, highest = given.get("lowest", 0), given.get("highest", 255)
        if not 0 <= lowest <= highest:
            raise ValueError(f"lowest ({lowest}) must not be above highest ({highest})")

        def only(output_ids: list[int], logits: Any) -> Any:
            logits[:lowest] = logits[highest + 1 :] = float("-inf")
            return logits

        return only


class Even(LogitsProcessorPlugin):
    """Allows even token ids."""

    arguments = ("even",)

    def make(self, params: SamplingParams) -> Any:
        """The processor of a request."""

        def even(output_ids: list[int], logits: Any) -> Any:
            logits[1::2] = float("-inf")
            return logits

        return even


class Nameless(LogitsProcessorPlugin):
    """Has no argument."""

    def make(self, params: SamplingParams) -> Any:
        """The processor of a request."""


BOTH = [f"{HERE}:Only", f"{HERE}:Even"]
PLAIN: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}


def load(model: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_model_len": 96, "logits_processors": BOTH}
    return LLM(str(model), **{**defaults, **options})


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_a_request_gets_the_processors_whose_arguments_it_has(tiny_model: Path) -> None:
    llm = load(tiny_model)
    asked: list[dict[str, Any] | None] = [None, {"lowest": 40, "highest": 60}, {"even": True, "highest": 20}, {}]
    params = [SamplingParams(**PLAIN, extra_args=given) for given in asked]
    plain, some, both, none = llm.generate(["abc"] * 4, params, use_tqdm=False)
    assert tokens(plain) == tokens(none)
    assert set(tokens(some)) <= set(range(40, 61)) and len(set(tokens(some))) > 1
    assert set(tokens(both)) <= set(range(0, 21, 2)) and len(set(tokens(both))) > 1
    alone = load(tiny_model, logits_processors=None)
    same = alone.generate("abc", SamplingParams(**PLAIN), use_tqdm=False)[0]
    assert (tokens(same), same.outputs[0].logprobs) == (tokens(plain), plain.outputs[0].logprobs)


def test_answers_are_the_same_beside_preemptions_and_drafts(tiny_model: Path) -> None:
    prompts = ["abc", "abcd" * 6, "xyz"]
    params = [SamplingParams(**PLAIN, extra_args={"lowest": 30, "highest": 90}) for _ in prompts]
    wanted = [tokens(load(tiny_model).generate(p, q, use_tqdm=False)[0]) for p, q in zip(prompts, params, strict=True)]
    for options in ({"num_gpu_blocks_override": 6, "watermark": 0.0}, {"speculative_config": {"method": "ngram"}}):
        found = load(tiny_model, **options).generate(prompts, params, use_tqdm=False)
        assert [tokens(output) for output in found] == wanted
        preempted = sum(output.metrics.num_preemptions for output in found)
        assert bool(preempted) == ("watermark" in options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top": 1}, "extra_args has 'top', but no logits processor takes it; taken: 'lowest', 'highest', 'even'"),
        ({"lowest": 9, "highest": 3}, r"extra_args: .*: lowest \(9\) must not be above highest \(3\)"),
        ([1], r"extra_args must be a mapping, not \[1\]"),
    ],
)
def test_wrong_arguments_are_refused(tiny_model: Path, given: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        load(tiny_model).generate("abc", SamplingParams(extra_args=given), use_tqdm=False)


def test_arguments_without_a_plugin_are_refused(tiny_model: Path) -> None:
    with pytest.raises(InvalidRequestError, match="taken: none: the option logits_processors loads some"):
        load(tiny_model, logits_processors=None).generate("abc", SamplingParams(extra_args={"a": 1}), use_tqdm=False)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["Only"], "unknown logits processor 'Only'"),
        ([f"{HERE}:load"], "is not a class derived from octavo.LogitsProcessorPlugin"),
        ([f"{HERE}:Nameless"], "must name its arguments"),
        ([f"{HERE}:Even", f"{HERE}:Even"], "has the argument 'even' of one before it"),
    ],
)
def test_what_is_no_plugin_is_refused(tiny_model: Path, names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tiny_model, logits_processors=names)


def test_an_engine_in_a_process_of_its_own_loads_them_too(tiny_model: Path) -> None:
    async def answer() -> list[int]:
        options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_model_len": 96}
        async with AsyncLLM(str(tiny_model), logits_processors=BOTH, **options) as llm:
            params = SamplingParams(**PLAIN, extra_args={"even": True})
            last = None
            async for output in llm.generate("a", "abc", params):
                last = output
            return tokens(last)

    wanted = load(tiny_model).generate("abc", SamplingParams(**PLAIN, extra_args={"even": True}), use_tqdm=False)
    assert asyncio.run(answer()) == tokens(wanted[0])
