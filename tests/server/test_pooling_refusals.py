"""Requests for vectors and scores that cannot be served: refused by name, with the figure, and nothing else is hurt."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import EmbeddingCreateParams
from safetensors.torch import load_file, save_file

from octavo.server.fields import marks_of
from octavo.server.pooling import EmbeddingRequest, RerankRequest
from tests.embedding_models import make_encoder
from tests.server.running_server import TINY, Running, Serve, check_refusal, running

VECTORS = "/v1/embeddings"


def refused(
    server: Running, path: str, body: dict[str, Any], param: str | None, *words: str, status: int = 400
) -> dict[str, Any]:
    with server.http() as http:
        error = check_refusal(http.post(path, json=body), status, *words)
    assert error["param"] == param, error
    return error


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", ["input or messages"]),
        ({"input": None}, "input", ["input or messages"]),
        ({"input": []}, "input", ["empty list"]),
        ({"input": ""}, "input", ["empty"]),
        ({"input": ["a", ""]}, "input", ["input[1]", "empty"]),
        ({"input": [[5], []]}, "input", ["input[1]", "empty"]),
        ({"input": [5, "a"]}, "input", ["entry 0 is a token id, entry 1 a text"]),
        ({"input": ["a", [5]]}, "input", ["entry 0 is a text, entry 1 a list of token ids"]),
        ({"input": [[5], 6]}, "input", ["cannot be in one list"]),
        ({"input": {"text": "a"}}, "input", []),
        ({"input": [True]}, "input", []),
        ({"input": [1.5]}, "input", []),
        ({"input": [5, 9999]}, "input", ["input: token ids", "9999"]),
        ({"input": [[5], [-1]]}, "input", ["input[1]", "-1"]),
        ({"input": ["a", "x" * 80]}, "input", ["input[1]", "82 tokens", "64", "truncate_prompt_tokens=-1"]),
        ({"input": [5] * 65}, "input", ["65 tokens", "64"]),
        ({"input": "x y " * 20_000}, "input", ["80000 characters"]),
        ({"input": ["a"] * 513}, "input", ["513", "512"]),
        ({"input": ["a"] * 100_000}, None, ["65536"]),
        ({"input": "\ud800"}, None, ["Unicode"]),
        ({"input": "abc", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ["at least 1"]),
        ({"input": "abc", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", ["more than 2"]),
        ({"input": "abc", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ["-1"]),
        ({"input": "a", "dimensions": 9}, "dimensions", ["8, 16, 32", "9"]),
        ({"input": "a", "dimensions": 0}, "dimensions", ["0"]),
        ({"input": "a", "dimensions": 33}, "dimensions", ["33"]),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", ["'base64'", "'hex'"]),
        ({"input": "a", "prompt_name": "poem"}, "prompt_name", ["'query', 'document'", "'poem'"]),
        ({"input": "a", "input_type": "poem"}, "input_type", ["query or document", "'poem'"]),
        ({"input": "a", "input_type": "query", "prompt_name": "query"}, "input_type", ["exclude"]),
        ({"input": [5], "prompt_name": "query"}, "prompt_name", ["token ids"]),
        ({"input": "a", "priority": 3}, "priority", ["fcfs"]),
        ({"input": "a", "ttft_target": 0.1}, "ttft_target", ["deadline"]),
        ({"input": "a", "model": "other"}, "model", ["other", "vectors"]),
        ({"input": "a", "normalize": True}, "normalize", ["use_activation"]),
        ({"input": "a", "embed_dtype": "float64"}, "embed_dtype", ["float32"]),
        ({"input": "a", "zzz": 1}, "zzz", ["unknown field"]),
        ({"messages": [{"role": "user", "content": "a"}]}, None, ["no chat template"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_vectors_that_cannot_be_had(
    vector_server: Running, fields: dict[str, Any], param: str | None, words: list[str]
) -> None:
    status = 404 if param == "model" else 400
    if "\ud800" in str(fields.get("input")):
        with vector_server.http() as http:
            response = http.post(VECTORS, content=b'{"input": ["a", "\\ud800"]}')
        assert response.status_code == 400 and words[0] in response.text, response.text
        return
    refused(vector_server, VECTORS, fields, param, *words, status=status)


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/v1/rerank", {"query": "a"}, "documents", ["missing"]),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", ["empty list"]),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", ["empty"]),
        ("/v1/rerank", {"query": "a", "documents": ["a", ""]}, "documents", ["documents[1]", "empty"]),
        ("/v1/rerank", {"query": "a", "documents": ["a", 5]}, "documents", ["documents[1]"]),
        ("/v1/rerank", {"query": "a", "documents": ["a", "x" * 80]}, "documents", ["documents[1]", "84 tokens"]),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", ["1"]),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields", ["one text"]),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents", ["2049", "2048"]),
        ("/score", {"text_1": "a"}, "text_2", ["missing"]),
        ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1", ["one of them"]),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", ["2", "3"]),
        ("/score", {"text_1": ["a", ""], "text_2": ["c", "d"]}, "text_1", ["text_1[1]"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_scores_that_cannot_be_had(
    pair_server: Running, path: str, fields: dict[str, Any], param: str, words: list[str]
) -> None:
    refused(pair_server, path, fields, param, *words)


CHAT = {"messages": [{"role": "user", "content": "hello"}]}
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "a"},
    "/completion": {"prompt": "a"},
    "/completions": {"prompt": "a"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
}


@pytest.mark.parametrize("path", GENERATING)
def test_an_encoder_does_not_generate(vector_server: Running, path: str) -> None:
    for stream in (False, True):
        error = refused(vector_server, path, {**GENERATING[path], "stream": stream}, "model", "cannot generate text")
        assert "embed, embed tokens, score pairs" in error["message"] and error["code"] == "unsupported_task"
        assert str(Path(vector_server.model).parent) not in error["message"], "nobody learns where the model is kept"


def test_an_encoder_does_not_generate_in_anthropics_words(vector_server: Running) -> None:
    with vector_server.http() as http:
        response = http.post("/v1/messages", json={**CHAT, "max_tokens": 1})
    assert response.status_code == 400 and response.json()["type"] == "error"
    assert "cannot generate text" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "servers", "words"),
    [
        (VECTORS, {"input": "a"}, ["pair_server", "class_server"], "cannot embed"),
        ("/embedding", {"content": "a"}, ["class_server"], "cannot embed"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, ["class_server", "tiny_server"], "cannot score pairs"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, ["class_server", "tiny_server"], "cannot score pairs"),
        ("/classify", {"input": "a"}, ["vector_server", "tiny_server"], "cannot classify"),
        ("/pooling", {"input": "a", "task": "classify"}, ["vector_server"], "cannot classify"),
        ("/pooling", {"input": "a", "task": "token_embed"}, ["class_server"], "cannot embed tokens"),
    ],
    ids=str,
)
def test_what_a_model_lacks_is_refused_by_name(
    request: pytest.FixtureRequest, path: str, fields: dict[str, Any], servers: list[str], words: str
) -> None:
    for name in servers:
        refused(request.getfixturevalue(name), path, fields, "model", words, "it can: ")


def test_a_model_that_generates_may_be_told_to_embed_alone(serve: Callable[..., Running]) -> None:
    server = serve("--task", "embed", "--served-model-name", "tiny")
    refused(server, "/v1/completions", {"prompt": "a"}, "model", "cannot generate text")
    with server.http() as http:
        assert http.get("/v1/models").json()["data"][0]["tasks"] == ["embed", "token_embed", "score"]
        ranked = http.post("/v1/rerank", json={"query": "a", "documents": ["b", "a"]}).json()["results"]
    assert ranked[0]["index"] == 1 and abs(ranked[0]["relevance_score"] - 1.0) < 1e-6


def test_methods_and_near_addresses_of_these_routes(vector_server: Running) -> None:
    with vector_server.http() as http:
        assert http.get(VECTORS).status_code == 405
        assert "/v1/embeddings" in http.post("/embed_all", json={"inputs": "a"}).json()["error"]["message"]
        assert "did you mean /v1/embeddings" in http.post("/v1/embedings").json()["error"]["message"]
        described = http.get("/openapi.json").json()["paths"]
    assert {VECTORS, "/v1/rerank", "/v2/rerank", "/score", "/classify", "/pooling", "/embedding"} <= set(described)


def test_texts_without_words_have_the_vector_of_the_tokens_around_a_text(vector_server: Running) -> None:
    with vector_server.http() as http:
        answers = [http.post(VECTORS, json={"input": given}).json() for given in (" ", "\n\t", [2, 3])]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [2, 2, 2]
    assert answers[0]["data"] == answers[1]["data"] == answers[2]["data"]


def test_a_bad_input_disturbs_no_other_request(vector_server: Running) -> None:
    bodies: list[dict[str, Any]] = [
        {"input": ["abc", "de"] * 10},
        {"input": ["abc", ""]},
        {"input": ["x" * 99, "a"]},
    ] * 8
    with vector_server.http() as http, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: http.post(VECTORS, json=body), bodies))
    assert [answer.status_code for answer in answers] == [200, 400, 400] * 8
    assert len({str(answer.json()["data"]) for answer in answers[::3]}) == 1


@pytest.fixture(scope="module")
def broken_server(tmp_path_factory: pytest.TempPathFactory, start_module_server: Serve) -> Running:
    """A server of an encoder whose second layer gives no numbers."""
    folder = tmp_path_factory.mktemp("broken")
    model = make_encoder(folder / "model")
    weights = load_file(model / "model.safetensors")
    weights["encoder.layer.1.output.LayerNorm.weight"][0] = float("inf")
    weights["encoder.layer.1.output.LayerNorm.bias"][0] = float("-inf")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return start_module_server(model)


def test_a_result_that_is_no_number_is_an_error_that_names_input_and_layer(broken_server: Running) -> None:
    error = refused(
        broken_server, VECTORS, {"input": ["a", "b"]}, "input", "input[", "not finite", "layer 1", status=500
    )
    assert error["code"] == "result_not_finite"
    assert broken_server.metric("octavo_pooling_requests_finished_total", reason="error", task="embed") >= 1


def test_every_field_of_openai_is_known_and_those_of_others_are_named() -> None:
    of_openai = set(EmbeddingCreateParams.__annotations__)
    assert of_openai <= {name for name, mark in marks_of(EmbeddingRequest).items() if mark is None}
    of_cohere = set(inspect.signature(pytest.importorskip("cohere").ClientV2.rerank).parameters)
    assert of_cohere - {"self", "request_options"} <= set(RerankRequest.model_fields)


@pytest.mark.slow
def test_a_policy_that_looks_at_priorities_is_given_them_and_deadlines_end_requests(tmp_path: Path) -> None:
    flags = (*TINY, "--scheduling-policy", "static", "--request-timeout", "0.3", "--max-num-seqs", "1")
    with running(make_encoder(tmp_path / "model"), tmp_path / "log", *flags) as server:
        with server.http() as http:
            assert http.post(VECTORS, json={"input": "a", "priority": -3.5, "user": "me"}).status_code == 200
        body = {"input": ["x" * 60] * 2000}
        error = refused(server, VECTORS, body, None, "request_timeout", status=503)
        assert error["code"] == "request_timeout"
        server.wait_until_idle()


def test_a_full_queue_is_told_with_the_time_to_wait(tmp_path: Path) -> None:
    flags = (*TINY, "--max-queued-requests", "4", "--max-num-seqs", "1")
    with running(make_encoder(tmp_path / "model"), tmp_path / "log", *flags) as server, server.http() as http:

        def send(_: int) -> httpx.Response:
            return http.post(VECTORS, json={"input": ["some words and others"] * 200})

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(send, range(12)))
        codes = {answer.status_code for answer in answers}
        assert codes == {200, 429}, codes
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
        assert all(len(answer.json()["data"]) == 200 for answer in answers if answer.status_code == 200)
