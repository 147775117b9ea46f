"""Options that change what a server answers: one server has all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running_server import TINY, Running, running
from tests.server.test_fields import CHAT, TEXT, prompt_of, send, text_of
from tests.server.test_streams import ask, stream, texts

#: Of the small model's tokens, printable ones: their text gives the same tokens again.
ASCII = {str(token): 100.0 for token in range(34, 95)}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("options")
    own = {"temperature": 0.0, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(own))
    flags = ("--generation-config", str(folder), "--unknown-fields", "ignore", "--trust-request-chat-template")
    drafts = ("--speculative-config", '{"method": "ngram", "adaptive": false}')
    stores = ("--max-stored-responses", "0", "--no-ui")
    with running(
        tiny_model, folder / "log", *TINY, *flags, *drafts, "--max-num-batched-tokens", "64", *stores
    ) as server:
        yield server


def test_a_body_that_leaves_fields_out_has_the_models_defaults(server: Running) -> None:
    with server.http() as http:

        def text(path: str, **fields: Any) -> tuple[str, int]:
            body = (
                {"prompt": "Hello"} if path == "completions" else {"messages": [{"role": "user", "content": "Hello"}]}
            )
            answer = http.post(f"/v1/{path}", json=body | {"ignore_eos": True} | fields).json()
            choice = answer["choices"][0]
            return choice["text"] if path == "completions" else choice["message"]["content"], answer["usage"][
                "completion_tokens"
            ]

        for path in ("completions", "chat/completions"):
            assert text(path) == text(path, temperature=0.0)
            assert text(path)[1] == 5
            assert text(path, max_tokens=3)[1] == 3
            warm = {"temperature": 1.0, "seed": 3, "max_tokens": 20}
            assert text(path, **warm) == text(path, **warm) != text(path, max_tokens=20)


def test_usage_and_metrics_say_what_was_drafted(server: Running) -> None:
    with server.http() as http:
        body = {"prompt": "a b c a b c a b c", "max_tokens": 60, "ignore_eos": True}
        details = http.post("/v1/completions", json=body).json()["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
        lines = http.get("/metrics").text.splitlines()
        (drafted,) = (line for line in lines if line.startswith("octavo_spec_decode_num_draft_tokens_total{"))
        assert float(drafted.split()[-1]) >= sum(details.values())


def test_a_predicted_output_comes_sooner_and_is_the_same(server: Running) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with server.http() as http:

        def ask(**fields: Any) -> tuple[str, dict[str, int] | None]:
            body = {"messages": messages, "max_tokens": 60, "ignore_eos": True, "logit_bias": ASCII}
            answer = http.post(CHAT, json=body | fields).json()
            return text_of(answer), answer["usage"].get("completion_tokens_details")

        text, _ = ask()
        parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
        for content in (text, parts):
            found, details = ask(prediction={"type": "content", "content": content})
            assert found == text
            assert details is not None and details["accepted_prediction_tokens"] > 40
        assert ask(prediction={"type": "content", "content": ""})[0] == text
        wrong: list[Any] = ["text", {"type": "text", "content": "a"}, {"content": "a"}, {"type": "content"}]
        wrong += [{"type": "content", "content": value} for value in (7, [{"type": "image_url"}], ["a"])]
        for value in wrong:
            answer = http.post(CHAT, json={"messages": messages, "prediction": value})
            assert answer.status_code == 400 and "prediction" in answer.json()["error"]["param"], answer.text
        answer = http.post(
            CHAT, json={"messages": messages, "prediction": {"type": "content", "content": "a" * 99_999}}
        )
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prediction"


def test_a_server_that_keeps_no_responses_says_so(server: Running) -> None:
    with server.http() as http:
        body = {"input": "a", "max_output_tokens": 2}
        response = http.post("/v1/responses", json=body).json()
        assert response["store"] is False
        answer = http.post("/v1/responses", json={**body, "previous_response_id": response["id"]})
        assert answer.status_code == 404 and "keeps none" in answer.json()["error"]["message"]
        answer = http.post("/v1/responses", json={**body, "store": True})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "store"
        answer = http.post("/v1/responses", json={**body, "background": True})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "background"
        assert "max_stored_responses" in error["message"]


def test_the_page_can_be_turned_off(server: Running) -> None:
    with server.http() as http:
        assert http.get("/", headers={"accept": "text/html,*/*"}).json()["name"] == "Octavo"
        assert http.get("/ui/main.js").status_code == 404


def test_unknown_fields_are_ignored_where_the_operator_says_so(server: Running) -> None:
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ word }}"
    messages = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = {
        "messages": messages,
        "chat_template": template,
        "chat_template_kwargs": {"word": "end", "self": 1},
    }
    with server.http() as http:
        for _ in range(2):
            assert send(http, TEXT, no_such_field=1)[0] == 200
            assert send(http, TEXT, mirostat=2)[0] == 200
        assert prompt_of(http, **body) == "<hi>end"
        broken = http.post(CHAT, json={**body, "chat_template": "{% if"})
        assert broken.status_code == 400 and "jinja" in broken.json()["error"]["message"]
    for name in ("no_such_field", "mirostat"):
        assert server.wait_for_log(name).count(name) == 1


def test_a_prompt_that_takes_several_steps_is_echoed_with_all_its_logprobs(server: Running) -> None:
    prompt = "The quick brown fox jumps. " * 7
    whole = ask(server, prompt, echo=True, logprobs=1, max_tokens=3, temperature=0)
    chunks = stream(server, prompt=prompt, echo=True, logprobs=1, max_tokens=3, temperature=0)
    first = chunks[0]["choices"][0]
    assert len(first["logprobs"]["tokens"]) == len(prompt)
    assert "".join(texts(chunks)) == whole["text"]
    offsets = [o for c in chunks for o in (c["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]


# Token ids -----------------------------------------------------------------------------------------------------------


def events_of(http: httpx.Client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = http.post(route, json={**body, "stream": True}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_token_ids_come_with_the_answer_whole_and_streamed(tiny_server: Running, route: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if route == CHAT else {"prompt": "hi"}
    body = {**prompt, "max_tokens": 12, "temperature": 1, "seed": 5, "ignore_eos": True, "n": 2}
    with tiny_server.http() as http:
        plain = http.post(route, json=body).json()
        assert "token_ids" not in plain["choices"][0]
        answer = http.post(route, json={**body, "return_token_ids": True}).json()
        shown = http.post("/tokenize", json=prompt).json()["tokens"]
        prompts = [answer["prompt_token_ids"]] if route == CHAT else [c["prompt_token_ids"] for c in answer["choices"]]
        assert all(ids == shown for ids in prompts)
        for choice in answer["choices"]:
            text = choice["message"]["content"] if route == CHAT else choice["text"]
            assert len(choice["token_ids"]) == 12
            assert http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"].startswith(text[:4])
        chunks = events_of(http, route, {**body, "return_token_ids": True})
        streamed: dict[int, list[int]] = {0: [], 1: []}
        for chunk in chunks:
            for choice in chunk["choices"]:
                streamed[choice["index"]] += choice.get("token_ids") or []
        assert streamed == {choice["index"]: choice["token_ids"] for choice in answer["choices"]}
        first = chunks[0] if route == CHAT else chunks[0]["choices"][0]
        assert first["prompt_token_ids"] == shown


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_logprobs_name_tokens_by_their_ids(tiny_server: Running, route: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if route == CHAT else {"prompt": "hi"}
    logprobs = {"logprobs": True, "top_logprobs": 1} if route == CHAT else {"logprobs": 1}
    body = {**prompt, **logprobs, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with tiny_server.http() as http:
        [choice] = http.post(route, json={**body, "return_tokens_as_token_ids": True}).json()["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    if route == CHAT:
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == names
        assert [entry["top_logprobs"][0]["token"] for entry in content] == names
    else:
        assert choice["logprobs"]["tokens"] == names
        assert [next(iter(top)) for top in choice["logprobs"]["top_logprobs"]] == names


def test_logprobs_of_listed_tokens_are_those_of_the_whole_vocabulary(tiny_server: Running) -> None:
    listed = [70, 71, 200]
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_tokens_as_token_ids": True}
    with tiny_server.http() as http:
        text = {**body, "prompt": "hi", "logprobs": 0}
        [choice] = http.post(TEXT, json={**text, "logprob_token_ids": listed}).json()["choices"]
        chat = {**body, "messages": [{"role": "user", "content": "hi"}]}
        [turn] = http.post(CHAT, json={**chat, "logprob_token_ids": listed}).json()["choices"]
        [plain] = http.post(CHAT, json={**chat, "logprobs": True, "top_logprobs": 20}).json()["choices"]
        refused = http.post(TEXT, json={**text, "logprob_token_ids": [10**6]})
    names = {f"token_id:{token}" for token in listed}
    own = choice["logprobs"]["tokens"]
    assert all(set(top) == names | {token} for top, token in zip(choice["logprobs"]["top_logprobs"], own, strict=True))
    for entry, same in zip(turn["logprobs"]["content"], plain["logprobs"]["content"], strict=True):
        assert (entry["token"], entry["logprob"]) == (same["token"], same["logprob"])
        found = {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
        known = {top["token"]: top["logprob"] for top in same["top_logprobs"]}
        assert set(found) == names and all(known.get(name, found[name]) == found[name] for name in found)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprob_token_ids"
