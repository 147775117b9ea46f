"""The route ``/v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Set
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.request import TokensPrompt
from octavo.core.sampling_params import DEFAULT_MAX_TOKENS
from octavo.server.answer_format import custom_input
from octavo.server.chat import Chat, ChoiceEvents, prepare_chat
from octavo.server.fields import refused
from octavo.server.generation import (
    Generation,
    LogprobsTracker,
    make_chat_logprobs,
    make_completion_logprobs,
    make_generation,
    make_prompt_logprobs,
    prompt_tokens,
)
from octavo.server.http.errors import ApiError, as_api_error, invalid, unsupported
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
from octavo.server.openai.protocol import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatMessage,
    ChoiceLogprobs,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CustomCall,
    CustomToolCall,
    Delta,
    FunctionCall,
    FunctionCallDelta,
    Message,
    TextPart,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from octavo.server.prompt_inputs import read_prompts
from octavo.server.state import ServedModel, ServerState, state_of
from octavo.server.tool_parsers.tool_parser import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    collect,
)


async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Completes prompts: texts or token ids, one or many; as one response or as a stream of events."""
    service = state_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    if body.logprob_token_ids is not None and body.logprobs is None:
        body.logprobs = 0
    prompts = await read_prompts(service, body)
    pending = _PendingTexts(body, _generation(service, request, body, model, prompts))
    return await pending.respond(request, body.stream, deadline)


def _generation(
    service: ServerState, request: Request, body: CompletionRequest, model: ServedModel, prompts: list[TokensPrompt]
) -> Generation:
    max_tokens = body.max_tokens
    if max_tokens is None and not body.has_no_token_limit:
        max_tokens = service.default_max_tokens(DEFAULT_MAX_TOKENS)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return make_generation(
        service,
        request,
        body,
        model,
        prompts,
        prefix="cmpl",
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        reasoning=service.formats.named_marks(),
    )


@dataclass(slots=True)
class _PendingTexts(PendingResponse):
    body: CompletionRequest
    generation: Generation

    async def complete(self) -> bytes:
        outputs = await self.generation.finish()
        return await run_if_large(num_logprobs(outputs), self._whole, outputs)

    def _whole(self, outputs: list[RequestOutput]) -> bytes:
        choices = []  # the choices of the first prompt, then those of the next
        for number, output in enumerate(outputs):
            for completion in self.generation.choices(output):
                choice = self._choice(number, completion, completion.finish_reason)
                choice.text = completion.text
                tracker = self._tracker(number, output) if completion.token_ids else None
                logprobs = self._logprobs(completion, tracker)
                self._add_prompt(choice, logprobs, number, output)
                choice.stop_reason = completion.stop_reason
                if self.body.return_token_ids:
                    choice.token_ids, choice.prompt_token_ids = completion.token_ids, output.prompt_token_ids
                choices.append(choice)
        return encode_in_slices(self._completion(choices, usage=self.generation.usage()))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        trackers: dict[int, LogprobsTracker | None] = {}
        async with aclosing(self.generation.outputs()) as outputs:
            async for number, output in outputs:
                if data := await run_if_large(num_logprobs([output]), self._increment, number, output, trackers):
                    yield data
        usage = self.generation.usage()
        if self.generation.include_usage:
            yield event(self._completion([], usage=usage))
        yield DONE

    def _increment(self, number: int, output: RequestOutput, trackers: dict[int, LogprobsTracker | None]) -> bytes:
        """The events of an output; ``trackers``: of the choices that have begun."""
        events = []
        for completion in self.generation.choices(output):
            index = number * self.generation.n + completion.index
            if fresh := index not in trackers:
                trackers[index] = self._tracker(number, output)
            events += self._events(number, output, completion, trackers[index], fresh)
        return b"".join(map(event if output.prompt_logprobs is None else large_event, events))

    def _events(
        self,
        number: int,
        output: RequestOutput,
        completion: CompletionOutput,
        tracker: LogprobsTracker | None,
        fresh: bool,
    ) -> list[Completion]:
        """Chunks of one choice: the prompt if this is the first, new text, the finish reason in a chunk of its own."""
        logprobs = self._logprobs(completion, tracker)
        chunks = []
        ids = bool(self.body.return_token_ids)
        if fresh and (self.body.echo or output.prompt_logprobs is not None or ids):
            choice = self._choice(number, completion, None)
            self._add_prompt(choice, None, number, output)
            if ids:
                choice.prompt_token_ids, choice.token_ids = output.prompt_token_ids, []
            chunks.append(self._chunk(choice))
        if completion.text or (logprobs is not None and logprobs.tokens) or (ids and completion.token_ids):
            choice = self._choice(number, completion, None)
            choice.text = completion.text
            if ids:
                choice.token_ids = completion.token_ids
            choice.logprobs = logprobs
            chunks.append(self._chunk(choice))
        if completion.finished:
            choice = self._choice(number, completion, completion.finish_reason)
            choice.stop_reason = completion.stop_reason
            chunks.append(self._chunk(choice))
        return chunks

    def _tracker(self, number: int, output: RequestOutput) -> LogprobsTracker | None:
        """Tracks the logprobs of one choice; None if they are not requested."""
        if self.body.logprobs is None:
            return None
        start = len(self._prompt_text(number)) if self.body.echo else 0
        return self.generation.track(LogprobsTracker, output, start=start)

    def _choice(self, number: int, completion: CompletionOutput, finish_reason: str | None) -> CompletionChoice:
        reason: Literal["stop", "length"] | None = None
        if finish_reason is not None:
            reason = "length" if finish_reason == "length" else "stop"
        index = number * self.generation.n + completion.index
        return CompletionChoice(finish_reason=reason, index=index, logprobs=None, text="")

    def _logprobs(self, completion: CompletionOutput, tracker: LogprobsTracker | None) -> CompletionLogprobs | None:
        if tracker is None:
            return None
        return make_completion_logprobs(self.generation.token_names, tracker.advance(completion))

    def _add_prompt(
        self, choice: CompletionChoice, logprobs: CompletionLogprobs | None, number: int, output: RequestOutput
    ) -> None:
        """Puts the prompt (echo) and its logprobs before the text and logprobs of the choice."""
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
        choice.logprobs = logprobs
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

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return self._completion([choice], **self.generation.chunk_usage())

    def _completion(self, choices: list[CompletionChoice], **more: Usage | None) -> Completion:
        return Completion(choices=choices, object="text_completion", **self.generation.response_fields(), **more)


# The route ``/v1/chat/completions``.


async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answers a conversation, as one response or as a stream of events."""
    service = state_of(request)
    deadline = service.deadline()
    pending = PendingCompletion(await prepare_chat(service, request, body, prefix="chatcmpl"))
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


# The route ``/v1/chat/completions/batch`` of vLLM: several conversations, a choice of the response for each.


class BatchedChatsRequest(ChatCompletionRequest):
    """Body of ``/v1/chat/completions/batch``: that of ``/v1/chat/completions``, with several conversations."""

    messages: list[Annotated[list[ChatMessage], Field(fail_fast=True)]] = Field(  # type: ignore[assignment]
        description="The conversations."
    )
    stream: Any = refused("conversations are answered together; one alone is streamed by /v1/chat/completions", False)
    n: Any = refused("the choices are the answers to the conversations", 1)
    best_of: Any = refused("the choices are the answers to the conversations", 1)
    use_beam_search: Any = refused("the choices are the answers to the conversations", False)


async def create_batched_chats(request: Request, body: BatchedChatsRequest) -> Response:
    """Answers several conversations at once; choice i is the answer to conversation i."""
    service = state_of(request)
    deadline = service.deadline()
    if not body.messages:
        raise invalid("messages", "messages must not be an empty list")
    most = service.options.max_sequences_per_request
    if len(body.messages) > most:
        raise invalid(
            "messages", f"messages holds {len(body.messages)} conversations; at most {most} are served at once"
        )
    if body.stream_options is not None:
        raise unsupported("stream_options", "stream_options is allowed only with stream=true")
    fields = {name: getattr(body, name) for name in body.model_fields_set}
    chats = []
    for number, messages in enumerate(body.messages):
        one = ChatCompletionRequest.model_construct(body.model_fields_set, **{**fields, "messages": messages})
        try:
            chats.append(PendingCompletion(await prepare_chat(service, request, one, prefix="chatcmpl")))
        except (ApiError, InvalidRequestError, TokenizerError) as e:
            raise _of_conversation(as_api_error(e), number) from None
    answer = await with_cancellation(request.receive, _answer_all(chats), deadline)
    return Response(answer, media_type="application/json")


async def _answer_all(chats: list[PendingCompletion]) -> bytes:
    """One response of the answers to all chats, as JSON."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_answer(chat, number)) for number, chat in enumerate(chats)]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    whole, *others = [task.result() for task in running]
    usage = whole.usage
    for number, other in enumerate(others, 1):
        [choice] = other.choices
        choice.index = number
        whole.choices.append(choice)
        usage.prompt_tokens += other.usage.prompt_tokens
        usage.completion_tokens += other.usage.completion_tokens
        usage.total_tokens += other.usage.total_tokens
        usage.prompt_tokens_details.cached_tokens += other.usage.prompt_tokens_details.cached_tokens
    return whole.encode()


async def _answer(chat: PendingCompletion, number: int) -> ChatCompletion:
    try:
        return await chat.whole()
    except (ApiError, InvalidRequestError) as e:
        raise _of_conversation(as_api_error(e), number) from None


def _of_conversation(error: ApiError, number: int) -> ApiError:
    """The error, with the conversation that it is about."""
    message = f"conversation {number}: {error.message}"
    return ApiError(error.status, message, kind=error.kind, param=error.param, code=error.code, headers=error.headers)
