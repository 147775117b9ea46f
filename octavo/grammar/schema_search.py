"""Finds places in JSON schemas: where an error is, and where a schema has no end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.grammar.json_schema import Schema, subschemas, target

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
