"""llama.cpp's native routes give what OpenAI's do, in llama.cpp's form."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from octavo.server.fields import marks_of
from octavo.server.llamacpp import LlamaCompletionRequest
from tests.server.answers import answer_of

PLAIN = {"temperature": 0, "ignore_eos": True}


def completed(http: httpx.Client, **fields: Any) -> Any:
    return answer_of(http, "/completion", **{"prompt": "hello", "n_predict": 8, **PLAIN, **fields})


def of_openai(http: httpx.Client, **fields: Any) -> Any:
    body = {"prompt": "hello", "max_tokens": 8, **PLAIN, "return_token_ids": True, **fields}
    return answer_of(http, "/v1/completions", **body)["choices"]


def test_a_completion_is_that_of_openais_route(http: httpx.Client) -> None:
    [plain] = of_openai(http)
    answer = completed(http, return_tokens=True)
    assert answer["content"] == plain["text"] and answer["tokens"] == plain["token_ids"]
    assert answer["stop"] is True and answer["stop_type"] == "limit" and answer["stopping_word"] == ""
    assert answer["tokens_predicted"] == 8 and answer["tokens_evaluated"] == len(plain["prompt_token_ids"])
    assert answer["prompt"] == "hello" and answer["model"] == "tiny" and not answer["truncated"]
    assert answer["generation_settings"]["temperature"] == 0 and answer["timings"]["predicted_n"] == 8
    assert completed(http)["tokens"] == []


def test_a_stream_adds_up_to_the_answer(http: httpx.Client) -> None:
    whole = completed(http, return_tokens=True, n_probs=2)
    body = {"prompt": "hello", "n_predict": 8, **PLAIN, "return_tokens": True, "n_probs": 2, "stream": True}
    lines = http.post("/completion", json=body).text.split("\n\n")
    *events, last = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [token for event in events for token in event["tokens"]] == whole["tokens"]
    assert all(event["stop"] is False for event in events) and events[-1]["tokens_predicted"] == 8
    probabilities = [entry for event in events for entry in event["completion_probabilities"]]
    assert probabilities == whole["completion_probabilities"]
    same = ("stop", "stop_type", "tokens_predicted", "tokens_evaluated", "prompt", "model")
    assert {name: last[name] for name in same} == {name: whole[name] for name in same}


def test_probabilities_are_the_logprobs_of_openais_route(http: httpx.Client) -> None:
    [plain] = of_openai(http, logprobs=3)
    entries = completed(http, n_probs=3)["completion_probabilities"]
    assert [entry["id"] for entry in entries] == plain["token_ids"]
    assert [entry["logprob"] for entry in entries] == plain["logprobs"]["token_logprobs"]
    for entry, top in zip(entries, plain["logprobs"]["top_logprobs"], strict=True):
        assert sorted(one["logprob"] for one in entry["top_logprobs"]) == sorted(top.values())[-3:]
        assert entry["top_logprobs"][0]["id"] == entry["id"]  # greedy


@pytest.mark.parametrize("stream", [False, True])
def test_timings_are_those_of_the_engine(http: httpx.Client, stream: bool) -> None:
    begun = time.perf_counter()
    text = http.post("/completion", json={"prompt": "hello", "n_predict": 8, **PLAIN, "stream": stream}).text
    spent = (time.perf_counter() - begun) * 1e3
    timings = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))["timings"]
    assert timings["predicted_n"] == 8
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] > 0
    assert timings["prompt_ms"] + timings["predicted_ms"] <= spent
    assert timings["predicted_per_second"] == pytest.approx(8 / timings["predicted_ms"] * 1e3)


def test_prompts_are_texts_token_ids_or_both(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "hello", "add_special_tokens": False}).json()["tokens"]
    plain = of_openai(http, prompt=ids)[0]["text"]
    assert completed(http, prompt=ids)["content"] == plain
    assert completed(http, prompt=["he", *ids[2:]] if len(ids) == 5 else ["hello"])
    first = http.post("/tokenize", json={"prompt": "he", "add_special_tokens": False}).json()["tokens"]
    assert completed(http, prompt=["he", 65, 66])["content"] == of_openai(http, prompt=[*first, 65, 66])[0]["text"]
    answers = completed(http, prompt=["hello", "bye"])
    assert [answer["content"] for answer in answers] == [c["text"] for c in of_openai(http, prompt=["hello", "bye"])]
    assert [answer["index"] for answer in answers] == [0, 1]


def test_sampling_stops_and_forms_do_what_they_say(http: httpx.Client) -> None:
    [plain] = of_openai(http, repetition_penalty=1.5)
    assert completed(http, repeat_penalty=1.5)["content"] == plain["text"]
    text = completed(http)["content"]
    stopped = completed(http, stop=[text[3]])
    assert stopped["stop_type"] == "word" and stopped["stopping_word"] == text[3]
    assert stopped["content"] == text[: text.index(text[3])]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    assert "a" in json.loads(completed(http, json_schema=schema, n_predict=60, ignore_eos=False)["content"])
    assert completed(http, n_predict=-1, prompt="a" * 240)["tokens_predicted"] < 20
    one, other = (completed(http, temperature=1, seed=seed)["content"] for seed in (1, 1))
    assert one == other


def test_fields_have_their_marks(http: httpx.Client) -> None:
    text = completed(http)["content"]
    for name, mark in marks_of(LlamaCompletionRequest).items():
        if mark is not None and mark.is_hint:
            assert completed(http, **{name: "x"})["content"] == text, name
        elif mark is not None:
            answer = http.post("/completion", json={"prompt": "a", name: "strange"})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name, name
    answer = http.post("/completion", json={"prompt": "a", "n_predict": 1000})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n_predict"
    answer = http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input_suffix"


def test_the_server_tells_of_itself(http: httpx.Client) -> None:
    props = http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 256 and props["model_alias"] == "tiny"
    slots = http.get("/slots").json()
    assert len(slots) == props["total_slots"] and not any(slot["is_processing"] for slot in slots)
    messages = [{"role": "user", "content": "hi"}]
    prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert prompt == http.post("/tokenize", json={"messages": messages}).json()["prompt"]
    info = http.get("/tokenizer_info").json()
    assert info["model_max_length"] == 256 and info["chat_template"] == props["chat_template"]
    assert info["eos_token"] == props["eos_token"] == "<eos>"


def test_texts_become_tokens_and_back_in_llamas_words(http: httpx.Client) -> None:
    text = "héllo"
    plain = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    answer = http.post("/tokenize", json={"content": text, "add_special": False, "parse_special": True}).json()
    assert answer == {"tokens": plain}
    pieces = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == plain
    said = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert said.decode() == text and any(isinstance(piece["piece"], list) for piece in pieces)
    back = http.post("/detokenize", json={"tokens": plain}).json()
    assert back == {"prompt": text, "content": text}


# Of OpenAI's routes --------------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_on_either_side(http: httpx.Client) -> None:
    ids = list(range(40, 60))
    for side, kept in (("left", ids[-5:]), ("right", ids[:5]), (None, ids[-5:])):
        [choice] = of_openai(http, prompt=ids, truncate_prompt_tokens=5, truncation_side=side)
        assert choice["prompt_token_ids"] == kept


def test_a_chat_echoes_the_last_message_of_the_assistant(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, "}]
    body = {"messages": messages, "max_tokens": 6, **PLAIN}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    plain = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    answer = http.post("/v1/chat/completions", json={**body, "echo": True}).json()
    assert answer["choices"][0]["message"]["content"] == "well, " + plain
    lines = http.post("/v1/chat/completions", json={**body, "echo": True, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "well, " + plain
    user = http.post("/v1/chat/completions", json={"messages": messages[:1], "max_tokens": 6, **PLAIN, "echo": True})
    assert "hi" not in user.json()["choices"][0]["message"]["content"][:2]
