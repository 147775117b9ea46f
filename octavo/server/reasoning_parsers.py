"""Parsers that split the text of a choice into reasoning and answer, by the model's marks."""

from __future__ import annotations

import enum
from typing import ClassVar

from octavo.core.model_config import ReasoningMarks
from octavo.core.plugins import load_class
from octavo.engine.chat_template import REASONING_MARKS, find_reasoning_marks


class Thinking(enum.Enum):
    """The position in a text relative to its reasoning."""

    #: A start mark may follow.
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    #: The reasoning has ended, or there is none.
    AFTER = enum.auto()


class ReasoningParser:
    """Separates the reasoning at the beginning of one choice's text. A subclass sets ``start`` and ``end``.

    Whitespace around the reasoning is dropped. Reasoning without an end lasts to the end of the text or to a tool call.
    """

    start: ClassVar[str]
    end: ClassVar[str]
    #: The answer begins with reasoning although neither the model nor its template writes the start mark.
    begins_inside: ClassVar[bool] = False
    #: Texts that end unclosed reasoning and begin the answer.
    interrupts: tuple[str, ...] = ()

    def __init__(self, state: Thinking) -> None:
        self.state = state
        self.has_reasoning = state is Thinking.INSIDE
        #: Text that may be part of a mark, or whitespace at an edge.
        self._held = ""
        #: Leading whitespace is dropped.
        self._strips = state is Thinking.INSIDE

    @classmethod
    def marks(cls, inside: bool | None = None, interrupts: tuple[str, ...] = ()) -> ReasoningMarks:
        """The marks for the engine. ``inside``: the answer begins within reasoning (None: the prompt decides)."""
        return ReasoningMarks(cls.start, cls.end, cls.begins_inside, inside, interrupts)

    @classmethod
    def state_after(cls, prompt: str, *, continues: bool = False) -> Thinking:
        """The state after a prompt; ``continues``: the prompt ends within an answer."""
        prompt = prompt.rstrip()
        if prompt.endswith(cls.end):
            return Thinking.AFTER
        if prompt.endswith(cls.start) or (continues and prompt.rfind(cls.start) > prompt.rfind(cls.end)):
            return Thinking.INSIDE
        if continues:
            return Thinking.AFTER
        return Thinking.INSIDE if cls.begins_inside else Thinking.BEFORE

    def feed(self, text: str, finished: bool) -> tuple[str, str]:
        """The reasoning and the answer in further text; ``finished``: nothing follows."""
        if self.state is Thinking.AFTER and not self._strips:
            return "", text
        text = self._held + text
        self._held = ""
        thought = ""
        if self.state is Thinking.BEFORE:
            text = self._open(text, finished)
        if self.state is Thinking.INSIDE:
            thought, text = self._think(text, finished)
        if self.state is Thinking.AFTER and self._strips:
            text = text.lstrip()
            self._strips = not text
        return thought, text

    def _open(self, text: str, finished: bool) -> str:
        """Passes the start mark, if there is one; returns the text after it."""
        ahead = text.lstrip()
        if ahead.startswith(self.start):
            self.state, self.has_reasoning, self._strips = Thinking.INSIDE, True, True
            return ahead[len(self.start) :]
        if self.start.startswith(ahead) and not finished:
            self._held = text
            return ""
        self.state = Thinking.AFTER
        return text

    def _think(self, text: str, finished: bool) -> tuple[str, str]:
        ends = (self.end, *self.interrupts)
        at, end = min(((i, end) for end in ends if (i := text.find(end)) >= 0), default=(-1, ""))
        if at >= 0:
            self.state = Thinking.AFTER
            thought, text = text[:at].rstrip(), text[at + (len(end) if end == self.end else 0) :]
        else:
            held = max(_overlap(text, end) for end in ends)
            kept = len(text) if finished else len(text[: len(text) - held].rstrip())
            thought, self._held, text = text[:kept], text[kept:], ""
        if self._strips:
            thought = thought.lstrip()
            self._strips = not thought
        if self.state is Thinking.AFTER:
            self._strips = True
        return thought, text


def _overlap(text: str, end: str) -> int:
    """The number of characters at the end of a text that may begin ``end``."""
    return next((n for n in range(min(len(text), len(end) - 1), 0, -1) if text.endswith(end[:n])), 0)


def _parser(name: str, marks: ReasoningMarks) -> type[ReasoningParser]:
    fields: dict[str, object] = {"start": marks.start, "end": marks.end, "begins_inside": marks.begins_inside}
    fields["interrupts"] = marks.interrupts
    return type(name, (ReasoningParser,), {"__doc__": f"{marks.start} ... {marks.end}", **fields})


#: Names of ``--reasoning-parser``.
REASONING_PARSERS = {name: _parser(name, marks) for name, marks in REASONING_MARKS.items()}
#: vLLM's names, for models with the same marks.
_OTHER_NAMES = {"deepseek_v3": "qwen3", "glm45": "qwen3", "gemma4": "gemma"}


def load_reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser of a name or of ``module:Class``; raises ``ConfigError``."""
    base = "octavo.server.reasoning_parsers.ReasoningParser"
    return load_class(_OTHER_NAMES.get(name, name), REASONING_PARSERS, ReasoningParser, "reasoning_parser", base)


def find_reasoning_parser(template: str) -> type[ReasoningParser] | None:
    name = find_reasoning_marks(template)
    return None if name is None else REASONING_PARSERS[name]
