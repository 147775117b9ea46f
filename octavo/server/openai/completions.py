"""The routes ``/v1/chat/completions`` and ``/v1/completions``, and vLLM's ``/v1/chat/completions/batch``.

A chat request: ``create_chat_completion`` here, ``chat.prepare_chat``, ``EngineCall.outputs`` in ``engine_call``, the
events of ``chat.Chat.outputs``, and ``PendingChatCompletion`` here (in vLLM, ``OpenAIServingChat`` does all of it).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.sampling_params import DEFAULT_MAX_TOKENS
from octavo.server.answer_format import read_answer_format
from octavo.server.chat import Chat, ChoiceEvents, prepare_chat
from octavo.server.chat_call import custom_input, read_chat
from octavo.server.generation import (
    Generation,
    LogprobsTracker,
    make_chat_logprobs,
    make_completion_logprobs,
    make_generation,
    make_prompt_logprobs,
    prompt_tokens,
)
from octavo.server.http.bodies import run_in_thread_if_large
from octavo.server.http.errors import invalid_at, renamed_errors, unsupported
from octavo.server.http.streaming import (
    DONE,
    PendingResponse,
    encode_in_slices,
    event,
    large_event,
    num_logprobs,
    run_if_large,
    with_cancellation,
)
from octavo.server.openai import protocol
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest, Delta, ToolCallDelta
from octavo.server.prompt_inputs import read_prompts
from octavo.server.state import state_of
from octavo.server.tool_parsers.tool_parser import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    collect,
)

# /v1/chat/completions


async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answers a conversation, as one response or as a stream of events."""
    service = state_of(request)
    deadline = service.deadline()
    call = await run_in_thread_if_large(request, read_chat, service, body, body.messages)
    chat = await prepare_chat(service, request, call, prefix="chatcmpl")
    return await PendingChatCompletion(chat).respond(request, call.fields.stream, deadline)


class PendingChatCompletion(PendingResponse):
    """Formats a chat as a ``ChatCompletion``, or as a stream of ``ChatCompletionChunk``."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._sends_ids = bool(chat.call.fields.return_token_ids)
        #: Indexes of the choices whose first chunk was sent.
        self._begun: set[int] = set()
        self._trackers: dict[int, LogprobsTracker] = {}
        #: Input of custom tool calls that have not ended, in pieces, by (choice, call).
        self._custom_calls: dict[tuple[int, int], list[str]] = {}

    async def complete(self) -> bytes:
        choices = await self.chat.finish()
        return await run_if_large(_num_logprobs(choices), lambda: encode_in_slices(self._format(choices)))

    async def response(self) -> protocol.ChatCompletion:
        choices = await self.chat.finish()
        return await run_if_large(_num_logprobs(choices), self._format, choices)

    def _format(self, choices: list[ChoiceEvents]) -> protocol.ChatCompletion:
        generation = self.chat.generation
        response = protocol.ChatCompletion(
            choices=[], object="chat.completion", usage=generation.usage(), **generation.response_fields()
        )
        for choice in choices:
            formatted = protocol.ChatChoice(
                finish_reason=choice.finish_reason or "stop",
                index=choice.completion.index,
                logprobs=self._logprobs(choice),
                message=self._message(choice.events),
                stop_reason=choice.completion.stop_reason,
            )
            if self._sends_ids:
                formatted.token_ids = choice.completion.token_ids
            response.choices.append(formatted)
        if choices and choices[0].output.prompt_logprobs is not None:
            response.prompt_logprobs = make_prompt_logprobs(choices[0].output.prompt_logprobs)
        if choices and self._sends_ids:
            response.prompt_token_ids = choices[0].output.prompt_token_ids
        return response

    def _message(self, events: list[ChatEvent]) -> protocol.Message:
        """The assistant's message; its content is null if it has tool calls only."""
        parts, echoed = collect(events), self.chat.call.echo
        content = parts.content if parts.content is not None or parts.tool_calls else ""
        if echoed:
            content = echoed + (content or "")
        message = protocol.Message(content=content, refusal=None, role="assistant")
        if parts.reasoning is not None:
            message.reasoning_content = message.reasoning = parts.reasoning
        calls: list[protocol.ToolCall | protocol.CustomToolCall] = []
        for call in parts.tool_calls:
            if call.name in self.chat.call.tools.custom:
                custom = protocol.CustomCall(name=call.name, input=custom_input(call.arguments))
                calls.append(protocol.CustomToolCall(id=call.id, type="custom", custom=custom))
            else:
                function = protocol.FunctionCall(name=call.name, arguments=call.arguments)
                calls.append(protocol.ToolCall(id=call.id, type="function", function=function))
        if calls:
            message.tool_calls = calls
        return message

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.chat.outputs()) as outputs:
            async for choices in outputs:
                if data := await run_if_large(_num_logprobs(choices), self._encode_increment, choices):
                    yield data
        usage = self.chat.generation.usage()
        if self.chat.generation.include_usage:
            yield event(self._make_chunk([], usage=usage))
        yield DONE

    def _encode_increment(self, choices: list[ChoiceEvents]) -> bytes:
        chunks = [chunk for choice in choices for chunk in self._chunks(choice)]
        has_prompt_logprobs = any(choice.output.prompt_logprobs is not None for choice in choices)
        return b"".join(map(large_event if has_prompt_logprobs else event, chunks))

    def _chunks(self, choice: ChoiceEvents) -> list[protocol.ChatCompletionChunk]:
        """The chunks of an increment: at first one with the role, one per event, at last one with the finish reason."""
        chunks, index = [], choice.completion.index
        if index not in self._begun:
            first = self._chunk(choice, Delta(role="assistant", content=self.chat.call.echo))
            if not self._begun:  # the prompt is sent once, with the first choice
                if choice.output.prompt_logprobs is not None:
                    first.prompt_logprobs = make_prompt_logprobs(choice.output.prompt_logprobs)
                if self._sends_ids:
                    first.prompt_token_ids = choice.output.prompt_token_ids
            chunks.append(first)
            self._begun.add(index)
        logprobs = self._logprobs(choice)
        deltas = [delta for event in choice.events for delta in self._deltas(index, event)]
        if choice.finish_reason is not None:
            deltas += self._end_custom_calls(index)
        ids = choice.completion.token_ids if self._sends_ids else []
        if not deltas and ((logprobs is not None and logprobs.content) or ids):
            deltas = [Delta(content="")]
        for number, delta in enumerate(deltas):
            chunk = self._chunk(choice, delta)
            if number == 0:
                chunk.choices[0].logprobs = logprobs
                if self._sends_ids:
                    chunk.choices[0].token_ids = ids
            chunks.append(chunk)
        if choice.finish_reason is not None:
            last = self._chunk(choice, Delta())
            last.choices[0].finish_reason = choice.finish_reason
            last.choices[0].stop_reason = choice.completion.stop_reason
            chunks.append(last)
        return chunks

    def _deltas(self, choice: int, event: ChatEvent) -> list[Delta]:
        """The deltas of an event. The input of a custom tool call is one delta, sent when the call ends."""
        if isinstance(event, ToolCallArguments) and (choice, event.index) in self._custom_calls:
            self._custom_calls[choice, event.index].append(event.text)
            return []
        ended = self._end_custom_calls(choice)
        if isinstance(event, ContentDelta):
            return [*ended, Delta(content=event.text)]
        if isinstance(event, ReasoningDelta):
            return [*ended, Delta(reasoning_content=event.text, reasoning=event.text)]
        if not isinstance(event, ToolCallStart):
            arguments = protocol.FunctionCallDelta(arguments=event.text)
            return [*ended, Delta(tool_calls=[ToolCallDelta(index=event.index, function=arguments)])]
        if event.name in self.chat.call.tools.custom:
            self._custom_calls[choice, event.index] = []
            custom = protocol.CustomCall(name=event.name, input="")
            call = ToolCallDelta(index=event.index, id=event.id, type="custom", custom=custom)
        else:
            function = protocol.FunctionCallDelta(name=event.name, arguments="")
            call = ToolCallDelta(index=event.index, id=event.id, type="function", function=function)
        return [*ended, Delta(tool_calls=[call])]

    def _end_custom_calls(self, choice: int) -> list[Delta]:
        deltas = []
        for key in [key for key in self._custom_calls if key[0] == choice]:
            custom = protocol.CustomCall(input=custom_input("".join(self._custom_calls.pop(key))))
            deltas.append(Delta(tool_calls=[ToolCallDelta(index=key[1], custom=custom)]))
        return deltas

    def _logprobs(self, choice: ChoiceEvents) -> protocol.ChoiceLogprobs | None:
        generation, index = self.chat.generation, choice.completion.index
        if self.chat.call.top_logprobs is None:
            return None
        if index not in self._trackers:
            self._trackers[index] = generation.track(LogprobsTracker, choice.output)
        tokens = self._trackers[index].advance(choice.completion)
        return make_chat_logprobs(generation.token_names, tokens, self.chat.call.top_logprobs)

    def _chunk(self, choice: ChoiceEvents, delta: Delta) -> protocol.ChatCompletionChunk:
        index = choice.completion.index
        chunk = protocol.ChunkChoice(delta=delta, finish_reason=None, index=index, logprobs=None)
        return self._make_chunk([chunk], **self.chat.generation.chunk_usage())

    def _make_chunk(
        self, choices: list[protocol.ChunkChoice], **usage: protocol.Usage | None
    ) -> protocol.ChatCompletionChunk:
        fields = self.chat.generation.response_fields()
        return protocol.ChatCompletionChunk(choices=choices, object="chat.completion.chunk", **fields, **usage)


def _num_logprobs(choices: list[ChoiceEvents]) -> int:
    return num_logprobs([choices[0].output]) if choices else 0


# /v1/completions


async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Completes prompts: texts or token ids, one or many; as one response or as a stream of events."""
    service = state_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    if body.logprob_token_ids is not None and body.logprobs is None:
        body.logprobs = 0
    prompts = await read_prompts(service, body)
    max_tokens, prompt_logprobs = body.max_tokens, body.prompt_logprobs
    if max_tokens is None and not body.has_no_token_limit:
        max_tokens = service.default_max_tokens(DEFAULT_MAX_TOKENS)
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    answer_format = read_answer_format(body)
    names = {} if answer_format is None else answer_format.names
    with renamed_errors(names):
        generation = make_generation(
            service,
            request,
            body,
            model,
            prompts,
            prefix="cmpl",
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
            answer_format=answer_format,
            names=names,
            reasoning=service.formats.named_marks(),
        )
    return await PendingCompletion(body, generation).respond(request, body.stream, deadline)


@dataclass(slots=True)
class PendingCompletion(PendingResponse):
    """Formats a generation as a ``Completion``, or as a stream of such chunks."""

    body: CompletionRequest
    generation: Generation
    #: By index of the choices that have begun; None: no logprobs are requested.
    _trackers: dict[int, LogprobsTracker | None] = field(default_factory=dict)

    async def complete(self) -> bytes:
        outputs = await self.generation.finish()
        return await run_if_large(num_logprobs(outputs), self._encode, outputs)

    def _encode(self, outputs: list[RequestOutput]) -> bytes:
        choices = []  # all choices of the first prompt, then those of the next
        for number, output in enumerate(outputs):
            for completion in self.generation.choices(output):
                tracker = self._make_tracker(number, output) if completion.token_ids else None
                logprobs = self._logprobs(completion, tracker)
                choices.append(self._choice(number, output, completion, logprobs, prompt=True, text=True, end=True))
        return encode_in_slices(self._completion(choices, usage=self.generation.usage()))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.generation.outputs()) as outputs:
            async for number, output in outputs:
                if data := await run_if_large(num_logprobs([output]), self._encode_increment, number, output):
                    yield data
        usage = self.generation.usage()
        if self.generation.include_usage:
            yield event(self._completion([], usage=usage))
        yield DONE

    def _encode_increment(self, number: int, output: RequestOutput) -> bytes:
        choices = []
        for completion in self.generation.choices(output):
            choices += self._increments(number, output, completion)
        chunks = [self._completion([choice], **self.generation.chunk_usage()) for choice in choices]
        return b"".join(map(event if output.prompt_logprobs is None else large_event, chunks))

    def _increments(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> list[protocol.CompletionChoice]:
        """One choice in up to three chunks: at first the prompt, then new text, at last the finish reason."""
        sends_ids, index = bool(self.body.return_token_ids), number * self.generation.n + completion.index
        is_first = index not in self._trackers
        if is_first:
            self._trackers[index] = self._make_tracker(number, output)
        logprobs = self._logprobs(completion, self._trackers[index])
        has_tokens = (logprobs is not None and logprobs.tokens) or (sends_ids and completion.token_ids)
        parts = {
            "prompt": is_first and (self.body.echo or output.prompt_logprobs is not None or sends_ids),
            "text": completion.text or has_tokens,
            "end": completion.finished,
        }
        return [
            self._choice(number, output, completion, logprobs, **{part: True})
            for part, is_there in parts.items()
            if is_there
        ]

    def _choice(
        self,
        number: int,
        output: RequestOutput,
        completion: CompletionOutput,
        logprobs: protocol.CompletionLogprobs | None,
        *,
        prompt: bool = False,
        text: bool = False,
        end: bool = False,
    ) -> protocol.CompletionChoice:
        """A choice with some of its parts: the prompt and its logprobs, the text, the finish reason."""
        reason: Literal["stop", "length"] | None = None
        if end:
            reason = "length" if completion.finish_reason == "length" else "stop"
        index = number * self.generation.n + completion.index
        choice = protocol.CompletionChoice(finish_reason=reason, index=index, logprobs=None, text="")
        if text:
            choice.text, choice.logprobs = completion.text, logprobs
        if prompt:
            self._add_prompt(choice, number, output)
        if end:
            choice.stop_reason = completion.stop_reason
        if self.body.return_token_ids and (prompt or text):
            choice.token_ids = completion.token_ids if text else []
            if prompt:
                choice.prompt_token_ids = output.prompt_token_ids
        return choice

    def _make_tracker(self, number: int, output: RequestOutput) -> LogprobsTracker | None:
        if self.body.logprobs is None:
            return None
        start = len(self._prompt_text(number)) if self.body.echo else 0
        return self.generation.track(LogprobsTracker, output, start=start)

    def _logprobs(
        self, completion: CompletionOutput, tracker: LogprobsTracker | None
    ) -> protocol.CompletionLogprobs | None:
        if tracker is None:
            return None
        return make_completion_logprobs(self.generation.token_names, tracker.advance(completion))

    def _add_prompt(self, choice: protocol.CompletionChoice, number: int, output: RequestOutput) -> None:
        """Adds the prompt's logprobs to a choice; with ``echo``, puts the prompt before its text and logprobs."""
        logprobs = choice.logprobs
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
        if not self.body.echo:
            return
        text = self._prompt_text(number)
        choice.text = text + choice.text
        if self.body.logprobs is None or output.prompt_logprobs is None:
            return
        tokenizer = self.generation.service.llm.tokenizer
        tokens = prompt_tokens(tokenizer, output.prompt_token_ids, output.prompt_logprobs, text)
        choice.logprobs = make_completion_logprobs(self.generation.token_names, tokens)
        if logprobs is not None:
            choice.logprobs.tokens += logprobs.tokens
            choice.logprobs.token_logprobs += logprobs.token_logprobs
            choice.logprobs.top_logprobs += logprobs.top_logprobs
            choice.logprobs.text_offset += logprobs.text_offset

    def _prompt_text(self, number: int) -> str:
        prompt = self.generation.prompts[number]
        if (text := prompt.get("prompt")) is not None:
            return text
        return self.generation.service.llm.tokenizer.decode(prompt["prompt_token_ids"], skip_special_tokens=False)

    def _completion(
        self, choices: list[protocol.CompletionChoice], **usage: protocol.Usage | None
    ) -> protocol.Completion:
        fields = self.generation.response_fields()
        return protocol.Completion(choices=choices, object="text_completion", **fields, **usage)


# /v1/chat/completions/batch: several conversations, with one choice of the response for each.


class BatchedChatsRequest(ChatCompletionRequest):
    """Body of ``/v1/chat/completions/batch``: that of ``/v1/chat/completions``, with several conversations."""

    messages: list[Annotated[list[protocol.ChatMessage], Field(fail_fast=True)]] = Field(  # type: ignore[assignment]
        description="The conversations."
    )


async def create_batched_chats(request: Request, body: BatchedChatsRequest) -> Response:
    """Answers several conversations at once; choice i is the answer to conversation i."""
    service = state_of(request)
    deadline = service.deadline()
    if not body.messages:
        raise invalid_at("messages", "must not be an empty list")
    limit = service.options.max_sequences_per_request
    if len(body.messages) > limit:
        problem = f"holds {len(body.messages)} conversations; at most {limit} are served at once"
        raise invalid_at("messages", problem)
    if body.stream_options is not None:
        raise unsupported("stream_options", "is allowed only with stream=true")
    chats = []
    for number, messages in enumerate(body.messages):
        call = await run_in_thread_if_large(request, read_chat, service, body, messages, f"messages[{number}]")
        chats.append(PendingChatCompletion(await prepare_chat(service, request, call, prefix="chatcmpl")))
    answer = await with_cancellation(request.receive, _answer_all(chats), deadline)
    return Response(answer, media_type="application/json")


async def _answer_all(chats: list[PendingChatCompletion]) -> bytes:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(chat.response()) for chat in chats]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    response, *others = [task.result() for task in tasks]
    usage = response.usage
    for number, other in enumerate(others, 1):
        [choice] = other.choices
        choice.index = number
        response.choices.append(choice)
        usage.prompt_tokens += other.usage.prompt_tokens
        usage.completion_tokens += other.usage.completion_tokens
        usage.total_tokens += other.usage.total_tokens
        cached, more = usage.prompt_tokens_details, other.usage.prompt_tokens_details
        cached.cached_tokens += more.cached_tokens
        if "cache_write_tokens" in more.model_fields_set:
            cached.cache_write_tokens += more.cache_write_tokens
    return response.encode()
