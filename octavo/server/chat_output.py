"""What a choice of a chat says, as events: reasoning, content, tool calls; the routes format them.

    ReasoningDelta(text) | ContentDelta(text) | ToolCallStart(index, id, name) | ToolCallArguments(index, text)

    collect(events) -> ChatMessageParts(content, reasoning, tool_calls)

A message that is not streamed is the sum of the same events, and the sum does not depend on where the text was cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str
    #: Where it ends in all text of the choice, marks and reasoning included, in characters.
    end: int = field(default=0, compare=False)


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
    contents: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[ToolCallStart, list[str]]] = []
    for event in events:
        if isinstance(event, ContentDelta):
            contents.append(event.text)
        elif isinstance(event, ReasoningDelta):
            thoughts.append(event.text)
        elif isinstance(event, ToolCallStart):
            calls.append((event, []))
        else:
            calls[event.index][1].append(event.text)
    return ChatMessageParts(
        "".join(contents) if contents else None,
        "".join(thoughts) if thoughts else None,
        [ParsedToolCall(start.id, start.name, "".join(arguments)) for start, arguments in calls],
    )
