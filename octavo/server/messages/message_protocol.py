"""Bodies of ``/v1/messages``, in the format of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.server.field_marks import hint, refused
from octavo.server.foreign_fields import EngineFields
from octavo.server.messages.message_parts import (
    ContextManagement,
    MessageParam,
    Metadata,
    OutputConfig,
    TextBlockParam,
    ThinkingConfig,
    ToolChoiceParam,
    ToolParam,
)
from octavo.server.protocol_base import Name, Phrase, ResponseModel
from octavo.server.sampling_fields import SamplingFields


class CountTokensRequest(SamplingFields, EngineFields):
    """Body of ``/v1/messages/count_tokens``."""

    model: Name = Field(description="Name of the served model.")
    messages: Annotated[list[MessageParam], Field(fail_fast=True)] = Field(
        description="The conversation: texts, or blocks of text, tool_use, tool_result and thinking. If the last "
        "message is the assistant's, the answer continues it."
    )
    system: str | list[TextBlockParam] | None = Field(None, description="A system message before everything else.")
    tools: list[ToolParam] | None = Field(None, description="Tools of the client that the model may use.")
    tool_choice: ToolChoiceParam | None = Field(None, description="auto, any, tool or none.")
    thinking: ThinkingConfig | None = Field(
        None, description="enabled, disabled or adaptive, for templates that know it; others think as they do."
    )
    output_config: OutputConfig | None = Field(None, description="The format of the text, as a JSON schema; effort.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the template.")
    context_management: ContextManagement | None = Field(None, description="Edits that keep everything.")
    cache_control: Any = hint("prefixes are cached without marks")
    user_profile_id: Any = hint("a label of the client's")
    workspace_id: Any = hint("a label of the client's")
    anthropic_version: Any = hint("there is one version of this API")
    anthropic_beta: Any = hint("each field says itself what it asks for")
    betas: Any = hint("each field says itself what it asks for")
    billing_policy: Any = hint("there is no bill")
    fallback_credit_token: Any = hint("there is no bill")
    fallbacks: Any = hint("no answer is withheld, after which another model would be asked")
    speed: Any = hint("there is one speed")
    container: Any = refused("code is not run")
    mcp_servers: Any = refused("MCP servers are not called; a client can offer their tools as its own", [])
    inference_geo: Any = refused("the model runs where this server does")
    diagnostics: Any = refused("/metrics counts what the prefix cache finds")
    compaction: Any = refused("send the messages that the model shall see")
    thread: Any = refused("send the messages that the model shall see")
    n: Any = refused("there is one message for each request", 1)


class MessagesRequest(CountTokensRequest):
    """Body of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        description="Most tokens to generate, those of thinking included."
    )
    stop_sequences: list[Phrase] | None = Field(None, description="Texts that end the answer; not part of it.")
    metadata: Metadata | None = Field(None, description="user_id: whose request it is.")
    stream: bool | None = Field(None, description="Send the message as server-sent events while it grows.")


# Responses ----------------------------------------------------------------------------------------------------------


class TextBlock(ResponseModel):
    """A text that the model wrote."""

    type: Literal["text"]
    text: str


class ThinkingBlock(ResponseModel):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Empty: thinking is not signed.")


class ToolUseBlock(ResponseModel):
    """A tool that the model uses."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageTokensDetails(ResponseModel):
    """Details of the generated tokens."""

    thinking_tokens: int


class MessageUsage(ResponseModel):
    """Tokens used by a message."""

    input_tokens: int = Field(description="Tokens of the prompt that were not found in the prefix cache.")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt that were.")
    cache_creation_input_tokens: int = Field(description="Always 0: what is put into the prefix cache is not counted.")
    output_tokens: int
    output_tokens_details: MessageTokensDetails


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageObject(ResponseModel):
    """A response of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ResponseModel):
    """A response of ``/v1/messages/count_tokens``."""

    input_tokens: int


class AnthropicModel(ResponseModel):
    """A served model, as Anthropic's API describes one."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModelList(ResponseModel):
    """All names of the model."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AnthropicErrorDetail(ResponseModel):
    """Description of an error."""

    type: str
    message: str


class AnthropicError(ResponseModel):
    """A response with an error status."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None
