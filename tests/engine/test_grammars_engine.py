"""Outputs held to a grammar: valid, and bit for bit the same in any company (CPU kernels, small models)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.core.sampling_params import Grammar
from octavo.grammar.compiler import GrammarCompiler
from tests.grammar_cases import PERSON, generate, json_form, load, regex_form
from tests.whole_outputs import all_of

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

WORDS = regex_form("(the quick brown fox|the lazy dog){1,3}")
CALL = StructuredOutputsParams(grammar='start: "call(" /[a-z]{1,5}/ ", argument=" /[0-9]{1,4}/ ")"')
NESTED = json_form({"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2})
FORMS: list[StructuredOutputsParams | None] = [json_form(PERSON), None, WORDS, CALL, None, NESTED]
PROMPTS = ["The quick brown fox", "a", "lists of numbers: 1, 2, 3", "Once upon a time in a land", "x = y +", "{"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=150),
    SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.5, seed=2, max_tokens=60, repetition_penalty=1.3),
    SamplingParams(temperature=1.2, seed=3, max_tokens=60, top_p=0.9, n=2, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=45, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=4, max_tokens=170),
]


def steps(llm: LLM) -> int:
    return llm.llm_engine.core.times.steps


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> Any:
    """Each request alone, every token of it sampled in a step of its own."""
    llm = load(tiny_model, jump_forward=False)
    return [all_of(generate(llm, [p], [q], [g]))[0] for p, q, g in zip(PROMPTS, PARAMS, FORMS, strict=True)]


def test_the_outputs_are_of_their_form(alone: Any) -> None:
    texts = [completions[0][1] for completions, _ in alone]
    Draft202012Validator(PERSON).validate(json.loads(texts[0]))
    assert re.fullmatch("(the quick brown fox|the lazy dog){1,3}", texts[2])
    assert all(re.fullmatch(r"call\([a-z]{1,5}, argument=[0-9]{1,4}\)", o[1]) for o in alone[3][0])
    for person in json.loads(texts[5]):
        Draft202012Validator(PERSON).validate(person)
    assert [completions[0][2] for completions, _ in alone] == ["stop", "length", "stop", "stop", "length", "stop"]


PREEMPTED = {"num_gpu_blocks_override": 50, "enable_prefix_caching": False}
SWAPPED = {"num_gpu_blocks_override": 50, "preemption_mode": "swap", "num_host_blocks_override": 200}
DRAFTED = {"speculative_config": {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}}


@pytest.mark.parametrize(
    "options",
    [
        {"jump_forward": False},
        {"batching": "prefill_first", "max_num_batched_tokens": 200},
        {"async_scheduling": True},
        {**PREEMPTED, "preemption_mode": "recompute"},
        SWAPPED,
        DRAFTED,
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {},
                {"max_num_batched_tokens": 16},
                {"kernels": "cpu", "num_threads": 2, "max_num_seqs": 3},
                {**PREEMPTED, "preemption_mode": "recompute", "async_scheduling": True},
                {**SWAPPED, "jump_forward": False},
                {**DRAFTED, "jump_forward": False},
                {**DRAFTED, **SWAPPED},
                {**DRAFTED, "async_scheduling": True},
            )
        ),
    ],
    ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_bit_for_bit_the_same(tiny_model: Path, alone: Any, options: dict[str, Any]) -> None:
    llm = load(tiny_model, **options)
    outputs = generate(llm, PROMPTS * 2, PARAMS * 2, FORMS * 2)
    assert all_of(outputs) == alone * 2
    assert (sum(o.metrics.num_preemptions for o in outputs) > 0) == ("num_gpu_blocks_override" in options)
    again = generate(llm, PROMPTS[::-1], PARAMS[::-1], FORMS[::-1])[::-1]
    assert all_of(again) == alone, "the grammars are there already"


def test_neighbours_do_not_change_what_is_not_bound(tiny_model: Path, alone: Any) -> None:
    llm = load(tiny_model)
    free = [i for i, form in enumerate(FORMS) if form is None]
    for neighbours in (None, CALL, WORDS):
        forms = [None if i in free else neighbours for i in range(len(FORMS))]
        found = all_of(generate(llm, PROMPTS, PARAMS, forms))
        assert [found[i] for i in free] == [alone[i] for i in free]


def test_forced_tokens_need_no_steps(tiny_model: Path) -> None:
    counts = []
    for jump_forward in (False, True):
        llm = load(tiny_model, jump_forward=jump_forward)
        [output] = generate(llm, PROMPTS[:1], PARAMS[:1], FORMS[:1])
        counts.append(steps(llm))
        assert output.outputs[0].finish_reason == "stop"
    assert counts[1] < counts[0] / 2


def answer(llm: LLM, form: StructuredOutputsParams, params: SamplingParams, prompt: Any = "a") -> Any:
    [output] = generate(llm, [prompt], [params], [form])
    return output.outputs[0]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return load(tiny_model)


HOT = SamplingParams(temperature=1.5, seed=5, max_tokens=60)
ENDLESS = regex_form("[a-z]+")


def test_an_end_by_max_tokens_within_the_grammar_says_length(llm: LLM) -> None:
    for max_tokens in (1, 5, 20, 23):
        found = answer(llm, FORMS[0] or WORDS, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        assert found.finish_reason == "length" and len(found.token_ids) == max_tokens
        assert found.text == '{"first_name":"","favourite_number"'[:max_tokens]


def test_stop_tokens_and_stop_texts_within_forced_text_end_the_output(llm: LLM) -> None:
    stop = answer(llm, FORMS[0] or WORDS, SamplingParams(temperature=0.0, max_tokens=99, stop="ite_num"))
    assert (stop.text, stop.finish_reason, stop.stop_reason) == ('{"first_name":"","favour', "stop", "ite_num")
    [token] = llm.get_tokenizer().encode("v", add_special_tokens=False)
    params = SamplingParams(temperature=0.0, max_tokens=99, stop_token_ids=[token])
    stop = answer(llm, FORMS[0] or WORDS, params)
    assert (stop.text, stop.finish_reason, stop.stop_reason) == ('{"first_name":"","fa', "stop", token)


def test_ignore_eos_goes_on_as_long_as_the_grammar_allows(llm: LLM) -> None:
    found = answer(llm, ENDLESS, SamplingParams(temperature=1.5, seed=5, max_tokens=60, ignore_eos=True))
    assert re.fullmatch("[a-z]{60}", found.text) and found.finish_reason == "length"
    done = answer(llm, CALL, SamplingParams(temperature=1.5, seed=5, max_tokens=60, ignore_eos=True))
    assert re.fullmatch(r"call\([a-z]{1,5}, argument=[0-9]{1,4}\)", done.text) and len(done.token_ids) == 60
    assert {*done.token_ids[len(done.text) :]} == {llm.get_tokenizer().eos_token_id}, "what follows has no text"


def test_min_tokens_holds_where_the_grammar_may_go_on(llm: LLM) -> None:
    for least in (0, 40):
        hot = [SamplingParams(temperature=1.5, seed=s, max_tokens=99, min_tokens=least) for s in range(16)]
        found = [o.outputs[0] for o in generate(llm, ["a"] * 16, hot, [ENDLESS] * 16)]
        assert all(re.fullmatch("[a-z]+", o.text) for o in found)
        assert (min(len(o.token_ids) for o in found) >= 40) == (least == 40)
    short = answer(llm, regex_form("yes"), SamplingParams(temperature=0.0, max_tokens=99, min_tokens=40))
    assert (short.text, short.finish_reason) == ("yes", "stop"), "it can do nothing but end"


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    """Those of the same tokens without a grammar, as the prompt's logprobs give them."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=99, logprobs=1)
    found = answer(llm, FORMS[0] or WORDS, params)
    ids = llm.get_tokenizer().encode("a") + found.token_ids
    [whole] = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    expected: Any = (whole.prompt_logprobs or [])[-len(found.token_ids) :]
    assert [p[t].logprob for p, t in zip(found.logprobs, found.token_ids, strict=True)] == [
        p[t].logprob for p, t in zip(expected, found.token_ids, strict=True)
    ]
    assert min(p[t].logprob for p, t in zip(found.logprobs, found.token_ids, strict=True)) < -3.0
    without = answer(llm, FORMS[0] or WORDS, SamplingParams(temperature=1.0, seed=3, max_tokens=99))
    assert without.token_ids == found.token_ids


def test_several_completions_and_the_best_of_them(llm: LLM) -> None:
    several = SamplingParams(temperature=1.5, seed=7, max_tokens=99, n=4)
    [output] = generate(llm, ["a"], [several], [CALL])
    alone = [answer(llm, CALL, SamplingParams(temperature=1.5, seed=7 + i, max_tokens=99)).token_ids for i in range(4)]
    assert [o.token_ids for o in output.outputs] == alone and len({o.text for o in output.outputs}) == 4
    best = SamplingParams(temperature=1.5, seed=7, max_tokens=99, n=1, best_of=4)
    assert answer(llm, CALL, best).token_ids in alone


def test_a_conflict_with_other_masks_is_an_error_of_the_request_alone(llm: LLM) -> None:
    digits = llm.get_tokenizer().encode("0123456789", add_special_tokens=False)
    params = [SamplingParams(temperature=0.0, max_tokens=9, allowed_token_ids=digits), HOT]
    outputs = generate(llm, ["a", "a"], params, [CALL, CALL])
    assert outputs[0].outputs[0].finish_reason == "error" and "masked" in (outputs[0].outputs[0].error or "")
    assert outputs[1].outputs[0].finish_reason == "stop"
    number = answer(llm, regex_form("[0-9a-z]{4}"), params[0])
    assert re.fullmatch("[0-9]{4}", number.text)


def test_what_a_request_edits_in_its_logits_is_done_beside_the_grammar(tiny_model: Path, llm: LLM) -> None:
    [token] = llm.get_tokenizer().encode("q", add_special_tokens=False)
    biased = SamplingParams(temperature=1.0, seed=1, max_tokens=20, logit_bias={token: 100.0}, min_tokens=20)
    assert set(answer(llm, ENDLESS, biased).text) == {"q"}

    def forbid(token_ids: list[int], logits: Any) -> Any:
        logits[token] = -float("inf")
        return logits

    calls = SamplingParams(temperature=0.0, max_tokens=20, logits_processors=[forbid], bad_words=["the lazy"])
    assert answer(llm, regex_form("q|rs"), calls).text == "rs"
    plain = load(tiny_model, jump_forward=False)
    for params in (biased, SamplingParams(temperature=1.5, seed=2, max_tokens=80, presence_penalty=1.0)):
        assert answer(plain, WORDS, params).token_ids == answer(llm, WORDS, params).token_ids


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, DRAFTED, {"num_gpu_blocks_override": 60}])
def test_a_grammar_may_begin_after_some_tokens(tiny_model: Path, llm: LLM, options: dict[str, Any]) -> None:
    marker = llm.get_tokenizer().encode("z", add_special_tokens=False)
    grammar = json_form(PERSON, begin_after=marker)
    bias = {marker[0]: 4.0}
    work = [SamplingParams(temperature=1.0, seed=s, max_tokens=190, logit_bias=bias) for s in range(8)]
    other = load(tiny_model, **options) if options else llm
    texts = []
    for found in generate(other, ["abc"] * 8, work, [grammar] * 8):
        text = found.outputs[0].text
        thought, begun, form = text.partition("z")
        assert begun and thought and found.outputs[0].finish_reason == "stop"
        Draft202012Validator(PERSON).validate(json.loads(form))
        texts.append(text)
    free = generate(llm, ["abc"] * 8, work, [None] * 8)
    for text, output in zip(texts, free, strict=True):
        assert output.outputs[0].text.startswith(text.partition("z")[0] + "z"), "free until then"


def test_a_grammar_that_workers_cannot_compile_is_an_error_of_its_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that exceeds the limits with the model's vocabulary, though not where it was checked."""
    compile_ = GrammarCompiler.compile
    wrong = Grammar("wrong", "start: /(a/")
    monkeypatch.setattr(GrammarCompiler, "compile", lambda self, form: wrong if form is WORDS else compile_(self, form))
    outputs = generate(llm, ["a"] * 3, [HOT] * 3, [WORDS, CALL, WORDS])
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "stop", "error"]
    assert "unclosed group" in (outputs[0].outputs[0].error or "")
