"""Arguments in formats that are no JSON, where the tool's schema tells a value's type: reading, and grammars.

``read_value`` reads the text of a value. ``ArgumentRules`` writes Lark rules of the arguments that a schema allows, so
that what a grammar allows is read as a value of the schema.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from octavo.core.errors import InvalidRequestError
from octavo.engine.chat_messages import CallFormat
from octavo.grammar.ecma_regex import RegexError
from octavo.grammar.json_schema import forbid_extra_properties, target
from octavo.grammar.regex_automaton import search

Schema = Mapping[str, Any]

#: llguidance: JSON on one line, as chat templates write it, so that a model cannot write spaces forever. Unsupported
#: keywords are errors, and a value matches exactly one schema of a ``oneOf``.
JSON_OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_LITERALS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
_CONTAINERS: dict[type, str] = {str: "string", list: "array", dict: "object"}
_MAX_DEPTH = 32
_ANY: Schema = {}
#: Keywords of a schema whose branches are alternatives.
_BRANCHES = ("anyOf", "oneOf")
#: Keywords about an object as a whole that rules of its members cannot enforce.
_OF_OBJECTS = frozenset({
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
    "dependencies", "if", "then", "else", "not", "anyOf", "oneOf", "allOf", "unevaluatedProperties",
})  # fmt: skip


def literal(text: str) -> Any:
    """The value of a JSON text, or of one of Python's constants; else the text itself."""
    text = text.strip()
    if text in _LITERALS:
        return _LITERALS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def argument_schema(tool: Schema, key: str) -> Schema:
    properties = tool.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else _ANY


def read_value(text: str, schema: Schema, root: Schema) -> Any:
    """The value of an argument's text: a string if the schema takes strings only, else JSON if it is of its types.

    Where the schema says nothing, JSON if the text is valid JSON. Containers may be Python literals.
    """
    types = _types(schema, root)
    if types == {"string"}:
        return text
    value = literal(text)
    if not types or types & _types_of(value):
        return text if isinstance(value, str) and types else value
    if types & {"array", "object"}:
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return text
        if isinstance(value, (list, dict)) and types & _types_of(value):
            return value
    return text


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"integer", "number"} if value.is_integer() else {"number"}
    return {"null"} if value is None else {_CONTAINERS[type(value)]}


def _types(schema: Schema, root: Schema) -> frozenset[str]:
    """The JSON types of a schema's values; empty: any."""
    types = set[str]()
    for branch in _branches(schema, root):
        if not (named := _named_types(branch)):
            return frozenset()
        types |= named
    return frozenset(types)


def _named_types(branch: Schema) -> set[str]:
    kind = branch.get("type")
    if isinstance(kind, str):
        return {kind}
    values = _values(branch)
    return set() if values is None else {name for value in values for name in _types_of(value)}


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _branches(schema: Any, root: Schema, depth: int = 0) -> Iterator[Schema]:
    """The alternatives of a schema, each of one type, of some values, or of any type."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        yield _ANY
        return
    if "$ref" in schema:
        found = target(dict(root), {"$ref": schema["$ref"]})
        resolved = found[1] if found is not None else None
        yield from _branches(resolved, root, depth + 1)
        return
    for keyword in (*_BRANCHES, "allOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and options and (keyword != "allOf" or len(options) == 1):
            rest = {name: value for name, value in schema.items() if name != keyword}
            for option in options:
                whole = option if isinstance(option, Mapping) and "$ref" in option else {**rest, **_mapping(option)}
                yield from _branches(whole, root, depth + 1)
            return
    kinds = schema.get("type")
    if isinstance(kinds, list):
        for kind in kinds:
            yield {**schema, "type": kind}
    else:
        yield schema


def _mapping(value: Any) -> Schema:
    return value if isinstance(value, Mapping) else _ANY


class ArgumentRules:
    """Adds the rules of the arguments of functions to ``rules``."""

    def __init__(self, form: CallFormat, rules: list[str], symbols_of: Callable[[str], str]) -> None:
        """``symbols_of`` makes symbols of a text: literals and special tokens."""
        self._form, self._rules, self._symbols_of = form, rules, symbols_of
        self._count = 0
        self._any: str | None = None
        #: Rules of quoted values by the schema's text.
        self._quoted_rules: dict[str, str] = {}

    def add(self, name: str, tool: Schema, *, strict: bool) -> None:
        """Adds a rule ``name`` of the arguments that a tool's schema allows, in the schema's order.

        With ``strict``, raises InvalidRequestError for keywords that the rule does not enforce.
        """
        root: Schema = forbid_extra_properties(dict(tool))
        if strict and (kept := sorted(_OF_OBJECTS & root.keys())):
            raise InvalidRequestError("cannot be enforced in the notation of this model's calls", path=kept[0])
        properties = root.get("properties")
        required = root.get("required", [])
        members = {**_mapping(properties), **{key: _ANY for key in required if key not in _mapping(properties)}}
        if not members:
            self._rules.append(f"{name}: {self._any_arguments(root)}")
            return
        arguments = [
            (self._argument(key, schema, root, strict=strict), key in required) for key, schema in members.items()
        ]
        self._rules.append(f"{name}: {self._sequence(arguments)}")

    def _sequence(self, arguments: list[tuple[str, bool]]) -> str:
        """Arguments in their order, with separators between; pairs of a symbol, and whether it is required."""
        if not self._form.argument_separator:
            return " ".join(symbol if required else f"({symbol})?" for symbol, required in arguments)
        separator = self._symbols_of(self._form.argument_separator)
        first, rest = '""', '""'  # of the arguments from one on: where none precedes, and where some do
        for symbol, required in reversed(arguments):
            begun, following = f"{symbol} {rest}", f"{separator} {symbol} {rest}"
            first = self._rule(begun if required else f"{begun} | {first}")
            rest = self._rule(following if required else f"{following} | {rest}")
        return first

    def _rule(self, right: str, *, terminal: bool = False) -> str:
        self._count += 1
        name = f"TEXT_{self._count}" if terminal else f"part_{self._count}"
        self._rules.append(f"{name}: {right}")
        return name

    def _argument(self, key: str, schema: Any, root: Schema, *, strict: bool) -> str:
        options = []
        for is_text, value in self._values(schema, root, key, strict=strict):
            before, after = self._form.argument_pieces(key, is_text=is_text).split("{value}")
            options.append(f"{self._symbols_of(before)} {value} {self._symbols_of(after)}")
        return self._rule(" | ".join(options))

    def _any_arguments(self, root: Schema) -> str:
        if root.get("additionalProperties") is False:
            return '""'
        before, after = self._form.argument_pieces("\0", is_text=True).split("{value}")
        start, end = before.split("\0")
        value = self._quoted(_ANY, root, 0) if self._form.values == "quoted" else self._plain(_ANY, root)
        argument = self._rule(
            f"{self._symbols_of(start)} /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {self._symbols_of(end)} {value} "
            f"{self._symbols_of(after)}"
        )
        if not self._form.argument_separator:
            return f"({argument})*"
        return f"({argument} ({self._symbols_of(self._form.argument_separator)} {argument})*)?"

    # --- values -----------------------------------------------------------------------------------------------------

    def _values(self, schema: Any, root: Schema, key: str, *, strict: bool) -> Iterator[tuple[bool, str]]:
        """The symbols of a value's alternatives, and whether each is a string."""
        if strict:
            self._check(schema, root, key)
        if self._form.values == "quoted":
            yield False, self._quoted(schema, root, 0)
            return
        for branch in _branches(schema, root):
            values = _values(branch)
            is_text = branch.get("type") == "string" and values is None
            if self._form.values == "text" and (is_text or (values is None and not _named_types(branch))):
                yield True, self._text(branch)
            elif self._form.values == "text" and values is not None:
                for value in values:
                    yield isinstance(value, str), self._symbols_of(self._form.value_text(value))
            else:
                yield False, self._plain(branch, root)

    def _check(self, schema: Any, root: Schema, key: str) -> None:
        """Refuses keywords of strings that are not enforced where a string is no JSON."""
        for branch in _branches(schema, root) if self._form.values in ("text", "quoted") else ():
            if "format" in branch and branch.get("type") == "string":
                problem = "cannot be enforced in the notation of this model's calls"
                raise InvalidRequestError(problem, path=f"properties.{key}.format")

    def _plain(self, schema: Schema, root: Schema) -> str:
        """A value as JSON, or as Python's constant."""
        if self._form.values == "python" and _values(schema) is None:
            if schema.get("type") == "boolean":
                return '("True" | "False")'
            if schema.get("type") == "null":
                return '"None"'
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return self._rule(f"%json {json.dumps({**schema, **definitions, 'x-guidance': JSON_OPTIONS})}")

    def _text(self, schema: Schema) -> str:
        """A string as it is: of the schema's length and pattern, without what ends a value."""
        least, most = _bound(schema, "minLength", 0), _bound(schema, "maxLength", None)
        parts = [r"/(.|\n)*/" if not least and most is None else rf"/(.|\n){{{least},{'' if most is None else most}}}/"]
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            try:
                parts += [f"/{part}/" for part in search(pattern)]
            except RegexError as e:
                raise InvalidRequestError(str(e), path="pattern") from None
        stops = "|".join(map(_escape, dict.fromkeys(stop for stop in (*self._form.stops, self._form.quote) if stop)))
        if stops:
            parts.append(rf"~/(.|\n)*({stops})(.|\n)*/")
        if self._form.values == "text":
            parts.append(r"~/\n(.|\n)*|(.|\n)*\n/")  # a line break at an end belongs to the notation
        return self._rule(" & ".join(parts), terminal=True)

    def _quoted(self, schema: Any, root: Schema, depth: int) -> str:
        """A rule of values in the notation with quotes; one for each schema, as schemas may contain themselves."""
        key = json.dumps(schema, sort_keys=True, default=str)
        if key in self._quoted_rules:
            return self._quoted_rules[key]
        self._count += 1
        name = self._quoted_rules[key] = f"quoted_{self._count}"
        options = [self._quoted_branch(branch, root, depth) for branch in _branches(schema, root)]
        self._rules.append(f"{name}: {' | '.join(options)}")
        return name

    def _quoted_branch(self, branch: Schema, root: Schema, depth: int) -> str:
        quote = self._symbols_of(self._form.quote)
        if (values := _values(branch)) is not None:
            return " | ".join(self._symbols_of(self._form.value_text(value)) for value in values)
        kind = branch.get("type")
        if kind is None or depth > _MAX_DEPTH:
            if branch.get("properties") or depth > _MAX_DEPTH:
                kind = "object"
            else:
                kinds = ("string", "number", "boolean", "null", "array", "object")
                return " | ".join(self._quoted({"type": each}, root, depth + 1) for each in kinds)
        if kind == "string":
            return f"{quote} {self._text(branch)} {quote}"
        if kind == "array":
            item = self._quoted(branch.get("items", _ANY), root, depth + 1)
            least, most = _bound(branch, "minItems", 0) or 0, _bound(branch, "maxItems", None)
            if most == 0:
                return '"[]"'
            more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
            return f'"[" {item} {more} "]"' if least else f'"[]" | "[" {item} {more} "]"'
        if kind == "object":
            return f'"{{" {self._quoted_members(branch, root, depth)} "}}"'
        return self._plain(branch, root)

    def _quoted_members(self, branch: Schema, root: Schema, depth: int) -> str:
        required = branch.get("required", [])
        properties = _mapping(branch.get("properties"))
        members = [
            (self._rule(f"{self._symbols_of(f'{key}:')} {self._quoted(schema, root, depth + 1)}"), key in required)
            for key, schema in properties.items()
        ]
        if members:
            return self._sequence(members)
        if branch.get("additionalProperties") is False:
            return '""'
        value = self._quoted(branch.get("additionalProperties", _ANY), root, depth + 1)
        member = self._rule(f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ ":" {value}')
        return f'({member} ("," {member})*)?'


def _bound(schema: Schema, keyword: str, default: int | None) -> int | None:
    value = schema.get(keyword, default)
    return int(value) if isinstance(value, (int, float)) and value >= 0 else default


def _escape(text: str) -> str:
    """A text within a regex of Lark."""
    return re.sub(r"/", r"\\/", re.escape(text).replace("\n", "n"))
