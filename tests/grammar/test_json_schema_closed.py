"""Objects are closed where their schema is silent about further properties, unless that would forbid what it names."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from octavo import InvalidRequestError, StructuredOutputsParams
from octavo.grammar.json_schema import forbid_extra_properties
from octavo.grammar.sources import make_grammar
from tests.grammar.byte_matcher import accepts, generate
from tests.grammar.random_schema import random_schema

POINT: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "number"}}}
SHUT = {**POINT, "additionalProperties": False}
OTHER: dict[str, Any] = {"type": "object", "properties": {"y": {"type": "number"}}}
REF = {"$ref": "#/$defs/p"}


def with_point(schema: dict[str, Any], point: dict[str, Any] = POINT) -> dict[str, Any]:
    return {**schema, "$defs": {"p": point}}


CLOSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (POINT, SHUT),
    ({"properties": {"default": POINT}}, {"properties": {"default": SHUT}, "additionalProperties": False}),
    ({"items": POINT}, {"items": SHUT}),
    ({"anyOf": [POINT, OTHER]}, {"anyOf": [SHUT, {**OTHER, "additionalProperties": False}]}),
    ({"allOf": [POINT]}, {"allOf": [SHUT]}),
    (with_point({"items": REF}), with_point({"items": REF}, SHUT)),
    (with_point({"allOf": [REF], "description": "one"}), with_point({"allOf": [REF], "description": "one"}, SHUT)),
    ({**POINT, "anyOf": [{"required": ["x"]}]}, {**SHUT, "anyOf": [{"required": ["x"]}]}),
    ({"patternProperties": {"^x": True}}, {"patternProperties": {"^x": True}, "additionalProperties": False}),
]
LEFT: list[dict[str, Any]] = [
    {**POINT, "additionalProperties": True},
    {**POINT, "additionalProperties": {"type": "integer"}},
    {"default": POINT},
    {"type": "object"},
    {**POINT, "required": ["y"]},
    {"patternProperties": {"^x": True}, "required": ["y"]},
    {**POINT, "minProperties": 2},
    {"allOf": [POINT, OTHER]},
    {**OTHER, "anyOf": [POINT]},
    with_point({**OTHER, "allOf": [REF]}),
    with_point({**OTHER, **REF}),
    {"anyOf": [{"allOf": [POINT, OTHER]}]},
]


@pytest.mark.parametrize(("schema", "wanted"), CLOSED, ids=str)
def test_objects_that_their_schema_describes_alone_are_closed(schema: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert forbid_extra_properties(schema) == wanted


@pytest.mark.parametrize("schema", LEFT, ids=str)
def test_objects_stay_open_where_more_may_be_named(schema: dict[str, Any]) -> None:
    assert forbid_extra_properties(schema) == schema


def test_a_schema_within_itself_is_closed_once() -> None:
    tree: dict[str, Any] = {
        "properties": {"left": {"$ref": "#"}, "right": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}
    }
    assert forbid_extra_properties(tree) == {**tree, "additionalProperties": False}


def test_outputs_are_closed_by_default_and_open_where_a_request_says_so() -> None:
    for open_, takes_more in ((None, False), (True, False), (False, True)):
        form = StructuredOutputsParams(json=POINT, disable_additional_properties=open_)
        grammar = make_grammar(form)
        assert accepts(grammar, '{"x": 1}')
        assert accepts(grammar, '{"x": 1, "y": 2}') == takes_more


def test_parts_of_one_object_are_all_written() -> None:
    both = {"allOf": [{**POINT, "required": ["x"]}, {**OTHER, "required": ["y"]}]}
    assert accepts(make_grammar(StructuredOutputsParams(json=both)), '{"x": 1, "y": 2}')


def test_closing_refuses_no_schema_and_makes_no_invalid_value() -> None:
    compiled = 0
    for seed in range(100):
        schema = random_schema(random.Random(f"closed {seed}"))
        try:
            make_grammar(StructuredOutputsParams(json=schema, disable_additional_properties=False))
        except InvalidRequestError:
            continue
        compiled += 1
        text = generate(make_grammar(StructuredOutputsParams(json=schema)), random.Random(seed))
        if text is not None:
            Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
    assert compiled > 50
