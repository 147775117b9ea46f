"""Rewrites JSON schemas of generators, OpenAPI and older drafts into the keywords that llguidance supports.

A keyword is rewritten into others that allow the same values, or fewer. Where that is impossible it is *relaxed*: left
out and reported, so that outputs are valid by the schema without it. Refusing it would refuse most generated schemas
for keywords (``uniqueItems``, ``format: path``) that their users never chose; ``strict`` does refuse it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeGuard

from octavo.grammar.ecma_regex import RegexError, UnsupportedRegexError, parse
from octavo.grammar.regex_automaton import search, single_search

Schema = dict[str, Any]

#: Bounds of numbers that llguidance reads exactly: 64-bit integers; doubles above ``LEAST``.
LARGEST = (1 << 63) - 1
LEAST = -(1 << 63) + 1024
#: The types of JSON values; an integer is also a number.
TYPES = ("null", "boolean", "number", "string", "array", "object")

#: Formats that llguidance enforces.
ENFORCED_FORMATS = frozenset(
    {"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
#: Formats without effect on values: hints of OpenAPI about display and storage.
_FREE_FORMATS = frozenset({"password", "binary", "float", "double"})
_UUID = "^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}$"
#: Formats as regexes.
_FORMAT_PATTERNS = {
    "byte": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    "e164": r"^\+[1-9][0-9]{6,14}$",
    "ulid": "^[0-7][0-9A-HJKMNP-TV-Z]{25}$",
    **{f"uuid{version}": _UUID.format(version) for version in range(1, 9)},
}
_INTEGER_FORMATS = {
    **{f"int{bits}": (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}  # fmt: skip
#: Keywords that cannot be rewritten, and those that only count beside ``if`` or ``contains``.
_UNWRITABLE = (
    "$dynamicRef", "$recursiveRef", "dependencies", "dependentRequired", "dependentSchemas", "disallow", "divisibleBy",
    "extends", "unevaluatedItems",
)  # fmt: skip
_DEPENDENT = ("$dynamicAnchor", "$recursiveAnchor", "then", "else", "minContains", "maxContains")
#: Keywords that restrict values in JSON Schema and are relaxed here.
RELAXED = frozenset({*_UNWRITABLE, *_DEPENDENT, "if", "contains"})
#: Maximum names that ``propertyNames`` is rewritten to.
_MOST_NAMES = 1_000
#: Keywords without effect on values.
_NOTES = frozenset({"$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"})

#: Receives the path of a schema and the keyword that is relaxed there.
Report = Callable[[str, str], None]


class Dialect:
    """Rewrites the keywords of the schemas of one document, in place."""

    def __init__(self, root: Schema, report: Report, resolve: Callable[[Schema], Schema]) -> None:
        """``resolve``: the schema that a ``$ref`` means, or the given one."""
        self._report = report
        self._resolve = resolve
        # A schema that names its draft is JSON Schema, which has no ``nullable``.
        self._is_openapi = "$schema" not in root

    def rewrite(self, path: str, schema: Schema) -> None:
        self._exclusive(schema)
        self._nullable(schema)
        self._bounds(path, schema)
        self._format(path, schema)
        self._not(path, schema)
        self._lists(path, schema)
        self._conditions(path, schema)
        self._unevaluated(path, schema)
        self._property_names(path, schema)
        self._counts_of_properties(path, schema)

    def _relax(self, path: str, schema: Schema, keyword: str) -> None:
        del schema[keyword]
        self._report(path, keyword)

    def _exclusive(self, schema: Schema) -> None:
        """Draft 4: true makes the bound beside it exclusive."""
        for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(value := schema.get(exclusive), bool):
                del schema[exclusive]
                if value and bound in schema:
                    schema[exclusive] = schema.pop(bound)

    def _nullable(self, schema: Schema) -> None:
        """OpenAPI 3.0: allows null beside the type of the same schema."""
        types = schema.get("type")
        if schema.get("nullable") is True and self._is_openapi and types is not None:
            listed = types if isinstance(types, list) else [types]
            if "null" not in listed:
                schema["type"] = [*listed, "null"]
                # An enum lists all values; generators forget null there.
                if isinstance(values := schema.get("enum"), list) and None not in values:
                    schema["enum"] = [*values, None]

    def _bounds(self, path: str, schema: Schema) -> None:
        """Bounds beyond 64 bits become tighter ones if possible, as outputs need not have every value."""
        for keyword, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
            value = schema.get(keyword)
            if not is_number(value):
                continue
            largest = LARGEST if sign > 0 and schema.get("type") == "integer" else -LEAST
            if abs(value) <= largest:
                continue
            if value * sign > 0:
                del schema[keyword]
                inclusive = "minimum" if sign < 0 else "maximum"
                present = schema.get(inclusive)
                if not isinstance(present, int | float) or abs(present) > largest:
                    schema[inclusive] = sign * largest
            elif abs(value) > LARGEST:  # only values beyond the limits are allowed
                self._relax(path, schema, keyword)
        step = schema.get("multipleOf")
        if is_number(step) and step > LARGEST:
            self._relax(path, schema, "multipleOf")
        for keyword in ("maxLength", "maxItems", "maxProperties"):
            value = schema.get(keyword)
            if is_number(value) and value > LARGEST:
                del schema[keyword]  # no value is that long

    def _format(self, path: str, schema: Schema) -> None:
        name = schema.get("format")
        if not isinstance(name, str) or (name in ENFORCED_FORMATS and allows(schema, "string")):
            return
        if bounds := _INTEGER_FORMATS.get(name):
            del schema["format"]
            if allows(schema, "number"):
                for bound, value in zip(("minimum", "maximum"), bounds, strict=True):
                    if not isinstance(schema.get(bound, schema.get(f"exclusive{bound.title()}")), int | float):
                        schema[bound] = value
                self._bounds(path, schema)
        elif name in _FREE_FORMATS or not allows(schema, "string", "number" if name not in ENFORCED_FORMATS else ""):
            del schema["format"]
        elif name in _FORMAT_PATTERNS:
            del schema["format"]
            conjoin(schema, {"pattern": _FORMAT_PATTERNS[name]})
        else:
            self._relax(path, schema, "format")

    def _not(self, path: str, schema: Schema) -> None:
        if "not" not in schema:
            return
        other = self._plain(schema["not"])
        if other is False:
            del schema["not"]
        elif other in (True, {}):
            make_impossible(schema)
        elif isinstance(other, dict) and self._exclude(schema, other):
            schema.pop("not", None)
        else:
            self._relax(path, schema, "not")

    def _exclude(self, schema: Schema, other: Schema) -> bool:
        trial = {keyword: value for keyword, value in schema.items() if keyword != "not"}
        options = other["anyOf"] if set(other) == {"anyOf"} and isinstance(other["anyOf"], list) else [other]
        for option in options:
            if not isinstance(option, dict) or not _exclude_schema(trial, self._plain(option)):
                return False
        schema.clear()
        schema.update(trial)
        return True

    def _plain(self, schema: Any) -> Any:
        """What a schema or its reference means, without annotations."""
        if not isinstance(schema, dict):
            return schema
        return {key: value for key, value in self._resolve(schema).items() if key not in _NOTES}

    def _lists(self, path: str, schema: Schema) -> None:
        if "uniqueItems" in schema and isinstance(schema["uniqueItems"], bool):
            most = schema.get("maxItems")
            if not schema["uniqueItems"] or (isinstance(most, int) and most <= 1) or not allows(schema, "array"):
                del schema["uniqueItems"]
            else:
                self._relax(path, schema, "uniqueItems")
        if "contains" in schema:
            if (schema.get("minContains") == 0 and "maxContains" not in schema) or not allows(schema, "array"):
                del schema["contains"]
            else:
                self._relax(path, schema, "contains")

    def _conditions(self, path: str, schema: Schema) -> None:
        if "if" in schema:
            if "then" in schema or "else" in schema:
                self._relax(path, schema, "if")
            else:
                del schema["if"]
        for keyword in _DEPENDENT:
            schema.pop(keyword, None)
        for keyword in _UNWRITABLE:
            if keyword in schema:
                self._relax(path, schema, keyword)

    def _property_names(self, path: str, schema: Schema) -> None:
        if "propertyNames" not in schema:
            return
        names = self._plain(schema["propertyNames"])
        if (
            names in (True, {}, {"type": "string"})
            or not allows(schema, "object")
            or (isinstance(names, dict) and _restrict_names(schema, names))
        ):
            del schema["propertyNames"]
        else:
            self._relax(path, schema, "propertyNames")

    def _unevaluated(self, path: str, schema: Schema) -> None:
        """The same as ``additionalProperties`` where no other schema describes the object."""
        if "unevaluatedProperties" not in schema:
            return
        if schema["unevaluatedProperties"] is True or "additionalProperties" in schema:
            del schema["unevaluatedProperties"]
            return
        if (named := self._names(schema, 0)) is None:
            self._relax(path, schema, "unevaluatedProperties")
            return
        schema["additionalProperties"] = schema.pop("unevaluatedProperties")
        if named:
            own = schema.get("properties")
            schema["properties"] = {**dict.fromkeys(named, True), **(own if isinstance(own, dict) else {})}

    def _names(self, schema: Schema, depth: int) -> list[str] | None:
        """The properties that a schema and its conjuncts name; None if that depends on the value."""
        if depth > 20 or not {"anyOf", "oneOf", "if", "$dynamicRef", "dependentSchemas"}.isdisjoint(schema):
            return None
        if depth and not {"additionalProperties", "patternProperties"}.isdisjoint(schema):
            return None
        properties = list(schema.get("properties") or ())
        beside = [part for part in schema.get("allOf") or () if isinstance(part, dict)]
        if "$ref" in schema:
            target = self._resolve(schema)
            if target is schema:
                return None
            beside.append(target)
        for part in beside:
            if (names := self._names(part, depth + 1)) is None:
                return None
            properties += names
        return properties

    def _counts_of_properties(self, path: str, schema: Schema) -> None:
        """Names beside ``properties`` may come twice, so that they count for one."""
        required = schema.get("required")
        needed = len(set(required)) if isinstance(required, list) and all(isinstance(n, str) for n in required) else 0
        least = schema.get("minProperties")
        if isinstance(least, int) and not isinstance(least, bool) and least >= 0:
            if least <= needed and schema.get("type") == "object":
                del schema["minProperties"]
            elif least > needed + 1:
                self._relax(path, schema, "minProperties")


def translate_patterns(path: str, schema: Schema, report: Report) -> None:
    """Rewrites a schema's regexes for llguidance; raises RegexError, with the keyword, for invalid ones."""
    if isinstance(pattern := schema.get("pattern"), str):
        try:
            first, *more = [f"^(?:{part})$" for part in search(pattern)]
        except UnsupportedRegexError:
            del schema["pattern"]
            report(path, "pattern")
        except RegexError as e:
            raise RegexError(f"pattern: {e}") from None
        else:
            schema["pattern"] = first
            for part in more:
                conjoin(schema, {"pattern": part})
    if isinstance(named := schema.get("patternProperties"), dict):
        written: Schema = {}
        for pattern, value in named.items():
            try:
                written[f"^(?:{single_search(pattern)})$"] = value
            except UnsupportedRegexError:
                del schema["patternProperties"]
                report(path, "patternProperties")
                return
            except RegexError as e:
                raise RegexError(f"patternProperties: {e}") from None
        schema["patternProperties"] = written


def conjoin(schema: Schema, part: Schema) -> None:
    """Adds a condition: as keywords of the schema itself if it lacks them, else in ``allOf``."""
    if all(keyword not in schema for keyword in part):
        schema.update(part)
    else:
        schema["allOf"] = [*(schema.get("allOf") or ()), part]


def allows(schema: Schema, *kinds: str) -> bool:
    """Whether the schema's type, if it has one, is one of these."""
    if (types := schema.get("type")) is None:
        return True
    listed = types if isinstance(types, list) else [types]
    return any(kind in listed or (kind == "number" and "integer" in listed) for kind in kinds)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def has_large_number(value: Any) -> bool:
    """Whether a value has a number that llguidance cannot read exactly."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, int | float) and abs(value) > LARGEST:
            return True
        if isinstance(value, list | dict):
            waiting += value if isinstance(value, list) else value.values()
    return False


def _exclude_schema(schema: Schema, other: Schema) -> bool:
    """Excludes the values of ``other`` by other keywords than ``not``; false if that is impossible."""
    keywords = set(other)
    if keywords == {"type"}:
        return _exclude_types(schema, other["type"])
    if "const" in other and keywords <= {"const", "type"}:
        return _exclude_values(schema, [other["const"]])
    if "enum" in other and keywords <= {"enum", "type"} and isinstance(other["enum"], list):
        return _exclude_values(schema, other["enum"])
    if keywords in ({"pattern"}, {"pattern", "type"}) and schema.get("type") == "string":
        return other.get("type", "string") == "string" and _exclude_pattern(schema, other["pattern"])
    for keyword, (opposite, more, kinds) in _OPPOSITES.items():
        value: Any = other.get(keyword)
        is_bound = type(value) in (int, float) and abs(value) < -LEAST
        if keywords - {"type"} == {keyword} and schema.get("type") in kinds and is_bound:
            if other.get("type", schema["type"]) not in (schema["type"], "number") or (more < 0 and value < 1):
                return False
            conjoin(schema, {opposite: value + more})
            return True
    names = other.get("required")
    if keywords <= {"required", "type"} and isinstance(names, list) and len(names) == 1:
        if schema.get("type") != "object" or names[0] in (schema.get("required") or ()):
            return False
        schema["properties"] = {**(schema.get("properties") or {}), names[0]: False}
        return True
    return False


#: Keyword -> its opposite, what is added to its value, and the types for which the two are opposites.
_OPPOSITES = {
    "minimum": ("exclusiveMaximum", 0, ("integer", "number")),
    "maximum": ("exclusiveMinimum", 0, ("integer", "number")),
    "exclusiveMinimum": ("maximum", 0, ("integer", "number")),
    "exclusiveMaximum": ("minimum", 0, ("integer", "number")),
    "minLength": ("maxLength", -1, ("string",)), "maxLength": ("minLength", 1, ("string",)),
    "minItems": ("maxItems", -1, ("array",)), "maxItems": ("minItems", 1, ("array",)),
}  # fmt: skip


def _exclude_types(schema: Schema, excluded: Any) -> bool:
    types = schema.get("type", [*TYPES])
    left = types if isinstance(types, list) else [types]
    for kind in excluded if isinstance(excluded, list) else [excluded]:
        if kind not in (*TYPES, "integer") or (kind == "integer" and "number" in left):
            return False
        left = [one for one in left if one != kind and not (kind == "number" and one == "integer")]
    schema["type"] = left
    if not left:
        make_impossible(schema)
    return True


def _exclude_values(schema: Schema, values: list[Any]) -> bool:
    excluded = {canonical(value) for value in values}
    if "const" in schema:
        if canonical(schema["const"]) in excluded:
            make_impossible(schema)
        return True
    if isinstance(listed := schema.get("enum"), list) or schema.get("type") == "boolean":
        kept = [v for v in (listed if isinstance(listed, list) else [True, False]) if canonical(v) not in excluded]
        schema["enum"] = kept
        if not kept:
            make_impossible(schema)
        return True
    if schema.get("type") != "string":
        return False
    texts = (value for value in values if isinstance(value, str))
    patterns = ["".join(c if c.isascii() and c.isalnum() else f"\\u{{{ord(c):x}}}" for c in text) for text in texts]
    return not patterns or _exclude_pattern(schema, f"^(?:{'|'.join(patterns)})$")


def _exclude_pattern(schema: Schema, pattern: Any) -> bool:
    if not isinstance(pattern, str):
        return False
    negated = f"^(?![^]*(?:{pattern}))"
    try:
        parse(pattern)
        search(negated)
    except RegexError:
        return False
    conjoin(schema, {"pattern": negated})
    return True


def _restrict_names(schema: Schema, names: Schema) -> bool:
    """Restricts property names by other keywords; false if that is impossible."""
    others = schema.get("additionalProperties", True)
    own = schema.get("properties") or {}
    if "patternProperties" in schema or not isinstance(own, dict):
        return False
    listed = [names["const"]] if "const" in names else names.get("enum")
    if isinstance(listed, list) and set(names) <= {"const", "enum", "type"} and len(listed) <= _MOST_NAMES:
        allowed = list(dict.fromkeys(name for name in listed if isinstance(name, str)))
        properties = {name: value if name in allowed else False for name, value in own.items()}
        schema["properties"] = properties if others is False else {**dict.fromkeys(allowed, others), **properties}
        schema["additionalProperties"] = False
        return True
    if own or not set(names) <= {"type", "pattern", "minLength", "maxLength", "format"}:
        return False
    if (pattern := _name_pattern(names)) is None:
        return False
    if others is not False:
        schema["patternProperties"] = {pattern: others}
        schema["additionalProperties"] = False
    return True


def _name_pattern(names: Schema) -> str | None:
    """A regex of the names that a schema allows; None if there is none, or it is too large."""
    conditions = [pattern] if isinstance(pattern := names.get("pattern"), str) else []
    least, most = names.get("minLength", 0), names.get("maxLength")
    if not isinstance(least, int) or not isinstance(most, int | None):
        return None
    if least or most is not None:
        conditions.append(f"^[^]{{{least},{'' if most is None else most}}}$")
    if (name := names.get("format")) is not None:
        if name == "uuid" or name in _FORMAT_PATTERNS:
            conditions.append(_FORMAT_PATTERNS.get(name) or _UUID.format("[0-9a-fA-F]"))
        elif not isinstance(pattern, str):  # generators write the format's regex beside it
            return None
    if not conditions:
        return None
    joined = "^" + "".join(f"(?=[^]*(?:{condition}))" for condition in conditions)
    joined = conditions[0] if len(conditions) == 1 else joined
    try:
        for condition in conditions:
            parse(condition)
        single_search(joined)
    except RegexError:
        return None
    return joined


def make_impossible(schema: Schema) -> None:
    schema.clear()
    schema["anyOf"] = [False]


def canonical(value: Any) -> str:
    """A text that is equal for equal JSON values; 1 and 1.0 are equal."""
    if isinstance(value, dict):
        inner = sorted((json.dumps(key), canonical(one)) for key, one in value.items())
        return "{" + ",".join(f"{key}:{one}" for key, one in inner) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)
