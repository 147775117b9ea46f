"""Forms of structured output become grammars, or are refused with the place of the error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo import InvalidRequestError, SamplingParams, StructuredOutputsParams
from octavo.grammar.sources import make_grammar
from tests.grammar.byte_matcher import accepts

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f=a>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]}
JANE = '{"name": "Jané", "age": 3}'

ACCEPTED: list[tuple[dict[str, Any], str]] = [
    ({"json": PERSON}, JANE),
    ({"json": json.dumps(PERSON)}, JANE),
    ({"json": True}, "[1, null]"),
    ({"json_object": True}, '{"a": [1]}'),
    ({"regex": "[a-z]+/[0-9]{2}"}, "abc/12"),
    ({"regex": "^a|b$"}, "b"),
    ({"choice": ["yes", 'a "b"\n\x00\x7f\x85', "😀"]}, 'a "b"\n\x00\x7f\x85'),
    ({"choice": ["yes", "😀"]}, "😀"),
    ({"grammar": 'start: "a" b\nb: /[0-9]+/'}, "a12"),
    ({"grammar": 'root ::= "a" b\nb ::= [0-9]+'}, "a12"),
    ({"structural_tag": TAG}, f"text <f=a>{JANE}</f> text"),
    ({"structural_tag": json.dumps(TAG)}, "only text"),
]
REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"json": PERSON}, '{"name": "Jane"}'),
    ({"json": PERSON, "disable_any_whitespace": True}, JANE),
    ({"json": PERSON, "whitespace_pattern": "\n"}, JANE),
    ({"json_object": True}, "[1]"),
    ({"regex": "[a-z]+"}, "abc1"),
    ({"choice": ["yes", "no"]}, "maybe"),
    ({"grammar": 'root ::= "a" [0-9]'}, "a12"),
    ({"structural_tag": TAG}, "text <f=a>{}</f>"),
]


@pytest.mark.parametrize(("form", "text"), ACCEPTED, ids=str)
def test_a_grammar_accepts_what_has_its_form(form: dict[str, Any], text: str) -> None:
    assert accepts(make_grammar(StructuredOutputsParams(**form)), text)


@pytest.mark.parametrize(("form", "text"), REJECTED, ids=str)
def test_a_grammar_rejects_what_has_not(form: dict[str, Any], text: str) -> None:
    assert not accepts(make_grammar(StructuredOutputsParams(**form)), text)


def test_sampling_parameters_take_a_mapping() -> None:
    params = SamplingParams(structured_outputs={"regex": "a+"})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(regex="a+")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of json, json_object, .*, not none of them"),
        ({"regex": "a", "choice": ["a"]}, "exactly one of .*, not regex and choice"),
        ({"json_object": False}, "not none of them"),
        ({"regexp": "a"}, "unknown field 'regexp'; did you mean regex"),
        ({"regex": 5}, "structured_outputs.regex must be text, not 5"),
        ({"choice": []}, "structured_outputs.choice must be a list of texts"),
        ("a+", "must be StructuredOutputsParams or a mapping"),
    ],
)
def test_sampling_parameters_refuse_what_says_no_form(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(structured_outputs=given)


def test_the_older_name_means_the_same() -> None:
    older = SamplingParams(guided_decoding={"regex": "a"})
    assert (
        older == SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")) and older.guided_decoding is None
    )
