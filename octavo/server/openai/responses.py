"""``/v1/responses``: OpenAI's Responses API, as a chat whose items are converted to messages and back."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.sampling_params import SamplingParams
from octavo.server.answer_format import custom_input
from octavo.server.chat import Chat, ChoiceEvents
from octavo.server.generation import TextLogprobs, Token, make_chat_logprobs
from octavo.server.http.errors import ApiError, as_api_error, invalid, renamed_outputs, unsupported, wrong
from octavo.server.http.middleware import owner_of
from octavo.server.http.streaming import Event, EventStream, PendingChat, encode_event
from octavo.server.openai import response_request as chats
from octavo.server.openai.protocol import TokenLogprob
from octavo.server.openai.response_protocol import (
    CustomToolCallItem,
    DeletedResponse,
    FunctionCallItem,
    FunctionTool,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from octavo.server.openai.response_request import ITEMS, ResponseInput, ToolOrigin, read_input, size_of
from octavo.server.state import ResponseStore, Run, ServerState, StoredResponse, state_of
from octavo.server.tool_parsers.tool_parser import ChatEvent, ContentDelta, ReasoningDelta, ToolCallStart

# A response as it grows: events of a chat's choice to items and semantic events of the Responses API.

#: HTTP status of an error -> its code in a response that failed.
_CODES: dict[int, Any] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class GrowingResponse:
    """A response and the item that is written now. Every method returns the events that tell of it."""

    def __init__(
        self,
        response: ResponseObject,
        origins: Mapping[str, ToolOrigin],
        shown: Callable[[list[Token]], list[TokenLogprob]] = lambda tokens: [],
    ) -> None:
        """Takes over ``response``, which has no output yet.

        ``origins``: what each function of the chat is in the request. ``shown`` makes tokens of ``logprobs`` part of
        the response.
        """
        self.response = response
        #: If it is given, it gets every token before ``add`` gets its events.
        self.logprobs: TextLogprobs | None = None
        self.has_begun = False
        self._origins = origins
        self._shown = shown
        #: Where the text of the message that is written now ends in that of the choice.
        self._text_end = 0
        self._number = 0
        self._open: OutputItem | None = None
        #: What the open item's text or arguments are made of.
        self._pieces: list[str] = []

    @property
    def has_ended(self) -> bool:
        """Whether the response is as it stays."""
        return self.response.status not in ("queued", "in_progress")

    def enqueue(self) -> list[Event]:
        """The response waits until it begins."""
        self.response.status = "queued"
        return [self._whole("response.created"), self._whole("response.queued")]

    def begin(self) -> list[Event]:
        """The response has begun."""
        self.has_begun = True
        self.response.status, waited = "in_progress", self.response.status == "queued"
        created = [] if waited else [self._whole("response.created")]
        return [*created, self._whole("response.in_progress")]

    def add(self, chat_events: Iterable[ChatEvent]) -> list[Event]:
        """An increment of the choice."""
        events = []
        for event in chat_events:
            if isinstance(event, ContentDelta):
                tokens = self.logprobs.take(event.end - len(event.text), event.end) if self.logprobs else []
                events += self._text(event.text, self._shown(tokens))
                self._text_end = event.end
            elif isinstance(event, ReasoningDelta):
                events += self._reasoning(event.text)
            elif isinstance(event, ToolCallStart):
                events += self._close("completed")
                events += self._start(self._call(event))
            else:
                events += self._arguments(event.text)
        return events

    def end(self, usage: ResponseUsage, *, is_whole: bool) -> list[Event]:
        """The choice has ended; not ``is_whole``: by the limit of tokens."""
        events = []
        if not self.response.output and self._open is None:
            events += self._text("", [])
        events += self._close("completed" if is_whole else "incomplete")
        self.response.usage = usage
        self.response.status = "completed" if is_whole else "incomplete"
        if is_whole:
            self.response.completed_at = int(time.time())
        else:
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        return [*events, self._whole(f"response.{self.response.status}")]

    def fail(self, error: ApiError) -> list[Event]:
        """The choice has failed."""
        events = self._close("incomplete")
        self.response.status = "failed"
        code = _CODES.get(error.status, "server_error")
        self.response.error = ResponseFailure(code=code, message=error.message)
        return [*events, self._whole("response.failed")]

    def cancel(self) -> list[Event]:
        """The response was cancelled: it stays incomplete, as the API has no event for it, with a status of its own."""
        events = self._close("incomplete")
        self.response.status = "cancelled"
        return [*events, self._whole("response.incomplete")]

    def _text(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        events = []
        message = self._open
        if not isinstance(message, OutputMessage):
            events += self._close("completed")
            part = OutputText(type="output_text", text="", annotations=[], logprobs=[])
            message = OutputMessage(
                id=_new_id("msg"), type="message", role="assistant", status="in_progress", content=[]
            )
            events += self._start(message)
            events.append(self._event("response.content_part.added", message, content_index=0, part=_plain(part)))
            message.content = [part]
        if text or logprobs:
            self._pieces.append(text)
            message.content[0].logprobs += logprobs
            plain = [_plain(entry) for entry in logprobs]
            delta = {"content_index": 0, "delta": text, "logprobs": plain}
            events.append(self._event("response.output_text.delta", message, **delta))
        return events

    def _reasoning(self, text: str) -> list[Event]:
        events = []
        item = self._open
        if not isinstance(item, ReasoningItem):
            events += self._close("completed")
            part = ReasoningText(type="reasoning_text", text="")
            item = ReasoningItem(id=_new_id("rs"), type="reasoning", status="in_progress", summary=[], content=[])
            events += self._start(item)
            events.append(self._event("response.content_part.added", item, content_index=0, part=_plain(part)))
            item.content = [part]
        self._pieces.append(text)
        events.append(self._event("response.reasoning_text.delta", item, content_index=0, delta=text))
        return events

    def _call(self, event: ToolCallStart) -> FunctionCallItem | CustomToolCallItem:
        origin = self._origins.get(event.name, ToolOrigin(event.name))
        fields: dict[str, Any] = {"status": "in_progress", "call_id": event.id, "name": origin.name}
        fields["namespace"] = origin.namespace
        if origin.is_custom:
            return CustomToolCallItem(id=_new_id("ctc"), type="custom_tool_call", input="", **fields)
        return FunctionCallItem(id=_new_id("fc"), type="function_call", arguments="", **fields)

    def _arguments(self, text: str) -> list[Event]:
        call = self._open
        self._pieces.append(text)
        if isinstance(call, CustomToolCallItem):
            return []
        assert isinstance(call, FunctionCallItem)
        return [self._event("response.function_call_arguments.delta", call, delta=text)]

    def _start(self, item: OutputItem) -> list[Event]:
        """Opens an item, the last of the output from now on."""
        self.response.output.append(item)
        self._open = item
        return [self._numbered("response.output_item.added", output_index=self._index, item=_plain(item))]

    def _close(self, status: ItemStatus) -> list[Event]:
        """Closes the open item, if there is one."""
        item, events = self._open, []
        if item is None:
            return []
        if isinstance(item, OutputMessage) and self.logprobs and (rest := self.logprobs.rest(self._text_end)):
            events += self._text("", self._shown(rest))
        text, self._pieces = "".join(self._pieces), []
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            whole: dict[str, Any] = {"name": item.name, "arguments": item.arguments}
            events.append(self._event("response.function_call_arguments.done", item, **whole))
        elif isinstance(item, CustomToolCallItem):
            item.input = custom_input(text)
            events.append(self._event("response.custom_tool_call_input.delta", item, delta=item.input))
            events.append(self._event("response.custom_tool_call_input.done", item, input=item.input))
        else:
            part = item.content[0]
            part.text = text
            whole = {"content_index": 0, "text": part.text}
            if isinstance(part, OutputText):
                whole["logprobs"] = [_plain(entry) for entry in part.logprobs]
            kind = "output_text" if isinstance(part, OutputText) else "reasoning_text"
            events.append(self._event(f"response.{kind}.done", item, **whole))
            events.append(self._event("response.content_part.done", item, content_index=0, part=_plain(part)))
        item.status = status
        events.append(self._numbered("response.output_item.done", output_index=self._index, item=_plain(item)))
        self._open = None
        return events

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _event(self, kind: str, item: OutputItem, **fields: Any) -> Event:
        return self._numbered(kind, item_id=item.id, output_index=self._index, **fields)

    def _whole(self, kind: str) -> Event:
        return self._numbered(kind, response=_plain(self.response))

    def _numbered(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _plain(model: Any) -> dict[str, Any]:
    plain: dict[str, Any] = model.model_dump()
    return plain


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


# A response of the Responses API that is made now: of a chat in the engine, step by step.


class PendingAnswer(PendingChat):
    """See ``PendingChat``; the response is kept when it ends, unless it is of the background, which is kept before."""

    names = chats.RENAMED

    def __init__(
        self, service: ServerState, request: Request, body: ResponsesRequest, chat: Chat, given: ResponseInput
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


# Responses that are made in the background: no client has to wait for them, and any number can follow their events.

#: Most events that are sent at once to a client that resumes a stream.
_BATCH = 256

logger = logging.getLogger("octavo.server")


class BackgroundResponse(Run):
    """A response that is made by a task of its own, within the bounds of the store: it ends if it is forgotten."""

    def __init__(self, pending: PendingAnswer, store: ResponseStore, deadline: float, *, keeps_events: bool) -> None:
        """``deadline`` on the loop's clock, after which the response fails."""
        self.id = pending.growing.response.id
        self.keeps_events = keeps_events
        #: Of its events, if they are kept; else of those that tell of its output, as long as that grows.
        self.num_bytes = 0
        self._pending: PendingAnswer | None = pending
        self._store = store
        self._deadline = deadline
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._refusal: ApiError | None = None
        self._task: asyncio.Task[None] | None = None
        self._add(pending.growing.enqueue())

    @property
    def has_ended(self) -> bool:
        """Whether the response is as it stays."""
        return self._pending is None

    async def start(self) -> bytes:
        """Begins to make the response; as it is at first, as JSON.

        Raises:
            ApiError: it is not taken: the queue is full, or the store has no room for it.
        """
        pending = self._pending
        assert pending is not None
        first = pending.encode()
        self._task = asyncio.create_task(self._run(pending))
        await asyncio.sleep(0)  # the task enters the queue, or fails
        if self._refusal is not None:
            raise self._refusal
        self._store.put(self.id, pending.stored(self))
        if self.id not in self._store:
            message = "the response has no room in this server's memory of responses (max_stored_response_bytes)"
            raise invalid("background", message, "too_large")
        return first

    def encode(self) -> bytes:
        """The response as it is, with the items that are whole, as JSON; of one that has not ended."""
        assert self._pending is not None
        response = self._pending.growing.response
        return encoded(
            response.model_copy(update={"output": [item for item in response.output if item.status != "in_progress"]})
        )

    def cancel(self) -> None:
        """Ends the response soon, unless it has ended."""
        if self._task is not None and not self.has_ended and not self._task.cancelling():
            self._task.cancel()

    async def stop(self) -> None:
        """Ends the response, unless it has ended, and waits until it has let go of its blocks."""
        self.cancel()
        if self._task is not None and not self.has_ended:
            await asyncio.wait({self._task})

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events that come after the one with this number, as they were and will be sent, until the last.

        The first increment is empty, so that the client knows that it is heard.
        """
        yield b""
        position = after + 1
        while True:
            changed = self._changed
            if position < len(self._events):
                batch = self._events[position : position + _BATCH]
                position += len(batch)
                yield b"".join(batch)
            elif self.has_ended:
                return
            else:
                await changed.wait()

    async def _run(self, pending: PendingAnswer) -> None:
        growing, outputs = pending.growing, renamed_outputs(pending.chat, pending.names)
        try:
            async with asyncio.timeout_at(self._deadline), aclosing(outputs):
                async for choice in outputs:
                    self._add(pending.grow(choice))
                    if growing.has_ended:
                        self._end(pending)
                    else:
                        self._store.grow(self.id, self.num_bytes)
        except asyncio.CancelledError:
            if not self.has_ended:
                self._add(growing.cancel())
                self._end(pending)
        except Exception as e:
            error = as_api_error(e)
            if not self.has_ended:
                self._refusal = None if self.id in self._store else error
                self._add(growing.fail(error))
                self._end(pending)

    def _end(self, pending: PendingAnswer) -> None:
        """The response stays as it is."""
        self._pending = None
        if not self.keeps_events:
            self.num_bytes = 0
        self._store.replace(self.id, pending.stored(self))
        self._notify()
        logger.info("background response %s: %s", self.id, pending.growing.response.status)

    def _add(self, events: list[Event]) -> None:
        data = [encode_event(event) for event in events if self.keeps_events or "response" not in event]
        self.num_bytes += sum(map(len, data))
        if self.keeps_events:
            self._events += data
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


# The routes under ``/v1/responses`` that make responses, and give and end those that are kept.

#: Seconds that a client may follow a response for beyond the time that it may take, to see how it ended.
_GRACE = 10.0


async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answers an input, as one response or as a stream of events, or at once with a response that is made later."""
    service = state_of(request)
    deadline = service.deadline()
    _check_storing(service, body)
    given = await read_input(service, request, body)
    chat = await chats.start(service, request, body, given.messages, given.tools)
    pending = PendingAnswer(service, request, body, chat, given)
    if not body.background:
        return await pending.respond(request, body.stream, deadline)
    run = BackgroundResponse(pending, service.responses, deadline, keeps_events=body.stream is True)
    first = await run.start()
    return EventStream(run.follow(), deadline + _GRACE) if body.stream else _as_json(first)


async def retrieve_response(
    request: Request,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """A response that is kept, as it is now; of one that is streamed in the background also its events."""
    service = state_of(request)
    stored = service.responses.get(response_id, owner_of(request))
    if not stream:
        if starting_after is not None:
            raise wrong("starting_after", "it is allowed only with stream=true")
        return _shown(stored)
    if stored.run is None or not stored.run.keeps_events:
        message = "events are kept of responses that were made with background=true and stream=true; get this one whole"
        raise unsupported("stream", f"stream is not supported: {message}")
    deadline = service.deadline() + _GRACE
    return EventStream(stored.run.follow(-1 if starting_after is None else starting_after), deadline)


async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a response that is made in the background; one that has ended stays as it is."""
    responses = state_of(request).responses
    run = responses.get(response_id, owner_of(request)).run
    if run is None:
        message = "only a response that was made with background=true can be cancelled; others end with the connection"
        raise invalid("response_id", message, "not_in_background")
    await run.stop()
    return _shown(responses.get(response_id, owner_of(request)))


async def delete_response(request: Request, response_id: str) -> DeletedResponse:
    """Forgets a response."""
    state_of(request).responses.delete(response_id, owner_of(request))
    return DeletedResponse(id=response_id, object="response", deleted=True)


def _check_storing(service: ServerState, body: ResponsesRequest) -> None:
    """Refuses what needs a memory of responses that there is not."""
    if service.responses.max_responses:
        if body.background and body.store is False:
            raise wrong("background", "a response of the background has to be stored; leave out store=false")
        return
    for name in ("store", "background"):
        if getattr(body, name):
            raise unsupported(name, f"{name} is not supported: this server keeps no responses (max_stored_responses)")


def _shown(stored: StoredResponse) -> Response:
    """A response that is kept, as it is now."""
    return _as_json(stored.body if stored.run is None or stored.run.has_ended else stored.run.encode())


def _as_json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
