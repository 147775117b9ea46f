"""White space between the tokens of JSON: every usual layout, and no run without end."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from octavo import InvalidRequestError, StructuredOutputsParams
from octavo.core.sampling_params import Grammar
from octavo.grammar.json_schema import nesting
from octavo.grammar.sources import make_grammar
from tests.grammar.byte_matcher import END, accepts, make_matcher
from tests.grammar.random_schema import random_schema

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BLANKS = frozenset(b" \n\t")
#: At most one line break, and the deepest indentation there is: that of eight levels.
_LONGEST = 1 + 4 * 8
NESTED = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "object", "properties": {"b": {"type": "integer"}}}}},
    "required": ["a"],
}
VALUE = {"a": [{"b": 1}, {"b": 2}]}


def write_blanks(grammar: Grammar, seed: int) -> str:
    """A text that has white space wherever the grammar allows it."""
    matcher, content, choose = make_matcher(grammar), bytearray(), random.Random(seed).choice
    while len(content) < 400:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(END + 1) if mask[i >> 3] >> (i & 7) & 1]
        blanks = [byte for byte in allowed if byte in _BLANKS]
        plain = [byte for byte in allowed if 32 < byte < 127 and byte != ord("\\")]
        in_string = content.count(b'"') % 2
        byte = choose(plain or allowed if in_string else blanks or plain or allowed)
        if byte == END:
            break
        assert matcher.consume_token(byte)
        content.append(byte)
    return content.decode(errors="replace")


def test_no_run_of_blanks_is_longer_than_a_line_break_and_an_indentation() -> None:
    tried = 0
    for seed in range(60):
        try:
            grammar = make_grammar(StructuredOutputsParams(json=random_schema(random.Random(seed))))
        except InvalidRequestError:
            continue
        tried += 1
        for run in re.findall(r"\s+", _STRING.sub("s", write_blanks(grammar, seed))):
            assert len(run) <= _LONGEST and run.count("\n") <= 1, (seed, run)
    assert tried > 15


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(VALUE),
        json.dumps(VALUE, separators=(",", ":")),
        json.dumps(VALUE, indent=1),
        json.dumps(VALUE, indent=2),
        json.dumps(VALUE, indent=4),
        json.dumps(VALUE, indent="\t"),
        json.dumps(VALUE, indent=0),
        '{ "a" : [ { "b" : 1 } ] }',
    ],
)
@pytest.mark.parametrize("schema", [NESTED, {"type": "object"}], ids=["schema", "any object"])
def test_usual_layouts_are_allowed(schema: dict[str, Any], text: str) -> None:
    assert accepts(make_grammar(StructuredOutputsParams(json=schema)), text)


def test_an_indentation_is_at_most_as_deep_as_the_schema() -> None:
    grammar = make_grammar(StructuredOutputsParams(json=NESTED))
    assert accepts(grammar, '{\n            "a": []}') and not accepts(grammar, '{\n             "a": []}')
    assert not accepts(grammar, '{\n\n"a": []}') and not accepts(grammar, '{  "a": []}')


@pytest.mark.parametrize(
    ("schema", "levels"),
    [
        ({"type": "integer"}, 0),
        ({"type": "array", "items": {"enum": [1, "a"]}}, 1),
        (NESTED, 8),
        ({**NESTED, "additionalProperties": False}, 8),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}, 1),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "string"}}]}, 1),
        ({"$ref": "#/$defs/p", "$defs": {"p": {"type": "array", "items": {"type": "string"}}}}, 1),
        ({"type": "array", "items": {"$ref": "#"}}, 8),
        ({"const": {"a": 1}}, 8),
        ({}, 8),
    ],
    ids=str,
)
def test_the_depth_of_a_schema(schema: dict[str, Any], levels: int) -> None:
    assert nesting(schema) == levels
