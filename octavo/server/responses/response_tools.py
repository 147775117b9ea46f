"""Tools of the Responses API in the notation of chats: functions, tools that take a text, and namespaces of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.server.api_errors import unsupported, wrong
from octavo.server.responses.response_parts import (
    CustomTool,
    FunctionTool,
    NamedTool,
    Namespace,
    ToolChoiceParam,
    ToolParam,
)
from octavo.server.service import Service
from octavo.server.tools import custom_function


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """What a function of a chat is in the request."""

    name: str
    namespace: str | None = None
    #: It takes a text instead of arguments.
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a request."""

    #: Fields of the chat.
    fields: Mapping[str, Any] = field(default_factory=dict)
    #: By the name of the chat's function.
    origins: Mapping[str, ToolOrigin] = field(default_factory=dict)


def chat_name(name: str, namespace: str | None) -> str:
    """The name of a chat's function."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def read_response_tools(
    service: Service, tools: Sequence[ToolParam], choice: str | ToolChoiceParam | None
) -> ResponseTools:
    """Tools and the choice among them, in the notation of chats.

    Raises:
        ApiError: 400, naming what is not supported.
    """
    functions, origins = list[dict[str, Any]](), dict[str, ToolOrigin]()
    for where, tool, namespace in _flat(tools):
        if not isinstance(tool, FunctionTool | CustomTool):
            service.leave_out_tool(where, tool.type)
            continue
        name = chat_name(tool.name, namespace)
        origins[name] = ToolOrigin(tool.name, namespace, isinstance(tool, CustomTool))
        function = {"name": name, **_function(tool)}
        functions.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    chosen: Any = choice
    if isinstance(choice, ToolChoiceParam):
        if choice.type == "allowed_tools":
            names = [_allowed(tool, origins) for tool in choice.tools or []]
            functions = [tool for tool in functions if tool["function"]["name"] in names]
            chosen = choice.mode or "auto"
        else:
            chosen = {"type": "function", "function": {"name": _named(choice, origins)}}
    fields = {"tools": functions, "tool_choice": chosen}
    return ResponseTools({name: value for name, value in fields.items() if value}, origins)


def _flat(tools: Sequence[ToolParam]) -> Iterator[tuple[str, Any, str | None]]:
    """Place, tool and namespace of each tool, those in namespaces included."""
    for i, tool in enumerate(tools):
        if isinstance(tool, Namespace):
            for k, inner in enumerate(tool.tools):
                yield f"tools[{i}].tools[{k}]", inner, tool.name
        else:
            yield f"tools[{i}]", tool, None


def _function(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return custom_function(tool.description, tool.format)


def _named(choice: NamedTool, origins: Mapping[str, ToolOrigin]) -> str:
    """The chat's name of a function that a choice names; unknown ones are refused with the chat."""
    if choice.type not in ("function", "custom") or choice.name is None:
        message = f"tool_choice is not supported: its type is {choice.type[:100]!r}; no tools are built in here"
        raise unsupported("tool_choice", message)
    return next((name for name, origin in origins.items() if origin.name == choice.name), choice.name)


def _allowed(choice: NamedTool, origins: Mapping[str, ToolOrigin]) -> str:
    name = _named(choice, origins)
    if name not in origins:
        raise wrong("tool_choice.tools", f"there is no tool {name[:100]!r} among tools")
    return name
