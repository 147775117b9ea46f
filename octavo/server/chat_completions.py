"""The route ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Set
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import RequestOutput
from octavo.server.chat_output import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    collect,
)
from octavo.server.chat_request import Chat, ChoiceEvents, start_chat
from octavo.server.large_answers import encode_in_slices, num_logprobs, run_if_large
from octavo.server.logprobs import LogprobsTracker, make_chat_logprobs, make_prompt_logprobs
from octavo.server.pending_response import PendingResponse
from octavo.server.protocol import ChatCompletionRequest, TextPart
from octavo.server.protocol_answers import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    Message,
)
from octavo.server.protocol_tools import (
    CustomCall,
    CustomToolCall,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from octavo.server.service import service_of
from octavo.server.streaming import DONE, event, large_event
from octavo.server.tools import custom_input


async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answers a conversation, as one response or as a stream of events."""
    service = service_of(request)
    deadline = service.deadline()
    pending = PendingCompletion(await start_chat(service, request, body, prefix="chatcmpl"))
    return await pending.respond(request, body.stream, deadline)


class PendingCompletion(PendingResponse):
    """A chat and the response of ``/v1/chat/completions`` to it."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._sends_ids = bool(chat.body.return_token_ids)
        #: Pieces of the arguments of calls of custom tools that have not ended, by choice and number of the call.
        self._custom_calls: dict[tuple[int, int], list[str]] = {}
        #: Of each choice that has begun; None: no logprobs are requested.
        self._trackers: dict[int, LogprobsTracker | None] = {}

    async def complete(self) -> bytes:
        """See ``PendingResponse``."""
        choices = await self.chat.finish()
        return await run_if_large(_num_logprobs(choices), lambda: encode_in_slices(self._whole(choices)))

    async def whole(self) -> ChatCompletion:
        """The complete response."""
        choices = await self.chat.finish()
        return await run_if_large(_num_logprobs(choices), self._whole, choices)

    def _whole(self, choices: list[ChoiceEvents]) -> ChatCompletion:
        found = []
        for choice in choices:
            self._trackers[choice.index] = self._tracker(choice.output)
            whole = ChatChoice(
                finish_reason=choice.finish_reason or "stop",
                index=choice.index,
                logprobs=self._logprobs(choice),
                message=_message(choice.events, _echoed(self.chat.body), self.chat.custom_tools),
                stop_reason=choice.stop_reason,
            )
            if self._sends_ids:
                whole.token_ids = choice.completion.token_ids
            found.append(whole)
        generation = self.chat.generation
        response = ChatCompletion(
            choices=found, object="chat.completion", usage=generation.usage(), **generation.response_fields()
        )
        if choices and choices[0].output.prompt_logprobs is not None:
            response.prompt_logprobs = make_prompt_logprobs(choices[0].output.prompt_logprobs)
        if choices and self._sends_ids:
            response.prompt_token_ids = choices[0].output.prompt_token_ids
        return response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """See ``PendingResponse``."""
        async with aclosing(self.chat.outputs()) as outputs:
            async for choices in outputs:
                if data := await run_if_large(_num_logprobs(choices), self._increment, choices):
                    yield data
        usage = self.chat.generation.usage()
        if self.chat.generation.include_usage:
            yield event(self._make([], usage=usage))
        yield DONE

    def _increment(self, choices: list[ChoiceEvents]) -> bytes:
        chunks = []
        for choice in choices:
            if choice.index not in self._trackers:
                chunks.append(self._first(choice))
            chunks += self._chunks(choice)
        is_first = any(choice.output.prompt_logprobs is not None for choice in choices)
        return b"".join(map(large_event if is_first else event, chunks))

    def _first(self, choice: ChoiceEvents) -> ChatCompletionChunk:
        """The chunk that begins a choice."""
        first = self._chunk(choice, Delta(role="assistant", content=_echoed(self.chat.body)))
        if choice.output.prompt_logprobs is not None and not self._trackers:
            first.prompt_logprobs = make_prompt_logprobs(choice.output.prompt_logprobs)
        if self._sends_ids and not self._trackers:
            first.prompt_token_ids = choice.output.prompt_token_ids
        self._trackers[choice.index] = self._tracker(choice.output)
        return first

    def _chunks(self, choice: ChoiceEvents) -> list[ChatCompletionChunk]:
        """Chunks of one choice: a chunk for each event, and the finish reason in a chunk of its own."""
        logprobs = self._logprobs(choice)
        deltas = [delta for event in choice.events for delta in self._deltas(choice.index, event)]
        if choice.finish_reason is not None:
            deltas += self._custom_inputs(choice.index)
        ids = choice.completion.token_ids if self._sends_ids else []
        if not deltas and ((logprobs is not None and logprobs.content) or ids):
            deltas = [Delta(content="")]
        chunks = [self._chunk(choice, delta) for delta in deltas]
        if chunks:
            chunks[0].choices[0].logprobs = logprobs
        if chunks and self._sends_ids:
            chunks[0].choices[0].token_ids = ids
        if choice.finish_reason is not None:
            last = self._chunk(choice, Delta())
            last.choices[0].finish_reason = choice.finish_reason
            last.choices[0].stop_reason = choice.stop_reason
            chunks.append(last)
        return chunks

    def _deltas(self, choice: int, event: ChatEvent) -> list[Delta]:
        """The increments that an event makes: the text of a call of a custom tool comes whole, when the call ends."""
        if isinstance(event, ToolCallArguments) and (choice, event.index) in self._custom_calls:
            self._custom_calls[choice, event.index].append(event.text)
            return []
        ended = self._custom_inputs(choice)
        if isinstance(event, ToolCallStart) and event.name in self.chat.custom_tools:
            self._custom_calls[choice, event.index] = []
            custom = CustomCall(name=event.name, input="")
            call = ToolCallDelta(index=event.index, id=event.id, type="custom", custom=custom)
            return [*ended, Delta(tool_calls=[call])]
        return [*ended, _delta(event)]

    def _custom_inputs(self, choice: int) -> list[Delta]:
        """The texts of the choice's calls that end here."""
        deltas = []
        for key in [key for key in self._custom_calls if key[0] == choice]:
            custom = CustomCall(input=custom_input("".join(self._custom_calls.pop(key))))
            deltas.append(Delta(tool_calls=[ToolCallDelta(index=key[1], custom=custom)]))
        return deltas

    def _tracker(self, output: RequestOutput) -> LogprobsTracker | None:
        """Tracks the logprobs of one choice; None if they are not requested."""
        if self.chat.top_logprobs is None:
            return None
        return self.chat.generation.track(LogprobsTracker, output)

    def _logprobs(self, choice: ChoiceEvents) -> ChoiceLogprobs | None:
        tracker, top = self._trackers[choice.index], self.chat.top_logprobs
        if tracker is None or top is None:
            return None
        tokens = tracker.advance(choice.completion)
        return make_chat_logprobs(self.chat.generation.token_names, tokens, top)

    def _chunk(self, choice: ChoiceEvents, delta: Delta) -> ChatCompletionChunk:
        part = ChunkChoice(delta=delta, finish_reason=None, index=choice.index, logprobs=None)
        return self._make([part], **self.chat.generation.chunk_usage())

    def _make(self, choices: list[ChunkChoice], **more: Any) -> ChatCompletionChunk:
        fields = self.chat.generation.response_fields()
        return ChatCompletionChunk(choices=choices, object="chat.completion.chunk", **fields, **more)


def _num_logprobs(choices: list[ChoiceEvents]) -> int:
    return num_logprobs([choices[0].output]) if choices else 0


def _echoed(body: ChatCompletionRequest) -> str:
    """What ``echo`` puts before the answer: the text of the last message, if it is the assistant's."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant":
        return ""
    return (
        last.content
        if isinstance(last.content, str)
        else "".join(part.text for part in last.content or [] if isinstance(part, TextPart))
    )


def _message(events: list[ChatEvent], echoed: str, custom: Set[str]) -> Message:
    """The assistant's message after ``echoed``; its content is null where it calls tools without a word."""
    parts = collect(events)
    content = parts.content if parts.content is not None or parts.tool_calls else ""
    if echoed:
        content = echoed + (content or "")
    message = Message(content=content, refusal=None, role="assistant")
    if parts.reasoning is not None:
        message.reasoning_content = message.reasoning = parts.reasoning
    if parts.tool_calls:
        message.tool_calls = [
            CustomToolCall(
                id=call.id, type="custom", custom=CustomCall(name=call.name, input=custom_input(call.arguments))
            )
            if call.name in custom
            else ToolCall(id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in parts.tool_calls
        ]
    return message


def _delta(event: ChatEvent) -> Delta:
    if isinstance(event, ContentDelta):
        return Delta(content=event.text)
    if isinstance(event, ReasoningDelta):
        return Delta(reasoning_content=event.text, reasoning=event.text)
    if isinstance(event, ToolCallStart):
        function = FunctionCallDelta(name=event.name, arguments="")
        return Delta(tool_calls=[ToolCallDelta(index=event.index, id=event.id, type="function", function=function)])
    return Delta(tool_calls=[ToolCallDelta(index=event.index, function=FunctionCallDelta(arguments=event.text))])
