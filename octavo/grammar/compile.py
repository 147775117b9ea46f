"""From the form that a request asks for to a checked grammar."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from octavo.core.errors import InvalidRequestError
from octavo.core.structured_outputs import Grammar, StructuredOutputsParams
from octavo.grammar.forms import LONGEST_PATH, MAX_BYTES, MAX_RELAXED, CheckAnswer, CheckRequest, digest
from octavo.grammar.json_schema import Schema, SchemaError, target
from octavo.grammar.parser_limits import parser_limits
from octavo.grammar.schema_search import endless, locate
from octavo.grammar.sources import (
    choice_source,
    grammar_source,
    json_source,
    read_schema,
    read_tags,
    regex_source,
    tags_source,
)

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
