"""JSON schemas: checks of keywords (docs/structured-output.md lists them), places of subschemas, and llguidance's form.

Keywords are those of drafts 7 and 2020-12 (json-schema.org). A schema is walked as llguidance walks it: from its root,
along all keywords that hold schemas and along references. ``schema_dialects`` rewrites what llguidance cannot read.
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
from octavo.core.files import JSON_ERRORS
from octavo.core.sampling_params import StructuredOutputsParams
from octavo.grammar.ecma_regex import RegexError
from octavo.grammar.schema_dialects import (
    TYPES,
    Dialect,
    Schema,
    canonical,
    has_large_number,
    is_number,
    translate_patterns,
)

#: Control characters that JSON spells as \u00XX; outputs do not have them (``_STRICT``).
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
    """Parses a JSON text of a request; errors begin with ``place``."""
    try:
        return msgspec.json.decode(text)
    except JSON_ERRORS as e:
        raise InvalidRequestError(f"is not valid JSON: {e}", path=place) from None


class SchemaError(InvalidRequestError):
    """An error at a JSON pointer (``path``) within a request's field."""

    def __init__(self, field: str, path: str, message: str) -> None:
        if len(path) > _LONGEST_PATH:
            path = f"{path[: _LONGEST_PATH // 2]}...{path[-_LONGEST_PATH // 2 :]}"
        super().__init__(f"at {path}: {message}" if path else message, path=field)


def prepare(root: Schema, field: str, relaxed: list[str], *, strict: bool = False) -> None:
    """Checks a schema and rewrites it, in place, as llguidance reads it; raises SchemaError for an invalid value.

    ``relaxed`` receives the JSON pointers of keywords that outputs cannot obey; ``strict`` raises SchemaError for them.
    """

    def report(path: str, keyword: str) -> None:
        place = f"{path}/{_escape_pointer(keyword)}"
        if strict:
            raise SchemaError(field, place, f"{keyword} cannot be enforced here, which strict demands")
        relaxed.append(place)

    old = "draft-0" in str(root.get("$schema"))
    dialect = Dialect(root, report, lambda schema: _resolve(root, schema))
    visited: list[tuple[str, Schema]] = []
    for path, schema in walk(root):
        if not isinstance(schema, dict):
            raise SchemaError(field, path, f"a schema must be an object or a boolean, not {schema!r:.100}")
        visited.append((path, schema))
        if old and "$ref" in schema and "$id" in schema:
            raise SchemaError(field, f"{path}/$id", "$id beside $ref, which drafts to 7 ignore, is not supported")
        dialect.rewrite(path, schema)
        for keyword, value in list(schema.items()):
            _check(field, path, schema, keyword, value)
    for path, schema in visited:
        try:
            translate_patterns(path, schema, report)
        except RegexError as e:
            raise SchemaError(field, path, str(e)) from None


def _resolve(root: Schema, schema: Schema) -> Schema:
    """Follows references until a schema has other keywords."""
    seen: set[int] = set()
    while id(schema) not in seen and (referred := target(root, schema)) is not None:
        seen.add(id(schema))
        if not isinstance(referred[1], dict):
            break
        schema = referred[1]
    return schema


def walk(root: Schema) -> Iterator[tuple[str, Any]]:
    """JSON pointer and schema of every reachable schema but booleans, the root first.

    The subschemas of a schema are looked for after it was yielded, so that it may be changed before.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        path, schema = waiting.pop()
        if isinstance(schema, bool) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield path, schema
        if isinstance(schema, dict):
            waiting += reversed([(path + step, child) for step, child in subschemas(schema)])
            if (referred := target(root, schema)) is not None:
                waiting.append(referred)


def schemas_of(root: Schema) -> dict[int, tuple[str, Schema]]:
    """JSON pointer and schema of every reachable schema that is an object, by ``id(schema)``."""
    return {id(schema): (path, schema) for path, schema in walk(root) if isinstance(schema, dict)}


def subschemas(schema: Schema) -> Iterator[tuple[str, Any]]:
    """The direct subschemas, each with its step of a JSON pointer; definitions are not among them."""
    for keyword, value in schema.items():
        if keyword in _IN_MAPPINGS and isinstance(value, dict):
            for name, child in value.items():
                yield f"/{keyword}/{_escape_pointer(name)}", child
        elif keyword in _IN_LISTS and isinstance(value, list):
            for i, child in enumerate(value):
                yield f"/{keyword}/{i}", child
        elif keyword in _SINGLE:
            yield f"/{keyword}", value


def _check(field: str, path: str, schema: Schema, keyword: str, value: Any) -> None:
    place = f"{path}/{_escape_pointer(keyword)}"
    if keyword in _COUNTS:
        if isinstance(value, float) and value.is_integer():
            schema[keyword] = value = int(value)
        _expect(field, place, type(value) is int and value >= 0, "a whole number from 0", value)
    elif keyword in _NUMBERS:
        _expect(field, place, is_number(value), "a number", value)
        _expect(field, place, keyword != "multipleOf" or value > 0, "above 0", value)
    elif keyword == "uniqueItems":  # booleans have been rewritten
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
        right = "without control characters that JSON spells as numbers"
        _expect(field, place, not _UNSPELLABLE.search(texts), right, value)
    if keyword in _WITH_NUMBERS:
        _expect(field, place, not has_large_number(value), "made of numbers of less than 2^63", value)


def target(root: Schema, schema: Schema) -> tuple[str, Any] | None:
    """JSON pointer and schema that ``$ref`` refers to; None if there is none."""
    ref = schema.get("$ref")
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return None
    node: Any = root
    for part in ref[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, Mapping) and name in node:
            node = node[name]
        else:  # llguidance reports this error, unless an $id resolves the reference
            return None
    return ref[1:], node


def _expect(field: str, place: str, right: bool, what: str, value: object) -> None:
    if not right:
        raise SchemaError(field, place, f"must be {what}, not {value!r:.100}")


def _escape_pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


# Closing objects: no properties beside the named ones where the schema is silent about additional properties.

#: Keywords that name properties of an object.
_NAMING = frozenset({"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"})


def forbid_extra_properties(root: Schema) -> Schema:
    """A copy of the schema with ``additionalProperties: false`` wherever properties are named and nothing else is said.

    Where several schemas describe one object, as in ``allOf``, each names some of its properties and would forbid the
    others: these stay open. So do objects that need more properties than are named.
    """
    root = copy.deepcopy(root)
    schemas = {key: schema for key, (_, schema) in schemas_of(root).items()}
    parts_of = {key: [*parts(root, schema)] for key, schema in schemas.items()}
    wholes: dict[int, list[int]] = {}
    for key, members in parts_of.items():
        for _, part in members:
            wholes.setdefault(id(part), []).append(key)
    naming = _reachable([key for key, schema in schemas.items() if not _NAMING.isdisjoint(schema)], wholes)

    def num_describers(key: int) -> int:
        """Number of schemas that name properties of one object: this one and its parts; an anyOf or oneOf is one."""
        own = not _NAMING.isdisjoint(schemas[key])
        return own + len({w if w in ("anyOf", "oneOf") else id(p) for w, p in parts_of[key] if id(p) in naming})

    shared = [key for key in schemas if num_describers(key) > 1]
    together = _reachable(shared, {key: [id(part) for _, part in members] for key, members in parts_of.items()})
    for key, schema in schemas.items():
        if key not in together and _is_silent(schema, parts_of[key]):
            schema["additionalProperties"] = False
    return root


def parts(root: Schema, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """(keyword, schema) of the object schemas that describe the same value as this one."""
    for keyword in ("allOf", "anyOf", "oneOf"):
        options = schema.get(keyword)
        for part in options if isinstance(options, list) else ():
            if isinstance(part, dict):
                yield keyword, part
    if (referred := target(root, schema)) is not None and isinstance(referred[1], dict):
        yield "$ref", referred[1]


def _reachable(begin: Iterable[int], edges: Mapping[int, Iterable[int]]) -> set[int]:
    reached, waiting = set[int](), [*begin]
    while waiting:
        key = waiting.pop()
        if key not in reached:
            reached.add(key)
            waiting += edges.get(key, ())
    return reached


def _is_silent(schema: Schema, members: list[tuple[str, Schema]]) -> bool:
    if "additionalProperties" in schema or "unevaluatedProperties" in schema:
        return False
    named, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(named, dict) and not isinstance(patterns, dict):
        return False
    named, least = named or {}, schema.get("minProperties")
    if patterns is None and isinstance(least, int) and least > len(named):
        return False
    return all(name in named for part in (schema, *(p for _, p in members)) for name in part.get("required", ()))


# White space between the tokens of JSON, and the options of llguidance.

#: Unknown keywords are errors, a value fits exactly one schema of a ``oneOf``, and texts have one spelling each: with
#: \uXXXX, an additional property could have the name of another one.
_STRICT = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": 'nrbtf\\"'}
#: Maximum indented levels of objects and lists; also those of a recursive schema, and of any JSON value.
_DEEPEST = 8
_SPACES = 4
_CONTAINERS = frozenset({"object", "array"})
_OF_LISTS = ("prefixItems", "items", "additionalItems")


def with_options(schema: Schema, params: StructuredOutputsParams) -> Schema:
    """The schema with llguidance's options; by default white space is a space, or a line break with an indentation."""
    options: dict[str, Any] = dict(_STRICT)
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        depth = nesting(schema)
        white_space = rf"( |\n( {{0,{_SPACES * depth}}}|\t{{0,{depth}}}))"
        options["whitespace_pattern"] = params.whitespace_pattern or white_space
    return {**schema, "x-guidance": options}


def nesting(root: Schema) -> int:
    """Levels of objects and lists in the deepest values of a schema, at most ``_DEEPEST``."""
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
            schemas = _values_within(schema, is_whole=not in_place)
            contains = contains or schemas is not None
            inside += schemas or ()
        if not contains:
            return depth
        current = inside
    return _DEEPEST


def _values_within(schema: Schema, *, is_whole: bool) -> list[Any] | None:
    """Schemas of the values inside an object or list; ``is_whole``: no other schema describes the same value."""
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return [True] if any(isinstance(value, (dict, list)) for value in values) else None
    types = schema.get("type")
    if types is not None and _CONTAINERS.isdisjoint([types] if isinstance(types, str) else types):
        return None
    if not any(name in schema for name in (*_IN_MAPPINGS, *_OF_LISTS, "additionalProperties")):
        return [True] if is_whole else None
    schemas = [child for name in _IN_MAPPINGS for child in schema.get(name, {}).values()]
    for name in _OF_LISTS:
        held = schema.get(name)
        schemas += held if isinstance(held, list) else [] if held is None else [held]
    schemas.append(schema.get("additionalProperties", is_whole and any(name in schema for name in _IN_MAPPINGS)))
    return schemas


# Places of errors.

#: Maximum seconds to search for the place of an error.
_SEARCH_SECONDS = 0.5


def find_endless(root: Schema) -> str | None:
    """The JSON pointer of a schema that requires itself, so that no value is complete; None if there is none."""
    unknown = schemas_of(root)
    complete: set[int] = set()
    while more := {key for key, (_, schema) in unknown.items() if _is_complete(root, schema, complete)}:
        complete |= more
        unknown = {key: entry for key, entry in unknown.items() if key not in more}
    return min((path for path, _ in unknown.values()), key=len, default=None)


def _is_complete(root: Schema, schema: Schema, complete: set[int]) -> bool:
    """Whether a value of the schema exists that needs only schemas of ``complete``."""

    def is_done(child: Any) -> bool:
        return not isinstance(child, dict) or id(child) in complete

    if (referred := target(root, schema)) is not None and not is_done(referred[1]):
        return False
    if not all(map(is_done, schema.get("allOf", ()))):
        return False
    if not all(any(map(is_done, schema[name])) for name in ("anyOf", "oneOf") if name in schema):
        return False
    properties, needed = schema.get("properties", {}), schema.get("required", ())
    if schema.get("type") == "object":
        return all(is_done(properties.get(name)) for name in needed)
    if schema.get("type") == "array" and schema.get("minItems"):
        needed = [*schema.get("prefixItems", ())][: schema["minItems"]]
        return all(map(is_done, needed)) and is_done(schema.get("items"))
    return True


def locate(root: Schema, error_of: Callable[[Schema], str]) -> str:
    """The JSON pointer of the innermost schema that has the root's error; ``error_of``: a schema's error, or ""."""
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


# Disjoint schemas, as far as their types, values, bounds and properties show.

#: Maximum comparisons of a document; schemas beyond it count as not disjoint.
_MOST_COMPARISONS = 50_000
_DEEPEST_COMPARED = 12
#: Maximum combinations of alternatives of one schema.
_MOST_VIEWS = 64
#: Formats that exclude each other.
_APART_FORMATS = frozenset({"date", "date-time", "time", "duration", "email", "ipv4", "ipv6", "uuid"})

#: Schemas that all describe the same value.
_View = list[Schema]
_LEAST = {"string": "minLength", "array": "minItems", "object": "minProperties"}
_MOST = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}


class Disjointness:
    def __init__(self, root: Schema) -> None:
        self._root = root
        #: Drafts up to 7 ignore keywords beside a reference.
        self._alone = "draft-0" in str(root.get("$schema"))
        self._left = _MOST_COMPARISONS

    def all_of(self, schemas: list[Any]) -> bool:
        return all(self.of(a, b) for i, a in enumerate(schemas) for b in schemas[:i])

    def of(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Whether no value matches both schemas."""
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST_COMPARED:
            return False
        if not isinstance(a, dict) or not isinstance(b, dict):
            return a is False or b is False
        first, second = self._views(a), self._views(b)
        return bool(first and second) and all(self._apart(x, y, depth) for x in first for y in second)

    def _views(self, schema: Schema) -> list[_View]:
        """Alternatives of the schema, each a conjunction; empty: there are too many."""
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
                if options := [self._plain(one) for one in part.get(keyword) or () if one is not False]:
                    views = [[*view, *option] for view in views for option in options]
                if len(views) > _MOST_VIEWS:
                    return []
            if (referred := self._target(part)) is not None:
                waiting.append(referred)
        return views

    def _plain(self, option: Any) -> _View:
        """An alternative with its references, without their own alternatives."""
        view: _View = []
        for _ in range(_DEEPEST_COMPARED):
            if not isinstance(option, dict):
                break
            if (referred := self._target(option)) is not None and self._alone:
                option = referred
                continue
            view += [option, *(one for one in option.get("allOf") or () if isinstance(one, dict))]
            option = referred
        return view

    def _target(self, schema: Schema) -> Schema | None:
        referred = target(self._root, schema)
        return referred[1] if referred is not None and isinstance(referred[1], dict) else None

    def _apart(self, a: _View, b: _View, depth: int) -> bool:
        for one, other in ((a, b), (b, a)):
            if (values := _values(one)) is not None:
                return all(self._lacks(other, value, depth) for value in values)
        return all(self._apart_as(kind, a, b, depth) for kind in _types(a) & _types(b))

    def _lacks(self, view: _View, value: Any, depth: int) -> bool:
        """Whether a value certainly violates one of these schemas."""
        values = _values(view)
        if values is not None and canonical(value) not in set(map(canonical, values)):
            return True
        kinds = {type(None): "null", bool: "boolean", dict: "object", list: "array", str: "string"}
        kind = kinds.get(type(value), "number")
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
        if is_number(value):
            return self._apart_as("number", [{"minimum": value, "maximum": value}], view, depth)
        if isinstance(value, str | list):
            kind = "string" if isinstance(value, str) else "array"
            return self._apart_as(kind, [{_LEAST[kind]: len(value), _MOST[kind]: len(value)}], view, depth)
        return False

    def _apart_as(self, kind: str, a: _View, b: _View, depth: int) -> bool:
        if kind in ("number", "integer"):
            return _beyond(a, b) or _beyond(b, a)
        if kind in _LEAST:
            for one, other in ((a, b), (b, a)):
                if _counts(one, _LEAST[kind], 0)[1] > _counts(other, _MOST[kind], None)[0]:
                    return True
        if kind == "string":
            formats = [{s["format"] for s in view if s.get("format") in _APART_FORMATS} for view in (a, b)]
            return any(x != y for x in formats[0] for y in formats[1])
        if kind == "object":
            needed = {str(name) for schema in (*a, *b) for name in schema.get("required") or ()}
            return any(self._some_apart(_of_property(a, n), _of_property(b, n), depth) for n in sorted(needed))
        if kind == "array":
            least = min(int(_counts([*a, *b], "minItems", 0)[1]), 20)
            return any(self._some_apart(_of_item(a, i), _of_item(b, i), depth) for i in range(least))
        return False

    def _some_apart(self, a: Iterator[Any], b: Iterator[Any], depth: int) -> bool:
        first, second = [*a] or [True], [*b] or [True]
        return any(self.of(x, y, depth + 1) for x in first for y in second)


def _types(view: _View) -> set[str]:
    kinds = {*TYPES}
    for schema in view:
        if (types := schema.get("type")) is not None:
            listed = set(types if isinstance(types, list) else [types])
            integers = "integer" in listed or "number" in listed
            kinds = {kind for kind in kinds if kind in listed or (kind == "number" and integers)}
    return kinds


def _values(view: _View) -> list[Any] | None:
    for schema in view:
        if "const" in schema or isinstance(schema.get("enum"), list):
            return [schema["const"]] if "const" in schema else list(schema["enum"])
    return None


def _counts(view: _View, keyword: str, default: int | None) -> tuple[float, float]:
    """The least and the largest value of a keyword in these schemas; without any, ``default`` (None: infinite)."""
    missing = float("inf") if default is None else default
    values = [s[keyword] for s in view if is_number(s.get(keyword))]
    return (min(values), max(values)) if values else (missing, missing)


def _beyond(a: _View, b: _View) -> bool:
    """Whether all numbers of one are greater than those of the other."""
    lows = [(s[k], k != "minimum") for s in a for k in ("minimum", "exclusiveMinimum") if is_number(s.get(k))]
    highs = [(s[k], k != "maximum") for s in b for k in ("maximum", "exclusiveMaximum") if is_number(s.get(k))]
    return any(low > high or (low == high and (out or beyond)) for low, out in lows for high, beyond in highs)


def _of_property(view: _View, name: str) -> Iterator[Any]:
    for schema in view:
        named = schema.get("properties")
        if isinstance(named, dict) and name in named:
            yield named[name]
        elif not schema.get("patternProperties") and "additionalProperties" in schema:
            yield schema["additionalProperties"]


def _of_item(view: _View, index: int) -> Iterator[Any]:
    for schema in view:
        items, first = schema.get("items"), schema.get("prefixItems")
        if isinstance(items, list):
            items, first = schema.get("additionalItems", True), items
        if isinstance(first, list) and index < len(first):
            yield first[index]
        elif items is not None:
            yield items


def one_of_to_any_of(root: Schema) -> None:
    """Turns each ``oneOf`` of disjoint schemas into an ``anyOf``, in place."""
    compare = Disjointness(root)
    for _, schema in schemas_of(root).values():
        options = schema.get("oneOf")
        if isinstance(options, list) and compare.all_of(options):
            del schema["oneOf"]
            if "anyOf" in schema:
                schema["allOf"] = [*(schema.get("allOf") or ()), {"anyOf": options}]
            else:
                schema["anyOf"] = options
