"""Grammars of tool calls in the notation of a model, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from typing import Any

from octavo.core.errors import InvalidRequestError
from octavo.engine.chat_messages import CallFormat
from octavo.grammar.json_schema import forbid_extra_properties
from octavo.grammar.notations import lark_symbols
from octavo.server.tool_parsers.argument_values import JSON_OPTIONS, ArgumentRules

TEXT = r"TEXT: /(.|\n)*/"
#: Placeholders of ``CallFormat.call``, as regexes.
_PLACEHOLDERS = {"{index}": "/[0-9]{1,3}/", "{id}": "/[A-Za-z0-9]{9}/"}
_PLACEHOLDER = re.compile(r"(\{index\}|\{id\})")


class CallGrammar:
    """The Lark grammar of calls of certain tools in one format."""

    def __init__(
        self,
        form: CallFormat,
        tools: Mapping[str, Mapping[str, Any]],
        special: Mapping[str, int],
        *,
        parallel: bool = True,
        strict: Set[str] = frozenset(),
    ) -> None:
        """``tools``: parameter schemas by name; ``strict``: tools of which unsupported schema keywords are errors.

        ``special``: ids of the special tokens by text.

        Raises:
            InvalidRequestError: the format cannot enforce a strict tool; its path begins with the tool's name.
        """
        self._form = form
        self._special = special
        #: Further calls after the first.
        self._more = ""
        if parallel and form.separator is not None:
            self._more = f"({self._text(form.separator)} call)*"
        self._names = list(tools)
        self._rules: list[str] = []
        arguments = ArgumentRules(form, self._rules, self._text)
        for i, (name, schema) in enumerate(tools.items()):
            if form.argument is None:
                # Objects have only the properties that the schema names: functions take no others.
                options = {**JSON_OPTIONS, "strict": True} if name in strict else JSON_OPTIONS
                whole = json.dumps({**forbid_extra_properties(dict(schema)), "x-guidance": options})
                self._rules.append(f"arguments_{i}: %json {whole}")
                continue
            try:
                arguments.add(f"arguments_{i}", schema, strict=name in strict)
            except InvalidRequestError as e:
                raise e.at(name if e.path is None else f"{name}.{e.path}") from None
        calls = [self._call(name, i, self._text(form.pieces(name)[0])) for i, name in enumerate(self._names)]
        self._rules.append(f"call: {' | '.join(calls)}")

    def calls(self) -> str:
        """One or more calls and nothing else."""
        return self._rules_after(f"start: {self._calls()}")

    def calls_or(self, answer: str) -> str:
        """Calls, or an answer, which is the right side of a rule."""
        answer = f"{self._text(self._form.answer)} ({answer})"
        return self._rules_after(f"start: calls | answer\ncalls: {self._calls()}\nanswer: {answer}")

    def calls_in_text(self) -> str:
        """Any text in which everything that begins like a call is one. The format needs a ``trigger``."""
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
        rules = ["start: tag* rest", "rest: TEXT", TEXT, free, f"first: {' | '.join(heads)}"]
        rules.append(f"tag: free first {self._more} {self._text(form.end)}")
        return self._rules_after("\n".join(rules))

    def _calls(self) -> str:
        return f"{self._text(self._form.begin)} call {self._more} {self._text(self._form.end)}"

    def _call(self, name: str, index: int, head: str) -> str:
        return f"{head} arguments_{index} {self._text(self._form.pieces(name)[1])}"

    def _rules_after(self, start: str) -> str:
        return "\n".join([start, *self._rules])

    def _text(self, text: str) -> str:
        return " ".join(
            _PLACEHOLDERS[part] if part in _PLACEHOLDERS else lark_symbols(part, self._special)
            for part in _PLACEHOLDER.split(text)
        )
