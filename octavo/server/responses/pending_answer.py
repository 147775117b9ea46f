"""A response of the Responses API that is made now: of a chat in the engine, step by step."""

from __future__ import annotations

import json
import uuid
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from octavo.core.sampling_params import SamplingParams
from octavo.server.api_errors import ApiError
from octavo.server.chat_request import Chat, ChoiceEvents
from octavo.server.logprobs import TextLogprobs, Token, make_chat_logprobs
from octavo.server.middleware import owner_of
from octavo.server.pending_response import Event, PendingChat, encode_event
from octavo.server.protocol_answers import TokenLogprob
from octavo.server.responses import response_request as chats
from octavo.server.responses.items import ITEMS
from octavo.server.responses.response_events import GrowingResponse
from octavo.server.responses.response_input import ResponseInput, size_of
from octavo.server.responses.response_parts import FunctionTool
from octavo.server.responses.response_protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from octavo.server.responses.store import Run, StoredResponse
from octavo.server.service import Service


class PendingAnswer(PendingChat):
    """See ``PendingChat``; the response is kept when it ends, unless it is of the background, which is kept before."""

    names = chats.RENAMED

    def __init__(
        self, service: Service, request: Request, body: ResponsesRequest, chat: Chat, given: ResponseInput
    ) -> None:
        super().__init__(chat)
        self.service, self.request, self.body, self.given = service, request, body, given
        self.growing = GrowingResponse(self._begun(), given.tools.origins, self._shown)

    def grow(self, choice: ChoiceEvents) -> list[Event]:
        """See ``PendingChat``."""
        growing, events = self.growing, []
        if not growing.has_begun:
            if self.chat.top_logprobs is not None:
                growing.logprobs = self.chat.generation.track(TextLogprobs, choice.output)
            events += growing.begin()
        if growing.logprobs is not None:
            growing.logprobs.add(choice.completion)
        events += growing.add(choice.events)
        if choice.finish_reason is not None:
            events += growing.end(self._usage(), is_whole=choice.finish_reason != "length")
            if self.stores and not self.body.background:
                self.service.responses.put(growing.response.id, self.stored())
        return events

    def encode(self) -> bytes:
        """See ``PendingChat``."""
        return encoded(self.growing.response)

    def failure(self, error: ApiError) -> bytes:
        """See ``PendingResponse``."""
        return b"".join(map(encode_event, self.growing.fail(error)))

    def stored(self, run: Run | None = None) -> StoredResponse:
        """What is kept of the response as it is now; ``run`` makes it, or has made it."""
        response = self.growing.response
        output = ITEMS.validate_python([item.model_dump() for item in response.output])
        return StoredResponse(
            encoded(response),
            self.given.all_items(output),
            self.given.size + size_of(output),
            owner_of(self.request),
            num_output=len(output),
            run=run,
            run_size=0 if run is None else run.num_bytes,
        )

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
            background=bool(body.background),
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
            store=self.stores,
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
    def stores(self) -> bool:
        """Whether the response is kept."""
        return self.body.store is not False and self.service.responses.max_responses > 0

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


def encoded(response: ResponseObject) -> bytes:
    """As JSON."""
    # In ASCII, as in ApiError.body: the response repeats the request.
    return json.dumps(response.model_dump()).encode()
