"""What a choice of a chat says, as events: reasoning, content, tool calls; the routes format them.

    parser = ChatParser(...)                          # one for each choice
    parser.feed(text, token_ids, finished) -> list[ChatEvent]
        text: str             what is new of the choice's text
        token_ids: list[int]  the tokens that are new, for counting those of the reasoning
        finished: bool        nothing follows; what was held back is given
    parser.reasoning_tokens   so far

    ReasoningDelta(text) | ContentDelta(text) | ToolCallStart(index, id, name) | ToolCallArguments(index, text)

    collect(events) -> ChatMessageParts(content, reasoning, tool_calls)

A message that is not streamed is the sum of the same events, and the sum does not depend on where the text was cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; its arguments follow."""

    #: 0 for the first call of the choice.
    index: int
    #: Unique among all responses.
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


ChatEvent = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments


@dataclass(slots=True)
class ParsedToolCall:
    """A call that the model makes; ``arguments`` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatMessageParts:
    """A whole message. None: there was nothing of it."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ParsedToolCall] = field(default_factory=list)


def collect(events: Iterable[ChatEvent]) -> ChatMessageParts:
    """The message that the events of one choice add up to."""
    parts = ChatMessageParts()
    for event in events:
        if isinstance(event, ContentDelta):
            parts.content = (parts.content or "") + event.text
        elif isinstance(event, ReasoningDelta):
            parts.reasoning = (parts.reasoning or "") + event.text
        elif isinstance(event, ToolCallStart):
            parts.tool_calls.append(ParsedToolCall(event.id, event.name))
        else:
            parts.tool_calls[event.index].arguments += event.text
    return parts


class ChatParser:
    """The events of one choice whose whole text is content."""

    #: Tokens of the reasoning so far.
    reasoning_tokens = 0

    def feed(self, text: str, token_ids: Sequence[int], finished: bool) -> list[ChatEvent]:
        """What is new. ``text`` and ``token_ids``: added since the last call; ``finished``: nothing follows."""
        return [ContentDelta(text)] if text else []
