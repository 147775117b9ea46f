# ruff: noqa: RUF001 (tokens of DeepSeek)
"""A model that speaks Harmony over all routes: a random one, whose tokens are bytes and the format's special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from octavo.engine.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from octavo.server.tool_parsers import TOOL_PARSERS, find_tool_parser
from tests.server.running_server import Running, running
from tests.small_llama import make_llama

SPECIAL = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
#: A part of the template of gpt-oss by which it is known.
TEMPLATE = "{%- macro render_typescript_type(spec) -%}{%- endmacro -%}<|channel|>analysis<|message|>{{ messages }}"
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": WEATHER}}]
HI: Any = [{"role": "user", "content": "hi"}]
FORM: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


def make_model(folder: Path) -> Path:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=RETURN, chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    ends = tokenizer.token_to_id(RETURN), tokenizer.token_to_id(CALL)
    model = make_llama(
        0, vocab_size=256 + len(SPECIAL), max_position_embeddings=4096, eos_token_id=list(ends), bos_token_id=None
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("harmony")
    flags = ("--served-model-name", "gpt-oss", "--num-gpu-blocks-override", "500", "--num-threads", "1")
    own = ("--trust-request-chat-template",)
    with running(make_model(folder / "model"), folder / "log", *flags, *own) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def bias(server: Running) -> dict[str, Any]:
    """A random model has to be told to end its reasoning, and to write none of the format's tokens within it."""
    with server.http() as http:
        ids = {text: http.post("/tokenize", json={"prompt": text}).json()["tokens"][0] for text in (*SPECIAL, "\n")}
    weights = dict.fromkeys(map(str, ids.values()), -50) | {str(ids[END]): 3}
    return {"temperature": 1.0, "seed": 1, "logit_bias": weights}


def prompt_of(server: Running, **body: Any) -> str:
    with server.http() as http:
        tokens = http.post("/tokenize", json={"messages": HI, **body}).raise_for_status().json()["tokens"]
        text: str = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    return text


def test_the_prompt_is_written_in_harmony(server: Running) -> None:
    text = prompt_of(server, tools=TOOLS, reasoning_effort="high")
    assert text.startswith("<|start|>system<|message|>You are ChatGPT") and "\nReasoning: high\n" in text
    assert "type get_weather = (_: {\ncity: string,\ndays: number,\n}) => any;" in text
    assert text.endswith("<|start|>user<|message|>hi<|end|><|start|>assistant")
    assert prompt_of(server, reasoning_effort="none").endswith(
        "<|start|>assistant<|channel|>analysis<|message|><|end|>"
    )
    with server.http() as http:
        refused = http.post("/tokenize", json={"messages": HI, "chat_template_kwargs": {"builtin_tools": ["browser"]}})
    assert refused.status_code == 400 and "browser: the model's built-in tools" in refused.json()["error"]["message"]


@pytest.mark.parametrize("effort", ["low", "none"])
def test_structured_output_binds_the_final_channel(client: openai.OpenAI, bias: dict[str, Any], effort: Any) -> None:
    given: dict[str, Any] = {
        "model": "gpt-oss", "messages": HI, "max_tokens": 300, "response_format": FORM, "reasoning_effort": effort,
        "extra_body": bias,
    }  # fmt: skip
    answer = client.chat.completions.create(**given)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop" and isinstance(json.loads(choice.message.content or "")["a"], bool)
    thought = choice.message.to_dict().get("reasoning_content")
    assert bool(thought) == (effort == "low")
    chunks = list(client.chat.completions.create(**given, stream=True))
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks if chunk.choices]
    assert "".join(delta.get("content") or "" for delta in deltas) == choice.message.content
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (thought or "")


@pytest.mark.parametrize("extra", [{"guided_choice": ["yes", "no"]}, {"guided_regex": "[ab]{3}"}])
def test_other_forms_bind_the_final_channel_too(client: openai.OpenAI, bias: dict[str, Any], extra: Any) -> None:
    body = {**bias, **extra}
    answer = client.chat.completions.create(model="gpt-oss", messages=HI, max_tokens=300, extra_body=body)
    text = answer.choices[0].message.content or ""
    assert text in ("yes", "no") or (len(text) == 3 and set(text) <= {"a", "b"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls_are_commentary_behind_the_reasoning(
    client: openai.OpenAI, bias: dict[str, Any], choice: Any
) -> None:
    given: dict[str, Any] = {
        "model": "gpt-oss", "messages": HI, "max_tokens": 400, "tools": TOOLS, "tool_choice": choice,
        "extra_body": bias,
    }  # fmt: skip
    message = client.chat.completions.create(**given).choices[0].message
    assert message.content is None and message.to_dict()["reasoning_content"]
    [call] = message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    # The conversation goes on with the result.
    turns = [*HI, message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    answer = client.chat.completions.create(
        model="gpt-oss", messages=turns, max_tokens=300, tools=TOOLS, response_format=FORM, extra_body=bias
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_a_strict_function_is_called_well_or_not_at_all(client: openai.OpenAI, bias: dict[str, Any]) -> None:
    tools: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    for seed in range(3):
        answer = client.chat.completions.create(
            model="gpt-oss", messages=HI, max_tokens=200, tools=tools, extra_body={**bias, "seed": seed}
        )
        for call in answer.choices[0].message.tool_calls or ():
            if answer.choices[0].finish_reason == "tool_calls" and call.type == "function":
                jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        assert "<|" not in (answer.choices[0].message.content or "")


def test_responses_have_items_of_reasoning_and_calls(client: openai.OpenAI, bias: dict[str, Any]) -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "description": "It.", "parameters": WEATHER}]
    given: dict[str, Any] = {
        "model": "gpt-oss", "input": "hi", "max_output_tokens": 400, "tools": tools, "tool_choice": "required",
        "reasoning": {"effort": "low"}, "extra_body": bias,
    }  # fmt: skip
    response = client.responses.create(**given)
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    call: Any = response.output[1]
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    following = client.responses.create(
        model="gpt-oss", input=[result], previous_response_id=response.id, max_output_tokens=300, extra_body=bias,
        text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    )  # type: ignore[call-overload]  # fmt: skip
    assert isinstance(json.loads(following.output_text)["a"], bool)


def test_messages_have_blocks_of_thinking_and_calls(server: Running, bias: dict[str, Any]) -> None:
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tools: Any = [{"name": "get_weather", "description": "It.", "input_schema": WEATHER}]
    message = claude.messages.create(
        model="gpt-oss", messages=HI, max_tokens=2000, tools=tools, tool_choice={"type": "any"},
        thinking={"type": "enabled", "budget_tokens": 1024}, extra_body=bias,
    )  # fmt: skip
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    jsonschema.validate(message.content[1].input, WEATHER)  # type: ignore[union-attr]


def test_a_budget_ends_the_analysis(client: openai.OpenAI, bias: dict[str, Any], server: Running) -> None:
    with server.http() as http:
        [end] = http.post("/tokenize", json={"prompt": END}).json()["tokens"]
    never = {**bias, "logit_bias": {**bias["logit_bias"], str(end): -50}, "thinking_token_budget": 6}
    answer = client.chat.completions.create(
        model="gpt-oss", messages=HI, max_tokens=100, response_format=FORM, extra_body=never
    )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["a"], bool)
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    # The prompt opens the analysis; its end counts too.
    assert answer.usage.completion_tokens_details.reasoning_tokens == 7


#: A text of a chat template by which each notation of calls is known.
NOTATIONS = {
    "hermes": 'Write <tool_call>{"name": , "arguments": }',
    "qwen3_coder": "<tool_call><function=f>",
    "llama3_json": '"parameters": dictionary of argument name and its value',
    "pythonic": "[func_name1(a=1)]",
    "olmo3": "<function_calls></function_calls>",
    "lfm2": "<|tool_list_start|>",
    "mistral": "[TOOL_CALLS] [CALL_ID] [ARGS]",
    "deepseek": "<｜tool▁call▁begin｜> ```json",
    "deepseek_v32": "｜DSML｜",
    "gemma": "<|tool_call>call:",
    "functiongemma": "<start_function_call>",
    "glm45": "<tool_call><arg_key>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "minimax_m2": "<minimax:tool_call>",
    "seed_oss": "<seed:tool_call>",
    "step3": "<steptml:invoke",
    "granite": "<|tool_call|>",
    "hunyuan_a13b": "<tool_calls>[{}]",
    "nemotron_nano_v2": "<TOOLCALL>",
    "phi4_mini_json": "functools[",
}


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS.keys() - {"harmony"}))
def test_a_random_model_writes_forced_calls_in_every_notation(
    client: openai.OpenAI, bias: dict[str, Any], name: str
) -> None:
    template = "{# " + NOTATIONS[name] + " #}{{ messages[0].content }}{{ tools }}"
    assert find_tool_parser(template) is TOOL_PARSERS[name]
    given: dict[str, Any] = {
        "model": "gpt-oss", "messages": HI, "max_tokens": 600, "tools": TOOLS, "tool_choice": "required",
        "parallel_tool_calls": False, "extra_body": {**bias, "chat_template": template},
    }  # fmt: skip
    answer = client.chat.completions.create(**given)
    [call] = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].message.content is None and call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    chunks = list(client.chat.completions.create(**given, stream=True))
    deltas = [delta for chunk in chunks for delta in (chunk.choices[0].delta.tool_calls or [])]
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
    assert name != "kimi_k2" or call.id.startswith("functions.get_weather:")


def test_an_answer_is_continued_in_its_channel(server: Running, client: openai.OpenAI, bias: dict[str, Any]) -> None:
    turns: Any = [*HI, {"role": "assistant", "content": '{"a": '}]
    answer = client.chat.completions.create(
        model="gpt-oss", messages=turns, max_tokens=20,
        extra_body={**bias, "continue_final_message": True, "add_generation_prompt": False, "guided_choice": ["true}"]},
    )  # fmt: skip
    assert answer.choices[0].message.content == "true}"
