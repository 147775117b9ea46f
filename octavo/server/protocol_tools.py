"""Tools in bodies of requests, and calls of them in responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)

from octavo.server.field_marks import hint
from octavo.server.protocol_base import RequestModel, ResponseModel


class FunctionDefinition(RequestModel):
    """A function that the model may call. Further fields are for templates that read them."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="1 to 64 letters, digits, _ and -.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments (default: it has none).")
    strict: bool | None = Field(None, description="Arguments fit the schema whatever the model writes.")


class FunctionTool(RequestModel):
    """A function."""

    type: Literal["function"]
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


class CustomDefinition(RequestModel):
    """A tool that takes a text."""

    name: str = Field(description="1 to 64 letters, digits, _ and -.")
    description: str | None = Field(None, description="What it does, for the model.")
    format: dict[str, Any] | None = Field(None, description="The form of the text, which the model is told.")


class CustomTool(RequestModel):
    """A tool that takes a text; the model sees a function with one argument, ``input``."""

    type: Literal["custom"]
    custom: CustomDefinition
    cache_control: Any = hint("prefixes are cached without marks")


class OtherTool(RequestModel):
    """A tool that another service runs, such as a search of the web."""

    model_config = ConfigDict(extra="allow")

    type: str


def _tool_tag(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return f"{kind}_tool" if kind in ("function", "custom") else "other_tool"  # which are names of no fields


Tool = Annotated[
    Annotated[FunctionTool, Tag("function_tool")]
    | Annotated[CustomTool, Tag("custom_tool")]
    | Annotated[OtherTool, Tag("other_tool")],
    Discriminator(_tool_tag),
]


class FunctionName(RequestModel):
    """A function by its name."""

    name: str


class NamedTool(RequestModel):
    """A tool by the name of its function."""

    type: str
    function: FunctionName | None = None
    custom: FunctionName | None = None

    @property
    def name(self) -> str | None:
        """The tool's name; None: it has none, or another type."""
        named = {"function": self.function, "custom": self.custom}.get(self.type)
        return None if named is None else named.name


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


class CustomCall(ResponseModel):
    """A call of a tool that takes a text, or an increment of it."""

    name: str | None = None
    input: str


class CustomToolCall(ResponseModel):
    """A tool that takes a text and that the model calls."""

    id: str
    type: Literal["custom"]
    custom: CustomCall


class FunctionCallDelta(ResponseModel):
    """An increment of a call: its name at first, then pieces of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(ResponseModel):
    """An increment of one of the calls; the first of each has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionCallDelta | None = None
    custom: CustomCall | None = None
