"""Every field of OpenAI's API, and those that other engines add: it works, it changes nothing, or it is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from octavo.core.foreign import FOREIGN
from octavo.server.fields import RequestModel, marks_of
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from tests.server.running_server import Running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0},
    TEXT: {"prompt": "hello", "max_tokens": 4, "temperature": 0},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
TAG = '{"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<f"]}'
FUNCTION = {"type": "function", "function": {"name": "f"}}

WORKS, ACCEPTED, REFUSED, ELSEWHERE = "works", "accepted", "refused", "a field of the other route"

#: Field -> what becomes of it in a chat and in a completion, a value of which this holds, and, where a field is refused
#: or accepted for some values only, one that is accepted.
TABLE: dict[str, tuple[str, str, Any] | tuple[str, str, Any, Any]] = {
    # OpenAI, both routes
    "model": (WORKS, WORKS, "alias"),
    "frequency_penalty": (WORKS, WORKS, 2),
    "logit_bias": (WORKS, WORKS, {"65": 100}),
    "max_tokens": (WORKS, WORKS, 2),
    "n": (WORKS, WORKS, 2),
    "presence_penalty": (WORKS, WORKS, 2),
    "seed": (WORKS, WORKS, 7),
    "stop": (WORKS, WORKS, ["x"]),
    "stream": (WORKS, WORKS, True),
    "stream_options": (WORKS, WORKS, {"include_usage": True}),
    "temperature": (WORKS, WORKS, 2.0),
    "top_p": (WORKS, WORKS, 0.5),
    "user": (WORKS, WORKS, "me"),
    # OpenAI, completions
    "prompt": (ELSEWHERE, WORKS, "bye"),
    "best_of": (WORKS, WORKS, 2),
    "echo": (WORKS, WORKS, True),
    "logprobs": (WORKS, WORKS, None),
    "suffix": (REFUSED, REFUSED, "end", ""),
    # OpenAI, chats
    "messages": (WORKS, ELSEWHERE, [{"role": "user", "content": "bye"}]),
    "audio": (REFUSED, REFUSED, {"voice": "alloy"}),
    "function_call": (REFUSED, REFUSED, {"name": "f"}, "none"),
    "functions": (REFUSED, REFUSED, [{"name": "f"}], []),
    "max_completion_tokens": (WORKS, REFUSED, 2),
    "metadata": (ACCEPTED, ACCEPTED, {"a": "b"}),
    "modalities": (REFUSED, REFUSED, ["text", "audio"], ["text"]),
    "moderation": (REFUSED, REFUSED, {"model": "m"}),
    "parallel_tool_calls": (WORKS, ELSEWHERE, False),
    "prediction": (WORKS, ELSEWHERE, {"type": "content", "content": "a"}),
    "prompt_cache_key": (ACCEPTED, ACCEPTED, "a"),
    "prompt_cache_options": (ACCEPTED, ACCEPTED, {}),
    "prompt_cache_retention": (ACCEPTED, ACCEPTED, "24h"),
    # The template has no place for it; tests/server/test_reasoning_routes.py has one that does.
    "reasoning_effort": (ACCEPTED, ELSEWHERE, "high"),
    "response_format": (WORKS, WORKS, SCHEMA),
    "safety_identifier": (ACCEPTED, ACCEPTED, "a"),
    "service_tier": (ACCEPTED, ACCEPTED, "priority"),
    "store": (ACCEPTED, ACCEPTED, True),
    "tool_choice": (WORKS, ELSEWHERE, "none"),
    "tools": (WORKS, ELSEWHERE, []),
    "top_logprobs": (WORKS, REFUSED, 2),
    "verbosity": (ACCEPTED, ACCEPTED, "high"),
    "web_search_options": (REFUSED, REFUSED, {}),
    # Of other engines, and here
    "top_k": (WORKS, WORKS, 5),
    "min_p": (WORKS, WORKS, 0.5),
    "repetition_penalty": (WORKS, WORKS, 2.0),
    "stop_token_ids": (WORKS, WORKS, [65]),
    "include_stop_str_in_output": (WORKS, WORKS, True),
    "ignore_eos": (WORKS, WORKS, True),
    "min_tokens": (WORKS, WORKS, 4),
    "skip_special_tokens": (WORKS, WORKS, False),
    "bad_words": (WORKS, WORKS, ["a"]),
    "allowed_token_ids": (WORKS, WORKS, [65]),
    "prompt_logprobs": (WORKS, WORKS, 1),
    "return_token_ids": (WORKS, WORKS, True),
    "return_tokens_as_token_ids": (WORKS, WORKS, True),
    "use_beam_search": (WORKS, WORKS, False),
    "length_penalty": (WORKS, WORKS, None),
    "early_stopping": (WORKS, WORKS, None),
    "priority": (WORKS, WORKS, 0),
    "ttft_target": (WORKS, WORKS, None),
    "tpot_target": (WORKS, WORKS, None),
    "cache_salt": (WORKS, WORKS, "a"),
    "truncate_prompt_tokens": (WORKS, WORKS, 3),
    "logprob_token_ids": (WORKS, WORKS, [65]),
    "thinking_token_budget": (WORKS, WORKS, 5),
    "truncation_side": (WORKS, WORKS, "right"),
    "add_special_tokens": (WORKS, WORKS, True),
    "add_generation_prompt": (WORKS, ELSEWHERE, False),
    "continue_final_message": (WORKS, ELSEWHERE, True),
    "chat_template": (WORKS, ELSEWHERE, "default"),
    # The template reads no variable of a request; tests/server/test_nested_fields.py has one that does.
    "chat_template_kwargs": (WORKS, ELSEWHERE, {}),
    # Without plug-ins there are none to take; tests/server/test_logits_plugins_served.py has one.
    "vllm_xargs": (ACCEPTED, ACCEPTED, {}),
    "documents": (REFUSED, ELSEWHERE, [{"text": "a"}], []),
    "include_reasoning": (WORKS, ELSEWHERE, False),
    "separate_reasoning": (WORKS, ELSEWHERE, False),
    "reasoning_format": (WORKS, ELSEWHERE, "none"),
    "parse_tool_calls": (WORKS, ELSEWHERE, False),
    # Other names; tests/server/test_other_names.py says of what.
    "repeat_penalty": (WORKS, WORKS, 2.0),
    "repeat_last_n": (WORKS, WORKS, 64),
    "n_predict": (WORKS, WORKS, 4),
    "num_predict": (WORKS, WORKS, -1),
    "enable_thinking": (WORKS, ELSEWHERE, False),
    "thinking": (WORKS, ELSEWHERE, {"type": "enabled", "budget_tokens": 5}),
    "reasoning": (WORKS, ELSEWHERE, {"effort": "high", "exclude": True}),
}
#: The same on both routes.
TABLE |= {
    name: (REFUSED, REFUSED, value, *accepted)
    for name, value, *accepted in (
        # vLLM
        ("lora_request", {"lora_name": "a"}), ("logits_processors", ["a.b"], []),
        ("logit_processors", ["a.b"], []), ("kv_transfer_params", {}),
        ("prompt_embeds", "AAAA"), ("mm_processor_kwargs", {"a": 1}, {}), ("media_io_kwargs", {"a": {}}, {}),
        ("repetition_detection", {"a": 1}),
        # SGLang
        ("no_stop_trim", True, False),
        ("stop_regex", "a+", []), ("lora_path", "a"), ("session_params", {}), ("custom_logit_processor", "a"),
        ("custom_params", {}), ("return_hidden_states", True, False), ("return_routed_experts", True, False),
        ("data_parallel_rank", 1, 0), ("bootstrap_host", "a"), ("bootstrap_port", 1), ("bootstrap_room", 1),
        ("extra_key", "a"), ("max_new_tokens", 5), ("logprob_start_len", 0, -1),
        # llama.cpp
        ("n_probs", 5, 0), ("min_keep", 5, 0), ("tfs_z", 0.5, 1.0), ("typical_p", 0.5, 1.0),
        ("top_n_sigma", 1.0, -1.0), ("penalize_nl", True),
        ("mirostat", 2, 0), ("mirostat_tau", 5.0), ("mirostat_eta", 0.1), ("dynatemp_range", 0.5, 0.0),
        ("dynatemp_exponent", 2.0, 1.0), ("xtc_probability", 0.5, 0.0), ("xtc_threshold", 0.1),
        ("dry_multiplier", 0.8, 0.0), ("dry_base", 1.75), ("dry_allowed_length", 2), ("dry_penalty_last_n", -1),
        ("dry_sequence_breakers", ["\n"]), ("samplers", ["top_k"]), ("grammar_lazy", True, False),
        ("grammar_triggers", [{"type": 1}], ""), ("n_keep", 5, 0), ("n_indent", 2, 0),
        ("t_max_predict_ms", 100, 0), ("post_sampling_probs", True, False), ("return_tokens", True, False),
        ("return_progress", True, False), ("timings_per_token", True, False), ("response_fields", ["content"], []),
        ("image_data", [{"id": 1}], []), ("lora", [{"id": 0, "scale": 1.0}], []),
        ("thinking_forced_open", True, False),
    )
}  # fmt: skip
TABLE |= {
    name: (ACCEPTED, ACCEPTED, value)
    for name, value in (
        ("request_id", "a"), ("rid", "a"), ("spaces_between_special_tokens", False),
        ("stream_reasoning", True), ("guided_decoding_backend", "xgrammar"),
        ("cache_prompt", True), ("id_slot", 1), ("n_cache_reuse", 1), ("provider_specific_fields", {"a": 1}),
    )
}  # fmt: skip
TABLE |= {
    name: (WORKS, WORKS, value)
    for name, value in (
        # vLLM, SGLang and llama.cpp: the form of the answer
        ("structured_outputs", {"regex": "a+"}), ("guided_json", {"type": "object"}), ("guided_regex", "a+"),
        ("guided_choice", ["a", "b"]), ("guided_grammar", 'root ::= "a"'), ("guided_whitespace_pattern", ""),
        ("structural_tag", TAG), ("regex", "a+"), ("ebnf", 'root ::= "a"'), ("json_schema", "{}"),
        ("grammar", 'start: "a"'),
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(http: httpx.Client) -> dict[str, str]:
    """The answers without further fields."""
    return {route: text_of(send(http, route)[1]) for route in BODIES}


def send(http: httpx.Client, route: str, **given: Any) -> tuple[int, Any]:
    response = http.post(route, json={**BODIES[route], **given})
    return response.status_code, response.json() if "json" in response.headers["content-type"] else response.text


def text_of(answer: Any) -> str:
    (choice,) = answer["choices"]
    found: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return found


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize("name", TABLE)
def test_a_field_does_what_the_table_says(http: httpx.Client, plain: dict[str, str], route: str, name: str) -> None:
    in_chat, in_text, value, *accepted = TABLE[name]
    outcome = in_chat if route == CHAT else in_text
    given = {name: value}
    if name == "stream_options":
        given["stream"] = True
    if name == "top_logprobs" and route == CHAT:
        given["logprobs"] = True
    if name == "continue_final_message":
        given["add_generation_prompt"] = False
    status, answer = send(http, route, **given)
    if outcome in (WORKS, ACCEPTED):
        assert status == 200, answer
    else:
        assert status == 400 and answer["error"]["param"] == name, answer
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["code"] == ("unsupported_parameter" if outcome == REFUSED else "unknown_parameter")
        assert name in answer["error"]["message"]
        if outcome == ELSEWHERE:
            assert "/v1/" in answer["error"]["message"]
    for harmless in (None, *accepted) if outcome == REFUSED else (value,) if outcome == ACCEPTED else ():
        status, answer = send(http, route, **{name: harmless})
        assert status == 200 and text_of(answer) == plain[route], (harmless, answer)


def test_the_table_has_every_field_of_openai_and_every_field_that_is_known_here() -> None:
    of_openai = {
        *chat_create_params.CompletionCreateParamsBase.__annotations__,
        *completion_create_params.CompletionCreateParamsBase.__annotations__,
        "stream",
    }
    assert of_openai - set(TABLE) == set()
    assert set(TABLE) == {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    routes: tuple[type[GenerationRequest], ...] = (ChatCompletionRequest, CompletionRequest)
    for k, model in enumerate(routes):
        for name, mark in marks_of(model).items():
            assert mark is None or TABLE[name][k] == (ACCEPTED if mark.is_hint else REFUSED), name


@pytest.mark.parametrize(
    ("name", "hint"), [("temprature", "did you mean temperature?"), ("max_token", "max_tokens"), ("zzzzzz", "/docs")]
)
def test_an_unknown_field_is_refused_with_the_nearest_one(http: httpx.Client, name: str, hint: str) -> None:
    for route in (CHAT, TEXT):
        status, answer = send(http, route, **{name: 1})
        assert status == 400 and answer["error"]["code"] == "unknown_parameter" and answer["error"]["param"] == name
        assert hint in answer["error"]["message"]
        status, answer = send(http, route, stream=True, stream_options={name: 1})
        assert status == 400 and name in answer["error"]["message"]


# Fields that work, in what they do ------------------------------------------------------------------------------------


def prompt_of(http: httpx.Client, messages: list[dict[str, Any]], **options: Any) -> str:
    """What the template writes, as ``/tokenize`` shows it, and the same as a chat with the same fields computes."""
    shown = http.post("/tokenize", json={"messages": messages, **options}).json()
    answer = http.post(CHAT, json={"messages": messages, "max_tokens": 1, **options}).json()
    assert answer["usage"]["prompt_tokens"] == shown["count"], answer
    prompt: str = shown["prompt"]
    return prompt


def test_a_chat_is_written_as_its_fields_ask(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a b  "}]
    assert prompt_of(http, messages) == "user: hiassistant: a b  <eos>assistant: "
    assert prompt_of(http, messages, add_generation_prompt=False) == "user: hiassistant: a b  <eos>"
    assert prompt_of(http, messages, continue_final_message=True) == "user: hiassistant: a b  "
    assert prompt_of(http, messages, chat_template="default").endswith("assistant: ")


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "add_generation_prompt",
        ),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
    ],
)
def test_what_contradicts_itself_is_refused(http: httpx.Client, given: dict[str, Any], param: str, words: str) -> None:
    status, answer = send(http, CHAT, **given)
    assert status == 400 and answer["error"]["param"] == param and words in answer["error"]["message"]


def test_an_assistant_without_words_is_legal(http: httpx.Client) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "user", "content": "hi"},
    ]
    wanted = "user: hiassistant: <eos>assistant: <eos>user: hiassistant: "
    assert prompt_of(http, messages) == wanted


def test_a_prompt_is_truncated_from_its_beginning(http: httpx.Client) -> None:
    for given, wanted in ((3, "xyz"), (100, "abcxyz")):
        status, answer = send(http, TEXT, prompt="abcxyz", truncate_prompt_tokens=given, echo=True, max_tokens=0)
        assert status == 200 and text_of(answer) == wanted
        assert answer["usage"]["prompt_tokens"] == len(wanted)
    status, answer = send(http, TEXT, prompt="y" * 500, truncate_prompt_tokens=-1, max_tokens=20, ignore_eos=True)
    assert answer["usage"]["prompt_tokens"] == 236 and answer["usage"]["completion_tokens"] == 20


def test_usage_with_every_chunk(tiny_server: Running) -> None:
    with tiny_server.client() as client:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        stream = client.completions.create(
            model="tiny",
            prompt="abc",
            max_tokens=3,
            stream=True,
            stream_options=options,
            extra_body={"ignore_eos": True},
        )
        counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-2:] == [3, 3]


def test_max_tokens_that_the_context_has_no_room_for_is_refused_where_it_is_named(http: httpx.Client) -> None:
    long = "x" * 250  # of 256
    messages = [{"role": "user", "content": "x" * 225}]  # and 17 before and after it
    route: str
    given: dict[str, Any]
    for route, given, param in (
        (TEXT, {"prompt": long, "max_tokens": 7}, "max_tokens"),
        (TEXT, {"prompt": ["x", long], "max_tokens": 7}, "max_tokens"),
        (TEXT, {"prompt": long, "max_tokens": 7, "use_beam_search": True, "n": 2}, "max_tokens"),
        (TEXT, {"prompt": "x" * 256, "max_tokens": None}, "prompt"),
        (TEXT, {"prompt": "x" * 300, "max_tokens": 7}, "prompt"),
        (CHAT, {"messages": messages, "max_tokens": 20}, "max_tokens"),
        (CHAT, {"messages": messages, "max_completion_tokens": 20}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 256}], "max_tokens": None}, "messages"),
    ):
        for stream in (False, True):
            status, answer = send(http, route, **given, stream=stream)
            assert status == 400, answer
            assert (answer["error"]["code"], answer["error"]["param"]) == ("context_length_exceeded", param)
            message = answer["error"]["message"]
            assert "maximum context length is 256 tokens" in message
    for route, given, tokens in (
        (TEXT, {"prompt": long, "max_tokens": 6}, 6),
        (TEXT, {"prompt": long, "max_tokens": None}, 6),
        (TEXT, {"prompt": long, "max_tokens": None, "use_beam_search": True}, 6),
        (CHAT, {"messages": messages, "max_tokens": None}, 256 - 225 - 17),
    ):
        status, answer = send(http, route, **given, ignore_eos=True)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == tokens
        assert answer["choices"][0]["finish_reason"] == "length"


def test_a_body_without_a_content_type_is_json_unless_a_web_page_sends_it(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        assert http.post(TEXT, content=b'{"prompt": "a", "max_tokens": 1}').status_code == 200
        answer = http.post(TEXT, content=b'{"prompt": "a"}', headers={"Origin": str(http.base_url).rstrip("/")})
        assert answer.status_code == 400 and "Content-Type" in answer.json()["error"]["message"]


def test_each_place_of_the_table_of_foreign_names_exists() -> None:
    import octavo.cli.reference
    import octavo.server.openai.completions  # noqa: F401  all bodies are imported

    def names(kind: type[RequestModel]) -> set[str]:
        own = {kind.__name__, f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"}
        return own.union(*map(names, kind.__subclasses__()))

    assert FOREIGN.keys() - {
        "flags",
        "options",
        "keywords",
        "SamplingParams",
        "BeamSearchParams",
        "StructuredOutputsParams",
        "LoRARequest",
        "prompt",
        "PoolingParams",
        "PoolerConfig",
    } <= names(RequestModel)
