"""Fields of messages: what changes nothing in the text that the chat template writes is refused, not lost unsaid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.errors import InvalidRequestError
from octavo.engine.chat_template import template_variables
from octavo.server.errors import ApiError, unsupported
from octavo.server.protocol_tools import Tool
from octavo.server.service import Service

Messages = Sequence[Mapping[str, Any]]

#: Accepted with any value, as a template that does not write them loses nothing: calls, which become text then, their
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

#: Most different fields, as the template is run once without each.
_MAX_FIELDS = 16


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


def check_fields_are_read(service: Service, messages: Messages, render: Callable[[Messages], str], text: str) -> None:
    """Refuses fields of messages without which the template writes the same text.

    Args:
        service: the service; with ``unknown_fields: ignore`` it logs unknown fields instead.
        messages: the conversation.
        render: what the chat template writes of a conversation.
        text: what it writes of this one.

    Raises:
        ApiError: 400, naming the message and the field.
    """
    fields: dict[str, int] = {}
    for i, message in enumerate(messages):
        for name in _given(message, _HARMLESS):
            if name != "name" or message.get("role") != "tool":  # where tool_call_id says the same
                fields.setdefault(name, i)
    if len(fields) > _MAX_FIELDS:
        raise ApiError(400, f"the messages have more than {_MAX_FIELDS} different fields", param="messages")
    for name, index in fields.items():
        without = [{key: value for key, value in message.items() if key != name} for message in messages]
        try:
            is_read = render(without) != text
        except InvalidRequestError:
            is_read = True
        if not is_read:
            _refuse(service, f"messages[{index}].{name[:100]}", name)


def check_tools(service: Service, tools: Sequence[Tool]) -> None:
    """Refuses unknown fields of tools; those of functions are written by templates.

    Raises:
        ApiError: 400, naming the tool and the field.
    """
    for i, tool in enumerate(tools):
        for name in _given(tool.model_extra or {}, frozenset({"cache_control"})):
            _refuse(service, f"tools[{i}].{name[:100]}", name, "tools")


def check_variables(service: Service, template: str, variables: Mapping[str, Any]) -> None:
    """Refuses variables that a template does not read; with ``unknown_fields: ignore`` they are logged instead.

    Raises:
        ApiError: 400, naming the first.
        TokenizerError: the template is not valid.
    """
    for name, value in variables.items():
        if value in (None, []) or name in template_variables(template):
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
    message = f"{where}: the field is unknown here and the model's chat template does not write it"
    raise ApiError(400, message, param=param, code="unknown_parameter")
