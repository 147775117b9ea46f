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

from starlette.requests import Request

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.server.chat_output import ChatEvent, ChatParser
from octavo.server.errors import ApiError
from octavo.server.generation import Generation, check_fields, make_generation
from octavo.server.prompts import TokenizedPrompt, encode, render_chat
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.service import Service

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
    _parsers: dict[int, ChatParser] = field(default_factory=dict)

    async def outputs(self) -> AsyncGenerator[list[ChoiceEvents], None]:
        """The choices as they grow if the body asks for a stream, else one list with each whole.

        Raises:
            ApiError, InvalidRequestError: as ``Generation.outputs``.
        """
        async with aclosing(self.generation.outputs()) as outputs:
            async for _, output in outputs:
                yield [self._events(output, completion) for completion in self.generation.choices(output)]

    async def finish(self) -> list[ChoiceEvents]:
        """The whole choices of a chat that is not streamed.

        Raises:
            ApiError, InvalidRequestError: as ``outputs``.
        """
        async with aclosing(self.outputs()) as outputs:
            found = [choices async for choices in outputs]
        return found[-1]

    def _events(self, output: RequestOutput, completion: CompletionOutput) -> ChoiceEvents:
        parser = self._parsers.setdefault(completion.index, ChatParser())
        events = parser.feed(completion.text, completion.token_ids, completion.finished)
        return ChoiceEvents(completion, output, events, _finish_reason(completion))


async def start_chat(service: Service, request: Request, body: ChatCompletionRequest, *, prefix: str) -> Chat:
    """Checks a chat request and prepares its generation.

    Raises:
        ApiError, InvalidRequestError: it cannot be served; the message names the field.
    """
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
        prefix=prefix,
        max_tokens=max_tokens,
        logprobs=top,
        prompt_logprobs=body.prompt_logprobs,
    )
    return Chat(body, generation, top)


def _top_logprobs(body: ChatCompletionRequest) -> int | None:
    """Most likely tokens requested at each position beside the generated one; None: no logprobs."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None:
        raise ApiError(400, "top_logprobs is allowed only with logprobs=true", param="top_logprobs")
    return None


def _finish_reason(completion: CompletionOutput) -> FinishReason | None:
    if not completion.finished:
        return None
    return "length" if completion.finish_reason == "length" else "stop"
