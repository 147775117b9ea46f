"""Parsers that split the text of a choice into reasoning and answer, by the model's marks."""

from __future__ import annotations

import enum
import re
from typing import ClassVar, Literal

from octavo.core.model_config import ReasoningMarks
from octavo.core.plugins import load_class
from octavo.engine.chat_template import REASONING_MARKS, find_reasoning_marks
from octavo.engine.harmony import ANALYSIS, CALL, CHANNEL, CONSTRAIN, END, FINAL, MESSAGE, RETURN, START, TURN


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
    #: Texts around the answer, which are dropped; they may be missing.
    answer_marks: ClassVar[tuple[str, str] | None] = None
    #: Further texts of the format. Special tokens among them are kept in the text.
    markers: ClassVar[tuple[str, ...]] = ()
    #: What opens the reasoning if the prompt does it.
    opening: ClassVar[str | None] = None
    #: The model reasons in every answer whose prompt does not end the reasoning.
    is_constant: ClassVar[bool] = False
    #: End of a prompt that a grammar writes where it constrains the answer from its beginning, and the beginning of an
    #: answer behind it.
    turn: ClassVar[str] = ""
    answer_header: ClassVar[str] = ""
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
        self._answer = None if self.answer_marks is None else MarkedAnswer(*self.answer_marks)

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

    def token_counter(self) -> ReasoningParser | None:
        """A parser whose state tells which tokens are reasoning; None: those up to the first end of reasoning are."""
        return None

    def feed(self, text: str, finished: bool) -> tuple[str, str]:
        """The reasoning and the answer in further text; ``finished``: nothing follows."""
        thought, text = self._split(text, finished)
        if self._answer is not None and (self.state is Thinking.AFTER or finished):
            text = self._answer.feed(text, finished)
        return thought, text

    def _split(self, text: str, finished: bool) -> tuple[str, str]:
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


class HarmonyReasoning(ReasoningParser):
    """The channels of gpt-oss: analysis is reasoning, final and commentary are the answer, in which calls stay.

    Messages of the same kind are separated by an empty line.
    """

    start, end = ANALYSIS, END
    markers = (START, CONSTRAIN, CALL, RETURN)
    opening = ANALYSIS
    is_constant = True
    turn = TURN
    answer_header = TURN + FINAL
    _HEADER_BEGINS = (START, CHANNEL, MESSAGE, " to=")
    _BODY_ENDS = (END, CALL, RETURN, START)
    #: A header is at most this long: other text is content.
    _MAX_HEADER = 512

    def __init__(self, state: Thinking) -> None:
        super().__init__(state)
        self._strips = False
        #: Where the text goes: None while a header is read.
        self._kind: Literal["reasoning", "answer", "call"] | None = "reasoning" if state is Thinking.INSIDE else None
        #: The reasoning or the answer has text, which a further message must be separated from.
        self._has_text = {"reasoning": False, "answer": False}
        self._separates = False

    def token_counter(self) -> ReasoningParser | None:
        return type(self)(self.state)

    def feed(self, text: str, finished: bool) -> tuple[str, str]:
        text, self._held = self._held + text, ""
        thoughts, answers = list[str](), list[str]()
        while text:
            if self._kind is None:
                text = self._read_header(text, answers, finished)
            else:
                text = self._read_body(text, thoughts if self._kind == "reasoning" else answers, finished)
        return "".join(thoughts), "".join(answers)

    def _read_header(self, text: str, answers: list[str], finished: bool) -> str:
        """Passes a header, or holds it until it is whole; returns the rest."""
        ahead = text.lstrip("\n")
        begins = [begin for begin in self._HEADER_BEGINS if ahead.startswith(begin[: len(ahead)])]
        at = ahead.find(MESSAGE, 0, self._MAX_HEADER)
        if not begins or (at < 0 and (finished or len(ahead) >= self._MAX_HEADER)):
            self._kind, self.state = "answer", Thinking.AFTER  # what is no header is content
            self._separates = self._has_text["answer"]
            self._add(text[0], answers)
            return text[1:]
        if at < 0:
            self._held = text
            return ""
        header, body = ahead[:at], ahead[at + len(MESSAGE) :]
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        in_analysis = channel is not None and channel[1] == "analysis"
        if recipient is not None and not (in_analysis and not recipient[1].startswith("functions.")):
            self._kind, self.state = "call", Thinking.AFTER
            answers.append(header + MESSAGE)
        elif in_analysis:
            self._kind, self.state, self.has_reasoning = "reasoning", Thinking.INSIDE, True
        else:
            self._kind, self.state = "answer", Thinking.AFTER
        self._separates = self._kind != "call" and self._has_text[self._kind]
        return body

    def _read_body(self, text: str, pieces: list[str], finished: bool) -> str:
        """Passes a message's text up to its end, or to what may be its end; returns the rest."""
        at, end = min(((i, end) for end in self._BODY_ENDS if (i := text.find(end)) >= 0), default=(-1, ""))
        if at < 0:
            held = 0 if finished else max(_overlap(text, end) for end in self._BODY_ENDS)
            body, self._held, text = text[: len(text) - held], text[len(text) - held :], ""
        else:
            body, text = text[:at], text[at + (0 if end == START else len(end)) :]
        self._add(body, pieces)
        if at >= 0:
            if self._kind == "call":
                pieces.append(CALL)
            self._kind, self.state = None, Thinking.AFTER
        return text

    def _add(self, text: str, pieces: list[str]) -> None:
        if text and self._kind in self._has_text:
            pieces.append("\n\n" + text if self._separates else text)
            self._separates, self._has_text[self._kind] = False, True
        elif text:
            pieces.append(text)


_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class MarkedAnswer:
    """Drops the marks around an answer, and the whitespace at them."""

    def __init__(self, start: str, end: str) -> None:
        self._start, self._end = start, end
        #: The start mark may follow; it was there, and the end mark may follow.
        self._may_start, self._may_end = True, False
        self._held = ""
        self._strips = False

    def feed(self, text: str, finished: bool) -> str:
        """The answer in further text; ``finished``: nothing follows."""
        text, self._held = self._held + text, ""
        if self._may_start:
            ahead = text.lstrip()
            if self._start.startswith(ahead) and ahead != self._start and not finished:
                self._held = text
                return ""
            self._may_start = False
            if ahead.startswith(self._start):
                self._may_end = self._strips = True
                text = ahead[len(self._start) :]
        if self._may_end:
            if (at := text.find(self._end)) >= 0:
                self._may_end = False
                before, text = text[:at].rstrip(), text[at + len(self._end) :].lstrip()
                before = before.lstrip() if self._strips else before
                self._strips = not text
                return before + text
            if not finished:
                kept = len(text[: len(text) - _overlap(text, self._end)].rstrip())
                text, self._held = text[:kept], text[kept:]
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        return text


def _overlap(text: str, end: str) -> int:
    """The number of characters at the end of a text that may begin ``end``."""
    return next((n for n in range(min(len(text), len(end) - 1), 0, -1) if text.endswith(end[:n])), 0)


#: Families whose answer has marks of its own.
_ANSWER_MARKS = {"hunyuan_a13b": ("<answer>", "</answer>"), "ernie45": ("<response>", "</response>")}


def _parser(name: str, marks: ReasoningMarks) -> type[ReasoningParser]:
    fields: dict[str, object] = {"start": marks.start, "end": marks.end, "begins_inside": marks.begins_inside}
    fields |= {"interrupts": marks.interrupts, "answer_marks": _ANSWER_MARKS.get(name)}
    return type(name, (ReasoningParser,), {"__doc__": f"{marks.start} ... {marks.end}", **fields})


#: Names of ``--reasoning-parser``.
REASONING_PARSERS = {name: _parser(name, marks) for name, marks in REASONING_MARKS.items()}
REASONING_PARSERS["harmony"] = HarmonyReasoning
#: Names of vLLM and SGLang, for models with the same marks.
OTHER_NAMES = {
    "deepseek_v3": "qwen3",
    "deepseek_v31": "qwen3",
    "deepseek_v32": "qwen3",
    "deepseek_v4": "qwen3",
    "gemma4": "gemma",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "gpt_oss": "harmony",
    "holo2": "qwen3",
    "hunyuan": "hunyuan_a13b",
    "kimi_k2": "qwen3",
    "mimo": "qwen3",
    "minimax": "deepseek_r1",
    "minimax_m2": "deepseek_r1",
    "nemotron_v3": "qwen3",
    "olmo3": "qwen3",
    "openai_gptoss": "harmony",
    "phi4": "qwen3",
    "qwen3_thinking": "deepseek_r1",
    "step3": "deepseek_r1",
    "step3p5": "qwen3",
}


def load_reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser of a name or of ``module:Class``; raises ``ConfigError``."""
    base = "octavo.server.reasoning_parsers.ReasoningParser"
    known = name if ":" in name else name.replace("-", "_")
    return load_class(OTHER_NAMES.get(known, known), REASONING_PARSERS, ReasoningParser, "reasoning_parser", base)


def find_reasoning_parser(template: str) -> type[ReasoningParser] | None:
    name = find_reasoning_marks(template)
    return None if name is None else REASONING_PARSERS[name]
