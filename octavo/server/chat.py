"""A chat request: its prompt, its generation, and the events of each choice. All routes that chat use it.

Each route makes a ``ChatCall`` of its body. ``prepare_chat`` renders and tokenizes it; ``Chat.outputs`` yields lists of
``ChoiceEvents``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec
from starlette.requests import Request

from octavo.core.errors import InvalidRequestError
from octavo.core.model_config import ReasoningMarks
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.sampling_params import BeamSearchParams, SamplingParams
from octavo.engine.chat_messages import HERMES, CallFormat
from octavo.engine.tokenizer import TextStream
from octavo.server.answer_format import (
    answer_grammar,
    blame_tool,
    special_tokens,
    visible_tokens,
)
from octavo.server.generation import make_generation
from octavo.server.http.errors import renamed_errors, unsupported
from octavo.server.prompt_cache import ends_of_marks
from octavo.server.prompt_inputs import (
    THINKING_VARIABLES,
    chat_tokens,
    choose_request_template,
    encode,
    render_chat,
)
from octavo.server.reasoning_parsers import ReasoningParser, Thinking
from octavo.server.tool_parsers.formats import Hermes
from octavo.server.tool_parsers.tool_parser import ChatEvent, ContentDelta, ReasoningDelta, ToolCallStart, ToolParser

if TYPE_CHECKING:
    from octavo.core.cache_hints import Breakpoint
    from octavo.core.request import TokensPrompt
    from octavo.server.chat_call import ChatCall, RequestTools
    from octavo.server.generation import Generation
    from octavo.server.prompt_inputs import RequestTemplate
    from octavo.server.state import ServedModel, ServerState


async def prepare_chat(service: ServerState, request: Request, call: ChatCall, *, prefix: str) -> Chat:
    """Renders and tokenizes the prompt of a chat, and prepares its generation.

    ``prefix`` begins the id of the response. Errors name fields as the route does (``ChatCall.names``).
    """
    with renamed_errors(call.names):
        model = await service.model(call.fields.model)
        prompt = await make_chat_prompt(service, request, call)
        return await begin_chat(service, request, call, model, prompt, prefix=prefix)


async def begin_chat(
    service: ServerState, request: Request, call: ChatCall, model: ServedModel, prompt: ChatPrompt, *, prefix: str
) -> Chat:
    """Prepares the generation of a chat whose prompt has been made."""
    max_tokens, prediction = call.max_tokens, None
    if max_tokens is None and not call.has_no_token_limit:
        max_tokens = service.default_max_tokens(None)
    if call.prediction is not None:
        [prediction] = await encode(service, [call.prediction], add_special_tokens=False, param="prediction")
    generation = make_generation(
        service,
        request,
        call.fields,
        model,
        [prompt.tokens],
        prefix=prefix,
        max_tokens=max_tokens,
        logprobs=call.top_logprobs,
        prompt_logprobs=call.fields.prompt_logprobs,
        answer_format=call.answer_format,
        names=call.names,
        prediction=prediction,
        visible_tokens=prompt.visible_tokens,
        reasoning=prompt.marks,
        breakpoints=prompt.breakpoints,
    )
    grammar_has_tools = _constrain_answer(service, generation.params, prompt, call.tools)
    return Chat(call, generation, prompt, grammar_has_tools)


async def num_chat_tokens(service: ServerState, request: Request, call: ChatCall) -> int:
    with renamed_errors(call.names):
        return len((await make_chat_prompt(service, request, call)).tokens["prompt_token_ids"])


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The rendered and tokenized prompt of a chat, and how its answer is parsed."""

    tokens: TokensPrompt
    #: None: tool calls stay in the content.
    tool_parser: type[ToolParser] | None
    #: How the model writes tool calls; None: there is no grammar of its format, or no tools.
    call_format: CallFormat | None
    #: The parser, and its state at the beginning of the answer; None: reasoning stays in the content.
    reasoning: tuple[type[ReasoningParser], Thinking] | None
    #: Special tokens that the parsers need in the text.
    visible_tokens: frozenset[int]
    #: The model's reasoning marks; None: it has none, or they are unknown.
    marks: ReasoningMarks | None
    #: The grammar of the answer applies after these tokens; empty: from the first token on.
    grammar_begins_after: list[int]
    #: Text before an answer in the model's format, which the grammar writes.
    answer_header: str = ""
    #: Where the blocks end up to which the prefix cache shall hold the prompt.
    breakpoints: Sequence[Breakpoint] = ()


async def make_chat_prompt(service: ServerState, request: Request, call: ChatCall) -> ChatPrompt:
    """Renders the messages with the chat template, tokenizes them, and chooses the parsers of the answer."""
    service.images.urls(call.messages)  # raises before anything is rendered
    template, tools = await choose_request_template(service, request, call), call.tools
    render = partial(render_chat, service, template, call)
    text = await render()
    ends = await ends_of_marks(call, text, partial(render_chat, service, template))
    tool_parser, call_format = _choose_tool_parser(service, call, template)
    reasoning = service.formats.reasoning_parser(template.text)
    if call.continues and call_format is not None:
        call_format = replace(call_format, answer="")  # its header is in the prompt
    state, begins_after, answer_header = Thinking.AFTER, list[int](), ""
    if reasoning is not None:
        answer_header = "" if call.continues else reasoning.answer_header
        state = reasoning.state_after(text, continues=call.continues)
        if tools.must_call or tools.strict or call.answer_format is not None:
            text, state, begins_after = await _reason_before_grammar(
                service, call, template, reasoning, text, state, render
            )
    interrupts: tuple[str, ...] = ()
    # If the grammar begins after the reasoning, only the end mark may end it: a call would escape the grammar.
    if reasoning is not None and tool_parser is not None and not begins_after:
        interrupts = tuple(dict.fromkeys((*reasoning.interrupts, *tool_parser.begins)))
    markers = tool_parser.markers if tool_parser else ()
    markers += (reasoning.start, reasoning.end, *reasoning.markers) if reasoning else ()
    tokens, breakpoints = await chat_tokens(service, request, call, text, ends)
    return ChatPrompt(
        tokens,
        tool_parser,
        call_format,
        (reasoning, state) if reasoning is not None and call.separates_reasoning else None,
        visible_tokens(service.llm.tokenizer, markers) if markers else frozenset(),
        reasoning.marks(state is Thinking.INSIDE, interrupts) if reasoning else None,
        begins_after,
        answer_header,
        breakpoints,
    )


def _choose_tool_parser(
    service: ServerState, call: ChatCall, template: RequestTemplate
) -> tuple[type[ToolParser] | None, CallFormat | None]:
    if call.tools.choice == "none":
        return None, None
    parser = service.formats.tool_parser(template.text, template.variables)
    call_format = None if parser is None else parser.call_format(template.text)
    if call_format is None and call.tools.must_call:
        parser, call_format = Hermes, HERMES  # required calls need a format that has a grammar
    if parser is None and service.formats.detects_tool_parser and call.parses_tool_calls:
        raise unsupported(
            "tools",
            "the tool call format of this model cannot be detected from its chat template: name one with the option "
            "--tool-call-parser; tool_choice required, or one function, works without",
        )
    return (parser if call.parses_tool_calls else None), call_format


async def _reason_before_grammar(
    service: ServerState,
    call: ChatCall,
    template: RequestTemplate,
    reasoning: type[ReasoningParser],
    text: str,
    state: Thinking,
    render: Callable[..., Awaitable[str]],
) -> tuple[str, Thinking, list[int]]:
    """Lets the model reason freely before an answer with a grammar.

    Returns the prompt, the parser's state after it, and the tokens after which the grammar applies. If the model would
    open its reasoning itself, the prompt opens it, so that the end mark is certain to come. If the end mark is not a
    single token, the grammar must apply from the first token on, and the prompt closes the reasoning.
    """
    end = service.llm.tokenizer.convert_tokens_to_ids(reasoning.end)
    if end is None:
        is_open = text.rstrip().endswith(reasoning.start)
        text = f"{text}\n{reasoning.end}\n\n" if is_open else text
        return text.removesuffix(reasoning.turn), Thinking.AFTER, []
    if state is Thinking.BEFORE and reasoning.is_constant:
        state = Thinking.INSIDE
    if state is Thinking.BEFORE and call.thinks is not False:
        switches = [name for name in THINKING_VARIABLES if name in template.variables]
        turned_off = any(call.variables.get(name) is False for name in switches)
        if switches and not turned_off:
            # A template that can turn reasoning off, and does not, belongs to a model that reasons by default.
            without_reasoning = await render(**dict.fromkeys(switches, False))
            if reasoning.state_after(without_reasoning) is Thinking.AFTER:
                state = Thinking.INSIDE
    if state is not Thinking.INSIDE:
        return text.removesuffix(reasoning.turn), state, []
    if reasoning.start not in text[-2 * len(reasoning.start) :] and not call.continues:
        text += reasoning.opening or f"{reasoning.start}\n"
    return text, state, [end]


def _constrain_answer(
    service: ServerState, params: SamplingParams | BeamSearchParams, prompt: ChatPrompt, tools: RequestTools
) -> bool:
    """Sets the grammar of the answer in ``params``; returns whether it contains the schemas of tools."""
    if isinstance(params, BeamSearchParams):
        if tools.must_call or tools.strict:
            raise unsupported("tool_choice", "must be none or auto with use_beam_search, and no tool strict")
        return False
    requested = params.structured_outputs
    if requested is not None:
        requested = service.llm.inputs.grammars.resolved(requested)
    grammar = answer_grammar(tools, prompt.call_format, special_tokens(service.llm.tokenizer), requested)
    if grammar is None:
        return False
    grammar_has_tools = grammar is not requested
    if grammar is requested:
        grammar = msgspec.structs.replace(grammar, begin_with=prompt.answer_header)
    params.structured_outputs = msgspec.structs.replace(grammar, begin_after=prompt.grammar_begins_after)
    return grammar_has_tools


FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)
class ChoiceEvents:
    """One choice of a chat, or an increment of it, with the events parsed from its text."""

    completion: CompletionOutput
    #: The engine's output that contains the completion.
    output: RequestOutput
    events: list[ChatEvent]
    #: None until the choice has finished.
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Chat:
    """A chat in the engine. ``outputs`` or ``finish`` is called once."""

    call: ChatCall
    generation: Generation
    prompt: ChatPrompt
    #: Whether the grammar of the answer contains the schemas of tools.
    grammar_has_tools: bool
    _parsers: dict[int, ChatParser] = field(default_factory=dict)

    async def outputs(self) -> AsyncGenerator[list[ChoiceEvents], None]:
        """Increments of the choices if the call asks for a stream, else one list with all choices."""
        generation = self.generation
        try:
            async with aclosing(generation.outputs()) as outputs:
                async for _, output in outputs:
                    yield [self._parse(output, completion) for completion in generation.choices(output)]
        except InvalidRequestError as e:
            if not self.grammar_has_tools:
                raise
            await blame_tool(generation.service, generation.request, self.call.tools)
            # The client knows the tools, not the grammar made of them.
            raise e.renamed({"structured_outputs.grammar": "tools"}) from None

    async def finish(self) -> list[ChoiceEvents]:
        """All choices of a chat without streaming."""
        async with aclosing(self.outputs()) as outputs:
            increments = [choices async for choices in outputs]
        return increments[-1]

    def _parse(self, output: RequestOutput, completion: CompletionOutput) -> ChoiceEvents:
        parser = self._parsers.get(completion.index)
        if parser is None:
            parser = self._parsers[completion.index] = self._make_parser(output)
        cut = completion.finish_reason == "length"
        events = parser.feed(completion.text, completion.token_ids, completion.finished, cut=cut)
        if self.prompt.reasoning is not None:
            self.generation.reasoning_tokens = sum(parser.reasoning_tokens for parser in self._parsers.values())
            if not self.call.includes_reasoning:
                events = [event for event in events if not isinstance(event, ReasoningDelta)]
        reason: FinishReason | None = None
        if completion.finished:
            # As in OpenAI's API, a call of the function that tool_choice names finishes with "stop".
            calls = parser.has_calls and self.call.tools.choice != "named"
            reason = "length" if cut else "tool_calls" if calls else "stop"
        return ChoiceEvents(completion, output, events, reason)

    def _make_parser(self, output: RequestOutput) -> ChatParser:
        tools = None
        if self.prompt.tool_parser is not None:
            tools = self.prompt.tool_parser(self.call.tools.callable, parallel=self.call.tools.parallel)
            tools.calls_alone = self.call.tools.must_call
            tools.strict = self.call.tools.strict
        if self.prompt.reasoning is None:
            return ChatParser(tools=tools)
        kind, state = self.prompt.reasoning
        reasoning = kind(state)
        reasoning.interrupts = () if self.prompt.marks is None else self.prompt.marks.interrupts
        tokenizer = self.generation.service.llm.tokenizer
        decode = TextStream(tokenizer, output.prompt_token_ids, skip_special_tokens=False)
        return ChatParser(reasoning, tools, decode=decode)


class ChatParser:
    """Parses the text of one choice into events: reasoning, then content and tool calls."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        decode: TextStream | None = None,
    ) -> None:
        """``decode`` decodes all tokens, special ones too: reasoning tokens are counted by their text."""
        self._reasoning, self._tools, self._decode = reasoning, tools, decode
        self.has_calls = False
        self._counter = None if reasoning is None else reasoning.token_counter()
        #: Tokens up to the end of the reasoning, and the last of their text (None: the reasoning has ended).
        self._num_tokens = 0
        self._tail: str | None = ""
        #: Characters of each token in the tail.
        self._lengths: list[int] = []
        #: Characters of the whole text, and of the answer after the reasoning.
        self._length = self._answer_length = 0

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens so far, with the marks."""
        return self._num_tokens if self._reasoning is not None and self._reasoning.has_reasoning else 0

    def feed(self, text: str, token_ids: Sequence[int], finished: bool, *, cut: bool = False) -> list[ChatEvent]:
        """Parses further text and its tokens; ``finished``: it is the last; ``cut``: ``max_tokens`` ended it."""
        events: list[ChatEvent] = []
        self._length += len(text)
        if self._reasoning is not None:
            self._count_tokens(self._reasoning, token_ids)
            thought, text = self._reasoning.feed(text, finished)
            if thought:
                events.append(ReasoningDelta(thought))
        self._answer_length += len(text)
        if self._tools is None:
            return [*events, ContentDelta(text, self._length)] if text else events
        # The tool parser counts from the beginning of the answer.
        answer_start = self._length - self._answer_length
        for event in self._tools.feed(text, finished, cut=cut):
            if isinstance(event, ContentDelta):
                event = ContentDelta(event.text, answer_start + event.end)
            self.has_calls |= isinstance(event, ToolCallStart)
            events.append(event)
        return events

    def _count_tokens(self, reasoning: ReasoningParser, token_ids: Sequence[int]) -> None:
        if self._counter is not None and self._decode is not None:
            for token_id in token_ids:
                was_inside = self._counter.state is Thinking.INSIDE
                self._counter.feed(self._decode.push(token_id), False)
                self._num_tokens += was_inside or self._counter.state is Thinking.INSIDE
            return
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
            elif starts := [self._tail.index(text) for text in reasoning.interrupts if text in self._tail]:
                # The tokens of the interrupt belong to the answer.
                rest = len(self._tail) - min(starts)
                while rest > 0 and self._lengths:
                    rest -= self._lengths.pop()
                    self._num_tokens -= 1
                self._tail = None
            else:
                self._tail, self._lengths = self._tail[-longest:], self._lengths[-longest:]
