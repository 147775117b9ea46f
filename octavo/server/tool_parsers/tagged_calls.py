"""Formats that write each argument in a notation of their own: Gemma, and the tags of Qwen3-Coder and Qwen 3.5."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from typing import Any, ClassVar

from octavo.server.tool_parsers.tool_parser import EndOfText, Malformed, Reading, ToolParser

_MAX_DEPTH = 64
_BARE = re.compile(r"[^,{}\[\]<>\s:]*")
_LITERALS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}


class TaggedCalls(ToolParser):
    """Gives a call when it is whole, as the text of one that goes wrong is content.

    Where the text ends within a call whose name is known, the call is given with those of its arguments that are whole.
    """

    #: Whether the text may end here without a loss: no argument has begun.
    between = False

    @abstractmethod
    def members(self, name: str, found: dict[str, str]) -> Reading[None]:
        """Passes the arguments of a call, to which they are added: the JSON text of each value by name."""

    def read_call(self, name: str) -> Reading[None]:
        """Passes a call whose name was passed, and gives it."""
        self.check_name(name)
        found: dict[str, str] = {}
        try:
            yield from self.members(name, found)
        except EndOfText:
            complete = self.between and not self._cut and self._position == len(self._text)
            self._give_call(name, found, "}" if complete else "")
            raise
        self._give_call(name, found, "}")

    def _give_call(self, name: str, found: dict[str, str], end: str) -> None:
        self.start_call(name)
        members = [f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in found.items()]
        self.add_arguments("{" + ", ".join(members) + end)


class Gemma(TaggedCalls):
    """``<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>`` of Gemma 4."""

    _BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _END, _QUOTE)
    begins: ClassVar[tuple[str, ...]] = (_BEGIN,)

    def parse(self) -> Reading[None]:
        """See ``ToolParser``."""
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

    def members(self, name: str, found: dict[str, str]) -> Reading[None]:
        """See ``TaggedCalls``."""
        while (yield from self._another("}")):
            key = yield from self._key()
            found[key] = _dumped((yield from self._value(0)))

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

    A value is text where the tool's schema says so, else JSON if it is that. Closing tags may be missing: an argument
    ends where the next tag stands.
    """

    _CALL, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
    _CALL_END, _FUNCTION_END, _PARAMETER_END = "</tool_call>", "</function>", "</parameter>"
    markers: ClassVar[tuple[str, ...]] = (_CALL, _CALL_END)
    begins: ClassVar[tuple[str, ...]] = (_CALL,)

    def parse(self) -> Reading[None]:
        """See ``ToolParser``."""
        while True:
            if (yield from self.content(self._CALL, self._FUNCTION)) == self._CALL:
                yield from self.space()
                yield from self.expect(self._FUNCTION)
            yield from self.read_call((yield from self.until(">")).strip())
            yield from self.close(self._CALL_END)

    def members(self, name: str, found: dict[str, str]) -> Reading[None]:
        """See ``TaggedCalls``."""
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
            found[key] = _dumped(self._typed(name, key, text.removeprefix("\n").removesuffix("\n")))

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
