"""What bodies of requests and responses are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticOmit, core_schema

from octavo.server.http.errors import invalid

# Marks of fields that other servers know and this one does not obey: hints, and fields that are refused.

#: Type of the error of a refused field, which is what it says beside the field's place.
REFUSED = "refused_field"


@dataclass(frozen=True, slots=True)
class Hint:
    """A field that is accepted with any value, without effect."""

    #: Why there is none.
    reason: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Any value."""
        return core_schema.any_schema()

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The reason as the description."""
        return {**handler(schema), "description": f"Accepted, without effect: {self.reason}."}


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused, but for null and for values that ask for what happens anyway."""

    #: What to do instead, or what it is that the server does not do.
    reason: str
    accepted: tuple[Any, ...] = ()

    def check(self, value: Any) -> Any:
        """Refuses a value.

        Raises:
            PydanticCustomError: of the type ``REFUSED``.
        """
        is_bool = isinstance(value, bool)
        if value is None or any(value == allowed and isinstance(allowed, bool) == is_bool for allowed in self.accepted):
            return None
        context = {"besides": self.besides, "reason": self.reason, "is_field": True}
        raise PydanticCustomError(REFUSED, "{besides}: {reason}", context)

    @property
    def besides(self) -> str:
        """The values that are accepted, in words; empty: none that says anything."""
        values = " or ".join(repr(value) for value in self.accepted if value not in ("", [], {}))
        return f", except {values}" if values else ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """See ``check``."""
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The OpenAPI description has no fields that are refused."""
        raise PydanticOmit


Mark = Hint | Refused


def hint(reason: str) -> Any:
    """A field that is accepted with any value; ``reason`` says why it has no effect."""
    return _marked(Hint(reason))


def refused(reason: str, *accepted: Any) -> Any:
    """A field that is refused, but for null and ``accepted`` values; ``reason`` says what to do instead."""
    return _marked(Refused(reason, accepted))


def _marked(mark: Mark) -> Any:
    field: Any = Field(None)
    # Where Field puts its own constraints, such as gt.
    field.metadata.append(mark)
    return field


def marks_of(model: type[BaseModel]) -> dict[str, Mark | None]:
    """The mark of each field of a model; None: it is obeyed."""
    return {
        name: next((mark for mark in field.metadata if isinstance(mark, Hint | Refused)), None)
        for name, field in model.model_fields.items()
    }


#: Integers that the engine's messages can hold; the engine checks ranges.
Int = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Field(max_length=512)]
#: A text that is searched for in the output at every token.
Phrase = Annotated[str, Field(max_length=256)]


def _is_text(kind: str) -> str:
    if kind not in ("text", "input_text", "output_text"):
        raise PydanticCustomError(REFUSED, ": the model reads text, not {kind}", {"kind": repr(kind[:100])})
    return kind


def _is_seen(kind: str, info: ValidationInfo) -> str:
    if info.context is not None and not info.context["sees_images"]:
        raise PydanticCustomError(REFUSED, ": the model reads text, not {kind}", {"kind": repr(kind)})
    return kind


#: For the type of a part that is an image: refused where the model sees none, as the validation's context says.
SEEN = AfterValidator(_is_seen)
#: The type of a part of a content, which is a text in the words of some API.
TextKind = Annotated[str, AfterValidator(_is_text)]


class RequestModel(BaseModel):
    """A request body or a part of one; strict: "5" is not a number and true is not 1.

    Null stands for the default. What a field does that is not obeyed says its mark (``field_marks``); others than those
    of the model are refused.
    """

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), defer_build=True)


class ResponseModel(BaseModel):
    """A response or a part of one. Fields that were not set are not sent."""

    model_config = ConfigDict(protected_namespaces=(), defer_build=True)

    def encode(self) -> bytes:
        """As JSON."""
        return self.model_dump_json(exclude_unset=True).encode()


# Fields of other servers that say what a field here says: their values are taken over by the field here.

T = TypeVar("T")

#: Most tokens to generate as llama.cpp and Ollama say it, where a negative number is no limit.
_Tokens = Annotated[int, Field(ge=-2, le=2**31 - 1)]


def one_value(values: Mapping[str, T | None]) -> T | None:
    """The value of a field that has several names; None: no name has any.

    Raises:
        ApiError: 400, two names have different values.
    """
    given = [(name, value) for name, value in values.items() if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            message = f"{name} and {given[0][0]} say the same and contradict each other: {value!r} and {given[0][1]!r}"
            raise invalid(name.partition(".")[0], message)
    return given[0][1] if given else None


class OtherNames(RequestModel):
    """Fields of llama.cpp and Ollama that have another name here."""

    repeat_penalty: float | None = Field(None, description="Another name of repetition_penalty.")
    repeat_last_n: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None,
        description="0 turns repetition_penalty off; other values have no effect, as it looks at the whole prompt and "
        "output.",
    )
    n_predict: _Tokens | None = Field(None, description="Another name of max_tokens; negative: as many as fit.")
    num_predict: _Tokens | None = Field(None, description="Another name of max_tokens; negative: as many as fit.")

    #: Names of the most tokens to generate on the route, the first one before others.
    token_limits: ClassVar[tuple[str, ...]] = ("max_tokens",)

    @property
    def has_no_token_limit(self) -> bool:
        """Whether the request asks for as many tokens as fit."""
        return (self.n_predict or 0) < 0 or (self.num_predict or 0) < 0

    @model_validator(mode="after")
    def _take_over_other_names(self) -> Self:
        here: Any = self
        if self.repeat_penalty is not None:
            penalties = {"repetition_penalty": here.repetition_penalty, "repeat_penalty": self.repeat_penalty}
            here.repetition_penalty = one_value(penalties)
        if self.repeat_last_n == 0:
            here.repetition_penalty = None if here.repetition_penalty is None else 1.0
        # A negative number is no limit of its own, and contradicts none: clients send it by default.
        limits = [name for name in self.token_limits if getattr(self, name, None) is not None]
        values = {name: getattr(self, name) for name in (*limits[:1], "n_predict", "num_predict")}
        limit = one_value({name: None if value is None or value < 0 else value for name, value in values.items()})
        if not limits and limit is not None and hasattr(self, self.token_limits[-1]):
            setattr(self, self.token_limits[-1], limit)
        return self


class ThinkingOptions(RequestModel):
    """Whether the model shall think, as of Anthropic's, DeepSeek's and other APIs."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] = Field(description="adaptive, auto: as the model does.")
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Another name of thinking_token_budget."
    )
    display: Any = hint("include_reasoning says whether it is shown")
    clear_thinking: Any = hint("the template says which reasoning the model sees again")


class ReasoningOptions(RequestModel):
    """How much the model shall think, as of OpenRouter's API."""

    effort: Name | None = Field(None, description="Another name of reasoning_effort.")
    enabled: bool | None = Field(None, description="Another name of enable_thinking.")
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Another name of thinking_token_budget."
    )
    exclude: bool | None = Field(None, description="True: as include_reasoning false.")
    summary: Any = hint("reasoning comes whole, without a summary")
    generate_summary: Any = hint("reasoning comes whole, without a summary")


class ThinkingFields(RequestModel):
    """Fields that turn reasoning on and off, for templates that can; the template is not asked here."""

    reasoning_effort: Name | None = Field(
        None, description="For templates that know it; none: without reasoning, where the template can turn it off."
    )
    enable_thinking: bool | None = Field(
        None, description="Whether the model shall reason, for templates that can turn it on and off."
    )
    thinking: bool | ThinkingOptions | None = Field(
        None, description="The same under another name: true, false, or an object with type and budget_tokens."
    )
    reasoning: ReasoningOptions | None = Field(
        None, description="effort, enabled, max_tokens and exclude: reasoning_effort and others under other names."
    )

    @property
    def thinks(self) -> bool | None:
        """Whether the model shall reason; None: as it does."""
        thinking, reasoning = self.thinking, self.reasoning
        if isinstance(thinking, ThinkingOptions):
            thinking = {"enabled": True, "disabled": False}.get(thinking.type)
        return one_value(
            {
                "enable_thinking": self.enable_thinking,
                "thinking": thinking,
                "reasoning.enabled": None if reasoning is None else reasoning.enabled,
            }
        )

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of reasoning."""
        thinking, reasoning = self.thinking, self.reasoning
        return one_value(
            {
                "thinking_token_budget": getattr(self, "thinking_token_budget", None),
                "thinking.budget_tokens": thinking.budget_tokens if isinstance(thinking, ThinkingOptions) else None,
                "reasoning.max_tokens": None if reasoning is None else reasoning.max_tokens,
            }
        )

    @model_validator(mode="after")
    def _take_over_thinking(self) -> Self:
        here: Any = self
        reasoning = self.reasoning
        effort = None if reasoning is None else reasoning.effort
        self.reasoning_effort = one_value({"reasoning_effort": self.reasoning_effort, "reasoning.effort": effort})
        thinks = self.thinks
        if thinks is not None and self.reasoning_effort is not None and thinks != (self.reasoning_effort != "none"):
            name = next(
                name for name in ("enable_thinking", "thinking", "reasoning") if getattr(self, name) is not None
            )
            raise invalid(name, f"{name} and reasoning_effort contradict each other: {self.reasoning_effort[:100]!r}")
        if (budget := self.thinking_budget) is not None and hasattr(self, "thinking_token_budget"):
            here.thinking_token_budget = budget
        if reasoning is not None and reasoning.exclude is not None and hasattr(self, "include_reasoning"):
            shown = {"include_reasoning": here.include_reasoning, "reasoning.exclude": not reasoning.exclude}
            here.include_reasoning = one_value(shown)
        return self


# Fields of requests that OpenAI's API or other engines have and this server does not obey, each with its mark.

_LABEL = "a label of the client's"
_CLIENT_CACHE = "a hint for another service's cache"
_TIER = "there is one tier of service"
_ADAPTER = "an adapter is named as the model: its name is the request's model field (/v1/models lists them)"
_EXCHANGE = "KV caches are not exchanged with other servers"
_SAMPLER = "there is no such sampler; temperature, top_k, top_p, min_p and the penalties are supported"
_CODE = "code in requests is not run"
_PENALTY = "use repetition_penalty, frequency_penalty or presence_penalty"
_LAZY = "structural_tag says where JSON begins within the answer"
_PROCESSED = "the model's own files say how images are processed"


class Labels(RequestModel):
    """Fields of every route that generates: labels and hints."""

    metadata: Any = hint(_LABEL)
    safety_identifier: Any = hint(_LABEL)
    store: Any = hint("a copy for another service's dashboard")
    service_tier: Any = hint(_TIER)
    prompt_cache_key: Any = hint(_CLIENT_CACHE)
    prompt_cache_options: Any = hint(_CLIENT_CACHE)
    prompt_cache_retention: Any = hint(_CLIENT_CACHE)
    provider_specific_fields: Any = hint("what another service says of itself")
    request_id: Any = hint("the header X-Request-Id names a request")
    rid: Any = hint("the header X-Request-Id names a request")


class EngineFields(Labels, OtherNames):
    """Fields of other engines for every route that generates."""

    spaces_between_special_tokens: Any = hint("tokens are of bytes, between which nothing is put")
    stream_reasoning: Any = hint("what the pieces of an answer add up to is the same")
    guided_decoding_backend: Any = hint("every library means the same by a grammar")
    # llama.cpp: where and how it caches.
    cache_prompt: Any = hint(_CLIENT_CACHE)
    id_slot: Any = hint(_CLIENT_CACHE)
    n_cache_reuse: Any = hint(_CLIENT_CACHE)
    # llama.cpp: a grammar that begins within the answer
    grammar_lazy: Any = refused(_LAZY, False)
    grammar_triggers: Any = refused(_LAZY, [], "")
    # Adapters
    lora_request: Any = refused(_ADAPTER)
    lora_path: Any = refused(_ADAPTER)
    lora: Any = refused(_ADAPTER, [])
    # Samplers
    logits_processors: Any = refused(_CODE, [])
    logit_processors: Any = refused(_CODE, [])
    custom_logit_processor: Any = refused(_CODE)
    custom_params: Any = refused(_CODE)
    penalize_nl: Any = refused(_PENALTY)
    repetition_detection: Any = refused(_PENALTY)
    tfs_z: Any = refused(_SAMPLER, 1)
    typical_p: Any = refused(_SAMPLER, 1)
    top_n_sigma: Any = refused(_SAMPLER, -1)
    min_keep: Any = refused(_SAMPLER, 0, 1)
    samplers: Any = refused(_SAMPLER)
    mirostat: Any = refused(_SAMPLER, 0)
    mirostat_tau: Any = refused(_SAMPLER)
    mirostat_eta: Any = refused(_SAMPLER)
    dynatemp_range: Any = refused(_SAMPLER, 0)
    dynatemp_exponent: Any = refused(_SAMPLER, 1)
    xtc_probability: Any = refused(_SAMPLER, 0)
    xtc_threshold: Any = refused(_SAMPLER)
    dry_multiplier: Any = refused(_SAMPLER, 0)
    dry_base: Any = refused(_SAMPLER)
    dry_allowed_length: Any = refused(_SAMPLER)
    dry_penalty_last_n: Any = refused(_SAMPLER)
    dry_sequence_breakers: Any = refused(_SAMPLER)
    # When the answer ends, and what is sent of it
    max_new_tokens: Any = refused("its name is max_tokens")
    n_keep: Any = refused("a prompt is never shifted out of the context", 0)
    t_max_predict_ms: Any = refused("--request-timeout limits the time of an answer", 0, -1)
    n_indent: Any = refused("the answer does not end by indentation", 0)
    stop_regex: Any = refused("stop takes texts", [])
    no_stop_trim: Any = refused("its name is include_stop_str_in_output", False)
    n_probs: Any = refused("logprobs of the OpenAI API are supported", 0)
    post_sampling_probs: Any = refused("logprobs are those of the model", False)
    logprob_start_len: Any = refused("prompt_logprobs gives those of the whole prompt", -1)
    return_tokens: Any = refused("its name is return_token_ids", False)
    return_hidden_states: Any = refused("hidden states are not sent", False)
    return_routed_experts: Any = refused("routed experts are not sent", False)
    return_progress: Any = refused("progress is not sent", False)
    timings_per_token: Any = refused("/metrics has times", False)
    response_fields: Any = refused("responses have the fields of the OpenAI API", [])
    # Prompts
    prompt_embeds: Any = refused("a prompt is text or token ids")
    image_data: Any = refused("images are parts of the messages of a chat", [])
    mm_processor_kwargs: Any = refused(_PROCESSED, {})
    media_io_kwargs: Any = refused(_PROCESSED, {})
    session_params: Any = refused("send the whole prompt: the prefix cache finds what it knows of it")
    extra_key: Any = refused("its name is cache_salt")
    thinking_forced_open: Any = refused("the option --reasoning-parser deepseek_r1 does this", False)
    # Several servers
    kv_transfer_params: Any = refused(_EXCHANGE)
    bootstrap_host: Any = refused(_EXCHANGE)
    bootstrap_port: Any = refused(_EXCHANGE)
    bootstrap_room: Any = refused(_EXCHANGE)
    data_parallel_rank: Any = refused("there is one engine", 0)


class OpenAIFields(EngineFields):
    """Fields of OpenAI's completions and chats."""

    functions: Any = refused("tools has taken its place", [])
    function_call: Any = refused("tool_choice has taken its place", "none", "auto")
    modalities: Any = refused("the model writes text only", ["text"])
    audio: Any = refused("the model writes text only")
    moderation: Any = refused("there is no moderation")
    verbosity: Any = hint("the model's template has no place for it; the messages can ask for it")
    web_search_options: Any = refused("the model does not search")
