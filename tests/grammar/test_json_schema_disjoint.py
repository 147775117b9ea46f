"""Schemas without common values are seen as such, and others never are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from octavo.grammar.json_schema import Disjointness, one_of_to_any_of

A = {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}
B = {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]}
OPEN_B = {"type": "object", "properties": {"k": {"const": "b"}}}
TAIL = {"$defs": {"A": A, "B": B, "N": {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"n": {"type": "null"}}}]}}}

APART: list[list[Any]] = [
    [A, B],
    [A, OPEN_B],
    [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    [{"$ref": "#/$defs/N"}, {"$ref": "#/$defs/B"}],
    [{"allOf": [{"$ref": "#/$defs/A"}]}, {"anyOf": [B, {"type": "null"}]}],
    [{"type": "integer"}, {"type": "string"}, {"type": "null"}],
    [{"type": ["integer", "null"]}, {"type": ["string", "boolean"]}],
    [{"const": 1}, {"enum": [2, "1", True]}],
    [{"const": "a"}, {"type": "string", "minLength": 2}],
    [{"const": {"k": "a"}}, B],
    [{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}],
    [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}],
    [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}],
    [
        {"type": "array", "prefixItems": [{"const": "a"}], "minItems": 1},
        {"type": "array", "items": {"const": "b"}, "minItems": 1},
    ],
    [A, {"type": "object", "properties": {"n": {}}, "additionalProperties": False}],
    [A, {"type": "object", "properties": {"k": False}}],
    [
        {"type": "object", "properties": {"in": A}, "required": ["in"]},
        {"type": "object", "properties": {"in": {"$ref": "#/$defs/B"}}, "required": ["in"]},
    ],
    [False, True],
]
NOT_APART: list[list[Any]] = [
    [A, A],
    [OPEN_B, {"type": "object", "properties": {"k": {"const": "a"}}}],
    [{"type": "integer"}, {"type": "number"}],
    [{"const": 1}, {"const": 1.0}],
    [{"type": "string", "maxLength": 3}, {"type": "string", "maxLength": 5}],
    [
        {"properties": {"k": {"const": "a"}}, "required": ["k"]},
        {"properties": {"k": {"const": "b"}}, "required": ["k"]},
    ],
    [{"type": "array", "prefixItems": [{"const": "a"}]}, {"type": "array", "prefixItems": [{"const": "b"}]}],
    [True, {"type": "null"}],
    [{"$ref": "#/$defs/none"}, A],
]


@pytest.mark.parametrize("schemas", APART, ids=str)
def test_schemas_without_a_common_value_are_told_apart(schemas: list[Any]) -> None:
    root = {"oneOf": json.loads(json.dumps(schemas)), **TAIL}
    one_of_to_any_of(root)
    assert "anyOf" in root and "oneOf" not in root


@pytest.mark.parametrize("schemas", NOT_APART, ids=str)
def test_schemas_that_may_share_a_value_stay_a_oneof(schemas: list[Any]) -> None:
    root = {"oneOf": json.loads(json.dumps(schemas)), **TAIL}
    one_of_to_any_of(root)
    assert "oneOf" in root


def test_drafts_to_7_ignore_what_stands_beside_a_reference() -> None:
    options = [{"$ref": "#/$defs/T", "const": "a"}, {"$ref": "#/$defs/T", "const": "b"}]
    defs = {"$defs": {"T": {"type": "string"}}}
    assert Disjointness(defs).all_of(options)
    assert not Disjointness({"$schema": "http://json-schema.org/draft-07/schema#", **defs}).all_of(options)


def test_recursion_and_many_alternatives_end() -> None:
    tree: dict[str, Any] = {"$ref": "#/$defs/t"}
    root = {"$defs": {"t": {"type": "object", "properties": {"t": tree}, "required": ["t"]}}}
    assert not Disjointness(root).of(tree, tree)
    wide = {"allOf": [{"anyOf": [{"const": i}, {"const": -i}]} for i in range(40)]}
    assert not Disjointness({}).of(wide, wide)


VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, 2.5, "", "a", "ab"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ak"), inner, max_size=2),
    max_leaves=4,
)
SCHEMAS = st.recursive(
    st.sampled_from([True, False, {"type": "string"}, {"type": "number"}, {"type": "integer"}, {"const": "a"}]),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.lists(
                st.sampled_from(["object", "array", "string", "integer", "null"]), min_size=1, unique=True
            ),
            "properties": st.dictionaries(st.sampled_from("ak"), inner),
            "required": st.lists(st.sampled_from("ak"), unique=True),
            "additionalProperties": inner,
            "enum": st.lists(VALUES, min_size=1, max_size=3),
            "minimum": st.integers(0, 2),
            "exclusiveMaximum": st.integers(0, 2),
            "minLength": st.integers(0, 2),
            "maxItems": st.integers(0, 2),
            "minItems": st.integers(0, 2),
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "items": inner,
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
        },
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=400)
@given(SCHEMAS, SCHEMAS, st.lists(VALUES, min_size=5, max_size=30))
def test_a_value_of_two_schemas_shows_that_they_are_not_apart(a: Any, b: Any, values: list[Any]) -> None:
    if Disjointness({}).of(a, b):
        first, second = Draft202012Validator(a).is_valid, Draft202012Validator(b).is_valid
        assert [value for value in values if first(value) and second(value)] == []
