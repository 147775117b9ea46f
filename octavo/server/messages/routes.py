"""The routes under ``/v1/messages``."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.cancellation import with_cancellation
from octavo.server.chat_request import Chat, ChoiceEvents
from octavo.server.errors import ApiError, anthropic_error
from octavo.server.fields import HARMLESS, UNSUPPORTED, refuse_unknown, refuse_unsupported
from octavo.server.messages import request as chats
from octavo.server.messages.events import Event, GrowingMessage, encode_event
from octavo.server.messages.protocol import (
    CountTokensRequest,
    MessageObject,
    MessagesRequest,
    MessageUsage,
    OutputTokensDetails,
    StopReason,
    TokenCount,
)
from octavo.server.renamed_chat import start_renamed
from octavo.server.service import service_of
from octavo.server.streaming import EventStream


async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answers a conversation, as one message or as a stream of events."""
    deadline = asyncio.get_running_loop().time() + service_of(request).options.request_timeout
    pending = _PendingMessage(await _start(request, body))
    if body.stream:
        return EventStream(pending.stream(), deadline, _failure)
    message = await with_cancellation(request.receive, pending.complete(), deadline)
    return Response(message, media_type="application/json")


async def count_tokens(request: Request, body: CountTokensRequest) -> TokenCount:
    """Tokens of a conversation, as the model's template writes it."""
    chat = await _start(request, body)
    return TokenCount(input_tokens=len(chat.generation.prompts[0].token_ids))


async def _start(request: Request, body: CountTokensRequest) -> Chat:
    service = service_of(request)
    table = {**UNSUPPORTED, **chats.UNSUPPORTED}
    refuse_unsupported(body, table)
    refuse_unknown(service, body, HARMLESS | chats.HARMLESS, table)
    return await start_renamed(service, request, chats.chat_body(service, body), "msg", chats.RENAMED)


def _failure(error: ApiError) -> bytes:
    return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"


@dataclass(slots=True)
class _PendingMessage:
    """A request in the engine and its response."""

    chat: Chat
    growing: GrowingMessage | None = None

    async def complete(self) -> bytes:
        """The complete message, as JSON."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        assert self.growing is not None
        return self.growing.message.encode()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed message."""
        async with aclosing(self._events()) as events:
            async for found in events:
                yield b"".join(map(encode_event, found))

    async def _events(self) -> AsyncGenerator[list[Event], None]:
        async with aclosing(self.chat.outputs()) as outputs:
            async for [choice] in outputs:
                found = []
                if self.growing is None:
                    self.growing = GrowingMessage(self._begun())
                    found += self.growing.begin()
                found += self.growing.add(choice.events)
                if choice.finish_reason is not None:
                    reason, stop = _stop_reason(choice)
                    found += self.growing.end(reason, stop, self._usage())
                if found:
                    yield found

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
            output_tokens_details=OutputTokensDetails(thinking_tokens=0),
        )


def _stop_reason(choice: ChoiceEvents) -> tuple[StopReason, str | None]:
    """Why the choice ended, and the stop text that ended it."""
    if choice.finish_reason == "length":
        return "max_tokens", None
    if choice.finish_reason == "tool_calls":
        return "tool_use", None
    stop = choice.stop_reason
    return ("stop_sequence", stop) if isinstance(stop, str) else ("end_turn", None)
