"""Bodies of responses to requests for text, and chunks of their streams: fields of the OpenAI API and a few others."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from octavo.server.protocol_base import ResponseModel
from octavo.server.protocol_tools import CustomToolCall, ToolCall, ToolCallDelta

#: For each prompt token: None, or token id -> {"logprob", "rank", "decoded_token"}.
PromptLogprobs = list[dict[str, dict[str, Any]] | None]
StopReason = str | int | None


class PromptDetails(ResponseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="Found in the prefix cache.")


class CompletionDetails(ResponseModel):
    """Details of the generated tokens, where tokens are drafted or reasoning is told apart."""

    accepted_prediction_tokens: int | None = Field(None, description="Draft tokens that were accepted.")
    rejected_prediction_tokens: int | None = Field(None, description="Draft tokens that were computed in vain.")
    reasoning_tokens: int | None = Field(None, description="Tokens of the reasoning, of models that mark it.")


class Usage(ResponseModel):
    """Tokens used by a request: each prompt counts once, and every token of every choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class CompletionLogprobs(ResponseModel):
    """Parallel lists with an entry for each token. The first token of an echoed prompt has null."""

    text_offset: list[int] = Field(description="Where in the choice's text the token's text begins, in characters.")
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(ResponseModel):
    """One completion, or an increment of it."""

    finish_reason: Literal["stop", "length"] | None
    index: int
    logprobs: CompletionLogprobs | None
    text: str
    stop_reason: StopReason = Field(None, description="The stop text or stop token id that ended it.")
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(ResponseModel):
    """A response of ``/v1/completions``, or a chunk of its stream."""

    id: str
    choices: list[CompletionChoice]
    created: int
    model: str
    object: Literal["text_completion"]
    system_fingerprint: str
    usage: Usage | None = None


class TopLogprob(ResponseModel):
    """A token and its logprob."""

    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(TopLogprob):
    """The generated token, and the most likely ones at its position."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(ResponseModel):
    """Logprobs of the tokens of a message."""

    content: list[TokenLogprob]
    refusal: None


class Message(ResponseModel):
    """The assistant's message."""

    content: str | None
    refusal: None
    role: Literal["assistant"]
    tool_calls: list[ToolCall | CustomToolCall] | None = None
    reasoning_content: str | None = Field(None, description="What the model thought before it answered.")
    reasoning: str | None = Field(None, description="The same under its other name.")


class ChatChoice(ResponseModel):
    """One choice of a chat completion."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    index: int
    logprobs: ChoiceLogprobs | None
    message: Message
    stop_reason: StopReason = Field(None, description="The stop text or stop token id that ended it.")
    token_ids: list[int] | None = None


class ChatCompletion(ResponseModel):
    """A response of ``/v1/chat/completions``."""

    id: str
    choices: list[ChatChoice]
    created: int
    model: str
    object: Literal["chat.completion"]
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Delta(ResponseModel):
    """An increment of a message."""

    content: str | None = None
    role: Literal["assistant"] | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChunkChoice(ResponseModel):
    """An increment of a choice."""

    delta: Delta
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    index: int
    logprobs: ChoiceLogprobs | None
    stop_reason: StopReason = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(ResponseModel):
    """A chunk of a stream of ``/v1/chat/completions``."""

    id: str
    choices: list[ChunkChoice]
    created: int
    model: str
    object: Literal["chat.completion.chunk"]
    system_fingerprint: str
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
