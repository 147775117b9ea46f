"""The format of an answer: structured outputs, tool calls, and the parsers of tool calls and reasoning."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec
from pydantic_core import from_json
from starlette.requests import Request

from octavo.core.errors import InvalidRequestError
from octavo.core.model_config import ReasoningMarks
from octavo.core.sampling_params import (
    FORMS,
    TOO_COSTLY,
    UNUSABLE,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
    structured_outputs_of,
)
from octavo.engine.chat_messages import HERMES, CallFormat
from octavo.engine.tokenizer import Tokenizer
from octavo.grammar.json_schema import closed, read_json, with_options
from octavo.server.http.errors import invalid, unsupported
from octavo.server.http.middleware import client_of
from octavo.server.logging import log_fields
from octavo.server.openai.protocol import CustomTool, FunctionTool, OtherTool
from octavo.server.reasoning_parsers import ReasoningParser, find_reasoning_parser, load_reasoning_parser
from octavo.server.tool_parsers import ToolParser, find_tool_parser, load_tool_parser
from octavo.server.tool_parsers.formats import Hermes
from octavo.server.tool_parsers.tool_parser import CallGrammar

if TYPE_CHECKING:
    from octavo.server.openai.protocol import FormFields, ResponseFormat, Tool, ToolChoice
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

    #: Such as ``response_format.json_schema.schema``; replaces ``structured_outputs.json`` in errors.
    path: str
    params: StructuredOutputsParams

    @property
    def field(self) -> str:
        return self.path.partition(".")[0]


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
            for path in (f"structured_outputs.{form}" for form in FORMS):
                if str(e).startswith(path):
                    raise InvalidRequestError(str(e).replace(path, field, 1)) from None
            raise
    if len({_canonical(each.params) for each in formats.values()}) > 1:
        raise invalid(list(formats)[-1], f"{' and '.join(formats)} each set the format of the answer; send one of them")
    if body.guided_whitespace_pattern and "guided_json" not in formats:
        raise invalid("guided_whitespace_pattern", "guided_whitespace_pattern is allowed only with guided_json")
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
            raise invalid("response_format", f"response_format.{name} is not of type {response_format.type!r}")
    if response_format.type == "json_object":
        if response_format.schema_ is not None:
            return AnswerFormat("response_format.schema", StructuredOutputsParams(json=response_format.schema_))
        return AnswerFormat("response_format", StructuredOutputsParams(json_object=True))
    if response_format.type == "json_schema":
        if response_format.json_schema is None or response_format.json_schema.schema_ in (None, False):
            raise invalid("response_format", "response_format.json_schema.schema must be a JSON schema")
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


def rename_structured_outputs(error: InvalidRequestError, body: FormFields) -> InvalidRequestError:
    """The error with the path that the request used in place of ``structured_outputs``."""
    answer_format = read_answer_format(body)
    if answer_format is None:
        return error
    message = str(error).replace(f"structured_outputs.{answer_format.params.form}", answer_format.path, 1)
    if answer_format.field == "guided_json":
        message = message.replace("structured_outputs.whitespace_pattern", "guided_whitespace_pattern", 1)
    return InvalidRequestError(message)


def format_error(error: str | None, params: SamplingParams | BeamSearchParams) -> str | None:
    """The message of an engine's error about the structured outputs of a request; None: it has another cause."""
    structured = params.structured_outputs if isinstance(params, SamplingParams) else None
    if structured is None or error is None or not error.startswith((UNUSABLE, TOO_COSTLY)):
        return None
    return f"structured_outputs.{structured.form}: {error.partition(chr(10))[0]}"


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


# The tools of a chat request.

#: The limit of OpenAI's API.
MAX_TOOLS = 128
_MAX_DEPTH = 64
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
#: Keywords whose value is a schema, a list of schemas, or a mapping of names to schemas.
_SCHEMA_KEYWORDS = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPPING_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of a chat request, custom ones as functions, and the choice among them."""

    #: The argument ``tools`` of the chat template.
    shown: list[dict[str, Any]] | None
    #: Parameter schemas by name of the functions that may be called.
    callable: Mapping[str, Mapping[str, Any]]
    #: "named": the one function in ``callable`` must be called.
    choice: Literal["none", "auto", "required", "named"]
    #: Functions whose calls a grammar constrains also if the model may choose to call.
    strict: frozenset[str]
    parallel: bool
    #: Position of each function in the request.
    positions: Mapping[str, int]
    #: Functions that stand for custom tools.
    custom: frozenset[str] = frozenset()

    @property
    def must_call(self) -> bool:
        """Whether the answer must consist of calls."""
        return self.choice in ("required", "named")


def read_tools(
    tools: list[Tool] | None,
    tool_choice: str | ToolChoice | None = None,
    parallel_tool_calls: bool | None = None,
    leave_out: Callable[[str, str], None] | None = None,
) -> RequestTools:
    """``leave_out`` gets the path and type of each tool that only another service could run (None: refused)."""
    entries = tools or []
    if len(entries) > MAX_TOOLS:
        raise invalid("tools", f"tools has {len(entries)} functions; at most {MAX_TOOLS} are served")
    schemas: dict[str, Mapping[str, Any]] = {}
    shown: list[dict[str, Any]] = []
    positions: dict[str, int] = {}
    strict, custom = set[str](), set[str]()
    for i, tool in enumerate(entries):
        if isinstance(tool, OtherTool):
            if leave_out is None or "function" in (tool.model_extra or {}):  # whose type must be function
                raise unsupported("tools", f"tools[{i}].type {tool.type!r:.100} is not supported: only functions are")
            leave_out(f"tools[{i}]", tool.type)
            continue
        kind = tool.type
        name = tool.function.name if isinstance(tool, FunctionTool) else tool.custom.name
        if not _TOOL_NAME.fullmatch(name):
            message = f"tools[{i}].{kind}.name must be 1 to 64 letters, digits, _ and -, not {name!r:.100}"
            raise invalid("tools", message)
        if name in schemas:
            raise invalid("tools", f"tools[{i}].{kind}.name: there are two functions {name!r}")
        positions[name] = i
        if isinstance(tool, CustomTool):
            function = custom_function(tool.custom.description, tool.custom.format)
            schemas[name] = function["parameters"]
            shown.append({"type": "function", "function": {"name": name, **function}})
            custom.add(name)
        else:
            schemas[name] = _parameter_schema(tool, i)
            shown.append(tool.sent)
            strict |= {name} if tool.function.strict else set()
    choice, names = _read_tool_choice(tool_choice, list(schemas))
    if choice == "none":
        return RequestTools(None, {}, choice, frozenset(), False, {})
    return RequestTools(
        shown=shown,
        callable={name: schemas[name] for name in names},
        choice=choice,
        strict=frozenset(strict & set(names)),
        parallel=parallel_tool_calls is not False and choice != "named",
        positions=positions,
        custom=frozenset(custom),
    )


def custom_function(description: str | None, input_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """Description and parameters of the function that stands for a custom tool.

    ``input_format`` is the tool's ``format``, of a chat or a response; a grammar becomes part of the description.
    """
    text = description or ""
    if input_format is not None and input_format.get("type") == "grammar":
        nested = input_format.get("grammar")
        grammar = nested if isinstance(nested, dict) else input_format
        text += f"\nThe input follows this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    described = {"description": text.strip()} if text.strip() else {}
    return {**described, "parameters": {**schema, "additionalProperties": False}}


def custom_input(arguments: str) -> str:
    """The input of a custom tool call, whose arguments may be truncated."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    return str(value["input"]) if isinstance(value, dict) and "input" in value else arguments


def _parameter_schema(tool: FunctionTool, index: int) -> Mapping[str, Any]:
    schema = tool.function.parameters
    path = f"tools[{index}].function.parameters"
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise invalid("tools", f"{path}.type must be 'object', not {schema['type']!r:.100}")
    _check_schema(schema, path, 0)
    return {"type": "object", **schema}


def _check_schema(schema: object, path: str, depth: int) -> None:
    """Refuses values that cannot be a JSON schema; the grammar checks the keywords."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise invalid("tools", f"{path} must be a JSON schema, an object, not {schema!r:.100}")
    if depth > _MAX_DEPTH:
        raise invalid("tools", f"{path} is nested more than {_MAX_DEPTH} levels deep")
    types = schema.get("type", [])
    for kind in types if isinstance(types, list) else [types]:
        if not isinstance(kind, str) or kind not in _JSON_TYPES:
            raise invalid("tools", f"{path}.type must be a JSON type, not {kind!r:.100}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise invalid("tools", f"{path}.required must be a list of names, not {required!r:.100}")
    for key in _SCHEMA_KEYWORDS:
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            _check_schema(schema[key], f"{path}.{key}", depth + 1)
    for key in _LIST_KEYWORDS:
        if not isinstance(schema.get(key, []), list):
            raise invalid("tools", f"{path}.{key} must be a list of schemas, not {schema[key]!r:.100}")
        for k, item in enumerate(schema.get(key, [])):
            _check_schema(item, f"{path}.{key}[{k}]", depth + 1)
    for key in _MAPPING_KEYWORDS:
        if not isinstance(schema.get(key, {}), dict):
            raise invalid("tools", f"{path}.{key} must map names to schemas, not {schema[key]!r:.100}")
        for name, item in schema.get(key, {}).items():
            _check_schema(item, f"{path}.{key}.{name}", depth + 1)


def _read_tool_choice(
    tool_choice: str | ToolChoice | None, names: list[str]
) -> tuple[Literal["none", "auto", "required", "named"], list[str]]:
    """The choice, and the names of the functions that may be called."""
    if tool_choice is None or tool_choice == "auto":
        return ("auto" if names else "none"), names
    if tool_choice == "none":
        return "none", []
    if not names:
        raise invalid("tool_choice", "tool_choice is allowed only with tools")
    if tool_choice == "required":
        return "required", names
    if isinstance(tool_choice, str):
        raise invalid("tool_choice", f"tool_choice must be none, auto, required or an object, not {tool_choice!r:.100}")
    if tool_choice.name is not None:
        return "named", _check_names([tool_choice.name], names)
    if tool_choice.type == "allowed_tools" and tool_choice.allowed_tools is not None:
        allowed = tool_choice.allowed_tools
        functions = _check_names([tool.name for tool in allowed.tools if tool.name is not None], names)
        if not functions:
            raise invalid("tool_choice", "tool_choice.allowed_tools.tools must name a function")
        return allowed.mode, [name for name in names if name in functions]
    raise invalid(
        "tool_choice",
        'tool_choice must be {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", '
        f'"allowed_tools": {{"mode": ..., "tools": [...]}}}}; its type is {tool_choice.type!r:.100}',
    )


def _check_names(functions: list[str], names: list[str]) -> list[str]:
    for name in functions:
        if name not in names:
            raise invalid("tool_choice", f"tool_choice names the function {name!r:.100}, which is not among tools")
    return functions


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
    grammar = functools.partial(CallGrammar, calls, special=special, parallel=tools.parallel, strict=tools.strict)
    if tools.must_call:
        return StructuredOutputsParams(grammar=grammar(tools.callable).calls())
    if answer is None and not tools.strict:
        return None
    schemas = {name: schema if name in tools.strict else _OBJECT for name, schema in tools.callable.items()}
    if answer is not None:
        return StructuredOutputsParams(grammar=grammar(schemas).calls_or(_rule(answer)))
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
            schema = closed(schema)
        schema = with_options(schema, answer)
        if answer.strict:  # see ``grammar_source``
            schema["x-guidance"]["strict"] = True
        return f"%json {json.dumps(schema)}"
    if answer.choice is not None:
        return " | ".join(msgspec.json.encode(text).decode() for text in answer.choice)
    message = f"optional tool calls are not supported with structured_outputs.{answer.form}"
    raise unsupported("tools", f"{message}: set tool_choice to none or required, or use json or choice")


async def blame_tool(service: ServerState, request: Request, tools: RequestTools) -> None:
    """Raises an error about the first tool whose schema alone cannot be compiled."""
    for name, schema in tools.callable.items():
        alone = StructuredOutputsParams(json=closed(dict(schema)), strict=name in tools.strict)
        try:
            await service.llm.inputs.grammars.compile_for(client_of(request), alone)
        except InvalidRequestError as e:
            path = f"tools[{tools.positions[name]}].function.parameters"
            raise invalid("tools", str(e).replace("structured_outputs.json", path, 1)) from None


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
