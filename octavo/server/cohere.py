"""Cohere's chats (``/v2/chat``) and embeddings (``/v2/embed``); its rerank route is in ``pooling``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import Pooled
from octavo.core.sampling_params import StructuredOutputsParams
from octavo.server.answer_format import AnswerFormat
from octavo.server.chat import Chat, ChoiceEvents, prepare_chat
from octavo.server.chat_call import ChatCall, generation_fields, read_tools
from octavo.server.engine_call import EngineCall
from octavo.server.fields import Int, Name, Phrase, PositiveInt, RequestModel, ResponseModel, Seed
from octavo.server.http.bodies import run_in_thread_if_large
from octavo.server.http.errors import ApiError, invalid_at
from octavo.server.http.streaming import DONE, Event, PendingChat, encode_event
from octavo.server.openai.protocol import FunctionCall, Tool, ToolCall
from octavo.server.pooling import Inputs, PooledFields, encode_object, numbers, pool_inputs, prompt_name
from octavo.server.state import ServerState, state_of
from octavo.server.tool_parsers.tool_parser import ContentDelta, ReasoningDelta, ToolCallStart

# /v2/chat

#: Names of fields of the call on this route, for errors.
_NAMES = {"prompt": "messages", "stop": "stop_sequences", "top_k": "k", "top_p": "p"}


async def chat(request: Request, body: CohereChatRequest) -> Response:
    """Answers a conversation, as one message or as a stream of events."""
    service = state_of(request)
    deadline = service.deadline()
    call = await run_in_thread_if_large(request, chat_call, service, body)
    pending = _PendingCohereChat(await prepare_chat(service, request, call, prefix="chat"))
    return await pending.respond(request, body.stream, deadline)


def chat_call(service: ServerState, body: CohereChatRequest) -> ChatCall:
    choice: Any = None if body.tool_choice is None else body.tool_choice.lower()
    thinking = body.thinking
    documents = [{"text": d} if isinstance(d, str) else _document_fields(d) for d in body.documents or ()]
    answer_format = None
    if body.response_format is not None and body.response_format.type == "json_object":
        field, schema = "json_schema", body.response_format.json_schema
        if schema is None:
            field, schema = "schema", body.response_format.schema_
        params = StructuredOutputsParams(json_object=True)
        if schema is not None:
            params = StructuredOutputsParams(json=schema, disable_additional_properties=True, strict=True)
        answer_format = AnswerFormat(f"response_format.{field}", params)
    return ChatCall(
        messages=[_chat_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)],
        tools=read_tools(body.tools, choice, None, service.leave_out_tool, strict=bool(body.strict_tools)),
        documents=documents or None,
        thinks=None if thinking is None else thinking.type == "enabled",
        fields=generation_fields(
            body,
            stop=body.stop_sequences,
            top_k=body.k,
            top_p=body.p,
            thinking_token_budget=None if thinking is None else thinking.token_budget,
        ),
        answer_format=answer_format,
        max_tokens=body.max_tokens,
        names=_NAMES,
    )


def _chat_message(message: CohereMessage, path: str) -> dict[str, Any]:
    parts = message.content
    chat: dict[str, Any] = {"role": message.role}
    if isinstance(parts, list):
        thoughts = [part.thinking or "" for part in parts if part.type == "thinking"]
        others = [(k, part) for k, part in enumerate(parts) if part.type != "thinking"]
        chat["content"] = [_chat_part(part, f"{path}.content[{k}]") for k, part in others]
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


def _chat_part(part: CoherePart, path: str) -> dict[str, Any]:
    value = getattr(part, part.type)
    if value is None:
        raise invalid_at(f"{path}.{part.type}", f"it is missing, for a part of type {part.type!r}")
    if part.type == "text":
        return {"type": "text", "text": value}
    if part.type == "image_url":
        return {"type": "image_url", "image_url": {"url": value.url}}
    return {"type": "text", "text": json.dumps(_document_fields(value), ensure_ascii=False)}


def _document_fields(document: CohereDocument) -> dict[str, Any]:
    data = {"text": document.data} if isinstance(document.data, str) else document.data
    return data if document.id is None else {"id": document.id, **data}


class _PendingCohereChat(PendingChat):
    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        self._id = chat.generation.response_id
        self._has_begun = False
        self._texts: list[CohereText] = []
        self._calls: list[ToolCall] = []
        #: The text of the open content, or the arguments of the open call, in pieces.
        self._pieces: list[str] = []
        #: The event that ends the open content or call; None: none is open.
        self._end_event: Event | None = None
        self._finish_reason: CohereFinish = "COMPLETE"

    def grow(self, choice: ChoiceEvents) -> list[Event]:
        events: list[Event] = []
        if not self._has_begun:
            self._has_begun = True
            message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
            events.append({"type": "message-start", "id": self._id, "delta": {"message": message}})
        for event in choice.events:
            if isinstance(event, ContentDelta | ReasoningDelta):
                events += self._add_text("text" if isinstance(event, ContentDelta) else "thinking", event.text)
            elif isinstance(event, ToolCallStart):
                events += self._open_call(event)
            else:
                self._pieces.append(event.text)
                delta = {"message": {"tool_calls": {"function": {"arguments": event.text}}}}
                events.append({"type": "tool-call-delta", "index": len(self._calls) - 1, "delta": delta})
        if choice.finish_reason is not None:
            events += self._close()
            if choice.finish_reason == "length":
                self._finish_reason = "MAX_TOKENS"
            elif self._calls:
                self._finish_reason = "TOOL_CALL"
            elif isinstance(choice.completion.stop_reason, str):
                self._finish_reason = "STOP_SEQUENCE"
            end = {"finish_reason": self._finish_reason, "usage": self._usage().model_dump()}
            events.append({"type": "message-end", "id": self._id, "delta": end})
        return events

    def encode(self) -> bytes:
        message = CohereAnswer(role="assistant")
        if self._texts:
            message.content = self._texts
        if self._calls:
            message.tool_calls = self._calls
        return CohereChat(id=self._id, finish_reason=self._finish_reason, message=message, usage=self._usage()).encode()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async for part in super().stream():
            yield part
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        return encode_event(
            {"type": "message-end", "id": self._id, "delta": {"finish_reason": "ERROR", "error": error.message}}
        )

    def _add_text(self, kind: str, text: str) -> list[Event]:
        """``kind`` is the type of the content, and the name of the field that holds the text."""
        events = []
        is_open = self._end_event is not None and self._end_event["type"] == "content-end"
        if not is_open or self._texts[-1].type != kind:
            events += self._close()
            index = len(self._texts)
            self._texts.append(CohereText.model_validate({"type": kind, kind: ""}))
            delta = {"message": {"content": {"type": kind, kind: ""}}}
            events.append({"type": "content-start", "index": index, "delta": delta})
            self._end_event = {"type": "content-end", "index": index}
        self._pieces.append(text)
        delta = {"message": {"content": {kind: text}}}
        events.append({"type": "content-delta", "index": len(self._texts) - 1, "delta": delta})
        return events

    def _open_call(self, start: ToolCallStart) -> list[Event]:
        events, index = self._close(), len(self._calls)
        call = ToolCall(id=start.id, type="function", function=FunctionCall(name=start.name, arguments=""))
        self._calls.append(call)
        self._end_event = {"type": "tool-call-end", "index": index}
        delta = {"message": {"tool_calls": call.model_dump()}}
        return [*events, {"type": "tool-call-start", "index": index, "delta": delta}]

    def _close(self) -> list[Event]:
        if self._end_event is None:
            return []
        event, self._end_event = self._end_event, None
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


# /v2/embed


async def embed(request: Request, body: CohereEmbedRequest) -> Response:
    """Embeds texts; the vectors come in each requested type."""
    service = state_of(request)
    field, texts = _read_texts(body)
    if body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = body.max_tokens or (None if body.truncate == "NONE" else -1)
    input_type = body.input_type
    # Few models have a prompt for these two: without one, the texts are embedded as they are.
    if input_type in ("classification", "clustering") and input_type not in service.llm.model_config.pooler.prompts:
        input_type = None
    kinds = dict.fromkeys(body.embedding_types or ("float",))

    def write(call: EngineCall[Pooled], vectors: Sequence[np.ndarray]) -> bytes:
        fields: dict[str, Any] = {"id": call.response_id, "response_type": "embeddings_by_type"}
        fields["embeddings"] = {kind: [_encode_vector(vector, kind) for vector in vectors] for kind in kinds}
        fields["texts"] = texts
        fields["meta"] = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": call.prompt_tokens}}
        return encode_object(fields)

    inputs = Inputs(texts, field, prompt_name(service, input_type))
    return await pool_inputs(request, body, "embed", inputs, write, body.output_dimension)


def _read_texts(body: CohereEmbedRequest) -> tuple[str, list[str]]:
    """The name of the field that is set, and its texts."""
    if (body.texts is None) == (body.inputs is None):
        problem = "one of them is required" if body.texts is None else "only one of them is allowed"
        raise invalid_at("texts", f"of texts and inputs {problem}")
    if body.texts is not None:
        return "texts", body.texts
    texts = []
    for i, each in enumerate(body.inputs or ()):
        for k, part in enumerate(each.content):
            if part.type != "text" or part.text is None:
                raise invalid_at(f"inputs[{i}].content[{k}]", "only text can be embedded")
        texts.append("".join(part.text or "" for part in each.content))
    return "inputs", texts


def _encode_vector(vector: np.ndarray, kind: str) -> Any:
    if kind in ("float", "base64"):
        return numbers(vector, kind)
    bits = np.packbits(vector > 0)
    return (bits if kind == "ubinary" else (bits.astype(np.int16) - 128)).tolist()


# Request and response of ``/v2/chat``.


class CohereImage(RequestModel):
    url: str = Field(description="An address, or the image itself as data: URL.")


class CohereDocument(RequestModel):
    id: str | None = Field(None, description="Its name, for the model.")
    data: str | dict[str, Any] = Field(description="Its text, or its fields.")


class CoherePart(RequestModel):
    type: Literal["text", "image_url", "thinking", "document"]
    text: str | None = Field(None, description="With text.")
    thinking: str | None = Field(None, description="The reasoning of an earlier answer.")
    image_url: CohereImage | None = Field(None, description="With image_url.")
    document: CohereDocument | None = Field(None, description="With document: part of a tool's result.")


class CohereMessage(RequestModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[CoherePart] | None = Field(None, description="A text, or parts.")
    tool_calls: list[dict[str, Any]] | None = Field(None, description="Calls that the assistant made.")
    tool_plan: str | None = Field(None, description="What the assistant wrote before its calls.")
    tool_call_id: str | None = Field(None, description="In a tool's message: the id of its call.")


class CohereFormat(RequestModel):
    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = Field(None, description="The schema of the object (default: any).")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Another name of json_schema.")


class CohereThinking(RequestModel):
    type: Literal["enabled", "disabled"]
    token_budget: Int | None = Field(None, description="Maximum thinking tokens.")


class CohereChatRequest(RequestModel):
    model: Name | None = Field(None, description="Name of the served model or of an adapter; default: the model.")
    messages: Annotated[list[CohereMessage], Field(fail_fast=True)] = Field(description="The conversation.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["REQUIRED", "NONE"] | None = Field(None, description="Default: the model decides.")
    strict_tools: bool | None = Field(None, description="Constrain the arguments of calls to the schemas.")
    documents: list[str | CohereDocument] | None = Field(None, description="Documents, for templates that know them.")
    response_format: CohereFormat | None = Field(None, description="The format of the answer.")
    max_tokens: Int | None = Field(None, description="Maximum tokens to generate.")
    stop_sequences: list[Phrase] | None = Field(None, description="Texts that end the answer, not part of it.")
    temperature: float | None = Field(None, description="0: greedy.")
    seed: Seed | None = Field(None, description="Makes sampling reproducible.")
    frequency_penalty: float | None = Field(None, description="Subtracted for each time a token was generated.")
    presence_penalty: float | None = Field(None, description="Subtracted once from logits of generated tokens.")
    k: Int | None = Field(None, description="Sample from this many most likely tokens; 0: from all.")
    p: float | None = Field(None, description="Sample from the smallest set of tokens that reaches this probability.")
    thinking: CohereThinking | None = Field(None, description="Thinking on or off.")
    priority: Int | None = Field(None, description="Lower runs first; 0 if the scheduling policy has none.")


class CohereText(ResponseModel):
    type: Literal["text", "thinking"]
    text: str | None = None
    thinking: str | None = None


class CohereAnswer(ResponseModel):
    role: Literal["assistant"]
    content: list[CohereText] | None = None
    tool_calls: list[ToolCall] | None = None


class CohereTokens(ResponseModel):
    input_tokens: int
    output_tokens: int


class CohereUsage(ResponseModel):
    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int = Field(description="Prefix cache hits of the prompt, in tokens.")


CohereFinish = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL"]


class CohereChat(ResponseModel):
    id: str
    finish_reason: CohereFinish
    message: CohereAnswer
    usage: CohereUsage


# Request and response of ``/v2/embed``.


class CohereInput(RequestModel):
    content: list[CoherePart] = Field(description="The parts of a text.")


class CohereEmbedRequest(PooledFields):
    texts: Annotated[list[str], Field(fail_fast=True)] | None = Field(None, description="Texts.")
    inputs: Annotated[list[CohereInput], Field(fail_fast=True)] | None = Field(None, description="In place of texts.")
    input_type: Name | None = Field(
        None,
        description="search_query, search_document, classification or clustering: the model's prompt.",
    )
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = Field(
        None, description="float (default), base64 of float32; or bits (1: positive) in signed or unsigned bytes."
    )
    output_dimension: Int | None = Field(None, description="Dimensions of the vectors, for Matryoshka models.")
    truncate: Literal["NONE", "END"] | None = Field(None, description="Cut (END, default) or refuse (NONE) long texts.")
    max_tokens: PositiveInt | None = Field(None, description="Maximum tokens of a text.")


#: Within the class below ``float`` is a field.
Numbers = list[float]


class CohereVectors(ResponseModel):
    """Vectors by the type in which they are sent, in the order of the texts."""

    float: list[Numbers] | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereEmbeddings(ResponseModel):
    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: CohereVectors
    texts: list[str]
    meta: dict[str, Any] = Field(description="The version of Cohere's API, and the billed tokens.")
