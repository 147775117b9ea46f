"""Tools in bodies of requests, and calls of them in responses."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from octavo.server.field_marks import hint
from octavo.server.protocol_base import RequestModel, ResponseModel


class FunctionDefinition(RequestModel):
    """A function that the model may call. Further fields are for templates that read them."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="1 to 64 letters, digits, _ and -.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments (default: it has none).")
    strict: bool | None = Field(None, description="Arguments fit the schema whatever the model writes.")


class Tool(RequestModel):
    """A tool; all are functions."""

    type: str
    function: FunctionDefinition
    cache_control: Any = hint("prefixes are cached without marks")
    _sent: Any = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_sent(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        tool = handler(value)
        tool._sent = value
        return tool

    @property
    def sent(self) -> dict[str, Any]:
        """As the request has it, for templates that write it as it is: in its order, nothing added."""
        return {name: value for name, value in self._sent.items() if name != "cache_control"}


class FunctionName(RequestModel):
    """A function by its name."""

    name: str


class NamedTool(RequestModel):
    """A tool by the name of its function."""

    type: str
    function: FunctionName | None = None


class AllowedTools(RequestModel):
    """Some of the tools, of which the model may or must call."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(NamedTool):
    """One function that must be called, or those that may be."""

    allowed_tools: AllowedTools | None = None


class FunctionCall(ResponseModel):
    """A call of a function."""

    name: str
    arguments: str = Field(description="JSON text, as the model wrote it.")


class ToolCall(ResponseModel):
    """A tool that the model calls."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(ResponseModel):
    """An increment of a call: its name at first, then pieces of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(ResponseModel):
    """An increment of one of the calls; the first of each has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta
