"""Bodies of ``/v1/responses``, in the format of OpenAI's Responses API."""

from __future__ import annotations

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
    hint,
    refused,
)
from octavo.server.openai.protocol import SamplingFields, TokenLogprob

# Parts of bodies of ``/v1/responses``: items of the input, tools, and options.

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


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Input = str | Annotated[list[InputItem], Field(fail_fast=True)]


class InputTokensRequest(SamplingFields, EngineFields):
    """Body of ``/v1/responses/input_tokens``: that of a response, whose input may be missing."""

    token_limits = ("max_output_tokens",)

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    input: Input | None = Field(
        None, description="A text, or items: messages, function calls with their outputs, and reasoning."
    )
    instructions: str | None = Field(None, description="A system message before everything else.")
    previous_response_id: Name | None = Field(
        None, description="The response that this continues; 404 if the server has forgotten it."
    )
    store: bool | None = Field(None, description="Keep the response for later requests (default true).")
    background: bool | None = Field(
        None, description="Answer at once, and make the response while the client is away; it has to be stored."
    )
    max_output_tokens: Int | None = Field(None, description="Most tokens to generate, those of reasoning included.")
    top_logprobs: Int | None = Field(
        None, description='With include "message.output_text.logprobs": so many likeliest tokens at each position.'
    )
    include: list[str] | None = Field(None, description='Further output: "message.output_text.logprobs".')
    text: TextConfig | None = Field(None, description="The format of the text: text, json_object or json_schema.")
    tools: list[ToolParam] | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | ToolChoiceParam | None = Field(None, description="none, auto, required, or one function.")
    parallel_tool_calls: bool | None = Field(None, description="Whether one answer may call several functions.")
    reasoning: ReasoningConfig | None = Field(None, description="The effort of reasoning.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: leave out the oldest messages of a conversation that the context has no room for."
    )
    metadata: Metadata | None = Field(None, description="Comes back with the response.")
    stream: bool | None = Field(None, description="Send the response as server-sent events while it grows.")
    stream_options: ObfuscationOptions | None = Field(None, description="Options of the stream.")
    user: Name | None = Field(None, description="Whose request it is, for scheduling policies that look at it.")
    # Beyond OpenAI, as in chats:
    stop: Phrase | list[Phrase] | None = Field(None, description="Texts that end the answer; they are not part of it.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the template.")
    max_tool_calls: Any = hint("it bounds calls of built-in tools, of which there are none")
    client_metadata: Any = hint("a label of the client's")
    conversation: Any = refused("previous_response_id continues a response that is kept")
    context_management: Any = refused("truncation leaves out the oldest messages", [])
    moderation: Any = refused("there is no moderation")
    prompt: Any = refused("there are no stored prompts; write it as instructions and input")


class ResponsesRequest(InputTokensRequest):
    """Body of ``/v1/responses``."""

    input: Input = Field(description=InputTokensRequest.model_fields["input"].description)


# Responses ----------------------------------------------------------------------------------------------------------

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseModel):
    """A text that the model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenLogprob]


class OutputMessage(ResponseModel):
    """The assistant's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(ResponseModel):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(ResponseModel):
    """What the model thought before it answered; there is no summary."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class CustomToolCallItem(ResponseModel):
    """A tool that takes a text, which the model calls."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class FunctionCallItem(ResponseModel):
    """A function that the model calls."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = Field(description="JSON text, as the model wrote it.")


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(ResponseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="Found in the prefix cache.")
    cache_write_tokens: int = Field(description="Always 0: what is put into the prefix cache is not counted.")


class OutputTokensDetails(ResponseModel):
    """Details of the generated tokens."""

    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    """Tokens used by a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(ResponseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(ResponseModel):
    """Why a response failed."""

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


class DeletedResponse(ResponseModel):
    """A response of ``DELETE /v1/responses/{id}``."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(ResponseModel):
    """A response of ``/v1/responses/input_tokens``."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(ResponseModel):
    """A response of ``/v1/responses/{id}/input_items``: a page of the list."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
