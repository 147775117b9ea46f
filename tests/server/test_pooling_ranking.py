"""Scores of pairs of texts over HTTP: ranking in the forms of Jina's and Cohere's API, scoring in vLLM's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo import LLM
from octavo.server.pooling import Ranking, ScoreList
from tests.server.running_server import Running

QUERY = "the river"
DOCUMENTS = ["bread", "the long river", "a text about nothing", "river"]


def scores(server: Running, first: Any, second: Any) -> list[float]:
    answer = server.post("/v1/score", text_1=first, text_2=second)
    ScoreList.model_validate(answer, strict=True)
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["score"] for entry in answer["data"]]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_best_first(pair_server: Running, path: str) -> None:
    answer = pair_server.post(path, query=QUERY, documents=DOCUMENTS)
    Ranking.model_validate(answer, strict=True)
    by_index = scores(pair_server, QUERY, DOCUMENTS)
    found = answer["results"]
    assert [entry["index"] for entry in found] == sorted(range(4), key=lambda i: -by_index[i])
    assert [entry["relevance_score"] for entry in found] == sorted(by_index, reverse=True)
    shown = [entry.get("document") for entry in found]
    assert shown == [None if path == "/v2/rerank" else {"text": DOCUMENTS[entry["index"]]} for entry in found]
    assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] > 0


def test_the_forms_of_clients_mean_the_same(pair_server: Running) -> None:
    plain = pair_server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    objects = [{"text": text} for text in DOCUMENTS]
    assert pair_server.post("/v1/rerank", query={"text": QUERY}, documents=objects)["results"] == plain
    assert pair_server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=2)["results"] == plain[:2]
    assert pair_server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=99)["results"] == plain
    bare = pair_server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS, return_documents=False)["results"]
    assert all("document" not in entry for entry in bare)


def test_equal_documents_keep_their_order(pair_server: Running) -> None:
    found = pair_server.post("/v1/rerank", query=QUERY, documents=["b", "a", "b", "b"])["results"]
    assert [entry["index"] for entry in found if entry["document"]["text"] == "b"] == [0, 2, 3]


def test_scores_are_those_of_the_engine_offline_alone_and_in_company(pair_server: Running) -> None:
    llm = LLM(pair_server.model, num_threads=1)
    outputs: list[Any] = [output.outputs for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    offline = [output.score for output in outputs]
    assert scores(pair_server, QUERY, DOCUMENTS) == offline
    assert [scores(pair_server, QUERY, document)[0] for document in DOCUMENTS] == offline
    assert scores(pair_server, [QUERY] * 4, DOCUMENTS) == offline
    assert scores(pair_server, DOCUMENTS, DOCUMENTS[::-1])[::3] == [
        scores(pair_server, DOCUMENTS[0], DOCUMENTS[3])[0],
        scores(pair_server, DOCUMENTS[3], DOCUMENTS[0])[0],
    ]


def test_the_names_of_both_texts(pair_server: Running) -> None:
    wanted = scores(pair_server, QUERY, DOCUMENTS)
    for names in (("queries", "documents"), ("data_1", "data_2")):
        answer = pair_server.post("/score", **dict(zip(names, (QUERY, DOCUMENTS), strict=True)))
        assert [entry["score"] for entry in answer["data"]] == wanted


def test_without_a_head_vectors_are_compared_and_the_query_is_computed_once(vector_server: Running) -> None:
    texts = [f"query: {QUERY}", *DOCUMENTS]
    answer = vector_server.post("/v1/embeddings", input=texts)
    rows = np.array([entry["embedding"] for entry in answer["data"]])
    assert scores(vector_server, QUERY, DOCUMENTS) == pytest.approx((rows[1:] @ rows[0]).tolist(), abs=1e-6)
    usage = vector_server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS)["usage"]
    assert usage == answer["usage"]


def test_pairs_and_documents_are_cut_where_that_is_asked_for(pair_server: Running) -> None:
    long = "abc " * 1000
    whole = pair_server.post("/v1/rerank", query=QUERY, documents=[long, "x"], truncate_prompt_tokens=-1)
    assert whole["usage"]["total_tokens"] == 64 + 12
    cut = pair_server.post("/v1/rerank", query=QUERY, documents=[long], max_tokens_per_doc=3)["results"]
    assert cut[0]["relevance_score"] == scores(pair_server, QUERY, "abc")[0]
    assert cut[0]["document"] == {"text": long}


def test_texts_are_ranked_in_the_form_of_text_embeddings_inference(pair_server: Running) -> None:
    wanted = pair_server.post("/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    found = pair_server.post("/rerank", query=QUERY, texts=DOCUMENTS)
    assert found == [{"index": entry["index"], "score": entry["relevance_score"]} for entry in wanted]
    shown = pair_server.post("/rerank", query=QUERY, texts=DOCUMENTS, return_text=True, top_n=2)
    assert shown == [{**entry, "text": DOCUMENTS[entry["index"]]} for entry in found[:2]]
    raw = pair_server.post("/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True)
    plain = pair_server.post("/rerank", query=QUERY, documents=DOCUMENTS, use_activation=False)["results"]
    assert raw == [{"index": entry["index"], "score": entry["relevance_score"]} for entry in plain]
    with pair_server.http() as http:
        for body, param in (
            ({}, "documents"),
            ({"texts": ["a"], "documents": ["a"]}, "documents"),
            ({"documents": ["a"], "return_text": True}, "return_text"),
            ({"texts": []}, "texts"),
            ({"texts": ["a", ""]}, "texts"),
            ({"texts": ["a"], "truncation_direction": "Left"}, "truncation_direction"),
        ):
            answer = http.post("/rerank", json={"query": QUERY, **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
