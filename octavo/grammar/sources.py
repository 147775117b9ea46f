"""Forms of structured output in llguidance's notation."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from octavo.core.errors import InvalidRequestError
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.grammar.limits import MAX_CHOICES

#: Of JSON schemas: unknown keywords that restrict are errors, and a value fits exactly one schema of a ``oneOf``.
_STRICT = {"lenient": False, "coerce_one_of": False}


def make_source(params: StructuredOutputsParams, special_tokens: Collection[str] = ()) -> str:
    """The form that ``params`` ask for, as a grammar in Lark's notation or in llguidance's JSON; it is not checked.

    ``special_tokens``: texts that the tokenizer has as a token of its own.

    Raises:
        InvalidRequestError: naming the field and the place of the error.
    """
    if params.json is not None and params.json is not False:
        return json_source(read_schema(params.json, "structured_outputs.json"), params)
    if params.json_object:
        return json_source({"type": "object"}, params)
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return choice_source(params.choice)
    if params.grammar is not None:
        return grammar_source(params.grammar)
    assert params.structural_tag is not None
    return tags_source(params, special_tokens)


def read_schema(value: str | Mapping[str, Any] | bool, place: str) -> dict[str, Any]:
    """A JSON schema as a mapping.

    Raises:
        InvalidRequestError: it is no JSON, or neither an object nor a boolean.
    """
    schema: Any = value
    if isinstance(value, str):
        try:
            schema = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
            raise InvalidRequestError(f"{place} is not valid JSON: {e}") from None
    if isinstance(schema, bool):
        return {} if schema else {"anyOf": []}
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{place} must be a JSON schema, an object, not {schema!r:.100}")
    return dict(schema)


def json_source(schema: Mapping[str, Any], params: StructuredOutputsParams) -> str:
    """JSON of a schema."""
    return json.dumps({"grammars": [{"json_schema": with_options(schema, params)}]}, ensure_ascii=False)


def with_options(schema: Mapping[str, Any], params: StructuredOutputsParams) -> dict[str, Any]:
    """The schema with the options by which llguidance reads it."""
    options: dict[str, Any] = dict(_STRICT)
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return {**schema, "x-guidance": options}


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
    return "start: CHOICE\nCHOICE: " + " | ".join(literal(text) for text in dict.fromkeys(texts))


def literal(text: str) -> str:
    """A text as a literal of Lark: JSON's, without the control characters that Lark does not take.

    Raises:
        InvalidRequestError: it has a surrogate without its pair, which is no text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"structured_outputs has a text with half a character: {text!r:.100}") from None
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if 0x7F <= ord(c) < 0xA0 else c for c in quoted)


def grammar_source(text: str) -> str:
    """A grammar in Lark's notation, or in GBNF, which begins with a rule of another form and has a rule ``root``.

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


def tags_source(params: StructuredOutputsParams, special_tokens: Collection[str]) -> str:
    """Free text in which a tag's beginning is followed by JSON of its schema and by its end.

    Raises:
        InvalidRequestError: the tags are not of this form.
    """
    place = "structured_outputs.structural_tag"
    given: Any = params.structural_tag
    if isinstance(given, str):
        given = read_schema(given, place)
    structures, triggers = given.get("structures"), given.get("triggers")
    if "format" in given:
        raise InvalidRequestError(
            f"{place} must have structures and triggers; its newer form, format, is not supported"
        )
    if not _filled(triggers, str) or not all(triggers):
        raise InvalidRequestError(f"{place}.triggers must be a list of texts that begin a tag, with at least one")
    if not _filled(structures, dict):
        raise InvalidRequestError(f"{place}.structures must be a list of objects with begin, schema and end")
    rules = [
        f"start: ({' | '.join(f'tag_{i}' for i in range(len(structures)))})* rest",
        "rest: TEXT",
        r"TEXT: /(.|\n)*/",
    ]
    for i, structure in enumerate(structures):
        where = f"{place}.structures[{i}]"
        begin, end = structure.get("begin"), structure.get("end", "")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise InvalidRequestError(f"{where} must have begin and end, which are texts")
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            raise InvalidRequestError(f"{where}.begin is {begin!r:.100}, which begins with none of the triggers")
        schema = with_options(read_schema(structure.get("schema"), f"{where}.schema"), params)
        body = f"{literal(begin[len(trigger) :])} %json {json.dumps(schema, ensure_ascii=False)} {literal(end)}"
        if trigger in special_tokens:
            rules.append(f"tag_{i}: TEXT {trigger} {body}")
        else:
            rules += [f"begin_{i}[lazy]: TEXT {literal(trigger)}", f"tag_{i}: begin_{i} {body}"]
    return "\n".join(rules)


def _filled(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)
