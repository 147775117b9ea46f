"""Fields of other servers that say what a field here says: their values are taken over by the field here.

Two names of one field with different values contradict each other, and are refused by both names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from octavo.server.api_errors import invalid
from octavo.server.field_marks import hint
from octavo.server.protocol_base import Name, RequestModel

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
