"""Clients for vectors and ranking, as their makers ship them."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

from tests.embedding_models import HIDDEN_SIZE, PROMPTS
from tests.server.running_server import Running

TEXTS = ["the river", "bread and butter", "a long text about rivers"]


def plain(server: Running, **body: Any) -> np.ndarray:
    answer = server.post("/v1/embeddings", **body)
    return np.array([entry["embedding"] for entry in answer["data"]], np.float32)


def test_openai(vector_server: Running) -> None:
    wanted = plain(vector_server, input=TEXTS)
    with vector_server.client() as client:
        for given in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):  # base64 is its default
            answer = client.embeddings.create(model="vectors", input=TEXTS, **given)  # type: ignore[arg-type]
            if given.get("encoding_format") != "base64":
                rows = np.array([entry.embedding for entry in answer.data], np.float32)
                assert np.array_equal(rows, wanted)
            assert (answer.model, answer.object) == ("vectors", "list")
            assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
        with vector_server.http() as http:
            tokens = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
        by_ids = client.embeddings.create(model="vectors", input=tokens)
        assert np.array_equal(np.array([entry.embedding for entry in by_ids.data], np.float32), wanted)
        few = client.embeddings.create(model="vectors", input=TEXTS[0], dimensions=8, user="me")
        assert len(few.data[0].embedding) == 8
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]: it is empty"):
            client.embeddings.create(model="vectors", input=["a", ""])
        with pytest.raises(openai.BadRequestError, match="cannot generate text"):
            client.chat.completions.create(model="vectors", messages=[{"role": "user", "content": "a"}])


@pytest.mark.slow
def test_cohere(pair_server: Running) -> None:
    cohere = pytest.importorskip("cohere")
    with pair_server.http() as http:
        wanted = http.post("/v1/rerank", json={"query": "the river", "documents": TEXTS}).json()["results"]
    places = [(entry["index"], entry["relevance_score"]) for entry in wanted]
    client = cohere.ClientV2(api_key="none", base_url=pair_server.url)
    answer = client.rerank(model="pairs", query="the river", documents=TEXTS)
    assert [(entry.index, entry.relevance_score) for entry in answer.results] == places
    assert answer.meta.api_version.version == "2"
    best = client.rerank(model="pairs", query="the river", documents=TEXTS, top_n=1, max_tokens_per_doc=40)
    assert [(entry.index, entry.relevance_score) for entry in best.results] == places[:1]
    older = cohere.Client(api_key="none", base_url=pair_server.url)
    answer = older.rerank(model="pairs", query="the river", documents=[{"text": text} for text in TEXTS])
    assert [(entry.index, entry.document.text) for entry in answer.results] == [(i, TEXTS[i]) for i, _ in places]
    with pytest.raises(cohere.BadRequestError):
        client.rerank(model="pairs", query="", documents=TEXTS)


@pytest.mark.slow
def test_langchain(vector_server: Running) -> None:
    langchain = pytest.importorskip("langchain_openai")
    # It would send ids of OpenAI's own tokens otherwise.
    client = langchain.OpenAIEmbeddings(
        model="vectors", base_url=f"{vector_server.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert np.array_equal(np.array(client.embed_documents(TEXTS), np.float32), plain(vector_server, input=TEXTS))
    assert np.array_equal(np.array(client.embed_query("a"), np.float32), plain(vector_server, input="a")[0])
    few = langchain.OpenAIEmbeddings(
        model="vectors",
        base_url=f"{vector_server.url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,
        dimensions=16,
        model_kwargs={"extra_body": {"input_type": "query"}},
    )
    wanted = plain(vector_server, input=[PROMPTS["query"] + text for text in TEXTS], dimensions=16)
    assert np.array_equal(np.array(few.embed_documents(TEXTS), np.float32), wanted)


@pytest.mark.slow
def test_llama_index(vector_server: Running) -> None:
    module = pytest.importorskip("llama_index.embeddings.openai_like")
    client = module.OpenAILikeEmbedding(
        model_name="vectors", api_base=f"{vector_server.url}/v1", api_key="none", embed_batch_size=2
    )
    rows = np.array(client.get_text_embedding_batch(TEXTS), np.float32)
    assert rows.shape == (len(TEXTS), HIDDEN_SIZE) and np.array_equal(rows, plain(vector_server, input=TEXTS))
    assert np.array_equal(np.array(client.get_query_embedding("a"), np.float32), plain(vector_server, input="a")[0])
