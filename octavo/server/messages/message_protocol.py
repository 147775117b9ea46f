"""Bodies of ``/v1/messages``, in the format of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.server.protocol_base import Name, Phrase, ResponseModel
from octavo.server.sampling_fields import SamplingFields


class CountTokensRequest(SamplingFields):
    """Body of ``/v1/messages/count_tokens``."""

    model: Name = Field(description="Name of the served model.")
    messages: list[dict[str, Any]] = Field(
        description="The conversation: texts, or blocks of text, tool_use, tool_result and thinking. If the last "
        "message is the assistant's, the answer continues it."
    )
    system: str | list[dict[str, Any]] | None = Field(None, description="A system message before everything else.")
    tools: list[dict[str, Any]] | None = Field(None, description="Tools of the client that the model may use.")
    tool_choice: dict[str, Any] | None = Field(None, description="auto, any, tool or none.")
    thinking: dict[str, Any] | None = Field(
        None, description="enabled, disabled or adaptive, for templates that know it; budget_tokens is a hint."
    )
    output_config: dict[str, Any] | None = Field(None, description="The format of the text, as a JSON schema.")


class MessagesRequest(CountTokensRequest):
    """Body of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        description="Most tokens to generate, those of thinking included."
    )
    stop_sequences: list[Phrase] | None = Field(None, description="Texts that end the answer; not part of it.")
    metadata: dict[str, Any] | None = Field(None, description="user_id: whose request it is.")
    stream: bool | None = Field(None, description="Send the message as server-sent events while it grows.")


# Responses ----------------------------------------------------------------------------------------------------------


class TextBlock(ResponseModel):
    """A text that the model wrote."""

    type: Literal["text"]
    text: str
    citations: None


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


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


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


class AnthropicErrorDetail(ResponseModel):
    """Description of an error."""

    type: str
    message: str


class AnthropicError(ResponseModel):
    """A response with an error status."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None
