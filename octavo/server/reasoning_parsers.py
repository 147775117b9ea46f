"""Parsers of what models think before they answer, and how the one of a model is found."""

from __future__ import annotations

import enum
from typing import ClassVar

from octavo.core.model_config import ReasoningMarks
from octavo.core.plugins import load_class
from octavo.engine.chat_template import REASONING_MARKS, find_reasoning_marks

# Splits the text of a choice into reasoning and answer.


class Thinking(enum.Enum):
    """Where an answer begins."""

    #: Before reasoning that its start may open.
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    #: After the reasoning: there is none, or it has ended.
    AFTER = enum.auto()


class ReasoningParser:
    """The reasoning at the beginning of one choice's text: a new one is a class with its ``start`` and ``end``.

    Spaces and line breaks around the reasoning belong to neither part. Reasoning that does not end is all there is; a
    call of a tool ends it too.
    """

    start: ClassVar[str]
    end: ClassVar[str]
    #: Whether the model begins with reasoning although neither it nor its template writes the start.
    begins_inside: ClassVar[bool] = False
    #: Texts that end reasoning which was not closed before them, and are the beginning of the answer.
    interrupts: tuple[str, ...] = ()

    def __init__(self, state: Thinking) -> None:
        self.state = state
        #: Whether there is any reasoning.
        self.found = state is Thinking.INSIDE
        #: Text that may be part of a mark, or spaces at the edge of a part.
        self._held = ""
        #: Whether spaces at the beginning of the part are left out.
        self._strips = state is Thinking.INSIDE

    @classmethod
    def marks(cls, inside: bool | None = None, interrupts: tuple[str, ...] = ()) -> ReasoningMarks:
        """The marks, of an answer that begins within reasoning or not; None: as the end of its prompt says.

        ``interrupts``: texts that end the reasoning of this answer without its mark.
        """
        return ReasoningMarks(cls.start, cls.end, cls.begins_inside, inside, interrupts)

    @classmethod
    def state_after(cls, prompt: str, *, continues: bool = False) -> Thinking:
        """Where the answer to a prompt begins; ``continues``: the prompt ends within an answer."""
        prompt = prompt.rstrip()
        if prompt.endswith(cls.end):
            return Thinking.AFTER
        if prompt.endswith(cls.start) or (continues and prompt.rfind(cls.start) > prompt.rfind(cls.end)):
            return Thinking.INSIDE
        if continues:
            return Thinking.AFTER
        return Thinking.INSIDE if cls.begins_inside else Thinking.BEFORE

    def feed(self, text: str, finished: bool) -> tuple[str, str]:
        """Reasoning and answer in further text; ``finished``: nothing follows."""
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
        """The text after the start, if that is there."""
        ahead = text.lstrip()
        if ahead.startswith(self.start):
            self.state, self.found, self._strips = Thinking.INSIDE, True, True
            return ahead[len(self.start) :]
        if self.start.startswith(ahead) and not finished:
            self._held = text
            return ""
        self.state = Thinking.AFTER
        return text

    def _think(self, text: str, finished: bool) -> tuple[str, str]:
        """Reasoning, and what follows it."""
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
    """Characters at the end of a text that may be the beginning of ``end``."""
    return next((n for n in range(min(len(text), len(end) - 1), 0, -1) if text.endswith(end[:n])), 0)


def _parser(name: str, marks: ReasoningMarks) -> type[ReasoningParser]:
    fields: dict[str, object] = {"start": marks.start, "end": marks.end, "begins_inside": marks.begins_inside}
    fields["interrupts"] = marks.interrupts
    return type(name, (ReasoningParser,), {"__doc__": f"{marks.start} ... {marks.end}", **fields})


#: By the name that ``--reasoning-parser`` gives.
REASONING_PARSERS = {name: _parser(name, marks) for name, marks in REASONING_MARKS.items()}
#: Names that vLLM has for them, of models with the same marks.
_OTHER_NAMES = {"deepseek_v3": "qwen3", "glm45": "qwen3", "gemma4": "gemma"}


def load_reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser of this name, or the class that ``module:Class`` names.

    Raises:
        ConfigError: there is none.
    """
    base = "octavo.server.reasoning_parsers.ReasoningParser"
    return load_class(_OTHER_NAMES.get(name, name), REASONING_PARSERS, ReasoningParser, "reasoning_parser", base)


def find_reasoning_parser(template: str) -> type[ReasoningParser] | None:
    """The parser for the marks that a chat template speaks of, if they are known."""
    name = find_reasoning_marks(template)
    return None if name is None else REASONING_PARSERS[name]
