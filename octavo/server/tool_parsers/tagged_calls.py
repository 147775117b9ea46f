"""Formats that write each argument in a notation of their own: Gemma, and the tags of Qwen3-Coder and Qwen 3.5."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from octavo.server.tool_parsers.tool_parser import Malformed, Reading, ToolParser

_MAX_DEPTH = 64
_BARE = re.compile(r"[^,{}\[\]<>\s:]*")
_LITERALS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}


class Gemma(ToolParser):
    """``<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>`` of Gemma 4."""

    _BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _END, _QUOTE)

    def parse(self) -> Reading[None]:
        """See ``ToolParser``."""
        while True:
            yield from self.content(self._BEGIN)
            yield from self.space()
            yield from self._call()
            while (yield from self.close(self._END)) is None and (yield from self.optional("call:")) is not None:
                yield from self._arguments()

    def _call(self) -> Reading[None]:
        yield from self.expect("call:")
        yield from self._arguments()

    def _arguments(self) -> Reading[None]:
        name = yield from self.name()
        yield from self.space()
        yield from self.expect("{")
        self.start_call(name)
        self.add_arguments("{")
        separator = ""
        while (yield from self._another("}")):
            key = yield from self._key()
            value = yield from self._value(0)
            self.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {_dumped(value)}")
            self.skip()
            separator = ", "
        self.add_arguments("}")
        self.skip()

    def _another(self, end: str) -> Reading[bool]:
        """Passes what stands between values; false at the end."""
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
        return _literal((yield from self.matched(_BARE)))


class FunctionGemma(Gemma):
    """``<start_function_call>call:f{a:<escape>text<escape>}<end_function_call>`` of FunctionGemma."""

    _BEGIN, _END, _QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _END, _QUOTE)


class QwenCoder(ToolParser):
    """``<tool_call><function=f><parameter=a>text</parameter></function></tool_call>`` of Qwen3-Coder and Qwen 3.5.

    A value is text where the tool's schema says so, else JSON if it is that.
    """

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def parse(self) -> Reading[None]:
        """See ``ToolParser``."""
        while True:
            if (yield from self.content("<tool_call>", "<function=")) == "<tool_call>":
                yield from self.space()
                yield from self.expect("<function=")
            yield from self._call()
            yield from self.close("</tool_call>")

    def _call(self) -> Reading[None]:
        name = (yield from self.until(">")).strip()
        self.start_call(name)
        self.add_arguments("{")
        separator = ""
        while (yield from self.close("<parameter=", "</function>")) == "<parameter=":
            key = (yield from self.until(">")).strip()
            text = yield from self.until("</parameter>", limit=_NO_LIMIT)
            value = self._typed(name, key, text.removeprefix("\n").removesuffix("\n"))
            self.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {_dumped(value)}")
            self.skip()
            separator = ", "
        self.add_arguments("}")

    def _typed(self, name: str, key: str, text: str) -> Any:
        properties = self.tools[name].get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        kind = schema.get("type") if isinstance(schema, dict) else None
        if kind == "string":
            return text
        return _literal(text)


_NO_LIMIT = 1 << 40


def _literal(text: str) -> Any:
    """A value of JSON, or of Python where it is named otherwise; else the text itself."""
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
