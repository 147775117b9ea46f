"""The routes under ``/v1/responses``."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.sampling_params import SamplingParams
from octavo.server.body_parts import wrong
from octavo.server.cancellation import with_cancellation
from octavo.server.chat_request import Chat, ChoiceEvents
from octavo.server.errors import ApiError, unsupported
from octavo.server.fields import HARMLESS, UNSUPPORTED, refuse_unknown, refuse_unsupported
from octavo.server.large_bodies import beside_loop
from octavo.server.logprobs import TextLogprobs, Token, make_chat_logprobs
from octavo.server.middleware import owner_of
from octavo.server.protocol import TokenLogprob
from octavo.server.renamed_chat import renamed_outputs
from octavo.server.responses import request as chats
from octavo.server.responses.events import Event, GrowingResponse, encode_event
from octavo.server.responses.items import input_items
from octavo.server.responses.protocol import (
    DeletedResponse,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from octavo.server.responses.store import StoredResponse
from octavo.server.service import Service, service_of
from octavo.server.streaming import EventStream


async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answers an input, as one response or as a stream of events."""
    service = service_of(request)
    deadline = asyncio.get_running_loop().time() + service.options.request_timeout
    table = {**UNSUPPORTED, **chats.UNSUPPORTED}
    refuse_unsupported(body, table)
    refuse_unknown(service, body, HARMLESS | chats.HARMLESS, table)
    if body.store and not service.responses.max_responses:
        raise unsupported("store", "store is not supported: this server keeps no responses (max_stored_responses)")
    earlier = None
    if body.previous_response_id is not None:
        earlier = service.responses.get(body.previous_response_id, owner_of(request))
    items = input_items(body.input)
    messages = await beside_loop(request, chats.conversation, body, items, [] if earlier is None else earlier.items)
    size = await beside_loop(request, _size, items)
    chat = await chats.start(service, request, body, messages)
    pending = _PendingResponse(service, request, body, chat, earlier, items, size)
    if body.stream:
        return EventStream(pending.stream(), deadline, pending.failure)
    response = await with_cancellation(request.receive, pending.complete(), deadline)
    return Response(response, media_type="application/json")


async def retrieve_response(request: Request, response_id: str) -> Response:
    """A response that is kept."""
    for name, value in request.query_params.items():
        if name == "stream" and value.lower() not in ("", "0", "false"):
            raise unsupported("stream", "stream is not supported: a response that is kept comes whole")
    found = service_of(request).responses.get(response_id, owner_of(request))
    return Response(found.body, media_type="application/json")


async def delete_response(request: Request, response_id: str) -> DeletedResponse:
    """Forgets a response."""
    service_of(request).responses.delete(response_id, owner_of(request))
    return DeletedResponse(id=response_id, object="response", deleted=True)


@dataclass(slots=True)
class _PendingResponse:
    """A request in the engine and its response."""

    service: Service
    request: Request
    body: ResponsesRequest
    chat: Chat
    earlier: StoredResponse | None
    #: Of the input.
    items: list[dict[str, Any]]
    #: Of these, as JSON.
    items_size: int
    growing: GrowingResponse | None = None

    async def complete(self) -> bytes:
        """The complete response, as JSON."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        assert self.growing is not None
        return _encoded(self.growing.response)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed response."""
        async with aclosing(self._events()) as events:
            async for found in events:
                yield b"".join(map(encode_event, found))

    def failure(self, error: ApiError) -> bytes:
        """The events of a stream that fails."""
        assert self.growing is not None
        return b"".join(map(encode_event, self.growing.fail(error)))

    async def _events(self) -> AsyncGenerator[list[Event], None]:
        logprobs: TextLogprobs | None = None
        async with aclosing(renamed_outputs(self.chat, chats.RENAMED)) as outputs:
            async for choice in outputs:
                found = []
                if self.growing is None:
                    logprobs = self._logprobs(choice)
                    self.growing = GrowingResponse(self._begun(), logprobs, self._shown)
                    found += self.growing.begin()
                if logprobs is not None:
                    logprobs.add(choice.completion)
                found += self.growing.add(choice.events)
                if choice.finish_reason is not None:
                    ended = self.growing.end(self._usage(), is_whole=choice.finish_reason != "length")
                    self._store(self.growing.response)
                    found += ended
                if found:
                    yield found

    def _begun(self) -> ResponseObject:
        """The response before its output."""
        body, tools, params = self.body, self.body.tools or [], self.chat.generation.params
        sampling = params if isinstance(params, SamplingParams) else SamplingParams()
        generation = self.chat.generation
        return ResponseObject(
            id=f"resp_{uuid.uuid4().hex}",
            object="response",
            created_at=generation.created,
            completed_at=None,
            status="in_progress",
            background=False,
            error=None,
            incomplete_details=None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=generation.model.name,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": None, "summary": None, **(body.reasoning or {})},
            store=self._stores,
            temperature=sampling.temperature,
            text={"format": {"type": "text"}, **(body.text or {})},
            tool_choice=body.tool_choice or "auto",
            tools=[
                {**tool, "parameters": tool.get("parameters"), "strict": bool(tool.get("strict"))} for tool in tools
            ],
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation=body.truncation or "disabled",
            usage=None,
            user=body.user,
        )

    @property
    def _stores(self) -> bool:
        return self.body.store is not False and self.service.responses.max_responses > 0

    def _store(self, response: ResponseObject) -> None:
        """Keeps the response, if the request wants it."""
        if not self._stores:
            return
        encoded = _encoded(response)
        output = [item.model_dump() for item in response.output]
        items, size = [*self.items, *output], self.items_size + _size(output)
        if self.earlier is not None:
            items, size = [*self.earlier.items, *items], self.earlier.items_size + size
        stored = StoredResponse(encoded, items, size, owner_of(self.request))
        self.service.responses.put(response.id, stored)

    def _logprobs(self, choice: ChoiceEvents) -> TextLogprobs | None:
        """Tells the tokens of the choice's texts apart; None if their logprobs are not requested."""
        if self.chat.top_logprobs is None:
            return None
        return TextLogprobs(
            self.service.llm.tokenizer,
            choice.output.prompt_token_ids,
            skip_special_tokens=self.body.skip_special_tokens is not False,
            visible_tokens=self.chat.generation.options.visible_tokens,
        )

    def _shown(self, tokens: list[Token]) -> list[TokenLogprob]:
        return make_chat_logprobs(self.service.llm.tokenizer, tokens, self.chat.top_logprobs or 0).content

    def _usage(self) -> ResponseUsage:
        usage = self.chat.generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        thought = self.chat.generation.reasoning_tokens or 0
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=thought),
            total_tokens=usage.total_tokens,
        )


def _size(items: list[dict[str, Any]]) -> int:
    """Bytes of items as JSON."""
    try:
        return len(json.dumps(items))
    except RecursionError:
        raise wrong("input", "it is nested too deeply") from None


def _encoded(response: ResponseObject) -> bytes:
    # In ASCII, as in ApiError.body: the response repeats the request.
    return json.dumps(response.model_dump()).encode()
