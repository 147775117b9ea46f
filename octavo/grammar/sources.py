"""Forms of structured output in llguidance's notation: Lark's, or JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from llguidance import LLMatcher

from octavo.core.errors import InvalidRequestError
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.grammar.closed_objects import closed
from octavo.grammar.disjoint import separate
from octavo.grammar.ecma_regex import RegexError
from octavo.grammar.json_form import with_options
from octavo.grammar.json_schema import Schema, SchemaError, every_schema, prepare, read_json
from octavo.grammar.notations import is_lark, lark_literal, lark_of_gbnf, plain_lark
from octavo.grammar.rust_regex import single_whole_match, whole_match

#: Most texts of a choice.
MAX_CHOICES = 10_000


class Tag(NamedTuple):
    """A part of a structural tag: what begins it, the schema of the JSON in it, and what ends it."""

    #: The beginning of ``begin``, after which the text is bound.
    trigger: str
    begin: str
    schema: Schema
    end: str


def read_schema(value: Any, params: StructuredOutputsParams, place: str, relaxed: list[str] | None = None) -> Schema:
    """A JSON schema as an object of its own, whose keywords are those that llguidance follows.

    ``relaxed``: see ``prepare``.

    Raises:
        InvalidRequestError: it is no JSON, no schema, or not supported; the message begins with ``place``.
    """
    schema = read_json(value if isinstance(value, str) else msgspec.json.encode(value), place)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{place} must be a JSON schema, which is an object, not {schema!r:.100}")
    prepare(schema, place, [] if relaxed is None else relaxed, strict=bool(params.strict))
    if params.disable_additional_properties is not False:
        schema = closed(schema)
    separate(schema, every_schema(schema))
    return schema


def json_source(schema: Schema, params: StructuredOutputsParams) -> str:
    """JSON of a schema.

    Raises:
        InvalidRequestError: ``whitespace_pattern`` is no regex.
    """
    return json.dumps({"grammars": [{"json_schema": _with_options(schema, params)}]}, ensure_ascii=False)


def _with_options(schema: Schema, params: StructuredOutputsParams) -> Schema:
    written = with_options(schema, params)
    return {**written, "x-guidance": with_own_white_space(written["x-guidance"], "structured_outputs")}


def with_own_white_space(options: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Options of llguidance, whose pattern of white space is written as it reads regexes."""
    pattern = options.get("whitespace_pattern")
    if not isinstance(pattern, str):
        return dict(options)
    try:
        return {**options, "whitespace_pattern": single_whole_match(pattern)}
    except RegexError as e:
        raise InvalidRequestError(f"{place}.whitespace_pattern: {e}") from None


def choice_source(texts: Sequence[str]) -> str:
    """One of several texts.

    Raises:
        InvalidRequestError: there are too many.
    """
    if len(texts) > MAX_CHOICES:
        raise InvalidRequestError(
            f"structured_outputs.choice has {len(texts)} texts; at most {MAX_CHOICES} are compiled: a regex or a "
            "grammar may say it shorter"
        )
    # One terminal: as alternatives of a rule, each text would be a terminal of its own, at 40 times the cost.
    return "start: CHOICE\nCHOICE: " + " | ".join(lark_literal(text) for text in dict.fromkeys(texts))


def regex_source(regex: str, place: str) -> str:
    """Texts that match a regular expression as a whole.

    Raises:
        InvalidRequestError: it is none, or cannot be expanded.
    """
    try:
        parts = whole_match(regex)
    except RegexError as e:
        raise InvalidRequestError(f"{place}: {e}") from None
    if len(parts) == 1:
        return LLMatcher.grammar_from_regex(parts[0])
    return "start: MATCH\nMATCH: " + " & ".join(f"/{part}/" for part in parts if part)


def grammar_source(text: str, relaxed: list[str] | None = None) -> str:
    """A grammar in Lark's notation, or in GBNF, which has rules with ``::=`` and none called ``start``.

    ``relaxed``: see ``prepare``, of the schemas within it.

    Raises:
        InvalidRequestError: what is read as GBNF is none, or a schema within it is not supported.
    """
    place = "structured_outputs.grammar"
    if is_lark(text):
        try:
            return plain_lark(text, lambda schema: _schema_within(schema, place, relaxed))
        except SchemaError:
            raise
        except InvalidRequestError as e:
            raise InvalidRequestError(f"{place}: {e}") from None
    if "::=" in text:
        try:
            return lark_of_gbnf(text)
        except InvalidRequestError as e:
            raise InvalidRequestError(f"{place}: {e}") from None
    raise InvalidRequestError(f"{place} is neither Lark (with a rule 'start:') nor GBNF (with 'root ::=')")


def _schema_within(text: str, place: str, relaxed: list[str] | None) -> str:
    """A schema of a grammar, whose options for llguidance stand beside its keywords."""
    schema = read_json(text, place)
    if not isinstance(schema, dict):
        return text
    options = schema.pop("x-guidance", None)
    strict = isinstance(options, dict) and options.pop("strict", False) is True
    prepare(schema, place, [] if relaxed is None else relaxed, strict=strict)
    separate(schema, every_schema(schema))
    if isinstance(options, dict):
        schema["x-guidance"] = with_own_white_space(options, place)
    return json.dumps(schema, ensure_ascii=False)


def read_tags(given: Any, params: StructuredOutputsParams, relaxed: list[str] | None = None) -> list[Tag]:
    """The parts of a structural tag.

    ``relaxed``: see ``prepare``, of their schemas.

    Raises:
        InvalidRequestError: naming the part and what is wrong with it.
    """
    place = "structured_outputs.structural_tag"
    if isinstance(given, str):
        given = read_json(given, place)
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{place} must be an object with structures and triggers")
    if "format" in given:
        raise InvalidRequestError(f"{place}.format is not supported; give structures and triggers")
    structures: Any = given.get("structures")
    triggers: Any = given.get("triggers")
    if not _filled(triggers, str) or not all(triggers):
        raise InvalidRequestError(f"{place}.triggers must be a list of texts that begin a tag, with at least one")
    if not _filled(structures, dict):
        raise InvalidRequestError(f"{place}.structures must be a list of objects with begin, schema and end")
    tags = []
    for i, structure in enumerate(structures):
        where = f"{place}.structures[{i}]"
        begin, end = structure.get("begin"), structure.get("end", "")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise InvalidRequestError(f"{where} must have begin and end, which are texts")
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            raise InvalidRequestError(f"{where}.begin is {begin!r:.100}, which begins with none of the triggers")
        found: list[str] = []
        schema = read_schema(structure.get("schema"), params, f"{where}.schema", found)
        if relaxed is not None:
            relaxed += [f"structures[{i}].schema {path}" for path in found]
        tags.append(Tag(trigger, begin, schema, end))
    return tags


def tags_source(tags: Sequence[Tag], params: StructuredOutputsParams, special_tokens: Collection[str]) -> str:
    """Free text in which the beginning of a tag is followed by JSON of its schema and by its end.

    Cf. llguidance's documentation, docs/syntax.md, "Tool calling": a lazy terminal ends as soon as it can.
    """
    rules = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(tags)))})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/"]
    for i, tag in enumerate(tags):
        schema = json.dumps(_with_options(tag.schema, params), ensure_ascii=False)
        body = f"{lark_literal(tag.begin[len(tag.trigger) :])} %json {schema} {lark_literal(tag.end)}"
        if tag.trigger in special_tokens:
            rules.append(f"tag_{i}: TEXT {tag.trigger} {body}")
        else:
            rules += [f"begin_{i}[lazy]: TEXT {lark_literal(tag.trigger)}", f"tag_{i}: begin_{i} {body}"]
    return "\n".join(rules)


def _filled(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)
