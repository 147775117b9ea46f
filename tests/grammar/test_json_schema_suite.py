"""Outputs of JSON schemas are valid: the JSON Schema test suite, drafts 7 and 2020-12, and random schemas.

``tests/data/json_schema_suite.json.gz`` is the suite as in the source distribution of the package jsonschema 4.26.0.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema.protocols import Validator
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import Grammar, StructuredOutputsParams
from octavo.grammar.schema_dialects import RELAXED
from octavo.grammar.sources import make_grammar
from tests.grammar.byte_matcher import accepts, generate
from tests.grammar.random_schema import random_schema
from tests.grammar.relaxed_schema import without_keywords

ROOT = Path(__file__).resolve().parents[2]
SUITE = json.loads(gzip.decompress((ROOT / "tests" / "data" / "json_schema_suite.json.gz").read_bytes()))
DRAFTS: dict[str, tuple[str, type[Validator]]] = {
    "draft7": ("http://json-schema.org/draft-07/schema#", jsonschema.Draft7Validator),
    "draft2020-12": ("https://json-schema.org/draft/2020-12/schema", jsonschema.Draft202012Validator),
}

#: Keywords without effect on outputs.
ANNOTATIONS = {
    *("$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "contentEncoding", "contentMediaType"),
    *("contentSchema", "default", "definitions", "deprecated", "description", "examples", "readOnly", "title"),
    "writeOnly",
}


@cache
def sections_of_the_page() -> tuple[str, frozenset[str], str]:
    """What the page says of JSON schemas: all of it, the keywords that outputs obey, and what it says of others."""
    page = (ROOT / "docs" / "structured-output.md").read_text(encoding="utf-8")
    section = page.partition("\n## JSON schemas\n")[2].partition("\n## ")[0]
    enforced, _, rest = section.partition("These are enforced under a condition.")
    table, _, relaxed = rest.partition("**Relaxed keywords.**")
    in_table = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)))
    return section, frozenset({*re.findall(r"`(\w+)`[,.]", enforced), *in_table}), relaxed


def schema_of(draft: str, group: dict[str, Any]) -> dict[str, Any]:
    """The schema of a group of tests, which says its draft."""
    given = group["schema"]
    if isinstance(given, bool):
        given = {} if given else {"not": {}}
    return {"$schema": DRAFTS[draft][0], **given}


def grammar_of(schema: dict[str, Any]) -> Grammar | None:
    """The grammar of a schema; None if it is refused."""
    return compiled_form(schema)[0]


def compiled_form(schema: dict[str, Any]) -> tuple[Grammar | None, dict[str, Any]]:
    """The grammar of a schema, None if it is refused; and the schema without the keywords that it leaves out."""
    relaxed: list[str] = []
    form = StructuredOutputsParams(json=schema, disable_additional_properties=False)
    try:
        return make_grammar(form, relaxed=relaxed), without_keywords(schema, relaxed)
    except InvalidRequestError as e:
        assert str(e).startswith("structured_outputs.json")
        return None, schema


def check_outputs(draft: str, schema: dict[str, Any], grammar: Grammar, seed: str, count: int) -> int:
    """Generates outputs and validates those that ended; how many did."""
    kind = DRAFTS[draft][1]
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    ended = 0
    for i in range(count):
        text = generate(grammar, random.Random(f"{seed} {i}"))
        if text is not None:
            ended += 1
            try:
                validator.validate(json.loads(text))
            except OverflowError:  # the library divides no 1e999
                continue
    return ended


@cache
def compiled(draft: str, keyword: str) -> tuple[int, int]:
    """Of the groups of tests of a keyword in the suite: how many compile, and how many there are."""
    groups = SUITE[draft][keyword]
    return sum(grammar_of(schema_of(draft, group)) is not None for group in groups), len(groups)


@pytest.mark.parametrize("draft", DRAFTS)
def test_outputs_are_valid_wherever_a_schema_of_the_suite_compiles(draft: str) -> None:
    wrong, ended = [], 0
    for keyword, groups in SUITE[draft].items():
        for group in groups:
            schema = schema_of(draft, group)
            grammar, obeyed = compiled_form(schema)
            if grammar is None:
                continue
            valid = DRAFTS[draft][1](obeyed, format_checker=DRAFTS[draft][1].FORMAT_CHECKER).is_valid
            for case in group["tests"]:
                if case["valid"] or (obeyed != schema and valid(case["data"])):
                    continue
                if accepts(grammar, json.dumps(case["data"], ensure_ascii=False)):
                    wrong.append((keyword, group["description"], case["description"]))
            ended += check_outputs(draft, obeyed, grammar, f"{keyword} {group['description']}", 2)
    assert wrong == []
    assert ended > 300


@pytest.mark.parametrize("draft", DRAFTS)
def test_outputs_of_random_schemas_are_valid(draft: str) -> None:
    check_random(draft, seeds=range(50))


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_outputs_of_many_random_schemas_are_valid(draft: str) -> None:
    check_random(draft, seeds=range(1000, 7000))


def check_random(draft: str, seeds: range) -> None:
    schemas = ended = 0
    for seed in seeds:
        schema = {"$schema": DRAFTS[draft][0], **random_schema(random.Random(seed))}
        grammar, obeyed = compiled_form(schema)
        if grammar is not None:
            schemas += 1
            ended += check_outputs(draft, obeyed, grammar, str(seed), 2)
    assert schemas > len(seeds) / 2 and ended > schemas


#: Keywords that restrict nothing by themselves.
WITH_OTHERS = {"$dynamicAnchor", "$recursiveAnchor", "then", "else", "if", "minContains", "maxContains"}


@pytest.mark.parametrize("keyword", sorted({*RELAXED, "uniqueItems"} - WITH_OTHERS))
def test_a_keyword_that_cannot_be_obeyed_is_left_out_and_reported_or_refused(keyword: str) -> None:
    schema = {"properties": {"a/b": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"items": {keyword: True}}}}
    relaxed: list[str] = []
    make_grammar(StructuredOutputsParams(json=schema), relaxed=relaxed)
    assert relaxed == [f"/$defs/c/items/{keyword}"]
    with pytest.raises(InvalidRequestError, match=f"^structured_outputs.json at /.defs/c/items/.?{keyword.strip('$')}"):
        make_grammar(StructuredOutputsParams(json=schema, strict=True))


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_page_lists_every_keyword_of_the_draft_that_restricts_values(draft: str) -> None:
    assert keywords(draft) - {*sections_of_the_page()[1], *ANNOTATIONS, *RELAXED} == set()


def keywords(draft: str) -> set[str]:
    """All keywords of a draft: the properties of its metaschemas."""
    metaschema: Any = DRAFTS[draft][1].META_SCHEMA
    parts = [metaschema]
    if "allOf" in metaschema:
        resolver = REGISTRY.resolver(metaschema["$id"])
        parts += [resolver.lookup(part["$ref"]).contents for part in metaschema["allOf"]]
    return {name for part in parts for name in part["properties"]}


def test_names_of_additional_properties_are_not_those_of_others_in_another_spelling() -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    grammar = make_grammar(StructuredOutputsParams(json=schema))
    assert accepts(grammar, '{"a": 1, "b": "x"}')
    assert not accepts(grammar, r'{"\u0061": "x"}')


def test_control_characters_without_an_escape_of_their_own_are_refused() -> None:
    refused: tuple[dict[str, Any], ...] = (
        {"const": "a\0"},
        {"const": "\x7f"},
        {"enum": [{"a": ["\x1f"]}]},
        {"properties": {"\x01": {}}},
        {"required": ["\x01"]},
    )
    for schema in refused:
        with pytest.raises(InvalidRequestError, match="control characters"):
            make_grammar(StructuredOutputsParams(json=schema))
    assert accepts(make_grammar(StructuredOutputsParams(json={"const": "\\u0001\n"})), r'"\\u0001\n"')


def test_many_properties_are_not_promised_where_names_may_come_twice() -> None:
    open_names = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert grammar_of({**open_names, "minProperties": 1}) is not None
    relaxed: list[str] = []
    make_grammar(StructuredOutputsParams(json={**open_names, "minProperties": 2}), relaxed=relaxed)
    assert relaxed == ["/minProperties"]


def test_the_page_says_what_is_relaxed_and_how_many_schemas_of_the_suite_compile() -> None:
    section, supported, relaxed = sections_of_the_page()
    of_drafts = {keyword for draft in DRAFTS for keyword in keywords(draft) if keyword in RELAXED}
    assert of_drafts <= set(re.findall(r"`([$\w]+)`", relaxed.partition(" is ignored and reported")[0]))
    for draft in DRAFTS:
        names = [keyword.lstrip("$") for keyword in sorted(supported) if keyword in keywords(draft)]
        counts = [compiled(draft, name) for name in names if name in SUITE[draft]]
        served, number = (sum(count) for count in zip(*counts, strict=True))
        assert f"{served} of {number} ({draft.replace('draft', 'draft ')})" in section
