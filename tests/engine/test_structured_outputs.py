"""Structured outputs as a program asks for them: by ``LLM``, by ``AsyncLLM``, in chats; and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from octavo import LLM, AsyncLLM, InvalidRequestError, SamplingParams, StructuredOutputsParams
from octavo.core.request import Generate

OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 200, "num_threads": 1, "max_num_seqs": 16}
#: Llguidance works on it for minutes.
SLOW = StructuredOutputsParams(
    json={"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(20)]}
)


class City(BaseModel):
    """What a schema is made of."""

    name: str
    inhabitants: int


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    yield LLM(str(tiny_model), structured_outputs_compile_seconds=0.5, **OPTIONS)


def hot(form: StructuredOutputsParams, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=3, max_tokens=200, structured_outputs=form, **more)


def test_a_class_of_pydantic_is_a_schema(llm: LLM) -> None:
    form = StructuredOutputsParams(json=City, whitespace_pattern=" ?")  # type: ignore[arg-type]
    # Random weights would write texts of any length.
    assert isinstance(form.json, dict)
    form.json["properties"]["name"]["maxLength"] = 5
    form.json["properties"]["inhabitants"]["maximum"] = 10_000
    City.model_validate_json(llm.generate("a city", hot(form))[0].outputs[0].text)


def test_a_chat_has_the_form_too(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="[a-f]{4}")
    output = llm.chat([{"role": "user", "content": "hi"}], hot(form, n=3))[0]
    assert all(re.fullmatch("[a-f]{4}", completion.text) for completion in output.outputs)
    assert len(output.outputs) == 3


def test_the_core_gets_the_grammar_and_not_the_form(llm: LLM) -> None:
    params = hot(StructuredOutputsParams(regex="[a-f]{4}"))
    group = llm.llm_engine.inputs.process("a", "x", params).group
    assert isinstance(group.task, Generate)
    assert group.task.grammar is not None and group.task.params.structured_outputs is None
    assert params.structured_outputs is not None
    again = llm.llm_engine.inputs.process("b", "x", params).group
    assert isinstance(again.task, Generate) and again.task.grammar is group.task.grammar


def test_a_bad_form_is_refused_with_its_place(llm: LLM) -> None:
    for form, words in (
        (
            StructuredOutputsParams(json={"properties": {"a": {"not": {"minimum": 3}}}}, strict=True),
            "json at /properties/a/not: not cannot be enforced",
        ),
        (SLOW, "takes more than 0.5 seconds"),
    ):
        with pytest.raises(InvalidRequestError, match=re.escape(words)):
            llm.generate("x", hot(form))
    assert llm.generate("x", hot(StructuredOutputsParams(choice=["a"])))[0].outputs[0].text == "a"


def test_a_form_that_was_changed_is_checked_again(llm: LLM) -> None:
    params = hot(StructuredOutputsParams(choice=["a"]))
    assert params.structured_outputs is not None
    params.structured_outputs.regex = "b"
    with pytest.raises(InvalidRequestError, match="not regex and choice"):
        llm.generate("x", params)


@pytest.mark.slow
def test_a_slow_grammar_does_not_stop_the_event_loop(tiny_model: Path) -> None:
    async def run() -> tuple[float, int, str]:
        async with AsyncLLM(str(tiny_model), structured_outputs_compile_seconds=1.0, **OPTIONS) as llm:
            await collect(llm, "warm", StructuredOutputsParams(choice=["a"]))
            slow = asyncio.ensure_future(collect(llm, "slow", SLOW))
            longest, answered = 0.0, 0
            while not slow.done():
                start = time.monotonic()
                await asyncio.sleep(0.005)
                longest = max(longest, time.monotonic() - start)
                found = await collect(llm, f"beside{answered}", StructuredOutputsParams(choice=[str(answered)]))
                assert found == str(answered)
                answered += 1
            try:
                await slow
            except InvalidRequestError as e:
                return longest, answered, str(e)
            raise AssertionError("the slow grammar was not refused")

    longest, answered, message = asyncio.run(run())
    assert answered >= 3 and "takes more than 1 seconds" in message
    assert longest < 0.9  # of a second and more that it was compiled


async def collect(llm: AsyncLLM, request_id: str, form: StructuredOutputsParams) -> str:
    text = ""
    async for output in llm.generate(request_id, "x", hot(form)):
        text = output.outputs[0].text
    return text


def test_without_a_tokenizer_there_is_no_form(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), skip_tokenizer_init=True, **OPTIONS)
    with pytest.raises(InvalidRequestError, match="structured_outputs needs a tokenizer"):
        llm.generate({"prompt_token_ids": [5]}, hot(StructuredOutputsParams(choice=["a"])))


def test_json_text_is_a_schema(llm: LLM) -> None:
    form = StructuredOutputsParams(json=json.dumps({"enum": ["a", "b"]}))
    assert json.loads(llm.generate("x", hot(form))[0].outputs[0].text) in ("a", "b")


def test_a_form_of_which_nothing_may_be_said_ends_with_the_reason_and_others_go_on(llm: LLM) -> None:
    form = StructuredOutputsParams(choice=["a"])
    outputs = llm.generate(["x", "y"], [hot(form, bad_words=["a"]), hot(form)])
    refused, other = (output.outputs[0] for output in outputs)
    assert refused.finish_reason == "error" and refused.invalid is not None
    assert {"bad_words", "structured_outputs.choice"} <= set(re.findall(r"[a-z_.]+", refused.error or ""))
    assert other.text == "a" and other.invalid is None


def test_parameters_that_exclude_every_token_are_refused_before_a_step(llm: LLM) -> None:
    [token] = llm.get_tokenizer().encode("a", add_special_tokens=False)
    eos = llm.llm_engine.inputs.eos_token_ids[0]
    for params, name in (
        (SamplingParams(allowed_token_ids=[token], bad_words=["a"]), "bad_words"),
        (SamplingParams(allowed_token_ids=[eos], min_tokens=2), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=[eos], min_tokens=2, ignore_eos=True), "allowed_token_ids"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{name} and"):
            llm.llm_engine.inputs.process("a", "x", params)
