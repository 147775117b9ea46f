"""Outputs of requests for vectors and scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from octavo.core.outputs import RequestMetrics

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class PoolingOutput:
    """What was computed of one prompt."""

    #: float32: a vector [D], class scores [labels], or a row for each token [tokens, D]. Empty if it failed.
    data: np.ndarray
    #: Why it failed, if it did.
    error: str | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]
    error: str | None = None

    @property
    def hidden_size(self) -> int:
        """Numbers of the vector."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The class scores of one prompt."""

    probs: list[float]
    error: str | None = None

    @property
    def num_classes(self) -> int:
        """Classes of the model."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit."""

    score: float
    error: str | None = None


Result = TypeVar("Result", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)
Other = TypeVar("Other", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Result]):
    """The output of a request; ``outputs`` is of the kind that the method which gives it says."""

    request_id: str
    outputs: Result
    prompt: str | None
    prompt_token_ids: list[int]
    metrics: RequestMetrics
    finished: bool = True

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV entries were found instead of computed."""
        return self.metrics.num_cached_tokens

    def with_result(self, result: Other) -> PoolingRequestOutput[Other]:
        """The same request's output with what a method makes of the result."""
        return PoolingRequestOutput(
            self.request_id, result, self.prompt, self.prompt_token_ids, self.metrics, self.finished
        )


#: As the engine gives it.
Pooled: TypeAlias = PoolingRequestOutput[PoolingOutput]
