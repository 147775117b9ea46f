"""The route ``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.server.cancellation import with_cancellation
from octavo.server.errors import ApiError
from octavo.server.generation import Generation, check_fields, make_generation
from octavo.server.logprobs import LogprobsTracker, make_chat_logprobs, make_prompt_logprobs
from octavo.server.prompts import TokenizedPrompt, encode, read_prediction, render_chat
from octavo.server.protocol import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    Message,
)
from octavo.server.service import service_of
from octavo.server.streaming import DONE, EventStream, event


async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answers a conversation, as one response or as a stream of events."""
    service = service_of(request)
    deadline = asyncio.get_running_loop().time() + service.options.request_timeout
    model = await service.model(body.model)
    check_fields(service, body)
    top = _top_logprobs(body)
    text = await render_chat(service, body.messages, body)
    # The chat template adds the special tokens itself.
    [token_ids] = await encode(service, [text], add_special_tokens=body.add_special_tokens is True)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is None:
        max_tokens = service.default_max_tokens(None)
    generation = make_generation(
        service,
        request,
        body,
        model,
        [TokenizedPrompt(text, token_ids)],
        prefix="chatcmpl",
        max_tokens=max_tokens,
        logprobs=top,
        prompt_logprobs=body.prompt_logprobs,
        prediction=await read_prediction(service, body.prediction),
    )
    pending = _PendingResponse(body, generation, top)
    if body.stream:
        return EventStream(pending.stream(), deadline)
    [output] = await with_cancellation(request.receive, generation.finish(), deadline)
    return Response(pending.complete(output).encode(), media_type="application/json")


def _top_logprobs(body: ChatCompletionRequest) -> int | None:
    """Most likely tokens requested at each position beside the generated one; None: no logprobs."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None:
        raise ApiError(400, "top_logprobs is allowed only with logprobs=true", param="top_logprobs")
    return None


@dataclass(slots=True)
class _PendingResponse:
    """A request in the engine and its response."""

    body: ChatCompletionRequest
    generation: Generation
    top: int | None

    def complete(self, output: RequestOutput) -> ChatCompletion:
        """The complete response."""
        found = []
        for completion in self.generation.choices(output):
            found.append(
                ChatChoice(
                    finish_reason=_reason(completion),
                    index=completion.index,
                    logprobs=self._logprobs(completion, self._tracker(output)),
                    message=Message(content=completion.text, refusal=None, role="assistant"),
                    stop_reason=completion.stop_reason,
                )
            )
        response = ChatCompletion(
            choices=found,
            object="chat.completion",
            usage=self.generation.usage(),
            **self.generation.response_fields(),
        )
        if output.prompt_logprobs is not None:
            response.prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
        return response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed response."""
        trackers: dict[int, LogprobsTracker | None] = {}
        async with aclosing(self.generation.outputs()) as outputs:
            async for _, output in outputs:
                chunks = []
                for completion in self.generation.choices(output):
                    if completion.index not in trackers:
                        trackers[completion.index] = self._tracker(output)
                        first = self._chunk(completion, Delta(role="assistant", content=""))
                        if output.prompt_logprobs is not None and len(trackers) == 1:
                            first.prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
                        chunks.append(first)
                    chunks += self._chunks(completion, trackers[completion.index])
                if chunks:
                    yield b"".join(map(event, chunks))
        usage = self.generation.usage()
        if self.generation.include_usage:
            yield event(self._make([], usage=usage))
        yield DONE

    def _chunks(self, completion: CompletionOutput, tracker: LogprobsTracker | None) -> list[ChatCompletionChunk]:
        """Chunks of one choice: new text, and the finish reason in a chunk of its own."""
        logprobs = self._logprobs(completion, tracker)
        found = []
        if completion.text or (logprobs is not None and logprobs.content):
            chunk = self._chunk(completion, Delta(content=completion.text))
            chunk.choices[0].logprobs = logprobs
            found.append(chunk)
        if completion.finished:
            last = self._chunk(completion, Delta())
            last.choices[0].finish_reason = _reason(completion)
            last.choices[0].stop_reason = completion.stop_reason
            found.append(last)
        return found

    def _tracker(self, output: RequestOutput) -> LogprobsTracker | None:
        """Tracks the logprobs of one choice; None if they are not requested."""
        if self.top is None:
            return None
        skip = self.body.skip_special_tokens is not False
        tokenizer = self.generation.service.llm.tokenizer
        return LogprobsTracker(tokenizer, output.prompt_token_ids, skip_special_tokens=skip)

    def _logprobs(self, completion: CompletionOutput, tracker: LogprobsTracker | None) -> ChoiceLogprobs | None:
        if tracker is None or self.top is None:
            return None
        return make_chat_logprobs(self.generation.service.llm.tokenizer, tracker.advance(completion), self.top)

    def _chunk(self, completion: CompletionOutput, delta: Delta) -> ChatCompletionChunk:
        choice = ChunkChoice(delta=delta, finish_reason=None, index=completion.index, logprobs=None)
        return self._make([choice], **self.generation.chunk_usage())

    def _make(self, found: list[ChunkChoice], **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            choices=found, object="chat.completion.chunk", **self.generation.response_fields(), **more
        )


def _reason(completion: CompletionOutput) -> Literal["stop", "length"]:
    return "length" if completion.finish_reason == "length" else "stop"
