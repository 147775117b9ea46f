"""JSON schemas: which keywords are supported, and what stands where.

Keywords are those of drafts 7 and 2020-12 (json-schema.org). A schema is read like llguidance reads it: from its root,
along all keywords that hold schemas and along references. ``schema_dialects`` rewrites what llguidance does not follow.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import StructuredOutputsParams
from octavo.grammar.ecma_regex import RegexError
from octavo.grammar.schema_dialects import TYPES, Dialect, Schema, canonical, has_large_number, translate_patterns

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


# Objects of a JSON schema that have no properties but those that it names, where it is silent about others.

#: Keywords that speak of the properties of an object.
_NAMING = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
#: Schemas by identity, and the schemas that describe the same values as each, with the keywords that say so.
_Schemas = dict[int, Schema]
_Parts = dict[int, list[tuple[str, Schema]]]


def closed(root: Schema) -> Schema:
    """A copy of a schema, whose objects are closed where it names properties and does not speak of further ones.

    Where several schemas describe one object, such as those of an ``allOf``, each names a part of its properties and
    would forbid the others: these stay open. So do objects that need more properties than are named.
    """
    root = copy.deepcopy(root)
    schemas = _all(root)
    of_each = {key: [(word, part) for word, part in parts(root, schema)] for key, schema in schemas.items()}
    naming = _naming(schemas, of_each)
    several = [key for key, schema in schemas.items() if _describers(schema, of_each[key], naming) > 1]
    together = _reached(several, {key: [id(part) for _, part in found] for key, found in of_each.items()})
    for key, schema in schemas.items():
        if key not in together and _is_silent(schema, of_each[key]):
            schema["additionalProperties"] = False
    return root


def parts(root: Schema, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas that describe the same value as this one, with their keyword; without those that are booleans."""
    for keyword in ("allOf", "anyOf", "oneOf"):
        found = schema.get(keyword)
        for part in found if isinstance(found, list) else ():
            if isinstance(part, dict):
                yield keyword, part
    referred = target(root, schema)
    if referred is not None and isinstance(referred[1], dict):
        yield "$ref", referred[1]


def _all(root: Schema) -> _Schemas:
    """All schemas that values are held to."""
    found: _Schemas = {}
    waiting: list[Any] = [root]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            waiting += [child for _, child in subschemas(schema)]
            waiting += [part for _, part in parts(root, schema)]
    return found


def _naming(schemas: _Schemas, of_each: _Parts) -> set[int]:
    """The schemas that speak of properties of their values, by themselves or by their parts."""
    wholes: dict[int, list[int]] = {}
    for key, found in of_each.items():
        for _, part in found:
            wholes.setdefault(id(part), []).append(key)
    return _reached([key for key, schema in schemas.items() if any(name in schema for name in _NAMING)], wholes)


def _reached(begin: Iterable[int], edges: Mapping[int, Iterable[int]]) -> set[int]:
    found, waiting = set[int](), [*begin]
    while waiting:
        key = waiting.pop()
        if key not in found:
            found.add(key)
            waiting += edges.get(key, ())
    return found


def _describers(schema: Schema, found: list[tuple[str, Schema]], naming: set[int]) -> int:
    """How many schemas speak of the properties of one and the same object: this one, and those of its parts."""
    own = any(name in schema for name in _NAMING)
    # Of anyOf and oneOf it is one at a time.
    keys = [word if word in ("anyOf", "oneOf") else id(part) for word, part in found if id(part) in naming]
    return own + len(set(keys))


def _is_silent(schema: Schema, found: list[tuple[str, Schema]]) -> bool:
    if "additionalProperties" in schema or "unevaluatedProperties" in schema:
        return False
    named, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(named, dict) and not isinstance(patterns, dict):
        return False
    named, least = named or {}, schema.get("minProperties")
    if patterns is None and isinstance(least, int) and least > len(named):
        return False
    return all(name in named for part in (schema, *(p for _, p in found)) for name in part.get("required", ()))


# How JSON of a schema is written: what may stand between its tokens, and how llguidance reads the schema.

#: How llguidance reads JSON schemas: keywords that it does not know are errors, a value fits exactly one schema of a
#: ``oneOf``, and texts have one spelling each: with \uXXXX, names of additional properties could be those of others.
_STRICT = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": 'nrbtf\\"'}
#: Levels of objects and lists that are indented: of a schema that is recursive or says nothing of a value, and at most.
_DEEPEST = 8
_SPACES = 4
_CONTAINERS = frozenset({"object", "array"})
_OF_OBJECTS = ("properties", "patternProperties")
_OF_LISTS = ("prefixItems", "items", "additionalItems")


def with_options(schema: Schema, params: StructuredOutputsParams) -> Schema:
    """The schema with the options by which llguidance reads it."""
    options: dict[str, Any] = dict(_STRICT)
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or white_space(schema)
    return {**schema, "x-guidance": options}


def white_space(root: Schema) -> str:
    """A regular expression: a space, or one line break and an indentation of at most the schema's depth.

    A level is indented by a tab, or by up to four spaces.
    """
    depth = nesting(root)
    return rf"( |\n( {{0,{_SPACES * depth}}}|\t{{0,{depth}}}))"


def nesting(root: Schema) -> int:
    """Levels of objects and lists of the deepest values of a schema, up to a bound, which is also that of any value."""
    current: list[Any] = [root]
    for depth in range(_DEEPEST):
        inside, contains, seen = list[Any](), False, set[int]()
        while current:
            schema = current.pop()
            if schema is True or schema == {}:
                return _DEEPEST
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            in_place = [part for _, part in parts(root, schema)]
            current += in_place
            found = _values_within(schema, is_whole=not in_place)
            contains = contains or found is not None
            inside += found or ()
        if not contains:
            return depth
        current = inside
    return _DEEPEST


def _values_within(schema: Schema, *, is_whole: bool) -> list[Any] | None:
    """The schemas of the values in an object or list of this schema; None: its values are neither.

    ``is_whole``: no other schema describes the same value.
    """
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return [True] if any(isinstance(value, (dict, list)) for value in values) else None
    types = schema.get("type")
    if types is not None and _CONTAINERS.isdisjoint([types] if isinstance(types, str) else types):
        return None
    named = any(name in schema for name in (*_OF_OBJECTS, *_OF_LISTS, "additionalProperties"))
    if not named:
        return [True] if is_whole else None
    found = [child for name in _OF_OBJECTS for child in schema.get(name, {}).values()]
    for name in _OF_LISTS:
        held = schema.get(name)
        found += held if isinstance(held, list) else [] if held is None else [held]
    found.append(schema.get("additionalProperties", is_whole and any(name in schema for name in _OF_OBJECTS)))
    return found


# Finds places in JSON schemas: where an error is, and where a schema has no end.

#: Seconds that are spent on finding the place of an error.
_SEARCH_SECONDS = 0.5


def endless(root: Schema) -> str | None:
    """The JSON pointer of a schema that needs itself within it, so that no value is complete; None: there is none.

    The least set of schemas that have a complete value is built from those that need no other.
    """
    places: dict[int, tuple[str, Schema]] = {}
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        path, schema = waiting.pop()
        if isinstance(schema, dict) and id(schema) not in places:
            places[id(schema)] = (path, schema)
            waiting += [(path + step, child) for step, child in subschemas(schema)]
            if (referred := target(root, schema)) is not None:
                waiting.append(referred)
    complete: set[int] = set()
    unknown = dict(places)
    grows = True
    while grows:
        found = [key for key, (_, schema) in unknown.items() if _is_complete(root, schema, complete)]
        for key in found:
            del unknown[key]
        complete |= set(found)
        grows = bool(found)
    return min((path for path, _ in unknown.values()), key=len, default=None)


def _is_complete(root: Schema, schema: Schema, complete: set[int]) -> bool:
    """Whether a schema has a value that needs only schemas of ``complete``."""

    def known(child: Any) -> bool:
        return not isinstance(child, dict) or id(child) in complete

    referred = target(root, schema)
    if referred is not None and not known(referred[1]):
        return False
    if not all(map(known, schema.get("allOf", ()))):
        return False
    if not all(any(map(known, schema[name])) for name in ("anyOf", "oneOf") if name in schema):
        return False
    properties, needed = schema.get("properties", {}), schema.get("required", ())
    if schema.get("type") == "object":
        return all(known(properties.get(name)) for name in needed)
    if schema.get("type") == "array" and schema.get("minItems"):
        return all(map(known, [*schema.get("prefixItems", ())][: schema["minItems"]])) and known(schema.get("items"))
    return True


def locate(root: Schema, error_of: Callable[[Schema], str]) -> str:
    """The JSON pointer of the innermost schema that has the same error as the whole.

    Each schema on the way is tried alone, with the definitions of the root. ``error_of``: a schema's error, or "".
    """
    message = _kind(error_of(root))
    deadline = time.process_time() + _SEARCH_SECONDS
    shared: Schema = {name: root[name] for name in ("$schema", "$defs", "definitions") if name in root}
    path, schema, seen = "", root, {id(root)}
    while True:
        children = [(path + step, child) for step, child in subschemas(schema)]
        if (referred := target(root, schema)) is not None:
            children.append(referred)
        for place, child in children:
            if time.process_time() > deadline:
                return path
            if isinstance(child, dict) and id(child) not in seen and _kind(error_of({**shared, **child})) == message:
                seen.add(id(child))
                path, schema = place, child
                break
        else:
            return path


def _kind(error: str) -> str:
    return error.partition("\n  while processing ")[0]


# Which schemas have no value in common, as far as it is seen by their types, values, bounds and properties.

#: Most comparisons of a document: what is not seen within them counts as not disjoint.
_MOST_COMPARISONS = 50_000
_DEEPEST_COMPARED = 12
#: Most combinations of alternatives of one schema.
_MOST_VIEWS = 64

#: Formats of which no text has two.
_APART_FORMATS = frozenset({"date", "date-time", "time", "duration", "email", "ipv4", "ipv6", "uuid"})

#: Schemas that all describe the same value.
_View = list[Schema]
_LEAST = {"string": "minLength", "array": "minItems", "object": "minProperties"}
_MOST = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}


class Disjointness:
    """Compares schemas of one document."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        #: Drafts to 7 ignore what stands beside a reference.
        self._alone = "draft-0" in str(root.get("$schema"))
        self._left = _MOST_COMPARISONS

    def all_of(self, schemas: list[Any]) -> bool:
        """Whether no value is of two of these schemas."""
        return all(self.of(a, b) for i, a in enumerate(schemas) for b in schemas[:i])

    def of(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Whether no value is of both schemas."""
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST_COMPARED:
            return False
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        first, second = self._views(a), self._views(b)
        if not first or not second:
            return False
        return all(self._apart(x, y, depth) for x in first for y in second)

    def _views(self, schema: Schema) -> list[_View]:
        """The combinations of schemas of which a value fulfils one; empty: there are too many."""
        views: list[_View] = [[]]
        waiting, seen = [schema], set[int]()
        while waiting:
            part = waiting.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            if self._alone and (referred := self._target(part)) is not None:
                waiting.append(referred)
                continue
            views = [[*view, part] for view in views]
            waiting += [one for one in part.get("allOf") or () if isinstance(one, dict)]
            for keyword in ("anyOf", "oneOf"):
                options = [self._plain(one) for one in part.get(keyword) or () if one is not False]
                if options:
                    views = [[*view, *option] for view in views for option in options]
                if len(views) > _MOST_VIEWS:
                    return []
            if (referred := self._target(part)) is not None:
                waiting.append(referred)
        return views

    def _plain(self, option: Any) -> _View:
        """An alternative with what it refers to; what it says beyond that is left out."""
        found: _View = []
        for _ in range(_DEEPEST_COMPARED):
            if not isinstance(option, dict):
                break
            referred = self._target(option)
            if referred is not None and self._alone:
                option = referred
                continue
            found += [option, *(one for one in option.get("allOf") or () if isinstance(one, dict))]
            option = referred
        return found

    def _target(self, schema: Schema) -> Schema | None:
        referred = target(self._root, schema)
        return referred[1] if referred is not None and isinstance(referred[1], dict) else None

    def _apart(self, a: _View, b: _View, depth: int) -> bool:
        for one, other in ((a, b), (b, a)):
            values = _values(one)
            if values is not None:
                return all(self._lacks(other, value, depth) for value in values)
        common = _types(a) & _types(b)
        return all(self._apart_as(kind, a, b, depth) for kind in common)

    def _lacks(self, view: _View, value: Any, depth: int) -> bool:
        """Whether a value is certainly not of all these schemas."""
        values = _values(view)
        if values is not None and canonical(value) not in set(map(canonical, values)):
            return True
        kind = _type_of(value)
        if kind not in _types(view) and not (kind == "integer" and "number" in _types(view)):
            return True
        if isinstance(value, dict):
            as_schema: Schema = {
                "type": "object",
                "properties": {name: {"const": one} for name, one in value.items()},
                "required": list(value),
                "additionalProperties": False,
            }
            return self._apart_as("object", [as_schema], view, depth)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._apart_as("number", [{"minimum": value, "maximum": value}], view, depth)
        if isinstance(value, str | list):
            kind = "string" if isinstance(value, str) else "array"
            size = {_LEAST[kind]: len(value), _MOST[kind]: len(value)}
            return self._apart_as(kind, [size], view, depth)
        return False

    def _apart_as(self, kind: str, a: _View, b: _View, depth: int) -> bool:
        """Whether no value of one type is of both."""
        if kind in ("number", "integer"):
            return _beyond(a, b) or _beyond(b, a)
        if kind in _LEAST:
            if _counts(a, _LEAST[kind], 0)[1] > _counts(b, _MOST[kind], None)[0]:
                return True
            if _counts(b, _LEAST[kind], 0)[1] > _counts(a, _MOST[kind], None)[0]:
                return True
        if kind == "string":
            return any(x != y for x in _formats(a) for y in _formats(b))
        if kind == "object":
            needed = {name for view in (a, b) for schema in view for name in schema.get("required") or ()}
            return any(self._property_apart(name, a, b, depth) for name in sorted(map(str, needed)))
        if kind == "array":
            least = _counts([*a, *b], "minItems", 0)[1]
            return any(self._item_apart(i, a, b, depth) for i in range(min(int(least), 20)))
        return False

    def _property_apart(self, name: str, a: _View, b: _View, depth: int) -> bool:
        first, second = [*_of_property(a, name)], [*_of_property(b, name)]
        return any(self.of(x, y, depth + 1) for x in first or [True] for y in second or [True])

    def _item_apart(self, index: int, a: _View, b: _View, depth: int) -> bool:
        first, second = [*_of_item(a, index)], [*_of_item(b, index)]
        return any(self.of(x, y, depth + 1) for x in first or [True] for y in second or [True])


def _formats(view: _View) -> set[str]:
    return {schema["format"] for schema in view if schema.get("format") in _APART_FORMATS}


def _types(view: _View) -> set[str]:
    found = {*TYPES}
    for schema in view:
        types = schema.get("type")
        if types is not None:
            listed = set(types if isinstance(types, list) else [types])
            integers = "integer" in listed or "number" in listed
            found = {kind for kind in found if kind in listed or (kind == "number" and integers)}
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {dict: "object", list: "array", str: "string"}
    return next((kind for cls, kind in kinds.items() if isinstance(value, cls)), "number")


def _values(view: _View) -> list[Any] | None:
    """The values that a const or an enum lists; None: none does."""
    for schema in view:
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return list(schema["enum"])
    return None


def _counts(view: _View, keyword: str, default: int | None) -> tuple[float, float]:
    """The least and the largest value of a keyword of these schemas; as infinite where there is none by default."""
    missing = float("inf") if default is None else default
    found = [s[keyword] for s in view if isinstance(s.get(keyword), int | float) and not isinstance(s[keyword], bool)]
    return (min(found), max(found)) if found else (missing, missing)


def _beyond(a: _View, b: _View) -> bool:
    """Whether the numbers of one are all greater than those of the other."""
    lows = [(s[k], k != "minimum") for s in a for k in ("minimum", "exclusiveMinimum") if _is_json_number(s.get(k))]
    highs = [(s[k], k != "maximum") for s in b for k in ("maximum", "exclusiveMaximum") if _is_json_number(s.get(k))]
    return any(low > high or (low == high and (out or beyond)) for low, out in lows for high, beyond in highs)


def _is_json_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_property(view: _View, name: str) -> Iterator[Any]:
    """The schemas of a property."""
    for schema in view:
        named = schema.get("properties")
        if isinstance(named, dict) and name in named:
            yield named[name]
        elif not schema.get("patternProperties") and "additionalProperties" in schema:
            yield schema["additionalProperties"]


def _of_item(view: _View, index: int) -> Iterator[Any]:
    """The schemas of the item at an index."""
    for schema in view:
        items, first = schema.get("items"), schema.get("prefixItems")
        if isinstance(items, list):
            items, first = schema.get("additionalItems", True), items
        if isinstance(first, list) and index < len(first):
            yield first[index]
        elif items is not None:
            yield items


def separate(root: Schema, schemas: list[Schema]) -> None:
    """Makes an ``anyOf`` of each ``oneOf`` of which no value is of two schemas, in place."""
    compare = Disjointness(root)
    for schema in schemas:
        options = schema.get("oneOf")
        if isinstance(options, list) and compare.all_of(options):
            del schema["oneOf"]
            if "anyOf" in schema:
                schema["allOf"] = [*(schema.get("allOf") or ()), {"anyOf": options}]
            else:
                schema["anyOf"] = options
