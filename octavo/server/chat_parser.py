"""Reads a choice of a chat as it grows: its text to events.

parser = ChatParser(reasoning parser, tool parser)     # one for each choice; Chat has them
parser.feed(text, token_ids, finished, cut=cut) -> list[ChatEvent]
    text: str             what is new of the choice's text
    token_ids: list[int]  the tokens that are new, for counting those of the reasoning
    finished: bool        nothing follows; what was held back is given
    cut: bool             max_tokens has ended it; what was held back and may begin a call is left out
parser.reasoning_tokens   so far
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.text_stream import TextStream
from octavo.server.chat_output import ChatEvent, ContentDelta, ReasoningDelta
from octavo.server.reasoning_parsers.reasoning_parser import ReasoningParser
from octavo.server.tool_parsers.tool_parser import ToolParser


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
        self._lengths: list[int] = []
        #: Characters of the text so far, and of what of it followed the reasoning.
        self._length = self._answered = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, with its marks."""
        return self._num_tokens if self._reasoning is not None and self._reasoning.found else 0

    def feed(self, text: str, token_ids: Sequence[int], finished: bool, *, cut: bool = False) -> list[ChatEvent]:
        """What is new. ``text`` and ``token_ids``: added since the last call; ``finished``: nothing follows; ``cut``:
        ``max_tokens`` has ended the answer.
        """
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
        for event in self._tools.feed(text, finished, cut=cut):
            if isinstance(event, ContentDelta):
                event = ContentDelta(event.text, skipped + event.end)
            events.append(event)
        return events

    def _count(self, reasoning: ReasoningParser, token_ids: Sequence[int]) -> None:
        longest = max(map(len, (reasoning.end, *reasoning.interrupts)))
        for token_id in token_ids:
            if self._tail is None or self._decode is None:
                return
            piece = self._decode.push(token_id)
            self._num_tokens += 1
            self._tail += piece
            self._lengths.append(len(piece))
            if reasoning.end in self._tail:
                self._tail = None
            elif found := [text for text in reasoning.interrupts if text in self._tail]:
                # Its tokens are of the answer.
                rest = len(self._tail) - min(map(self._tail.index, found))
                while rest > 0 and self._lengths:
                    rest -= self._lengths.pop()
                    self._num_tokens -= 1
                self._tail = None
            else:
                self._tail, self._lengths = self._tail[-longest:], self._lengths[-longest:]
