"""The grammar of a chat's answer: of calls that have to be, of the form that the request asks for, or of either."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from octavo.core.errors import InvalidRequestError
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.engine.tool_messages import CallFormat
from octavo.grammar.closed_objects import closed
from octavo.grammar.json_form import with_options
from octavo.grammar.json_schema import read_json
from octavo.server.api_errors import invalid, unsupported
from octavo.server.middleware import client_of
from octavo.server.service import Service
from octavo.server.tool_parsers.grammar import CallGrammar
from octavo.server.tools import RequestTools

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


async def blame_tool(service: Service, request: Request, tools: RequestTools) -> None:
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
