"""Grammars of calls: whatever they allow is read as calls whose arguments fit the tools' schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import StructuredOutputsParams
from octavo.grammar.sources import byte_tokenizer, make_grammar
from octavo.server.tool_parsers import TOOL_PARSERS
from octavo.server.tool_parsers.call_grammar import CallGrammar
from octavo.server.tool_parsers.tool_parser import collect
from tests.grammar.byte_matcher import END, accepts

GUESTS: dict[str, Any] = {"type": "array", "items": {"$ref": "#/$defs/Guest"}, "maxItems": 2}
GUEST = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "of": GUESTS}}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 9},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city"],
    },
    "any-of": {
        "type": "object",
        "properties": {"x": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
        "required": ["x"],
    },
    "nothing": {"type": "object", "properties": {}, "additionalProperties": False},
    "book": {
        "type": "object",
        "$defs": {"Guest": GUEST},
        "properties": {
            "class": {"enum": ["first", "second"]},
            "note": {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "null"}]},
            "price": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
            "guests": GUESTS,
            "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
            "until": {"type": "string", "minLength": 2, "maxLength": 4},
            "fixed": {"const": 7},
        },
        "required": ["code", "guests"],
    },
}
#: Chat templates by what they say of their format.
TEMPLATES = [
    "",
    "<|tool|> <|/tool|> [CALL_ID] [ARGS] </arg_key><arg_value> tool_calls>",
    "[ARGS] ```json only supports single tool-calls",
]
#: Each way in which a parser's models write calls, with a template that says so.
FORMATS = [
    (name, template)
    for name, parser in TOOL_PARSERS.items()
    for i, template in enumerate(TEMPLATES)
    if parser.call_format(template) not in [parser.call_format(other) for other in TEMPLATES[:i]]
]


def grammar_of(name: str, template: str = "", special: tuple[str, ...] = (), **options: Any) -> CallGrammar:
    form = TOOL_PARSERS[name].call_format(template)
    assert form is not None
    return CallGrammar(form, TOOLS, {text: END + 1 + i for i, text in enumerate(sorted(special))}, **options)


def walk(source: str, special: tuple[str, ...], seed: int) -> str:
    """A random text that a grammar allows; ends where it may once it is long."""
    tokenizer, choose = byte_tokenizer(frozenset(special)), random.Random(seed).choice
    matcher = LLMatcher(tokenizer, source)
    assert not matcher.is_error(), matcher.get_error()
    text = b""
    while True:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: tokenizer.vocab_size]).tolist()
        if END in allowed and (len(text) > 80 or allowed == [END]):
            return text.decode()
        token = choose([t for t in allowed if 32 <= t < 127 or t == 10 or t > END] or allowed)
        matcher.consume_token(token)
        text += bytes([token]) if token < END else sorted(special)[token - END - 1].encode()


@pytest.mark.parametrize("as_tokens", [False, True], ids=["as text", "as tokens"])
@pytest.mark.parametrize(("name", "template"), FORMATS)
def test_what_the_grammar_allows_is_read_as_valid_calls(name: str, template: str, as_tokens: bool) -> None:
    parser = TOOL_PARSERS[name]
    special = tuple(marker for marker in parser.markers if marker.startswith("<")) if as_tokens else ()
    source = grammar_of(name, template, special).calls()
    for seed in range(6):
        parts = collect(parser(TOOLS).feed(walk(source, special, seed), True))
        assert parts.content is None and parts.tool_calls
        for call in parts.tool_calls:
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])


@pytest.mark.parametrize(("name", "template"), FORMATS)
def test_one_call_alone_where_parallel_calls_are_not_wanted(name: str, template: str) -> None:
    source = grammar_of(name, template, parallel=False).calls()
    for seed in range(3):
        assert len(collect(TOOL_PARSERS[name](TOOLS).feed(walk(source, (), seed), True)).tool_calls) == 1


CALLS = [("get_weather", '{"city": "Rome", "days": 3}'), ("any-of", '{"x": null}')]


@pytest.mark.parametrize(("name", "template"), FORMATS)
def test_written_calls_are_read(name: str, template: str) -> None:
    form = TOOL_PARSERS[name].call_format(template)
    assert form is not None
    for calls in (CALLS if form.separator is not None else CALLS[:1], CALLS[1:]):
        found = collect(TOOL_PARSERS[name](TOOLS).feed(form.written(calls), True)).tool_calls
        assert [(call.name, json.loads(call.arguments)) for call in found] == [(n, json.loads(a)) for n, a in calls]


@pytest.mark.parametrize(("name", "template"), FORMATS)
def test_strict_calls_in_text_are_whole_in_every_notation(name: str, template: str) -> None:
    form = TOOL_PARSERS[name].call_format(template)
    assert form is not None
    if form.trigger is None:
        return
    source, text = grammar_of(name, template).calls_in_text(), form.written(CALLS[1:])
    assert allows(source, f"I look. 1 < 2\n{text}") and allows(source, "I look.") and allows(source, text)
    assert not allows(source, f"I look. {form.trigger} so") and not allows(source, text.replace("any-of", "some-of"))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"x": {"type": "string", "format": "date"}}}, "any.properties.x.format"),
        ({"properties": {"x": {}}, "minProperties": 1}, "any.minProperties"),
    ],
)
def test_what_a_notation_cannot_enforce_is_refused_for_strict_functions(schema: dict[str, Any], path: str) -> None:
    form = TOOL_PARSERS["glm45"].call_format("")
    assert form is not None
    with pytest.raises(InvalidRequestError) as caught:
        CallGrammar(form, {"any": {"type": "object", **schema}}, {}, strict={"any"})
    assert caught.value.path == path
    CallGrammar(form, {"any": {"type": "object", **schema}}, {})


def allows(source: str, text: str) -> bool:
    return accepts(make_grammar(StructuredOutputsParams(grammar=source)), text)


CALL = '<tool_call>\n{"name": "any-of", "arguments": {"x": true}}\n</tool_call>'


def test_calls_within_text_fit_their_schemas() -> None:
    source = grammar_of("hermes").calls_in_text()
    for text in ("", "Hello, 1 < 2.\n", CALL, f"I look.\n{CALL}\n{CALL} Done.", "<tool", f"{CALL}{CALL}"):
        assert allows(source, text), text
    for text in ("<tool_call>", CALL.replace("true", "1"), "So <tool_call> is", CALL.replace("any-of", "some-of")):
        assert not allows(source, text), text


def test_calls_or_an_answer_of_a_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    source = grammar_of("hermes").calls_or(f"%json {json.dumps(schema)}")
    assert allows(source, CALL) and allows(source, '{"a": 1}')
    assert not allows(source, '{"a": "b"}') and not allows(source, f'{CALL}{{"a": 1}}') and not allows(source, "so")


def test_a_bare_format_calls_by_how_it_begins() -> None:
    source = grammar_of("llama3_json").calls_or(r"/([^\[{\s](.|\n)*)?/")
    call = '{"name": "any-of", "parameters": {"x": null}}'
    assert allows(source, call) and allows(source, "Yes {x}") and allows(source, "")
    assert not allows(source, '{"name": "Bob"}')
