"""Requests of the engine core: a prompt, one of several tasks, and the resources that it needs (preparations).

Read ``EngineCoreRequest`` first (vLLM: the same name, earlier ``SequenceGroup``).
"""
# ruff: noqa: D102 - ``Task`` describes the properties that tasks override.

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NotRequired, TypedDict

import msgspec

from octavo.core.cache_hints import CacheHints
from octavo.core.errors import AdapterError, InvalidRequestError
from octavo.core.foreign import ForeignKeywords, check_foreign
from octavo.core.garbage import exclude_from_gc
from octavo.core.model_config import ReasoningMarks, ThinkingBudget
from octavo.core.outputs import PoolingKind, PoolingParams, PoolingTask
from octavo.core.sampling_params import BeamSearchParams, Grammar, SamplingParams, TimestampRules, check_number

if TYPE_CHECKING:
    import numpy as np


# Adapters.


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """A checked adapter: what scheduler and workers need to load it."""

    #: Digest of its files, on which the contents of blocks depend: two names of the same content have one key.
    key: str
    name: str
    #: A folder, or a GGUF file.
    path: str
    #: Maximum rank of its matrices; 0 for a prompt adapter, which takes no slot.
    rank: int
    #: Of prompt and prefix tuning: virtual tokens before the prompt.
    num_virtual_tokens: int = 0


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by name and path: ``LoRARequest("sql", 1, "path/of/the/adapter")``."""

    lora_name: str
    #: From 1; each name has its own.
    lora_int_id: int
    #: A PEFT folder or a GGUF file. None: the adapter is loaded already.
    lora_path: str | None = None


class PromptAdapterRequest(LoRARequest):
    """A prompt adapter by name and path; a ``LoRARequest`` works, too, without a check of virtual tokens.

    >>> PromptAdapterRequest("tone", 1, "path/of/the/adapter", prompt_adapter_num_virtual_tokens=20)
    """

    #: The adapter's virtual tokens; None: any number.
    num_virtual_tokens: int | None

    def __init__(
        self,
        prompt_adapter_name: str,
        prompt_adapter_id: int,
        prompt_adapter_local_path: str | None = None,
        prompt_adapter_num_virtual_tokens: int | None = None,
    ) -> None:
        super().__init__(prompt_adapter_name, prompt_adapter_id, prompt_adapter_local_path)
        object.__setattr__(self, "num_virtual_tokens", prompt_adapter_num_virtual_tokens)


# Inputs of encoders and images.

#: Kinds of encoder inputs: token ids (int32, little-endian), and audio (float32, little-endian; mono, model's rate).
TOKENS, AUDIO = "tokens", "audio"


class EncoderInput(msgspec.Struct, frozen=True, array_like=True):
    """An encoder's input: prepared beside the steps, then computed once for all sequences of the group."""

    #: ``TOKENS``, ``AUDIO``, or another kind of the network's ``prepare_input``.
    kind: str
    key: str
    #: Positions of the encoder's output, to which the decoder attends.
    num_tokens: int
    payload: bytes

    @classmethod
    def of(cls, kind: str, payload: bytes, num_tokens: int) -> EncoderInput:
        """With the digest as its key."""
        digest = blake2b(f"{kind}:{num_tokens}:".encode() + payload, digest_size=16)
        return cls(kind, f"encoder:{digest.hexdigest()}", num_tokens, payload)

    @classmethod
    def of_tokens(cls, token_ids: list[int]) -> EncoderInput:
        """Ids from 0 to 2**31 - 1."""
        import numpy as np

        return cls.of(TOKENS, np.array(token_ids, "<i4").tobytes(), len(token_ids))

    @property
    def token_ids(self) -> list[int] | None:
        """The ids of ``TOKENS``; None for other kinds."""
        import numpy as np

        return np.frombuffer(self.payload, "<i4").tolist() if self.kind == TOKENS else None

    @classmethod
    def of_audio(cls, samples: np.ndarray, num_tokens: int) -> EncoderInput:
        """float32 [samples] at the model's rate, which become ``num_tokens`` positions."""
        import numpy as np

        return cls.of(AUDIO, np.ascontiguousarray(samples, "<f4").tobytes(), num_tokens)


#: Default bytes of image features that workers cache.
DEFAULT_IMAGE_CACHE = 512 << 20


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image of a request."""

    key: str
    #: An encoded ``ImageInput``.
    payload: bytes
    #: Bytes of its features on the workers.
    size: int


class TileLayout(msgspec.Struct, frozen=True, array_like=True):
    """How tiles make an image; it has patches of padding on two sides, or none."""

    #: Of tiles.
    rows: int
    columns: int
    #: Patches of padding above the image, and on its left; there are as many below and on its right.
    top: int
    left: int


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """An image after resizing and cutting: pieces of equal size, which the vision tower processes one by one."""

    #: uint8 [pieces, height, width, 3] (RGB), contiguous.
    pixels: bytes
    pieces: int
    height: int
    width: int
    #: Pieces of another size, which follow these.
    rest: ImageInput | None = None
    #: If all pieces but the first are tiles of the image, row by row.
    layout: TileLayout | None = None

    @classmethod
    def of(cls, pixels: np.ndarray, rest: ImageInput | None = None, layout: TileLayout | None = None) -> ImageInput:
        """``pixels``: uint8 [n, height, width, 3]."""
        count, height, width, _ = pixels.shape
        return cls(pixels.tobytes(), count, height, width, rest, layout)

    def parts(self) -> Iterator[ImageInput]:
        """The pieces of each size."""
        part: ImageInput | None = self
        while part is not None:
            yield part
            part = part.rest

    def array(self) -> np.ndarray:
        """uint8 [n, height, width, 3], read-only."""
        import numpy as np

        return np.frombuffer(self.pixels, np.uint8).reshape(self.pieces, self.height, self.width, 3)

    def for_prompt(self, num_features: int, width: int) -> PromptImage:
        """With the digest as its key; ``num_features`` rows of ``width`` float32 numbers."""
        payload = msgspec.msgpack.encode(self)
        return PromptImage(f"image:{blake2b(payload, digest_size=16).hexdigest()}", payload, 4 * num_features * width)

    @classmethod
    def decode(cls, payload: bytes) -> ImageInput:
        """From ``PromptImage.payload``."""
        return msgspec.msgpack.decode(payload, type=cls)


# State of an unfinished request: enough for another engine core to continue with the same bits.


class AdmissionStats(msgspec.Struct, array_like=True):
    """Totals of a group up to an admission (see ``RequestMetrics``)."""

    group_id: int
    first_scheduled_time: float | None = None
    num_cached_tokens: int = 0
    num_recomputes: int = 0
    num_recomputed_tokens: int = 0
    num_swaps: int = 0
    num_swapped_blocks: int = 0
    #: Prompt tokens whose blocks are held for later requests, as its ``CacheHints`` ask.
    num_held_tokens: int = 0


class DraftStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Drafts of a group so far, over its sequences."""

    group_id: int
    #: Drafts with a token at each position, and those of which it was accepted.
    drafted_per_position: list[int] = []
    accepted_per_position: list[int] = []

    def add(self, num_tokens: int, num_accepted: int) -> DraftStats:
        """With one more draft."""
        drafted, accepted = self.drafted_per_position, self.accepted_per_position
        return DraftStats(self.group_id, _with_first(drafted, num_tokens), _with_first(accepted, num_accepted))


def _with_first(counts: list[int], number: int) -> list[int]:
    """The counts, with one more at each of the first ``number`` positions."""
    longer = counts + [0] * (number - len(counts))
    return [count + 1 for count in longer[:number]] + longer[number:]


class Hypothesis(msgspec.Struct, frozen=True):
    """A complete sequence of a beam search; ``score`` is ``cumulative_logprob / len(token_ids) ** length_penalty``."""

    #: Generated tokens, including the stop token.
    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]


class BeamUpdate(msgspec.Struct, array_like=True):
    """A step of a beam search, except the last."""

    group_id: int
    #: The running beams, best first: index of the beam that each continues, and its new token.
    survivors: list[tuple[int, int]]
    cumulative_logprobs: list[float]
    #: All so far, best first, if the step has added any.
    hypotheses: list[Hypothesis] | None = None


class BeamResumePoint(msgspec.Struct, array_like=True):
    """A beam search after some of its steps."""

    #: Generated tokens of the running beams, best first.
    token_ids: list[list[int]]
    cumulative_logprobs: list[float]
    hypotheses: list[Hypothesis] = []

    def apply(self, update: BeamUpdate) -> None:
        """Advances by one step."""
        self.token_ids = [[*self.token_ids[parent], token] for parent, token in update.survivors]
        self.cumulative_logprobs = update.cumulative_logprobs
        if update.hypotheses is not None:
            self.hypotheses = update.hypotheses


class CompletionResumePoint(msgspec.Struct, array_like=True, gc=False):
    """An unfinished completion."""

    index: int
    #: Generated tokens, including those that its grammar forced.
    token_ids: list[int]

    def __post_init__(self) -> None:
        exclude_from_gc(self.token_ids)


class ResumePoint(msgspec.Struct, array_like=True):
    """State of a request that another engine core began; it continues as after a preemption by recompute."""

    #: The unfinished ones; empty: nothing was sampled yet.
    completions: list[CompletionResumePoint] = []
    #: Of a beam search that has generated tokens.
    beams: BeamResumePoint | None = None
    #: Totals to count on from; None: never admitted.
    totals: AdmissionStats | None = None
    drafts: DraftStats | None = None
    #: Tokens to compute in steps of its own before it may share one, as steps with it have failed repeatedly.
    alone: int = 0


# Options of a request beside prompt and parameters.


class RequestOptions(
    msgspec.Struct, metaclass=ForeignKeywords, frozen=True, kw_only=True, omit_defaults=True, gc=False
):
    """Further keywords of ``LLM.generate`` and the like; raises InvalidRequestError for a wrong type or range."""

    #: An integer or finite float; lower goes first. Refused, if not 0, under a policy without priorities.
    priority: int | float = 0
    #: For the policies that share by user or learn from users. Of HTTP requests without one: the API key's digest.
    user: str = ""
    #: Seconds to the first token, and between later tokens, for the policy ``deadline`` alone; None: as the option.
    ttft_target: float | None = None
    tpot_target: float | None = None
    #: Requests with different salts share no cached prefix. A prompt's own salt overrides it.
    cache_salt: str = ""
    #: A past time in seconds of ``time.monotonic()``; None: now. Policies, ageing and metrics count from it.
    arrival_time: float | None = None
    #: The adapter, loaded on demand; of LoRA, or a prompt adapter, which may also come as ``prompt_adapter_request``.
    lora_request: LoRARequest | None = None
    #: The likely output, as text or token ids, used for drafts: it speeds up the output and never changes it.
    prediction: str | Sequence[int] | None = None
    #: Special tokens to show in the text although others are hidden.
    visible_tokens: frozenset[int] = frozenset()
    #: The model's marks of reasoning; None: those of its chat template.
    reasoning: ReasoningMarks | None = None
    timestamps: TimestampRules | None = None
    #: Of a transcription: (layer, head) of the cross attention weights to return, for a prompt without an answer.
    alignment_heads: Sequence[tuple[int, int]] = ()
    #: The HTTP client; clients take turns in the sandbox.
    client: str = ""
    #: Of a shared prefix, which samples nothing: the name under which its computed blocks are pinned.
    pin_as: str | None = None
    #: What is known of later requests with the same prefix.
    cache_hints: CacheHints | None = None

    def __post_init__(self) -> None:
        check_number("priority", self.priority, -math.inf, math.inf)
        for name in ("user", "cache_salt", "client"):
            if not isinstance(getattr(self, name), str):
                raise InvalidRequestError("must be text", path=name, got=getattr(self, name))
        for name, target in (("ttft_target", self.ttft_target), ("tpot_target", self.tpot_target)):
            if target is not None:
                check_number(name, target, 0, math.inf)
                if not target:
                    raise InvalidRequestError("must be above 0 seconds", path=name, got=target)
        if not isinstance(self.prediction, str | list | tuple | None):
            raise InvalidRequestError("must be text or a list of token ids", path="prediction", got=self.prediction)
        moment, now = self.arrival_time, time.monotonic()
        if moment is not None and (
            isinstance(moment, bool) or not isinstance(moment, (int, float)) or not -math.inf < moment <= now
        ):
            raise InvalidRequestError(
                f"must be a past moment in seconds of time.monotonic(), which is at {now:.3f}",
                path="arrival_time",
                got=moment,
            )


DEFAULT_OPTIONS = RequestOptions()
#: Fields for the engine's own front ends only.
_INTERNAL = {"pin_as", "cache_hints", "reasoning", "timestamps", "alignment_heads"}
#: Keywords of users: fields of ``RequestOptions``, and ``prompt_adapter_request`` for ``lora_request``.
KEYWORDS = {*RequestOptions.__struct_fields__, "prompt_adapter_request"} - _INTERNAL


#: Further parameters of methods of ``LLM``, for hints.
METHOD_PARAMETERS = {
    "prompts", "messages", "sampling_params", "pooling_params", "use_tqdm", "prompt_token_ids", "tools",
    "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "pooling_task",
}  # fmt: skip


def check_request_keywords(method: str, keywords: Mapping[str, Any]) -> None:
    """Checks keywords beside ``KEYWORDS``; raises as ``check_foreign``."""
    for name, value in keywords.items():
        if name not in KEYWORDS:
            check_foreign(method, name, value, "keywords", KEYWORDS | METHOD_PARAMETERS)


def options_from_keywords(
    method: str, keywords: Mapping[str, Any], options: RequestOptions = DEFAULT_OPTIONS
) -> RequestOptions:
    """The options with the fields that a method's keywords give; None means not given.

    Raises as ``check_foreign``; AdapterError for two adapters.
    """
    if not keywords:
        return options
    check_request_keywords(method, keywords)
    fields = {name: value for name, value in keywords.items() if name in KEYWORDS and value is not None}
    if (prompt_adapter := fields.pop("prompt_adapter_request", None)) is not None:
        if not isinstance(prompt_adapter, PromptAdapterRequest):
            raise AdapterError(f"prompt_adapter_request must be a PromptAdapterRequest, not {prompt_adapter!r:.300}")
        if fields.get("lora_request") is not None:
            raise AdapterError("a request has one adapter: either lora_request or prompt_adapter_request, not both")
        fields["lora_request"] = prompt_adapter
    return msgspec.structs.replace(options, **fields)


def options_for_each(method: str, keywords: Mapping[str, Any], count: int) -> list[RequestOptions]:
    """The options of ``count`` requests: a keyword has one value or ``count``. Raises as ``options_from_keywords``."""
    columns = {name: value for name, value in keywords.items() if name in KEYWORDS and isinstance(value, list | tuple)}
    if all(isinstance(token, int) for token in columns.get("prediction", ())):  # one prediction for all
        columns.pop("prediction", None)
    for name, column in columns.items():
        check_one_each(name, column, count)
    options = options_from_keywords(method, {name: value for name, value in keywords.items() if name not in columns})
    if not columns:
        return [options] * count
    rows = zip(*columns.values(), strict=True)
    return [options_from_keywords(method, dict(zip(columns, row, strict=True)), options) for row in rows]


def check_one_each(name: str, value: Any, count: int) -> None:
    """Raises InvalidRequestError for anything but a sequence of ``count`` values."""
    if not isinstance(value, Sequence) or len(value) != count:
        what = f"{len(value)} of them" if isinstance(value, Sequence) else repr(value)
        raise InvalidRequestError(f"must be one for all prompts or one for each of the {count}, not {what}", path=name)


# Tasks.

_MASK64 = (1 << 64) - 1
_MAX_CANDIDATES = 100


class SequenceStatus(enum.Enum):
    """State of a sequence; finished states are the finish reasons."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_IGNORED = "ignored"
    FINISHED_ERROR = "error"

    @property
    def finished(self) -> bool:
        return self not in _UNFINISHED


_UNFINISHED = frozenset({SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED})


class Task(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """What to compute for a prompt; one of ``AnyTask``. The base class computes KV entries only."""

    #: Whether a step can only be planned with the result of the one before.
    plans_on_results: ClassVar[bool] = False

    @property
    def num_sequences(self) -> int:
        """Maximum concurrent sequences."""
        return 1

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens to generate; None: up to the context length."""
        return 0

    @property
    def samples(self) -> bool:
        """Whether tokens are generated; if not, the request ends with its prompt."""
        return self.max_tokens != 0

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of top logprobs at each prompt position; the prompt is then computed whole."""
        return None

    @property
    def needs_all_tokens(self) -> bool:
        """Whether every prompt token must be computed, without the prefix cache."""
        return self.is_kept_by_workers or self.prompt_logprobs is not None

    @property
    def is_kept_by_workers(self) -> bool:
        """Whether workers hold more of a partly computed prompt than KV entries, so that swapping would lose it."""
        return False


class Generate(Task):
    """Completions that workers sample."""

    #: ``max_tokens`` may be 0: only the prompt and its logprobs are computed.
    params: SamplingParams
    #: Unsigned 64-bit; never None, so that a resumed sequence draws the same numbers.
    seed: int
    #: EOS tokens (without ``ignore_eos``) and stop tokens.
    stop_token_ids: list[int] = []
    bad_words_ids: list[list[int]] = []
    #: EOS tokens to ignore (``ignore_eos``); forbidden before ``min_tokens``, too.
    ignored_eos_ids: list[int] = []
    grammar: Grammar | None = None
    thinking_budget: ThinkingBudget | None = None
    timestamps: TimestampRules | None = None
    #: (layer, head) of the cross attention weights to return for the prompt's tokens.
    alignment_heads: list[tuple[int, int]] = []

    def __post_init__(self) -> None:
        for ids in (self.stop_token_ids, self.bad_words_ids, self.ignored_eos_ids):
            exclude_from_gc(ids)

    @property
    def num_sequences(self) -> int:
        # Without sampled tokens all completions are equal, and one sequence computes them.
        return self.params.num_sequences if self.samples else 1

    @property
    def max_tokens(self) -> int | None:
        return self.params.max_tokens

    @property
    def prompt_logprobs(self) -> int | None:
        return self.params.prompt_logprobs

    @property
    def is_kept_by_workers(self) -> bool:
        return bool(self.alignment_heads)

    def sequence_seed(self, index: int) -> int:
        """The seed of completion ``index``."""
        return (self.seed + index) & _MASK64

    def stop_reason(self, token_id: int) -> int | None:
        """The token that ended a completion, if it is one of the user's stop tokens."""
        return token_id if token_id in (self.params.stop_token_ids or ()) else None


class Beam(Task):
    """A beam search: workers return top tokens of each beam, and the scheduler chooses."""

    params: BeamSearchParams
    stop_token_ids: list[int] = []
    #: Last prompt tokens that count as generated when hypotheses are scored by length.
    num_forced: int = 0

    plans_on_results: ClassVar[bool] = True

    @property
    def num_sequences(self) -> int:
        return self.params.beam_width

    @property
    def max_tokens(self) -> int:
        return self.params.max_tokens

    @property
    def num_candidates(self) -> int:
        """Top tokens of each beam that a step needs (fewer in a smaller vocabulary); enough for up to 68 stop tokens.

        A beam contributes at most W (beam width) hypotheses and W survivors, all among its best W + (number of stop
        tokens), as only stop tokens rank between survivors. The choice is that of transformers.
        """
        return min(self.params.beam_width + len(self.stop_token_ids), _MAX_CANDIDATES)


class Pool(Task):
    """A vector or scores from the prompt's hidden states."""

    #: With a ``task``.
    params: PoolingParams
    #: Hidden states of a vector or of class scores; tasks by token have one result for each.
    kind: PoolingKind = "last"
    #: First pooled position.
    first: int = 0
    #: Position of the second text of a pair, for networks that distinguish them; 0: there is one text.
    second_text: int = 0
    #: Of a score by a language model: tokens whose logits to compare; the last one means a good fit.
    answer_ids: list[int] = []

    stop_token_ids: ClassVar[tuple[int, ...]] = ()

    @property
    def name(self) -> PoolingTask:
        """The task."""
        assert self.params.task is not None
        return self.params.task

    @property
    def is_by_token(self) -> bool:
        """Whether each token has a result."""
        return self.params.task in ("token_embed", "token_classify")

    @property
    def is_kept_by_workers(self) -> bool:
        # Sums of rows, or rows.
        return self.is_by_token or self.kind != "last"


AnyTask = Generate | Beam | Pool


class Feature(msgspec.Struct, frozen=True, array_like=True):
    """Placeholder tokens of a prompt whose embeddings come from an image or audio (vLLM: multimodal placeholders)."""

    #: Position of the first placeholder token, and their number.
    offset: int
    length: int
    #: Digest of everything that the embeddings depend on.
    key: bytes
    #: Key of the image (``EngineCoreRequest.images``), and the first of its features.
    image: str = ""
    first: int = 0
    #: Whether one step must compute all of them, as they attend to each other.
    is_whole: bool = False
    #: Features along time, height and width, for networks with such positions.
    grid: tuple[int, int, int] | None = None


class EngineCoreRequest(msgspec.Struct, kw_only=True, gc=False):
    """A tokenized and validated prompt with its task; it needs no tokenizer any more."""

    group_id: int
    prompt_token_ids: list[int]
    task: AnyTask
    #: Seconds of ``time.monotonic()``.
    arrival_time: float = 0.0
    options: RequestOptions = DEFAULT_OPTIONS
    adapter: AdapterRef | None = None
    #: Of an encoder-decoder network, whose decoder's tokens ``prompt_token_ids`` are.
    encoder_input: EncoderInput | None = None
    #: Without duplicates.
    images: list[PromptImage] = []
    features: list[Feature] = []
    prediction: list[int] = []
    progress: ResumePoint | None = None

    def __post_init__(self) -> None:
        exclude_from_gc(self.prompt_token_ids)
        exclude_from_gc(self.prediction)
        exclude_from_gc(self.features)

    @property
    def cache_context(self) -> str:
        """What contents of blocks depend on besides tokens and features: salt, adapter and encoder input."""
        context = f"{len(self.options.cache_salt)}:{self.options.cache_salt}"
        if self.adapter is not None:
            context = f"{context}/{self.adapter.key}"
        return context if self.encoder_input is None else f"{context}/{self.encoder_input.key}"


# Prompts.


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    #: ``{"image": image}``, or a list of images: PIL images, arrays uint8 [height, width, 3], or the bytes of a file.
    multi_modal_data: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt as token ids; a ``prompt`` beside them is only shown in outputs."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """A prompt of an encoder-decoder model; each part is text, token ids, or a dictionary of these.

    Audio is ``{"multi_modal_data": {"audio": (samples, rate)}}``. The decoder's start is by default the model's.
    """

    encoder_prompt: Any
    decoder_prompt: NotRequired[Any]
    cache_salt: NotRequired[str]


class SplitPrompt(TypedDict):
    """A checked prompt of an encoder-decoder model."""

    #: The decoder's, with the start token; and its text, if it was text.
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    encoder_input: NotRequired[EncoderInput]
    encoder_prompt: NotRequired[str | None]
    cache_salt: NotRequired[str]
    #: Last tokens of ``prompt_token_ids`` that every answer of the model starts with.
    num_forced: int


def num_prompt_tokens(prompt: Mapping[str, Any]) -> int:
    """Tokens of a tokenized prompt and of its encoder input."""
    encoder_input = prompt.get("encoder_input")
    return len(prompt["prompt_token_ids"]) + (0 if encoder_input is None else encoder_input.num_tokens)


#: One prompt: text, token ids, or a dictionary of these; encoder-decoder models have two parts.
Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | ExplicitEncoderDecoderPrompt | Mapping[str, Any]

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


# Preparations: resources that must be ready on the workers before a request can run.

#: Maximum unused grammars that workers keep for later requests.
MAX_IDLE_GRAMMARS = 128
#: Maximum unused encoder inputs, whose outputs may be in the prefix cache.
MAX_IDLE_INPUTS = 16


class Preparation(msgspec.Struct, frozen=True, array_like=True):
    """A resource to prepare: an adapter, a grammar, an encoder input, or an image."""

    kind: str
    #: Digest of everything that it depends on: two requests with one key share it.
    key: str
    #: Input of the kind's ``Preparer``.
    payload: bytes
    #: Its share of ``Limits.host``: 1, or its bytes.
    size: int = 1


class Limits(msgspec.Struct, frozen=True):
    """How many resources of a kind the workers keep."""

    #: Maximum on a worker, in the unit of ``Preparation.size``; None: all in use, and ``idle`` others.
    host: int | None = None
    #: Slots on the device, one for each running sequence's resource; None: none needed.
    slots: int | None = None
    idle: int | None = None
    #: The option that limits pinned resources, for errors.
    option: str = ""

    @property
    def is_scarce(self) -> bool:
        """Whether running groups may hold all of them, so that others must wait."""
        return self.host is not None or self.slots is not None


@dataclass(frozen=True)
class PreparationKind:
    """A kind of resources."""

    of: Callable[[EngineCoreRequest], Sequence[Preparation]]
    limits: Callable[[Any], Limits]
    #: ``module:Class`` of its ``Preparer``.
    preparer: str
    #: Name in errors, and the option that enables the kind; empty: always enabled.
    noun: str = ""
    option: str = ""
    #: Whether it counts in the statistics of adapters.
    is_adapter: bool = False
    #: Whether workers compute it on the device, in steps (``StepPlan.compute_seconds``): it is given up when no request
    #: waits for it any more.
    is_computed: bool = False


def adapter_preparation(ref: AdapterRef) -> Preparation:
    """A LoRA adapter has a rank; a prompt adapter has none."""
    return Preparation("lora" if ref.rank else "prompt_adapter", ref.key, msgspec.msgpack.encode(ref))


def grammar_preparation(grammar: Grammar) -> Preparation:
    """Shared by all requests with the same grammar."""
    return Preparation("grammar", grammar.key, grammar.source.encode())


def _adapter_of(request: EngineCoreRequest, kind: str) -> Sequence[Preparation]:
    preparation = None if request.adapter is None else adapter_preparation(request.adapter)
    return (preparation,) if preparation is not None and preparation.kind == kind else ()


def _grammar_of(request: EngineCoreRequest) -> Sequence[Preparation]:
    task = request.task
    if isinstance(task, Generate) and task.grammar is not None and task.samples:
        return (grammar_preparation(task.grammar),)
    return ()


def _encoder_input_of(request: EngineCoreRequest) -> Sequence[Preparation]:
    data = request.encoder_input
    return () if data is None else (Preparation("encoder_input", data.key, msgspec.msgpack.encode(data)),)


#: In the order in which a request's resources are prepared.
KINDS: dict[str, PreparationKind] = {
    "grammar": PreparationKind(
        of=_grammar_of,
        limits=lambda options: Limits(idle=MAX_IDLE_GRAMMARS),
        preparer="octavo.runner.grammars:GrammarPreparer",
    ),
    "encoder_input": PreparationKind(
        of=_encoder_input_of,
        limits=lambda options: Limits(idle=MAX_IDLE_INPUTS),
        preparer="octavo.runner.encoders:EncoderInputPreparer",
    ),
    "image": PreparationKind(
        of=lambda request: [Preparation("image", i.key, i.payload, i.size) for i in request.images],
        limits=lambda options: Limits(host=getattr(options, "image_cache_bytes", DEFAULT_IMAGE_CACHE)),
        preparer="octavo.runner.images:ImagePreparer",
        is_computed=True,
    ),
    "lora": PreparationKind(
        of=lambda request: _adapter_of(request, "lora"),
        limits=lambda o: Limits(host=o.num_host_loras, slots=o.max_loras, option="max_loras"),
        preparer="octavo.runner.adapters:LoraPreparer",
        noun="an adapter of LoRA", option="enable_lora", is_adapter=True,
    ),
    "prompt_adapter": PreparationKind(
        of=lambda request: _adapter_of(request, "prompt_adapter"),
        limits=lambda o: Limits(host=o.max_prompt_adapters, option="max_prompt_adapters"),
        preparer="octavo.runner.adapters:PromptAdapters",
        noun="an adapter of prompt tuning", option="enable_prompt_adapter", is_adapter=True,
    ),
}  # fmt: skip


def preparations_of(request: EngineCoreRequest) -> list[Preparation]:
    """All resources of a request."""
    return [preparation for kind in KINDS.values() for preparation in kind.of(request)]


def limits_of(options: Any) -> dict[str, Limits]:
    """Limits by kind for an ``EngineConfig``; with None, of the kinds that no option enables."""
    enabled = {name: kind for name, kind in KINDS.items() if not kind.option or getattr(options, kind.option, False)}
    return {name: kind.limits(options) for name, kind in enabled.items()}
