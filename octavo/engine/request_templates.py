"""Chat templates that clients send: read and rendered in the sandbox, as they may take any time and memory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.engine.chat_template import render_and_read
from octavo.engine.template_program import template_variables
from octavo.engine.tool_messages import CallFormat
from octavo.sandbox.pool import Sandbox
from octavo.sandbox.process import SandboxAnswer, SandboxCall

#: Seconds of processor time that rendering a conversation may take.
SECONDS = 2.0


async def variables_in_sandbox(sandbox: Sandbox, client: str, template: str) -> frozenset[str]:
    """``template_variables``, in the turn of a client.

    Raises:
        InvalidRequestError: the template is not valid, or exceeds the limits.
        ClientLimitError: the client has taken its seconds.
    """
    return frozenset(await _call(sandbox, client, "read_variables", {"template": template}))


async def render_in_sandbox(
    sandbox: Sandbox,
    client: str,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    fields: Sequence[tuple[int, str]],
    options: Mapping[str, Any],
) -> tuple[str, list[bool]]:
    """``render_and_read``, in the turn of a client.

    Raises:
        InvalidRequestError: the template is not valid, refuses the conversation, or exceeds the limits.
        ClientLimitError: the client has taken its seconds.
    """
    arguments = {"template": template, "messages": messages, "fields": fields, "options": options}
    text, read = await _call(sandbox, client, "render", arguments)
    return text, read


async def _call(sandbox: Sandbox, client: str, name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        content = json.dumps(arguments, default=dataclasses.asdict).encode()
    except RecursionError:
        raise InvalidRequestError("messages must not be nested so deeply") from None
    call = SandboxCall(f"{__name__}:{name}", content, SECONDS)
    return await asyncio.wrap_future(sandbox.submit(call, _read, client=client))


def _read(answer: SandboxAnswer) -> Any:
    if answer.failure:
        reasons = {
            "time": f"takes more than {SECONDS:g} seconds of processor time",
            "memory": "takes too much memory",
            "depth": "is nested too deeply",
        }
        raise InvalidRequestError(f"chat_template {reasons.get(answer.failure, f'failed: {answer.details}')}")
    result = json.loads(answer.content)
    if "error" in result:
        raise InvalidRequestError(result["error"])
    return result["result"]


# --- within the sandbox ----------------------------------------------------------------------------------------------


def read_variables(content: bytes) -> bytes:
    """The variables of a template, sorted."""
    return _answer(lambda arguments: sorted(template_variables(arguments["template"])), content)


def render(content: bytes) -> bytes:
    """What ``render_and_read`` returns."""

    def rendered(arguments: dict[str, Any]) -> tuple[str, list[bool]]:
        options = arguments["options"]
        if options.get("call_format") is not None:
            options["call_format"] = CallFormat(**options["call_format"])
        return render_and_read(arguments["template"], arguments["messages"], arguments["fields"], options)

    return _answer(rendered, content)


def _answer(function: Callable[[dict[str, Any]], Any], content: bytes) -> bytes:
    try:
        result = {"result": function(json.loads(content))}
    except (InvalidRequestError, TokenizerError) as e:
        result = {"error": str(e)}
    return json.dumps(result).encode()
