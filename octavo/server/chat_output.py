"""What a choice of a chat says, as events: reasoning, content, tool calls; the routes format them.

    parser = ChatParser(reasoning parser, tool parser)     # one for each choice; Chat has them
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.text_stream import TextStream
    from octavo.server.reasoning_parsers.reasoning_parser import ReasoningParser
    from octavo.server.tool_parsers.tool_parser import ToolParser


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
    """The events of one choice: its reasoning, then content and calls."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        decode: TextStream | None = None,
    ) -> None:
        """Without ``reasoning`` and ``tools`` all text is content. ``decode``: text of tokens, to count those of the
        reasoning; special ones included."""
        self._reasoning = reasoning
        self._tools = tools
        self._decode = decode
        #: Tokens up to the end of the reasoning, and the end of their text while that has not come.
        self._num_tokens = 0
        self._tail: str | None = ""
        #: Characters of the text so far, and of what of it followed the reasoning.
        self._length = self._answered = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, with its marks."""
        return self._num_tokens if self._reasoning is not None and self._reasoning.found else 0

    def feed(self, text: str, token_ids: Sequence[int], finished: bool) -> list[ChatEvent]:
        """What is new. ``text`` and ``token_ids``: added since the last call; ``finished``: nothing follows."""
        events: list[ChatEvent] = []
        self._length += len(text)
        if self._reasoning is not None:
            self._count(self._reasoning, token_ids)
            thought, text = self._reasoning.feed(text, finished)
            if thought:
                events.append(ReasoningDelta(thought))
        self._answered += len(text)
        if self._tools is None:
            return [*events, ContentDelta(text, self._length)] if text else events
        # Nothing is left out after the first character of the answer.
        skipped = self._length - self._answered
        for event in self._tools.feed(text, finished):
            if isinstance(event, ContentDelta):
                event = ContentDelta(event.text, skipped + event.end)
            events.append(event)
        return events

    def _count(self, reasoning: ReasoningParser, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._tail is None or self._decode is None:
                return
            self._num_tokens += 1
            self._tail += self._decode.push(token_id)
            if reasoning.end in self._tail:
                self._tail = None
            else:
                self._tail = self._tail[-len(reasoning.end) :]
