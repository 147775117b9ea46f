"""Parts of bodies of ``/v1/responses``: items of the input, tools, and options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from octavo.server.field_marks import hint, refused
from octavo.server.protocol_base import SEEN, Name, RequestModel, TextKind

_LABEL = "a label of the API's"
_PROCESSED = "the model's own files say how images are processed"
_BY_THE_MODEL = "tools are called by the model"


class InputPart(RequestModel):
    """A part of a content."""

    type: TextKind
    text: str
    annotations: Any = hint("sources of what an earlier answer says")
    logprobs: Any = hint("of what an earlier answer says")
    prompt_cache_breakpoint: Any = hint("prefixes are cached without marks")


class ImageInputPart(RequestModel):
    """An image, for models that see them."""

    type: Annotated[Literal["input_image"], SEEN]
    image_url: str | None = None
    detail: Any = hint("the model's own files say how images are processed")
    file_id: Any = refused("no files are kept here: image_url may hold the file itself, as data:image/png;base64,...")
    prompt_cache_breakpoint: Any = hint("prefixes are cached without marks")


def _part_tag(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "image_part" if kind == "input_image" else "text_part"  # which are names of no fields


Part = Annotated[
    Annotated[InputPart, Tag("text_part")] | Annotated[ImageInputPart, Tag("image_part")], Discriminator(_part_tag)
]
Content = str | list[Part]


class Item(RequestModel):
    """What items have in common: labels that the API sends and gets back."""

    id: Any = hint(_LABEL)
    status: Any = hint(_LABEL)
    phase: Any = hint(_LABEL)


class MessageItem(Item):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(Item):
    """What calls of all kinds of tools have."""

    call_id: str
    name: str
    namespace: str | None = None
    caller: Any = refused(_BY_THE_MODEL, {"type": "direct"})


class FunctionCallParam(CallItem):
    """A call of a function."""

    type: Literal["function_call"]
    arguments: str


class CustomCallParam(CallItem):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    input: str


class CallOutputParam(Item):
    """What a call gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content
    name: Any = hint("call_id says the same")
    caller: Any = refused(_BY_THE_MODEL, {"type": "direct"})


class ThoughtPart(RequestModel):
    """A part of what the model thought."""

    type: str | None = None
    text: str


class ReasoningParam(Item):
    """What the model thought."""

    type: Literal["reasoning"]
    content: list[ThoughtPart] | None = None
    summary: list[ThoughtPart] | None = None
    encrypted_content: Any = hint("reasoning is read in plain text")


class OtherItem(RequestModel):
    """An item of a kind that the model cannot read."""

    model_config = ConfigDict(extra="allow")

    type: str


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallParam, Tag("function_call")]
    | Annotated[CustomCallParam, Tag("custom_tool_call")]
    | Annotated[CallOutputParam, Tag("call_output")]
    | Annotated[ReasoningParam, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(lambda item: _TAGS.get(_type_of(item, "message"), "other")),
]
_TAGS = {kind: kind for kind in ("message", "function_call", "custom_tool_call", "reasoning")}
_TAGS |= dict.fromkeys(("function_call_output", "custom_tool_call_output"), "call_output")


def _type_of(value: Any, default: str) -> Any:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return default if kind is None else kind if isinstance(kind, str) else "other"


class ToolFields(RequestModel):
    """What tools of the client have in common."""

    name: str
    description: str | None = None
    defer_loading: Any = hint("all tools are loaded")
    allowed_callers: Any = refused(_BY_THE_MODEL, ["direct"])


class FunctionTool(ToolFields):
    """A function."""

    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Any = hint("the model sees what a call gives")


class CustomTool(ToolFields):
    """A tool that takes a text."""

    type: Literal["custom"]
    format: dict[str, Any] | None = None


class OtherTool(RequestModel):
    """A tool that OpenAI's service runs, or that its models know."""

    model_config = ConfigDict(extra="allow")

    type: str


def _tool_tag(tool: Any) -> str:
    kind = _type_of(tool, "function")
    return kind if kind in ("function", "custom", "namespace") else "other"


ClientTool = Annotated[FunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")]


class Namespace(RequestModel):
    """Several tools of the client under one name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[Annotated[ClientTool | Annotated[OtherTool, Tag("other")], Discriminator(_tool_tag)]]


ToolParam = Annotated[
    ClientTool | Annotated[Namespace, Tag("namespace")] | Annotated[OtherTool, Tag("other")], Discriminator(_tool_tag)
]


class NamedTool(RequestModel):
    """A tool by its name."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None


class ToolChoiceParam(NamedTool):
    """A tool that must be called, or those that may or must be."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["auto", "required"] | None = None
    tools: list[NamedTool] | None = None


class TextFormat(RequestModel):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(RequestModel):
    """The form of the text."""

    format: TextFormat | None = None
    verbosity: Any = hint("the model's template has no place for it; the messages can ask for it")


class ReasoningConfig(RequestModel):
    """How much the model shall think."""

    effort: Name | None = None
    summary: Any = hint("reasoning comes whole, without a summary")
    generate_summary: Any = hint("reasoning comes whole, without a summary")
    context: Any = hint("the template says which reasoning the model sees again")
    mode: Any = hint("there is one mode of reasoning")


class ObfuscationOptions(RequestModel):
    """Options of a streamed response."""

    include_obfuscation: Any = hint("the pieces of an answer are sent as they come")
