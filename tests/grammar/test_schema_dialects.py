"""Schemas as generators write them: what grammars accept is valid by an independent judge, and values are accepted."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for

from octavo import InvalidRequestError, StructuredOutputsParams
from octavo.core.sampling_params import Grammar
from octavo.grammar.sources import make_grammar
from tests.grammar.byte_matcher import accepts, generate
from tests.grammar.generated_schemas import Schema, Shape, shapes
from tests.grammar.relaxed_schema import without_keywords

SHAPES = {shape.name: shape for shape in shapes()}


def compiled(schema: Schema, **options: Any) -> tuple[Grammar, list[str]]:
    relaxed: list[str] = []
    form = StructuredOutputsParams(json=schema, disable_additional_properties=False, **options)
    return make_grammar(form, relaxed=relaxed), relaxed


def judge_of(schema: Schema) -> Validator:
    """A validator whose patterns have ECMA-262's classes of characters."""
    kind = extend(validator_for(schema, default=Draft202012Validator), {"pattern": _pattern})
    return kind(schema)


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not re.search(pattern, value, re.ASCII):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("name", SHAPES)
def test_a_schema_of_a_generator_is_obeyed_and_what_is_not_is_reported(name: str) -> None:
    shape = SHAPES[name]
    grammar, relaxed = compiled(shape.schema)
    assert relaxed == shape.relaxed
    judge = judge_of(without_keywords(shape.judged or shape.schema, [] if shape.judged else relaxed))
    assert [value for value in shape.valid if not judge.is_valid(value)] == []
    assert [value for value in shape.valid if not accepts(grammar, written(value))] == []
    assert [value for value in shape.invalid if accepts(grammar, written(value))] == []
    for seed in range(5):
        text = generate(grammar, random.Random(f"{name} {seed}"))
        assert text is None or judge.is_valid(json.loads(text)), text


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.relaxed])
def test_strict_refuses_what_would_be_left_out_with_its_place(name: str) -> None:
    shape: Shape = SHAPES[name]
    with pytest.raises(InvalidRequestError) as caught:
        compiled(shape.schema, strict=True)
    assert str(caught.value).startswith(f"structured_outputs.json at {shape.relaxed[0]}: ")


def test_strict_takes_what_is_obeyed() -> None:
    for shape in SHAPES.values():
        if not shape.relaxed:
            assert compiled(shape.schema, strict=True)[1] == []


def test_nullable_means_nothing_where_a_schema_names_its_draft() -> None:
    grammar, _ = compiled(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "string", "nullable": True}
    )
    assert accepts(grammar, '"a"') and not accepts(grammar, "null")


def test_keywords_within_a_grammar_and_a_tag_are_reported_too() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "null"}}
    for form in (
        StructuredOutputsParams(grammar=f"start: %json {written(schema)}"),
        StructuredOutputsParams(
            structural_tag={"structures": [{"begin": "<a>", "schema": schema}], "triggers": ["<a"]}
        ),
    ):
        relaxed: list[str] = []
        make_grammar(form, relaxed=relaxed)
        assert len(relaxed) == 1 and relaxed[0].endswith("/uniqueItems")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-20, 20),
    st.floats(-20, 20).map(lambda x: round(x, 2)),
    st.text("ab-é \n", max_size=4),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abk", max_size=2), inner, max_size=3)
    ),
    max_leaves=5,
)
FORMATS = ("date", "path", "uuid4", "int32", "uint8", "byte", "regex", "float", "json-pointer", "uri-reference")
#: With an end or a dot, Python's dialect would accept more or less than ECMA-262's.
PATTERNS = ("^a", "b$", r"^\w*$", r"^(?![^\n]*b)", r"^(?=[^\n]*a)[^\n]{2,}", r"\d|é", r"^[\s\S]*$", "(^|-)a", r"\ba")


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas of keywords that are rewritten or relaxed, beside the usual ones."""
    types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
    names = st.sampled_from(["a", "b", "k"])
    bounds = st.sampled_from([-(2**70), -3, 0, 2.5, 7, 2**63, 10**30])
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "minimum": bounds,
        "maximum": bounds,
        "exclusiveMaximum": bounds,
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(2, 2**64),
        "pattern": st.sampled_from(PATTERNS),
        "format": st.sampled_from(FORMATS),
        "items": inner,
        "uniqueItems": st.booleans(),
        "maxItems": st.integers(0, 3),
        "contains": inner,
        "properties": st.dictionaries(names, inner, max_size=3),
        "required": st.lists(names, unique=True, max_size=1),
        "additionalProperties": inner,
        "unevaluatedProperties": st.booleans(),
        "propertyNames": st.one_of(
            st.sampled_from([True, {"pattern": "^a"}, {"maxLength": 2}, {"minLength": 1, "pattern": "a|b"}]),
            st.lists(names, min_size=1, unique=True).map(lambda found: {"enum": found}),
        ),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(0, 3),
        "not": st.one_of(
            inner,
            types.map(lambda kind: {"type": kind}),
            VALUES.map(lambda value: {"const": value}),
            st.just({"required": ["a"]}),
        ),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "dependentRequired": st.just({"a": ["b"]}),
        "oneOf": st.one_of(
            st.lists(inner, min_size=1, max_size=2),
            st.lists(st.sampled_from("abc"), min_size=2, max_size=3, unique=True).map(
                lambda kinds: [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in kinds]
            ),
        ),
    }
    some = st.lists(st.sampled_from(sorted(keywords)), max_size=3, unique=True)
    drawn = some.flatmap(lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in chosen}))
    listed = st.one_of(types, st.lists(types, min_size=1, max_size=2, unique=True))
    return st.one_of(drawn, st.tuples(drawn, listed).map(lambda pair: {**pair[0], "type": pair[1]}))


SCHEMAS = st.recursive(
    st.sampled_from([True, False, {}, {"type": "integer"}, {"type": "string"}]), schemas, max_leaves=6
)


def check(schema: Schema, values: list[Any]) -> None:
    """Outputs are valid without the relaxed keywords; values that are not are never accepted."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    try:
        grammar, relaxed = compiled(schema)
    except InvalidRequestError:
        return
    judge = judge_of(without_keywords(schema, relaxed))
    for value in values:
        assert judge.is_valid(value) or not accepts(grammar, written(value)), value
    for seed in range(2):
        text = generate(grammar, random.Random(seed))
        assert text is None or "e" in text or judge.is_valid(json.loads(text)), (text, relaxed)


@settings(deadline=None, max_examples=150)
@given(SCHEMAS.filter(lambda schema: isinstance(schema, dict)), st.lists(VALUES, max_size=8))
def test_random_schemas_accept_valid_values_alone(schema: Schema, values: list[Any]) -> None:
    check(schema, values)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(sorted(SHAPES)), st.lists(st.one_of(VALUES, st.text(max_size=8), st.integers()), max_size=8))
def test_values_that_a_schema_of_a_generator_forbids_are_not_accepted(name: str, values: list[Any]) -> None:
    shape = SHAPES[name]
    if shape.judged is None:
        grammar, relaxed = compiled(shape.schema)
        judge = judge_of(without_keywords(shape.schema, relaxed))
        assert [value for value in values if not judge.is_valid(value) and accepts(grammar, written(value))] == []
