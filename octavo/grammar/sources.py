"""From structured output parameters to a checked grammar in llguidance's notation: Lark's, or JSON."""

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
    find_endless,
    forbid_extra_properties,
    locate,
    one_of_to_any_of,
    prepare,
    read_json,
    target,
    with_options,
)
from octavo.grammar.matcher import parser_limits
from octavo.grammar.notations import is_lark, lark_literal, lark_of_gbnf, lark_symbols, plain_lark
from octavo.grammar.regex_automaton import single_whole_match, whole_match
from octavo.grammar.schema_dialects import Schema

MAX_CHOICES = 10_000
_NO_TEXT = "no text has this form"
#: "at 2(4): ..." and "2(4): ...": line and column of a Lark grammar.
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
#: An error of Rust's regex crate: the regex, a line that marks the place, and the error.
_REGEX = re.compile(r"regex parse error:\n(?:    .*\n)?( *)\^+.*\nerror: (.*)")
_LONGEST = 300
#: Errors of llguidance -> the keywords to relax because of them.
_RELAXED_BY_ERROR = {
    "min/maxProperties only supported": ("minProperties", "maxProperties"),
    "are not disjoint": ("patternProperties",),
}
#: Maximum trials of a schema, each with further keywords relaxed.
_MOST_TRIALS = 20


def check(content: bytes) -> bytes:
    """``make_grammar`` in the sandbox: ``CheckRequest`` to ``CheckAnswer``, as JSON, which has integers of any size."""
    request = msgspec.json.decode(content, type=CheckRequest)
    try:
        relaxed: list[str] = []
        special = frozenset(request.special_tokens)
        answer = CheckAnswer(make_grammar(request.params, special, request.vocab_size, relaxed))
        answer.relaxed = [path[:LONGEST_PATH] for path in dict.fromkeys(relaxed)][:MAX_RELAXED]
    except InvalidRequestError as e:
        answer = CheckAnswer(error=e.data)
    return msgspec.json.encode(answer)


def make_grammar(
    params: StructuredOutputsParams,
    special_tokens: Collection[str] = (),
    vocab_size: int = 0,
    relaxed: list[str] | None = None,
) -> Grammar:
    """Compiles the grammar of a request on trial, without limits of time and memory (``GrammarCompiler`` has them).

    ``special_tokens``: texts that are single tokens. ``relaxed`` receives the JSON pointers of keywords that are not
    enforced. Raises InvalidRequestError with the field and the place of the error.
    """
    key, place = digest(params), f"structured_outputs.{params.form}"
    relaxed = [] if relaxed is None else relaxed
    if params.json_object:
        source = _schema_source({"type": "object"}, params, place, relaxed)
    elif params.json not in (None, False):
        source = _schema_source(_read_schema(params.json, params, place, relaxed), params, place, relaxed)
    else:
        if params.structural_tag is not None:
            source = _tags_source(params, special_tokens, relaxed)
        elif params.choice is not None:
            source = _choice_source(params.choice)
        elif params.regex is not None:
            source = _regex_source(params.regex, place)
        else:
            source = _grammar_source(params.grammar or "", place, relaxed)
        if error := _compile_error(source, byte_tokenizer(frozenset(special_tokens), vocab_size)):
            raise InvalidRequestError(_readable(error, with_place=source == params.grammar), path=place)
    if params.begin_with:
        source = _after_text(params.begin_with, source, special_tokens)
    if len(source.encode()) > MAX_BYTES:
        raise InvalidRequestError(f"becomes a grammar of more than {MAX_BYTES} bytes", path=place)
    return Grammar(key, source, params.begin_after)


def _after_text(text: str, source: str, special_tokens: Collection[str]) -> str:
    """The grammar ``source`` behind a text, whose special tokens must have names in angle brackets."""
    grammar = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
    start = f"start: {lark_symbols(text, dict.fromkeys(special_tokens, -1))} @answer"
    grammars = [{"lark_grammar": start}, {**grammar, "name": "answer"}]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


# JSON schemas.


def _read_schema(value: Any, params: StructuredOutputsParams, place: str, relaxed: list[str]) -> Schema:
    """A copy of the schema with the keywords that llguidance supports; errors begin with ``place``."""
    schema = read_json(value if isinstance(value, str) else msgspec.json.encode(value), place)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequestError("must be a JSON schema, which is an object", path=place, got=schema)
    prepare(schema, place, relaxed, strict=bool(params.strict))
    if params.disable_additional_properties is not False:
        schema = forbid_extra_properties(schema)
    one_of_to_any_of(schema)
    return schema


def _schema_source(schema: Schema, params: StructuredOutputsParams, place: str, relaxed: list[str]) -> str:
    """The source of a schema that compiles; keywords that llguidance cannot compile are relaxed."""
    if (unending := find_endless(schema)) is not None:
        raise SchemaError(place, unending, "no value is complete, as it needs another of its own schema within it")

    def source_of(part: Schema) -> str:
        return json.dumps({"grammars": [{"json_schema": _with_options(part, params)}]}, ensure_ascii=False)

    for _ in range(_MOST_TRIALS):
        source = source_of(schema)
        if not (error := _compile_error(source)):
            return source
        path = locate(schema, lambda part: _compile_error(source_of(part)))
        culprit = target(schema, {"$ref": f"#{path}"})
        keywords = next((keywords for text, keywords in _RELAXED_BY_ERROR.items() if text in error), ())
        left_out = [keyword for keyword in keywords if culprit is not None and keyword in culprit[1]]
        if not left_out or culprit is None:
            break
        for keyword in left_out:
            if params.strict:
                raise SchemaError(place, f"{path}/{keyword}", _readable(error, with_place=False))
            del culprit[1][keyword]
            relaxed.append(f"{path}/{keyword}")
    raise SchemaError(place, path, _readable(error, with_place=False))


def _with_options(schema: Schema, params: StructuredOutputsParams) -> Schema:
    result = with_options(schema, params)
    return {**result, "x-guidance": _with_rust_white_space(result["x-guidance"], "structured_outputs")}


def _with_rust_white_space(options: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Options of llguidance with the regex of white space in Rust's dialect."""
    pattern = options.get("whitespace_pattern")
    if not isinstance(pattern, str):
        return dict(options)
    try:
        return {**options, "whitespace_pattern": single_whole_match(pattern)}
    except RegexError as e:
        raise InvalidRequestError(str(e), path=f"{place}.whitespace_pattern") from None


# Choices, regexes, grammars.


def _choice_source(texts: Sequence[str]) -> str:
    if len(texts) > MAX_CHOICES:
        raise InvalidRequestError(
            f"has {len(texts)} texts; at most {MAX_CHOICES} are compiled: use a regex or a grammar",
            path="structured_outputs.choice",
        )
    # One terminal: alternatives of a rule would be a terminal each, at 40 times the cost.
    return "start: CHOICE\nCHOICE: " + " | ".join(lark_literal(text) for text in dict.fromkeys(texts))


def _regex_source(regex: str, place: str) -> str:
    try:
        parts = whole_match(regex)
    except RegexError as e:
        raise InvalidRequestError(str(e), path=place) from None
    if len(parts) == 1:
        return LLMatcher.grammar_from_regex(parts[0])
    return "start: MATCH\nMATCH: " + " & ".join(f"/{part}/" for part in parts if part)


def _grammar_source(text: str, place: str, relaxed: list[str]) -> str:
    """A grammar in Lark, or in GBNF, which has rules with ``::=`` and none called ``start``."""

    def rewrite_schema(text: str) -> str:
        """A schema within the grammar; its options for llguidance stand beside its keywords."""
        schema = read_json(text, place)
        if not isinstance(schema, dict):
            return text
        options = schema.pop("x-guidance", None)
        strict = isinstance(options, dict) and options.pop("strict", False) is True
        prepare(schema, place, relaxed, strict=strict)
        one_of_to_any_of(schema)
        if isinstance(options, dict):
            schema["x-guidance"] = _with_rust_white_space(options, place)
        return json.dumps(schema, ensure_ascii=False)

    try:
        if is_lark(text):
            return plain_lark(text, rewrite_schema)
        if "::=" in text:
            return lark_of_gbnf(text)
    except SchemaError:
        raise
    except InvalidRequestError as e:
        raise e.at(place) from None
    raise InvalidRequestError("is neither Lark (with a rule 'start:') nor GBNF (with 'root ::=')", path=place)


# Structural tags: free text in which a tag is followed by JSON of its schema.


class _Tag(NamedTuple):
    #: The start of ``begin`` after which the text is constrained.
    trigger: str
    begin: str
    schema: Schema
    end: str


def _tags_source(params: StructuredOutputsParams, special_tokens: Collection[str], relaxed: list[str]) -> str:
    """Cf. llguidance's documentation, docs/syntax.md, "Tool calling": a lazy terminal ends as soon as it can."""
    tags = _read_tags(params, relaxed)
    for i, tag in enumerate(tags):
        paths: list[str] = []
        _schema_source(tag.schema, params, f"structured_outputs.structural_tag.structures[{i}].schema", paths)
        relaxed += [f"structures[{i}].schema {path}" for path in paths]
    rules = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(tags)))})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/"]
    for i, tag in enumerate(tags):
        schema = json.dumps(_with_options(tag.schema, params), ensure_ascii=False)
        body = f"{lark_literal(tag.begin[len(tag.trigger) :])} %json {schema} {lark_literal(tag.end)}"
        if tag.trigger in special_tokens:
            rules.append(f"tag_{i}: TEXT {tag.trigger} {body}")
        else:
            rules += [f"begin_{i}[lazy]: TEXT {lark_literal(tag.trigger)}", f"tag_{i}: begin_{i} {body}"]
    return "\n".join(rules)


def _read_tags(params: StructuredOutputsParams, relaxed: list[str]) -> list[_Tag]:
    place, value = "structured_outputs.structural_tag", params.structural_tag
    content = read_json(value, place) if isinstance(value, str) else value
    if not isinstance(content, dict):
        raise InvalidRequestError("must be an object with structures and triggers", path=place)
    if "format" in content:
        raise InvalidRequestError("is not supported; give structures and triggers", path=f"{place}.format")
    structures: Any = content.get("structures")
    triggers: Any = content.get("triggers")
    if not _is_filled(triggers, str) or not all(triggers):
        raise InvalidRequestError(
            "must be a list of texts that begin a tag, with at least one", path=f"{place}.triggers"
        )
    if not _is_filled(structures, dict):
        raise InvalidRequestError("must be a list of objects with begin, schema and end", path=f"{place}.structures")
    tags = []
    for i, structure in enumerate(structures):
        where = f"{place}.structures[{i}]"
        begin, end = structure.get("begin"), structure.get("end", "")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise InvalidRequestError("must have begin and end, which are texts", path=where)
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            raise InvalidRequestError(
                f"is {begin!r:.100}, which begins with none of the triggers", path=f"{where}.begin"
            )
        paths: list[str] = []
        schema = _read_schema(structure.get("schema"), params, f"{where}.schema", paths)
        relaxed += [f"structures[{i}].schema {path}" for path in paths]
        tags.append(_Tag(trigger, begin, schema, end))
    return tags


def _is_filled(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


# Compilation on trial.


def _compile_error(source: str, tokenizer: LLTokenizer | None = None) -> str:
    """llguidance's error for a grammar, or ""; by default with a tokenizer for bytes alone."""
    matcher = LLMatcher(tokenizer or byte_tokenizer(), source, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return _NO_TEXT if matcher.get_error().startswith("NoExtension") else matcher.get_error()
    return _NO_TEXT if matcher.is_stopped() and not matcher.is_accepting() else ""


def _readable(message: str, *, with_place: bool) -> str:
    """An error of llguidance in one line; ``with_place``: its lines and columns are those of the user's text."""
    match = _PLACE.match(message)
    place = f"line {match[1]}, column {match[2]}: " if match and with_place else ""
    text = message[match.end() :] if match else message
    if (regex := _REGEX.search(text)) is not None:
        text = f"{regex[2]}, at character {len(regex[1]) - 3} of the regex"
    elif text.startswith("oneOf constraints"):
        text = "a oneOf is supported if no value can be of two of its schemas, as far as that is easily seen"
    elif text.startswith("Resource "):
        text = f"the document {text.split()[1]} is not fetched; references are supported within a schema"
    elif text.startswith(("grammar size", "schema too large", "initial lexer configuration", "panic")):
        text = "it is too large to be compiled"
    elif text.startswith("recursion limit"):
        text = "it is nested too deeply"
    else:
        text = text.partition("(in regex): ")[2] or text
    return place + text.strip().partition("\n")[0][:_LONGEST].removesuffix(":")


@functools.lru_cache(2)
def byte_tokenizer(special_tokens: frozenset[str] = frozenset(), vocab_size: int = 0) -> LLTokenizer:
    """A token for each byte, an EOS token (256), the special tokens, and ids without text up to ``vocab_size``."""
    return LLTokenizer(TokenizerWrapper(_Bytes(special_tokens, vocab_size)))


class _Bytes:
    bos_token_id = None

    def __init__(self, special_tokens: Collection[str], vocab_size: int) -> None:
        special = [b"</s>", *(text.encode() for text in sorted(special_tokens))]
        self.tokens = [bytes([i]) for i in range(256)] + special
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self.eos_token_id = 256
        self.special_token_ids = list(range(256, 256 + len(special)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
