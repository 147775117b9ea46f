"""Vectors and class scores over HTTP: what they are, in every form in which they are asked for."""

from __future__ import annotations

import base64
import re
import threading
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest

from octavo import LLM
from octavo.server.pooling import ClassificationList, EmbeddingList, PooledList
from tests.busy_machine import eventually
from tests.embedding_models import HIDDEN_SIZE, PROMPTS
from tests.server.running_server import Running

VECTORS = "/v1/embeddings"
TEXTS = ["the river", "bread and butter", "a", "why not?", "the river is long, and so is this text about it."]


def vectors(server: Running, **body: Any) -> np.ndarray:
    answer = server.post(VECTORS, **body)
    EmbeddingList.model_validate(answer, strict=True)
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    if body.get("encoding_format") == "base64":
        return np.stack([np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in answer["data"]])
    return np.array([entry["embedding"] for entry in answer["data"]], np.float32)


@pytest.fixture(scope="module")
def tokens(vector_server: Running) -> list[list[int]]:
    """Token ids of the texts."""
    return [vector_server.post("/tokenize", prompt=text)["tokens"] for text in TEXTS]


def test_a_vector_has_the_same_bits_in_every_form_alone_and_in_company(
    vector_server: Running, tokens: list[list[int]]
) -> None:
    rows = vectors(vector_server, input=TEXTS)
    assert rows.shape == (len(TEXTS), HIDDEN_SIZE) and np.isfinite(rows).all()
    assert np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-6)
    assert np.array_equal(vectors(vector_server, input=TEXTS, encoding_format="base64"), rows)
    assert np.array_equal(vectors(vector_server, input=tokens), rows)
    assert np.array_equal(vectors(vector_server, input=tokens[0], encoding_format=None), rows[:1])
    for i, text in enumerate(TEXTS):
        assert np.array_equal(vectors(vector_server, input=text)[0], rows[i])
    assert np.array_equal(vectors(vector_server, input=TEXTS[::-1] * 20), np.tile(rows[::-1], (20, 1)))


def test_a_server_gives_the_vectors_of_the_engine_offline(vector_server: Running) -> None:
    llm = LLM(vector_server.model, num_threads=1)
    outputs: list[Any] = [output.outputs for output in llm.embed(TEXTS, use_tqdm=False)]
    offline = np.array([output.embedding for output in outputs], np.float32)
    assert np.array_equal(vectors(vector_server, input=TEXTS), offline)


def test_usage_counts_the_tokens_that_were_computed(vector_server: Running, tokens: list[list[int]]) -> None:
    answer = vector_server.post(VECTORS, input=TEXTS, model="vectors")
    count = sum(map(len, tokens))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count} and answer["model"] == "vectors"
    cut = vector_server.post(VECTORS, input=TEXTS, truncate_prompt_tokens=5)["usage"]["prompt_tokens"]
    assert cut == sum(min(len(ids), 5) for ids in tokens)


def test_long_texts_are_cut_where_that_is_asked_for(vector_server: Running) -> None:
    long = "abc " * 3000
    [row] = vectors(vector_server, input=[long], truncate_prompt_tokens=-1)
    assert np.array_equal(vectors(vector_server, input="abc " * 20 + "ab", truncate_prompt_tokens=-1)[0], row)
    ids = vector_server.post("/tokenize", prompt="abc")["tokens"]
    assert np.array_equal(
        vectors(vector_server, input="abcd", truncate_prompt_tokens=5), vectors(vector_server, input=[ids])
    ), "the token at the end stays"
    assert np.array_equal(
        vectors(vector_server, input=[*ids, *ids], truncate_prompt_tokens=5), vectors(vector_server, input=[ids])
    )
    assert not np.array_equal(vectors(vector_server, input="abc", add_special_tokens=False)[0], row)


def test_dimensions_are_the_first_numbers_with_length_one(vector_server: Running) -> None:
    whole = vectors(vector_server, input=TEXTS)
    for size in (8, 16):
        part = vectors(vector_server, input=TEXTS, dimensions=size)
        assert part.shape == (len(TEXTS), size)
        assert np.allclose(part, whole[:, :size] / np.linalg.norm(whole[:, :size], axis=1, keepdims=True), atol=1e-6)
    raw = vectors(vector_server, input=TEXTS, use_activation=False)
    assert np.allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), whole, atol=1e-6)
    assert not np.allclose(np.linalg.norm(raw, axis=1), 1.0)


def test_the_models_prompts_are_named_as_clients_name_them(vector_server: Running) -> None:
    with_prompt = vectors(vector_server, input=[PROMPTS["query"] + text for text in TEXTS])
    for named in ({"prompt_name": "query"}, {"input_type": "query"}, {"input_type": "search_query"}):
        assert np.array_equal(vectors(vector_server, input=TEXTS, **named), with_prompt), named
    assert np.array_equal(
        vectors(vector_server, input=TEXTS, input_type="passage"), vectors(vector_server, input=TEXTS)
    ), "its prompt for documents is empty"


def test_llama_cpps_form_is_a_matrix_of_one_row(vector_server: Running) -> None:
    rows = vectors(vector_server, input=TEXTS)
    raw = vectors(vector_server, input=TEXTS, use_activation=False)
    for path in ("/embedding", "/embeddings"):
        answer = vector_server.post(path, content=TEXTS)
        assert [entry["index"] for entry in answer] == list(range(len(TEXTS)))
        assert np.array_equal(np.array([entry["embedding"] for entry in answer], np.float32)[:, 0], rows)
    answer = vector_server.post("/embedding", input=TEXTS, embd_normalize=-1)
    assert np.array_equal(np.array([entry["embedding"] for entry in answer], np.float32)[:, 0], raw)


def test_pooling_gives_a_row_for_each_token_or_one_for_all(vector_server: Running, tokens: list[list[int]]) -> None:
    answer = vector_server.post("/pooling", input=TEXTS)
    PooledList.model_validate(answer, strict=True)
    found = [np.array(entry["data"], np.float32) for entry in answer["data"]]
    assert [rows.shape for rows in found] == [(len(ids), HIDDEN_SIZE) for ids in tokens]
    coded = vector_server.post("/pooling", input=TEXTS, encoding_format="base64")["data"]
    assert [base64.b64decode(entry["data"]) for entry in coded] == [rows.tobytes() for rows in found]
    whole = vector_server.post("/pooling", input=TEXTS, task="embed")["data"]
    assert np.array_equal(np.array([entry["data"] for entry in whole], np.float32), vectors(vector_server, input=TEXTS))


def test_classes_have_names_and_probabilities(class_server: Running) -> None:
    answer = class_server.post("/classify", input=TEXTS)
    ClassificationList.model_validate(answer, strict=True)
    probs = np.array([entry["probs"] for entry in answer["data"]])
    assert probs.shape == (len(TEXTS), 3) and np.allclose(probs.sum(axis=1), 1.0, atol=1e-6)
    assert [entry["label"] for entry in answer["data"]] == [f"label {best}" for best in probs.argmax(axis=1)]
    assert {entry["num_classes"] for entry in answer["data"]} == {3}
    raw = class_server.post("/classify", input=TEXTS[0], use_activation=False)["data"][0]["probs"]
    assert np.allclose(np.exp(raw) / np.exp(raw).sum(), probs[0], atol=1e-6)
    pooled = class_server.post("/pooling", input=TEXTS)["data"]
    assert np.allclose([entry["data"] for entry in pooled], probs)


def test_a_model_that_generates_gives_vectors_beside_its_answers(tiny_server: Running) -> None:
    text = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
    before = tiny_server.post("/v1/completions", **text)["choices"]
    rows = vectors(tiny_server, input=TEXTS)
    assert len({row.tobytes() for row in rows}) == len(TEXTS)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(vectors(tiny_server, input=TEXTS * 8))),
        threading.Thread(target=lambda: results.append(tiny_server.post("/v1/completions", **text)["choices"])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before in [result for result in results if isinstance(result, list)]
    [many] = [result for result in results if not isinstance(result, list)]
    assert np.array_equal(many, np.tile(rows, (8, 1)))


def test_a_conversation_is_a_text_as_the_template_writes_it(tiny_server: Running) -> None:
    messages = [{"role": "user", "content": "hi"}]
    written = tiny_server.post("/tokenize", messages=messages, add_generation_prompt=False)
    assert np.array_equal(vectors(tiny_server, messages=messages), vectors(tiny_server, input=written["tokens"]))
    opened = tiny_server.post("/tokenize", messages=messages)
    both = vectors(tiny_server, messages=messages, add_generation_prompt=True)
    assert np.array_equal(both, vectors(tiny_server, input=opened["tokens"]))


def test_models_say_what_they_can_do(
    vector_server: Running, pair_server: Running, class_server: Running, tiny_server: Running
) -> None:
    def told(server: Running) -> tuple[list[str], int | None]:
        with server.http() as http:
            model = http.get("/v1/models").json()["data"][0]
        return model["tasks"], model.get("dimensions")

    assert told(vector_server) == (["embed", "token_embed", "score"], HIDDEN_SIZE)
    assert told(pair_server) == (["classify", "score"], None)
    assert told(class_server) == (["classify"], None)
    assert told(tiny_server) == (["generate", "embed", "token_embed"], 32)


def test_requests_are_counted_and_logged(vector_server: Running) -> None:
    name = "octavo_pooling_requests_finished_total"
    vectors(vector_server, input="one")
    before = vector_server.metric(name, task="embed", reason="stop")
    with vector_server.http() as http:
        http.post(VECTORS, json={"input": TEXTS}, headers={"X-Request-Id": "of-vectors"})
    assert vector_server.metric(name, task="embed", reason="stop") == before + len(TEXTS)
    assert vector_server.metric("octavo_http_responses_total", route=VECTORS, code="200") >= 2
    line = vector_server.wait_for_log("request_id=of-vectors")
    assert f"inputs={len(TEXTS)} " in next(line for line in line.splitlines() if "of-vectors" in line)


def test_a_client_that_leaves_frees_the_engine(vector_server: Running) -> None:
    with pytest.raises(httpx.ReadTimeout), vector_server.http(timeout=0.05) as http:
        http.post(VECTORS, json={"input": ["a b c d e f g h i j k l m " * 4] * 512})
    name = "octavo_pooling_requests_finished_total"

    def page() -> str:
        with vector_server.http() as http:
            return http.get("/metrics").text

    eventually(lambda: re.search(name + r'{.*reason="abort"', page()) is not None)
    eventually(lambda: vector_server.metric("octavo_requests", state="running") == 0)
    eventually(lambda: vector_server.metric("octavo_requests", state="waiting") == 0)
    assert vectors(vector_server, input="a").shape == (1, HIDDEN_SIZE)


def test_embed_of_text_embeddings_inference_answers_with_the_vectors_alone(vector_server: Running) -> None:
    texts = ["the river", "bread"]
    with vector_server.http() as http:
        wanted = [entry["embedding"] for entry in http.post("/v1/embeddings", json={"input": texts}).json()["data"]]
        assert http.post("/embed", json={"inputs": texts}).json() == wanted
        assert http.post("/embed", json={"inputs": texts[0], "normalize": True}).json() == wanted[:1]
        bare = http.post("/embed", json={"inputs": texts, "normalize": False}).json()
        lengths = np.linalg.norm(np.array(bare), axis=1)
        assert not np.allclose(lengths, 1) and np.allclose(np.array(bare) / lengths[:, None], wanted, atol=1e-6)
        long = {"inputs": "river " * 5000}
        assert http.post("/embed", json=long).status_code == 400
        assert http.post("/embed", json={**long, "truncate": True}).status_code == 200
        error = http.post("/embed", json={"inputs": ["a", ""]}).json()["error"]
        assert error["param"] == "inputs" and error["message"].startswith("inputs[1]")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", np.dtype(np.float32)),
        ("float16", np.dtype(np.float16)),
        ("bfloat16", np.dtype(ml_dtypes.bfloat16)),
        ("fp8_e4m3", np.dtype(ml_dtypes.float8_e4m3fn)),
        ("fp8_e5m2", np.dtype(ml_dtypes.float8_e5m2)),
    ],
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_vectors_are_sent_in_the_type_and_order_of_bytes_that_is_asked_for(
    name: str, dtype: np.dtype[Any], path: str, vector_server: Running
) -> None:
    field = "data" if path == "/pooling" else "embedding"

    def sent(**fields: Any) -> Any:
        with vector_server.http() as http:
            answer = http.post(path, json={"input": "the river", **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["data"][0][field]

    rounded = np.array(sent(), np.float32).astype(dtype)
    assert np.array_equal(np.array(sent(embed_dtype=name), np.float32), rounded.astype(np.float32))
    for order, mark in ((None, "<"), ("native", "<"), ("little", "<"), ("big", ">")):
        data = base64.b64decode(sent(embed_dtype=name, encoding_format="base64", endianness=order))
        words = np.frombuffer(data, f"{mark}u{dtype.itemsize}").astype(f"u{dtype.itemsize}")
        assert np.array_equal(words.view(dtype), rounded.reshape(-1))
