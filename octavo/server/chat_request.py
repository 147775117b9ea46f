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

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from starlette.requests import Request

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.errors import InvalidRequestError
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.engine.text_stream import TextStream
from octavo.server.api_errors import ApiError, unsupported
from octavo.server.chat_formats import special_tokens
from octavo.server.chat_forms import answer_form, blame_tool
from octavo.server.chat_output import ChatEvent, ReasoningDelta, ToolCallStart
from octavo.server.chat_parser import ChatParser
from octavo.server.chat_prompt import ChatPrompt, make_chat_prompt
from octavo.server.chat_tokens import chat_tokens
from octavo.server.generation import Generation, make_generation
from octavo.server.large_bodies import beside_loop
from octavo.server.prompt_fields import read_prediction
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.reasoning_parsers.reasoning_parser import ReasoningParser, Thinking
from octavo.server.service import Service
from octavo.server.tool_parsers.tool_parser import ToolParser
from octavo.server.tools import RequestTools, read_tools

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


async def start_chat(service: Service, request: Request, body: ChatCompletionRequest, *, prefix: str) -> Chat:
    """Checks a chat request and prepares its generation.

    Raises:
        ApiError, InvalidRequestError: it cannot be served; the message names the field.
    """
    model = await service.model(body.model)
    top = _top_logprobs(body)
    tools = await beside_loop(
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
    service: Service, params: SamplingParams | BeamSearchParams, prompt: ChatPrompt, tools: RequestTools
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
