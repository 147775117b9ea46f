"""A message as it grows: events of a chat's choice to content blocks and events of the Messages API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from octavo.server.chat_output import ChatEvent, ContentDelta, ReasoningDelta, ToolCallStart
from octavo.server.messages.message_protocol import (
    Block,
    MessageObject,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from octavo.server.pending_response import Event


class GrowingMessage:
    """A message and the block that is written now. Every method returns the events that tell of it."""

    def __init__(self, message: MessageObject) -> None:
        """Takes over ``message``, which has no content yet."""
        self.message = message
        self._is_open = False
        #: What the open block's text, or its JSON text of a tool's input, is made of.
        self._pieces: list[str] = []

    def begin(self) -> list[Event]:
        """The message has begun."""
        return [{"type": "message_start", "message": self.message.model_dump()}]

    def add(self, chat_events: Iterable[ChatEvent]) -> list[Event]:
        """An increment of the choice."""
        events = []
        for event in chat_events:
            if isinstance(event, ContentDelta):
                if not (self._is_open and isinstance(self.message.content[-1], TextBlock)):
                    events += self._start(TextBlock(type="text", text=""))
                events.append(self._delta("text", event.text))
            elif isinstance(event, ReasoningDelta):
                if not (self._is_open and isinstance(self.message.content[-1], ThinkingBlock)):
                    events += self._start(ThinkingBlock(type="thinking", thinking="", signature=""))
                events.append(self._delta("thinking", event.text))
            elif isinstance(event, ToolCallStart):
                events += self._start(ToolUseBlock(type="tool_use", id=event.id, name=event.name, input={}))
            else:
                self._pieces.append(event.text)
                delta = _delta("input_json", "partial_json", event.text)
                events.append(self._of_block("content_block_delta", delta=delta))
        return events

    def end(self, reason: StopReason, stop_sequence: str | None, usage: MessageUsage) -> list[Event]:
        """The message has ended."""
        events = self._stop()
        message = self.message
        message.stop_reason, message.stop_sequence, message.usage = reason, stop_sequence, usage
        delta = {"stop_reason": reason, "stop_sequence": stop_sequence}
        events.append({"type": "message_delta", "delta": delta, "usage": usage.model_dump()})
        return [*events, {"type": "message_stop"}]

    def _delta(self, kind: str, text: str) -> Event:
        """More of a text or of thinking; the type of the block is the name of the field that holds it."""
        self._pieces.append(text)
        return self._of_block("content_block_delta", delta=_delta(kind, kind, text))

    def _start(self, block: Block) -> list[Event]:
        events = self._stop()
        self.message.content.append(block)
        self._is_open = True
        events.append(self._of_block("content_block_start", content_block=block.model_dump()))
        if len(self.message.content) == 1:
            events.append({"type": "ping"})
        return events

    def _stop(self) -> list[Event]:
        if not self._is_open:
            return []
        block = self.message.content[-1]
        text, self._pieces, self._is_open = "".join(self._pieces), [], False
        if isinstance(block, ToolUseBlock):
            block.input = _parsed(text)
        else:
            setattr(block, block.type, text)
        return [self._of_block("content_block_stop")]

    def _of_block(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self.message.content) - 1, **fields}


def _delta(kind: str, field: str, text: str) -> dict[str, str]:
    return {"type": f"{kind}_delta", field: text}


def _parsed(text: str) -> dict[str, Any]:
    """The object that a JSON text says, or begins to say, as the text may end early.

    What is no object is told under the name ``arguments``, as it was written.
    """
    try:
        value = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"arguments": text}
