"""Bodies of ``/v1/responses``, in the format of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.server.field_marks import hint, refused
from octavo.server.foreign_fields import EngineFields
from octavo.server.protocol_answers import TokenLogprob
from octavo.server.protocol_base import Int, Name, Phrase, ResponseModel
from octavo.server.responses.response_parts import (
    InputItem,
    ObfuscationOptions,
    ReasoningConfig,
    TextConfig,
    ToolChoiceParam,
    ToolParam,
)
from octavo.server.sampling_fields import SamplingFields

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
