"""A request in the engine and its response: whole, or as a stream of events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.api_errors import ApiError
from octavo.server.cancellation import with_cancellation
from octavo.server.chat_request import Chat, ChoiceEvents
from octavo.server.renamed_chat import renamed_outputs
from octavo.server.streaming import EventStream

Event = dict[str, Any]


class PendingResponse(ABC):
    """What every route that generates does with a request: one of the two methods is called, once."""

    @abstractmethod
    async def complete(self) -> bytes:
        """The complete response, as JSON."""

    @abstractmethod
    def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed response."""

    def failure(self, error: ApiError) -> bytes:
        """The event of a stream that fails."""
        return b"data: " + error.body() + b"\n\n"

    async def respond(self, request: Request, streams: bool | None, deadline: float) -> Response:
        """The response, until a ``deadline`` on the loop's clock."""
        if streams:
            return EventStream(self.stream(), deadline, self.failure)
        body = await with_cancellation(request.receive, self.complete(), deadline)
        return Response(body, media_type="application/json")


class PendingChat(PendingResponse):
    """A chat with one choice on a route that has its own names of fields, and whose events have names."""

    #: Fields of a chat to those of the route.
    names: ClassVar[Mapping[str, str]]

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    @abstractmethod
    def grow(self, choice: ChoiceEvents) -> list[Event]:
        """Takes an increment of the choice: the events that tell of it."""

    @abstractmethod
    def encode(self) -> bytes:
        """The response as far as it has grown, as JSON."""

    async def complete(self) -> bytes:
        """See ``PendingResponse``."""
        async with aclosing(renamed_outputs(self.chat, self.names)) as outputs:
            async for choice in outputs:
                self.grow(choice)
        return self.encode()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """See ``PendingResponse``."""
        async with aclosing(renamed_outputs(self.chat, self.names)) as outputs:
            async for choice in outputs:
                if events := self.grow(choice):
                    yield b"".join(map(encode_event, events))


def encode_event(event: Event) -> bytes:
    """As a server-sent event, with its type as name."""
    data = json.dumps(event, separators=(",", ":"))  # in ASCII: see ApiError.body
    return f"event: {event['type']}\ndata: {data}\n\n".encode()
