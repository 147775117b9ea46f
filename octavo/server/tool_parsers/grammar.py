"""Grammars that calls of a format fulfil, in Lark's notation as llguidance has it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from typing import Any

from octavo.engine.tool_messages import CallFormat
from octavo.grammar.closed_objects import closed

#: JSON as templates write it to the model: on one line, so that a model cannot go on with spaces for ever. Keywords
#: that are not supported are errors, and a value fits exactly one schema of a ``oneOf``.
_JSON_OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_TEXT = r"TEXT: /(.|\n)*/"


class CallGrammar:
    """The grammar of calls of certain tools in one format."""

    def __init__(
        self,
        form: CallFormat,
        tools: Mapping[str, Mapping[str, Any]],
        special: Mapping[str, int],
        *,
        parallel: bool = True,
        strict: Set[str] = frozenset(),
    ) -> None:
        """``tools``: schemas of the parameters by name. ``special``: ids of the special tokens by text.

        ``strict``: tools whose schemas must be obeyed in all keywords.
        """
        self._form = form
        self._special = special
        self._repeats = parallel and form.separator is not None
        self._names = list(tools)
        self._rules = [
            f"arguments_{i}: %json {_arguments(schema, strict=name in strict)}"
            for i, (name, schema) in enumerate(tools.items())
        ]
        calls = [self._call(name, i, self._text(form.pieces(name)[0])) for i, name in enumerate(self._names)]
        self._rules.append(f"call: {' | '.join(calls)}")

    def calls(self) -> str:
        """One call or more, and nothing else."""
        return self._written(f"start: {self._text(self._form.begin)} call {self._more()} {self._text(self._form.end)}")

    def calls_or(self, answer: str) -> str:
        """Calls, or a text of another form: the right side of a rule."""
        form = self._form
        calls = f"{self._text(form.begin)} call {self._more()} {self._text(form.end)}"
        return self._written(f"start: calls | answer\ncalls: {calls}\nanswer: {answer}")

    def calls_in_text(self) -> str:
        """Any text, in which what begins as a call is one. Needs a ``trigger``."""
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
        rules = ["start: tag* rest", "rest: TEXT", _TEXT, free, f"first: {' | '.join(heads)}"]
        rules.append(f"tag: free first {self._more()} {self._text(form.end)}")
        return self._written("\n".join(rules))

    def _more(self) -> str:
        return f"({self._text(self._form.separator or '')} call)*" if self._repeats else ""

    def _call(self, name: str, index: int, head: str) -> str:
        return f"{head} arguments_{index} {self._text(self._form.pieces(name)[1])}"

    def _written(self, start: str) -> str:
        return "\n".join([start, *self._rules])

    def _text(self, text: str) -> str:
        """A text as a sequence of literals and special tokens."""
        special = [token for token in self._special if token in text]
        parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        return " ".join(self._token(part) if part in self._special else json.dumps(part) for part in parts if part)

    def _token(self, text: str) -> str:
        return text if re.fullmatch(r"<[^<>\s]+>", text) else f"<[{self._special[text]}]>"


def _arguments(schema: Mapping[str, Any], *, strict: bool) -> str:
    """The schema of arguments: objects have no properties that it does not name, as no function takes them."""
    options = {**_JSON_OPTIONS, "strict": True} if strict else _JSON_OPTIONS
    return json.dumps({**closed(dict(schema)), "x-guidance": options})
