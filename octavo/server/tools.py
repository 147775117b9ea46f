"""The tools of a chat request: checked, and which of them may or must be called."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from octavo.server.api_errors import invalid, unsupported
from octavo.server.protocol_tools import CustomTool, FunctionTool, OtherTool, Tool, ToolChoice

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
