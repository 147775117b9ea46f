"""Responses of the routes for vectors and scores, as the OpenAPI page describes them.

They are not built of these models, but written directly: a response can hold a million numbers.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from octavo.server.protocol_base import ResponseModel


class PooledUsage(ResponseModel):
    """Tokens that were computed."""

    prompt_tokens: int
    total_tokens: int


class _ListOfInputs(ResponseModel):
    """A response with an entry for each input."""

    object: Literal["list"]
    data: list[Any]
    model: str
    usage: PooledUsage
    id: str
    created: int


class Embedding(ResponseModel):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(_ListOfInputs):
    """A response of ``/v1/embeddings``."""

    data: list[Embedding]


class PooledData(ResponseModel):
    """What was computed of one input."""

    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str = Field(
        description="Numbers, or a list of them for each token; in base64 those of all tokens after each other."
    )


class PooledList(_ListOfInputs):
    """A response of ``/pooling``."""

    data: list[PooledData]


class Classification(ResponseModel):
    """The class scores of one input."""

    index: int
    label: str | None = Field(description="Name of the class with the highest score.")
    probs: list[float]
    num_classes: int


class ClassificationList(_ListOfInputs):
    """A response of ``/classify``."""

    data: list[Classification]


class RankedDocument(ResponseModel):
    """The text of a document."""

    text: str


class Ranked(ResponseModel):
    """A document's place in the request, and how well it fits the query."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(ResponseModel):
    """A response of ``/v1/rerank``, ``/v2/rerank`` and ``/rerank``: the best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PooledUsage
    meta: dict[str, Any] = Field(description="Version of Cohere's API, and the tokens in its words.")


class RankedText(ResponseModel):
    """An entry of the list that ``/rerank`` answers to ``texts``: the best first."""

    index: int
    score: float
    text: str | None = None


class Score(ResponseModel):
    """How well two texts fit."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(_ListOfInputs):
    """A response of ``/v1/score`` and ``/score``."""

    data: list[Score]
