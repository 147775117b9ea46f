"""Forms of structured output in llguidance's notation: Lark's, or JSON."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import Grammar, StructuredOutputsParams
from octavo.grammar.compiler import LONGEST_PATH, MAX_BYTES, MAX_RELAXED, CheckAnswer, CheckRequest, digest
from octavo.grammar.ecma_regex import RegexError
from octavo.grammar.json_schema import (
    SchemaError,
    closed,
    endless,
    every_schema,
    locate,
    prepare,
    read_json,
    separate,
    target,
    with_options,
)
from octavo.grammar.matcher import parser_limits
from octavo.grammar.notations import is_lark, lark_literal, lark_of_gbnf, plain_lark
from octavo.grammar.regex_automaton import single_whole_match, whole_match
from octavo.grammar.schema_dialects import Schema

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


# From the form that a request asks for to a checked grammar.

NOTHING = "no text has this form"
#: "at 2(4): ..." and "2(4): ...": line and column of a Lark grammar.
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
#: What the regex library says: the regex, a line that marks the place in it, and the error.
_REGEX = re.compile(r"regex parse error:\n(?:    .*\n)?( *)\^+.*\nerror: (.*)")
_LONGEST = 300
#: Errors of llguidance -> the keywords that are left out because of them.
_RELAXED_BY_ERROR = {
    "min/maxProperties only supported": ("minProperties", "maxProperties"),
    "are not disjoint": ("patternProperties",),
}
#: Keywords that are left out one after the other before a schema is refused.
_MOST_TRIALS = 20


def check(content: bytes) -> bytes:
    """``make_grammar`` for the sandbox, from a ``CheckRequest`` to a ``CheckAnswer``.

    Both are JSON, which has integers of any size.
    """
    request = msgspec.json.decode(content, type=CheckRequest)
    try:
        relaxed: list[str] = []
        special = frozenset(request.special_tokens)
        answer = CheckAnswer(make_grammar(request.params, special, request.vocab_size, relaxed))
        answer.relaxed = [path[:LONGEST_PATH] for path in dict.fromkeys(relaxed)][:MAX_RELAXED]
    except InvalidRequestError as e:
        answer = CheckAnswer(error=str(e))
    return msgspec.json.encode(answer)


def make_grammar(
    params: StructuredOutputsParams,
    special_tokens: Collection[str] = (),
    vocab_size: int = 0,
    relaxed: list[str] | None = None,
) -> Grammar:
    """The grammar of a form, which was compiled on trial; for bounds of time and memory see ``GrammarCompiler``.

    Args:
        special_tokens: texts that the tokenizer has as a token of its own.
        vocab_size: of the network.
        relaxed: to which the places of keywords are added that the grammar leaves out, see ``prepare``.

    Raises:
        InvalidRequestError: naming the field and the place of the error.
    """
    key = digest(params)
    tokenizer = byte_tokenizer(frozenset(special_tokens), vocab_size)
    source = _checked_source(params, tokenizer, special_tokens, [] if relaxed is None else relaxed)
    if len(source.encode()) > MAX_BYTES:
        raise InvalidRequestError(f"structured_outputs.{params.form} becomes a grammar of more than {MAX_BYTES} bytes")
    return Grammar(key, source, params.begin_after)


def _checked_source(
    params: StructuredOutputsParams, tokenizer: LLTokenizer, special: Collection[str], relaxed: list[str]
) -> str:
    place = f"structured_outputs.{params.form}"
    if params.json_object:
        return _checked_schema({"type": "object"}, params, place, relaxed)
    if params.json not in (None, False):
        return _checked_schema(read_schema(params.json, params, place, relaxed), params, place, relaxed)
    if params.structural_tag is not None:
        tags = read_tags(params.structural_tag, params, relaxed)
        for i, tag in enumerate(tags):
            found: list[str] = []
            _checked_schema(tag.schema, params, f"{place}.structures[{i}].schema", found)
            relaxed += [f"structures[{i}].schema {path}" for path in found]
        source = tags_source(tags, params, special)
    elif params.choice is not None:
        source = choice_source(params.choice)
    elif params.regex is not None:
        source = regex_source(params.regex, place)
    else:
        source = grammar_source(params.grammar or "", relaxed)
    error = compile_error(source, tokenizer)
    if error:
        message = readable(error, with_place=source == params.grammar)
        raise InvalidRequestError(f"{place}: {message}")
    return source


def _checked_schema(schema: Schema, params: StructuredOutputsParams, place: str, relaxed: list[str]) -> str:
    """The source of a schema that compiles; keywords that llguidance finds too difficult are left out of it."""
    if (unending := endless(schema)) is not None:
        raise SchemaError(place, unending, "no value is complete, as it needs another of its own schema within it")
    for _ in range(_MOST_TRIALS):
        source = json_source(schema, params)
        error = compile_error(source)
        if not error:
            return source
        path = locate(schema, lambda part: compile_error(json_source(part, params)))
        found = target(schema, {"$ref": f"#{path}"})
        left_out = [keyword for keyword in _difficult(error) if found is not None and keyword in found[1]]
        if not left_out or found is None:
            break
        for keyword in left_out:
            if params.strict:
                raise SchemaError(place, f"{path}/{keyword}", readable(error, with_place=False))
            del found[1][keyword]
            relaxed.append(f"{path}/{keyword}")
    raise SchemaError(place, path, readable(error, with_place=False))


def _difficult(error: str) -> Sequence[str]:
    """The keywords without which a schema has not this error, and is still one that restricts the same values."""
    return next((keywords for part, keywords in _RELAXED_BY_ERROR.items() if part in error), ())


def compile_error(source: str, tokenizer: LLTokenizer | None = None) -> str:
    """What llguidance finds wrong with a grammar; empty: nothing. Without a tokenizer: of one for bytes alone."""
    matcher = LLMatcher(tokenizer or byte_tokenizer(), source, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return NOTHING if matcher.get_error().startswith("NoExtension") else matcher.get_error()
    return NOTHING if matcher.is_stopped() and not matcher.is_accepting() else ""


def readable(message: str, *, with_place: bool) -> str:
    """A message in one line; ``with_place``: lines and columns are those of the text that the user wrote."""
    found = _PLACE.match(message)
    place = f"line {found[1]}, column {found[2]}: " if found and with_place else ""
    text = message[found.end() :] if found else message
    if (regex := _REGEX.search(text)) is not None:
        text = f"{regex[2]}, at character {len(regex[1]) - 3} of the regex"
    elif text.startswith("oneOf constraints"):
        text = "a oneOf is supported if no value can be of two of its schemas, as far as that is easily seen"
    elif text.startswith("Resource "):
        text = f"the document {text.split()[1]} is not fetched; references are supported within a schema"
    elif text.startswith(("grammar size", "schema too large", "initial lexer configuration")):
        text = "it is too large to be compiled"
    elif text.startswith("recursion limit"):
        text = "it is nested too deeply"
    elif text.startswith("panic"):
        text = "it is too large to be compiled"
    else:
        text = text.partition("(in regex): ")[2] or text
    return place + text.strip().partition("\n")[0][:_LONGEST].removesuffix(":")


@functools.lru_cache(2)
def byte_tokenizer(special_tokens: frozenset[str] = frozenset(), vocab_size: int = 0) -> LLTokenizer:
    """A tokenizer with a token for each byte, an end-of-sequence token (256), and special tokens after it.

    Further ids up to ``vocab_size`` stand for nothing.
    """
    return LLTokenizer(TokenizerWrapper(_Bytes(special_tokens, vocab_size)))


class _Bytes:
    """A tokenizer with a token for each byte, as ``TokenizerWrapper`` wants it: what a grammar allows of any text."""

    bos_token_id = None

    def __init__(self, special_tokens: Collection[str], vocab_size: int) -> None:
        special = [b"</s>", *(text.encode() for text in sorted(special_tokens))]
        self.tokens = [bytes([i]) for i in range(256)] + special
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self.eos_token_id = 256
        self.special_token_ids = list(range(256, 256 + len(special)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
