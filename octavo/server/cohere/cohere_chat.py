"""The route ``/v2/chat``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.chat_template import choose_template
from octavo.engine.template_program import template_variables
from octavo.server.api_errors import ApiError, wrong
from octavo.server.chat_output import ContentDelta, ReasoningDelta, ToolCallStart
from octavo.server.chat_request import Chat, ChoiceEvents, start_chat
from octavo.server.cohere.cohere_protocol import (
    CohereAnswer,
    CohereCall,
    CohereChat,
    CohereChatRequest,
    CohereFinish,
    CohereFunction,
    CohereMessage,
    CoherePart,
    CohereText,
    CohereTokens,
    CohereUsage,
)
from octavo.server.large_bodies import beside_loop
from octavo.server.message_fields import THINKING_VARIABLES
from octavo.server.pending_response import Event, PendingChat, encode_event
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.renamed_chat import renamed_errors
from octavo.server.request_models import read_model
from octavo.server.service import Service, service_of
from octavo.server.streaming import DONE

#: Fields of a chat by their names here; errors about a chat are told under these.
RENAMED = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "top_k": "k", "top_p": "p"}
#: Fields that are the same in a chat, and those of another name.
_SAME = ("model", "stream", "max_tokens", "temperature", "seed", "frequency_penalty", "presence_penalty", "priority")
_OTHER_NAMES = {"stop_sequences": "stop", "k": "top_k", "p": "top_p"}


async def chat(request: Request, body: CohereChatRequest) -> Response:
    """Answers a conversation, as one message or as a stream of events."""
    service = service_of(request)
    deadline = service.deadline()
    with renamed_errors(RENAMED):
        inner = await beside_loop(request, _read, service, body)
        pending = _PendingCohereChat(await start_chat(service, request, inner, prefix="chat"))
    return await pending.respond(request, body.stream, deadline)


def _read(service: Service, body: CohereChatRequest) -> ChatCompletionRequest:
    return read_model(ChatCompletionRequest, chat_body(service, body), service)


def chat_body(service: Service, body: CohereChatRequest) -> dict[str, Any]:
    """Fields of the chat that a request asks for.

    Raises:
        ApiError: 400, naming the part of a message that does not fit.
    """
    chat = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    chat |= {other: value for name, other in _OTHER_NAMES.items() if (value := getattr(body, name)) is not None}
    chat["messages"] = [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    if body.tools:
        chat["tools"] = [tool.model_dump(exclude_unset=True) for tool in body.tools]
        if body.strict_tools:
            for tool in chat["tools"]:
                tool["function"]["strict"] = True
    if body.tool_choice is not None:
        chat["tool_choice"] = body.tool_choice.lower()
    if body.documents:
        chat["documents"] = [{"text": each} if isinstance(each, str) else _fields(each) for each in body.documents]
    form = body.response_format
    if form is not None and form.type == "json_object":
        schema = form.json_schema if form.json_schema is not None else form.schema_
        named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        chat["response_format"] = {"type": "json_object"} if schema is None else named
    if body.thinking is not None:
        if body.thinking.token_budget is not None:
            chat["thinking_token_budget"] = body.thinking.token_budget
        template = choose_template(service.llm.tokenizer.chat_templates, None, has_tools=bool(body.tools))
        known = [name for name in THINKING_VARIABLES if name in template_variables(template)]
        chat["chat_template_kwargs"] = dict.fromkeys(known, body.thinking.type == "enabled")
    return chat


def _message(message: CohereMessage, where: str) -> dict[str, Any]:
    """A message as a chat has it."""
    parts = message.content
    chat: dict[str, Any] = {"role": message.role}
    if isinstance(parts, list):
        thoughts = [part.thinking or "" for part in parts if part.type == "thinking"]
        others = [(k, part) for k, part in enumerate(parts) if part.type != "thinking"]
        chat["content"] = [_part(part, f"{where}.content[{k}]") for k, part in others]
        if thoughts:
            chat["reasoning_content"] = "".join(thoughts)
    elif parts is not None:
        chat["content"] = parts
    if message.tool_calls is not None:
        chat["tool_calls"] = message.tool_calls
        chat.setdefault("content", message.tool_plan)
    if message.tool_call_id is not None:
        chat["tool_call_id"] = message.tool_call_id
    return chat


def _part(part: CoherePart, where: str) -> dict[str, Any]:
    value = getattr(part, part.type)
    if value is None:
        raise wrong(f"{where}.{part.type}", f"it is missing, for a part of type {part.type!r}")
    if part.type == "text":
        return {"type": "text", "text": value}
    if part.type == "image_url":
        return {"type": "image_url", "image_url": {"url": value.url}}
    return {"type": "text", "text": json.dumps(_fields(value), ensure_ascii=False)}


def _fields(document: Any) -> dict[str, Any]:
    data = {"text": document.data} if isinstance(document.data, str) else document.data
    return data if document.id is None else {"id": document.id, **data}


class _PendingCohereChat(PendingChat):
    names = RENAMED

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        self._has_begun = False
        self._texts: list[CohereText] = []
        self._calls: list[CohereCall] = []
        #: Of what is written now: pieces of its text.
        self._pieces: list[str] = []
        #: The events that end what is written now; none: nothing is.
        self._open: Event | None = None
        self._finish: CohereFinish = "COMPLETE"

    def grow(self, choice: ChoiceEvents) -> list[Event]:
        events: list[Event] = []
        if not self._has_begun:
            self._has_begun = True
            message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
            events.append({"type": "message-start", "id": self._id, "delta": {"message": message}})
        for event in choice.events:
            if isinstance(event, ContentDelta | ReasoningDelta):
                events += self._text("text" if isinstance(event, ContentDelta) else "thinking", event.text)
            elif isinstance(event, ToolCallStart):
                events += self._call(event)
            else:
                self._pieces.append(event.text)
                delta = {"message": {"tool_calls": {"function": {"arguments": event.text}}}}
                events.append({"type": "tool-call-delta", "index": len(self._calls) - 1, "delta": delta})
        if choice.finish_reason is not None:
            events += self._close()
            self._finish = self._reason(choice)
            end = {"finish_reason": self._finish, "usage": self._usage().model_dump()}
            events.append({"type": "message-end", "id": self._id, "delta": end})
        return events

    def encode(self) -> bytes:
        message = CohereAnswer(role="assistant")
        if self._texts:
            message.content = self._texts
        if self._calls:
            message.tool_calls = self._calls
        return CohereChat(id=self._id, finish_reason=self._finish, message=message, usage=self._usage()).encode()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async for part in super().stream():
            yield part
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        return encode_event(
            {"type": "message-end", "id": self._id, "delta": {"finish_reason": "ERROR", "error": error.message}}
        )

    @property
    def _id(self) -> str:
        return self.chat.generation.response_id

    def _text(self, kind: str, text: str) -> list[Event]:
        """More of a text or of thinking: the type is the name of the field that holds it."""
        events = []
        if self._open is None or self._open["type"] != "content-end" or self._texts[-1].type != kind:
            events += self._close()
            index = len(self._texts)
            self._texts.append(CohereText.model_validate({"type": kind, kind: ""}))
            delta = {"message": {"content": {"type": kind, kind: ""}}}
            events.append({"type": "content-start", "index": index, "delta": delta})
            self._open = {"type": "content-end", "index": index}
        self._pieces.append(text)
        delta = {"message": {"content": {kind: text}}}
        events.append({"type": "content-delta", "index": len(self._texts) - 1, "delta": delta})
        return events

    def _call(self, start: ToolCallStart) -> list[Event]:
        events = self._close()
        function = CohereFunction(name=start.name, arguments="")
        self._calls.append(CohereCall(id=start.id, type="function", function=function))
        index = len(self._calls) - 1
        delta = {"message": {"tool_calls": self._calls[-1].model_dump()}}
        self._open = {"type": "tool-call-end", "index": index}
        return [*events, {"type": "tool-call-start", "index": index, "delta": delta}]

    def _close(self) -> list[Event]:
        """Ends what is written now."""
        if self._open is None:
            return []
        event, self._open = self._open, None
        text, self._pieces = "".join(self._pieces), []
        if event["type"] == "tool-call-end":
            self._calls[-1].function.arguments = text
        else:
            setattr(self._texts[-1], self._texts[-1].type, text)
        return [event]

    def _usage(self) -> CohereUsage:
        usage = self.chat.generation.usage()
        tokens = CohereTokens(input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens)
        return CohereUsage(billed_units=tokens, tokens=tokens, cached_tokens=usage.prompt_tokens_details.cached_tokens)

    def _reason(self, choice: ChoiceEvents) -> CohereFinish:
        if choice.finish_reason == "length":
            return "MAX_TOKENS"
        if self._calls:
            return "TOOL_CALL"
        return "STOP_SEQUENCE" if isinstance(choice.stop_reason, str) else "COMPLETE"
