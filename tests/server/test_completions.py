"""Every parameter of the two routes through the openai client, with its types as judge."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.openai_judge import events, judge_chat, judge_chunk, judge_completion, judge_model
from tests.server.running_server import Running

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]

#: Parameter -> value, each alone, for both routes.
SHARED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_p": 0.9, "seed": 7},
    {"n": 3},
    {"n": 2, "seed": 2**63 - 1},
    {"stop": "e"},
    {"stop": ["x", "yz"]},
    {"stop": []},
    {"presence_penalty": 1.0, "frequency_penalty": -1.0},
    {"logit_bias": {"70": 50, "71": -100.0}},
    {"user": "someone"},
    {"extra_body": {"best_of": 3, "n": 2}},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}},
    {"extra_body": {"ignore_eos": True, "min_tokens": 4, "skip_special_tokens": False}},
    {"extra_body": {"use_beam_search": True, "best_of": 4, "n": 2, "length_penalty": 0.5, "early_stopping": True}},
    {"extra_body": {"use_beam_search": True, "n": 2, "early_stopping": "never", "temperature": 0}},
    {"extra_body": {"prompt_logprobs": 2}},
    {"extra_body": {"priority": 0.0, "cache_salt": "mine"}},
    {"extra_body": {"stop_token_ids": [70, 71], "include_stop_str_in_output": True}},
    {"extra_body": {"bad_words": ["no"], "allowed_token_ids": [70, 71, 72]}},
    {"extra_body": {"response_format": {"type": "text"}, "safety_identifier": {"of": "a later API"}}},
    {"extra_body": {"temperature": None, "n": None, "stop": None, "logit_bias": None, "user": None}},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"logprobs": 3},
    {"echo": True},
    {"echo": True, "logprobs": 2, "n": 2},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"echo": True, "max_tokens": 0, "n": 2},
    {"max_tokens": 0, "logprobs": 1},
    {"suffix": ""},
    {"extra_body": {"add_special_tokens": False}},
]
CHAT: list[dict[str, Any]] = [
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 4, "n": 2},
    {"max_completion_tokens": 3},
    {"max_completion_tokens": 0, "logprobs": True},
    {"tools": [], "tool_choice": "none", "extra_body": {"modalities": ["text"], "store": True}},
    {"extra_body": {"add_generation_prompt": False}},
]
PROMPTS: list[Any] = ["one", ["one", "two", "three"], [70, 71, 72], [[70, 71], [72]]]


def identify(value: object) -> str:
    return str(value).replace("'", "")[:60]


@pytest.mark.parametrize("parameters", SHARED + COMPLETIONS, ids=identify)
def test_completions_as_openai_clients_expect_them_streamed_or_not(
    tiny_server: Running, parameters: dict[str, Any]
) -> None:
    with tiny_server.client() as client:
        asked = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "seed": 3, **parameters}
        answer = client.completions.with_raw_response.create(**asked)
        raw = answer.http_response.json()
        whole = judge_completion(raw)
        assert isinstance(answer.parse(), type(whole))
        streamed = client.completions.with_raw_response.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = events(streamed.http_response.read().decode())
    for chunk in chunks:
        judge_completion(chunk, chunk=True)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert [chunk.get("usage") is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1]["choices"] == []
    assert counted(chunks[-1]["usage"]) == counted(raw["usage"])
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice.index]
        assert "".join(c["text"] for c in parts) == choice.text
        assert [c["finish_reason"] for c in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert parts[-1]["text"] == ""
        joined = merge([c["logprobs"] for c in parts])
        assert joined == (raw["choices"][choice.index]["logprobs"] or {})


def counted(usage: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that depend on earlier requests."""
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


def merge(logprobs: list[dict[str, Any] | None]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for part in logprobs:
        for key, values in (part or {}).items():
            joined.setdefault(key, []).extend(values)
    return joined


@pytest.mark.parametrize("parameters", SHARED + CHAT, ids=identify)
def test_chat_completions_as_openai_clients_expect_them_streamed_or_not(
    tiny_server: Running, parameters: dict[str, Any]
) -> None:
    with tiny_server.client() as client:
        asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "seed": 3, **parameters}
        raw = client.chat.completions.with_raw_response.create(**asked).http_response.json()
        whole = judge_chat(raw)
        streamed = client.chat.completions.with_raw_response.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = events(streamed.http_response.read().decode())
    for chunk in chunks:
        judge_chunk(chunk)
    assert [chunk.get("usage") is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert counted(chunks[-1]["usage"]) == counted(raw["usage"])
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice.index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert parts[-1]["delta"] == {}
        assert "".join(c["delta"].get("content", "") for c in parts) == choice.message.content
        assert [c["finish_reason"] for c in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        entries = [entry for c in parts for entry in (c["logprobs"] or {"content": []})["content"]]
        assert entries == (raw["choices"][choice.index]["logprobs"] or {"content": []})["content"]


@pytest.mark.parametrize("prompt", PROMPTS, ids=identify)
@pytest.mark.parametrize("n", [1, 2])
def test_usage_and_numbering_are_exact(tiny_server: Running, prompt: Any, n: int) -> None:
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    with tiny_server.client() as client:
        options: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt,
            "n": n,
            "max_tokens": 5,
            "logprobs": 0,
            "echo": True,
        }
        options["extra_body"] = {"ignore_eos": True, "min_tokens": 5}
        answer = client.completions.create(**options)
        assert [c.index for c in answer.choices] == list(range(len(many) * n))
        assert answer.usage is not None
        # This tokenizer has a token for each byte.
        assert answer.usage.prompt_tokens == sum(map(len, many))
        assert answer.usage.completion_tokens == 5 * n * len(many)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        for choice in answer.choices:
            own = many[choice.index // n]
            assert choice.logprobs is not None and choice.logprobs.tokens is not None
            assert len(choice.logprobs.tokens) == len(own) + 5
            if isinstance(own, str):
                assert choice.text.startswith(own)


def test_without_tokens_a_prompt_is_echoed_with_its_logprobs_alone(tiny_server: Running) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["hello", "you"], "echo": True, "logprobs": 2, "temperature": 0}
    with tiny_server.client() as client:
        some, none = (client.completions.create(**asked, max_tokens=count) for count in (2, 0))
    for prompt, before, alone in zip(["hello", "you"], some.choices, none.choices, strict=True):
        assert (alone.text, alone.finish_reason) == (prompt, "length")
        assert before.logprobs is not None and before.logprobs.token_logprobs is not None
        assert alone.logprobs is not None and alone.logprobs.token_logprobs is not None
        assert alone.logprobs.token_logprobs == before.logprobs.token_logprobs[: len(prompt)]
        assert alone.logprobs.token_logprobs[0] is None and len(alone.logprobs.token_logprobs) == len(prompt)
    assert none.usage is not None and (none.usage.prompt_tokens, none.usage.completion_tokens) == (8, 0)


def test_text_offsets_point_at_the_text_of_each_token(demo_server: Running) -> None:
    with demo_server.client() as client:
        answer = client.completions.create(
            model="demo", prompt="Fünf Äpfel kosten 5 €, ", max_tokens=24, temperature=0, logprobs=1, echo=True
        )
    [choice] = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    offsets, tokens, top = logprobs.text_offset, logprobs.tokens, logprobs.top_logprobs
    assert offsets is not None and tokens is not None and top is not None
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(choice.text)
    for start, end, token in zip(offsets, [*offsets[1:], len(choice.text)], tokens, strict=True):
        if start < end and not token.startswith("bytes:"):
            assert choice.text[start:end] == token or choice.text[start:end].endswith(token)
    for i in range(1, len(tokens)):
        assert tokens[i] in top[i] and len(top[i]) in (1, 2)


def test_top_logprobs_are_the_likeliest_in_order_and_bytes_make_the_token(demo_server: Running) -> None:
    with demo_server.client() as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Write the word naïve."}],
            max_tokens=12,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        # Greedy: the chosen token is the likeliest.
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, values[0])
        if "\ufffd" not in entry.token:
            assert entry.bytes is not None and bytes(entry.bytes).decode() == entry.token
    shown = b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode(errors="replace")
    assert shown.startswith(answer.choices[0].message.content or "?")


def test_a_sequence_that_ends_by_itself_says_stop_and_leaves_its_end_token_out(tiny_server: Running) -> None:
    with tiny_server.client() as client:
        answer = client.completions.create(model="tiny", prompt="hi", max_tokens=9, logit_bias={"1": 100})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == ""
    assert answer.usage is not None and answer.usage.completion_tokens == 1


def test_beam_search_is_that_of_the_engine(tiny_server: Running, tiny_model: Any) -> None:
    from octavo import LLM, BeamSearchParams

    llm = LLM(model=str(tiny_model), num_gpu_blocks_override=400, num_threads=1)
    expected = llm.beam_search("hello", BeamSearchParams(beam_width=4, max_tokens=5, ignore_eos=True), use_tqdm=False)
    with tiny_server.client() as client:
        answer = client.completions.create(
            model="tiny",
            prompt="hello",
            max_tokens=5,
            n=2,
            best_of=4,
            extra_body={"use_beam_search": True, "ignore_eos": True},
        )
    assert [c.text for c in answer.choices] == [o.text for o in expected[0].outputs[:2]]
    assert answer.usage is not None and answer.usage.completion_tokens == 10


def test_models_are_listed_and_found_by_each_name(tiny_server: Running) -> None:
    with tiny_server.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny", "alias"]
        assert client.models.retrieve("alias").id == "alias"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("owner/other")
        assert client.completions.create(model="alias", prompt="a", max_tokens=1).model == "alias"
    with tiny_server.http() as http:
        for raw in http.get("/v1/models").json()["data"]:
            assert judge_model(raw).owned_by == "octavo"
            assert raw["max_model_len"] == 256


def test_a_system_message_may_be_called_developer(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        texts = [
            http.post("/tokenize", json={"messages": [{"role": role, "content": "x"}]}).json()
            for role in ("system", "developer")
        ]
    assert texts[0] == texts[1]


def test_content_may_come_in_parts(tiny_server: Running) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    with tiny_server.http() as http:
        answer = http.post("/tokenize", json={"messages": [{"role": "user", "content": parts}]}).json()
    assert "one" in answer["prompt"] and "two" in answer["prompt"]


def test_text_goes_to_tokens_and_back(demo_server: Running) -> None:
    text = "Zwölf Boxkämpfer 🥊 jagen"
    with demo_server.http() as http:
        there = http.post("/tokenize", json={"prompt": text}).json()
        assert there["count"] == len(there["tokens"]) and there["max_model_len"] == 2048
        assert http.post("/detokenize", json={"tokens": there["tokens"]}).json()["prompt"] == text


def test_the_prefix_cache_can_be_reset(tiny_server: Running) -> None:
    prompt = "a long beginning that fills several blocks of the cache, said twice"
    with tiny_server.client() as client, tiny_server.http() as http:

        def cached() -> int:
            usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
            assert usage is not None and usage.prompt_tokens_details is not None
            return usage.prompt_tokens_details.cached_tokens or 0

        http.post("/reset_prefix_cache")
        assert cached() == 0
        assert cached() == 64
        http.post("/reset_prefix_cache")
        assert cached() == 0
        # Requests with different salts share nothing.
        other = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "x"})
        assert other.usage is not None and other.usage.prompt_tokens_details is not None
        assert other.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("streams", [False, True])
def test_special_tokens_of_a_prompt_are_echoed_where_they_stand(special_server: Running, streams: bool) -> None:
    text = "a<think>bc</think> d"
    with special_server.http() as http:
        ids = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        for prompt in (text, ids):
            asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2, "add_special_tokens": False}
            answer = http.post("/v1/completions", json={**asked, "stream": streams})
            chunks = events(answer.text) if streams else [answer.json()]
            choices = [chunk["choices"][0] for chunk in chunks]
            assert "".join(choice["text"] for choice in choices).startswith(text)
            found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            offsets = [offset for part in found for offset in part["text_offset"]]
            names = [name for part in found for name in part["tokens"]]
            assert names[:7] == ["a", "<think>", "b", "c", "</think>", " ", "d"]
            assert offsets[:8] == [0, 1, 8, 9, 10, 18, 19, 20]


def test_usage_is_sent_while_it_grows_only_where_it_is_asked_for(tiny_server: Running) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "stream": True}
    with tiny_server.http() as http:
        for options, sends in (
            ({"continuous_usage_stats": True}, False),
            ({"continuous_usage_stats": True, "include_usage": False}, False),
            ({"continuous_usage_stats": True, "include_usage": True}, True),
        ):
            chunks = events(http.post("/v1/completions", json={**body, "stream_options": options}).text)
            assert {bool(chunk.get("usage")) for chunk in chunks} == {sends}, options


def test_tokens_are_shown_as_the_vocabulary_has_them(special_server: Running) -> None:
    with special_server.http() as http:
        for given in ({"prompt": "a <think>"}, {"messages": [{"role": "user", "content": "a <think>"}]}):
            plain = http.post("/tokenize", json=given).json()
            shown = http.post("/tokenize", json={**given, "return_token_strs": True}).json()
            assert len(shown["token_strs"]) == plain["count"] and "Ġ" in shown["token_strs"]
            assert "<think>" in shown.pop("token_strs") and shown == plain
        unknown = http.post("/tokenize", json={"prompt": "a", "return_tokens_strs": True})
        assert unknown.status_code == 400 and "return_token_strs" in unknown.json()["error"]["message"]
        unknown = http.post("/detokenize", json={"tokens": [5], "token": 3})
        assert unknown.status_code == 400 and unknown.json()["error"]["param"] == "token"
