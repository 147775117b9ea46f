"""Ollama's routes: chats, texts, vectors, options and errors."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from octavo.config.server_options import ollama_address
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.server.chat import ChoiceEvents
from octavo.server.http.connection import StartingApp
from octavo.server.http.errors import ApiError
from octavo.server.ollama.protocol import DEFAULTS, OPTIONS, ChatRequest, read_duration, read_options
from octavo.server.ollama.routes import _PendingChat, readable_count
from octavo.server.tool_parsers.tool_parser import ContentDelta, ToolCallArguments, ToolCallStart
from tests.server.running_server import Running

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0.0, "num_predict": 8}


def lines_of(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def whole(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={"model": "tiny", "stream": False, **body})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def refusal(http: httpx.Client, path: str, **body: Any) -> tuple[int, str]:
    answer = http.post(path, json={"model": "tiny", "stream": False, **body})
    assert set(answer.json()) == {"error"}
    return answer.status_code, answer.json()["error"]


def test_a_chat_is_that_of_the_other_routes(http: httpx.Client) -> None:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    expected = http.post("/v1/chat/completions", json=body).json()
    made = whole(http, "/api/chat", messages=HELLO, options=GREEDY, logprobs=True, top_logprobs=2)
    [choice] = expected["choices"]
    assert made["message"] == {"role": "assistant", "content": choice["message"]["content"]}
    assert made["done"] and made["done_reason"] == choice["finish_reason"] == "length"
    assert made["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    assert made["eval_count"] == expected["usage"]["completion_tokens"] == 8
    assert made["logprobs"] == choice["logprobs"]["content"]
    assert 0 < made["prompt_eval_duration"] + made["eval_duration"] < made["total_duration"]


def test_a_stream_adds_up_to_the_whole_answer(http: httpx.Client) -> None:
    made = whole(http, "/api/chat", messages=HELLO, options=GREEDY, logprobs=True)
    *pieces, last = lines_of(http, "/api/chat", model="tiny:latest", messages=HELLO, options=GREEDY, logprobs=True)
    assert not any(piece["done"] for piece in pieces) and last["done"]
    assert "".join(piece["message"]["content"] for piece in pieces) == made["message"]["content"]
    assert list(itertools.chain(*(piece["logprobs"] for piece in pieces))) == made["logprobs"]
    assert last["message"] == {"role": "assistant", "content": ""} and last["model"] == "tiny:latest"
    counts = ("done_reason", "prompt_eval_count", "eval_count", "load_duration")
    assert [last[name] for name in counts] == [made[name] for name in counts]
    assert 0 < last["eval_duration"] < last["total_duration"]


def test_a_prompt_is_a_conversation_which_its_context_continues(http: httpx.Client) -> None:
    system = "Be brief."
    messages = [{"role": "system", "content": system}, *HELLO]
    asked = whole(http, "/api/chat", messages=messages, options=GREEDY)
    made = whole(http, "/api/generate", prompt="Hello", system=system, options=GREEDY)
    assert made["response"] == asked["message"]["content"]
    assert len(made["context"]) == made["prompt_eval_count"] + made["eval_count"]
    further = whole(http, "/api/generate", prompt="More", context=made["context"], options=GREEDY)
    assert further["context"][: len(made["context"])] == made["context"]
    alone = whole(http, "/api/generate", prompt="More", options=GREEDY)
    assert further["prompt_eval_count"] == len(made["context"]) + alone["prompt_eval_count"]
    streamed = lines_of(http, "/api/generate", model="tiny", prompt="Hello", system=system, options=GREEDY)
    assert "".join(line["response"] for line in streamed) == made["response"]
    assert streamed[-1]["context"] == made["context"]
    assert refusal(http, "/api/generate", prompt="x", context=[10**6])[0] == 400


def test_a_raw_prompt_is_that_of_completions(http: httpx.Client) -> None:
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 8}
    expected = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    made = whole(http, "/api/generate", prompt="abc", raw=True, options=GREEDY)
    assert made["response"] == expected and "context" not in made
    streamed = lines_of(http, "/api/generate", model="tiny", prompt="abc", raw=True, options=GREEDY)
    assert "".join(line["response"] for line in streamed) == expected


def test_a_gap_is_filled(special_server: Running) -> None:
    with special_server.http() as http:
        body = {"prompt": "abc", "suffix": "def", "temperature": 0, "max_tokens": 8}
        expected = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert whole(http, "/api/generate", prompt="abc", suffix="def", options=GREEDY)["response"] == expected
        assert {"insert", "thinking"} <= set(whole(http, "/api/show")["capabilities"])


def test_a_suffix_needs_a_model_that_fills_gaps(http: httpx.Client) -> None:
    status, message = refusal(http, "/api/generate", prompt="abc", suffix="def")
    assert status == 400 and "suffix" in message


def test_thinking_is_separate_and_can_be_switched(special_server: Running) -> None:
    with special_server.http() as http:
        for think in (None, True, "high"):
            message = whole(http, "/api/chat", messages=HELLO, options=GREEDY, think=think)["message"]
            assert message["thinking"] and not message["content"]
        message = whole(http, "/api/chat", messages=HELLO, options=GREEDY, think=False)["message"]
        assert message["content"] and "thinking" not in message
        made = whole(http, "/api/generate", prompt="Hello", options=GREEDY, think=True)
        assert made["thinking"] and not made["response"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_answer_has_the_format(http: httpx.Client, path: str) -> None:
    given: dict[str, Any] = {"messages": HELLO} if path == "/api/chat" else {"prompt": "Hello"}
    schema = {"type": "object", "properties": {"a": {"enum": [True, False]}}, "required": ["a"]}
    options = {"num_predict": 60, "seed": 1}
    made = whole(http, path, format=schema, options=options, **given)
    text = made["message"]["content"] if path == "/api/chat" else made["response"]
    assert json.loads(text)["a"] in (True, False)
    status, message = refusal(http, path, format="yaml", **given)
    assert status == 400 and "format" in message and "yaml" in message
    assert refusal(http, path, format={"type": "nothing"}, **given)[0] == 400
    begun = whole(http, path, format="json", options={"num_predict": 3, "temperature": 0}, **given)
    text = begun["message"]["content"] if path == "/api/chat" else begun["response"]
    assert text.lstrip()[:1] in ("{", "")


def test_options_are_the_parameters_of_other_routes(http: httpx.Client) -> None:
    body = {"messages": HELLO, "temperature": 0.9, "top_k": 7, "top_p": 0.8, "min_p": 0.01, "seed": 5, "max_tokens": 12}
    body |= {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2}
    expected = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    options = {
        "temperature": 0.9, "top_k": 7.0, "top_p": 0.8, "min_p": 0.01, "seed": 5, "num_predict": 12,
        "repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2, "num_ctx": 4096, "unheard_of": 1,
    }  # fmt: skip
    assert whole(http, "/api/chat", messages=HELLO, options=options)["message"]["content"] == expected
    # Ollama's defaults, as the model has none of its own.
    plain = {"messages": HELLO, "seed": 5, "max_tokens": 12, **DEFAULTS}
    expected = http.post("/v1/chat/completions", json=plain).json()["choices"][0]["message"]["content"]
    made = whole(http, "/api/chat", messages=HELLO, options={"seed": 5, "num_predict": 12})
    assert made["message"]["content"] == expected
    stopped = whole(http, "/api/chat", messages=HELLO, options={"seed": 5, "num_predict": 12, "stop": [expected[3]]})
    assert stopped["message"]["content"] == expected[: expected.index(expected[3])]
    assert stopped["done_reason"] == "stop"
    status, message = refusal(http, "/api/chat", messages=HELLO, options={"temperature": "hot"})
    assert status == 400 and "options.temperature" in message
    status, message = refusal(http, "/api/chat", messages=HELLO, options={"top_p": 7})
    assert status == 400 and "options.top_p" in message


def test_the_table_of_options() -> None:
    assert read_options(None) == ({}, [])
    assert read_options({"num_predict": -1, "seed": -1, "temperature": None}) == ({}, [])
    assert read_options({"num_predict": 5.0, "repeat_last_n": 0, "repeat_penalty": 1.3}) == (
        {"max_tokens": 5, "repetition_penalty": 1.0}, [],
    )  # fmt: skip
    fields, ignored = read_options({"mirostat": 1, "mirostat_tau": 5.0, "typical_p": 1.0, "tfs_z": 0.5, "other": 1})
    assert fields == {} and [name.split()[0] for name in ignored] == [
        "options.mirostat",
        "options.tfs_z",
        "options.other",
    ]
    assert all(option.field or option.reason for option in OPTIONS.values())


def test_durations_of_keep_alive() -> None:
    given = {None: None, 300: 300, -1: -1, 0: 0, "5m": 300, "1h30m": 5400, "-1m": -60, "0": 0, "-1": -1, "1.5s": 1.5}
    assert {value: read_duration(value) for value in given} == given
    for wrong in ("soon", "5x", "m5", ""):
        with pytest.raises(InvalidRequestError):
            read_duration(wrong)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_without_a_prompt_loads(http: httpx.Client, path: str) -> None:
    answer = whole(http, path, keep_alive="10m")
    assert answer["done"] and answer["done_reason"] == "load"
    [line] = lines_of(http, path, model="tiny", keep_alive=0)
    assert line["done_reason"] == "load"  # this server keeps its model
    assert refusal(http, path, keep_alive="soon")[0] == 400


def test_bodies_need_no_content_type_and_unknown_fields_are_ignored(http: httpx.Client) -> None:
    body = {"model": "tiny", "messages": HELLO, "options": GREEDY, "stream": False, "truncate": True, "shift": True}
    form = {"content-type": "application/x-www-form-urlencoded"}  # as curl -d sends it
    assert http.post("/api/chat", content=json.dumps(body), headers=form).status_code == 200
    page = {**form, "origin": "http://elsewhere.example"}
    assert http.post("/api/chat", content=json.dumps(body), headers=page).status_code == 403


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"model": "tyni", "messages": HELLO}, 404, "model 'tyni' not found; did you mean 'tiny'"),
        ("/api/generate", {"model": "tiny:7b", "prompt": "x"}, 404, "model 'tiny:7b' not found"),
        ("/api/embed", {"model": "none", "input": "x"}, 404, "not found"),
        ("/api/show", {"model": "none"}, 404, "not found"),
        ("/api/show", {"model": None}, 400, "model"),
        ("/api/chat", {"model": None, "messages": HELLO}, 400, "model"),
        ("/api/chat", {"messages": [{"role": "judge", "content": "x"}]}, 400, "messages[0].role"),
        ("/api/chat", {"messages": HELLO, "think": True}, 400, "does not support thinking"),
        ("/api/chat", {"messages": HELLO, "top_logprobs": 3}, 400, "logprobs"),
        ("/api/chat", {"messages": [{**HELLO[0], "images": ["aGk="]}]}, 400, "images"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, 400, "images"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x" * 999}]}, 400, "256"),
        ("/api/pull", {"model": "a/b"}, 403, "--allow-pull"),
        ("/api/copy", {"source": "tiny", "destination": "other"}, 403, "--allow-pull"),
        ("/api/create", {}, 400, "not created"),
        ("/api/push", {}, 400, "not pushed"),
        ("/api/blobs/sha256:00", {}, 400, "not created"),
        ("/api/none", {}, 404, "/api/none"),
    ],
)
def test_errors_are_a_text(http: httpx.Client, path: str, body: dict[str, Any], status: int, words: str) -> None:
    found, message = refusal(http, path, **body)
    assert found == status and words in message, message


def test_a_request_that_is_no_json_is_refused(http: httpx.Client) -> None:
    answer = http.post("/api/chat", content=b"{")
    assert answer.status_code == 400 and "not valid JSON" in answer.json()["error"]


def test_a_conversation_with_tools_is_that_of_other_routes(demo_server: Running) -> None:
    """Ids of calls are left out by clients, and arguments are objects."""
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "add", "content": "2"},
    ]
    theirs: list[dict[str, Any]] = [
        messages[0],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call_1_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1_0", "name": "add", "content": "2"},
    ]
    with demo_server.http() as http:
        body = {"messages": theirs, "tools": [tool], "temperature": 0, "max_tokens": 6}
        expected = http.post("/v1/chat/completions", json=body).json()
        made = whole(
            http, "/api/chat", model="demo", messages=messages, tools=[tool], options={**GREEDY, "num_predict": 6}
        )
    assert made["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert made["prompt_eval_count"] == expected["usage"]["prompt_tokens"]


def _choices() -> Iterator[ChoiceEvents]:
    """Increments of an answer with two calls, the second one cut."""
    increments: list[list[Any]] = [
        [ContentDelta("I add.", 6)],
        [ToolCallStart(0, "call_a", "add"), ToolCallArguments(0, '{"a": ')],
        [ToolCallArguments(0, "1}"), ToolCallStart(1, "call_b", "get")],
        [ToolCallArguments(1, '{"city": "Par')],
    ]
    for number, events in enumerate(increments):
        completion = CompletionOutput(0, "", [number])
        finished = number == len(increments) - 1
        completion.finish_reason = "length" if finished else None
        metrics = RequestMetrics(0.0, 0.5, 1.0)
        output = RequestOutput("r", None, [1, 2], [completion], finished, metrics)
        yield ChoiceEvents(completion, output, events, "length" if finished else None)


class _Chat:
    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def outputs(self) -> AsyncGenerator[list[ChoiceEvents], None]:
        for choice in _choices():
            yield [choice]
            if self._error is not None:
                raise self._error


def _pending(chat: Any) -> _PendingChat:
    body = ChatRequest.model_validate({"model": "m"})
    generation: Any = SimpleNamespace(prompt_tokens=2, completion_tokens=4, prompts=[{"prompt_token_ids": [1, 2]}])
    model: Any = SimpleNamespace(load_duration=7)
    return _PendingChat(body, model, 0.0, generation, chat)


def test_while_the_model_loads_the_error_is_a_text() -> None:
    body, headers = StartingApp()._progress.error("/api/chat")
    assert headers == {"content-type": "application/json"} and "is loading" in json.loads(body)["error"]


def test_calls_are_sent_whole_with_objects_as_arguments() -> None:
    calls = [
        {"id": "call_a", "function": {"index": 0, "name": "add", "arguments": {"a": 1}}},
        {"id": "call_b", "function": {"index": 1, "name": "get", "arguments": {"city": "Par"}}},
    ]
    answer = json.loads(asyncio.run(_pending(_Chat()).complete()))
    assert answer["message"] == {"role": "assistant", "content": "I add.", "tool_calls": calls}
    assert (answer["prompt_eval_duration"], answer["load_duration"], answer["done_reason"]) == (
        500_000_000,
        7,
        "length",
    )

    async def collect() -> list[dict[str, Any]]:
        return [json.loads(line) async for part in _pending(_Chat()).stream() for line in part.splitlines()]

    lines = asyncio.run(collect())
    assert [line["message"].get("tool_calls") for line in lines] == [None, calls[:1], calls[1:], None]
    assert [line["done"] for line in lines] == [False, False, False, True]


def test_a_stream_that_fails_ends_with_the_error() -> None:
    pending = _pending(_Chat(ApiError(500, "the engine failed")))

    async def respond() -> list[Any]:
        request: Any = SimpleNamespace()
        response = await pending.respond(request, True, 1e9)
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(60)

        await response({"type": "http", "path": "/api/chat", "state": {}}, receive, send)
        return sent

    sent = asyncio.run(respond())
    assert sent[0]["status"] == 200
    lines = [json.loads(line) for message in sent[1:] for line in message["body"].splitlines()]
    assert lines[0]["message"]["content"] == "I add." and lines[1:] == [{"error": "the engine failed"}]


def test_vectors(vector_server: Running) -> None:
    with vector_server.http() as http:
        expected = http.post("/v1/embeddings", json={"input": ["one", "two"], "use_activation": True}).json()
        made = whole(http, "/api/embed", model="vectors:latest", input=["one", "two"])
        assert np.allclose(made["embeddings"], [entry["embedding"] for entry in expected["data"]], atol=1e-6)
        assert np.allclose(np.linalg.norm(made["embeddings"], axis=1), 1, atol=1e-5)
        assert made["prompt_eval_count"] == expected["usage"]["prompt_tokens"] and made["total_duration"] > 0
        [one] = whole(http, "/api/embed", model="vectors", input="one")["embeddings"]
        assert one == made["embeddings"][0]
        assert whole(http, "/api/embed", model="vectors", input=[])["embeddings"] == []
        alone = whole(http, "/api/embeddings", model="vectors", prompt="one")["embedding"]
        assert np.allclose(np.array(alone) / np.linalg.norm(alone), one, atol=1e-5)
        assert whole(http, "/api/embeddings", model="vectors", prompt="")["embedding"] == []
        long = "word " * 2000
        assert len(whole(http, "/api/embed", model="vectors", input=long)["embeddings"]) == 1
        assert refusal(http, "/api/embed", model="vectors", input=long, truncate=False)[0] == 400
        assert refusal(http, "/api/chat", model="vectors", messages=HELLO)[0] == 400
        assert whole(http, "/api/show", model="vectors")["capabilities"] == ["embedding"]


def test_only_the_served_model_is_listed(http: httpx.Client) -> None:
    """Others on this machine would be offered by clients, and are not loaded."""
    models = http.get("/api/tags").json()["models"]
    assert [model["name"] for model in models] == ["tiny:latest", "alias:latest"]
    assert {model["details"]["format"] for model in models} == {"safetensors"}
    [loaded] = http.get("/api/ps").json()["models"]
    assert loaded["context_length"] == 256 and loaded["digest"] == models[0]["digest"] and loaded["size_vram"] == 0
    shown = whole(http, "/api/show", model="alias")
    assert shown["model_info"]["general.architecture"] == "llama" and "/" not in shown["modelfile"]
    assert shown["model_info"]["llama.context_length"] == 256 and shown["model_info"]["general.parameter_count"] > 1000
    assert "assistant" in shown["template"] and shown["capabilities"][0] == "completion"


def test_images_are_base64() -> None:
    """The form of an image for templates; models that see are tested on the shared path of images."""
    from octavo.server.ollama.routes import _with_images

    model: Any = SimpleNamespace(service=SimpleNamespace(images=SimpleNamespace(are_seen=True)))
    image = base64.b64encode(b"png").decode()
    message = _with_images(model, {"role": "user", "content": "what?"}, [image], 0)
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": f"data:;base64,{image}"}},
        {"type": "text", "text": "what?"},
    ]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (None, ("127.0.0.1", 11434)),
        ("", ("127.0.0.1", 11434)),
        ("1.2.3.4", ("1.2.3.4", 11434)),
        (":5678", ("127.0.0.1", 5678)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("http://example.com", ("example.com", 80)),
        ("https://example.com/path", ("example.com", 443)),
        ("https://example.com:5678/path/", ("example.com", 5678)),
        ("[::1]", ("::1", 11434)),
        ('"[::1]:5678"', ("::1", 5678)),
    ],
)
def test_the_address_is_read_as_clients_read_it(text: str | None, address: tuple[str, int]) -> None:
    assert ollama_address(text) == address


def test_a_wrong_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="OLLAMA_HOST"):
        ollama_address("localhost:port")


def test_numbers_of_parameters() -> None:
    assert [readable_count(n) for n in (0, 900, 134_515_008, 8_030_261_248)] == ["", "900", "134.5M", "8.0B"]
