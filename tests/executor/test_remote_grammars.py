"""Grammars with several workers: each compiles, each masks; tokens that a grammar forces come back with the plans."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams
from tests.grammar_cases import PERSON, generate, json_form, load, regex_form

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("octavo._cpu") is None, reason="the compiled kernels were not built"
)
FORMS = [json_form(PERSON), None, regex_form("(one|two|three)( hundred)?"), json_form({"type": "array"})]
PROMPTS = ["The quick brown fox", "a", "lists of numbers: 1, 2, 3", "Once upon a time in a land"]
PARAMS = [
    SamplingParams(temperature=1.2, seed=1, max_tokens=150),
    SamplingParams(temperature=0.9, seed=2, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.5, seed=3, max_tokens=60, n=2, logprobs=2),
    SamplingParams(temperature=1.5, seed=4, max_tokens=40),
]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> Any:
    llm = load(tiny_model, jump_forward=False)
    return [answers(generate(llm, [p], [q], [g]))[0] for p, q, g in zip(PROMPTS, PARAMS, FORMS, strict=True)]


def answers(outputs: list[Any]) -> Any:
    return [[(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    ("ranks", "stages", "options"),
    [
        (1, 2, {}),
        pytest.param(2, 1, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"num_gpu_blocks_override": 50}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"speculative_config": {"method": "ngram", "adaptive": False}}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"async_scheduling": True}, marks=pytest.mark.slow),
        pytest.param(1, 2, {"async_scheduling": True, "max_num_batched_tokens": 16}, marks=pytest.mark.slow),
    ],
)
def test_the_number_of_workers_changes_no_bit(
    tiny_model: Path, alone: Any, ranks: int, stages: int, options: dict[str, Any]
) -> None:
    llm = load(
        tiny_model, device="cpu", tensor_parallel_size=ranks, pipeline_parallel_size=stages, num_threads=2, **options
    )
    try:
        assert answers(generate(llm, PROMPTS, PARAMS, FORMS)) == alone
        assert answers(generate(llm, PROMPTS * 3, PARAMS * 3, FORMS * 3)) == alone * 3
    finally:
        llm.llm_engine.core.shutdown()
