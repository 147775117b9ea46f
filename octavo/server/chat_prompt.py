"""The prompt of a chat, and how the answer to it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from octavo.core.reasoning import ReasoningMarks
from octavo.engine.tool_messages import HERMES, CallFormat
from octavo.server.api_errors import unsupported
from octavo.server.chat_formats import visible_tokens
from octavo.server.formats import read_form
from octavo.server.message_fields import THINKING_VARIABLES
from octavo.server.prompt_fields import render_chat
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.reasoning_parsers.reasoning_parser import ReasoningParser, Thinking
from octavo.server.request_template import RequestTemplate, choose
from octavo.server.service import Service
from octavo.server.tool_parsers.json_calls import Hermes
from octavo.server.tool_parsers.tool_parser import ToolParser
from octavo.server.tools import RequestTools


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation, and how the answer to it is read."""

    text: str
    #: None: calls are not looked for.
    tool_parser: type[ToolParser] | None
    #: How calls are written; None: no grammar of them is known, or they are not looked for.
    call_format: CallFormat | None
    #: Where the answer begins; None: reasoning is not told apart.
    reasoning: tuple[type[ReasoningParser], Thinking] | None
    #: Special tokens that the parsers have to see.
    visible_tokens: frozenset[int]
    #: How the model marks its reasoning, if that is known.
    marks: ReasoningMarks | None
    #: Tokens after which the form of the answer binds; empty: at its beginning.
    form_begins_after: list[int]


async def make_chat_prompt(
    service: Service, request: Request, body: ChatCompletionRequest, tools: RequestTools
) -> ChatPrompt:
    """Renders the conversation of a request and chooses the parsers of its answer.

    Raises:
        ApiError, InvalidRequestError: the conversation cannot be rendered; the message names the field.
    """
    service.images.check(body.messages)
    template = await choose(service, request, body, has_tools=tools.shown is not None)
    text = await _rendered(service, body, tools, template)
    tool_parser, call_format = _calls(service, body, tools, template)
    reasoning = service.formats.reasoning_parser(template.text)
    state, begins_after = Thinking.AFTER, list[int]()
    if reasoning is not None:
        state = reasoning.state_after(text, continues=body.continue_final_message is True)
        if _has_form(body, tools):
            text, state, begins_after = await _before_form(service, body, tools, reasoning, state, template, text)
    interrupts: tuple[str, ...] = ()
    # A form that binds after the reasoning waits for the mark that ends it: calls before it would not have it.
    if reasoning is not None and tool_parser is not None and not begins_after:
        interrupts = tuple(dict.fromkeys((*reasoning.interrupts, *tool_parser.begins)))
    markers = tool_parser.markers if tool_parser else ()
    markers += (reasoning.start, reasoning.end) if reasoning else ()
    separates = body.separate_reasoning is not False and body.reasoning_format != "none"
    return ChatPrompt(
        text,
        tool_parser,
        call_format,
        (reasoning, state) if reasoning is not None and separates else None,
        visible_tokens(service.llm.tokenizer, markers) if markers else frozenset(),
        reasoning.marks(state is Thinking.INSIDE, interrupts) if reasoning else None,
        begins_after,
    )


async def _rendered(
    service: Service, body: ChatCompletionRequest, tools: RequestTools, template: RequestTemplate, **variables: Any
) -> str:
    variables["image_placeholder"] = service.images.placeholder
    return await render_chat(service, template, body.messages, body, tools.shown, **variables)


def _calls(
    service: Service, body: ChatCompletionRequest, tools: RequestTools, template: RequestTemplate
) -> tuple[type[ToolParser] | None, CallFormat | None]:
    if tools.choice == "none":
        return None, None
    parser = service.formats.tool_parser(template.text, template.variables)
    form = None if parser is None else parser.call_format(template.text)
    if form is None and tools.must_call:
        parser, form = Hermes, HERMES  # calls that have to be are written as a grammar is known for
    if parser is None and service.formats.finds_tools and body.parse_tool_calls is not False:
        raise unsupported(
            "tools",
            "how this model writes calls is not known from its chat template: the option --tool-call-parser names a "
            "format; tool_choice required, or one function, works without",
        )
    return (None if body.parse_tool_calls is False else parser), form


def _has_form(body: ChatCompletionRequest, tools: RequestTools) -> bool:
    """Whether the answer has to have a form."""
    return tools.must_call or bool(tools.strict) or read_form(body) is not None


async def _before_form(
    service: Service,
    body: ChatCompletionRequest,
    tools: RequestTools,
    reasoning: type[ReasoningParser],
    state: Thinking,
    template: RequestTemplate,
    text: str,
) -> tuple[str, Thinking, list[int]]:
    """The prompt, where its answer begins, and the tokens after which the form of the answer binds.

    Reasoning that may come is opened in the prompt, so that its end comes too. It is closed where its end is no token,
    as then the form can only bind from the beginning.
    """
    end = service.llm.tokenizer.convert_tokens_to_ids(reasoning.end)
    if end is None:
        opened = text.rstrip().endswith(reasoning.start)
        return (f"{text}\n{reasoning.end}\n\n" if opened else text), Thinking.AFTER, []
    if state is Thinking.BEFORE and await _thinks(service, body, tools, reasoning, template):
        state = Thinking.INSIDE
    if state is not Thinking.INSIDE:
        return text, state, []
    if reasoning.start not in text[-2 * len(reasoning.start) :] and not body.continue_final_message:
        text += f"{reasoning.start}\n"
    return text, state, [end]


async def _thinks(
    service: Service,
    body: ChatCompletionRequest,
    tools: RequestTools,
    reasoning: type[ReasoningParser],
    template: RequestTemplate,
) -> bool:
    """Whether the model reasons first although its prompt does not open it: one that the template can turn off does."""
    switches = [name for name in THINKING_VARIABLES if name in template.variables]
    if body.thinks is False:
        return False
    if not switches or any((body.chat_template_kwargs or {}).get(name) is False for name in switches):
        return False
    off = await _rendered(service, body, tools, template, **dict.fromkeys(switches, False))
    return reasoning.state_after(off) is Thinking.AFTER
