"""Calls written as Python: ``[f(a=1, b="x"), g()]``."""

from __future__ import annotations

import ast
import json
import re
from typing import ClassVar

from octavo.server.tool_parsers.tool_parser import Malformed, Reading, ToolParser

_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_OUTSIDE = re.compile(r"[^\"'()\[\]{},]*")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Pythonic(ToolParser):
    """A list of calls as Python writes them, at the beginning or within ``<|python_start|>``: Llama 3.2 and 4.

    A call is held back until it is whole, as it has no marker that would tell it from other text.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")
    begins: ClassVar[tuple[str, ...]] = ("<|python_start|>",)

    def parse(self) -> Reading[None]:
        """See ``ToolParser``."""
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
        """The text of an expression, up to the comma or bracket after it."""
        start = self._position - self._given
        open_ones: list[str] = []
        while True:
            yield from self.matched(_OUTSIDE)
            character = yield from self.peek()
            if character in "\"'":
                yield from self._pass_quoted(character)
            elif character in _CLOSING:
                open_ones.append(_CLOSING[character])
                self._position += 1
            elif open_ones and character in (",", open_ones[-1]):
                if character != ",":
                    open_ones.pop()
                self._position += 1
            elif not open_ones and character in ",)":
                return self._text[self._given + start : self._position]
            else:
                raise Malformed

    def _pass_quoted(self, quote: str) -> Reading[None]:
        yield from self.expect(quote)
        while True:
            yield from self.matched(_IN_STRING[quote])
            if (yield from self._next()) == quote:
                return
            yield from self._next()


def _as_json(text: str) -> str:
    """A literal of Python, or of JSON, as JSON."""
    for read in (ast.literal_eval, json.loads):
        try:
            return json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    raise Malformed
