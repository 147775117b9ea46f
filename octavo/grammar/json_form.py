"""How JSON of a schema is written: what may stand between its tokens, and how llguidance reads the schema.

White space is enough for every usual layout, and never a run without end, which small models like to write.
"""

from __future__ import annotations

from typing import Any

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.grammar.closed_objects import parts
from octavo.grammar.json_schema import Schema

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
