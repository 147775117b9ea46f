"""Base classes and fields of request and response bodies. Fields of other servers are marked as hint or refused."""

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

#: Error type of a refused field; its message follows the path of the field.
REFUSED = "refused_field"


@dataclass(frozen=True, slots=True)
class Hint:
    """A field that is accepted with any value, without effect."""

    reason: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.any_schema()

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "description": f"Accepted, without effect: {self.reason}."}


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused unless it is null or has an accepted value, which asks for the default behaviour."""

    reason: str
    accepted: tuple[Any, ...] = ()

    def check(self, value: Any) -> Any:
        is_bool = isinstance(value, bool)
        if value is None or any(value == allowed and isinstance(allowed, bool) == is_bool for allowed in self.accepted):
            return None
        context = {"besides": self.besides, "reason": self.reason, "is_field": True}
        raise PydanticCustomError(REFUSED, "{besides}: {reason}", context)

    @property
    def besides(self) -> str:
        """The accepted values in words, without empty ones."""
        values = " or ".join(repr(value) for value in self.accepted if value not in ("", [], {}))
        return f", except {values}" if values else ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        raise PydanticOmit


Mark = Hint | Refused


def hint(reason: str) -> Any:
    """A field that is accepted with any value; ``reason``: why it has no effect."""
    return _marked(Hint(reason))


def refused(reason: str, *accepted: Any) -> Any:
    """A field that is refused unless it is null or ``accepted``; ``reason`` names an alternative."""
    return _marked(Refused(reason, accepted))


def _marked(mark: Mark) -> Any:
    field: Any = Field(None)
    # Where pydantic keeps constraints such as gt.
    field.metadata.append(mark)
    return field


def marks_of(model: type[BaseModel]) -> dict[str, Mark | None]:
    """The mark of each field of a model; None: the field is supported."""
    return {
        name: next((mark for mark in field.metadata if isinstance(mark, Hint | Refused)), None)
        for name, field in model.model_fields.items()
    }


#: Integers that fit the engine's messages; the engine checks ranges.
Int = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
#: -1 stands for the model's own limit.
TokenLimit = Annotated[int, Field(ge=-1, le=2**31 - 1)]
Name = Annotated[str, Field(max_length=512)]
Salt = Annotated[str, Field(max_length=256)]
#: A text that is searched in the output at every token.
Phrase = Annotated[str, Field(max_length=256)]


def type_of(value: Any) -> Any:
    """The field ``type`` of an object that was validated or not, for discriminators."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _check_is_text(kind: str) -> str:
    if kind not in ("text", "input_text", "output_text"):
        raise PydanticCustomError(REFUSED, ": the model reads text, not {kind}", {"kind": repr(kind[:100])})
    return kind


def _check_sees_images(kind: str, info: ValidationInfo) -> str:
    if info.context is not None and not info.context["sees_images"]:
        raise PydanticCustomError(REFUSED, ": the model reads text, not {kind}", {"kind": repr(kind)})
    return kind


#: The type of an image part: refused if the model reads no images (``sees_images`` in the validation context).
SEEN = AfterValidator(_check_sees_images)
#: The type of a text part, in the words of several APIs.
TextKind = Annotated[str, AfterValidator(_check_is_text)]


class RequestModel(BaseModel):
    """A request body or an object in it. Strict: "5" is not a number, true is not 1, unknown fields are refused.

    Null stands for the default. Fields that are not supported have a mark (``marks_of``).
    """

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), defer_build=True)


class ResponseModel(BaseModel):
    """A response body or an object in it. Fields that were not set are not sent."""

    model_config = ConfigDict(protected_namespaces=(), defer_build=True)

    def encode(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


# Other names of supported fields.

T = TypeVar("T")

#: Maximum tokens to generate in llama.cpp and Ollama, where a negative number is no limit.
_Tokens = Annotated[int, Field(ge=-2, le=2**31 - 1)]


def one_value(values: Mapping[str, T | None]) -> T | None:
    """The value of a field with several names; raises if two of them differ."""
    named = [(name, value) for name, value in values.items() if value is not None]
    for name, value in named[1:]:
        if value != named[0][1]:
            message = (
                f"{name} and {named[0][0]} are names of one field and contradict each other: {value!r}, {named[0][1]!r}"
            )
            raise invalid(name.partition(".")[0], message)
    return named[0][1] if named else None


class OtherNames(RequestModel):
    """Fields of llama.cpp and Ollama that have another name here."""

    repeat_penalty: float | None = Field(None, description="Another name of repetition_penalty.")
    repeat_last_n: TokenLimit | None = Field(None, description="0 turns repetition_penalty off; else without effect.")
    n_predict: _Tokens | None = Field(None, description="Another name of max_tokens; negative: as many as fit.")
    num_predict: _Tokens | None = Field(None, description="Another name of max_tokens; negative: as many as fit.")

    #: Fields of the route that limit the tokens to generate, in order of precedence.
    token_limits: ClassVar[tuple[str, ...]] = ("max_tokens",)

    @property
    def has_no_token_limit(self) -> bool:
        """The request asks for as many tokens as fit."""
        return (self.n_predict or 0) < 0 or (self.num_predict or 0) < 0

    @model_validator(mode="after")
    def _take_over_other_names(self) -> Self:
        here: Any = self
        if self.repeat_penalty is not None:
            penalties = {"repetition_penalty": here.repetition_penalty, "repeat_penalty": self.repeat_penalty}
            here.repetition_penalty = one_value(penalties)
        if self.repeat_last_n == 0:
            here.repetition_penalty = None if here.repetition_penalty is None else 1.0
        # A negative number contradicts no limit: clients send it by default.
        limits = [name for name in self.token_limits if getattr(self, name, None) is not None]
        values = {name: getattr(self, name) for name in (*limits[:1], "n_predict", "num_predict")}
        limit = one_value({name: None if value is None or value < 0 else value for name, value in values.items()})
        if not limits and limit is not None and hasattr(self, self.token_limits[-1]):
            setattr(self, self.token_limits[-1], limit)
        return self


class ThinkingOptions(RequestModel):
    """The field ``thinking`` of Anthropic's, DeepSeek's and other APIs."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] = Field(description="adaptive, auto: the model decides.")
    budget_tokens: PositiveInt | None = Field(None, description="Another name of thinking_token_budget.")
    display: Any = hint("include_reasoning says whether it is shown")
    clear_thinking: Any = hint("the template says which reasoning the model sees again")


class ReasoningOptions(RequestModel):
    """The field ``reasoning`` of OpenRouter's API."""

    effort: Name | None = Field(None, description="Another name of reasoning_effort.")
    enabled: bool | None = Field(None, description="Another name of enable_thinking.")
    max_tokens: PositiveInt | None = Field(None, description="Another name of thinking_token_budget.")
    exclude: bool | None = Field(None, description="True: as include_reasoning false.")
    summary: Any = hint("reasoning comes whole, without a summary")
    generate_summary: Any = hint("reasoning comes whole, without a summary")


class ThinkingFields(RequestModel):
    """Fields that turn reasoning on and off, if the chat template can."""

    reasoning_effort: Name | None = Field(None, description="Effort of reasoning, if the template has it; none: off.")
    enable_thinking: bool | None = Field(None, description="Reasoning on or off, for templates that can switch it.")
    thinking: bool | ThinkingOptions | None = Field(None, description="Another name; or type and budget_tokens.")
    reasoning: ReasoningOptions | None = Field(None, description="Other names: effort, enabled, max_tokens, exclude.")

    @property
    def thinks(self) -> bool | None:
        """Whether the model shall reason; None: as it does by default."""
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

    @model_validator(mode="after")
    def _take_over_thinking(self) -> Self:
        here: Any = self
        thinking, reasoning = self.thinking, self.reasoning
        effort = None if reasoning is None else reasoning.effort
        self.reasoning_effort = one_value({"reasoning_effort": self.reasoning_effort, "reasoning.effort": effort})
        thinks = self.thinks
        if thinks is not None and self.reasoning_effort is not None and thinks != (self.reasoning_effort != "none"):
            names = ("enable_thinking", "thinking", "reasoning")
            name = next(name for name in names if getattr(self, name) is not None)
            raise invalid(name, f"{name} and reasoning_effort contradict each other: {self.reasoning_effort[:100]!r}")
        budgets = {
            "thinking_token_budget": getattr(self, "thinking_token_budget", None),
            "thinking.budget_tokens": thinking.budget_tokens if isinstance(thinking, ThinkingOptions) else None,
            "reasoning.max_tokens": None if reasoning is None else reasoning.max_tokens,
        }
        if (budget := one_value(budgets)) is not None and hasattr(self, "thinking_token_budget"):
            here.thinking_token_budget = budget
        if reasoning is not None and reasoning.exclude is not None and hasattr(self, "include_reasoning"):
            shown = {"include_reasoning": here.include_reasoning, "reasoning.exclude": not reasoning.exclude}
            here.include_reasoning = one_value(shown)
        return self


# Fields of OpenAI's API and of other engines that are not supported.

_LABEL = "a label of the client's"
_CLIENT_CACHE = "a hint for another service's cache"
_TIER = "there is one tier of service"
_ADAPTER = "an adapter is named as the model: its name is the request's model field (/v1/models lists them)"
_EXCHANGE = "KV caches are not exchanged with other servers"
_SAMPLER = "there is no such sampler; temperature, top_k, top_p, min_p and the penalties are supported"
_CODE = "code in requests is not run"
_PENALTY = "use repetition_penalty, frequency_penalty or presence_penalty"
_LAZY = "structural_tag says where JSON begins within the answer"
#: Reasons that several modules name.
CACHED = "prefixes are cached without marks"
PROCESSED = "the model's own files say how images are processed"


class Labels(RequestModel):
    """Labels and hints that all routes that generate accept."""

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


class QueuedFields(Labels):
    """Fields of the scheduler and the prefix cache, for routes without sampling fields."""

    user: Name | None = Field(None, description="The user's name, for scheduling policies that share by user.")
    priority: Int | float | None = Field(None, description="Lower runs first; 0 if the scheduling policy has none.")
    ttft_target: float | None = Field(None, description="Target seconds to the result; only under the deadline policy.")
    cache_salt: Salt | None = Field(None, description="Requests with different salts share no cached prefix.")


class EngineFields(Labels, OtherNames):
    """Fields of other engines, for all routes that generate."""

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
    mm_processor_kwargs: Any = refused(PROCESSED, {})
    media_io_kwargs: Any = refused(PROCESSED, {})
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
    """Further fields of OpenAI's completions and chats."""

    functions: Any = refused("tools has taken its place", [])
    function_call: Any = refused("tool_choice has taken its place", "none", "auto")
    modalities: Any = refused("the model writes text only", ["text"])
    audio: Any = refused("the model writes text only")
    moderation: Any = refused("there is no moderation")
    verbosity: Any = hint("the model's template has no place for it; the messages can ask for it")
    web_search_options: Any = refused("the model does not search")
