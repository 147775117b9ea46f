"""The routes under ``/v1/responses``."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.sampling_params import SamplingParams
from octavo.server.api_errors import ApiError, unsupported
from octavo.server.chat_request import Chat, ChoiceEvents
from octavo.server.logprobs import TextLogprobs, Token, make_chat_logprobs
from octavo.server.middleware import owner_of
from octavo.server.pending_response import Event, PendingChat, encode_event
from octavo.server.protocol import TokenLogprob
from octavo.server.responses import response_request as chats
from octavo.server.responses.items import ITEMS
from octavo.server.responses.response_events import GrowingResponse
from octavo.server.responses.response_input import ResponseInput, read_input, size_of
from octavo.server.responses.response_parts import FunctionTool
from octavo.server.responses.response_protocol import (
    DeletedResponse,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from octavo.server.responses.store import StoredResponse
from octavo.server.service import Service, service_of


async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answers an input, as one response or as a stream of events."""
    service = service_of(request)
    deadline = asyncio.get_running_loop().time() + service.options.request_timeout
    if body.store and not service.responses.max_responses:
        raise unsupported("store", "store is not supported: this server keeps no responses (max_stored_responses)")
    given = await read_input(service, request, body)
    chat = await chats.start(service, request, body, given.messages, given.tools)
    pending = _PendingResponse(service, request, body, chat, given)
    return await pending.respond(request, body.stream, deadline)


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


class _PendingResponse(PendingChat):
    names = chats.RENAMED

    def __init__(
        self,
        service: Service,
        request: Request,
        body: ResponsesRequest,
        chat: Chat,
        given: ResponseInput,
    ) -> None:
        super().__init__(chat)
        self.service, self.request, self.body, self.given = service, request, body, given
        self._growing: GrowingResponse | None = None
        self._text_logprobs: TextLogprobs | None = None

    def grow(self, choice: ChoiceEvents) -> list[Event]:
        events = []
        if self._growing is None:
            if self.chat.top_logprobs is not None:
                self._text_logprobs = self.chat.generation.track(TextLogprobs, choice.output)
            self._growing = GrowingResponse(self._begun(), self.given.tools.origins, self._text_logprobs, self._shown)
            events += self._growing.begin()
        if self._text_logprobs is not None:
            self._text_logprobs.add(choice.completion)
        events += self._growing.add(choice.events)
        if choice.finish_reason is not None:
            ended = self._growing.end(self._usage(), is_whole=choice.finish_reason != "length")
            self._store(self._growing.response)
            events += ended
        return events

    def encode(self) -> bytes:
        assert self._growing is not None
        return _encoded(self._growing.response)

    def failure(self, error: ApiError) -> bytes:
        assert self._growing is not None
        return b"".join(map(encode_event, self._growing.fail(error)))

    def _begun(self) -> ResponseObject:
        """The response before its output."""
        body, params = self.body, self.chat.generation.params
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
            reasoning={"effort": None, "summary": None, **_repeated(body.reasoning)},
            store=self._stores,
            temperature=sampling.temperature,
            text={"format": {"type": "text"}, **_repeated(body.text)},
            tool_choice=(_repeated(body.tool_choice) if isinstance(body.tool_choice, BaseModel) else body.tool_choice)
            or "auto",
            tools=[_repeated(tool) for tool in body.tools or []],
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
        output = ITEMS.validate_python([item.model_dump() for item in response.output])
        items, size = self.given.all_items(output), self.given.size + size_of(output)
        stored = StoredResponse(encoded, items, size, owner_of(self.request), num_output=len(output))
        self.service.responses.put(response.id, stored)

    def _shown(self, tokens: list[Token]) -> list[TokenLogprob]:
        return make_chat_logprobs(self.chat.generation.token_names, tokens, self.chat.top_logprobs or 0).content

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


def _repeated(part: BaseModel | None) -> dict[str, Any]:
    """A part of the request as the response repeats it; functions have all their fields."""
    if part is None:
        return {}
    function = {"parameters": None, "strict": False} if isinstance(part, FunctionTool) else {}
    return {**function, **part.model_dump(by_alias=True, exclude_none=True)}


def _encoded(response: ResponseObject) -> bytes:
    # In ASCII, as in ApiError.body: the response repeats the request.
    return json.dumps(response.model_dump()).encode()
