"""Which schemas have no value in common, as far as it is seen by their types, values, bounds and properties.

A value that is of at most one schema of a ``oneOf`` fits exactly one where it fits any, so such a ``oneOf`` is an
``anyOf``. Most are: variants that a property with a constant tells apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from octavo.grammar.json_schema import target
from octavo.grammar.schema_dialects import TYPES, Schema, canonical

#: Most comparisons of a document: what is not seen within them counts as not disjoint.
_MOST_COMPARISONS = 50_000
_DEEPEST = 12
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
        if self._left < 0 or depth > _DEEPEST:
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
        for _ in range(_DEEPEST):
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
    lows = [(s[k], k != "minimum") for s in a for k in ("minimum", "exclusiveMinimum") if _is_number(s.get(k))]
    highs = [(s[k], k != "maximum") for s in b for k in ("maximum", "exclusiveMaximum") if _is_number(s.get(k))]
    return any(low > high or (low == high and (out or beyond)) for low, out in lows for high, beyond in highs)


def _is_number(value: Any) -> bool:
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
