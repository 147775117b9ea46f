"""Registers the routes for vectors and scores."""

from __future__ import annotations

from collections.abc import Callable

from octavo.server import cohere as cohere_embed
from octavo.server.cohere import CohereEmbeddings
from octavo.server.pooling import (
    COHERE,
    ClassificationList,
    EmbeddingList,
    LlamaVector,
    PooledList,
    RankedText,
    Ranking,
    ScoreList,
    classify,
    create_embeddings,
    embed,
    embed_texts,
    pool,
    rerank,
    rerank_texts,
    score,
)


def add_pooling_routes(add: Callable[..., None]) -> None:
    """Registers the routes; ``add`` is given method, path, endpoint, the response's model, tag and task."""
    add("POST", "/v1/embeddings", create_embeddings, EmbeddingList, "OpenAI", task="embed")
    for path in ("/v1/rerank", COHERE):
        add("POST", path, rerank, Ranking, "Vectors", task="score")
    add("POST", "/rerank", rerank_texts, Ranking | list[RankedText], "Vectors", task="score")
    add("POST", "/v2/embed", cohere_embed.embed, CohereEmbeddings, "Vectors", task="embed")
    add("POST", "/embed", embed_texts, list[list[float]], "Vectors", task="embed")
    for path in ("/v1/score", "/score"):
        add("POST", path, score, ScoreList, "Vectors", task="score")
    add("POST", "/classify", classify, ClassificationList, "Vectors", task="classify")
    # What it computes is a field of the request.
    add("POST", "/pooling", pool, PooledList, "Vectors")
    for path in ("/embedding", "/embeddings"):
        add("POST", path, embed, list[LlamaVector], "llama.cpp", task="embed")
