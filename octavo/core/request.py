"""Requests of the engine core: a prompt, and one of several tasks."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NotRequired, TypedDict

import msgspec

from octavo.core.errors import AdapterError, ConfigError, InvalidRequestError
from octavo.core.garbage import exclude_from_gc
from octavo.core.model_config import ReasoningMarks, ThinkingBudget
from octavo.core.outputs import PoolingKind, PoolingParams, PoolingTask
from octavo.core.sampling_params import BeamSearchParams, Grammar, SamplingParams, TimestampRules, check_number

if TYPE_CHECKING:
    import numpy as np


# What requests, plans and workers call an adapter, and what users pass to name one.


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that was checked: all that scheduler and workers need to load it."""

    #: Digest of its files' content: what the contents of blocks depend on. Two names of the same content have one key.
    key: str
    name: str
    #: Its folder, or its GGUF file.
    path: str
    #: Largest rank of its low-rank products; 0 of a prompt adapter, which has none and takes no slot.
    rank: int
    #: Virtual tokens before the prompt, of prompt and prefix tuning.
    num_virtual_tokens: int = 0


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its name and place: ``LoRARequest("sql", 1, "path/of/the/adapter")``."""

    lora_name: str
    #: At least 1, one number for each name.
    lora_int_id: int
    #: A folder of PEFT, or a GGUF file. None: one that is loaded already.
    lora_path: str | None = None


class PromptAdapterRequest(LoRARequest):
    """A prompt adapter by its name and place, under the names of vLLM.

    >>> PromptAdapterRequest("tone", 1, "path/of/the/adapter", prompt_adapter_num_virtual_tokens=20)

    A ``LoRARequest`` with the same values means the same, but does not say how many virtual tokens are expected.
    """

    def __init__(
        self,
        prompt_adapter_name: str,
        prompt_adapter_id: int,
        prompt_adapter_local_path: str | None = None,
        prompt_adapter_num_virtual_tokens: int | None = None,
    ) -> None:
        super().__init__(prompt_adapter_name, prompt_adapter_id, prompt_adapter_local_path)
        object.__setattr__(self, "num_virtual_tokens", prompt_adapter_num_virtual_tokens)

    #: How many virtual tokens the adapter must have; None: any number.
    num_virtual_tokens: int | None


def one_adapter(lora: LoRARequest | None, prompt: PromptAdapterRequest | None) -> LoRARequest | None:
    """The adapter of a request, which has at most one.

    Raises:
        AdapterError: it has two, or ``prompt`` is of another type.
    """
    if prompt is None:
        return lora
    if not isinstance(prompt, PromptAdapterRequest):
        raise AdapterError(f"prompt_adapter_request must be a PromptAdapterRequest, not {prompt!r:.300}")
    if lora is not None:
        raise AdapterError("a request has one adapter: either lora_request or prompt_adapter_request, not both")
    return prompt


# What the encoder of an encoder-decoder network reads, and what a model says of it.

#: Kinds of inputs: token ids (int32, little-endian), and sound (float32, little-endian; mono, at the model's rate).
TOKENS, AUDIO = "tokens", "audio"


class EncoderInput(msgspec.Struct, frozen=True, array_like=True):
    """The input of one request: it is prepared beside the steps, then computed once for all sequences of the group."""

    #: ``TOKENS``, ``AUDIO``, or another kind that the network's ``prepare_input`` knows.
    kind: str
    #: Digest of kind and payload.
    key: str
    #: Positions of the encoder's output, which the decoder attends to.
    num_tokens: int
    payload: bytes

    @classmethod
    def of(cls, kind: str, payload: bytes, num_tokens: int) -> EncoderInput:
        """Named by its content."""
        digest = blake2b(f"{kind}:{num_tokens}:".encode() + payload, digest_size=16)
        return cls(kind, f"encoder:{digest.hexdigest()}", num_tokens, payload)

    @classmethod
    def of_tokens(cls, token_ids: list[int]) -> EncoderInput:
        """A text, as ids from 0 to 2**31 - 1."""
        import numpy as np

        return cls.of(TOKENS, np.array(token_ids, "<i4").tobytes(), len(token_ids))

    @property
    def token_ids(self) -> list[int] | None:
        """Those of a text."""
        import numpy as np

        return np.frombuffer(self.payload, "<i4").tolist() if self.kind == TOKENS else None

    @classmethod
    def of_audio(cls, samples: np.ndarray, num_tokens: int) -> EncoderInput:
        """Sound, float32 [samples], at the model's rate; ``num_tokens`` positions are what the network makes of it."""
        import numpy as np

        return cls.of(AUDIO, np.ascontiguousarray(samples, "<f4").tobytes(), num_tokens)


# Images in prompts: what a model says of them, and what is sent of one to the workers.

#: Bytes of features that workers keep, where no option says otherwise.
DEFAULT_IMAGE_CACHE = 512 << 20


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """One image of a request."""

    #: Digest of its content.
    key: str
    #: An encoded ``ImageInput``.
    payload: bytes
    #: Bytes that its features take on the workers.
    size: int


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """One image after resizing, cutting and cropping: pieces of equal size, each of which the tower sees alone."""

    #: uint8 [pieces, height, width, 3] (red, green, blue), contiguous.
    pixels: bytes
    pieces: int
    height: int
    width: int

    @classmethod
    def of(cls, pixels: np.ndarray) -> ImageInput:
        """Of pieces uint8 [n, height, width, 3]."""
        count, height, width, _ = pixels.shape
        return cls(pixels.tobytes(), count, height, width)

    def array(self) -> np.ndarray:
        """The pieces, uint8 [n, height, width, 3], read-only."""
        import numpy as np

        return np.frombuffer(self.pixels, np.uint8).reshape(self.pieces, self.height, self.width, 3)

    def for_prompt(self, num_features: int, width: int) -> PromptImage:
        """Named by its content, as a request has it; it becomes so many features of ``width`` numbers, float32."""
        payload = msgspec.msgpack.encode(self)
        return PromptImage(f"image:{blake2b(payload, digest_size=16).hexdigest()}", payload, 4 * num_features * width)

    @classmethod
    def decode(cls, payload: bytes) -> ImageInput:
        """That of ``PromptImage.payload``."""
        return msgspec.msgpack.decode(payload, type=cls)


# What is known of a request that an engine core has begun: enough for another core to go on with the same bits.


class AdmissionStats(msgspec.Struct, array_like=True):
    """A group was admitted, for the first time or again; its totals so far (see ``RequestMetrics``)."""

    group_id: int
    first_scheduled_time: float | None = None
    num_cached_tokens: int = 0
    num_recomputes: int = 0
    num_recomputed_tokens: int = 0
    num_swaps: int = 0
    num_swapped_blocks: int = 0


class DraftStats(msgspec.Struct, array_like=True, gc=False):
    """Draft tokens of a group so far, over its sequences, and how many of them were accepted."""

    group_id: int
    num_draft_tokens: int
    num_accepted_tokens: int


class Hypothesis(msgspec.Struct, frozen=True):
    """A complete sequence of a beam search."""

    #: Generated tokens, with the stop token that ended it.
    token_ids: list[int]
    #: Sum of the logprobs of ``token_ids``.
    cumulative_logprob: float
    #: ``cumulative_logprob / len(token_ids) ** length_penalty``
    score: float
    finish_reason: Literal["stop", "length"]


class BeamUpdate(msgspec.Struct, array_like=True):
    """What a step of a beam search decided, which is not its last."""

    group_id: int
    #: The running beams, best first: which beam before the step each continues, and its new token.
    survivors: list[tuple[int, int]]
    #: Of the running beams: sums of the logprobs of their tokens.
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
        """Goes one step further."""
        self.token_ids = [[*self.token_ids[parent], token] for parent, token in update.survivors]
        self.cumulative_logprobs = update.cumulative_logprobs
        if update.hypotheses is not None:
            self.hypotheses = update.hypotheses


class CompletionResumePoint(msgspec.Struct, array_like=True, gc=False):
    """A completion that has not ended."""

    index: int
    #: Generated so far, with those that its grammar has forced.
    token_ids: list[int]

    def __post_init__(self) -> None:
        exclude_from_gc(self.token_ids)


class ResumePoint(msgspec.Struct, array_like=True):
    """A request that was begun elsewhere and goes on as after a preemption by recompute."""

    #: Those that have not ended; none: nothing was sampled yet.
    completions: list[CompletionResumePoint] = []
    #: Of a beam search that has generated something.
    beams: BeamResumePoint | None = None
    #: Counted on from here; None: it was never admitted.
    totals: AdmissionStats | None = None
    drafts: DraftStats | None = None
    #: Tokens that it must compute in steps of its own before it may share one: steps with it have failed repeatedly.
    alone: int = 0


# Options and keywords about which Octavo has no choice, vLLM's and former ones: accepted if they ask for what it
# does.


class ForeignOption(NamedTuple):
    """The values that are accepted (``ANY``: all of them), and why no others are."""

    accepted: tuple[object, ...]
    reason: str = ""

    @property
    def boolean(self) -> bool:
        """Whether it is on or off, and so a flag without a value."""
        return isinstance(next(iter(self.accepted), None), bool)


#: It decides nothing here, whatever it is.
ANY = ForeignOption(())
ON_OR_OFF = ForeignOption((False, True))

_ONE_WORKER = "workers divide matrices and layers, nothing else"
_PROCESSED = "a model's own files say how images are processed"
_GENERATES = "a model does all that its network has a head for, or what the option task says"
_POOLING = "the model's files say how it pools, and PoolingParams what a request wants (docs/embeddings.md)"
_SPECULATION = "drafts are asked for with speculative_config"
_FROM_CHECKPOINT = "it is read from the checkpoint's config.json"
_NO_TRANSFER = "the KV cache is not shared between engines"

FOREIGN_OPTIONS: dict[str, ForeignOption] = {
    # The model and its files
    "trust_remote_code": ON_OR_OFF,  # a permission, of which no use is made
    "tokenizer_mode": ForeignOption(
        ("auto", "hf"), "tokenizers are read from tokenizer.json, or from the files of their family"
    ),
    "tokenizer_revision": ForeignOption((None,), "the tokenizer has the model's revision, or is a folder (tokenizer)"),
    "code_revision": ForeignOption((None,), "no code of a checkpoint is run"),
    "hf_token": ForeignOption((None,), "the hub's token is read from the variable HF_TOKEN"),
    "hf_config_path": ForeignOption((None,), _FROM_CHECKPOINT),
    "config_format": ForeignOption(("auto", "hf"), "configurations are read from config.json"),
    "rope_scaling": ForeignOption((None, {}), _FROM_CHECKPOINT),
    "rope_theta": ForeignOption((None,), _FROM_CHECKPOINT),
    "disable_sliding_window": ForeignOption((False,), _FROM_CHECKPOINT),
    "download_dir": ForeignOption((None,), "hub models are under HF_HOME, others under OCTAVO_CACHE"),
    "ignore_patterns": ForeignOption((None, []), "only the files that are needed are fetched"),
    "model_loader_extra_config": ForeignOption((None, {}), "loading has no further options"),
    "model_impl": ForeignOption(("auto",), "the networks are Octavo's own"),
    "use_tqdm_on_load": ON_OR_OFF,
    "runner": ForeignOption(("auto", "generate", "pooling"), _GENERATES),
    "convert": ForeignOption(("auto", "none", "embed"), _GENERATES),
    "pooler_config": ForeignOption((None,), _POOLING),
    "override_pooler_config": ForeignOption((None,), _POOLING),
    "mm_processor_kwargs": ForeignOption((None, {}), _PROCESSED),
    "allowed_local_media_path": ForeignOption(("", None), "no files of the server's machine are read for clients"),
    "disable_mm_preprocessor_cache": ON_OR_OFF,
    "disable_chunked_mm_input": ON_OR_OFF,
    "mm_processor_cache_gb": ANY,
    "skip_mm_profiling": ON_OR_OFF,
    "language_model_only": ON_OR_OFF,
    "enable_prompt_embeds": ForeignOption((False,), "prompts are text or token ids"),
    "override_generation_config": ForeignOption(
        (None, {}), "generation_config names a folder with defaults, and requests bring parameters of their own"
    ),
    "logprobs_mode": ForeignOption(
        ("raw_logprobs",), "logprobs are the model's own, before penalties, temperature and filters"
    ),
    "enable_trace_replay": ForeignOption((False,), "prompt_logprobs scores an answer that is known"),
    "screen_lm_head": ForeignOption((False,), "the language-model head has no copy in fewer bits any more"),
    # Workers
    "decode_context_parallel_size": ForeignOption((1,), _ONE_WORKER),
    "enable_expert_parallel": ON_OR_OFF,  # experts are divided as other matrices are, to the same end
    "worker_extension_cls": ForeignOption(("", None), "collective_rpc calls functions with each worker"),
    "max_parallel_loading_workers": ForeignOption((None,), _ONE_WORKER),
    "worker_cls": ForeignOption(("auto",), "there are no other workers"),
    "disable_custom_all_reduce": ON_OR_OFF,
    "ray_workers_use_nsight": ForeignOption((False,), _ONE_WORKER),
    # Memory and graphs
    "cpu_offload_gb": ForeignOption((0,), "the weights stay on the device that computes"),
    "kv_transfer_config": ForeignOption((None,), _NO_TRANSFER),
    "kv_events_config": ForeignOption((None,), _NO_TRANSFER),
    "disable_hybrid_kv_cache_manager": ON_OR_OFF,
    "calculate_kv_scales": ON_OR_OFF,  # an 8-bit KV cache always has scales of its own tokens
    "prefix_caching_hash_algo": ANY,
    "use_v2_block_manager": ON_OR_OFF,
    "enable_sleep_mode": ON_OR_OFF,  # sleep() needs no preparation
    "compilation_config": ForeignOption((None, {}, 0), "networks are not compiled (decode steps are captured on GPUs)"),
    "optimization_level": ANY,
    "attention_backend": ANY,  # the device says which kernels there are
    "enable_flashinfer_autotune": ON_OR_OFF,
    "max_seq_len_to_capture": ANY,  # graphs are captured by batch size, for sequences of every length
    "max_context_len_to_capture": ANY,
    # Steps
    "num_scheduler_steps": ForeignOption((1,), "each step is scheduled; async_scheduling plans one ahead"),
    "multi_step_stream_outputs": ON_OR_OFF,
    "num_lookahead_slots": ForeignOption((0,), _SPECULATION),
    "max_long_partial_prefills": ForeignOption((1,), "one long prompt is computed at once"),
    "disable_async_output_proc": ON_OR_OFF,
    "disable_cascade_attn": ON_OR_OFF,
    "scheduler_cls": ForeignOption((None,), "an order of one's own is given as scheduling_policy (module:Class)"),
    "speculative_model": ForeignOption((None,), _SPECULATION),
    "num_speculative_tokens": ForeignOption((None,), _SPECULATION),
    "lora_dtype": ANY,
    "fully_sharded_loras": ON_OR_OFF,
    "guided_decoding_backend": ANY,  # all mean the same by a grammar
    "reasoning_config": ForeignOption(
        (None, {}), "marks of reasoning are those that the chat template speaks of; --reasoning-parser names others"
    ),
    "enable_auto_tool_choice": ON_OR_OFF,  # a request may always leave the choice to the model
    "logits_processor_pattern": ForeignOption((None,), "name them one by one (logits_processors, module:Class)"),
    # Logs
    "disable_log_stats": ON_OR_OFF,
    "disable_log_requests": ON_OR_OFF,
    "enable_log_requests": ON_OR_OFF,
    "collect_detailed_traces": ForeignOption((None,), "traces have one level of detail"),
    "additional_config": ForeignOption((None, {}), "there is nothing that it would configure"),
}

#: Keywords of ``LLM.generate``, ``LLM.chat`` and ``LLM.beam_search``.
FOREIGN_KEYWORDS: dict[str, ForeignOption] = {
    "guided_options_request": ForeignOption((None,), "its name is SamplingParams.structured_outputs"),
    "tokenization_kwargs": ForeignOption((None, {}), "SamplingParams.truncate_prompt_tokens shortens prompts"),
    "prompt_token_ids": ForeignOption((None,), "a prompt is TokensPrompt(prompt_token_ids=...) or the list itself"),
    "mm_processor_kwargs": ForeignOption((None, {}), _PROCESSED),
    "chat_template_content_format": ForeignOption(("auto", "string"), "a template gets parts where it reads them"),
    "concurrency_limit": ANY,  # the scheduler runs as many as fit
}

#: Other names of options, which mean the same: vLLM's, and former ones.
OTHER_NAMES = {
    "cudagraph_capture_sizes": "graph_capture",
    "status_interval": "log_stats_interval",
}

#: Other names of an option's values.
ALIASES = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "scheduling_policy": {"priority": "static"},
}


def own_value(name: str, value: Any) -> Any:
    """The value of an option by the name that it has here: ``float16`` for ``half`` and for ``torch.float16``."""
    if type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    return ALIASES.get(name, {}).get(value, value) if isinstance(value, str) else value


def own_name(name: str) -> str:
    """The name that an option has here."""
    return OTHER_NAMES.get(name, name)


def own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one source by the names that they have here.

    Raises:
        ConfigError: an option is given by two of its names.
    """
    by_name: dict[str, Any] = {}
    for name, value in options.items():
        if own_name(name) in by_name:
            raise ConfigError(f"option {own_name(name)!r} is given twice, by different names")
        by_name[own_name(name)] = value
    return by_name


def own_options(options: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The options without those of ``FOREIGN_OPTIONS``, with values by their names here.

    Args:
        options: by name.
        sources: option -> where its value came from, for messages.

    Raises:
        ConfigError: one of ``FOREIGN_OPTIONS`` has a value that is not accepted.
    """
    values = {}
    for name, value in options.items():
        if name in FOREIGN_OPTIONS:
            refusal = _refusal(name, FOREIGN_OPTIONS[name], value)
            if refusal is not None:
                raise ConfigError(refusal if sources is None else f"{refusal} (from {sources[name]})")
        else:
            values[name] = own_value(name, value)
    return values


def check_keywords(method: str, keywords: Mapping[str, Any]) -> None:
    """Checks the further keywords of a method.

    Raises:
        InvalidRequestError: one of ``FOREIGN_KEYWORDS`` has a value that is not accepted.
        TypeError: there is another one.
    """
    for name, value in keywords.items():
        if name not in FOREIGN_KEYWORDS:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        refusal = _refusal(name, FOREIGN_KEYWORDS[name], value)
        if refusal is not None:
            raise InvalidRequestError(refusal)


def _refusal(name: str, option: ForeignOption, value: object) -> str | None:
    """Why the value is not accepted, or None if it is."""
    accepted = option.accepted
    if value is None or not accepted:  # None: as if it were not given
        return None
    # bool is a kind of int: True is no number here.
    if any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted):
        return None
    *first, last = map(repr, accepted)
    allowed = f"{', '.join(first)} or {last}" if first else last
    return f"{name} must be {allowed}, not {value!r}" + (f": {option.reason}" if option.reason else "")


# What a caller may say of a request beside prompt and parameters.


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The keywords of ``LLM.generate`` and its like: made and checked once, from keywords, JSON or flags.

    They go with the request to the engine core; what the front end resolves is a field of ``EngineCoreRequest`` there.

    Raises:
        InvalidRequestError: a value is of another type, or out of range.
    """

    #: An integer or a finite float; the lower goes first. Refused, if not 0, under a policy that does not look at it.
    priority: int | float = 0
    #: Whose request it is, for the policies that share by user or learn from users.
    user: str = ""
    #: Seconds from its arrival to the first token, and between its tokens from there, that the ``deadline`` policy aims
    #: at; None: as the option of this name says. Refused under a policy that does not look at them.
    ttft_target: float | None = None
    tpot_target: float | None = None
    #: Requests with different salts share no cached prefix. That of a prompt comes before it.
    cache_salt: str = ""
    #: A past moment in seconds of ``time.monotonic()``; None: now. Policies, ageing, the scheduler's delay and the
    #: metrics count from it.
    arrival_time: float | None = None
    #: The adapter that it runs with, which is loaded if it is not yet. Needs ``enable_lora``, or
    #: ``enable_prompt_adapter`` if it is a prompt adapter; that may be named ``prompt_adapter_request``.
    lora_request: LoRARequest | None = None
    #: What the output is likely to be, as text or token ids: tokens that it has indeed come sooner, and the output does
    #: not depend on it.
    prediction: str | Sequence[int] | None = None
    #: Special tokens that are part of the text although others are not.
    visible_tokens: frozenset[int] = frozenset()
    #: How the model marks its reasoning, where it is known better than by its chat template.
    reasoning: ReasoningMarks | None = None
    #: Of a transcription.
    timestamps: TimestampRules | None = None
    #: Of a transcription: (layer, head) whose cross attention weights are asked for, of a prompt without an answer.
    alignment_heads: Sequence[tuple[int, int]] = ()
    #: Who asks; clients take turns with what has to be compiled.
    client: str = ""
    #: Of a shared prefix, which samples nothing: the name under which its blocks are pinned once computed.
    pin_as: str | None = None

    def __post_init__(self) -> None:
        check_number("priority", self.priority, -math.inf, math.inf)
        for name in ("user", "cache_salt", "client"):
            if not isinstance(getattr(self, name), str):
                raise InvalidRequestError(f"{name} must be text, not {getattr(self, name)!r}")
        for name, target in (("ttft_target", self.ttft_target), ("tpot_target", self.tpot_target)):
            if target is not None:
                check_number(name, target, 0, math.inf)
                if not target:
                    raise InvalidRequestError(f"{name} must be above 0 seconds, not {target}")
        if not isinstance(self.prediction, str | list | tuple | None):
            raise InvalidRequestError(f"prediction must be text or a list of token ids, not {self.prediction!r}")
        moment, now = self.arrival_time, time.monotonic()
        if moment is not None and (
            isinstance(moment, bool) or not isinstance(moment, (int, float)) or not -math.inf < moment <= now
        ):
            raise InvalidRequestError(
                f"arrival_time must be a past moment in seconds of time.monotonic(), which is at {now:.3f}, not "
                f"{moment!r}"
            )


DEFAULT_OPTIONS = RequestOptions()
#: Fields that are set by the engine's own front ends alone.
_INTERNAL = {"pin_as", "reasoning", "timestamps", "alignment_heads"}
#: Names of keywords that are fields of ``RequestOptions``, or that stand for one.
KEYWORDS = {*RequestOptions.__struct_fields__, "prompt_adapter_request"} - _INTERNAL


def check_request_keywords(method: str, keywords: Mapping[str, Any]) -> None:
    """Refuses keywords that are neither in ``KEYWORDS`` nor another engine's, with a value that means nothing here.

    Raises:
        TypeError, InvalidRequestError: see ``check_keywords``.
    """
    check_keywords(method, {name: value for name, value in keywords.items() if name not in KEYWORDS})


def options_from_keywords(
    method: str, keywords: Mapping[str, Any], options: RequestOptions = DEFAULT_OPTIONS
) -> RequestOptions:
    """The options with those fields that the keywords of a method give; None is as if it were not given.

    Raises:
        TypeError: a keyword is neither one of ``KEYWORDS`` nor one of another engine's.
        InvalidRequestError: a value is wrong, or one of ``FOREIGN_KEYWORDS`` that is not accepted.
        AdapterError: there are two adapters.
    """
    if not keywords:
        return options
    check_request_keywords(method, keywords)
    fields = {name: value for name, value in keywords.items() if name in KEYWORDS and value is not None}
    if (named := fields.pop("prompt_adapter_request", None)) is not None:
        fields["lora_request"] = one_adapter(fields.get("lora_request"), named)
    return msgspec.structs.replace(options, **fields)


def options_for_each(method: str, keywords: Mapping[str, Any], count: int) -> list[RequestOptions]:
    """The options of each of ``count`` requests; a keyword has one value for all, or a list with one for each.

    Raises:
        InvalidRequestError: a list is of another length.
        TypeError, InvalidRequestError, AdapterError: as ``options_from_keywords``.
    """
    columns = {name: value for name, value in keywords.items() if name in KEYWORDS and _is_one_each(name, value)}
    for name, column in columns.items():
        check_one_each(name, column, count)
    options = options_from_keywords(method, {name: value for name, value in keywords.items() if name not in columns})
    if not columns:
        return [options] * count
    rows = zip(*columns.values(), strict=True)
    return [options_from_keywords(method, dict(zip(columns, row, strict=True)), options) for row in rows]


def check_one_each(name: str, value: Any, count: int) -> None:
    """Refuses what is no sequence of ``count`` values."""
    if not isinstance(value, Sequence) or len(value) != count:
        what = f"{len(value)} of them" if isinstance(value, Sequence) else repr(value)
        raise InvalidRequestError(f"{name} must be one for all prompts or one for each of the {count}, not {what}")


def _is_one_each(name: str, value: object) -> bool:
    """Whether this is a list of values; a list of integers is one prediction."""
    if not isinstance(value, (list, tuple)):
        return False
    return name != "prediction" or not all(isinstance(token, int) for token in value)


_MASK64 = (1 << 64) - 1
#: Most tokens that a step of a beam search looks at, of each beam.
_MAX_CANDIDATES = 100


class SequenceStatus(enum.Enum):
    """State of a sequence; the finished states give the reason."""

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
        """Whether no further token will come."""
        return self not in _UNFINISHED


_UNFINISHED = frozenset({SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED})


class Task(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """What to compute for a prompt; one of ``AnyTask``. The base class computes its KV entries only."""

    @property
    def num_sequences(self) -> int:
        """Most sequences that run at once."""
        return 1

    @property
    def max_tokens(self) -> int | None:
        """Most tokens to generate; None: as many as the context length allows."""
        return 0

    @property
    def samples(self) -> bool:
        """Whether tokens follow the prompt. If not, the request ends when its prompt is computed."""
        return self.max_tokens != 0

    @property
    def plans_on_results(self) -> bool:
        """Whether what a step computes depends on the result of the one before it."""
        return False

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to name at each position of the prompt, which is then computed whole."""
        return None

    @property
    def needs_all_tokens(self) -> bool:
        """Whether each token of the prompt must be computed for it, so that nothing of it is taken from a cache."""
        return self.prompt_logprobs is not None

    @property
    def is_kept_by_workers(self) -> bool:
        """Whether the workers hold more of a partly computed prompt than its KV entries, which swapping would lose."""
        return False


class Generate(Task):
    """Completions that the workers sample."""

    #: ``max_tokens`` may be 0: then only the prompt and its logprobs are computed.
    params: SamplingParams
    #: Unsigned 64-bit; never None, so a resumed sequence draws the same numbers.
    seed: int
    #: End-of-sequence and stop tokens (without the former if ``ignore_eos``).
    stop_token_ids: list[int] = []
    #: ``bad_words`` as token id sequences.
    bad_words_ids: list[list[int]] = []
    #: End-of-sequence tokens that do not end it (``ignore_eos``); forbidden before ``min_tokens`` like the others.
    ignored_eos_ids: list[int] = []
    #: Of ``params.structured_outputs``.
    grammar: Grammar | None = None
    #: Of ``params.thinking_token_budget``.
    thinking_budget: ThinkingBudget | None = None
    #: Of a transcription.
    timestamps: TimestampRules | None = None
    #: (layer, head) whose cross attention weights of the prompt's tokens are the result beside logprobs, in this order.
    alignment_heads: list[tuple[int, int]] = []

    def __post_init__(self) -> None:
        for ids in (self.stop_token_ids, self.bad_words_ids, self.ignored_eos_ids):
            exclude_from_gc(ids)

    @property
    def num_sequences(self) -> int:
        """See ``Task``. Without sampled tokens all completions are equal, and one sequence computes them."""
        return self.params.num_sequences if self.samples else 1

    @property
    def max_tokens(self) -> int | None:
        """See ``Task``."""
        return self.params.max_tokens

    @property
    def prompt_logprobs(self) -> int | None:
        """See ``Task``."""
        return self.params.prompt_logprobs

    @property
    def needs_all_tokens(self) -> bool:
        """See ``Task``."""
        return bool(self.alignment_heads) or self.prompt_logprobs is not None

    @property
    def is_kept_by_workers(self) -> bool:
        """See ``Task``: weights of attention."""
        return bool(self.alignment_heads)

    def sequence_seed(self, index: int) -> int:
        """The seed of completion ``index``."""
        return (self.seed + index) & _MASK64

    def stop_reason(self, token_id: int) -> int | None:
        """``token_id``, which ended a completion, if it is among the user's stop tokens; None otherwise."""
        return token_id if token_id in (self.params.stop_token_ids or ()) else None


class Beam(Task):
    """A beam search: the workers name the most likely tokens of each beam, and the scheduler chooses."""

    params: BeamSearchParams
    #: End-of-sequence tokens, unless they are ignored.
    stop_token_ids: list[int] = []
    #: Tokens at the end of the prompt that count as generated where hypotheses are scored by their lengths.
    num_forced: int = 0

    @property
    def num_sequences(self) -> int:
        """See ``Task``."""
        return self.params.beam_width

    @property
    def max_tokens(self) -> int:
        """See ``Task``."""
        return self.params.max_tokens

    @property
    def plans_on_results(self) -> bool:
        """See ``Task``."""
        return True

    @property
    def num_candidates(self) -> int:
        """Tokens that a step of the search needs of each beam (or all there are, in a smaller vocabulary).

        A beam contributes at most W (beam width) hypotheses and at most W survivors, all among its best
        W + (number of stop tokens), as only stop tokens rank between survivors. The choice is that of transformers,
        which looks at the best W * max(2, 1 + number of stop tokens) of all beams. The most that a worker computes
        is enough for up to 68 stop tokens.
        """
        return min(self.params.beam_width + len(self.stop_token_ids), _MAX_CANDIDATES)


class Pool(Task):
    """A vector or scores, made of the hidden states of the prompt."""

    #: Resolved: its ``task`` is named.
    params: PoolingParams
    #: Which hidden states make a vector or class scores; those of a task by token are taken as they are.
    kind: PoolingKind = "last"
    #: First position that counts among the pooled ones.
    first: int = 0
    #: Position of the first token of the second text of a pair, of networks that tell both apart; 0: there is one text.
    second_text: int = 0
    #: Of a score that a language model gives: its logits of these tokens, of which the last means that it fits.
    answer_ids: list[int] = []

    stop_token_ids: ClassVar[tuple[int, ...]] = ()

    @property
    def name(self) -> PoolingTask:
        """What is computed."""
        assert self.params.task is not None
        return self.params.task

    @property
    def is_by_token(self) -> bool:
        """Whether each token has a result."""
        return self.params.task in ("token_embed", "token_classify")

    @property
    def needs_all_tokens(self) -> bool:
        """See ``Task``."""
        return self.is_by_token or self.kind != "last"

    @property
    def is_kept_by_workers(self) -> bool:
        """See ``Task``: sums of rows, or rows."""
        return self.needs_all_tokens


AnyTask = Generate | Beam | Pool


class Feature(msgspec.Struct, frozen=True, array_like=True):
    """A part of the prompt whose embeddings come from an input other than text, such as an image or audio."""

    #: Position of its first placeholder token, and how many there are.
    offset: int
    length: int
    #: Digest of the input's content, and of all else that its embeddings depend on.
    key: bytes
    #: Key of the image that it comes from (``EngineCoreRequest.images``), and the first of its features.
    image: str = ""
    first: int = 0
    #: Whether one step computes all of its tokens, as they see each other.
    is_whole: bool = False
    #: Features along time, height and width, of networks with such positions.
    grid: tuple[int, int, int] | None = None


class EngineCoreRequest(msgspec.Struct, kw_only=True, gc=False):
    """A prompt and its task: tokenized and validated; nothing in it needs a tokenizer."""

    group_id: int
    prompt_token_ids: list[int]
    task: AnyTask
    #: Seconds of ``time.monotonic()``.
    arrival_time: float = 0.0
    #: As the caller said them; what the front end has resolved of them is a field here instead.
    options: RequestOptions = DEFAULT_OPTIONS
    #: The adapter that the network runs with.
    adapter: AdapterRef | None = None
    #: Of an encoder-decoder network: what its encoder reads. ``prompt_token_ids`` are the decoder's then.
    encoder_input: EncoderInput | None = None
    #: Images of the prompt, each once.
    images: list[PromptImage] = []
    #: In the order of their offsets; they do not overlap.
    features: list[Feature] = []
    #: What the output is likely to be: it is drafted, and changes nothing of it.
    prediction: list[int] = []
    #: Of one that another engine core has begun.
    progress: ResumePoint | None = None

    def __post_init__(self) -> None:
        exclude_from_gc(self.prompt_token_ids)
        exclude_from_gc(self.prediction)
        exclude_from_gc(self.features)

    @property
    def cache_context(self) -> str:
        """What block contents depend on besides tokens and features: salt, adapter and encoder input, one text each."""
        context = f"{len(self.options.cache_salt)}:{self.options.cache_salt}"
        if self.adapter is not None:
            context = f"{context}/{self.adapter.key}"
        return context if self.encoder_input is None else f"{context}/{self.encoder_input.key}"


# The forms of a prompt.


class TextPrompt(TypedDict):
    """A prompt given as text."""

    prompt: str
    #: Requests with different salts share no cached prefix.
    cache_salt: NotRequired[str]
    #: ``{"image": image}``, or a list of images, of models that see them: each in the place of a placeholder. An image
    #: is one of PIL, an array uint8 [height, width, 3], or the bytes of a file.
    multi_modal_data: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt given as token ids. A ``prompt`` beside them is the text that outputs show; the ids are what counts."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """A prompt of an encoder-decoder model: what its encoder reads, and what its decoder begins with.

    Each is a text, token ids, or one of these as a dictionary; of a model that reads sound the first is
    ``{"multi_modal_data": {"audio": (samples, rate)}}``. Without the second the decoder begins as the model's do.
    """

    encoder_prompt: Any
    decoder_prompt: NotRequired[Any]
    cache_salt: NotRequired[str]


class SplitPrompt(TypedDict):
    """A prompt of an encoder-decoder model as it is checked and made of ``ExplicitEncoderDecoderPrompt`` or others."""

    #: The decoder's, with the start token; and its text, if it was given as text.
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    encoder_input: NotRequired[EncoderInput]
    encoder_prompt: NotRequired[str | None]
    cache_salt: NotRequired[str]
    #: Tokens at the end of ``prompt_token_ids`` that the model's answers begin with in any case.
    num_forced: int


def num_prompt_tokens(prompt: Mapping[str, Any]) -> int:
    """Tokens of a tokenized prompt; with those of the encoder's input, if it has one."""
    given = prompt.get("encoder_input")
    return len(prompt["prompt_token_ids"]) + (0 if given is None else given.num_tokens)


#: One prompt: text, token ids, or one of these as a dictionary (see ``TextPrompt``, ``TokensPrompt``); of an
#: encoder-decoder model both parts of it, too.
Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | ExplicitEncoderDecoderPrompt | Mapping[str, Any]

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

_TEXT_ALONE = "the model takes text alone"
#: Keys of other engines, which may be None, and why they may not be anything else.
FOREIGN_KEYS = {
    "multi_modal_data": _TEXT_ALONE,
    "multi_modal_uuids": "images are named by their content",
    "mm_processor_kwargs": "the model's own files say how images are processed",
    "token_type_ids": _TEXT_ALONE,
    "prompt_embeds": "prompts are text or token ids",
    "encoder_prompt": "the model has a decoder alone",
    "decoder_prompt": "the model has a decoder alone",
}


# What must be ready on the workers before a request can run: an adapter, a grammar, an encoder's input, an image.

#: Most compiled grammars in no use that the workers keep, for requests that come again with the same.
MAX_IDLE_GRAMMARS = 128
#: As many inputs of encoders; what was made of them may be in the prefix cache.
MAX_IDLE_INPUTS = 16


class Preparation(msgspec.Struct, frozen=True, array_like=True):
    """One thing to prepare."""

    #: A name of ``KINDS``.
    kind: str
    #: Digest of its content, of its kind, and of all else that it depends on: two requests with one key share it.
    key: str
    #: What the kind's ``Preparer`` makes it of, or where that is to be read.
    payload: bytes
    #: What it takes of the kind's memory: things are counted, or their bytes.
    size: int = 1


class Limits(msgspec.Struct, frozen=True):
    """How many of a kind the workers keep."""

    #: Most on a worker at once, in use or not, as ``Preparation.size`` counts them; None: all in use, and ``idle``
    #: others.
    host: int | None = None
    #: Places on the device, of which a running sequence needs one; None: it needs none.
    slots: int | None = None
    idle: int | None = None
    #: The option that says the most that may be pinned, for errors.
    option: str = ""

    @property
    def is_scarce(self) -> bool:
        """Whether running groups may hold all there is, so that others must wait for their end."""
        return self.host is not None or self.slots is not None


@dataclass(frozen=True)
class PreparationKind:
    """One kind of things."""

    #: What a request needs of it.
    of: Callable[[EngineCoreRequest], Sequence[Preparation]]
    #: From an ``EngineConfig``.
    limits: Callable[[Any], Limits]
    #: ``module:Class`` of its ``Preparer``.
    preparer: str
    #: What a refusal calls it, and the option that enables it: without it, requests that need this kind are refused.
    #: Empty: it is always enabled.
    noun: str = ""
    option: str = ""
    #: Whether it is counted among the statistics of adapters.
    is_adapter: bool = False


def adapter_preparation(ref: AdapterRef) -> Preparation:
    """The preparation of an adapter: LoRA has low-rank products, a prompt adapter none."""
    return Preparation("lora" if ref.rank else "prompt_adapter", ref.key, msgspec.msgpack.encode(ref))


def grammar_preparation(grammar: Grammar) -> Preparation:
    """The preparation of a grammar."""
    return Preparation("grammar", grammar.key, grammar.source.encode())


def _adapter_of(request: EngineCoreRequest, kind: str) -> Sequence[Preparation]:
    preparation = None if request.adapter is None else adapter_preparation(request.adapter)
    return (preparation,) if preparation is not None and preparation.kind == kind else ()


def _grammar_of(request: EngineCoreRequest) -> Sequence[Preparation]:
    task = request.task
    if not isinstance(task, Generate) or task.grammar is None or not task.samples:
        return ()
    return (grammar_preparation(task.grammar),)


def _encoder_input_of(request: EngineCoreRequest) -> Sequence[Preparation]:
    given = request.encoder_input
    return () if given is None else (Preparation("encoder_input", given.key, msgspec.msgpack.encode(given)),)


def _images_of(request: EngineCoreRequest) -> Sequence[Preparation]:
    return [Preparation("image", image.key, image.payload, image.size) for image in request.images]


#: By name; in the order in which a request's preparations are asked for.
KINDS: dict[str, PreparationKind] = {
    "grammar": PreparationKind(
        of=_grammar_of,
        limits=lambda options: Limits(idle=MAX_IDLE_GRAMMARS),
        preparer="octavo.runner.preparer_kinds:GrammarPreparer",
    ),
    "encoder_input": PreparationKind(
        of=_encoder_input_of,
        limits=lambda options: Limits(idle=MAX_IDLE_INPUTS),
        preparer="octavo.runner.preparer_kinds:EncoderInputPreparer",
    ),
    "image": PreparationKind(
        of=_images_of,
        limits=lambda options: Limits(host=getattr(options, "image_cache_bytes", DEFAULT_IMAGE_CACHE)),
        preparer="octavo.runner.encoders:ImagePreparer",
    ),
    "lora": PreparationKind(
        of=lambda request: _adapter_of(request, "lora"),
        limits=lambda o: Limits(host=o.num_host_loras, slots=o.max_loras, option="max_loras"),
        preparer="octavo.runner.preparer_kinds:LoraPreparer",
        noun="an adapter of LoRA",
        option="enable_lora",
        is_adapter=True,
    ),
    "prompt_adapter": PreparationKind(
        of=lambda request: _adapter_of(request, "prompt_adapter"),
        limits=lambda o: Limits(host=o.max_prompt_adapters, option="max_prompt_adapters"),
        preparer="octavo.runner.preparer_kinds:PromptAdapters",
        noun="an adapter of prompt tuning",
        option="enable_prompt_adapter",
        is_adapter=True,
    ),
}


def preparations_of(request: EngineCoreRequest) -> list[Preparation]:
    """All that must be prepared before a request can run."""
    return [preparation for kind in KINDS.values() for preparation in kind.of(request)]


def limits_of(options: Any) -> dict[str, Limits]:
    """By kind, how many these options (an ``EngineConfig``) allow; None: of the kinds that need no option."""
    enabled = {name: kind for name, kind in KINDS.items() if not kind.option or getattr(options, kind.option, False)}
    return {name: kind.limits(options) for name, kind in enabled.items()}
