# ruff: noqa: RUF001, RUF002 (tokens of DeepSeek)
"""The formats in which models write tool calls: first those of JSON objects, then Python, Gemma and Qwen3-Coder."""

from __future__ import annotations

import ast
import json
import re
from abc import abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar

from octavo.engine.chat_messages import HERMES, CallFormat
from octavo.server.tool_parsers.tool_parser import EndOfText, Malformed, Reading, ToolParser

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

    def named_call(self, name: str) -> Reading[None]:
        """Passes the arguments of a call whose name was passed, and emits the call."""
        self.check_name(name)
        if (yield from self.peek()) != "{":
            raise Malformed
        self.start_call(name)
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
    """Calls between two markers; the end marker may be missing."""

    ends: ClassVar[tuple[str, ...]]

    def parse(self) -> Reading[None]:
        while True:
            yield from self.content(*self.begins)
            yield from self.space()
            yield from self.json_calls()
            yield from self.close(*self.ends)


class Hermes(MarkedCalls):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3."""

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

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        return CallFormat(_JSON_CALL, separator=", ", begin="<|tool_call|>[", end="]", trigger="<|tool_call|>")


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
            name = yield from self.name()
            self.check_name(name)
            if (yield from self.optional("[CALL_ID]")) is not None:
                yield from self.name()
            yield from self.optional("[ARGS]")
            yield from self.space()
            yield from self.named_call(name)

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        if "[ARGS]" in template:
            return CallFormat("[TOOL_CALLS]{name}[ARGS]{arguments}", separator="", trigger="[TOOL_CALLS]")
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


_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_OUTSIDE = re.compile(r"[^\"'()\[\]{},]*")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Pythonic(ToolParser):
    """``[f(a=1, b="x"), g()]`` at the beginning or after ``<|python_start|>``: Llama 3.2 and 4.

    A call is held back until it is whole, as no marker tells it from other text.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")
    begins: ClassVar[tuple[str, ...]] = ("<|python_start|>",)

    def parse(self) -> Reading[None]:
        if self.at_start:
            self.at_start = False
            yield from self.space()
            if (yield from self.peek()) == "[":
                self._may_call = True
                yield from self._calls()
        while True:
            yield from self.content("<|python_start|>")
            yield from self.space()
            yield from self._calls()
            yield from self.close("<|python_end|>")

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


def _as_json(text: str) -> str:
    for read in (ast.literal_eval, json.loads):
        try:
            return json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    raise Malformed


_MAX_DEPTH = 64
_BARE = re.compile(r"[^,{}\[\]<>\s:]*")
_LITERALS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}


class TaggedCalls(ToolParser):
    """Emits a call when it is whole, so that a malformed one becomes content.

    If the text ends within a call after its name, the call is emitted with its whole arguments.
    """

    #: No argument has begun, so the text may end here without a loss.
    between = False

    @abstractmethod
    def read_members(self, name: str, members: dict[str, str]) -> Reading[None]:
        """Passes the arguments of a call and adds the JSON text of each value to ``members``, by name."""

    def read_call(self, name: str) -> Reading[None]:
        """Passes the rest of a call after its name, and emits it."""
        self.check_name(name)
        members: dict[str, str] = {}
        try:
            yield from self.read_members(name, members)
        except EndOfText:
            complete = self.between and not self._cut and self._position == len(self._text)
            self._emit_call(name, members, "}" if complete else "")
            raise
        self._emit_call(name, members, "}")

    def _emit_call(self, name: str, members: dict[str, str], end: str) -> None:
        self.start_call(name)
        pairs = [f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items()]
        self.add_arguments("{" + ", ".join(pairs) + end)


class Gemma(TaggedCalls):
    """``<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>`` of Gemma 4."""

    _BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _END, _QUOTE)
    begins: ClassVar[tuple[str, ...]] = (_BEGIN,)

    def parse(self) -> Reading[None]:
        while True:
            yield from self.content(self._BEGIN)
            yield from self.space()
            yield from self.expect("call:")
            yield from self._call()
            while (yield from self.close(self._END)) is None and (yield from self.optional("call:")) is not None:
                yield from self._call()

    def _call(self) -> Reading[None]:
        name = yield from self.name()
        yield from self.space()
        yield from self.expect("{")
        yield from self.read_call(name)

    def read_members(self, name: str, members: dict[str, str]) -> Reading[None]:
        while (yield from self._another("}")):
            key = yield from self._key()
            members[key] = _dumped((yield from self._value(0)))

    def _another(self, end: str) -> Reading[bool]:
        """Passes the separator before a value; false: the end was there."""
        yield from self.space()
        yield from self.optional(",")
        yield from self.space()
        return (yield from self.optional(end)) is None

    def _key(self) -> Reading[str]:
        if (yield from self.optional(self._QUOTE)) is not None:
            key = yield from self.until(self._QUOTE)
        else:
            key = yield from self.matched(_BARE)
        yield from self.space()
        yield from self.expect(":")
        if not key:
            raise Malformed
        return key

    def _value(self, depth: int) -> Reading[Any]:
        yield from self.space()
        if depth > _MAX_DEPTH:
            raise Malformed
        if (yield from self.optional(self._QUOTE)) is not None:
            return (yield from self.until(self._QUOTE, limit=_NO_LIMIT))
        if (yield from self.optional("{")) is not None:
            members: dict[str, Any] = {}
            while (yield from self._another("}")):
                key = yield from self._key()
                members[key] = yield from self._value(depth + 1)
            return members
        if (yield from self.optional("[")) is not None:
            items: list[Any] = []
            while (yield from self._another("]")):
                items.append((yield from self._value(depth + 1)))
            return items
        text = yield from self.matched(_BARE)
        if not text:  # nothing would be passed
            raise Malformed
        return _literal(text)


class FunctionGemma(Gemma):
    """``<start_function_call>call:f{a:<escape>text<escape>}<end_function_call>`` of FunctionGemma."""

    _BEGIN, _END, _QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _END, _QUOTE)
    begins: ClassVar[tuple[str, ...]] = (_BEGIN,)


class QwenCoder(TaggedCalls):
    """``<tool_call><function=f><parameter=a>text</parameter></function></tool_call>`` of Qwen3-Coder and Qwen 3.5.

    A value is text if the tool's schema says so, else JSON if it is valid, else text. Closing tags may be missing: an
    argument ends at the next tag.
    """

    _CALL, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
    _CALL_END, _FUNCTION_END, _PARAMETER_END = "</tool_call>", "</function>", "</parameter>"
    markers: ClassVar[tuple[str, ...]] = (_CALL, _CALL_END)
    begins: ClassVar[tuple[str, ...]] = (_CALL,)

    def parse(self) -> Reading[None]:
        while True:
            if (yield from self.content(self._CALL, self._FUNCTION)) == self._CALL:
                yield from self.space()
                yield from self.expect(self._FUNCTION)
            yield from self.read_call((yield from self.until(">")).strip())
            yield from self.close(self._CALL_END)

    def read_members(self, name: str, members: dict[str, str]) -> Reading[None]:
        while True:
            self.between = True
            yield from self.space()
            tags = (self._PARAMETER, self._FUNCTION_END, self._CALL_END, self._CALL, self._FUNCTION)
            tag = yield from self.expect(*tags)
            self.between = False
            if tag != self._PARAMETER:
                if tag != self._FUNCTION_END:
                    self._position -= len(tag)
                return
            key = (yield from self.until(">")).strip()
            ends = (self._PARAMETER_END, self._PARAMETER, self._FUNCTION_END, self._CALL_END)
            text, tag = yield from self.until_any(*ends, limit=_NO_LIMIT)
            if tag != self._PARAMETER_END:
                self._position -= len(tag)
            text = text.removeprefix("\n").removesuffix("\n")
            properties = self.tools[name].get("properties")
            schema = properties.get(key) if isinstance(properties, dict) else None
            is_text = isinstance(schema, dict) and schema.get("type") == "string"
            members[key] = _dumped(text if is_text else _literal(text))


_NO_LIMIT = 1 << 40


def _literal(text: str) -> Any:
    """The value of a JSON text, or of one of Python's constants; else the text itself."""
    text = text.strip()
    if text in _LITERALS:
        return _LITERALS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise Malformed from None
