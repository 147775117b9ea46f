"""The form of the answer that a request asks for, from any of the fields that can say it."""

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


#: Fields that mean the same as one of ``structured_outputs``.
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


class Form(NamedTuple):
    """A form, and where the request says it."""

    #: Such as ``response_format.json_schema.schema``, in place of ``structured_outputs.json``.
    place: str
    params: StructuredOutputsParams

    @property
    def field(self) -> str:
        """The request's field."""
        return self.place.partition(".")[0]


def read_form(body: FormFields) -> Form | None:
    """The form that a request asks for; None: free text.

    Raises:
        ApiError, InvalidRequestError: several fields say different ones, or a field is wrong; the message begins with
            its name.
    """
    forms: dict[str, Form] = {}
    if body.response_format is not None and (form := _of_response_format(body.response_format)) is not None:
        forms["response_format"] = form
    if body.structured_outputs is not None:
        params = structured_outputs_of(body.structured_outputs)
        forms["structured_outputs"] = Form(f"structured_outputs.{params.form}", params)
    for field, name in _OTHER_NAMES.items():
        value = getattr(body, field)
        if value is not None and value != "":
            options: dict[str, Any] = {name: value}
            if field == "guided_json":
                options["whitespace_pattern"] = body.guided_whitespace_pattern or None
            forms[field] = Form(field, _made(field, options))
    if len({_meaning(form.params) for form in forms.values()}) > 1:
        raise invalid(list(forms)[-1], f"{' and '.join(forms)} each say the form of the answer; give one of them")
    if body.guided_whitespace_pattern and "guided_json" not in forms:
        raise invalid("guided_whitespace_pattern", "guided_whitespace_pattern is allowed only with guided_json")
    return next(iter(forms.values()), None)


def _meaning(params: StructuredOutputsParams) -> str:
    """A form as text that is the same for a schema and its JSON text, and for a left-out option and its null."""
    fields = {name: value for name, value in msgspec.to_builtins(params).items() if value not in (None, False, [])}
    for name in ("json", "structural_tag"):
        if isinstance(fields.get(name), str):
            with contextlib.suppress(ValueError, RecursionError):
                fields[name] = json.loads(fields[name])
    return json.dumps(fields, sort_keys=True)


def renamed(error: InvalidRequestError, body: FormFields) -> InvalidRequestError:
    """The error, with the place where the request says the form in place of ``structured_outputs``."""
    form = read_form(body)
    if form is None:
        return error
    message = str(error).replace(f"structured_outputs.{form.params.form}", form.place, 1)
    if form.field == "guided_json":
        message = message.replace("structured_outputs.whitespace_pattern", "guided_whitespace_pattern", 1)
    return InvalidRequestError(message)


def form_error(error: str | None, params: SamplingParams | BeamSearchParams) -> str | None:
    """What an engine's error says of the form that a request asks for; None: it is about something else."""
    form = params.structured_outputs if isinstance(params, SamplingParams) else None
    if form is None or error is None or not error.startswith((UNUSABLE, TOO_COSTLY)):
        return None
    return f"structured_outputs.{form.form}: {error.partition(chr(10))[0]}"


#: The response's header that names the keywords of a schema that the answer is not held to.
RELAXED_HEADER = "x-octavo-relaxed-schema"
#: Most characters of it: servers and proxies bound the size of all headers.
_LONGEST_HEADER = 1000


def tell_relaxed_keywords(scope: MutableMapping[str, Any], places: Sequence[str]) -> None:
    """Adds ``RELAXED_HEADER`` to the response of a request, if it has not begun, and to its line in the access log.

    Places are JSON pointers within the schema, percent-encoded where a header cannot hold them.
    """
    shown, length = list[str](), 0
    for place in places:
        written = quote(place, safe="/~$.-_[]: ")
        if length + len(written) > _LONGEST_HEADER:
            shown.append(f"and {len(places) - len(shown)} more")
            break
        shown.append(written)
        length += len(written) + 2
    told = ", ".join(shown)
    scope.setdefault("state", {}).setdefault("response_headers", {})[RELAXED_HEADER] = told
    log_fields(scope)["relaxed_schema"] = told


def _of_response_format(response_format: ResponseFormat) -> Form | None:
    fields = {"json_schema": ("json_schema",), "json_object": ("schema",), "structural_tag": ("structures", "triggers")}
    values = {
        "json_schema": response_format.json_schema,
        "schema": response_format.schema_,
        "structures": response_format.structures,
        "triggers": response_format.triggers,
    }
    for name, value in values.items():
        if value is not None and name not in fields.get(response_format.type, ()):
            raise invalid("response_format", f"response_format.{name} is not of type {response_format.type!r}")
    if response_format.type == "json_object":
        if response_format.schema_ is not None:
            return Form("response_format.schema", StructuredOutputsParams(json=response_format.schema_))
        return Form("response_format", StructuredOutputsParams(json_object=True))
    if response_format.type == "json_schema":
        if response_format.json_schema is None or response_format.json_schema.schema_ in (None, False):
            raise invalid("response_format", "response_format.json_schema.schema must be a JSON schema")
        params = StructuredOutputsParams(
            json=response_format.json_schema.schema_,
            disable_additional_properties=response_format.json_schema.strict or None,
            strict=response_format.json_schema.strict or None,
        )
        return Form("response_format.json_schema.schema", params)
    if response_format.type == "structural_tag":
        tag = {"structures": response_format.structures, "triggers": response_format.triggers}
        return Form("response_format", StructuredOutputsParams(structural_tag=tag))
    return None


def _made(field: str, options: dict[str, Any]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**options)
    except InvalidRequestError as e:
        for name in FORMS:
            if str(e).startswith(f"structured_outputs.{name}"):
                raise InvalidRequestError(str(e).replace(f"structured_outputs.{name}", field, 1)) from None
        raise


# The tools of a chat request: checked, and which of them may or must be called.

#: Most functions, as OpenAI's API has it.
MAX_TOOLS = 128
_MAX_DEPTH = 64
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
#: Keywords whose value is a schema, a list of schemas, or maps names to schemas.
_SCHEMA = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


@dataclass(frozen=True, slots=True)
class RequestTools:
    """What a chat request says of tools."""

    #: As the chat template gets them; None: it gets none.
    shown: list[dict[str, Any]] | None
    #: Schemas of the parameters of the functions that may be called, by name.
    callable: Mapping[str, Mapping[str, Any]]
    #: Whether the answer has to be calls: "named", of one function that the request names.
    choice: Literal["none", "auto", "required", "named"]
    #: Functions whose arguments have to fit their schemas also where the model chooses to call.
    strict: frozenset[str]
    parallel: bool
    #: Position of each function in the request.
    places: Mapping[str, int]
    #: Functions that stand for tools that take a text.
    custom: frozenset[str] = frozenset()

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be calls and nothing else."""
        return self.choice in ("required", "named")


def read_tools(
    tools: list[Tool] | None,
    tool_choice: str | ToolChoice | None = None,
    parallel_tool_calls: bool | None = None,
    leave_out: Callable[[str, str], None] | None = None,
) -> RequestTools:
    """The tools of a request, of the fields of these names.

    Args:
        tools: functions, tools that take a text, which are functions of one argument for the model, and others.
        tool_choice: which may or must be called.
        parallel_tool_calls: whether several may be.
        leave_out: called with the place and the type of each tool that only another service could run; None: such
            tools are refused.

    Raises:
        ApiError: 400, naming what is wrong and where.
    """
    entries = tools or []
    if len(entries) > MAX_TOOLS:
        raise invalid("tools", f"tools has {len(entries)} functions; at most {MAX_TOOLS} are served")
    schemas: dict[str, Mapping[str, Any]] = {}
    shown: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    strict, custom = set[str](), set[str]()
    for i, tool in enumerate(entries):
        if isinstance(tool, OtherTool):
            if leave_out is None or "function" in (tool.model_extra or {}):  # whose type must be function
                raise unsupported("tools", f"tools[{i}].type {tool.type!r:.100} is not supported: tools are functions")
            leave_out(f"tools[{i}]", tool.type)
            continue
        kind = tool.type
        name = tool.function.name if isinstance(tool, FunctionTool) else tool.custom.name
        if not _NAME.fullmatch(name):
            message = f"tools[{i}].{kind}.name must be 1 to 64 letters, digits, _ and -, not {name!r:.100}"
            raise invalid("tools", message)
        if name in schemas:
            raise invalid("tools", f"tools[{i}].{kind}.name: there are two functions {name!r}")
        places[name] = i
        if isinstance(tool, CustomTool):
            function = custom_function(tool.custom.description, tool.custom.format)
            schemas[name] = function["parameters"]
            shown.append({"type": "function", "function": {"name": name, **function}})
            custom.add(name)
        else:
            schemas[name] = _checked_schema(tool, i)
            shown.append(tool.sent)
            strict |= {name} if tool.function.strict else set()
    choice, names = _choice(tool_choice, list(schemas))
    if choice == "none":
        return RequestTools(None, {}, choice, frozenset(), False, {})
    return RequestTools(
        shown=shown,
        callable={name: schemas[name] for name in names},
        choice=choice,
        strict=frozenset(strict & set(names)),
        parallel=parallel_tool_calls is not False and choice != "named",
        places=places,
        custom=frozenset(custom),
    )


def custom_function(description: str | None, form: Mapping[str, Any] | None) -> dict[str, Any]:
    """Description and parameters of the function that stands for a tool that takes a text.

    Args:
        description: that of the tool.
        form: the form of the text, as chats or responses have it; the model is told of a grammar.
    """
    text = description or ""
    if form is not None and form.get("type") == "grammar":
        nested = form.get("grammar")
        grammar = nested if isinstance(nested, dict) else form
        text += f"\nThe input follows this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    described = {"description": text.strip()} if text.strip() else {}
    return {**described, "parameters": {**schema, "additionalProperties": False}}


def custom_input(arguments: str) -> str:
    """The text that a call of a tool that takes one gives; its arguments may end early."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    return str(value["input"]) if isinstance(value, dict) and "input" in value else arguments


def _checked_schema(tool: FunctionTool, index: int) -> Mapping[str, Any]:
    """The schema of the parameters; without one there are none."""
    schema = tool.function.parameters
    place = f"tools[{index}].function.parameters"
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise invalid("tools", f"{place}.type must be 'object', as arguments are one, not {schema['type']!r:.100}")
    _check_schema(schema, place, 0)
    return {"type": "object", **schema}


def _check_schema(schema: object, place: str, depth: int) -> None:
    """Refuses what cannot be a JSON schema; keywords are looked at where a grammar is made of it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise invalid("tools", f"{place} must be a JSON schema, an object, not {schema!r:.100}")
    if depth > _MAX_DEPTH:
        raise invalid("tools", f"{place} is nested more than {_MAX_DEPTH} levels deep")
    types = schema.get("type", [])
    for kind in types if isinstance(types, list) else [types]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise invalid("tools", f"{place}.type must be a type of JSON, not {kind!r:.100}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise invalid("tools", f"{place}.required must be a list of names, not {required!r:.100}")
    for key in _SCHEMA:
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            _check_schema(schema[key], f"{place}.{key}", depth + 1)
    for key in _SCHEMAS:
        if not isinstance(schema.get(key, []), list):
            raise invalid("tools", f"{place}.{key} must be a list of schemas, not {schema[key]!r:.100}")
        for k, part in enumerate(schema.get(key, [])):
            _check_schema(part, f"{place}.{key}[{k}]", depth + 1)
    for key in _NAMED_SCHEMAS:
        if not isinstance(schema.get(key, {}), dict):
            raise invalid("tools", f"{place}.{key} must map names to schemas, not {schema[key]!r:.100}")
        for name, part in schema.get(key, {}).items():
            _check_schema(part, f"{place}.{key}.{name}", depth + 1)


def _choice(
    tool_choice: str | ToolChoice | None, names: list[str]
) -> tuple[Literal["none", "auto", "required", "named"], list[str]]:
    """The choice, and the functions that may be called."""
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
        return "named", _known([tool_choice.name], names)
    if tool_choice.type == "allowed_tools" and tool_choice.allowed_tools is not None:
        allowed = tool_choice.allowed_tools
        functions = _known([tool.name for tool in allowed.tools if tool.name is not None], names)
        if not functions:
            raise invalid("tool_choice", "tool_choice.allowed_tools.tools must name a function")
        return allowed.mode, [name for name in names if name in functions]
    raise invalid(
        "tool_choice",
        'tool_choice must be {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", '
        f'"allowed_tools": {{"mode": ..., "tools": [...]}}}}; its type is {tool_choice.type!r:.100}',
    )


def _known(functions: list[str], names: list[str]) -> list[str]:
    for name in functions:
        if name not in names:
            raise invalid("tool_choice", f"tool_choice names the function {name!r:.100}, which is not among tools")
    return functions


# The grammar of a chat's answer: of calls that have to be, of the form that the request asks for, or of either.

_OBJECT: Mapping[str, Any] = {"type": "object"}


def answer_form(
    tools: RequestTools,
    calls: CallFormat | None,
    special: Mapping[str, int],
    answer: StructuredOutputsParams | None,
) -> StructuredOutputsParams | None:
    """The form that an answer must have; None: free text.

    Args:
        tools: the tools of the request.
        calls: how the model writes calls; None: no grammar of them is known, or they are not looked for.
        special: ids of special tokens by text.
        answer: the form of an answer without calls.

    Raises:
        ApiError: the form of the answer cannot stand beside tools.
    """
    if calls is None or tools.choice == "none":
        return answer
    if tools.must_call:
        return StructuredOutputsParams(grammar=_grammar(tools, calls, special, tools.callable).calls())
    if answer is None and not tools.strict:
        return None
    schemas = {name: schema if name in tools.strict else _OBJECT for name, schema in tools.callable.items()}
    grammar = _grammar(tools, calls, special, schemas)
    if answer is not None:
        return StructuredOutputsParams(grammar=grammar.calls_or(_rule(answer)))
    if calls.trigger is None:  # a call is told by how the answer begins
        return StructuredOutputsParams(grammar=grammar.calls_or(r"/([^\[{\s](.|\n)*)?/"))
    return StructuredOutputsParams(grammar=grammar.calls_in_text())


def _grammar(
    tools: RequestTools, calls: CallFormat, special: Mapping[str, int], schemas: Mapping[str, Mapping[str, Any]]
) -> CallGrammar:
    return CallGrammar(calls, schemas, special, parallel=tools.parallel, strict=tools.strict)


def _rule(answer: StructuredOutputsParams) -> str:
    """A form as the right side of a grammar's rule."""
    if answer.json_object or answer.json not in (None, False):
        written = with_options(_schema(answer), answer)
        if answer.strict:  # see ``grammar_source``
            written["x-guidance"]["strict"] = True
        return f"%json {json.dumps(written)}"
    if answer.choice is not None:
        return " | ".join(msgspec.json.encode(text).decode() for text in answer.choice)
    raise unsupported(
        "tools",
        f"tools that the model may call are not supported with structured_outputs.{answer.form}: set "
        "tool_choice to none or required, or ask for JSON or a choice",
    )


def _schema(answer: StructuredOutputsParams) -> dict[str, Any]:
    schema = dict(_OBJECT) if answer.json_object else answer.json
    if isinstance(schema, str):
        schema = read_json(schema, "structured_outputs.json")
    if not isinstance(schema, dict):
        return {}
    return schema if answer.disable_additional_properties is False else closed(schema)


async def blame_tool(service: ServerState, request: Request, tools: RequestTools) -> None:
    """Finds the tool because of which the form that has the schemas of all cannot be compiled.

    Raises:
        ApiError: 400, naming it; nothing if each schema alone can be followed.
    """
    for name, schema in tools.callable.items():
        alone = StructuredOutputsParams(json=closed(dict(schema)), strict=name in tools.strict)
        try:
            await service.llm.inputs.grammars.compile_for(client_of(request), alone)
        except InvalidRequestError as e:
            place = f"tools[{tools.places[name]}].function.parameters"
            message = str(e).replace("structured_outputs.json", place, 1)
            raise invalid("tools", message) from None


# How the served model writes calls and reasoning: by option, or as its chat template says.

_AUTO, _NONE = "auto", "none"


class ChatFormats:
    """The parsers of one server."""

    def __init__(self, tool_call_parser: str = _AUTO, reasoning_parser: str = _AUTO) -> None:
        """By name, ``module:Class``, ``auto`` or ``none``.

        Raises:
            ConfigError: there is no such parser.
        """
        #: Whether the format of calls is found by the template.
        self.finds_tools = tool_call_parser == _AUTO
        self._finds_reasoning = reasoning_parser == _AUTO
        named = tool_call_parser not in (_AUTO, _NONE)
        self._tool_parser = load_tool_parser(tool_call_parser) if named else None
        named = reasoning_parser not in (_AUTO, _NONE)
        self._reasoning_parser = load_reasoning_parser(reasoning_parser) if named else None

    def tool_parser(self, template: str, variables: Set[str]) -> type[ToolParser] | None:
        """The parser for answers to prompts of a chat template; None: calls are not told from content.

        ``variables``: those that the template reads.
        """
        if not self.finds_tools:
            return self._tool_parser
        parser = find_tool_parser(template)
        if parser is None and not {"tools", "custom_tools"} & variables:
            return Hermes  # the prompt describes this format
        return parser

    def reasoning_parser(self, template: str) -> type[ReasoningParser] | None:
        """The same for reasoning; None: it is not told from content."""
        return find_reasoning_parser(template) if self._finds_reasoning else self._reasoning_parser

    def named_marks(self) -> ReasoningMarks | None:
        """The marks of the parser that an option names; None: the chat template says them."""
        return None if self._reasoning_parser is None else self._reasoning_parser.marks()

    def call_format(self, template: str, variables: Set[str]) -> CallFormat:
        """How calls are written where it has to be said in words."""
        parser = self.tool_parser(template, variables)
        return (None if parser is None else parser.call_format(template)) or HERMES


@functools.lru_cache(maxsize=16)
def visible_tokens(tokenizer: Tokenizer, markers: tuple[str, ...]) -> frozenset[int]:
    """Ids of the special tokens of which these texts are made."""
    return frozenset(i for text, i in special_tokens(tokenizer).items() if any(text in marker for marker in markers))


@functools.lru_cache(maxsize=4)
def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of a tokenizer's special tokens by text."""
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.special_texts}
    return {text: token_id for text, token_id in ids.items() if token_id is not None}
