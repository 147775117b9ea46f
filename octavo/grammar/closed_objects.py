"""Objects of a JSON schema that have no properties but those that it names, where it is silent about others."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from octavo.grammar.json_schema import Schema, subschemas, target

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
