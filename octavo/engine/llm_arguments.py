"""Arguments of ``LLM`` that come in several forms, brought into one: a value for each request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.errors import InvalidRequestError, OctavoError
from octavo.core.outputs import CompletionOutput, RequestMetrics, RequestOutput

#: One chat message: {"role": ..., "content": ...}.
Message = dict[str, Any]
#: Its messages, or a text or message alone.
Conversation = Sequence[Message] | Message | str


def is_single(name: str, value: object, first: type, forms: str) -> bool:
    """Whether this is one prompt or conversation, and not a list of them; ``first``: the type of what one begins with.

    Raises:
        InvalidRequestError: it is neither; ``forms`` are what it may be.
    """
    if isinstance(value, (str, dict)):
        return True
    if isinstance(value, (list, tuple)):
        return bool(value) and isinstance(value[0], first)
    raise InvalidRequestError(f"{name} must be {forms}, not {value!r}")


def as_messages(conversation: Conversation) -> Sequence[Message]:
    """The messages of a conversation in any of its forms."""
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    return [conversation] if isinstance(conversation, dict) else conversation


def template_variables(given: Mapping[str, Any] | None, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """``chat_template_kwargs``, if no name among them is one of the arguments."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"chat_template_kwargs must be a dictionary, not {given!r}")
    for name in given:
        if name in options or name in ("messages", "template", "tokenize"):
            raise InvalidRequestError(f"chat_template_kwargs must not hold {name!r}, which is an argument of its own")
    return given


def refused(request_id: str, prompt: Any, error: OctavoError) -> RequestOutput:
    """The output of a request that was refused."""
    now = time.monotonic()
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt if isinstance(prompt, str) else None
    return RequestOutput(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=list(prompt) if isinstance(prompt, (list, tuple)) else [],
        outputs=[CompletionOutput(0, finish_reason="error", error=str(error))],
        finished=True,
        metrics=RequestMetrics(arrival_time=now, finished_time=now),
    )
