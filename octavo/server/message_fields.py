"""What a chat template has to read: further fields of messages and variables are not lost unsaid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from octavo.server.api_errors import invalid, unsupported
from octavo.server.protocol import ChatMessage
from octavo.server.service import Service

#: Variables by which templates turn reasoning on and off.
THINKING_VARIABLES = ("enable_thinking", "thinking")
#: Variables that are hints: a model that has no reasoning cannot think more or less.
_HINTS = frozenset({*THINKING_VARIABLES, "reasoning_effort"})


def further_fields(messages: Sequence[ChatMessage]) -> list[tuple[int, str]]:
    """Fields with a value that a template need not read: (index of the message, name)."""
    return [
        (i, name)
        for i, message in enumerate(messages)
        for name, value in (message.model_extra or {}).items()
        if value not in (None, "", [], {}, False)
    ]


def refuse_unread(service: Service, index: int, name: str) -> None:
    """Refuses a field of a message that the template does not read; with ``unknown_fields: ignore`` it is logged.

    Raises:
        ApiError: 400, naming the message and the field.
    """
    if service.options.unknown_fields == "ignore":
        service.note_unknown(name)
        return
    message = (
        f"messages[{index}].{name[:100]}: the field is unknown here and the model's chat template does not read it"
    )
    raise invalid("messages", message, "unknown_parameter")


def check_variables(service: Service, known: Set[str], variables: Mapping[str, Any]) -> None:
    """Refuses variables that are no hints and not among the ``known`` ones, which a template reads.

    With ``unknown_fields: ignore`` they are logged instead.

    Raises:
        ApiError: 400, naming the first.
    """
    for name, value in variables.items():
        if value in (None, []) or name in known or name in _HINTS:
            continue
        if service.options.unknown_fields == "ignore":
            service.note_unknown(name)
            continue
        if name == "documents":
            raise unsupported(
                "documents", "documents is not supported by this model: its chat template has no place for them"
            )
        message = f"chat_template_kwargs: the chat template has no variable {name!r:.100}"
        raise invalid("chat_template_kwargs", message, "unknown_parameter")


def effort_variables(effort: str, known: Set[str]) -> dict[str, Any]:
    """The variables, of those that a template reads, that stand for an effort of reasoning.

    ``none`` turns reasoning off. A level is given to templates that know levels, turns reasoning on in those that can
    only turn it on and off, and is a hint elsewhere.
    """
    if effort != "none" and "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    return {name: effort != "none" for name in THINKING_VARIABLES if name in known}
