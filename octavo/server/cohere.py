"""Cohere's API: chats and vectors; ranking is with the other routes for scores."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import Pooled
from octavo.engine.chat_messages import template_variables
from octavo.engine.chat_template import choose_template
from octavo.server.chat import Chat, ChoiceEvents, prepare_chat
from octavo.server.fields import Int, Name, Phrase, RequestModel, ResponseModel, Seed, hint, refused
from octavo.server.http.bodies import read_model, run_in_thread_if_large
from octavo.server.http.errors import ApiError, invalid, renamed_errors, wrong
from octavo.server.http.streaming import DONE, Event, PendingChat, encode_event
from octavo.server.openai.protocol import ChatCompletionRequest, Tool
from octavo.server.pooling import (
    EmbeddingRequest,
    PooledFields,
    PooledRun,
    encode_object,
    numbers,
    pooling_params,
    prompt_name,
    read_texts,
    results,
)
from octavo.server.prompt_inputs import THINKING_VARIABLES
from octavo.server.state import ServerState, state_of
from octavo.server.tool_parsers.tool_parser import ContentDelta, ReasoningDelta, ToolCallStart

# Bodies and responses of ``/v2/chat`` and ``/v2/embed``.

# Chats --------------------------------------------------------------------------------------------------------------


class CohereImage(RequestModel):
    """Where an image is."""

    url: str = Field(description="An address, or the image itself as data: URL.")
    detail: Any = hint("an image is read as the model's files say")


class CohereDocument(RequestModel):
    """A document, of a request or of a tool's result."""

    id: str | None = Field(None, description="Its name, for the model.")
    data: str | dict[str, Any] = Field(description="Its text, or its fields.")


class CoherePart(RequestModel):
    """A part of a message's content: what its type says."""

    type: Literal["text", "image_url", "thinking", "document"]
    text: str | None = Field(None, description="Of a text.")
    thinking: str | None = Field(None, description="What the model thought in an earlier answer.")
    image_url: CohereImage | None = Field(None, description="Of an image.")
    document: CohereDocument | None = Field(None, description="Of a tool's result.")


class CohereMessage(RequestModel):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[CoherePart] | None = Field(None, description="A text, or parts.")
    tool_calls: list[dict[str, Any]] | None = Field(None, description="Calls that the assistant made.")
    tool_plan: str | None = Field(None, description="What the assistant wrote before its calls.")
    tool_call_id: str | None = Field(None, description="The call that a tool's result is of.")
    citations: Any = hint("the model is not told of them")


class CohereFormat(RequestModel):
    """The form of the answer."""

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = Field(None, description="The schema of the object (default: any).")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Another name of json_schema.")


class CohereThinking(RequestModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled"]
    token_budget: Int | None = Field(None, description="Most tokens of thinking, which is closed then.")


class CohereChatRequest(RequestModel):
    """Body of ``/v2/chat``."""

    model: Name | None = Field(None, description="Name of the served model or of an adapter; default: the model.")
    messages: Annotated[list[CohereMessage], Field(fail_fast=True)] = Field(description="The conversation.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["REQUIRED", "NONE"] | None = Field(
        None, description="REQUIRED: it must call one; NONE: it calls none (default: as it likes)."
    )
    strict_tools: bool | None = Field(None, description="Arguments of calls have the schemas of the functions.")
    documents: list[str | CohereDocument] | None = Field(None, description="Documents, for templates that know them.")
    response_format: CohereFormat | None = Field(None, description="The form of the answer.")
    max_tokens: Int | None = Field(None, description="Most tokens to generate.")
    stop_sequences: list[Phrase] | None = Field(None, description="Texts that end the answer; not part of it.")
    temperature: float | None = Field(None, description="0 always takes the most likely token.")
    seed: Seed | None = Field(None, description="Fixes the random numbers.")
    frequency_penalty: float | None = Field(None, description="Subtracted for each time a token was generated.")
    presence_penalty: float | None = Field(None, description="Subtracted once from logits of generated tokens.")
    k: Int | None = Field(None, description="Keep this many of the most likely tokens; 0 is off.")
    p: float | None = Field(None, description="Keep the smallest set of tokens that reaches this probability.")
    thinking: CohereThinking | None = Field(None, description="Whether the model thinks before it answers.")
    priority: Int | None = Field(
        None, description="Lower goes first; only 0 under a scheduling policy that does not look at it."
    )
    logprobs: Any = refused("/v1/chat/completions sends logprobs", False)
    citation_options: Any = refused("citations are not made", {"mode": "OFF"}, {"mode": "off"})
    safety_mode: Any = refused("nothing is put before the conversation", "OFF", "NONE")
    raw_prompting: Any = refused("/v1/completions takes plain prompts", False)


class CohereText(ResponseModel):
    """A text that the model wrote, or what it thought."""

    type: Literal["text", "thinking"]
    text: str | None = None
    thinking: str | None = None


class CohereFunction(ResponseModel):
    """The function that a call names, and its arguments as JSON text."""

    name: str
    arguments: str


class CohereCall(ResponseModel):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: CohereFunction


class CohereAnswer(ResponseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: list[CohereText] | None = None
    tool_calls: list[CohereCall] | None = None


class CohereTokens(ResponseModel):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    output_tokens: int


class CohereUsage(ResponseModel):
    """Tokens used by a chat."""

    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int = Field(description="Tokens of the prompt that were found in the prefix cache.")


CohereFinish = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL"]


class CohereChat(ResponseModel):
    """A response of ``/v2/chat``."""

    id: str
    finish_reason: CohereFinish
    message: CohereAnswer
    usage: CohereUsage


# Vectors ------------------------------------------------------------------------------------------------------------


class CohereInput(RequestModel):
    """An input in parts."""

    content: list[CoherePart] = Field(description="Parts of a text.")


class CohereEmbedRequest(PooledFields):
    """Body of ``/v2/embed``."""

    texts: Annotated[list[str], Field(fail_fast=True)] | None = Field(None, description="Texts.")
    inputs: Annotated[list[CohereInput], Field(fail_fast=True)] | None = Field(
        None, description="In place of texts: each in parts."
    )
    input_type: Name | None = Field(
        None,
        description="search_query, search_document, classification or clustering: the model's prompt of such a name, "
        "if it has one, is put before each text.",
    )
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = Field(
        None,
        description="How vectors are sent: as numbers (default), as base64 of float32, or a bit for each number that "
        "is above 0, in bytes with sign (binary) or without.",
    )
    output_dimension: Int | None = Field(
        None, description="Numbers of a vector, of models that were trained for fewer than all (Matryoshka)."
    )
    truncate: Literal["NONE", "END"] | None = Field(
        None, description="END (default): cut longer texts to as many tokens as the model takes; NONE: refuse them."
    )
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Cut texts to so many tokens."
    )
    images: Any = refused("images are not read for vectors and scores", [])


#: Within the class below ``float`` is a field.
Numbers = list[float]


class CohereVectors(ResponseModel):
    """Vectors by the type in which they are sent, in the order of the texts."""

    float: list[Numbers] | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereEmbeddings(ResponseModel):
    """A response of ``/v2/embed``."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: CohereVectors
    texts: list[str]
    meta: dict[str, Any] = Field(description="Version of Cohere's API, and the tokens in its words.")


# The route ``/v2/chat``.

#: Fields of a chat by their names here; errors about a chat are told under these.
RENAMED = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "top_k": "k", "top_p": "p"}
#: Fields that are the same in a chat, and those of another name.
_SAME = ("model", "stream", "max_tokens", "temperature", "seed", "frequency_penalty", "presence_penalty", "priority")
_OTHER_NAMES = {"stop_sequences": "stop", "k": "top_k", "p": "top_p"}


async def chat(request: Request, body: CohereChatRequest) -> Response:
    """Answers a conversation, as one message or as a stream of events."""
    service = state_of(request)
    deadline = service.deadline()
    with renamed_errors(RENAMED):
        inner = await run_in_thread_if_large(request, _read, service, body)
        pending = _PendingCohereChat(await prepare_chat(service, request, inner, prefix="chat"))
    return await pending.respond(request, body.stream, deadline)


def _read(service: ServerState, body: CohereChatRequest) -> ChatCompletionRequest:
    return read_model(ChatCompletionRequest, chat_body(service, body), service)


def chat_body(service: ServerState, body: CohereChatRequest) -> dict[str, Any]:
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


# The route ``/v2/embed``.

#: Kinds of inputs that models have prompts for or have not.
_OTHER_TYPES = ("classification", "clustering")


async def embed(request: Request, body: CohereEmbedRequest) -> Response:
    """The vectors of texts, in as many types as are asked for."""
    service = state_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    field, texts = _texts(body)
    if body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = body.max_tokens or (None if body.truncate == "NONE" else -1)
    given = EmbeddingRequest(
        input=texts, input_type=_input_type(service, body), truncate_prompt_tokens=body.truncate_prompt_tokens
    )
    inputs = await read_texts(service, request, given, prompt_name(service, given), named=True, field=field)
    run = PooledRun(request, body, model, pooling_params(body, "embed", body.output_dimension), inputs, "embd")
    kinds = dict.fromkeys(body.embedding_types or ("float",))

    def answer(outputs: list[Pooled]) -> bytes:
        vectors = results(outputs)
        tokens = run.usage()["prompt_tokens"]
        return encode_object(
            {
                "id": run.response_id,
                "response_type": "embeddings_by_type",
                "embeddings": {kind: [_sent(vector, kind) for vector in vectors] for kind in kinds},
                "texts": texts,
                "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}},
            }
        )

    return await run.respond(answer, deadline)


def _texts(body: CohereEmbedRequest) -> tuple[str, list[str]]:
    """The name of the field that is given, and its texts.

    Raises:
        ApiError: none or both are given, or a part is no text.
    """
    if (body.texts is None) == (body.inputs is None):
        raise invalid("texts", "texts or inputs: " + ("it is missing" if body.texts is None else "one of them"))
    if body.texts is not None:
        return "texts", body.texts
    texts = []
    for i, each in enumerate(body.inputs or ()):
        for k, part in enumerate(each.content):
            if part.type != "text" or part.text is None:
                raise wrong(f"inputs[{i}].content[{k}]", "the model makes vectors of text alone")
        texts.append("".join(part.text or "" for part in each.content))
    return "inputs", texts


def _input_type(service: ServerState, body: CohereEmbedRequest) -> str | None:
    """What ``prompt_name`` knows; a kind that few models have a prompt for may have none."""
    kind = body.input_type
    return None if kind in _OTHER_TYPES and kind not in service.llm.model_config.pooler.prompts else kind


def _sent(vector: np.ndarray, kind: str) -> Any:
    if kind in ("float", "base64"):
        return numbers(vector, kind)
    packed = np.packbits(vector > 0)
    return (packed if kind == "ubinary" else (packed.astype(np.int16) - 128)).tolist()
