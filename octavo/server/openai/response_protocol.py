"""Request and response bodies of OpenAI's Responses API (``/v1/responses``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from octavo.server.fields import (
    SEEN,
    EngineFields,
    Int,
    Name,
    Phrase,
    RequestModel,
    ResponseModel,
    TextKind,
    type_of,
)
from octavo.server.openai.protocol import CacheBreakpoint, CacheControl, OtherTool, SamplingFields, TokenLogprob

# Input items, tools, and options of requests.


class InputPart(RequestModel):
    type: TextKind
    text: str
    cache_control: CacheControl = None
    prompt_cache_breakpoint: CacheBreakpoint = None


class ImageInputPart(RequestModel):
    type: Annotated[Literal["input_image"], SEEN]
    image_url: str | None = None
    detail: Any = None
    cache_control: CacheControl = None
    prompt_cache_breakpoint: CacheBreakpoint = None


Part = Annotated[
    Annotated[InputPart, Tag("text_part")] | Annotated[ImageInputPart, Tag("image_part")],
    Discriminator(lambda part: "image_part" if type_of(part) == "input_image" else "text_part"),
]
Content = str | list[Part]


class Item(RequestModel):
    """Labels that the API sends and gets back."""

    id: Any = None


class MessageItem(Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    cache_control: CacheControl = None


class CallItem(Item):
    call_id: str
    name: str
    namespace: str | None = None


class FunctionCallParam(CallItem):
    type: Literal["function_call"]
    arguments: str


class CustomCallParam(CallItem):
    type: Literal["custom_tool_call"]
    input: str


class CallOutputParam(Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


class ThoughtPart(RequestModel):
    type: str | None = None
    text: str


class ReasoningParam(Item):
    type: Literal["reasoning"]
    content: list[ThoughtPart] | None = None
    summary: list[ThoughtPart] | None = None


class OtherItem(OtherTool):
    """An item of a type that is not supported."""


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallParam, Tag("function_call")]
    | Annotated[CustomCallParam, Tag("custom_tool_call")]
    | Annotated[CallOutputParam, Tag("call_output")]
    | Annotated[ReasoningParam, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(lambda item: _tag(item, "message", _ITEM_TAGS)),
]
_ITEM_TAGS = {kind: kind for kind in ("message", "function_call", "custom_tool_call", "reasoning")}
_ITEM_TAGS |= dict.fromkeys(("function_call_output", "custom_tool_call_output"), "call_output")
_TOOL_TAGS = {kind: kind for kind in ("function", "custom", "namespace")}


def _tag(value: Any, default: str, tags: Mapping[str, str]) -> str:
    kind = type_of(value)
    return default if kind is None else tags.get(kind, "other") if isinstance(kind, str) else "other"


class ToolFields(RequestModel):
    name: str
    description: str | None = None
    cache_control: CacheControl = None


class FunctionTool(ToolFields):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(ToolFields):
    type: Literal["custom"]
    format: dict[str, Any] | None = None


def _tool_tag(tool: Any) -> str:
    return _tag(tool, "function", _TOOL_TAGS)


ClientTool = Annotated[FunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")]


class Namespace(RequestModel):
    """Client tools under a common name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[Annotated[ClientTool | Annotated[OtherTool, Tag("other")], Discriminator(_tool_tag)]]


ToolParam = Annotated[
    ClientTool | Annotated[Namespace, Tag("namespace")] | Annotated[OtherTool, Tag("other")], Discriminator(_tool_tag)
]


class NamedTool(RequestModel):
    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None


class ToolChoiceParam(NamedTool):
    """Names the tool that must be called, or lists the allowed ones."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["auto", "required"] | None = None
    tools: list[NamedTool] | None = None


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(RequestModel):
    format: TextFormat | None = None


class ReasoningConfig(RequestModel):
    effort: Name | None = None


class ObfuscationOptions(RequestModel):
    """Options of the stream."""


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Input = str | Annotated[list[InputItem], Field(fail_fast=True)]


class InputTokensRequest(SamplingFields, EngineFields):
    """Body of ``/v1/responses/input_tokens``: as ``ResponsesRequest``, but ``input`` is optional."""

    token_limits = ("max_output_tokens",)

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    input: Input | None = Field(None, description="A text; or messages, tool calls and their outputs, reasoning.")
    instructions: str | None = Field(None, description="A system message before everything else.")
    previous_response_id: Name | None = Field(None, description="The response to continue; 404 if it is not stored.")
    store: bool | None = Field(None, description="Store the response (default true).")
    background: bool | None = Field(None, description="Return at once and generate in the background; needs store.")
    max_output_tokens: Int | None = Field(None, description="Maximum tokens to generate, with reasoning.")
    top_logprobs: Int | None = Field(None, description="Most likely tokens per position, with the logprobs of include.")
    include: list[str] | None = Field(None, description='Further output: "message.output_text.logprobs".')
    text: TextConfig | None = Field(None, description="The format of the text: text, json_object or json_schema.")
    tools: list[ToolParam] | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | ToolChoiceParam | None = Field(None, description="none, auto, required, or one function.")
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call (default true).")
    reasoning: ReasoningConfig | None = Field(None, description="The effort of reasoning.")
    truncation: Literal["auto", "disabled"] | None = Field(None, description="auto: drop the oldest messages.")
    metadata: Metadata | None = Field(None, description="Comes back with the response.")
    stream: bool | None = Field(None, description="Send the response as server-sent events while it grows.")
    stream_options: ObfuscationOptions | None = Field(None, description="Options of the stream.")
    user: Name | None = Field(None, description="The user's name, for scheduling policies that share by user.")
    # Beyond OpenAI, as in chats:
    stop: Phrase | list[Phrase] | None = Field(None, description="Texts that end the answer, without being part of it.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the template.")


class ResponsesRequest(InputTokensRequest):
    input: Input = Field(description=InputTokensRequest.model_fields["input"].description)


# Responses.

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenLogprob]


class OutputMessage(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(ResponseModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(ResponseModel):
    """Reasoning before the answer; there is no summary."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class CustomToolCallItem(ResponseModel):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class FunctionCallItem(ResponseModel):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = Field(description="JSON text, as the model wrote it.")


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(ResponseModel):
    cached_tokens: int = Field(description="Prefix cache hits of the prompt.")
    cache_write_tokens: int = Field(description="Tokens that were not found and are held now, if it was asked for.")


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"]


class ResponseFailure(ResponseModel):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ResponseObject(ResponseModel):
    """A response of ``/v1/responses``; most fields repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None

    def encode(self) -> bytes:
        # In ASCII, as in ApiError.body: the response repeats the request.
        return json.dumps(self.model_dump()).encode()


class DeletedResponse(ResponseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(ResponseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(ResponseModel):
    """A page of ``/v1/responses/{id}/input_items``."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
