"""Fields of messages: what the chat template does not read is refused, not lost unsaid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from octavo.server.api_errors import ApiError, unsupported
from octavo.server.protocol_tools import Tool
from octavo.server.service import Service

Messages = Sequence[Mapping[str, Any]]

#: Accepted with any value, as a template that does not read them loses nothing: calls, which become text then, their
#: ids, whose order says the same, sources of a web search, marks for caches, and reasoning, which later turns do not
#: repeat.
_HARMLESS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "annotations", "cache_control", "reasoning", "reasoning_content"}
)
#: The same for fields of a part of a message's content.
_HARMLESS_IN_PARTS = frozenset({"type", "text", "annotations", "cache_control", "prompt_cache_breakpoint"})
#: Known fields that would change the answer; refused even where unknown fields are ignored.
_CHANGES = {
    "audio": "the model reads text only",
    "function_call": "tool_calls has taken its place",
    "prefix": "continue_final_message continues the last message",
    "partial": "continue_final_message continues the last message",
    "refusal": "write it as the content",
}


def check_parts(service: Service, messages: Messages) -> None:
    """Refuses parts of contents that are no text, and unknown fields of parts.

    Raises:
        ApiError: 400, naming the message, the part and the field.
    """
    for i, message in enumerate(messages):
        parts = message.get("content")
        for k, part in enumerate(parts if isinstance(parts, list) else ()):
            where = f"messages[{i}].content[{k}]"
            kind = part.get("type") if isinstance(part, dict) else None
            if kind is None:
                raise ApiError(400, f"{where} has no type", param="messages", code="invalid_value")
            if kind != "text":
                raise unsupported(
                    "messages", f"{where}: the type {kind!r:.100} is not supported; the model reads 'text'"
                )
            if not isinstance(part.get("text"), str):
                raise ApiError(400, f"{where}.text must be a text", param="messages", code="invalid_value")
            for name in _given(part, _HARMLESS_IN_PARTS):
                _refuse(service, f"{where}.{name[:100]}", name)


def further_fields(messages: Messages) -> list[tuple[int, str]]:
    """Fields that a template need not read: (index of the message, name)."""
    return [
        (i, name)
        for i, message in enumerate(messages)
        for name in _given(message, _HARMLESS)
        if name != "name" or message.get("role") != "tool"  # where tool_call_id says the same
    ]


def refuse_unread(service: Service, index: int, name: str) -> None:
    """Refuses a field of a message that the template does not read.

    With ``unknown_fields: ignore`` unknown ones are logged instead.

    Raises:
        ApiError: 400, naming the message and the field.
    """
    _refuse(service, f"messages[{index}].{name[:100]}", name)


def check_tools(service: Service, tools: Sequence[Tool]) -> None:
    """Refuses unknown fields of tools; those of functions are written by templates.

    Raises:
        ApiError: 400, naming the tool and the field.
    """
    for i, tool in enumerate(tools):
        for name in _given(tool.model_extra or {}, frozenset({"cache_control"})):
            _refuse(service, f"tools[{i}].{name[:100]}", name, "tools")


def check_variables(service: Service, known: Set[str], variables: Mapping[str, Any]) -> None:
    """Refuses variables that are not among the ``known`` ones, which a template reads.

    With ``unknown_fields: ignore`` they are logged instead.

    Raises:
        ApiError: 400, naming the first.
    """
    for name, value in variables.items():
        if value in (None, []) or name in known:
            continue
        if name == "documents":
            raise unsupported(
                "documents", "documents is not supported by this model: its chat template has no place for them"
            )
        if service.options.unknown_fields == "ignore":
            service.note_unknown(name)
            continue
        message = f"chat_template_kwargs: the chat template has no variable {name!r:.100}"
        raise ApiError(400, message, param="chat_template_kwargs", code="unknown_parameter")


def _given(values: Mapping[str, Any], harmless: frozenset[str]) -> list[str]:
    """Further fields with a value."""
    return [name for name, value in values.items() if name not in harmless and value not in (None, "", [], {}, False)]


def _refuse(service: Service, where: str, name: str, param: str = "messages") -> None:
    if (reason := _CHANGES.get(name)) is not None:
        raise unsupported(param, f"{where} is not supported: {reason}")
    if service.options.unknown_fields == "ignore":
        service.note_unknown(name)
        return
    message = f"{where}: the field is unknown here and the model's chat template does not read it"
    raise ApiError(400, message, param=param, code="unknown_parameter")
