"""A response as it grows: events of a chat's choice to items and semantic events of the Responses API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from octavo.server.api_errors import ApiError
from octavo.server.chat_output import ChatEvent, ContentDelta, ReasoningDelta, ToolCallStart
from octavo.server.logprobs import TextLogprobs, Token
from octavo.server.pending_response import Event
from octavo.server.protocol_answers import TokenLogprob
from octavo.server.responses.response_protocol import (
    CustomToolCallItem,
    FunctionCallItem,
    IncompleteDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from octavo.server.responses.response_tools import ToolOrigin
from octavo.server.tools import custom_input

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
