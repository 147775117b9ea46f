"""The routes under ``/v1/messages``."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.sampling_params import DefaultMaxTokens
from octavo.server.api_errors import ApiError, anthropic_error
from octavo.server.chat_prompt import make_chat_prompt
from octavo.server.chat_request import Chat, ChoiceEvents, start_chat
from octavo.server.chat_tokens import chat_tokens
from octavo.server.large_bodies import beside_loop
from octavo.server.messages import message_request as chats
from octavo.server.messages.message_events import GrowingMessage
from octavo.server.messages.message_protocol import (
    Block,
    CountTokensRequest,
    MessageObject,
    MessagesRequest,
    MessageTokensDetails,
    MessageUsage,
    StopReason,
    TokenCount,
    ToolUseBlock,
)
from octavo.server.pending_response import Event, PendingChat
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.renamed_chat import renamed_errors
from octavo.server.request_models import read_model
from octavo.server.service import Service, service_of
from octavo.server.tools import read_tools


async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answers a conversation, as one message or as a stream of events."""
    service = service_of(request)
    deadline = service.deadline()
    with renamed_errors(chats.RENAMED):
        chat = await beside_loop(request, _chat, service, body)
        pending = _PendingMessage(await start_chat(service, request, chat, prefix="msg"), body.max_tokens)
    return await pending.respond(request, body.stream, deadline)


async def count_tokens(request: Request, body: CountTokensRequest) -> TokenCount:
    """Tokens of a conversation, as the model's template writes it."""
    service = service_of(request)
    await service.model(body.model)
    with renamed_errors(chats.RENAMED):
        chat = await beside_loop(request, _chat, service, body)
        prompt = await make_chat_prompt(service, request, chat, read_tools(chat.tools, chat.tool_choice))
        tokens = await chat_tokens(service, request, chat, prompt.text)
    return TokenCount(input_tokens=len(tokens["prompt_token_ids"]))


def _chat(service: Service, body: CountTokensRequest) -> ChatCompletionRequest:
    """The chat that a request asks for; to be called within ``renamed_errors``."""
    chat = read_model(ChatCompletionRequest, chats.chat_body(service, body), service)
    if isinstance(body, MessagesRequest):
        # As Anthropic's API: a message that would exceed the context ends with it. Agents ask for as much as they may.
        chat.max_completion_tokens = DefaultMaxTokens(body.max_tokens)
    return chat


class _PendingMessage(PendingChat):
    names = chats.RENAMED

    def __init__(self, chat: Chat, max_tokens: int) -> None:
        super().__init__(chat)
        self._max_tokens = max_tokens
        self._growing: GrowingMessage | None = None

    def grow(self, choice: ChoiceEvents) -> list[Event]:
        events = []
        if self._growing is None:
            self._growing = GrowingMessage(self._begun())
            events += self._growing.begin()
        events += self._growing.add(choice.events)
        if choice.finish_reason is not None:
            reason, stop = self._stop_reason(choice, self._growing.message.content)
            events += self._growing.end(reason, stop, self._usage())
        return events

    def encode(self) -> bytes:
        assert self._growing is not None
        return self._growing.message.encode()

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"

    def _begun(self) -> MessageObject:
        """The message before its content."""
        return MessageObject(
            id=f"msg_{uuid.uuid4().hex}",
            type="message",
            role="assistant",
            model=self.chat.generation.model.name,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._usage(),
        )

    def _usage(self) -> MessageUsage:
        usage = self.chat.generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            cache_creation_input_tokens=0,
            output_tokens=usage.completion_tokens,
            output_tokens_details=MessageTokensDetails(thinking_tokens=self.chat.generation.reasoning_tokens or 0),
        )

    def _stop_reason(self, choice: ChoiceEvents, content: list[Block]) -> tuple[StopReason, str | None]:
        """Why the choice ended, and the stop text that ended it."""
        if choice.finish_reason == "length":
            is_whole = self.chat.generation.usage().completion_tokens >= self._max_tokens
            return ("max_tokens" if is_whole else "model_context_window_exceeded"), None
        if any(isinstance(block, ToolUseBlock) for block in content):
            return "tool_use", None
        stop = choice.stop_reason
        return ("stop_sequence", stop) if isinstance(stop, str) else ("end_turn", None)
