# ruff: noqa: RUF001, RUF002 (tokens of DeepSeek)
"""Formats whose calls are JSON objects: Hermes, Llama 3, Mistral, Granite, Phi-4-mini, DeepSeek."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import ClassVar

from octavo.engine.tool_messages import HERMES, CallFormat
from octavo.server.tool_parsers.tool_parser import Malformed, Reading, ToolParser

_SEPARATORS = re.compile(r"[\s,;]*")
#: Keys of a call. A bare object with another one before its name is some other object.
_KEYS = frozenset({"name", "type", "id", "arguments", "parameters"})


class OtherObject(Malformed):
    """An object that is no call. What was read of it ends within it, and not within a string."""


class JsonCalls(ToolParser):
    """Reads objects such as ``{"name": "f", "arguments": {...}}``, with the keys in any order."""

    def json_call(self, *, bare: Collection[str] | None = None, opened: bool = False) -> Reading[None]:
        """Passes one object, whose ``}`` may be missing, and gives its call.

        ``bare``: it has no marker before it. It needs arguments, and its name must be one of these; as soon as it is no
        call, ``OtherObject`` is raised. ``opened``: its ``{`` was passed.
        """
        if not opened:
            yield from self.expect("{")
        name: str | None = None
        held: str | None = None
        given = False
        while True:
            yield from self.matched(_SEPARATORS)
            if (yield from self.optional("}")) is not None:
                break
            if given and (yield from self.peek()) != '"':
                break
            key = yield from self._key()
            if bare is not None and name is None and key not in _KEYS:
                raise OtherObject
            if key == "name" and name is None:
                name = yield from self.json_string()
                if bare is not None and name not in bare:
                    raise OtherObject
                self.check_name(name)
            elif key in ("arguments", "parameters") and held is None and not given:
                if name is not None and (yield from self.peek()) == "{":
                    self.start_call(name)
                    yield from self.arguments()
                    given = True
                else:
                    held = yield from self.json_value()
            else:
                yield from self.json_value()
        if name is None or (bare is not None and held is None and not given):
            raise Malformed
        if not given:
            text = _as_object(held)
            self.start_call(name)
            self.add_arguments(text)
        self.skip()

    def json_calls(self) -> Reading[None]:
        """Passes such an object, or a list of them, whose end may be missing."""
        if (yield from self.optional("[")) is None:
            yield from self.json_call()
            return
        yield from self.space()
        yield from self.rest_of_list()

    def rest_of_list(self) -> Reading[None]:
        """Passes calls up to the ``]``, which may be missing."""
        yield from self.json_call()
        while True:
            separator = yield from self.close(",", "]")
            if separator == "]":
                return
            yield from self.space()
            if separator is None and (yield from self.peek()) != "{":
                return
            yield from self.json_call()

    def _key(self) -> Reading[str]:
        key = yield from self.json_string()
        yield from self.space()
        yield from self.expect(":")
        yield from self.space()
        return key


def _as_object(value: str | None) -> str:
    """The text of an object: some models write it as JSON text within a string, or leave it out."""
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
    """Calls between two markers, of which the one at the end may be missing."""

    ends: ClassVar[tuple[str, ...]]

    def parse(self) -> Reading[None]:
        """See ``ToolParser``."""
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
        """See ``ToolParser``."""
        return HERMES


class Granite(MarkedCalls):
    """``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``, or the same after ``<tool_call>``: Granite 3."""

    markers: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>", "<|/tool_call|>", "</tool_call>")
    begins: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>")
    ends: ClassVar[tuple[str, ...]] = ("<|/tool_call|>", "</tool_call>")

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        """See ``ToolParser``."""
        call = '{"name": "{name}", "arguments": {arguments}}'
        return CallFormat(call, separator=", ", begin="<|tool_call|>[", end="]", trigger="<|tool_call|>")


class Phi4Mini(JsonCalls):
    """``functools[{"name": ..., "arguments": {...}}, ...]``, or such a list between ``<|tool_call|>`` and
    ``<|/tool_call|>``: Phi-4-mini, which has been trained on both.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<|/tool_call|>")
    begins: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "functools[")

    def parse(self) -> Reading[None]:
        """See ``ToolParser``."""
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
        """See ``ToolParser``."""
        call = '{"name": "{name}", "arguments": {arguments}}'
        if "functools" not in template and "<|/tool" in template:
            begin, end = "<|tool_call|>", "<|/tool_call|>"
            return CallFormat(call, separator=", ", begin=f"{begin}[", end=f"]{end}", trigger=begin)
        return CallFormat(call, separator=", ", begin="functools[", end="]", trigger="functools[")


class Llama3(JsonCalls):
    """``{"name": ..., "parameters": {...}}``, within text too, or after ``<|python_tag|>``: Llama 3.1 to 3.3.

    Nothing but its keys and the name of a tool tells a call from other JSON. Objects within one that is no call are
    none either.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    begins: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)

    def parse(self) -> Reading[None]:
        """See ``ToolParser``."""
        while True:
            begin = yield from self.content("<|python_tag|>", "[", "{")
            try:
                yield from self._calls(begin)
            except OtherObject:
                yield from self.rest_of_object()

    def _calls(self, begin: str) -> Reading[None]:
        """Passes calls of which the marker or the bracket at the beginning was passed."""
        if begin != "{":
            yield from self.space()
            yield from self.expect("{")
        # The grammar of strict functions leaves text that does not begin with a call free.
        free = self.has_content and begin != "<|python_tag|>"
        names = [name for name in self.tools if not (free and name in self.strict)]
        yield from self.json_call(bare=names, opened=True)
        while True:
            separator = yield from self.close(*((",", "]") if begin == "[" else (";",)))
            if separator == "]":
                return
            yield from self.space()
            if separator is None and (yield from self.peek()) != "{":
                return
            yield from self.json_call(bare=names)

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        """See ``ToolParser``."""
        one_only = "only supports single tool-calls" in template
        call = '{"name": "{name}", "parameters": {arguments}}'
        return CallFormat(call, separator=None if one_only else "; ")


class Mistral(JsonCalls):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]name[ARGS]{...}`` of newer models."""

    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    begins: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)

    def parse(self) -> Reading[None]:
        """See ``ToolParser``."""
        while True:
            yield from self.content("[TOOL_CALLS]")
            yield from self.space()
            if (yield from self.peek()) in "[{":
                yield from self.json_calls()
            else:
                yield from self._named_call()

    def _named_call(self) -> Reading[None]:
        name = yield from self.name()
        self.check_name(name)
        if (yield from self.optional("[CALL_ID]")) is not None:
            yield from self.name()
        yield from self.optional("[ARGS]")
        yield from self.space()
        if (yield from self.peek()) != "{":
            raise Malformed
        self.start_call(name)
        yield from self.arguments()

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        """See ``ToolParser``."""
        if "[ARGS]" in template:
            return CallFormat("[TOOL_CALLS]{name}[ARGS]{arguments}", separator="", trigger="[TOOL_CALLS]")
        call = '{"name": "{name}", "arguments": {arguments}}'
        return CallFormat(call, separator=", ", begin="[TOOL_CALLS][", end="]", trigger="[TOOL_CALLS]")


class DeepSeek(JsonCalls):
    """``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`` of V3.1 and later; V3 and R1 write
    ``function<｜tool▁sep｜>name`` and the arguments in a block of code.
    """

    _BEGIN, _CALL, _SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    _CALL_END, _END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _CALL, _SEPARATOR, _CALL_END, _END)
    begins: ClassVar[tuple[str, ...]] = (_BEGIN, _CALL)

    def parse(self) -> Reading[None]:
        """See ``ToolParser``."""
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
        self.check_name(name)
        if (yield from self.peek()) != "{":
            raise Malformed
        self.start_call(name)
        yield from self.arguments()
        if in_block:
            yield from self.close("```")
        yield from self.close(self._CALL_END)

    @classmethod
    def call_format(cls, template: str) -> CallFormat:
        """See ``ToolParser``."""
        in_block = "```json" in template
        kind, before, after = ("function" + cls._SEPARATOR, "\n```json\n", "\n```") if in_block else ("", "", "")
        name = "{name}" if in_block else "{name}" + cls._SEPARATOR
        call = cls._CALL + kind + name + before + "{arguments}" + after + cls._CALL_END
        return CallFormat(call, "\n" if in_block else "", begin=cls._BEGIN, end=cls._END, trigger=cls._BEGIN)
