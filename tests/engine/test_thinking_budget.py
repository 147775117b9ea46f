"""Reasoning that has used up its tokens is closed, with the same bits whatever the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, InvalidRequestError, SamplingParams
from octavo.core.model_config import ThinkingBudget
from octavo.engine.chat_template import REASONING_MARKS
from octavo.sampling.logits_processors import ThinkingMask
from tests.grammar_cases import PERSON, json_form, load
from tests.special_model import make_special_model

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

DRAFTED = {"speculative_config": {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}}
PREEMPTED = {"num_gpu_blocks_override": 50, "enable_prefix_caching": False}
#: Prompts that end within reasoning, and one after which the model may begin it.
PROMPTS = ["Why? <think>", "Why not? <think>\n", "abc abc abc<think>", "abc"]


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("special") / "model"
    make_special_model(tiny_model, folder)
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return load(model)


@pytest.fixture(scope="module")
def marks(llm: LLM) -> tuple[int, int]:
    start, end = (llm.get_tokenizer().convert_tokens_to_ids(text) for text in ("<think>", "</think>"))
    assert isinstance(start, int) and isinstance(end, int)
    return start, end


def test_what_ends_the_reasoning_without_its_mark_ends_the_budget_too() -> None:
    start, end, call = 1, 2, 3
    output = [7, 7, call, 7, 7]
    for interrupts, ends in ([], True), ([call], False):
        mask = ThinkingMask(ThinkingBudget(3, [start], end, True, interrupts), num_prompt=1, vocab_size=8)
        assert (mask.bitmask(np.array([0, *output], np.int32)) is not None) is ends


def work(marks: tuple[int, int], budgets: list[int | None]) -> tuple[list[str], list[SamplingParams]]:
    """Each prompt with each budget; the first tokens are biased towards the marks."""
    params = [
        SamplingParams(
            temperature=1.0 if i % 2 else 0.0,
            seed=i,
            max_tokens=40,
            ignore_eos=True,
            thinking_token_budget=budget,
            logit_bias={marks[0]: 6.0, marks[1]: 2.0} if i % 3 else {marks[0]: 6.0, marks[1]: -100.0},
        )
        for i, budget in enumerate(b for b in budgets for _ in PROMPTS)
    ]
    return PROMPTS * len(budgets), params


def thoughts(prompt: str, ids: list[int], marks: tuple[int, int]) -> int:
    """Tokens of reasoning in an output."""
    inside, count = "<think>" in prompt, 0
    for token in ids:
        if inside:
            inside = token != marks[1]
            count += inside
        else:
            inside = token == marks[0]
    return count


def everything(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


BUDGETS: list[int | None] = [0, 1, 7, 12, -1, None]


def test_reasoning_has_no_more_tokens_than_its_budget(llm: LLM, marks: tuple[int, int]) -> None:
    prompts, params = work(marks, BUDGETS)
    free = 0
    for prompt, given, (ids, _, _) in zip(prompts, params, everything(llm, prompts, params), strict=True):
        count, budget = thoughts(prompt, ids, marks), given.thinking_token_budget
        if budget in (None, -1):
            free = max(free, count)
        else:
            assert count <= budget, (prompt, budget, ids)
            assert marks[1] in ids
    assert free > 20, "without a budget there is more"


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {**PREEMPTED, "preemption_mode": "recompute"},
        DRAFTED,
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {},
                {"max_num_batched_tokens": 16},
                {"num_gpu_blocks_override": 50, "preemption_mode": "swap", "num_host_blocks_override": 200},
                {**DRAFTED, **PREEMPTED, "preemption_mode": "recompute"},
                {**DRAFTED, "async_scheduling": True},
            )
        ),
    ],
    ids=str,
)
def test_bit_for_bit_the_same_alone_and_in_company(
    model: Path, llm: LLM, marks: tuple[int, int], options: dict[str, Any]
) -> None:
    prompts, params = work(marks, BUDGETS)
    pairs = zip(prompts, params, strict=True)
    alone = [found for prompt, given in pairs for found in everything(llm, [prompt], [given])]
    assert everything(load(model, **options), prompts, params) == alone


def test_the_end_is_set_whatever_other_parameters_forbid(llm: LLM, marks: tuple[int, int]) -> None:
    letter = llm.get_tokenizer().encode("a", add_special_tokens=False)
    params = SamplingParams(max_tokens=6, thinking_token_budget=2, allowed_token_ids=letter, ignore_eos=True)
    assert everything(llm, PROMPTS[:1], [params])[0][0] == letter * 2 + [marks[1]] + letter * 3


def test_the_form_of_the_answer_begins_after_the_end(llm: LLM, marks: tuple[int, int]) -> None:
    form = json_form(PERSON, begin_after=[marks[1]])
    params = SamplingParams(
        max_tokens=150, temperature=1.0, seed=1, thinking_token_budget=4, structured_outputs=form,
        logit_bias={marks[1]: -100.0},
    )  # fmt: skip
    ids, text, reason = everything(llm, PROMPTS[:1], [params])[0]
    assert ids[4] == marks[1] and text[4:].startswith('{"first_name":') and reason == "stop"


def test_a_model_that_marks_no_reasoning_has_no_more_than_any_budget(tiny_model: Path) -> None:
    llm = load(tiny_model)
    plain = SamplingParams(max_tokens=8, temperature=0.0)
    limited = SamplingParams(max_tokens=8, temperature=0.0, thinking_token_budget=0)
    assert everything(llm, ["abc"], [plain]) == everything(llm, ["abc"], [limited])


def test_an_end_that_is_no_token_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(llm.get_tokenizer().chat_templates, "default", REASONING_MARKS["granite"].start)
    with pytest.raises(InvalidRequestError, match=r"thinking_token_budget.*'Here is my response:'"):
        llm.generate("abc", SamplingParams(thinking_token_budget=3), use_tqdm=False)


@pytest.mark.parametrize("wrong", [-2, 1.5, "3"])
def test_what_is_no_budget_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=wrong)
