"""What parsers of tool calls are made of: a coroutine that reads a growing text and says what it is.

A format's ``parse`` is written as if the whole text were there: where it ends for now, the coroutine waits. So what it
says does not depend on where the text was cut, and its cost is linear in the text.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from octavo.engine.chat_messages import CallFormat
from octavo.grammar.json_schema import closed

# What a choice of a chat says, as events: reasoning, content, tool calls; the routes format them.


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


T = TypeVar("T")
#: A part of a parser: waits for more text, and returns what it has read.
Reading = Generator[None, None, T]

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_IN_STRING = re.compile(r'[^"\\]*')
#: JSON outside of strings and brackets.
_BETWEEN = re.compile(r"[-+.:,\w\s]+")
_SPACE = re.compile(r"\s*")
_SCALAR = re.compile(r"[-+.\w]*")
_CLOSING = {"{": "}", "[": "]"}


class Malformed(Exception):
    """The text is not what the format says. What was read of it is content."""


class EndOfText(Exception):
    """Nothing follows."""


class ToolParser(ABC):
    """The content and the calls in the text of one choice. A format derives from it and writes ``parse``.

    A call begins when its name and the beginning of its arguments are read; until then its text is held back, and if it
    turns out to be none, it is content, as it stands. Arguments are given as they grow: those of a call that breaks off
    or goes wrong stay as the model wrote them, and text that is not of them is content again. Spaces and line breaks
    directly before and after calls are not content, but for those after a call between two parts of it.

    Where the text ends within calls of which one has begun, what is not of its arguments is left out: a call that was
    cut leaves no part of its notation in the content. Where ``max_tokens`` cut the text, a call that has not begun is
    left out too, as far as it was read.
    """

    #: Texts of the format. Where they are special tokens of a tokenizer, these are kept in the text.
    markers: ClassVar[tuple[str, ...]] = ()
    #: Markers at which calls begin. They end reasoning that was not closed.
    begins: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool = True) -> None:
        """``tools``: schemas of the parameters by name. Without ``parallel``, calls after the first are left out."""
        self.tools = tools
        #: The text is held to be calls: what of it is in none is the beginning of one that was cut, and no content.
        self.calls_alone = False
        #: Functions whose calls fit their schemas, as a grammar holds the answer to them where it sees a call begin.
        self.strict: frozenset[str] = frozenset()
        #: Whether nothing was read yet; for formats that take that back themselves.
        self.at_start = True
        self._parallel = parallel
        #: Text from the beginning of what was not given yet; where the coroutine reads, and where that begins.
        self._text = ""
        self._position = self._given = 0
        #: Characters before that.
        self._passed = 0
        self._finished = self._cut = False
        self._events: list[ChatEvent] = []
        self._num_calls = 0
        #: Whether the text read is given as arguments, or as content, as it grows.
        self._in_arguments = self._in_object = False
        #: Whether there was content.
        self.has_content = False
        #: Whether a call was the last that was given, and its end is looked for.
        self._after_call = self._closing = False
        #: Whether what was not given may be the beginning of calls, and whether one of them has begun.
        self._may_call = self._in_calls = False
        self._reading = self._run()

    def feed(self, text: str, finished: bool, *, cut: bool = False) -> list[ChatEvent]:
        """The events of further text. ``finished``: nothing follows; ``cut``: as ``max_tokens`` has ended the text."""
        self._text = self._text[self._given :] + text
        self._position -= self._given
        self._passed += self._given
        self._given = 0
        self._finished, self._cut = finished, cut
        next(self._reading, None)
        events, self._events = self._events, []
        return events

    @abstractmethod
    def parse(self) -> Reading[None]:
        """Reads content and calls, without end. Called anew after ``Malformed``."""

    @classmethod
    def call_format(cls, template: str) -> CallFormat | None:
        """How calls are written, for grammars; None: no grammar of the format is known.

        ``template``: the chat template, as some formats have several ways.
        """
        return None

    def _run(self) -> Reading[None]:
        while True:
            try:
                yield from self.parse()
            except Malformed:
                self._give()
                self._in_object = self._closing = self._may_call = self._in_calls = False
            except EndOfText:
                self._position = len(self._text)
                left_out = self._closing or self._in_calls or (self._cut and self._may_call)
                if self._in_arguments or not left_out:
                    self._give()
                return

    # --- what is given ----------------------------------------------------------------------------------------------

    def _give(self) -> None:
        """Gives the text read so far: as arguments, or as content."""
        text = self._text[self._given : self._position]
        self._given = self._position
        if self._in_arguments:
            self.add_arguments(text)
        elif not self.calls_alone and (text := self._without_edge(text)):
            self._after_call, self.has_content = False, True
            self._events.append(ContentDelta(text, self._passed + self._position))
        self._in_arguments = False

    def _without_edge(self, text: str) -> str:
        """Content without the spaces after a call, unless they stand between two parts of it."""
        if not self._after_call or (self.has_content and text.strip()):
            return text
        return text.lstrip()

    def start_call(self, name: str) -> None:
        """Gives the beginning of a call; what was read of it so far is no content."""
        self.check_name(name)
        self._given = self._position
        self._after_call = self._in_calls = True
        if self._parallel or self._num_calls == 0:
            self._events.append(ToolCallStart(self._num_calls, f"call_{secrets.token_hex(12)}", name))
        self._num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Gives a piece of the arguments of the call that has begun last."""
        if text and (self._parallel or self._num_calls == 1):
            self._events.append(ToolCallArguments(self._num_calls - 1, text))

    def skip(self) -> None:
        """What was read so far is of the format, and not content."""
        self._given = self._position

    def check_name(self, name: str) -> None:
        """Raises ``Malformed`` if there is no such tool."""
        if name not in self.tools:
            raise Malformed

    # --- reading ----------------------------------------------------------------------------------------------------

    def _wait(self) -> Reading[None]:
        if self._finished:
            raise EndOfText
        if self._in_arguments:
            text = self._text[self._given : self._position]
            self._given = self._position
            self.add_arguments(text)
        elif self._in_object:
            self._give()
        yield

    def peek(self) -> Reading[str]:
        """The next character, which is not passed."""
        while self._position == len(self._text):
            yield from self._wait()
        return self._text[self._position]

    def matched(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Passes the longest text of a repetition of single characters; returns it."""
        start = self._position - self._given
        while True:
            match = pattern.match(self._text, self._position)
            if match is not None:
                self._position = match.end()
            if self._position < len(self._text):
                return self._text[self._given + start : self._position]
            if self._in_arguments or self._in_object:  # given with the next wait
                start = 0
            yield from self._wait()

    def space(self) -> Reading[None]:
        """Passes spaces and line breaks."""
        yield from self.matched(_SPACE)

    def expect(self, *texts: str) -> Reading[str]:
        """Passes the first of these texts that is there, and returns it."""
        if (text := (yield from self.optional(*texts))) is None:
            raise Malformed
        return text

    def optional(self, *texts: str) -> Reading[str | None]:
        """Passes the first of these texts that is there, if any."""
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
        """Gives content up to one of these texts, which is passed and returned, and held back with what follows.

        Spaces before a marker, and what may become one at the end of the text, are held back too.
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
            kept = len(self._text[self._given : stop].rstrip())
            if kept:
                self._position = self._given + kept
                self._give()
            self._may_call = stop < len(self._text)
            if match is not None:
                self._position = match.end()
                return match.group()
            self._position = stop
            yield from self._wait()

    def close(self, *texts: str) -> Reading[str | None]:
        """Passes one of these texts after a call, which may be missing; where the text ends in one, it is dropped."""
        self._closing = True
        yield from self.space()
        text = yield from self.optional(*texts)
        self._closing = False
        if text is not None:
            self.skip()
        return text

    def until(self, *ends: str, limit: int = 256) -> Reading[str]:
        """The text up to one of these, which is passed too; ``limit`` in characters."""
        return (yield from self.until_any(*ends, limit=limit))[0]

    def until_any(self, *ends: str, limit: int = 256) -> Reading[tuple[str, str]]:
        """The text up to one of these, and the one, which is passed too; ``limit`` in characters."""
        whole, _, longest = _patterns(ends)
        start = searched = self._position - self._given
        while True:
            here = self._given + start
            match = whole.search(self._text, self._given + searched, here + limit + longest)
            if match is not None and match.start() - here <= limit:
                self._position = match.end()
                return self._text[here : match.start()], match.group()
            if len(self._text) - here >= limit + longest:
                raise Malformed
            searched = max(start, len(self._text) - self._given - longest + 1)
            yield from self._wait()

    def name(self) -> Reading[str]:
        """A function's name, perhaps empty."""
        found: str = yield from self.matched(_NAME)
        return found

    # --- JSON -------------------------------------------------------------------------------------------------------

    def json_string(self) -> Reading[str]:
        """What a string of JSON says."""
        start = self._position - self._given
        yield from self._pass_string()
        text = self._text[self._given + start : self._position]
        try:
            return str(json.loads(text, strict=False))
        except ValueError:
            raise Malformed from None

    def json_value(self) -> Reading[str]:
        """The text of any value of JSON."""
        start = self._position - self._given
        first = yield from self.peek()
        if first == '"':
            yield from self._pass_string()
        elif first in _CLOSING:
            yield from self._pass_brackets()
        else:
            yield from self.matched(_SCALAR)
        return self._text[self._given + start : self._position]

    def arguments(self) -> Reading[None]:
        """Passes an object and gives it as arguments of the call that has begun, as it grows."""
        if (yield from self.peek()) != "{":
            raise Malformed
        self._given, self._in_arguments = self._position, True
        yield from self._pass_brackets()
        self._give()

    def _pass_string(self) -> Reading[None]:
        yield from self.expect('"')
        while True:
            yield from self.matched(_IN_STRING)
            if (yield from self._next()) == '"':
                return
            yield from self._next()  # what the backslash quotes

    def rest_of_object(self) -> Reading[None]:
        """Gives what is read as content, and the object that it is in up to its end, as it grows."""
        self._give()
        self._may_call, self._in_calls, self._in_object = False, False, True
        yield from self._pass_brackets("}")
        self._give()
        self._in_object = False

    def _pass_brackets(self, *closing: str) -> Reading[None]:
        """An object or a list: with strings and brackets that fit; what stands between them is not looked at.

        ``closing``: the ends of those that were opened before.
        """
        open_ones = list(closing)
        while True:
            character = yield from self.peek()
            if character == '"':
                yield from self._pass_string()
            elif character in _CLOSING:
                open_ones.append(_CLOSING[character])
                self._position += 1
            elif open_ones and character == open_ones[-1]:
                open_ones.pop()
                self._position += 1
                if not open_ones:
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
    """One of these texts; the beginning of one at the end of the text; the length of the longest."""
    beginnings = {marker[:i] for marker in markers for i in range(1, len(marker))}
    partial = "|".join(map(re.escape, sorted(beginnings, key=len, reverse=True)))
    whole = "|".join(map(re.escape, markers))
    return re.compile(whole), re.compile(rf"(?:{partial})\Z"), max(map(len, markers))


# Grammars that calls of a format fulfil, in Lark's notation as llguidance has it.

#: JSON as templates write it to the model: on one line, so that a model cannot go on with spaces for ever. Keywords
#: that are not supported are errors, and a value fits exactly one schema of a ``oneOf``.
_JSON_OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_TEXT = r"TEXT: /(.|\n)*/"


class CallGrammar:
    """The grammar of calls of certain tools in one format."""

    def __init__(
        self,
        form: CallFormat,
        tools: Mapping[str, Mapping[str, Any]],
        special: Mapping[str, int],
        *,
        parallel: bool = True,
        strict: Set[str] = frozenset(),
    ) -> None:
        """``tools``: schemas of the parameters by name. ``special``: ids of the special tokens by text.

        ``strict``: tools whose schemas must be obeyed in all keywords.
        """
        self._form = form
        self._special = special
        self._repeats = parallel and form.separator is not None
        self._names = list(tools)
        self._rules = [
            f"arguments_{i}: %json {_arguments(schema, strict=name in strict)}"
            for i, (name, schema) in enumerate(tools.items())
        ]
        calls = [self._call(name, i, self._text(form.pieces(name)[0])) for i, name in enumerate(self._names)]
        self._rules.append(f"call: {' | '.join(calls)}")

    def calls(self) -> str:
        """One call or more, and nothing else."""
        return self._written(f"start: {self._text(self._form.begin)} call {self._more()} {self._text(self._form.end)}")

    def calls_or(self, answer: str) -> str:
        """Calls, or a text of another form: the right side of a rule."""
        form = self._form
        calls = f"{self._text(form.begin)} call {self._more()} {self._text(form.end)}"
        return self._written(f"start: calls | answer\ncalls: {calls}\nanswer: {answer}")

    def calls_in_text(self) -> str:
        """Any text, in which what begins as a call is one. Needs a ``trigger``."""
        form = self._form
        trigger = form.trigger or ""
        heads = []
        for i, name in enumerate(self._names):
            head = form.begin + form.pieces(name)[0]
            heads.append(self._call(name, i, self._text(head[len(trigger) :])))
        if trigger in self._special:
            free = f"free: TEXT {self._text(trigger)}"
        else:
            free = f"free[lazy]: TEXT {self._text(trigger)}"
        rules = ["start: tag* rest", "rest: TEXT", _TEXT, free, f"first: {' | '.join(heads)}"]
        rules.append(f"tag: free first {self._more()} {self._text(form.end)}")
        return self._written("\n".join(rules))

    def _more(self) -> str:
        return f"({self._text(self._form.separator or '')} call)*" if self._repeats else ""

    def _call(self, name: str, index: int, head: str) -> str:
        return f"{head} arguments_{index} {self._text(self._form.pieces(name)[1])}"

    def _written(self, start: str) -> str:
        return "\n".join([start, *self._rules])

    def _text(self, text: str) -> str:
        """A text as a sequence of literals and special tokens."""
        special = [token for token in self._special if token in text]
        parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        return " ".join(self._token(part) if part in self._special else json.dumps(part) for part in parts if part)

    def _token(self, text: str) -> str:
        return text if re.fullmatch(r"<[^<>\s]+>", text) else f"<[{self._special[text]}]>"


def _arguments(schema: Mapping[str, Any], *, strict: bool) -> str:
    """The schema of arguments: objects have no properties that it does not name, as no function takes them."""
    options = {**_JSON_OPTIONS, "strict": True} if strict else _JSON_OPTIONS
    return json.dumps({**closed(dict(schema)), "x-guidance": options})
