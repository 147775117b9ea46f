"""Outputs of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar, get_args

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import check_integer

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class Logprob:
    """Logprob of one token at one position."""

    logprob: float
    #: 1 is the most likely token of the vocabulary.
    rank: int
    decoded_token: str | None = None


#: Token id -> logprob: the chosen token first, then the most likely ones.
TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request; seconds, on the clock of ``time.monotonic()``."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    #: Known when the request has ended; None for beam search, like the first token's.
    last_token_time: float | None = None
    finished_time: float | None = None
    #: Prompt tokens whose KV entries were found instead of computed.
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    #: Of them, those that moved its blocks to host memory; the others computed them again.
    num_preemptions_by_swap: int = 0
    #: Tokens computed again after preemption, and blocks moved out.
    num_recomputed_tokens: int = 0
    num_swapped_blocks: int = 0
    #: Tokens that were guessed and computed ahead, and how many of them were right; of all completions.
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that computed something of it."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt, or an increment of it. ``index`` and the scores are those of the whole."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    #: Sum of its tokens' logprobs, where they were computed.
    cumulative_logprob: float | None = None
    #: Score by which a hypothesis of a beam search is ranked.
    score: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    #: "stop", "length", "abort", "error" or "ignored" (it could never run); None while unfinished.
    finish_reason: str | None = None
    #: The stop string or stop token id that ended it; None for the end-of-sequence token.
    stop_reason: str | int | None = None
    #: Why, if ``finish_reason`` is "error" or "ignored".
    error: str | None = None
    #: Whether the error is that the request's sequences do not fit the whole KV cache.
    exceeds_kv_cache: bool = False
    #: Whether the error is that the request's adapter could not be loaded.
    adapter_failed: bool = False
    #: Whether the error is that the request's own fields (its form, ``bad_words``, ...) leave no token to choose.
    excludes_all_tokens: bool = False

    @property
    def finished(self) -> bool:
        """Whether no further token will come."""
        return self.finish_reason is not None

    def __add__(self, later: CompletionOutput) -> CompletionOutput:
        """This completion with the increment ``later`` appended."""
        ending = later if self.finish_reason is None else self
        return replace(
            ending,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            cumulative_logprob=later.cumulative_logprob,
            logprobs=None if self.logprobs is None or later.logprobs is None else self.logprobs + later.logprobs,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """A hypothesis of a beam search with its prompt."""

    #: Token ids of prompt and continuation.
    tokens: list[int]
    #: Texts of both; of the continuation alone where the prompt was token ids, except from ``LLM.beam_search``.
    text: str
    #: Sum of the logprobs of the continuation's tokens.
    cum_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True)
class RequestOutput:
    """The output of a request, or an increment: what is new since the output before.

    An increment has an entry for every completion, empty if nothing was added to it. The finish reason of a completion
    is in the one increment that ends it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    #: One entry a prompt token; the first is None, as nothing comes before it. Of increments, the first one has them.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    #: Of an encoder-decoder model, whose decoder's the prompt is: what its encoder has read, as text and token ids if
    #: it was text, and how many positions.
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_encoder_tokens: int = 0
    #: Of a request that asks for them: weights of cross attention, float32 [heads, prompt tokens, encoder positions].
    attention_weights: bytes | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, with those of the encoder's input."""
        return len(self.prompt_token_ids) + self.num_encoder_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV entries were found instead of computed."""
        return self.metrics.num_cached_tokens

    @property
    def sequences(self) -> list[BeamSearchSequence]:
        """The hypotheses of a beam search, best first, each with its prompt."""
        return [
            BeamSearchSequence(
                tokens=self.prompt_token_ids + output.token_ids,
                text=(self.prompt or "") + output.text,
                cum_logprob=output.cumulative_logprob,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
            for output in self.outputs
        ]

    def __add__(self, later: RequestOutput) -> RequestOutput:
        """This output with the next increment ``later`` appended. A new object; copies all tokens so far."""
        return replace(
            later,
            outputs=[mine + added for mine, added in zip(self.outputs, later.outputs, strict=True)],
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
            attention_weights=self.attention_weights or later.attention_weights,
        )


# Parameters of requests that ask for vectors or scores.

#: What is computed of a prompt's hidden states: one vector (embed), one row of class scores (classify, score: of one
#: class), or a row for each token (token_embed, token_classify).
PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Parameters of one request for a vector or scores; with the names of other engines.

    >>> PoolingParams(dimensions=128)

    Raises:
        InvalidRequestError: a value is out of range or of the wrong type.
    """

    #: Most tokens of the prompt, special tokens included; what is beyond is cut off at its end. -1: as many as the
    #: model takes. None: a longer prompt is refused.
    truncate_prompt_tokens: int | None = None
    #: Numbers of a vector, of a model that was trained so that the first ones alone are a vector (Matryoshka, Kusupati
    #: et al. 2022). None: all.
    dimensions: int | None = None
    #: Whether vectors get length 1, and class scores become probabilities (sigmoid or softmax). None: as the model has
    #: it.
    use_activation: bool | None = None
    #: None: what the method that takes the parameters is for.
    task: PoolingTask | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Checks every field.

        Raises:
            InvalidRequestError: naming the field, its value and what would be right.
        """
        if self.truncate_prompt_tokens is not None:
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequestError("truncate_prompt_tokens must be at least 1, or -1, not 0")
        if self.dimensions is not None:
            check_integer("dimensions", self.dimensions, 1, None)
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise InvalidRequestError(f"use_activation must be True, False or None, not {self.use_activation!r}")
        if self.task is not None and self.task not in POOLING_TASKS:
            raise InvalidRequestError(f"task must be one of {', '.join(POOLING_TASKS)}, not {self.task!r}")


# Outputs of requests for vectors and scores.


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


# How a model makes vectors and scores of hidden states: what its files say.

#: Which of a text's hidden states make its vector: that of the first token, their mean, that of the last token, the
#: largest of each dimension, their mean by position (weight of the i-th: i), their sum divided by the square root of
#: their number.
PoolingKind = Literal["cls", "mean", "last", "max", "weighted_mean", "sqrt_mean"]
#: What follows a dense layer, or makes class scores probabilities.
PoolerActivation = Literal[
    "identity",
    "tanh",
    "relu",
    "gelu",
    "sigmoid",
    "softmax",
    "silu",
    "mish",
    "leaky_relu",
    "elu",
    "celu",
    "selu",
    "relu6",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "softplus",
    "softsign",
    "log_sigmoid",
    "tanhshrink",
    "softshrink",
    "hardshrink",
    "softmin",
]


@dataclass(frozen=True)
class DenseConfig:
    """A matrix that a vector is multiplied with after pooling, as sentence-transformers stores it."""

    #: Folder of its weights (``linear.weight`` [outputs, inputs], ``linear.bias``), relative to the model's.
    folder: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: PoolerActivation = "tanh"
    #: Whether its input is added to its result; where sizes differ, its product with ``residual.weight`` is.
    residual: bool = False
    #: Whether its input gets length 1 first.
    normalizes: bool = False


@dataclass(frozen=True)
class PoolerConfig:
    """Pooling of one model, and what its prompts have around them."""

    kind: PoolingKind = "mean"
    #: Whether vectors get length 1.
    normalize: bool = True
    #: Applied to the pooled vector, in order.
    dense: tuple[DenseConfig, ...] = ()
    #: Whether tokens of a named prompt count among those that are pooled.
    include_prompt: bool = True
    #: Texts that are put before an input, by name, such as "query"; and the one that is used where none is named.
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    #: Tokens after which the model's own library cuts texts: as its modules say, or its tokenizer; None: neither does.
    max_seq_length: int | None = None
    #: Numbers of a vector that the model was trained for beside all (Matryoshka); None: its files name none, and any
    #: number up to all may be asked for; empty: none.
    dimensions: tuple[int, ...] | None = None
    #: How the model's vectors are compared.
    similarity: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"
    #: Of class scores: what makes them probabilities.
    activation: PoolerActivation = "sigmoid"
    #: Whether its files say so; else it is what is usual for its network.
    is_from_files: bool = False
