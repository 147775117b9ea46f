# ruff: noqa: RUF001, RUF002 (tokens of DeepSeek)
"""The formats in which models write tool calls with arguments as JSON objects, and as Python."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar

from octavo.engine.chat_messages import HERMES, CallFormat
from octavo.engine.harmony import CALL, CHANNEL, CONSTRAIN, END, FINAL, MESSAGE, START, TURN, call_header
from octavo.server.tool_parsers.tool_parser import Malformed, Reading, ToolParser

_SEPARATORS = re.compile(r"[\s,;]*")
#: Keys of a call. A bare object with another one before its name is some other object.
_KEYS = frozenset({"name", "type", "id", "arguments", "parameters"})


#: How most models write a call.
_JSON_CALL = '{"name": "{name}", "arguments": {arguments}}'


class OtherObject(Malformed):
    """The object is no call. It was read up to a place outside of strings."""


class JsonCalls(ToolParser):
    """Reads calls such as ``{"name": "f", "arguments": {...}}``, with the keys in any order."""

    def json_call(self, *, bare: Collection[str] | None = None, opened: bool = False) -> Reading[None]:
        """Passes one object, whose ``}`` may be missing, and emits its call.

        ``bare``: no marker precedes the object. A call then has arguments and one of these names; for any other object,
        ``OtherObject`` is raised as soon as possible. ``opened``: its ``{`` was passed.
        """
        if not opened:
            yield from self.expect("{")
        name: str | None = None
        held: str | None = None
        emitted = False
        while True:
            yield from self.matched(_SEPARATORS)
            if (yield from self.optional("}")) is not None:
                break
            if emitted and (yield from self.peek()) != '"':
                break
            key = yield from self.json_string()
            yield from self.space()
            yield from self.expect(":")
            yield from self.space()
            if bare is not None and name is None and key not in _KEYS:
                raise OtherObject
            if key == "name" and name is None:
                name = yield from self.json_string()
                if bare is not None and name not in bare:
                    raise OtherObject
                self.check_name(name)
            elif key in ("arguments", "parameters") and held is None and not emitted:
                if name is not None and (yield from self.peek()) == "{":
                    self.start_call(name)
                    yield from self.arguments()
                    emitted = True
                else:
                    held = yield from self.json_value()
            else:
                yield from self.json_value()
        if name is None or (bare is not None and held is None and not emitted):
            raise Malformed
        if not emitted:
            arguments = _as_object(held)
            self.start_call(name)
            self.add_arguments(arguments)
        self.skip()

    def json_calls(self) -> Reading[None]:
        """Passes an object or a list of them; the ends may be missing."""
        if (yield from self.optional("[")) is None:
            yield from self.json_call()
            return
        yield from self.space()
        yield from self.rest_of_list()

    def rest_of_list(self) -> Reading[None]:
        """Passes calls up to the ``]``, which may be missing."""
        yield from self.json_call()
        yield from self.more_calls(",", "]")

    def more_calls(self, *separators: str, bare: Collection[str] | None = None) -> Reading[None]:
        """Passes the calls after the first one; the separators may be missing, and a ``]`` ends the list."""
        while (separator := (yield from self.close(*separators))) != "]":
            yield from self.space()
            if separator is None and (yield from self.peek()) != "{":
                return
            yield from self.json_call(bare=bare)

    def named_call(self, name: str, call_id: str | None = None) -> Reading[None]:
        """Passes the arguments of a call whose name was passed, and emits the call."""
        self.check_name(name)
        if (yield from self.peek()) != "{":
            raise Malformed
        self.start_call(name, call_id)
        yield from self.arguments()


def _as_object(value: str | None) -> str:
    """Arguments as the text of an object: some models write it within a JSON string, or leave it out."""
    if value in (None, "null"):
        return "{}"
    assert value is not None
    try:
        text = str(json.loads(value, strict=False)).strip() if value.startswith('"') else value
    except ValueError:
        raise Malformed from None
    if not text.startswith("{"):
        raise Malformed
    return text


class MarkedCalls(JsonCalls):
    """Calls between two markers, as one object or a list; the end marker may be missing."""

    ends: ClassVar[tuple[str, ...]]
    #: Whether models write the end marker of a list.
    closes: ClassVar[bool] = True

    def parse(self) -> Reading[None]:
        while True:
            yield from self.content(*self.begins)
            yield from self.space()
            yield from self.json_calls()
            yield from self.close(*self.ends)

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        begin, end = cls.begins[0], cls.ends[0] if cls.closes else ""
        return CallFormat(_JSON_CALL, separator=", ", begin=f"{begin}[", end=f"]{end}", trigger=begin)


class Hermes(MarkedCalls):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, Granite 4, ERNIE 4.5."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    begins: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    ends: ClassVar[tuple[str, ...]] = ("</tool_call>",)

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        return HERMES


class Granite(MarkedCalls):
    """``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``, or the same after ``<tool_call>``: Granite 3."""

    markers: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>", "<|/tool_call|>", "</tool_call>")
    begins: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>")
    ends: ClassVar[tuple[str, ...]] = ("<|/tool_call|>", "</tool_call>")
    closes: ClassVar[bool] = False


class Hunyuan(MarkedCalls):
    """``<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>``: Hunyuan, Jamba."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_calls>", "</tool_calls>")
    begins: ClassVar[tuple[str, ...]] = ("<tool_calls>",)
    ends: ClassVar[tuple[str, ...]] = ("</tool_calls>",)


class NemotronNano2(MarkedCalls):
    """``<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>``: Nemotron Nano 2."""

    markers: ClassVar[tuple[str, ...]] = ("<TOOLCALL>", "</TOOLCALL>")
    begins: ClassVar[tuple[str, ...]] = ("<TOOLCALL>",)
    ends: ClassVar[tuple[str, ...]] = ("</TOOLCALL>",)


class Phi4Mini(JsonCalls):
    """``functools[{"name": ..., "arguments": {...}}, ...]``, or such a list between ``<|tool_call|>`` and
    ``<|/tool_call|>``: Phi-4-mini, which has been trained on both.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<|/tool_call|>")
    begins: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "functools[")

    def parse(self) -> Reading[None]:
        while True:
            if (yield from self.content(*self.begins)) == "functools[":
                yield from self.space()
                yield from self.rest_of_list()
            else:
                yield from self.space()
                yield from self.json_calls()
            yield from self.close("<|/tool_call|>")

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        if "functools" not in template and "<|/tool" in template:
            begin, end = "<|tool_call|>", "<|/tool_call|>"
            return CallFormat(_JSON_CALL, separator=", ", begin=f"{begin}[", end=f"]{end}", trigger=begin)
        return CallFormat(_JSON_CALL, separator=", ", begin="functools[", end="]", trigger="functools[")


class Llama3(JsonCalls):
    """``{"name": ..., "parameters": {...}}``, within text too, or after ``<|python_tag|>``: Llama 3.1 to 3.3.

    Only its keys and the name of a tool tell a call from other JSON. Objects within another object are no calls.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    begins: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)

    def parse(self) -> Reading[None]:
        while True:
            begin = yield from self.content("<|python_tag|>", "[", "{")
            try:
                yield from self._calls(begin)
            except OtherObject:
                yield from self.rest_of_object()

    def _calls(self, begin: str) -> Reading[None]:
        """Passes calls whose first marker or bracket was passed."""
        if begin != "{":
            yield from self.space()
            yield from self.expect("{")
        # The grammar of strict functions does not constrain text that begins with something else.
        free = self.has_content and begin != "<|python_tag|>"
        names = [name for name in self.tools if not (free and name in self.strict)]
        yield from self.json_call(bare=names, opened=True)
        yield from self.more_calls(*((",", "]") if begin == "[" else (";",)), bare=names)

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        one_only = "only supports single tool-calls" in template
        call = '{"name": "{name}", "parameters": {arguments}}'
        return CallFormat(call, separator=None if one_only else "; ")


class Mistral(JsonCalls):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]name[ARGS]{...}`` of newer models."""

    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    begins: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)

    def parse(self) -> Reading[None]:
        while True:
            yield from self.content("[TOOL_CALLS]")
            yield from self.space()
            if (yield from self.peek()) in "[{":
                yield from self.json_calls()
                continue
            name, call_id = (yield from self.name()), ""
            self.check_name(name)
            if (yield from self.optional("[CALL_ID]")) is not None:
                call_id = yield from self.name()
            yield from self.optional("[ARGS]")
            yield from self.space()
            yield from self.named_call(name, call_id or None)

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        if "[ARGS]" in template:
            call_id = "[CALL_ID]{id}" if "[CALL_ID]" in template else ""
            call = f"[TOOL_CALLS]{{name}}{call_id}[ARGS]{{arguments}}"
            return CallFormat(call, separator="", trigger="[TOOL_CALLS]")
        return CallFormat(_JSON_CALL, separator=", ", begin="[TOOL_CALLS][", end="]", trigger="[TOOL_CALLS]")


class DeepSeek(JsonCalls):
    """``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`` of V3.1 and later; V3 and R1 write
    ``function<｜tool▁sep｜>name`` and the arguments in a block of code.
    """

    _BEGIN, _CALL, _SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    _CALL_END, _END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _CALL, _SEPARATOR, _CALL_END, _END)
    begins: ClassVar[tuple[str, ...]] = (_BEGIN, _CALL)

    def parse(self) -> Reading[None]:
        while True:
            marker = yield from self.content(self._BEGIN, self._CALL)
            if marker == self._BEGIN:
                yield from self.space()
                yield from self.expect(self._CALL)
            yield from self._call()
            while (yield from self.close(self._CALL, self._END)) == self._CALL:
                yield from self._call()

    def _call(self) -> Reading[None]:
        name = (yield from self.until(self._SEPARATOR)).strip()
        in_block = name == "function"
        if in_block:
            name = (yield from self.until("\n")).strip()
            yield from self.space()
            yield from self.optional("```json")
            yield from self.space()
        yield from self.named_call(name)
        if in_block:
            yield from self.close("```")
        yield from self.close(self._CALL_END)

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        in_block = "```json" in template
        kind, before, after = ("function" + cls._SEPARATOR, "\n```json\n", "\n```") if in_block else ("", "", "")
        name = "{name}" if in_block else "{name}" + cls._SEPARATOR
        call = cls._CALL + kind + name + before + "{arguments}" + after + cls._CALL_END
        return CallFormat(call, "\n" if in_block else "", begin=cls._BEGIN, end=cls._END, trigger=cls._BEGIN)


class KimiK2(JsonCalls):
    """``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`` within a section: Kimi K2.

    The text before the arguments is the id of the call, which the model has been trained to see again.
    """

    _BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    _CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _CALL, _ARGUMENTS, _CALL_END, _END)
    begins: ClassVar[tuple[str, ...]] = (_BEGIN, _CALL)

    def parse(self) -> Reading[None]:
        while True:
            if (yield from self.content(self._BEGIN, self._CALL)) == self._BEGIN:
                yield from self.space()
                yield from self.expect(self._CALL)
            call_id = (yield from self.until(self._ARGUMENTS)).strip()
            yield from self.space()
            yield from self.named_call(call_id.removeprefix("functions.").partition(":")[0], call_id)
            yield from self.close(self._CALL_END)
            yield from self.close(self._END)

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        call = f"{cls._CALL}functions.{{name}}:{{index}}{cls._ARGUMENTS}{{arguments}}{cls._CALL_END}"
        return CallFormat(call, separator="", begin=cls._BEGIN, end=cls._END, trigger=cls._BEGIN)


class Harmony(JsonCalls):
    """``<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>``: gpt-oss.

    The reasoning parser of the format takes the other messages of an answer apart.
    """

    markers: ClassVar[tuple[str, ...]] = (START, CHANNEL, CONSTRAIN, MESSAGE, CALL, END)

    def parse(self) -> Reading[None]:
        if self.at_start:
            self.at_start, self._may_call = False, True
            if (yield from self.optional(" to=")) is not None:
                yield from self._call(" to=")
        while True:
            yield from self._call((yield from self.content(START, CHANNEL)))

    def _call(self, begin: str) -> Reading[None]:
        """Passes a call whose header has begun."""
        header = begin + (yield from self.until(MESSAGE))
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            raise Malformed
        yield from self.space()
        yield from self.named_call(recipient[1].removeprefix("functions."))
        yield from self.close(CALL, END)

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        # The model ends its turn with a call.
        return CallFormat(f"{TURN}{call_header('{name}')}{{arguments}}", answer=TURN + FINAL)


_RECIPIENT = re.compile(r"to=([^\s<]+)")
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_OUTSIDE = re.compile(r"[^\"'()\[\]{},]*")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Pythonic(ToolParser):
    """``[f(a=1, b="x"), g()]`` at the beginning or after ``<|python_start|>``: Llama 3.2 and 4.

    A call is held back until it is whole. Values are Python literals or JSON.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")
    begins: ClassVar[tuple[str, ...]] = ("<|python_start|>",)
    #: Whether calls need no marker where the text begins with them.
    bare: ClassVar[bool] = True
    #: Whether calls stand in a list, or on lines of their own.
    in_list: ClassVar[bool] = True

    def parse(self) -> Reading[None]:
        begin, end = self.markers
        if self.at_start and self.bare:
            self.at_start = False
            yield from self.space()
            if (yield from self.peek()) == "[":
                self._may_call = True
                yield from self._calls()
        while True:
            yield from self.content(begin)
            yield from self.space()
            if self.in_list or (yield from self.peek()) == "[":
                yield from self._calls()
            else:
                yield from self._lines(end)
            yield from self.close(end)

    def _lines(self, end: str) -> Reading[None]:
        """Passes calls on lines of their own up to the end marker, which may be missing."""
        yield from self._call()
        while True:
            yield from self.close(",")
            if (yield from self.peek()) == end[0] or not (yield from self.peek()).isalpha():
                return
            yield from self._call()

    def _calls(self) -> Reading[None]:
        yield from self.expect("[")
        yield from self.space()
        yield from self._call()
        while (yield from self.close(",", "]")) == ",":
            yield from self.space()
            yield from self._call()

    def _call(self) -> Reading[None]:
        name = yield from self.name()
        self.check_name(name)
        yield from self.space()
        yield from self.expect("(")
        values: dict[str, str] = {}
        while True:
            yield from self.space()
            if (yield from self.optional(")")) is not None:
                break
            key = yield from self.name()
            yield from self.space()
            yield from self.expect("=")
            values[key] = _as_json((yield from self._value()))
            yield from self.optional(",")
        self.start_call(name)
        self.add_arguments("{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in values.items()) + "}")

    def _value(self) -> Reading[str]:
        """Passes an expression up to the comma or bracket after it; returns its text."""
        start = self._position - self._emitted
        closing_brackets: list[str] = []
        while True:
            yield from self.matched(_OUTSIDE)
            character = yield from self.peek()
            if character in "\"'":
                yield from self.expect(character)
                while True:
                    yield from self.matched(_IN_STRING[character])
                    if (yield from self._next()) == character:
                        break
                    yield from self._next()
            elif character in _CLOSING:
                closing_brackets.append(_CLOSING[character])
                self._position += 1
            elif closing_brackets and character in (",", closing_brackets[-1]):
                if character != ",":
                    closing_brackets.pop()
                self._position += 1
            elif not closing_brackets and character in ",)":
                return self._text[self._emitted + start : self._position]
            else:
                raise Malformed

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        begin, end = ("[", "]") if cls.bare else (f"{cls.markers[0]}[", f"]{cls.markers[1]}")
        trigger = None if cls.bare else cls.markers[0]
        python = CallFormat("{name}({arguments})", ", ", begin, end, trigger, argument="{key}={value}", values="python")
        return replace(python, argument_separator=", ")


class Olmo3(Pythonic):
    """Calls such as ``f(a='x', b=true)``, each on a line, within ``<function_calls>``: OLMo 3."""

    markers: ClassVar[tuple[str, ...]] = ("<function_calls>", "</function_calls>")
    begins: ClassVar[tuple[str, ...]] = ("<function_calls>",)
    bare: ClassVar[bool] = False
    in_list: ClassVar[bool] = False

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        begin, end = cls.markers
        form = super().call_format(template)
        return replace(form, separator="\n", begin=f"{begin}\n", end=f"\n{end}", values="json")


class Lfm2(Pythonic):
    """``<|tool_call_start|>[f(a="x")]<|tool_call_end|>``: LFM2 and LFM2.5."""

    markers: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>", "<|tool_call_end|>")
    begins: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>",)
    bare: ClassVar[bool] = False


def _as_json(text: str) -> str:
    for read in (functools.partial(json.loads, strict=False), ast.literal_eval):
        try:
            return json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    raise Malformed
