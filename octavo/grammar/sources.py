"""Forms of structured output in llguidance's notation: Lark's, or JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from octavo.core.errors import InvalidRequestError
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.grammar.closed_objects import closed
from octavo.grammar.json_form import with_options
from octavo.grammar.json_schema import Schema, prepare, read_json

#: Most texts of a choice.
MAX_CHOICES = 10_000


class Tag(NamedTuple):
    """A part of a structural tag: what begins it, the schema of the JSON in it, and what ends it."""

    #: The beginning of ``begin``, after which the text is bound.
    trigger: str
    begin: str
    schema: Schema
    end: str


def read_schema(value: Any, params: StructuredOutputsParams, place: str) -> Schema:
    """A JSON schema as an object of its own, whose keywords are supported.

    Raises:
        InvalidRequestError: it is no JSON, no schema, or not supported; the message begins with ``place``.
    """
    schema = read_json(value if isinstance(value, str) else msgspec.json.encode(value), place)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{place} must be a JSON schema, which is an object, not {schema!r:.100}")
    prepare(schema, place)
    return schema if params.disable_additional_properties is False else closed(schema)


def json_source(schema: Schema, params: StructuredOutputsParams) -> str:
    """JSON of a schema."""
    return json.dumps({"grammars": [{"json_schema": with_options(schema, params)}]}, ensure_ascii=False)


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
    return "start: CHOICE\nCHOICE: " + " | ".join(_literal(text) for text in dict.fromkeys(texts))


def _literal(text: str) -> str:
    """A text as a literal of Lark: JSON's, without the control characters that Lark does not take."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if 0x7F <= ord(c) < 0xA0 else c for c in quoted)


def grammar_source(text: str) -> str:
    """A grammar in Lark's notation, or in GBNF, which has rules with ``::=`` and none called ``start``.

    Raises:
        InvalidRequestError: what is read as GBNF is none.
    """
    try:
        return any_to_lark(text)
    except GbnfToLarkError as e:
        message = str(e)
    except RecursionError:
        message = "it is nested too deeply"
    except Exception as e:  # of the library, which raises Exception itself
        message = str(e)
    raise InvalidRequestError(
        f"structured_outputs.grammar is neither Lark (with a rule 'start:') nor GBNF (with 'root ::='): {message}"
    )


def read_tags(given: Any, params: StructuredOutputsParams) -> list[Tag]:
    """The parts of a structural tag.

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
        tags.append(Tag(trigger, begin, read_schema(structure.get("schema"), params, f"{where}.schema"), end))
    return tags


def tags_source(tags: Sequence[Tag], params: StructuredOutputsParams, special_tokens: Collection[str]) -> str:
    """Free text in which the beginning of a tag is followed by JSON of its schema and by its end.

    Cf. llguidance's documentation, docs/syntax.md, "Tool calling": a lazy terminal ends as soon as it can.
    """
    rules = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(tags)))})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/"]
    for i, tag in enumerate(tags):
        schema = json.dumps(with_options(tag.schema, params), ensure_ascii=False)
        body = f"{_literal(tag.begin[len(tag.trigger) :])} %json {schema} {_literal(tag.end)}"
        if tag.trigger in special_tokens:
            rules.append(f"tag_{i}: TEXT {tag.trigger} {body}")
        else:
            rules += [f"begin_{i}[lazy]: TEXT {_literal(tag.trigger)}", f"tag_{i}: begin_{i} {body}"]
    return "\n".join(rules)


def _filled(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)
