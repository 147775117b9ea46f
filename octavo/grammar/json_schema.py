"""JSON schemas: which keywords are supported, and what stands where.

Keywords are those of drafts 7 and 2020-12 (json-schema.org). A schema is read like llguidance reads it: from its root,
along all keywords that hold schemas and along references. ``schema_dialects`` rewrites what llguidance does not follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.grammar.ecma_regex import RegexError
from octavo.grammar.schema_dialects import Dialect, Schema, has_large_number, translate_patterns

#: Keywords that outputs obey, and what of each is not supported.
SUPPORTED = {
    "$ref": "within the schema; nothing is fetched",
    "additionalItems": "",
    "additionalProperties": "equal names may come twice, all with valid values",
    "allOf": "",
    "anyOf": "",
    "const": "numbers of less than 2^63",
    "enum": "numbers of less than 2^63",
    "exclusiveMaximum": "true beside maximum, too (draft 4)",
    "exclusiveMinimum": "true beside minimum, too (draft 4)",
    "format": "date, date-time, time, duration, email, hostname, ipv4, ipv6, uuid, uuid1 to uuid8, uri, byte, base64, "
    "json-pointer, relative-json-pointer, e164, ulid, int8 to uint64; others left out",
    "items": "",
    "maxItems": "",
    "maxLength": "",
    "maxProperties": "where all of properties is required, else left out",
    "maximum": "values of at least 2^63 are not written",
    "minItems": "",
    "minLength": "",
    "minProperties": "where all of properties is required, and at most one more than required, else left out",
    "minimum": "values of at least 2^63 are not written; a larger bound is left out",
    "multipleOf": "above 0 and less than 2^63",
    "not": "any value, a type, constants, a pattern of a text, or one required property; else left out",
    "oneOf": "where no value can be of two of them, as far as that is easily seen, such as by a const",
    "pattern": "of ECMA-262; with a back-reference, or large look-around, left out",
    "patternProperties": "patterns that no name has two of; names as of additionalProperties",
    "prefixItems": "",
    "properties": "in the order of the schema",
    "propertyNames": "a list of names, a pattern or a length, else left out",
    "required": "",
    "type": "",
    "unevaluatedProperties": "where it does not depend on the value what is evaluated, else left out",
    "uniqueItems": "false, or with at most one item; else left out",
}
#: Keywords that restrict nothing.
ANNOTATIONS = frozenset(
    {
        "$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "contentEncoding", "contentMediaType",
        "contentSchema", "default", "definitions", "deprecated", "description", "examples", "readOnly", "title",
        "writeOnly",
    }
)  # fmt: skip
#: Keywords that would restrict outputs and are left out; the last line those of older drafts.
RELAXED = frozenset(
    {
        "$dynamicAnchor", "$dynamicRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else",
        "if", "maxContains", "minContains", "then", "unevaluatedItems",
        "$recursiveAnchor", "$recursiveRef", "disallow", "divisibleBy", "extends",
    }
)  # fmt: skip

#: Control characters without an escape of their own, in JSON; outputs do not have them, see ``sources``.
_UNSPELLABLE = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:[01]|7f)")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_IN_MAPPINGS = ("properties", "patternProperties")
_IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("additionalProperties", "additionalItems", "items")
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_TEXTS = frozenset({"$ref", "pattern", "format"})
_WITH_NUMBERS = _COUNTS | _NUMBERS | {"const", "enum"}


#: Characters of a path in messages.
_LONGEST_PATH = 300


def read_json(text: str | bytes, place: str) -> Any:
    """What a JSON text in a request says.

    Raises:
        InvalidRequestError: it is none; the message begins with ``place``.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
        raise InvalidRequestError(f"{place} is not valid JSON: {e}") from None


class SchemaError(InvalidRequestError):
    """An error at a place of a schema: a JSON pointer within a field."""

    def __init__(self, field: str, path: str, message: str) -> None:
        if len(path) > _LONGEST_PATH:
            path = f"{path[: _LONGEST_PATH // 2]}...{path[-_LONGEST_PATH // 2 :]}"
        super().__init__(f"{field} at {path}: {message}" if path else f"{field}: {message}")


def prepare(root: Schema, field: str, relaxed: list[str], *, strict: bool = False) -> None:
    """Checks a schema as far as its own text says what is wrong, and writes it as llguidance reads it; in place.

    Args:
        field: the schema's, for messages.
        relaxed: to which the JSON pointers of keywords are added that are left out, as outputs cannot obey them.
        strict: such keywords are errors.

    Raises:
        SchemaError: a keyword's value is none of it, or ``strict`` refuses one.
    """

    def report(path: str, keyword: str) -> None:
        place = f"{path}/{_escaped(keyword)}"
        if strict:
            raise SchemaError(field, place, f"{keyword} cannot be enforced here, which strict demands")
        relaxed.append(place)

    old = "draft-0" in str(root.get("$schema"))
    dialect = Dialect(root, report, lambda schema: _resolved(root, schema))
    visited: list[tuple[str, Schema]] = []
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        path, schema = waiting.pop()
        if isinstance(schema, bool) or id(schema) in seen:
            continue
        if not isinstance(schema, dict):
            raise SchemaError(field, path, f"a schema must be an object or a boolean, not {schema!r:.100}")
        seen.add(id(schema))
        visited.append((path, schema))
        if old and "$ref" in schema and "$id" in schema:
            raise SchemaError(field, f"{path}/$id", "$id beside $ref, which drafts to 7 ignore, is not supported")
        dialect.rewrite(path, schema)
        for keyword, value in list(schema.items()):
            _check(field, path, schema, keyword, value)
        waiting += reversed([(path + step, child) for step, child in subschemas(schema)])
        if (referred := target(root, schema)) is not None:
            waiting.append(referred)
    for path, schema in visited:
        try:
            translate_patterns(path, schema, report)
        except RegexError as e:
            raise SchemaError(field, path, str(e)) from None


def _resolved(root: Schema, schema: Schema) -> Schema:
    """What a schema that only refers to another means."""
    seen: set[int] = set()
    while id(schema) not in seen and (referred := target(root, schema)) is not None:
        seen.add(id(schema))
        if not isinstance(referred[1], dict):
            break
        schema = referred[1]
    return schema


def every_schema(root: Schema) -> list[Schema]:
    """All schemas that values are held to, the root first."""
    found: dict[int, Schema] = {}
    waiting: list[Any] = [root]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            waiting += [child for _, child in subschemas(schema)]
            if (referred := target(root, schema)) is not None:
                waiting.append(referred[1])
    return [*found.values()]


def subschemas(schema: Schema) -> Iterator[tuple[str, Any]]:
    """The schemas directly within a schema, and the step of a JSON pointer to each; definitions are not among them."""
    for keyword, value in schema.items():
        if keyword in _IN_MAPPINGS and isinstance(value, dict):
            for name, child in value.items():
                yield f"/{keyword}/{_escaped(name)}", child
        elif keyword in _IN_LISTS and isinstance(value, list):
            for i, child in enumerate(value):
                yield f"/{keyword}/{i}", child
        elif keyword in _SINGLE:
            yield f"/{keyword}", value


def _check(field: str, path: str, schema: Schema, keyword: str, value: Any) -> None:
    place = f"{path}/{_escaped(keyword)}"
    if keyword in _COUNTS:
        if isinstance(value, float) and value.is_integer():
            schema[keyword] = value = int(value)
        _expect(field, place, _is_number(value, int) and value >= 0, "a whole number from 0", value)
    elif keyword in _NUMBERS:
        _expect(field, place, _is_number(value, (int, float)), "a number", value)
        _expect(field, place, keyword != "multipleOf" or value > 0, "above 0", value)
    elif keyword == "uniqueItems":  # others have been rewritten
        _expect(field, place, False, "a boolean", value)
    elif keyword in _TEXTS:
        _expect(field, place, isinstance(value, str), "a text", value)
    elif keyword == "type":
        types = value if isinstance(value, list) else [value]
        _expect(field, place, bool(types) and all(kind in _TYPES for kind in types), f"of {', '.join(_TYPES)}", value)
    elif keyword in ("properties", "patternProperties", "$defs", "definitions"):
        _expect(field, place, isinstance(value, dict), "an object of schemas", value)
    elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
        _expect(field, place, isinstance(value, list) and bool(value), "a list of schemas", value)
    elif keyword == "enum":
        _expect(field, place, isinstance(value, list) and bool(value), "a list of values, with at least one", value)
    elif keyword == "required":
        names = isinstance(value, list) and all(isinstance(name, str) for name in value)
        _expect(field, place, names, "a list of names", value)
    if keyword in ("const", "enum", "required", "properties"):
        texts = json.dumps(list(value) if keyword == "properties" else value)
        _expect(
            field,
            place,
            not _UNSPELLABLE.search(texts),
            "without control characters that JSON spells as numbers",
            value,
        )
    if keyword in _WITH_NUMBERS:
        _expect(field, place, not has_large_number(value), "made of numbers of less than 2^63", value)


def target(root: Schema, schema: Schema) -> tuple[str, Any] | None:
    """The schema that a JSON pointer in ``$ref`` points to; None: there is none."""
    ref = schema.get("$ref")
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return None
    found: Any = root
    for part in ref[1:].split("/")[1:]:
        name = _unescaped(part)
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:  # an error that llguidance finds, unless a $id gives it another meaning
            return None
    return ref[1:], found


def _expect(field: str, place: str, right: bool, what: str, value: object) -> None:
    if not right:
        raise SchemaError(field, place, f"must be {what}, not {value!r:.100}")


def _is_number(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _unescaped(part: str) -> str:
    return unquote(part).replace("~1", "/").replace("~0", "~")
