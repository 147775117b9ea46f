"""OpenAI's Responses API (``/v1/responses``): creates responses, also in the background, and manages stored ones."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.sampling_params import SamplingParams
from octavo.server.chat import Chat, ChoiceEvents
from octavo.server.chat_call import custom_input
from octavo.server.generation import TextLogprobs, Token, make_chat_logprobs
from octavo.server.http.errors import ApiError, as_api_error, invalid_at, unsupported
from octavo.server.http.middleware import owner_of
from octavo.server.http.streaming import Event, EventStream, PendingChat, encode_event
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
from octavo.server.openai.response_request import (
    ITEMS,
    ResponseInput,
    ToolOrigin,
    prepare_response_chat,
    read_input,
    size_of,
)
from octavo.server.state import ResponseStore, ServerState, StoredResponse, deadline_of, responses_of, state_of
from octavo.server.tool_parsers.tool_parser import ChatEvent, ContentDelta, ReasoningDelta, ToolCallStart

# The routes.

#: Seconds beyond the response's own time limit that a client may follow it.
_FOLLOW_GRACE = 10.0


async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answers an input: as one response, as a stream of events, or in the background."""
    service = state_of(request)
    deadline = service.deadline()
    if service.responses.max_responses == 0:
        for name in ("store", "background"):
            if getattr(body, name):
                raise unsupported(name, "is not supported: this server keeps no responses (max_stored_responses)")
    elif body.background and body.store is False:
        raise invalid_at("background", "a background response must be stored: leave out store=false")
    inputs = await read_input(service, request, body)
    chat = await prepare_response_chat(service, request, body, inputs)
    pending = PendingResponseObject(service, request, body, chat, inputs)
    if not body.background:
        return await pending.respond(request, body.stream, deadline)
    run = BackgroundResponse(pending, service.responses, deadline, keeps_events=body.stream is True)
    first = await run.start()
    run.on_end(service.hold())
    if body.stream:
        return EventStream(run.follow(), deadline + _FOLLOW_GRACE)
    return Response(first, media_type="application/json")


async def retrieve_response(
    request: Request,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int | None, Field(ge=0)] = None,
) -> Response:
    """A stored response as it is now; with ``stream``, the events of one that was streamed in the background."""
    stored = responses_of(request).get(response_id, owner_of(request))
    if not stream:
        if starting_after is not None:
            raise invalid_at("starting_after", "it is allowed only with stream=true")
        return _stored_as_json(stored)
    if stored.run is None or not stored.run.keeps_events:
        message = "only responses created with background=true and stream=true keep their events"
        raise unsupported("stream", f"is not supported: {message}")
    events = stored.run.follow(-1 if starting_after is None else starting_after)
    return EventStream(events, deadline_of(request) + _FOLLOW_GRACE)


async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancels a background response; one that has ended stays as it is."""
    responses = responses_of(request)
    run = responses.get(response_id, owner_of(request)).run
    if run is None:
        message = "only a response created with background=true can be cancelled; others end with the connection"
        raise invalid_at("response_id", message, "not_in_background")
    await run.stop()
    return _stored_as_json(responses.get(response_id, owner_of(request)))


async def delete_response(request: Request, response_id: str) -> DeletedResponse:
    """Deletes a stored response."""
    responses_of(request).delete(response_id, owner_of(request))
    return DeletedResponse(id=response_id, object="response", deleted=True)


def _stored_as_json(stored: StoredResponse) -> Response:
    body = stored.body if stored.run is None or stored.run.has_ended else stored.run.encode()
    return Response(body, media_type="application/json")


class PendingResponseObject(PendingChat):
    """Formats a chat as a ``ResponseObject``, and stores it: at its end, or by its ``BackgroundResponse``."""

    def __init__(
        self, service: ServerState, request: Request, body: ResponsesRequest, chat: Chat, inputs: ResponseInput
    ) -> None:
        super().__init__(chat)
        self.service, self.request, self.body, self.inputs = service, request, body, inputs
        self._is_stored = body.store is not False and service.responses.max_responses > 0
        self.growing = GrowingResponse(self._empty_response(), inputs.origins, self._format_logprobs)

    def grow(self, choice: ChoiceEvents) -> list[Event]:
        growing, events = self.growing, []
        if not growing.has_begun:
            if self.chat.call.top_logprobs is not None:
                growing.logprobs = self.chat.generation.track(TextLogprobs, choice.output)
            events += growing.begin()
        if growing.logprobs is not None:
            growing.logprobs.add(choice.completion)
        events += growing.add(choice.events)
        if choice.finish_reason is not None:
            events += growing.end(self._usage(), is_whole=choice.finish_reason != "length")
            if self._is_stored and not self.body.background:
                self.service.responses.put(growing.response.id, self.stored())
        return events

    def encode(self) -> bytes:
        return self.growing.response.encode()

    def failure(self, error: ApiError) -> bytes:
        return b"".join(map(encode_event, self.growing.fail(error)))

    def stored(self, run: BackgroundResponse | None = None) -> StoredResponse:
        """The entry for the response store, with the output so far; ``run``: its background run."""
        output = ITEMS.validate_python([item.model_dump() for item in self.growing.response.output])
        return StoredResponse(
            self.encode(),
            self.inputs.all_items(output),
            self.inputs.size + size_of(output),
            owner_of(self.request),
            num_output=len(output),
            run=run,
            run_size=0 if run is None else run.num_bytes,
        )

    def _empty_response(self) -> ResponseObject:
        body, generation = self.body, self.chat.generation
        params = generation.params if isinstance(generation.params, SamplingParams) else SamplingParams()
        choice = body.tool_choice
        return ResponseObject(
            id=_new_id("resp"),
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
            reasoning={"effort": None, "summary": None, **_repeat(body.reasoning)},
            store=self._is_stored,
            temperature=params.temperature,
            text={"format": {"type": "text"}, **_repeat(body.text)},
            tool_choice=(_repeat(choice) if isinstance(choice, BaseModel) else choice) or "auto",
            tools=[_repeat(tool) for tool in body.tools or []],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            usage=None,
            user=body.user,
        )

    def _format_logprobs(self, tokens: list[Token]) -> list[TokenLogprob]:
        return make_chat_logprobs(self.chat.generation.token_names, tokens, self.chat.call.top_logprobs or 0).content

    def _usage(self) -> ResponseUsage:
        usage = self.chat.generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        reasoning = self.chat.generation.reasoning_tokens or 0
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=cached, cache_write_tokens=self.chat.generation.created_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
            total_tokens=usage.total_tokens,
        )


def _repeat(field: BaseModel | None) -> dict[str, Any]:
    """A field of the request as the response repeats it; functions have all their fields."""
    if field is None:
        return {}
    defaults = {"parameters": None, "strict": False} if isinstance(field, FunctionTool) else {}
    return {**defaults, **field.model_dump(by_alias=True, exclude_none=True)}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


# Responses in the background: a task makes each, and any number of clients can follow its events.

#: Maximum events that are sent at once to a client that resumes a stream.
_BATCH = 256

logger = logging.getLogger("octavo.server")


class BackgroundResponse:
    """A response that a task of its own makes. It ends if the store drops it."""

    def __init__(
        self, pending: PendingResponseObject, store: ResponseStore, deadline: float, *, keeps_events: bool
    ) -> None:
        """``deadline``: when the response fails, on the loop's clock."""
        self.id = pending.growing.response.id
        self.keeps_events = keeps_events
        #: Bytes of the kept events; without ``keeps_events``, an estimate of the output until the response ends.
        self.num_bytes = 0
        #: None: the response has ended.
        self._pending: PendingResponseObject | None = pending
        self._store, self._deadline = store, deadline
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._refusal: ApiError | None = None
        self._task: asyncio.Task[None] | None = None
        self._add(pending.growing.enqueue())

    @property
    def has_ended(self) -> bool:
        return self._pending is None

    async def start(self) -> bytes:
        """Starts the task and stores the response; returns it as JSON. Raises if the queue or the store is full."""
        pending = self._pending
        assert pending is not None
        first = pending.encode()
        self._task = asyncio.create_task(self._run(pending))
        await asyncio.sleep(0)  # the task enters the queue, or fails
        if self._refusal is not None:
            raise self._refusal
        self._store.put(self.id, pending.stored(self))
        if self.id not in self._store:
            message = "the response does not fit into this server's response store (max_stored_response_bytes)"
            raise invalid_at("background", message, "too_large")
        return first

    def on_end(self, call: Callable[[], None]) -> None:
        """Calls back when the task that ``start`` has started ends."""
        assert self._task is not None
        self._task.add_done_callback(lambda _: call())

    def encode(self) -> bytes:
        """The unfinished response with its finished items, as JSON."""
        assert self._pending is not None
        response = self._pending.growing.response
        finished = [item for item in response.output if item.status != "in_progress"]
        return response.model_copy(update={"output": finished}).encode()

    def cancel(self) -> None:
        if self._task is not None and not self.has_ended and not self._task.cancelling():
            self._task.cancel()

    async def stop(self) -> None:
        """Cancels the response and waits until its blocks are free."""
        self.cancel()
        if self._task is not None and not self.has_ended:
            await asyncio.wait({self._task})

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events after this sequence number, until the last one."""
        yield b""  # sends the headers at once
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

    async def _run(self, pending: PendingResponseObject) -> None:
        growing, outputs = pending.growing, pending.chat.outputs()
        try:
            async with asyncio.timeout_at(self._deadline), aclosing(outputs):
                async for [choice] in outputs:
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

    def _end(self, pending: PendingResponseObject) -> None:
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


# From the events of a choice to a response.

#: Error code of a failed response by HTTP status.
_CODES: dict[int, Any] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class GrowingResponse:
    """A response, built item by item. Every method returns the stream events of its change."""

    def __init__(
        self,
        response: ResponseObject,
        origins: Mapping[str, ToolOrigin],
        format_logprobs: Callable[[list[Token]], list[TokenLogprob]] = lambda tokens: [],
    ) -> None:
        """Takes over ``response``, which has no output yet. ``origins``: tools of the request by function name."""
        self.response = response
        #: With logprobs, the caller adds the tokens here before ``add`` gets their events.
        self.logprobs: TextLogprobs | None = None
        self.has_begun = False
        self._origins = origins
        self._format_logprobs = format_logprobs
        #: The end of the open message in the text of the choice.
        self._text_end = 0
        self._sequence_number = 0
        self._open: OutputItem | None = None
        #: The text or the arguments of the open item, in pieces.
        self._pieces: list[str] = []

    @property
    def has_ended(self) -> bool:
        return self.response.status not in ("queued", "in_progress")

    def enqueue(self) -> list[Event]:
        self.response.status = "queued"
        return [self._response_event("response.created"), self._response_event("response.queued")]

    def begin(self) -> list[Event]:
        self.has_begun = True
        self.response.status, was_queued = "in_progress", self.response.status == "queued"
        created = [] if was_queued else [self._response_event("response.created")]
        return [*created, self._response_event("response.in_progress")]

    def add(self, chat_events: Iterable[ChatEvent]) -> list[Event]:
        events = []
        for event in chat_events:
            if isinstance(event, ContentDelta):
                tokens = self.logprobs.take(event.end - len(event.text), event.end) if self.logprobs else []
                events += self._add_text(event.text, self._format_logprobs(tokens))
                self._text_end = event.end
            elif isinstance(event, ReasoningDelta):
                events += self._add_reasoning(event.text)
            elif isinstance(event, ToolCallStart):
                events += self._open_call(event)
            else:
                self._pieces.append(event.text)
                if isinstance(self._open, FunctionCallItem):
                    events.append(self._item_event("response.function_call_arguments.delta", delta=event.text))
        return events

    def end(self, usage: ResponseUsage, *, is_whole: bool) -> list[Event]:
        """The choice has ended; not ``is_whole``: at the token limit."""
        events = []
        if not self.response.output and self._open is None:
            events += self._add_text("", [])
        status: ItemStatus = "completed" if is_whole else "incomplete"
        events += self._close(status)
        self.response.usage, self.response.status = usage, status
        if is_whole:
            self.response.completed_at = int(time.time())
        else:
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        return [*events, self._response_event(f"response.{status}")]

    def fail(self, error: ApiError) -> list[Event]:
        events = self._close("incomplete")
        self.response.status = "failed"
        code = _CODES.get(error.status, "server_error")
        self.response.error = ResponseFailure(code=code, message=error.message)
        return [*events, self._response_event("response.failed")]

    def cancel(self) -> list[Event]:
        """The response was cancelled: its status says so, but the API has no event of that name."""
        events = self._close("incomplete")
        self.response.status = "cancelled"
        return [*events, self._response_event("response.incomplete")]

    def _add_text(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        events, message = [], self._open
        if not isinstance(message, OutputMessage):
            part = OutputText(type="output_text", text="", annotations=[], logprobs=[])
            message = OutputMessage(
                id=_new_id("msg"), type="message", role="assistant", status="in_progress", content=[]
            )
            events += self._open_item(message, part)
            message.content = [part]
        if text or logprobs:
            self._pieces.append(text)
            message.content[0].logprobs += logprobs
            delta = {"content_index": 0, "delta": text, "logprobs": [entry.model_dump() for entry in logprobs]}
            events.append(self._item_event("response.output_text.delta", **delta))
        return events

    def _add_reasoning(self, text: str) -> list[Event]:
        events, item = [], self._open
        if not isinstance(item, ReasoningItem):
            part = ReasoningText(type="reasoning_text", text="")
            item = ReasoningItem(id=_new_id("rs"), type="reasoning", status="in_progress", summary=[], content=[])
            events += self._open_item(item, part)
            item.content = [part]
        self._pieces.append(text)
        return [*events, self._item_event("response.reasoning_text.delta", content_index=0, delta=text)]

    def _open_call(self, event: ToolCallStart) -> list[Event]:
        origin = self._origins.get(event.name, ToolOrigin(event.name))
        fields: dict[str, Any] = {"call_id": event.id, "name": origin.name, "namespace": origin.namespace}
        fields["status"] = "in_progress"
        if origin.is_custom:
            return self._open_item(CustomToolCallItem(id=_new_id("ctc"), type="custom_tool_call", input="", **fields))
        return self._open_item(FunctionCallItem(id=_new_id("fc"), type="function_call", arguments="", **fields))

    def _open_item(self, item: OutputItem, part: BaseModel | None = None) -> list[Event]:
        """Closes the open item and appends one to the output; ``part``: the only part of its content."""
        events = self._close("completed")
        self.response.output.append(item)
        self._open = item
        index = len(self.response.output) - 1
        events.append(self._event("response.output_item.added", output_index=index, item=item.model_dump()))
        if part is not None:
            events.append(self._item_event("response.content_part.added", content_index=0, part=part.model_dump()))
        return events

    def _close(self, status: ItemStatus) -> list[Event]:
        item, events = self._open, []
        if item is None:
            return []
        if isinstance(item, OutputMessage) and self.logprobs and (rest := self.logprobs.rest(self._text_end)):
            events += self._add_text("", self._format_logprobs(rest))
        text, self._pieces = "".join(self._pieces), []
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            events.append(self._item_event("response.function_call_arguments.done", name=item.name, arguments=text))
        elif isinstance(item, CustomToolCallItem):
            item.input = custom_input(text)
            events.append(self._item_event("response.custom_tool_call_input.delta", delta=item.input))
            events.append(self._item_event("response.custom_tool_call_input.done", input=item.input))
        else:
            part = item.content[0]
            part.text = text
            done: dict[str, Any] = {"content_index": 0, "text": text}
            if isinstance(part, OutputText):
                done["logprobs"] = [entry.model_dump() for entry in part.logprobs]
            events.append(self._item_event(f"response.{part.type}.done", **done))
            events.append(self._item_event("response.content_part.done", content_index=0, part=part.model_dump()))
        item.status = status
        index = len(self.response.output) - 1
        events.append(self._event("response.output_item.done", output_index=index, item=item.model_dump()))
        self._open = None
        return events

    def _item_event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, output_index=len(self.response.output) - 1, **fields)

    def _response_event(self, kind: str) -> Event:
        return self._event(kind, response=self.response.model_dump())

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number - 1, **fields}
