"""Tool calls in growing text: the events of a choice, and the base class of parsers.

The ``parse`` of a format is a coroutine, written as if the whole text were there: at the end of the text so far it
waits. So its events do not depend on how the text was cut, and its cost is linear in the text.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from octavo.engine.chat_messages import CallFormat

# The events of a choice, which the routes format.


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the content."""

    text: str
    #: Its end in the whole text of the choice, with marks and reasoning, in characters.
    end: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins; its arguments follow."""

    #: Number of the call in the choice, from 0.
    index: int
    #: Unique among all responses, unless the model numbers its calls.
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
    """A whole call; ``arguments`` is JSON text as the model wrote it, perhaps truncated."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatMessageParts:
    """A whole message; None: it has no such part."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ParsedToolCall] = field(default_factory=list)


def collect(events: Iterable[ChatEvent]) -> ChatMessageParts:
    """Adds the events of one choice up to a message."""
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


T = TypeVar("T")
#: A coroutine that waits for more text where it yields, and returns what it has read.
Reading = Generator[None, None, T]

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_IN_STRING = re.compile(r'[^"\\]*')
#: JSON outside of strings and brackets.
_BETWEEN = re.compile(r"[-+.:,\w\s]+")
_SPACE = re.compile(r"\s*")
_SCALAR = re.compile(r"[-+.\w]*")
_CLOSING = {"{": "}", "[": "]"}


class Malformed(Exception):
    """The text does not follow the format. What was read of it becomes content."""


class EndOfText(Exception):
    """The text has ended while the parser waits for more."""


class ToolParser(ABC):
    """Parses the text of one choice into content and tool calls. A format is a subclass with a ``parse``.

    The text of a call is held back until its name and the beginning of its arguments were read; if it turns out to be
    no call, it becomes content unchanged. From then on, arguments are emitted as they grow: those of a call that breaks
    off or is malformed stay as the model wrote them, and the text after them is content. Whitespace directly before and
    after calls is dropped, unless it follows a call and separates two parts of the content.

    If the text ends within calls of which one has begun, the rest that is no arguments is dropped: the notation of a
    call that was cut never shows in the content. If ``max_tokens`` cut the text, a call that has not begun is dropped
    too.
    """

    #: Texts of the format. Special tokens among them are kept in the text.
    markers: ClassVar[tuple[str, ...]] = ()
    #: Texts at which calls begin. They also end reasoning that was not closed.
    begins: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool = True) -> None:
        """``tools``: parameter schemas by name. Without ``parallel``, calls after the first are dropped."""
        self.tools = tools
        #: The answer consists of calls: other text is the beginning of one that was cut, and dropped.
        self.calls_alone = False
        #: Functions whose calls a grammar constrains where it sees a call begin.
        self.strict: frozenset[str] = frozenset()
        #: Nothing was read yet; formats that use it reset it.
        self.at_start = True
        self.has_content = False
        self._parallel = parallel
        self._num_calls = 0
        self._events: list[ChatEvent] = []
        #: The text that was not emitted yet. ``_position`` is where the coroutine reads, ``_emitted`` where it began.
        self._text = ""
        self._position = self._emitted = 0
        #: Characters before ``_text``.
        self._text_start = 0
        self._finished = self._cut = False
        #: The text is emitted as it grows: as arguments, or as content.
        self._in_arguments = self._in_object = False
        #: A call was emitted last; the end of a call is expected.
        self._after_call = self._closing = False
        #: The text that was not emitted may be the beginning of calls; one of them has begun.
        self._may_call = self._in_calls = False
        self._reading = self._run()

    def feed(self, text: str, finished: bool, *, cut: bool = False) -> list[ChatEvent]:
        """The events of further text. ``finished``: nothing follows; ``cut``: ``max_tokens`` has ended the text."""
        self._text = self._text[self._emitted :] + text
        self._position -= self._emitted
        self._text_start += self._emitted
        self._emitted = 0
        self._finished, self._cut = finished, cut
        next(self._reading, None)
        events, self._events = self._events, []
        return events

    @abstractmethod
    def parse(self) -> Reading[None]:
        """Reads content and calls, without end. Started again after ``Malformed``."""

    @classmethod
    def call_format(cls, template: str) -> CallFormat | None:
        """How the model writes calls, for grammars; None: there is no grammar of the format.

        Some formats depend on the chat ``template``.
        """
        return None

    def _run(self) -> Reading[None]:
        while True:
            try:
                yield from self.parse()
            except Malformed:
                self._emit()
                self._in_object = self._closing = self._may_call = self._in_calls = False
            except EndOfText:
                self._position = len(self._text)
                left_out = self._closing or self._in_calls or (self._cut and self._may_call)
                if self._in_arguments or not left_out:
                    self._emit()
                return

    # --- events -----------------------------------------------------------------------------------------------------

    def _emit(self) -> None:
        text = self._text[self._emitted : self._position]
        self._emitted = self._position
        if self._in_arguments:
            self.add_arguments(text)
        elif not self.calls_alone:
            # Whitespace after a call is dropped, unless it separates two parts of the content.
            if self._after_call and not (self.has_content and text.strip()):
                text = text.lstrip()
            if text:
                self._after_call, self.has_content = False, True
                self._events.append(ContentDelta(text, self._text_start + self._position))
        self._in_arguments = False

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Emits the beginning of a call, and drops its notation read so far. ``call_id``: the model's own, if any."""
        self.check_name(name)
        self._emitted = self._position
        self._after_call = self._in_calls = True
        if self._parallel or self._num_calls == 0:
            self._events.append(ToolCallStart(self._num_calls, call_id or f"call_{secrets.token_hex(12)}", name))
        self._num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Emits a piece of the arguments of the last call."""
        if text and (self._parallel or self._num_calls == 1):
            self._events.append(ToolCallArguments(self._num_calls - 1, text))

    def skip(self) -> None:
        """Drops the text read so far, which belongs to the format."""
        self._emitted = self._position

    def check_name(self, name: str) -> None:
        """Raises ``Malformed`` if there is no such tool."""
        if name not in self.tools:
            raise Malformed

    # --- reading ----------------------------------------------------------------------------------------------------

    def _wait(self) -> Reading[None]:
        if self._finished:
            raise EndOfText
        if self._in_arguments:
            text = self._text[self._emitted : self._position]
            self._emitted = self._position
            self.add_arguments(text)
        elif self._in_object:
            self._emit()
        yield

    def peek(self) -> Reading[str]:
        """The next character, without passing it."""
        while self._position == len(self._text):
            yield from self._wait()
        return self._text[self._position]

    def matched(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Passes and returns the longest match of a pattern that repeats single characters."""
        start = self._position - self._emitted
        while True:
            match = pattern.match(self._text, self._position)
            if match is not None:
                self._position = match.end()
            if self._position < len(self._text):
                return self._text[self._emitted + start : self._position]
            if self._in_arguments or self._in_object:  # emitted by the next wait
                start = 0
            yield from self._wait()

    def space(self) -> Reading[None]:
        """Passes whitespace."""
        yield from self.matched(_SPACE)

    def expect(self, *texts: str) -> Reading[str]:
        """Passes and returns the first of these texts that follows; raises ``Malformed`` if none does."""
        if (text := (yield from self.optional(*texts))) is None:
            raise Malformed
        return text

    def optional(self, *texts: str) -> Reading[str | None]:
        """Passes and returns the first of these texts that follows; None: none does."""
        longest = max(map(len, texts))
        while True:
            ahead = self._text[self._position : self._position + longest]
            possible = [text for text in texts if text.startswith(ahead) or ahead.startswith(text)]
            if not possible:
                return None
            if len(possible[0]) <= len(ahead):
                self._position += len(possible[0])
                return possible[0]
            yield from self._wait()

    def content(self, *markers: str) -> Reading[str]:
        """Emits content up to one of these texts, which is passed, returned, and held back with what follows it.

        Whitespace before a marker, and a possible beginning of one at the end of the text, are held back too.
        """
        whole, partial, longest = _patterns(markers)
        self._in_calls = False
        while True:
            match = whole.search(self._text, self._position)
            if match is not None:
                stop = match.start()
            else:
                tail = partial.search(self._text, max(self._position, len(self._text) - longest))
                stop = len(self._text) if tail is None else tail.start()
            kept = len(self._text[self._emitted : stop].rstrip())
            if kept:
                self._position = self._emitted + kept
                self._emit()
            self._may_call = stop < len(self._text)
            if match is not None:
                self._position = match.end()
                return match.group()
            self._position = stop
            yield from self._wait()

    def close(self, *texts: str) -> Reading[str | None]:
        """Passes the optional end of a call: one of these texts. One that is cut at the end of the text is dropped."""
        self._closing = True
        yield from self.space()
        text = yield from self.optional(*texts)
        self._closing = False
        if text is not None:
            self.skip()
        return text

    def until(self, *ends: str, limit: int = 256) -> Reading[str]:
        """Passes the text up to and with one of ``ends``; returns what is before it, at most ``limit`` characters."""
        return (yield from self.until_any(*ends, limit=limit))[0]

    def until_any(self, *ends: str, limit: int = 256) -> Reading[tuple[str, str]]:
        """As ``until``; also returns the end that was there."""
        whole, _, longest = _patterns(ends)
        start = searched = self._position - self._emitted
        while True:
            here = self._emitted + start
            match = whole.search(self._text, self._emitted + searched, here + limit + longest)
            if match is not None and match.start() - here <= limit:
                self._position = match.end()
                return self._text[here : match.start()], match.group()
            if len(self._text) - here >= limit + longest:
                raise Malformed
            searched = max(start, len(self._text) - self._emitted - longest + 1)
            yield from self._wait()

    def name(self) -> Reading[str]:
        """Passes a function's name, perhaps empty."""
        return (yield from self.matched(_NAME))

    # --- JSON -------------------------------------------------------------------------------------------------------

    def json_string(self) -> Reading[str]:
        """Passes a JSON string; returns its value."""
        start = self._position - self._emitted
        yield from self._pass_string()
        text = self._text[self._emitted + start : self._position]
        try:
            return str(json.loads(text, strict=False))
        except ValueError:
            raise Malformed from None

    def json_value(self) -> Reading[str]:
        """Passes any JSON value; returns its text."""
        start = self._position - self._emitted
        first = yield from self.peek()
        if first == '"':
            yield from self._pass_string()
        elif first in _CLOSING:
            yield from self._pass_brackets()
        else:
            yield from self.matched(_SCALAR)
        return self._text[self._emitted + start : self._position]

    def arguments(self) -> Reading[None]:
        """Passes an object and emits it as arguments of the last call, as it grows."""
        if (yield from self.peek()) != "{":
            raise Malformed
        self._emitted, self._in_arguments = self._position, True
        yield from self._pass_brackets()
        self._emit()

    def _pass_string(self) -> Reading[None]:
        yield from self.expect('"')
        while True:
            yield from self.matched(_IN_STRING)
            if (yield from self._next()) == '"':
                return
            yield from self._next()  # the character after a backslash

    def rest_of_object(self) -> Reading[None]:
        """Emits the text read so far and the rest of the object around it as content, as it grows."""
        self._emit()
        self._may_call, self._in_calls, self._in_object = False, False, True
        yield from self._pass_brackets("}")
        self._emit()
        self._in_object = False

    def _pass_brackets(self, *closing: str) -> Reading[None]:
        """Passes an object or a list with balanced brackets. ``closing``: the ends of those already open."""
        closing_brackets = list(closing)
        while True:
            character = yield from self.peek()
            if character == '"':
                yield from self._pass_string()
            elif character in _CLOSING:
                closing_brackets.append(_CLOSING[character])
                self._position += 1
            elif closing_brackets and character == closing_brackets[-1]:
                closing_brackets.pop()
                self._position += 1
                if not closing_brackets:
                    return
            elif _BETWEEN.match(character):
                yield from self.matched(_BETWEEN)
            else:
                raise Malformed

    def _next(self) -> Reading[str]:
        character = yield from self.peek()
        self._position += 1
        return character


@functools.cache
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Patterns of any marker, and of the beginning of one at the end of the text; the length of the longest."""
    beginnings = {marker[:i] for marker in markers for i in range(1, len(marker))}
    partial = "|".join(map(re.escape, sorted(beginnings, key=len, reverse=True)))
    whole = "|".join(map(re.escape, markers))
    return re.compile(whole), re.compile(rf"(?:{partial})\Z"), max(map(len, markers))
