"""A chat in the engine: from an internal chat request to the events of its choices, for every route that chats.

The internal chat request is the body of ``/v1/chat/completions``; other routes make one of their own bodies.

    chat = await start_chat(service, request, body, prefix="resp")     # checks, renders, tokenizes; refuses
    async with aclosing(chat.outputs()) as outputs:                    # increments if body.stream, else one output
        async for choices in outputs:
            for choice in choices:                                     # ChoiceEvents
                choice.index, choice.events, choice.finish_reason, choice.stop_reason, choice.completion
    chat.generation.usage()

    [choice, ...] = await chat.finish()                                # without streaming: each choice, whole
    collect(choice.events)                                             # content, reasoning, tool calls

``start_chat(service, request, body: ChatCompletionRequest, *, prefix: str) -> Chat`` raises ``ApiError`` and
``InvalidRequestError`` whose ``param`` is a field of ``body``. Response ids begin with ``prefix``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from starlette.requests import Request

from octavo.core.errors import InvalidRequestError
from octavo.core.model_config import ReasoningMarks
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.sampling_params import BeamSearchParams, SamplingParams
from octavo.engine.chat_messages import HERMES, CallFormat
from octavo.engine.tokenizer import TextStream
from octavo.server.answer_format import answer_form, blame_tool, read_form, read_tools, special_tokens, visible_tokens
from octavo.server.generation import make_generation
from octavo.server.http.bodies import run_in_thread_if_large
from octavo.server.http.errors import ApiError, unsupported
from octavo.server.prompt_inputs import THINKING_VARIABLES, chat_tokens, choose, read_prediction, render_chat
from octavo.server.reasoning_parsers import ReasoningParser, Thinking
from octavo.server.tool_parsers.formats import Hermes
from octavo.server.tool_parsers.tool_parser import ChatEvent, ContentDelta, ReasoningDelta, ToolCallStart, ToolParser

if TYPE_CHECKING:
    from octavo.server.answer_format import RequestTools
    from octavo.server.generation import Generation
    from octavo.server.openai.protocol import ChatCompletionRequest
    from octavo.server.prompt_inputs import RequestTemplate
    from octavo.server.state import ServerState


# Reads a choice of a chat as it grows: its text to events.


class ChatParser:
    """The events of one choice: its reasoning, then content and calls."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        decode: TextStream | None = None,
    ) -> None:
        """Without ``reasoning`` and ``tools`` all text is content. ``decode``: text of tokens, to count those of the
        reasoning; special ones included."""
        self._reasoning = reasoning
        self._tools = tools
        self._decode = decode
        #: Tokens up to the end of the reasoning, and the end of their text while that has not come.
        self._num_tokens = 0
        self._tail: str | None = ""
        self._lengths: list[int] = []
        #: Characters of the text so far, and of what of it followed the reasoning.
        self._length = self._answered = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, with its marks."""
        return self._num_tokens if self._reasoning is not None and self._reasoning.found else 0

    def feed(self, text: str, token_ids: Sequence[int], finished: bool, *, cut: bool = False) -> list[ChatEvent]:
        """What is new. ``text`` and ``token_ids``: added since the last call; ``finished``: nothing follows; ``cut``:
        ``max_tokens`` has ended the answer.
        """
        events: list[ChatEvent] = []
        self._length += len(text)
        if self._reasoning is not None:
            self._count(self._reasoning, token_ids)
            thought, text = self._reasoning.feed(text, finished)
            if thought:
                events.append(ReasoningDelta(thought))
        self._answered += len(text)
        if self._tools is None:
            return [*events, ContentDelta(text, self._length)] if text else events
        # Nothing is left out after the first character of the answer.
        skipped = self._length - self._answered
        for event in self._tools.feed(text, finished, cut=cut):
            if isinstance(event, ContentDelta):
                event = ContentDelta(event.text, skipped + event.end)
            events.append(event)
        return events

    def _count(self, reasoning: ReasoningParser, token_ids: Sequence[int]) -> None:
        longest = max(map(len, (reasoning.end, *reasoning.interrupts)))
        for token_id in token_ids:
            if self._tail is None or self._decode is None:
                return
            piece = self._decode.push(token_id)
            self._num_tokens += 1
            self._tail += piece
            self._lengths.append(len(piece))
            if reasoning.end in self._tail:
                self._tail = None
            elif found := [text for text in reasoning.interrupts if text in self._tail]:
                # Its tokens are of the answer.
                rest = len(self._tail) - min(map(self._tail.index, found))
                while rest > 0 and self._lengths:
                    rest -= self._lengths.pop()
                    self._num_tokens -= 1
                self._tail = None
            else:
                self._tail, self._lengths = self._tail[-longest:], self._lengths[-longest:]


# The prompt of a chat, and how the answer to it is read.


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
    service: ServerState, request: Request, body: ChatCompletionRequest, tools: RequestTools
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
    service: ServerState, body: ChatCompletionRequest, tools: RequestTools, template: RequestTemplate, **variables: Any
) -> str:
    variables["image_placeholder"] = service.images.placeholder
    return await render_chat(service, template, body.messages, body, tools.shown, **variables)


def _calls(
    service: ServerState, body: ChatCompletionRequest, tools: RequestTools, template: RequestTemplate
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
    service: ServerState,
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
    service: ServerState,
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


FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)
class ChoiceEvents:
    """One choice, or an increment of it: what the engine gave, and the events that this adds."""

    completion: CompletionOutput
    #: Output of the request that the completion is part of.
    output: RequestOutput
    events: list[ChatEvent]
    #: Known with the last increment.
    finish_reason: FinishReason | None

    @property
    def index(self) -> int:
        """Number of the choice, from 0."""
        return self.completion.index

    @property
    def stop_reason(self) -> str | int | None:
        """The stop text or stop token id that ended it."""
        return self.completion.stop_reason


@dataclass(slots=True)
class Chat:
    """A conversation in the engine. ``outputs`` or ``finish`` is called once."""

    body: ChatCompletionRequest
    generation: Generation
    #: Most likely tokens requested at each position beside the generated one; None: no logprobs.
    top_logprobs: int | None
    _tools: RequestTools
    _tool_parser: type[ToolParser] | None
    _reasoning: tuple[type[ReasoningParser], Thinking] | None
    #: Texts that end reasoning which was not closed.
    _interrupts: tuple[str, ...]
    #: Whether the form of the answer is made of the schemas of tools.
    _form_has_tools: bool
    #: Of each choice that has begun.
    _parsers: dict[int, ChatParser] = field(default_factory=dict)
    _calling: set[int] = field(default_factory=set)

    @property
    def custom_tools(self) -> frozenset[str]:
        """Functions that stand for tools that take a text."""
        return self._tools.custom

    async def outputs(self) -> AsyncGenerator[list[ChoiceEvents], None]:
        """The choices as they grow if the body asks for a stream, else one list with each whole.

        Raises:
            ApiError, InvalidRequestError: as ``Generation.outputs``.
        """
        generation = self.generation
        try:
            async with aclosing(generation.outputs()) as outputs:
                async for _, output in outputs:
                    yield [self._events(output, completion) for completion in generation.choices(output)]
        except InvalidRequestError as e:
            if not self._form_has_tools:
                raise
            await blame_tool(generation.service, generation.request, self._tools)
            # The request has no such field: the grammar is made of its tools.
            raise InvalidRequestError(str(e).replace("structured_outputs.grammar", "tools", 1)) from None

    async def finish(self) -> list[ChoiceEvents]:
        """The whole choices of a chat that is not streamed.

        Raises:
            ApiError, InvalidRequestError: as ``outputs``.
        """
        async with aclosing(self.outputs()) as outputs:
            increments = [choices async for choices in outputs]
        return increments[-1]

    def _events(self, output: RequestOutput, completion: CompletionOutput) -> ChoiceEvents:
        parser = self._parsers.get(completion.index)
        if parser is None:
            parser = self._parsers[completion.index] = self._parser(output)
        cut = completion.finish_reason == "length"
        events = parser.feed(completion.text, completion.token_ids, completion.finished, cut=cut)
        if any(isinstance(event, ToolCallStart) for event in events):
            self._calling.add(completion.index)
        if self._reasoning is not None:
            self.generation.reasoning_tokens = sum(parser.reasoning_tokens for parser in self._parsers.values())
            if self.body.include_reasoning is False:
                events = [event for event in events if not isinstance(event, ReasoningDelta)]
        return ChoiceEvents(completion, output, events, self._finish_reason(completion))

    def _parser(self, output: RequestOutput) -> ChatParser:
        tools = None
        if self._tool_parser is not None:
            tools = self._tool_parser(self._tools.callable, parallel=self._tools.parallel)
            tools.calls_alone = self._tools.must_call
            tools.strict = self._tools.strict
        if self._reasoning is None:
            return ChatParser(tools=tools)
        kind, state = self._reasoning
        decode = TextStream(self.generation.service.llm.tokenizer, output.prompt_token_ids, skip_special_tokens=False)
        reasoning = kind(state)
        reasoning.interrupts = self._interrupts
        return ChatParser(reasoning, tools, decode=decode)

    def _finish_reason(self, completion: CompletionOutput) -> FinishReason | None:
        """As OpenAI's API gives it: a call of the function that the request names is no reason of its own."""
        if not completion.finished:
            return None
        if completion.finish_reason == "length":
            return "length"
        calls = completion.index in self._calling and self._tools.choice != "named"
        return "tool_calls" if calls else "stop"


async def prepare_chat(service: ServerState, request: Request, body: ChatCompletionRequest, *, prefix: str) -> Chat:
    """Checks a chat request and prepares its generation.

    Raises:
        ApiError, InvalidRequestError: it cannot be served; the message names the field.
    """
    model = await service.model(body.model)
    top = _top_logprobs(body)
    tools = await run_in_thread_if_large(
        request, read_tools, body.tools, body.tool_choice, body.parallel_tool_calls, service.leave_out_tool
    )
    prompt = await make_chat_prompt(service, request, body, tools)
    tokens = await chat_tokens(service, request, body, prompt.text)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is None and not body.has_no_token_limit:
        max_tokens = service.default_max_tokens(None)
    generation = make_generation(
        service,
        request,
        body,
        model,
        [tokens],
        prefix=prefix,
        max_tokens=max_tokens,
        logprobs=top,
        prompt_logprobs=body.prompt_logprobs,
        prediction=await read_prediction(service, body.prediction),
        visible_tokens=prompt.visible_tokens,
        reasoning=prompt.marks,
    )
    has_tools = _constrain(service, generation.params, prompt, tools)
    interrupts = () if prompt.marks is None else prompt.marks.interrupts
    return Chat(body, generation, top, tools, prompt.tool_parser, prompt.reasoning, interrupts, has_tools)


def _constrain(
    service: ServerState, params: SamplingParams | BeamSearchParams, prompt: ChatPrompt, tools: RequestTools
) -> bool:
    """Gives the parameters the form of the answer; whether it is made of the schemas of tools."""
    if isinstance(params, BeamSearchParams):
        if tools.must_call or tools.strict:
            message = "tools with use_beam_search must not be strict, and tool_choice must be none or auto"
            raise unsupported("tool_choice", message)
        return False
    asked = params.structured_outputs
    if asked is not None:
        asked = service.llm.inputs.grammars.resolved(asked)
    form = answer_form(tools, prompt.call_format, special_tokens(service.llm.tokenizer), asked)
    if form is None:
        return False
    params.structured_outputs = form
    if prompt.form_begins_after:
        params.structured_outputs = msgspec.structs.replace(form, begin_after=prompt.form_begins_after)
    return form is not asked


def _top_logprobs(body: ChatCompletionRequest) -> int | None:
    """Most likely tokens requested at each position beside the generated one; None: no logprobs."""
    if body.logprob_token_ids is not None:
        return len(body.logprob_token_ids)
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None:
        raise ApiError(400, "top_logprobs is allowed only with logprobs=true", param="top_logprobs")
    return None
