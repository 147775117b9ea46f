"""The format of an answer: structured outputs, tool calls, and the parsers of tool calls and reasoning."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping, MutableMapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import msgspec
from starlette.requests import Request

from octavo.core.errors import InvalidRequestError
from octavo.core.model_config import ReasoningMarks
from octavo.core.sampling_params import (
    StructuredOutputsParams,
    structured_outputs_of,
)
from octavo.engine.chat_messages import HERMES, CallFormat
from octavo.engine.tokenizer import Tokenizer
from octavo.grammar.json_schema import forbid_extra_properties, read_json, with_options
from octavo.server.http.errors import invalid_at, unsupported
from octavo.server.http.middleware import client_of
from octavo.server.logging import log_fields
from octavo.server.reasoning_parsers import ReasoningParser, find_reasoning_parser, load_reasoning_parser
from octavo.server.tool_parsers import ToolParser, find_tool_parser, load_tool_parser
from octavo.server.tool_parsers.call_grammar import CallGrammar
from octavo.server.tool_parsers.formats import Hermes

if TYPE_CHECKING:
    from octavo.server.chat_call import RequestTools
    from octavo.server.openai.protocol import FormFields, ResponseFormat
    from octavo.server.state import ServerState


# Structured outputs: several APIs have fields for them, of which a request may use one.

#: Other names of fields of ``structured_outputs``.
_OTHER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}


class AnswerFormat(NamedTuple):
    """Structured outputs, and the path in the request that asks for them."""

    #: Such as ``response_format.json_schema.schema``.
    path: str
    params: StructuredOutputsParams

    @property
    def field(self) -> str:
        return self.path.partition(".")[0]

    @property
    def names(self) -> dict[str, str]:
        """Paths of ``structured_outputs`` in errors -> the request's."""
        names = {f"structured_outputs.{self.params.form}": self.path}
        if self.field == "guided_json":
            names["structured_outputs.whitespace_pattern"] = "guided_whitespace_pattern"
        return names


def read_answer_format(body: FormFields) -> AnswerFormat | None:
    """The structured outputs of a request; None: free text. Error messages begin with the field."""
    formats: dict[str, AnswerFormat] = {}
    if body.response_format is not None and (read := _read_response_format(body.response_format)) is not None:
        formats["response_format"] = read
    if body.structured_outputs is not None:
        params = structured_outputs_of(body.structured_outputs)
        formats["structured_outputs"] = AnswerFormat(f"structured_outputs.{params.form}", params)
    for field, name in _OTHER_NAMES.items():
        value = getattr(body, field)
        if value is None or value == "":
            continue
        options: dict[str, Any] = {name: value}
        if field == "guided_json":
            options["whitespace_pattern"] = body.guided_whitespace_pattern or None
        try:
            formats[field] = AnswerFormat(field, StructuredOutputsParams(**options))
        except InvalidRequestError as e:
            raise e.renamed({f"structured_outputs.{name}": field}) from None
    if len({_canonical(each.params) for each in formats.values()}) > 1:
        raise invalid_at(
            list(formats)[-1], f"{' and '.join(formats)} each set the format of the answer; send one of them"
        )
    if body.guided_whitespace_pattern and "guided_json" not in formats:
        raise invalid_at("guided_whitespace_pattern", "is allowed only with guided_json")
    return next(iter(formats.values()), None)


#: Fields of ``response_format`` -> its type.
_KIND_OF_FIELD = {
    "json_schema": "json_schema", "schema_": "json_object", "structures": "structural_tag",
    "triggers": "structural_tag",
}  # fmt: skip


def _read_response_format(response_format: ResponseFormat) -> AnswerFormat | None:
    for name, kind in _KIND_OF_FIELD.items():
        if getattr(response_format, name) is not None and kind != response_format.type:
            name = name.rstrip("_")
            raise invalid_at(f"response_format.{name}", f"is not of type {response_format.type!r}")
    if response_format.type == "json_object":
        if response_format.schema_ is not None:
            return AnswerFormat("response_format.schema", StructuredOutputsParams(json=response_format.schema_))
        return AnswerFormat("response_format", StructuredOutputsParams(json_object=True))
    if response_format.type == "json_schema":
        if response_format.json_schema is None or response_format.json_schema.schema_ in (None, False):
            raise invalid_at("response_format.json_schema.schema", "must be a JSON schema")
        params = StructuredOutputsParams(
            json=response_format.json_schema.schema_,
            disable_additional_properties=response_format.json_schema.strict or None,
            strict=response_format.json_schema.strict or None,
        )
        return AnswerFormat("response_format.json_schema.schema", params)
    if response_format.type == "structural_tag":
        tag = {"structures": response_format.structures, "triggers": response_format.triggers}
        return AnswerFormat("response_format", StructuredOutputsParams(structural_tag=tag))
    return None


def _canonical(params: StructuredOutputsParams) -> str:
    """Text that is equal for a schema and its JSON text, and for an option that is left out or null."""
    fields = {name: value for name, value in msgspec.to_builtins(params).items() if value not in (None, False, [])}
    for name in ("json", "structural_tag"):
        if isinstance(fields.get(name), str):
            with contextlib.suppress(ValueError, RecursionError):
                fields[name] = json.loads(fields[name])
    return json.dumps(fields, sort_keys=True)


#: The response's header with the schema keywords that the grammar does not enforce.
RELAXED_HEADER = "x-octavo-relaxed-schema"
#: Maximum characters of its value: servers and proxies bound the size of all headers.
_MAX_HEADER_LENGTH = 1000


def report_relaxed_keywords(scope: MutableMapping[str, Any], paths: Sequence[str]) -> None:
    """Adds ``RELAXED_HEADER`` to the response if it has not begun, and to the request's line in the access log.

    ``paths`` are JSON pointers within the schema; they are percent-encoded for the header.
    """
    shown, length = list[str](), 0
    for path in paths:
        encoded = quote(path, safe="/~$.-_[]: ")
        if length + len(encoded) > _MAX_HEADER_LENGTH:
            shown.append(f"and {len(paths) - len(shown)} more")
            break
        shown.append(encoded)
        length += len(encoded) + 2
    value = ", ".join(shown)
    scope.setdefault("state", {}).setdefault("response_headers", {})[RELAXED_HEADER] = value
    log_fields(scope)["relaxed_schema"] = value


# The grammar of a chat's answer.

_OBJECT: Mapping[str, Any] = {"type": "object"}


def answer_grammar(
    tools: RequestTools,
    calls: CallFormat | None,
    special: Mapping[str, int],
    answer: StructuredOutputsParams | None,
) -> StructuredOutputsParams | None:
    """The grammar of an answer that may have tool calls; None: free text.

    ``calls``: how the model writes calls (None: there is no grammar of its format, or no tools). ``special``: ids of
    special tokens by text. ``answer``: the structured outputs of an answer without calls.
    """
    if calls is None or tools.choice == "none":
        return answer

    def grammar(schemas: Mapping[str, Mapping[str, Any]]) -> CallGrammar:
        try:
            return CallGrammar(calls, schemas, special, parallel=tools.parallel, strict=tools.strict)
        except InvalidRequestError as e:
            paths = {name: function.parameters_path for name, function in tools.functions.items()}
            raise e.renamed(paths) from None

    if tools.must_call:
        return StructuredOutputsParams(grammar=grammar(tools.callable).calls())
    if answer is None and not tools.strict:
        return None
    schemas = {name: schema if name in tools.strict else _OBJECT for name, schema in tools.callable.items()}
    if answer is not None:
        return StructuredOutputsParams(grammar=grammar(schemas).calls_or(_rule(answer)))
    if calls.answer:
        return StructuredOutputsParams(grammar=grammar(schemas).calls_or(r"/(.|\n)*/"))
    if calls.trigger is None:  # only the first characters of the answer tell a call from text
        return StructuredOutputsParams(grammar=grammar(schemas).calls_or(r"/([^\[{\s](.|\n)*)?/"))
    return StructuredOutputsParams(grammar=grammar(schemas).calls_in_text())


def _rule(answer: StructuredOutputsParams) -> str:
    """Structured outputs as the right side of a Lark rule."""
    if answer.json_object or answer.json not in (None, False):
        schema = dict(_OBJECT) if answer.json_object else answer.json
        if isinstance(schema, str):
            schema = read_json(schema, "structured_outputs.json")
        if not isinstance(schema, dict):
            schema = {}
        elif answer.disable_additional_properties is not False:
            schema = forbid_extra_properties(schema)
        schema = with_options(schema, answer)
        if answer.strict:  # see ``grammar_source``
            schema["x-guidance"]["strict"] = True
        return f"%json {json.dumps(schema)}"
    if answer.choice is not None:
        return " | ".join(msgspec.json.encode(text).decode() for text in answer.choice)
    problem = f"optional calls are not supported with structured_outputs.{answer.form}"
    raise unsupported("tools", f"{problem}: set tool_choice to none or required, or use json or choice")


async def blame_tool(service: ServerState, request: Request, tools: RequestTools) -> None:
    """Raises an error about the first tool whose schema alone cannot be compiled."""
    for function in tools.functions.values():
        schema = forbid_extra_properties(dict(function.parameters))
        alone = StructuredOutputsParams(json=schema, strict=function.is_strict)
        try:
            await service.llm.inputs.grammars.compile_for(client_of(request), alone)
        except InvalidRequestError as e:
            raise e.renamed({"structured_outputs.json": function.parameters_path}) from None


# The parsers of the served model: named by options, or detected from its chat template.

_AUTO, _NONE = "auto", "none"


class ChatFormats:
    """A server's parsers: each a name, ``module:Class``, ``auto`` (detected from the chat template) or ``none``."""

    def __init__(self, tool_call_parser: str = _AUTO, reasoning_parser: str = _AUTO) -> None:
        self.detects_tool_parser = tool_call_parser == _AUTO
        self._detects_reasoning = reasoning_parser == _AUTO
        named = tool_call_parser not in (_AUTO, _NONE)
        self._tool_parser = load_tool_parser(tool_call_parser) if named else None
        named = reasoning_parser not in (_AUTO, _NONE)
        self._reasoning_parser = load_reasoning_parser(reasoning_parser) if named else None

    def tool_parser(self, template: str, variables: Set[str]) -> type[ToolParser] | None:
        """The parser for a chat template that reads ``variables``; None: tool calls stay in the content."""
        if not self.detects_tool_parser:
            return self._tool_parser
        parser = find_tool_parser(template)
        if parser is None and not {"tools", "custom_tools"} & variables:
            return Hermes  # the prompt describes this format
        return parser

    def reasoning_parser(self, template: str) -> type[ReasoningParser] | None:
        """The parser for a chat template; None: reasoning stays in the content."""
        return find_reasoning_parser(template) if self._detects_reasoning else self._reasoning_parser

    def named_marks(self) -> ReasoningMarks | None:
        """The marks of the parser that the option names; None: the chat template decides."""
        return None if self._reasoning_parser is None else self._reasoning_parser.marks()

    def call_format(self, template: str, variables: Set[str]) -> CallFormat:
        """The format that the prompt describes, for templates that do not know tools."""
        parser = self.tool_parser(template, variables)
        return (None if parser is None else parser.call_format(template)) or HERMES


@functools.lru_cache(maxsize=16)
def visible_tokens(tokenizer: Tokenizer, markers: tuple[str, ...]) -> frozenset[int]:
    """Ids of the special tokens within the markers."""
    return frozenset(i for text, i in special_tokens(tokenizer).items() if any(text in marker for marker in markers))


@functools.lru_cache(maxsize=4)
def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.special_texts}
    return {text: token_id for text, token_id in ids.items() if token_id is not None}
