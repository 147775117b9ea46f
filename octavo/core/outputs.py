"""Outputs of requests: completions, vectors and scores; ``RequestOutput`` is the main one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeAlias, TypeVar, get_args

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.failures import ADAPTER, KV_CACHE
from octavo.core.foreign import ForeignKeywords
from octavo.core.sampling_params import check_parameters, check_truncation, parameter

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class Logprob:
    """Logprob of a token at a position."""

    logprob: float
    rank: int
    decoded_token: str | None = None


#: Token id -> logprob: the chosen token first, then the top tokens.
TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times and counts of a request; times are seconds of ``time.monotonic()``."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    #: Set at the end of the request; None for beam search, like ``first_token_time``.
    last_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    #: Prompt tokens that are held for later requests, as this one asked (``CacheHints``).
    num_held_tokens: int = 0
    num_preemptions: int = 0
    #: Of them, preemptions that moved blocks to host memory; the others recompute.
    num_preemptions_by_swap: int = 0
    #: Tokens recomputed, and blocks moved, because of preemptions.
    num_recomputed_tokens: int = 0
    num_swapped_blocks: int = 0
    #: Drafts with a token at each position, over all completions, and those of which it was accepted.
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()

    @property
    def num_draft_tokens(self) -> int:
        """Tokens of all drafts."""
        return sum(self.drafted_per_position)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """The accepted ones."""
        return sum(self.accepted_per_position)

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """A completion, or an increment of it; ``index`` and scores are those of the whole."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    #: Sum of its tokens' logprobs, if computed.
    cumulative_logprob: float | None = None
    #: Score of a hypothesis of a beam search.
    score: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    #: "stop", "length", "abort", "error" or "ignored" (it can never run); None while unfinished.
    finish_reason: str | None = None
    #: The stop string or stop token id that ended it; None for the EOS token.
    stop_reason: str | int | None = None
    #: Message for the finish reasons "error" and "ignored".
    error: str | None = None
    #: ``SequenceFailure.kind``.
    error_kind: str = ""
    #: The request's own fields are to blame: no token is left by them, or its grammar cannot be used.
    invalid: InvalidRequestError | None = None

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    @property
    def exceeds_kv_cache(self) -> bool:
        """Whether the request's sequences have outgrown the KV cache."""
        return self.error_kind == KV_CACHE

    @property
    def adapter_failed(self) -> bool:
        """Whether the request's adapter could not be loaded."""
        return self.error_kind == ADAPTER

    def __add__(self, later: CompletionOutput) -> CompletionOutput:
        """This completion followed by the increment ``later``."""
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
    """A hypothesis of a beam search, with its prompt."""

    #: Of prompt and continuation.
    tokens: list[int]
    #: Of prompt and continuation; of the continuation alone if the prompt was token ids, except in ``LLM.beam_search``.
    text: str
    #: Sum of the continuation's logprobs.
    cum_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True)
class RequestOutput:
    """The output of a request, or an increment, which has an entry for every completion, perhaps an empty one."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    #: One entry for each prompt token, None for the first; in the first increment only.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    #: Of an encoder-decoder model: the encoder's input, as text and token ids if it was text, and its positions.
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_encoder_tokens: int = 0
    #: Of a transcription: cross attention weights, float32 [heads, prompt tokens, encoder positions].
    attention_weights: bytes | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt and of the encoder's input."""
        return len(self.prompt_token_ids) + self.num_encoder_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens from the prefix cache."""
        return self.metrics.num_cached_tokens

    @property
    def sequences(self) -> list[BeamSearchSequence]:
        """The hypotheses of a beam search, best first."""
        tokens, text = self.prompt_token_ids, self.prompt or ""
        return [
            BeamSearchSequence(
                tokens + o.token_ids, text + o.text, o.cumulative_logprob, o.finish_reason, o.stop_reason
            )
            for o in self.outputs
        ]

    def __add__(self, later: RequestOutput) -> RequestOutput:
        """This output followed by the increment ``later``; copies all tokens so far."""
        return replace(
            later,
            outputs=[mine + added for mine, added in zip(self.outputs, later.outputs, strict=True)],
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
            attention_weights=self.attention_weights or later.attention_weights,
        )


# Vectors and scores.

#: Result: a vector (embed), class scores (classify), a score, or a row for each token (token_embed, token_classify).
PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)


class PoolingParams(msgspec.Struct, metaclass=ForeignKeywords, kw_only=True, omit_defaults=True):
    """Parameters of a request for a vector or scores, named as vLLM's; raises InvalidRequestError for invalid values.

    >>> PoolingParams(dimensions=128)
    """

    truncate_prompt_tokens: Annotated[
        int | None, parameter("Maximum prompt tokens; the rest is cut off. -1: as many as fit.", -1)
    ] = None
    dimensions: Annotated[
        int | None,
        parameter("First numbers of the vector to keep, of models trained for it (Kusupati et al. 2022).", 1),
    ] = None
    use_activation: Annotated[
        bool | None,
        parameter("Normalise vectors, and turn class scores into probabilities; default: as the model does."),
    ] = None
    #: None: the task of the method that takes the parameters.
    task: PoolingTask | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises InvalidRequestError with the invalid field and its value."""
        check_parameters(self)
        check_truncation(self.truncate_prompt_tokens)
        if self.task is not None and self.task not in POOLING_TASKS:
            raise InvalidRequestError(f"must be one of {', '.join(POOLING_TASKS)}", path="task", got=self.task)


@dataclass(slots=True)
class PoolingOutput:
    """The result of one prompt."""

    #: float32: a vector [D], class scores [labels], or a row for each token [tokens, D]. Empty after an error.
    data: np.ndarray
    error: str | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]
    error: str | None = None

    @property
    def hidden_size(self) -> int:
        """Length of the vector."""
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
    """The output of a request, with the kind of result that its method documents."""

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
        """Prompt tokens from the prefix cache."""
        return self.metrics.num_cached_tokens

    def with_result(self, result: Other) -> PoolingRequestOutput[Other]:
        """The same output with another result."""
        return PoolingRequestOutput(
            self.request_id, result, self.prompt, self.prompt_token_ids, self.metrics, self.finished
        )


Pooled: TypeAlias = PoolingRequestOutput[PoolingOutput]


# Pooling of a model, by its files.

#: Which hidden states make a text's vector: the first token's, the mean, the last token's, the maximum of each
#: dimension, the mean weighted by position (i for the i-th), or the sum over the square root of the number.
PoolingKind = Literal["cls", "mean", "last", "max", "weighted_mean", "sqrt_mean"]
#: After a dense layer, or for probabilities of classes.
PoolerActivation = Literal[
    "identity", "tanh", "relu", "gelu", "sigmoid", "softmax", "silu", "mish", "leaky_relu", "elu", "celu", "selu",
    "relu6", "hardtanh", "hardswish", "hardsigmoid", "softplus", "softsign", "log_sigmoid", "tanhshrink", "softshrink",
    "hardshrink", "softmin",
]  # fmt: skip


@dataclass(frozen=True)
class DenseConfig:
    """A dense layer after pooling, as sentence-transformers stores it."""

    #: Folder of ``linear.weight`` [outputs, inputs] and ``linear.bias``, relative to the model's.
    folder: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: PoolerActivation = "tanh"
    #: Whether the input is added to the result; if sizes differ, its product with ``residual.weight``.
    residual: bool = False
    #: Whether the input is normalised first.
    normalizes: bool = False


@dataclass(frozen=True)
class PairFormat:
    """How a pair of texts becomes the prompt of a language model that scores it, as its files say."""

    #: Text with {query} and {document}. None: the chat template, to which they are messages of these roles.
    template: str | None = None
    #: Keywords of the chat template.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Ids of the tokens that deny and confirm, of whose logits the score is made. None: a head of classes makes it.
    answer_ids: tuple[int, int] | None = None


@dataclass(frozen=True)
class PoolerConfig:
    """Pooling and prompts of a model."""

    kind: PoolingKind = "mean"
    normalize: bool = True
    dense: tuple[DenseConfig, ...] = ()
    #: Whether tokens of a named prompt are pooled, too.
    include_prompt: bool = True
    #: Texts to put before an input, by name, such as "query"; and the default name.
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    #: Tokens to which the model's own library cuts texts; None: it does not.
    max_seq_length: int | None = None
    #: Further vector lengths of its training (Matryoshka); empty: none; None: unknown, so that any is allowed.
    dimensions: tuple[int, ...] | None = None
    similarity: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"
    #: For probabilities of classes.
    activation: PoolerActivation = "sigmoid"
    #: Of a language model that scores pairs; with classes, the first one's probability is the score.
    pairs: PairFormat | None = None
    #: Whether it was read from files; else it is the default of the network.
    is_from_files: bool = False
