"""``/v1/chat/completions``"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.server import choices
from octavo.server.answers import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    Message,
    Usage,
)
from octavo.server.completions import FINGERPRINT, check_fields, generation_for, note_usage
from octavo.server.errors import ApiError
from octavo.server.generation import Generation, unless_gone
from octavo.server.prompts import ReadPrompt, encode, render_chat
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.service import service_of
from octavo.server.streaming import DONE, EventStream, event


async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answers a conversation, as one answer or as a stream of events."""
    service = service_of(request)
    deadline = asyncio.get_running_loop().time() + service.options.request_timeout
    model = service.model_name(body.model)
    check_fields(service, body)
    top = _top_logprobs(body)
    text = await render_chat(service, body.messages, body.add_generation_prompt is not False)
    # The template writes the model's own tokens itself.
    [token_ids] = await encode(service, [text], add_special_tokens=False)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    generation = generation_for(
        request,
        service,
        body,
        [ReadPrompt(text, token_ids)],
        prefix="chatcmpl",
        max_tokens=max_tokens,
        logprobs=top,
        prompt_logprobs=body.prompt_logprobs,
    )
    asked = _Asked(request, body, generation, model, top)
    if body.stream:
        return EventStream(asked.stream(), deadline)
    [output] = await unless_gone(request.receive, generation.finish(), deadline)
    return Response(asked.answer(output).encode(), media_type="application/json")


def _top_logprobs(body: ChatCompletionRequest) -> int | None:
    """How many likeliest tokens are wanted beside the logprob of each; None for no logprobs at all."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None:
        raise ApiError(400, "top_logprobs is allowed only with logprobs=true", param="top_logprobs")
    return None


@dataclass(slots=True)
class _Asked:
    """A request and what it takes to answer it."""

    request: Request
    body: ChatCompletionRequest
    generation: Generation
    model: str
    top: int | None
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, output: RequestOutput) -> ChatCompletion:
        """The whole answer."""
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
        answer = ChatCompletion(
            id=self.generation.answer_id,
            choices=found,
            created=self.created,
            model=self.model,
            object="chat.completion",
            system_fingerprint=FINGERPRINT,
            usage=self._usage(),
        )
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = choices.prompt_logprobs(output.prompt_logprobs)
        return answer

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of the answer."""
        trackers: dict[int, choices.Tracker | None] = {}
        async with aclosing(self.generation.outputs()) as outputs:
            async for _, output in outputs:
                chunks = []
                for completion in self.generation.choices(output):
                    if completion.index not in trackers:
                        trackers[completion.index] = self._tracker(output)
                        first = self._chunk(completion, Delta(role="assistant", content=""))
                        if output.prompt_logprobs is not None and len(trackers) == 1:
                            first.prompt_logprobs = choices.prompt_logprobs(output.prompt_logprobs)
                        chunks.append(first)
                    chunks += self._chunks(completion, trackers[completion.index])
                if chunks:
                    yield b"".join(map(event, chunks))
        usage = self._usage()
        if self._wants_usage:
            yield event(self._make([], usage=usage))
        yield DONE

    def _chunks(self, completion: CompletionOutput, tracker: choices.Tracker | None) -> list[ChatChunk]:
        """What is new of one choice: text, and the end as a chunk of its own."""
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

    def _tracker(self, output: RequestOutput) -> choices.Tracker | None:
        """For the logprobs of one choice, if they are wanted."""
        if self.top is None:
            return None
        skip = self.body.skip_special_tokens is not False
        tokenizer = self.generation.service.llm.tokenizer
        return choices.Tracker(tokenizer, output.prompt_token_ids, skip_special_tokens=skip)

    def _logprobs(self, completion: CompletionOutput, tracker: choices.Tracker | None) -> ChoiceLogprobs | None:
        if tracker is None or self.top is None:
            return None
        return choices.chat_logprobs(self.generation.service.llm.tokenizer, tracker.advance(completion), self.top)

    def _usage(self) -> Usage:
        """Tokens used, which the log is told too."""
        usage = self.generation.usage()
        note_usage(self.request, usage)
        return usage

    @property
    def _wants_usage(self) -> bool:
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    def _chunk(self, completion: CompletionOutput, delta: Delta) -> ChatChunk:
        choice = ChunkChoice(delta=delta, finish_reason=None, index=completion.index, logprobs=None)
        # Spelled out in every chunk if it was asked for, as the OpenAI API does.
        return self._make([choice], **({"usage": None} if self._wants_usage else {}))

    def _make(self, found: list[ChunkChoice], **more: Any) -> ChatChunk:
        return ChatChunk(
            id=self.generation.answer_id,
            choices=found,
            created=self.created,
            model=self.model,
            object="chat.completion.chunk",
            system_fingerprint=FINGERPRINT,
            **more,
        )


def _reason(completion: CompletionOutput) -> Literal["stop", "length"]:
    return "length" if completion.finish_reason == "length" else "stop"
