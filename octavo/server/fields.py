"""Base classes and fields of request and response bodies. Fields of other servers come from a table."""

from __future__ import annotations

import inspect
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

from octavo.core.foreign import FOREIGN, Foreign
from octavo.server.http.errors import invalid

#: Error type of a refused field; its message follows the path of the field.
REFUSED = "refused_field"


@dataclass(frozen=True, slots=True)
class Mark:
    """The meaning of a field of another server: a hint, or refused unless it has an accepted value."""

    meaning: Foreign

    @property
    def is_hint(self) -> bool:
        """Whether the field is accepted with any value, without effect."""
        return self.meaning.accepted is None

    @property
    def besides(self) -> str:
        """The accepted values in words, without empty ones."""
        values = " or ".join(repr(value) for value in self.meaning.accepted or () if value not in ("", [], {}))
        return f", except {values}" if values else ""

    def check(self, value: Any) -> Any:
        """Null for an accepted value, which asks for the default behaviour."""
        if self.meaning.accepts(value):
            return None
        context = {"besides": self.besides, "reason": self.meaning.reason, "is_field": True}
        raise PydanticCustomError(REFUSED, "{besides}: {reason}", context)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if self.is_hint:
            return core_schema.any_schema()
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        if not self.is_hint:
            raise PydanticOmit
        return {**handler(schema), "description": f"Accepted, without effect: {self.meaning.reason}."}


def marks_of(model: type[BaseModel]) -> dict[str, Mark | None]:
    """The mark of each field of a model; None: the field is supported."""
    return {
        name: next((mark for mark in field.metadata if isinstance(mark, Mark)), None)
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

    Null stands for the default. Fields of other servers come from ``octavo/core/foreign.json``, by the model's name or
    its module and name, and have a ``Mark``.
    """

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), defer_build=True)

    def __init_subclass__(cls, **options: Any) -> None:
        module = cls.__module__.rpartition(".")[2]
        meanings = FOREIGN.get(cls.__name__, {}) | FOREIGN.get(f"{module}.{cls.__name__}", {})
        cls.__annotations__ = inspect.get_annotations(cls) | dict.fromkeys(meanings, Any)
        for name, meaning in meanings.items():
            field: Any = Field(None)
            field.metadata.append(Mark(meaning))  # where pydantic keeps constraints such as gt
            setattr(cls, name, field)
        super().__init_subclass__(**options)


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


class ReasoningOptions(RequestModel):
    """The field ``reasoning`` of OpenRouter's API."""

    effort: Name | None = Field(None, description="Another name of reasoning_effort.")
    enabled: bool | None = Field(None, description="Another name of enable_thinking.")
    max_tokens: PositiveInt | None = Field(None, description="Another name of thinking_token_budget.")
    exclude: bool | None = Field(None, description="True: as include_reasoning false.")


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


# Fields of OpenAI's API and of other engines that are not supported (``octavo/core/foreign.json``).


class PromptCacheOptions(RequestModel):
    """The field ``prompt_cache_options`` of OpenAI's API."""

    mode: Literal["implicit", "explicit"] | None = Field(None, description="explicit: hold marked prefixes only.")
    ttl: Literal["30m"] | None = Field(None, description="Hold the prompt's prefix this long after its last use.")


class Labels(RequestModel):
    """Labels and hints that all routes that generate accept."""

    prompt_cache_key: Name | None = Field(
        None, description="The conversation: its latest prompt is held in the prefix cache, at one replica."
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="How long the prompt is held in the prefix cache after its last use; in_memory: 10 minutes."
    )
    prompt_cache_options: PromptCacheOptions | None = Field(None, description="mode and ttl of the prompt's prefix.")


class QueuedFields(Labels):
    """Fields of the scheduler and the prefix cache, for routes without sampling fields."""

    user: Name | None = Field(None, description="The user's name, for scheduling policies that share by user.")
    priority: Int | float | None = Field(None, description="Lower runs first; 0 if the scheduling policy has none.")
    ttft_target: float | None = Field(None, description="Target seconds to the result; only under the deadline policy.")
    cache_salt: Salt | None = Field(None, description="Requests with different salts share no cached prefix.")


class EngineFields(Labels, OtherNames):
    """Fields of other engines, for all routes that generate."""


class OpenAIFields(EngineFields):
    """Further fields of OpenAI's completions and chats."""
