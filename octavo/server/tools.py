"""The tools of a chat request: checked, and which of them may or must be called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.server.api_errors import invalid, unsupported
from octavo.server.protocol_tools import Tool, ToolChoice

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

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be calls and nothing else."""
        return self.choice in ("required", "named")


def read_tools(
    tools: list[Tool] | None, tool_choice: str | ToolChoice | None = None, parallel_tool_calls: bool | None = None
) -> RequestTools:
    """The tools of a request, of the fields of these names.

    Raises:
        ApiError: 400, naming what is wrong and where.
    """
    entries = tools or []
    if len(entries) > MAX_TOOLS:
        raise invalid("tools", f"tools has {len(entries)} functions; at most {MAX_TOOLS} are served")
    schemas: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(entries):
        name = _checked_name(tool, i)
        if name in schemas:
            raise invalid("tools", f"tools[{i}].function.name: there are two functions {name!r}")
        schemas[name] = _checked_schema(tool, i)
    choice, names = _choice(tool_choice, list(schemas))
    if choice == "none":
        return RequestTools(None, {}, choice, frozenset(), False, {})
    return RequestTools(
        shown=[tool.sent for tool in entries],
        callable={name: schemas[name] for name in names},
        choice=choice,
        strict=frozenset(tool.function.name for tool in entries if tool.function.strict) & frozenset(names),
        parallel=parallel_tool_calls is not False and choice != "named",
        places={name: i for i, name in enumerate(schemas)},
    )


def _checked_name(tool: Tool, index: int) -> str:
    if tool.type != "function":
        raise unsupported("tools", f"tools[{index}].type {tool.type!r:.100} is not supported: tools are functions")
    name = tool.function.name
    if not _NAME.fullmatch(name):
        raise invalid(
            "tools", f"tools[{index}].function.name must be 1 to 64 letters, digits, _ and -, not {name!r:.100}"
        )
    return name


def _checked_schema(tool: Tool, index: int) -> Mapping[str, Any]:
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
    if tool_choice.type == "function" and tool_choice.function is not None:
        return "named", _known([tool_choice.function.name], names)
    if tool_choice.type == "allowed_tools" and tool_choice.allowed_tools is not None:
        allowed = tool_choice.allowed_tools
        functions = _known([tool.function.name for tool in allowed.tools if tool.function is not None], names)
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
