"""Ollama's routes (``/api/...``): a request becomes the same calls as on the other routes. Read ``chat`` first.

Answers are JSON lines, or one object. A stream that fails ends with the line ``{"error": ...}``.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.core.outputs import CompletionOutput, Pooled, RequestOutput
from octavo.core.request import TokensPrompt
from octavo.core.sampling_params import StructuredOutputsParams
from octavo.engine.tokenizer import no_fill_in_middle
from octavo.server.answer_format import AnswerFormat
from octavo.server.chat import Chat, begin_chat, make_chat_prompt
from octavo.server.chat_call import ChatCall, Function, RequestTools
from octavo.server.engine_call import EngineCall
from octavo.server.generation import Generation, LogprobsTracker, make_chat_logprobs, make_generation
from octavo.server.http.bodies import read_model, run_in_thread_if_large
from octavo.server.http.errors import ApiError, invalid_at, ollama_error, renamed_errors, unsupported
from octavo.server.http.streaming import EventStream, PendingResponse, encode_in_slices, with_cancellation
from octavo.server.ollama.directory import (
    Description,
    ListedEntry,
    OpenModel,
    capabilities_of,
    directory_of,
)
from octavo.server.ollama.protocol import (
    API_VERSION,
    DEFAULTS,
    NAMES,
    Answer,
    AnsweredCall,
    AnsweredFunction,
    AnsweredMessage,
    AnswerFields,
    ChatAnswer,
    ChatRequest,
    CopyRequest,
    Embeddings,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateAnswer,
    GenerateRequest,
    ListedModel,
    Logprob,
    ModelDetails,
    ModelList,
    ModelRequest,
    OllamaMessage,
    OllamaVersion,
    OneEmbedding,
    Progress,
    PullRequest,
    RunningList,
    RunningModel,
    ShownModel,
    ShowRequest,
    TokenLogprob,
    read_duration,
    read_options,
)
from octavo.server.openai.protocol import CompletionRequest, GenerationRequest
from octavo.server.pooling import Inputs, PooledFields, pool_inputs
from octavo.server.prompt_inputs import read_prompts
from octavo.server.state import ServerState, deadline_of
from octavo.server.tool_parsers.tool_parser import ContentDelta, ReasoningDelta, ToolCallStart

if TYPE_CHECKING:
    import numpy as np

    from octavo.server.chat import ChoiceEvents

# Chats and texts.


async def chat(request: Request, body: ChatRequest) -> Response:
    """Answers a conversation, as JSON lines or as one object."""
    begun, deadline = time.monotonic(), deadline_of(request)
    if not body.messages:
        empty = ChatAnswer(**_head(body, done=True), message=AnsweredMessage(role="assistant", content=""))
        return await _load_or_unload(request, body, empty)
    model = await _open(request, body)
    model.service.require("generate")
    call = await run_in_thread_if_large(request, _chat_call, model, body)
    with renamed_errors(call.names):
        prompt = await make_chat_prompt(model.service, request, call)
        served = await model.service.model(model.name)
        begun_chat = await begin_chat(model.service, request, call, served, prompt, prefix="ollama")
    pending = _PendingChat(body, model, begun, begun_chat.generation, begun_chat)
    return await pending.respond(request, body.stream is not False, deadline)


async def generate(request: Request, body: GenerateRequest) -> Response:
    """Answers a prompt, as JSON lines or as one object."""
    begun, deadline = time.monotonic(), deadline_of(request)
    if not body.prompt and not body.images and not body.suffix:
        return await _load_or_unload(request, body, GenerateAnswer(**_head(body, done=True), response=""))
    model = await _open(request, body)
    model.service.require("generate")
    if body.template:
        model.service.note_unknown("template")
    if body.raw or body.suffix:
        generation = await _text_generation(request, body, model)
        pending: _PendingAnswer = _PendingText(body, model, begun, generation)
        return await pending.respond(request, body.stream is not False, deadline)
    call = await run_in_thread_if_large(request, _generate_call, model, body)
    service = model.service
    with renamed_errors({**call.names, "messages": "prompt"}):
        prompt = await make_chat_prompt(service, request, call)
        if body.context:
            prompt = replace(prompt, tokens=_continued(service, body.context, prompt.tokens))
        served = await service.model(model.name)
        begun_chat = await begin_chat(service, request, call, served, prompt, prefix="ollama")
    pending = _PendingGenerate(body, model, begun, begun_chat.generation, begun_chat)
    return await pending.respond(request, body.stream is not False, deadline)


async def _open(request: Request, body: AnswerFields | EmbedRequest | EmbeddingsRequest) -> OpenModel:
    model = await directory_of(request).open(body.model, read_duration(body.keep_alive))
    return replace(model, load_duration=_nanoseconds(request.scope["state"].get("load_seconds", 0.0)))


def _head(body: AnswerFields, *, done: bool) -> dict[str, Any]:
    """The fields with which every line begins."""
    return {"model": body.model, "created_at": _timestamp(time.time()), "done": done}


async def _load_or_unload(request: Request, body: AnswerFields, answer: Answer) -> Response:
    """The answer to a request without a prompt, as one object whether it streams or not."""
    unloads = read_duration(body.keep_alive) == 0 and await directory_of(request).unload(body.model)
    if not unloads:
        await _open(request, body)
    answer.done_reason = "unload" if unloads else "load"
    if body.stream is False:
        return Response(answer.encode(), media_type="application/json")
    return Response(answer.encode() + b"\n", media_type="application/x-ndjson")


def _fields(model: OpenModel, body: AnswerFields) -> GenerationRequest:
    """The sampling parameters: the request's options, else the model's defaults, else Ollama's."""
    service = model.service
    options, ignored = read_options(body.options)
    for name in ignored:
        service.note_unknown(name)
    own = service.llm.inputs.default_sampling
    if not own:  # a model's own defaults belong together
        options = {**DEFAULTS, **options}
    if model.stop and "stop" not in options:
        options["stop"] = list(model.stop)
    try:
        return read_model(
            GenerationRequest, {**options, "model": model.name, "stream": body.stream is not False}, service
        )
    except ApiError as e:
        if e.param in NAMES:
            raise ApiError(
                e.status, e.message.replace(e.param, NAMES[e.param], 1), param="options", code=e.code
            ) from None
        raise


def _answer_format(body: AnswerFields) -> AnswerFormat | None:
    if body.format is None or body.format == "":
        return None
    if isinstance(body.format, dict):
        return AnswerFormat("format", StructuredOutputsParams(json=body.format))
    if body.format == "json":
        return AnswerFormat("format", StructuredOutputsParams(json_object=True))
    raise invalid_at("format", 'must be "json" or a JSON schema', got=body.format)


def _call_fields(model: OpenModel, body: AnswerFields) -> dict[str, Any]:
    """The fields of a ``ChatCall`` that both routes have."""
    think, fields = body.think, _fields(model, body)
    if think and "thinking" not in capabilities_of(model.service):
        raise unsupported("think", f"is not supported: {body.model!r} does not support thinking")
    return {
        "fields": fields,
        "thinks": think if isinstance(think, bool) else None,
        "reasoning_effort": think if isinstance(think, str) and think else None,
        "answer_format": _answer_format(body),
        "max_tokens": fields.max_tokens,
        "has_no_token_limit": _limits_tokens(body) and fields.max_tokens is None,
        "top_logprobs": _top_logprobs(body),
        "names": {**NAMES, "prompt": "messages"},
    }


def _limits_tokens(body: AnswerFields) -> bool:
    """Whether the request sets the number of tokens, perhaps to as many as fit."""
    return (body.options or {}).get("num_predict") is not None


def _top_logprobs(body: AnswerFields) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid_at("top_logprobs", "is allowed only with logprobs=true")
    return None


def _chat_call(model: OpenModel, body: ChatRequest) -> ChatCall:
    messages = [
        _with_images(model, _message(message), message.images, i) for i, message in enumerate(body.messages or ())
    ]
    _pair_tools(messages)
    if model.system and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": model.system})
    functions = []
    for i, tool in enumerate(body.tools or ()):
        function = tool.function
        fields = {"description": function.description, "parameters": _plain_schema(function.parameters)}
        functions.append(Function.of(f"tools[{i}].function", function.name, fields))
    return ChatCall(
        messages=messages,
        tools=RequestTools.of(functions),
        # As in Ollama: an assistant's message at the end is continued.
        continues=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
        **_call_fields(model, body),
    )


def _plain_schema(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """A schema without members that are null, which clients send for what they leave out."""
    if schema is None:
        return None

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {name: entry for name, entry in value.items() if entry is not None or name in ("const", "default")}
            return {name: plain(entry) for name, entry in kept.items()}
        return [plain(entry) for entry in value] if isinstance(value, list) else value

    cleaned: dict[str, Any] = plain(schema)
    return cleaned


def _message(message: OllamaMessage) -> dict[str, Any]:
    """A message as chat templates get it; tool calls have JSON text as arguments."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        chat["reasoning_content"] = message.thinking
    if message.tool_calls:
        chat["tool_calls"] = [
            {
                **({"id": call.id} if call.id else {}),
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.dumps(call.function.arguments or {}, ensure_ascii=False),
                },
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        if message.tool_name:
            chat["name"] = message.tool_name
        if message.tool_call_id:
            chat["tool_call_id"] = message.tool_call_id
    return chat


def _pair_tools(messages: list[dict[str, Any]]) -> None:
    """Gives calls without an id one, and results the id of their call: of the first open one of their name."""
    open_calls: list[tuple[str, str]] = []
    for i, message in enumerate(messages):
        for k, call in enumerate(message.get("tool_calls", ())):
            call.setdefault("id", f"call_{i}_{k}")
            open_calls.append((call["id"], call["function"]["name"]))
        if message["role"] != "tool":
            continue
        wanted, name = message.get("tool_call_id"), message.get("name")
        matching = [call for call in open_calls if call[0] == wanted] if wanted else []
        matching = matching or [call for call in open_calls if name in (None, call[1])]
        if matching:
            open_calls.remove(matching[0])
            message.setdefault("tool_call_id", matching[0][0])
            message.setdefault("name", matching[0][1])
        else:
            message.setdefault("tool_call_id", f"call_{i}")


def _with_images(
    model: OpenModel, message: dict[str, Any], images: Sequence[str] | None, number: int
) -> dict[str, Any]:
    if not images:
        return message
    if not model.service.images.are_seen:
        raise unsupported(f"messages[{number}].images", "is not supported: the model reads text, not images")
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": image if image.startswith("data:") else f"data:;base64,{image}"}}
        for image in images
    ]
    return {**message, "content": [*parts, {"type": "text", "text": message["content"]}]}


def _generate_call(model: OpenModel, body: GenerateRequest) -> ChatCall:
    messages: list[dict[str, Any]] = []
    if system := body.system or model.system:  # Go's clients send an empty one for none
        messages.append({"role": "system", "content": system})
    if body.images and body.context:
        raise unsupported("images", "is not supported with context: send the conversation to /api/chat")
    user = {"role": "user", "content": body.prompt or ""}
    messages.append(_with_images(model, user, body.images, len(messages)))
    return ChatCall(messages=messages, **_call_fields(model, body))


def _continued(service: ServerState, context: list[int], tokens: TokensPrompt) -> TokensPrompt:
    """The prompt after the tokens of an earlier answer; a second BOS token is left out."""
    vocab_size = service.llm.model_config.vocab_size
    if wrong := next((token for token in context if not 0 <= token < vocab_size), None):
        raise invalid_at("context", f"token ids are integers from 0 to {vocab_size - 1}", got=wrong)
    ids = tokens["prompt_token_ids"]
    tokenizer = service.llm.tokenizer
    bos = tokenizer.convert_tokens_to_ids(tokenizer.bos_token) if tokenizer.bos_token else None
    return TokensPrompt(prompt_token_ids=[*context, *(ids[1:] if ids and ids[0] == bos else ids)])


async def _text_generation(request: Request, body: GenerateRequest, model: OpenModel) -> Generation:
    """The generation of a prompt that is not put into the chat template, or of a gap."""
    service, fields = model.service, _fields(model, body)
    names = {**NAMES, "prompt": "prompt", "suffix": "suffix"}
    if body.images:
        raise unsupported("images", "is not supported with raw or suffix")
    if body.suffix and service.llm.tokenizer.fill_in_middle is None:
        raise no_fill_in_middle().at("suffix")
    answer_format = _answer_format(body)
    with renamed_errors(names):
        given = {"prompt": body.prompt or "", "suffix": body.suffix or None}
        values = {name: getattr(fields, name) for name in fields.model_fields_set}
        completion = read_model(CompletionRequest, {**values, **given}, service)
        prompts = await read_prompts(service, completion)
        if body.context:
            prompts = [_continued(service, body.context, prompt) for prompt in prompts]
        return make_generation(
            service,
            request,
            completion,
            await service.model(model.name),
            prompts,
            prefix="ollama",
            max_tokens=fields.max_tokens if _limits_tokens(body) else service.default_max_tokens(None),
            logprobs=_top_logprobs(body),
            prompt_logprobs=None,
            answer_format=answer_format,
            names={**names, **({} if answer_format is None else answer_format.names)},
        )


class JsonLines(EventStream):
    """A stream of JSON objects, one a line."""

    media_type = "application/x-ndjson"


@dataclass(slots=True)
class _Piece:
    """An increment of an answer."""

    output: RequestOutput
    completion: CompletionOutput
    text: str = ""
    thinking: str = ""
    calls: list[AnsweredCall] = field(default_factory=list)


class _PendingAnswer(PendingResponse):
    """Formats what the engine generates as ``GenerateAnswer`` or ``ChatAnswer``."""

    def __init__(self, body: AnswerFields, model: OpenModel, begun: float, generation: Generation) -> None:
        """``begun``: the arrival of the request, on the monotonic clock."""
        self.body, self.model, self.begun, self.generation = body, model, begun, generation
        self._tracker: LogprobsTracker | None = None
        self._tokens: list[int] = []

    @abstractmethod
    def pieces(self) -> AsyncGenerator[_Piece, None]:
        """The increments of the only choice; the last one is finished."""

    @abstractmethod
    def format(self, head: dict[str, Any], text: str, thinking: str, calls: list[AnsweredCall]) -> Answer:
        """A line that begins with ``head``, with these parts, which are empty in the last one of a stream."""

    async def respond(self, request: Request, streams: bool | None, deadline: float) -> Response:
        if streams:
            return JsonLines(self.stream(), deadline, self.failure)
        body = await with_cancellation(request.receive, self.complete(), deadline)
        return Response(body, media_type="application/json")

    def failure(self, error: ApiError) -> bytes:
        return ollama_error(error) + b"\n"

    async def complete(self) -> bytes:
        text, thinking, calls, logprobs = "", "", list[AnsweredCall](), list[Logprob]()
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                text, thinking, calls = text + piece.text, thinking + piece.thinking, calls + piece.calls
                logprobs += self._logprobs(piece)
        answer = self._end(piece, text, thinking, calls)
        if self.body.logprobs:
            answer.logprobs = logprobs
        return encode_in_slices(answer)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                lines = b""
                logprobs = self._logprobs(piece)
                if piece.text or piece.thinking or piece.calls or logprobs:
                    answer = self.format(_head(self.body, done=False), piece.text, piece.thinking, piece.calls)
                    if logprobs:
                        answer.logprobs = logprobs
                    lines = answer.encode() + b"\n"
                if piece.completion.finished:
                    lines += self._end(piece).encode() + b"\n"
                if lines:
                    yield lines

    def _end(self, last: _Piece, text: str = "", thinking: str = "", calls: Sequence[AnsweredCall] = ()) -> Answer:
        """The last line: counts, and durations in nanoseconds as the engine's clock measured them."""
        answer = self.format(_head(self.body, done=True), text, thinking, list(calls))
        answer.done_reason = "length" if last.completion.finish_reason == "length" else "stop"
        now, times = time.monotonic(), last.output.metrics
        answer.total_duration = _nanoseconds(now - self.begun)
        answer.load_duration = self.model.load_duration
        answer.prompt_eval_count = self.generation.prompt_tokens
        answer.eval_count = self.generation.completion_tokens
        if times.first_token_time is not None:
            scheduled = times.first_scheduled_time or times.arrival_time
            answer.prompt_eval_duration = _nanoseconds(times.first_token_time - scheduled)
            # Up to now: the last token's text belongs to it, and one token takes time too.
            answer.eval_duration = _nanoseconds(now - times.first_token_time)
        if isinstance(answer, GenerateAnswer) and self._returns_context:
            answer.context = [*self.generation.prompts[0]["prompt_token_ids"], *self._tokens]
        return answer

    @property
    def _returns_context(self) -> bool:
        """As in Ollama, raw prompts and gaps have no context; nor have images, whose tokens say nothing alone."""
        body = self.body
        return isinstance(body, GenerateRequest) and not (body.raw or body.suffix or body.images)

    def _logprobs(self, piece: _Piece) -> list[Logprob]:
        self._tokens += piece.completion.token_ids
        if not self.body.logprobs:
            return []
        if self._tracker is None:
            self._tracker = self.generation.track(LogprobsTracker, piece.output)
        tokens, top = self._tracker.advance(piece.completion), self.body.top_logprobs or 0
        named = make_chat_logprobs(self.generation.token_names, tokens, top).content or ()
        entries = []
        for one in named:
            entry = Logprob(token=one.token, logprob=one.logprob, bytes=one.bytes)
            if top:
                likely = one.top_logprobs
                entry.top_logprobs = [TokenLogprob(token=t.token, logprob=t.logprob, bytes=t.bytes) for t in likely]
            entries.append(entry)
        return entries


class _PendingText(_PendingAnswer):
    """A prompt without the chat template."""

    async def pieces(self) -> AsyncGenerator[_Piece, None]:
        async with aclosing(self.generation.outputs()) as outputs:
            async for _, output in outputs:
                completion = output.outputs[0]
                yield _Piece(output, completion, completion.text)

    def format(self, head: dict[str, Any], text: str, thinking: str, calls: list[AnsweredCall]) -> Answer:
        return GenerateAnswer(**head, response=text)


class _PendingChat(_PendingAnswer):
    """A conversation: its answer has thinking and tool calls. A call is sent when its arguments are complete."""

    def __init__(self, body: AnswerFields, model: OpenModel, begun: float, generation: Generation, chat: Chat) -> None:
        super().__init__(body, model, begun, generation)
        self.chat = chat
        self._call: ToolCallStart | None = None
        self._arguments: list[str] = []

    async def pieces(self) -> AsyncGenerator[_Piece, None]:
        async with aclosing(self.chat.outputs()) as outputs:
            async for [choice] in outputs:
                yield self._piece(choice)

    def _piece(self, choice: ChoiceEvents) -> _Piece:
        piece = _Piece(choice.output, choice.completion)
        for event in choice.events:
            if isinstance(event, ContentDelta):
                piece.text += event.text
            elif isinstance(event, ReasoningDelta):
                piece.thinking += event.text
            elif isinstance(event, ToolCallStart):
                piece.calls += self._end_call()
                self._call = event
            else:
                self._arguments.append(event.text)
        if choice.finish_reason is not None:
            piece.calls += self._end_call()
        return piece

    def _end_call(self) -> list[AnsweredCall]:
        call, text = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        if call is None:
            return []
        try:
            value = from_json(text or "{}", allow_partial="trailing-strings")  # the text may be truncated
        except ValueError:
            value = None
        arguments = value if isinstance(value, dict) else {"arguments": text}
        return [
            AnsweredCall(id=call.id, function=AnsweredFunction(index=call.index, name=call.name, arguments=arguments))
        ]

    def format(self, head: dict[str, Any], text: str, thinking: str, calls: list[AnsweredCall]) -> Answer:
        message = AnsweredMessage(role="assistant", content=text)
        if thinking:
            message.thinking = thinking
        if calls:
            message.tool_calls = calls
        return ChatAnswer(**head, message=message)


class _PendingGenerate(_PendingChat):
    """A prompt that was put into the chat template."""

    def format(self, head: dict[str, Any], text: str, thinking: str, calls: list[AnsweredCall]) -> Answer:
        answer = GenerateAnswer(**head, response=text)
        if thinking:
            answer.thinking = thinking
        return answer


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _timestamp(seconds: float) -> str:
    """RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


# Vectors.


async def embed(request: Request, body: EmbedRequest) -> Response:
    """The vectors of texts, of length 1."""
    begun = time.monotonic()
    model = await _open(request, body)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts or texts == [""]:  # loads the model
        empty = Embeddings(
            model=body.model,
            embeddings=[],
            total_duration=_nanoseconds(time.monotonic() - begun),
            load_duration=model.load_duration,
            prompt_eval_count=0,
        )
        return Response(empty.encode(), media_type="application/json")

    def write(call: EngineCall[Pooled], vectors: Sequence[np.ndarray]) -> bytes:
        answer = Embeddings(
            model=body.model,
            embeddings=[vector.tolist() for vector in vectors],
            total_duration=_nanoseconds(time.monotonic() - begun),
            load_duration=model.load_duration,
            prompt_eval_count=call.prompt_tokens,
        )
        return encode_in_slices(answer)

    model.service.require("embed")
    fields = PooledFields(
        model=model.name, truncate_prompt_tokens=None if body.truncate is False else -1, use_activation=True
    )
    return await pool_inputs(request, fields, "embed", Inputs(texts, "input"), write, body.dimensions)


async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """The vector of one text, as the model makes it."""
    model = await _open(request, body)
    if not body.prompt:
        return Response(OneEmbedding(embedding=[]).encode(), media_type="application/json")

    def write(call: EngineCall[Pooled], vectors: Sequence[np.ndarray]) -> bytes:
        return OneEmbedding(embedding=vectors[0].tolist()).encode()

    model.service.require("embed")
    fields = PooledFields(model=model.name, truncate_prompt_tokens=-1)
    return await pool_inputs(request, fields, "embed", Inputs(body.prompt, "prompt"), write)


# Models.


async def tags(request: Request) -> ModelList:
    """The served model first, then the others on this machine, which this server does not load."""
    return ModelList(models=[_listed(entry) for entry in await directory_of(request).list_models()])


def _listed(entry: ListedEntry) -> ListedModel:
    return ListedModel(
        name=entry.name,
        model=entry.name,
        modified_at=_timestamp(entry.model.modified),
        size=entry.model.size,
        digest=entry.model.digest,
        details=_details(entry),
    )


def _details(entry: ListedEntry) -> ModelDetails:
    facts = entry.facts
    family = "" if facts is None else facts.family
    return ModelDetails(
        parent_model="",
        format="" if facts is None else facts.format,
        family=family,
        families=[family] if family else [],
        parameter_size=readable_count(0 if facts is None else facts.num_parameters),
        quantization_level="" if facts is None else facts.quantization,
    )


def readable_count(number: int) -> str:
    """A number of parameters: 134.5M, 8.0B; empty if it is not known."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number) if number else ""


#: Time at which a model that stays loaded is unloaded.
_NEVER = "9999-12-31T23:59:59Z"


async def ps(request: Request) -> RunningList:
    """The models in memory."""
    return RunningList(
        models=[
            RunningModel(
                name=loaded.entry.name,
                model=loaded.entry.name,
                size=loaded.size,
                digest=loaded.entry.model.digest,
                details=_details(loaded.entry),
                expires_at=_NEVER if loaded.expires is None else _timestamp(loaded.expires),
                size_vram=loaded.size_vram,
                context_length=loaded.context_length,
            )
            for loaded in await directory_of(request).list_loaded()
        ]
    )


async def show(request: Request, body: ShowRequest) -> ShownModel:
    """What is known about a model: its template, defaults, metadata and abilities."""
    description = await directory_of(request).describe(body.named)
    entry, facts = description.entry, description.entry.facts
    info = {} if facts is None else dict(facts.info)
    if facts is not None:
        info.setdefault("general.basename", entry.name.rpartition("/")[2].partition(":")[0])
        if description.context_length is not None:  # clients fit their prompts to it
            info[f"{facts.family}.context_length"] = description.context_length
    return ShownModel(
        license=entry.model.license,
        modelfile=_modelfile(description),
        parameters="\n".join(_parameter_lines(description)),
        template=description.template,
        system=entry.model.system,
        details=_details(entry),
        model_info=info,
        capabilities=description.capabilities,
        modified_at=_timestamp(entry.model.modified),
    )


def _parameter_lines(description: Description) -> list[str]:
    return [
        f"{name:<30} {json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value}"
        for name, value in description.parameters
    ]


def _modelfile(description: Description) -> str:
    """The description in the syntax of Modelfiles; the template is jinja2's, not Go's."""
    model = description.entry.model
    lines = [
        f"FROM {description.entry.name}",
        *(f"PARAMETER {' '.join(line.split(maxsplit=1))}" for line in _parameter_lines(description)),
    ]
    if model.system:
        lines.append(f'SYSTEM """{model.system}"""')
    return "\n".join(lines)


async def pull(request: Request, body: PullRequest) -> Response:
    """Downloads a model of the hub or a built-in one, with the progress as JSON lines."""
    name, directory = body.named, directory_of(request)

    async def lines() -> AsyncGenerator[bytes, None]:
        async with aclosing(directory.pull(name)) as steps:
            async for step in steps:
                progress = Progress(status=step.status)
                if step.name:
                    progress.digest, progress.total, progress.completed = step.name, step.total, step.completed
                yield progress.encode() + b"\n"

    if body.stream is not False:
        # No deadline: large models take as long as they take, and each line shows that it goes on.
        return JsonLines(lines(), None, lambda error: ollama_error(error) + b"\n")

    async def finish() -> bytes:
        last = b""
        async with aclosing(lines()) as parts:
            async for line in parts:
                last = line
        return last.strip()

    answer = await with_cancellation(request.receive, finish(), float("inf"))
    return Response(answer, media_type="application/json")


async def delete(request: Request, body: ModelRequest) -> dict[str, str]:
    """Removes a model from the cache, or an alias."""
    await directory_of(request).delete(body.named)
    return {}


async def copy(request: Request, body: CopyRequest) -> dict[str, str]:
    """Gives the served model a further name, until the server ends."""
    await directory_of(request).copy(body.source, body.destination)
    return {}


async def create(request: Request) -> Response:
    """Refused: models are not made here."""
    raise ApiError(400, "models are not created here: serve a GGUF file or a folder by its path", code="unsupported")


async def upload_blob(request: Request, digest: str) -> Response:
    """Refused: it would be a layer of a model that is created."""
    return await create(request)


async def push(request: Request) -> Response:
    """Refused: models are not uploaded."""
    raise ApiError(400, "models are not pushed from here: upload them to the hub with 'hf upload'", code="unsupported")


async def version(request: Request) -> OllamaVersion:
    """The version of Ollama's API that is served, and the server's own."""
    return OllamaVersion(version=API_VERSION, octavo=__version__)
