"""Routes about the server itself: its models, health, version, metrics and cache."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.core.errors import ConfigError, EngineDeadError, EngineStateError, OctavoError
from octavo.engine.adapters import allowed_path
from octavo.engine.tokenizer import TextStream, Tokenizer
from octavo.server.anthropic import AnthropicModel, AnthropicModelList
from octavo.server.fields import Int, Name, RequestModel, ResponseModel, hint
from octavo.server.http.bodies import run_in_thread_if_large
from octavo.server.http.errors import ApiError, invalid, server_error
from octavo.server.http.streaming import with_cancellation
from octavo.server.openai.protocol import ChatMessage, TemplateOptions
from octavo.server.prompt_inputs import encode, write_conversation
from octavo.server.state import ServedModel, ServerState, operator_state, state_of

# Bodies of the routes beside those for text: models, adapters, tokens, the state of the server, errors.


class TokenizeRequest(TemplateOptions):
    """Body of ``/tokenize``: a prompt or messages; or in llama.cpp's form a content."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    prompt: str | None = Field(None, description="A text.")
    messages: list[ChatMessage] | None = Field(None, description="A conversation, put into words by the template.")
    add_special_tokens: bool | None = Field(None, description="The model's own tokens around a text (default true).")
    content: str | None = Field(None, description="llama.cpp's form: a text; the answer has its tokens only.")
    add_special: bool | None = Field(None, description="With content: the model's own tokens around it.")
    parse_special: Any = hint("special tokens in a text are always read as such")
    with_pieces: bool | None = Field(None, description="With content: each token with its text.")
    return_token_strs: bool | None = Field(None, description="Send the tokens as the vocabulary writes them, too.")


class DetokenizeRequest(RequestModel):
    """Body of ``/detokenize``."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    tokens: list[Int] = Field(description="Token ids.")


class Index(ResponseModel):
    """A response of ``/``."""

    name: Literal["Octavo"]
    version: str
    models: list[str]
    docs: str


class Model(ResponseModel):
    """A served model."""

    id: str
    created: int
    object: Literal["model"]
    owned_by: str
    max_model_len: int = Field(description="Longest prompt and output together, in tokens.")
    root: str = Field(description="The model's first name; of an adapter its path in lora_folder, or its last part.")
    parent: str | None = Field(description="Of an adapter: the model that it belongs to.")
    tasks: list[str] = Field(
        description="What it can do: generate, embed (vectors), token_embed (of each token), classify, token_classify, "
        "score (pairs of texts), transcribe (recordings)."
    )
    input_modalities: list[str] = Field(description="What it reads: text, and image where it sees them; or audio.")
    dimensions: int | None = Field(None, description="Numbers of a vector, of models that embed.")
    default_sampling_params: dict[str, int | float] | None = Field(
        None,
        description="What a request that leaves sampling parameters out is sampled with, of models that generate: the "
        "model's own defaults, else those of the API.",
    )


class ModelList(ResponseModel):
    """All names of the model."""

    object: Literal["list"]
    data: list[Model]


class TokenPiece(ResponseModel):
    """A token and its text; its bytes, if they are no text alone."""

    id: int
    piece: str | list[int]


class TokenizedContent(ResponseModel):
    """A response of ``/tokenize`` in llama.cpp's form."""

    tokens: list[int] | list[TokenPiece]


class Tokenized(ResponseModel):
    """A response of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int
    prompt: str | None = Field(None, description="The text that was tokenized, if it came of messages.")
    token_strs: list[str] | None = Field(None, description="The tokens as the vocabulary writes them, if asked for.")


class TokenizerInfo(ResponseModel):
    """A response of ``/tokenizer_info``."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    special_tokens: dict[str, str] = Field(description="Under the names that templates use.")
    chat_template: str | dict[str, str] | None = Field(description="By name, where there are several.")


class Detokenized(ResponseModel):
    """A response of ``/detokenize``, in vLLM's and in llama.cpp's words."""

    prompt: str
    content: str


class Version(ResponseModel):
    """A response of ``/version``."""

    version: str


class Sleeping(ResponseModel):
    """A response of ``/sleep``, ``/wake_up`` and ``/is_sleeping``."""

    is_sleeping: bool


class ReplicaStatus(ResponseModel):
    """A replica of the engine, in a response of the routes below ``/admin``."""

    replica: int
    #: drained: its engine core lives and gets no requests; dead: it is not started again.
    status: Literal["starting", "ready", "drained", "dead"]
    open_requests: int
    #: Times that its engine core was started in the place of one that had ended.
    restarts: int


class Replicas(ResponseModel):
    """A response of ``/admin/replicas``, ``/admin/drain``, ``/admin/undrain`` and ``/admin/restart``."""

    replicas: list[ReplicaStatus]


class LoadAdapterRequest(RequestModel):
    """Body of ``/v1/load_lora_adapter``."""

    lora_name: Name = Field(description="What requests will call it, as their model.")
    lora_path: Annotated[str, Field(max_length=4096)] = Field(
        description="Its folder or GGUF file, within the server's lora_folder; relative to that, or absolute."
    )
    load_inplace: bool | None = Field(None, description="Replace an adapter of this name; running requests keep it.")
    base_model_name: Name | None = Field(None, description="If given, it must be a name of the served model.")


class UnloadAdapterRequest(RequestModel):
    """Body of ``/v1/unload_lora_adapter``."""

    lora_name: Name = Field(description="Its name.")
    lora_int_id: Int | None = Field(None, description="Accepted, without effect.")
    wait: bool | None = Field(
        None, description="Refuse new requests and wait until its running ones have ended; else they are refused for."
    )


class AdapterStatus(ResponseModel):
    """A response of ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``."""

    lora_name: str
    status: Literal["loaded", "loaded already", "unloaded"]


class Health(ResponseModel):
    """A response of ``/health``."""

    status: Literal["ok"]


class ErrorDetail(ResponseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(ResponseModel):
    """A response with an error status."""

    error: ErrorDetail


async def index(request: Request) -> Index:
    """What answers at this address."""
    service = state_of(request)
    return Index(name="Octavo", version=__version__, models=service.model_names, docs="/docs")


async def list_models(request: Request) -> ModelList | AnthropicModelList:
    """The names that the model is served under, and its adapters; in Anthropic's form for its clients."""
    service = state_of(request)
    models = [_model(service, ServedModel(name)) for name in service.model_names]
    models += [_model(service, ServedModel(adapter.name, adapter.request)) for adapter in service.llm.adapters]
    if not _is_of_anthropic(request):
        return ModelList(object="list", data=models)
    ids = [model.id for model in models]
    data = [_of_anthropic(model) for model in models]
    return AnthropicModelList(data=data, first_id=ids[0], last_id=ids[-1], has_more=False)


async def retrieve_model(request: Request, model: str) -> Model | AnthropicModel:
    """One name that the model is served under, or an adapter; in Anthropic's form for its clients."""
    service = state_of(request)
    if not model:
        raise HTTPException(404)  # the address of the list with a slash at its end
    named = _model(service, await service.model(model))
    return _of_anthropic(named) if _is_of_anthropic(request) else named


def _is_of_anthropic(request: Request) -> bool:
    """Whether the client speaks Anthropic's API, whose routes for models have the same addresses as OpenAI's."""
    return "anthropic-version" in request.headers


def _of_anthropic(model: Model) -> AnthropicModel:
    created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(type="model", id=model.id, display_name=model.id, created_at=created)


async def health(request: Request) -> Response:
    """Status 200 while requests are computed; 503 while an engine is started again, after its end, or at shutdown."""
    service = state_of(request)
    service.check_running()
    if not service.llm.is_available:
        message = "no engine computes requests at this moment; those that are sent now wait for one"
        headers = {"Retry-After": str(service.llm.retry_after)}
        raise server_error(503, message, "engine_starting", headers=headers)
    return Response(b'{"status":"ok"}', media_type="application/json")


async def version(request: Request) -> Version:
    """The server's version."""
    return Version(version=__version__)


async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    page, content_type = state_of(request).metrics.render()
    return Response(page, headers={"content-type": content_type})


async def reset_prefix_cache(request: Request) -> Response:
    """Empties the prefix cache."""
    service = state_of(request)
    service.llm.check_alive()
    await service.llm.reset_prefix_cache()
    return Response(b"{}", media_type="application/json")


def _modalities(service: ServerState) -> list[str]:
    """What the model reads."""
    if "transcribe" in service.tasks:
        return ["audio"]
    return ["text", "image"] if service.images.are_seen else ["text"]


def _model(service: ServerState, model: ServedModel) -> Model:
    base = service.model_names[0]
    described = Model(
        id=model.name,
        created=service.created,
        object="model",
        owned_by="octavo",
        max_model_len=service.llm.max_model_len,
        root=base if model.adapter is None else service.shown_path(service.llm.adapters.named(model.name).ref.path),
        parent=None if model.adapter is None else base,
        tasks=list(service.tasks),
        input_modalities=_modalities(service),
    )
    if "embed" in service.tasks:
        described.dimensions = service.llm.front_end.pooling.vector_size
    if "generate" in service.tasks:
        described.default_sampling_params = service.llm.inputs.sampling_in_effect
    return described


# Routes that free the engine's memory for a while, or start its replicas again; only with ``enable_admin_routes``.


async def sleep(request: Request, level: int = 1) -> Sleeping:
    """Frees memory until ``/wake_up``; requests are answered 503 meanwhile.

    Level 1 keeps the weights at hand and frees the KV cache, level 2 drops the weights too, to be read again.
    """
    service = operator_state(request)
    if level not in (1, 2):
        raise invalid("level", f"level must be 1 or 2, not {level}")
    try:
        await service.llm.sleep(level)
    except EngineDeadError:
        raise
    except OctavoError as e:  # requests are unfinished, or the weights cannot move
        raise ApiError(409, str(e), code="cannot_sleep") from None
    return Sleeping(is_sleeping=service.llm.is_sleeping)


async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Sleeping:
    """Restores weights and KV cache, or what ``tags`` name of them: it sleeps until both are there.

    Nothing happens if the engine is not sleeping.
    """
    service = operator_state(request)
    try:
        await service.llm.wake_up(tags)
    except ConfigError as e:
        raise invalid("tags", str(e)) from None
    return Sleeping(is_sleeping=service.llm.is_sleeping)


async def is_sleeping(request: Request) -> Sleeping:
    """Whether the engine sleeps."""
    return Sleeping(is_sleeping=state_of(request).llm.is_sleeping)


async def replicas(request: Request) -> Replicas:
    """The engine's replicas: which of them take requests, and how many each has."""
    return _replicas(state_of(request))


async def drain(request: Request, replica: int) -> Replicas:
    """Has a replica take no more requests; the others go on with those that it has, and no stream breaks."""
    service = operator_state(request)
    try:
        await service.llm.drain_replica(replica)
    except ConfigError as e:
        raise invalid("replica", str(e)) from None
    except EngineStateError as e:
        raise ApiError(409, str(e), code="cannot_drain") from None
    return _replicas(service)


async def undrain(request: Request, replica: int) -> Replicas:
    """Has a drained replica take requests again. Nothing happens if it does."""
    service = operator_state(request)
    try:
        await service.llm.undrain_replica(replica)
    except ConfigError as e:
        raise invalid("replica", str(e)) from None
    return _replicas(service)


async def restart(request: Request) -> Replicas:
    """Starts the engine core of each replica again, one after the other, with the model's files as they are now.

    No stream breaks: requests go on at the other replicas, or wait for a new core if there is no other. The answer
    comes when it is done.
    """
    service = operator_state(request)
    try:
        await service.llm.restart_replicas()
    except (ConfigError, EngineStateError) as e:
        raise ApiError(409, str(e), code="cannot_restart") from None
    except OctavoError as e:
        service.llm.check_alive()
        raise server_error(503, str(e), "restart_failed") from None
    return _replicas(service)


def _replicas(service: ServerState) -> Replicas:
    return Replicas(
        replicas=[
            ReplicaStatus(replica=s.number, status=s.status, open_requests=s.num_open, restarts=s.num_restarts)
            for s in service.llm.replica_states()
        ]
    )


# Routes that load and unload adapters while the server runs; only with ``enable_lora_routes``.

logger = logging.getLogger("octavo.server")


async def load_adapter(request: Request, body: LoadAdapterRequest) -> AdapterStatus:
    """Loads an adapter from the server's folder, so that requests may name it as their model."""
    service = operator_state(request)
    base = body.base_model_name
    if base is not None and base not in service.model_names:
        names = ", ".join(service.model_names)
        raise ApiError(404, f"the model {base!r} is not served here; served: {names}", param="base_model_name")
    folder = service.options.lora_folder
    assert folder is not None  # checked with the options
    path = await asyncio.to_thread(allowed_path, folder, body.lora_path)
    added = await service.load_adapter(body.lora_name, path, in_place=bool(body.load_inplace))
    return AdapterStatus(lora_name=body.lora_name, status="loaded" if added else "loaded already")


async def unload_adapter(request: Request, body: UnloadAdapterRequest) -> AdapterStatus:
    """Forgets an adapter; while requests use it that is refused, or with ``wait`` done when the last has ended."""
    service = operator_state(request)
    adapter = service.llm.adapters.named(body.lora_name)
    deadline = service.deadline()
    await with_cancellation(request.receive, service.llm.remove_lora(adapter.number, wait=bool(body.wait)), deadline)
    logger.info("adapter %s unloaded", body.lora_name)
    return AdapterStatus(lora_name=body.lora_name, status="unloaded")


# The routes ``/tokenize`` and ``/detokenize``.

#: Up to this many tokens are decoded in well under a millisecond.
_SHORT = 1000


async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of a conversation as the model's template writes it."""
    service = state_of(request)
    await service.model(body.model)
    if sum(given is not None for given in (body.prompt, body.messages, body.content)) != 1:
        raise ApiError(400, "give exactly one of prompt, messages and content", param="prompt")
    if body.content is not None:
        return await _tokenized_content(service, body, body.content)
    limit = service.llm.max_model_len
    if body.messages is not None:
        text = await write_conversation(service, request, body.messages, body)
        [ids] = await encode(service, [text], body.add_special_tokens is True)
        response = Tokenized(tokens=ids, count=len(ids), max_model_len=limit, prompt=text)
    else:
        [ids] = await encode(service, [body.prompt or ""], body.add_special_tokens is not False)
        response = Tokenized(tokens=ids, count=len(ids), max_model_len=limit)
    if body.return_token_strs:
        response.token_strs = [token or "" for token in service.llm.tokenizer.convert_ids_to_tokens(ids)]
    return Response(response.encode(), media_type="application/json")


async def _tokenized_content(service: ServerState, body: TokenizeRequest, content: str) -> Response:
    [ids] = await encode(service, [content], body.add_special is True, param="content")
    response = TokenizedContent(tokens=ids)
    if body.with_pieces:
        response.tokens = [TokenPiece(id=token, piece=_piece(service.llm.tokenizer, token)) for token in ids]
    return Response(response.encode(), media_type="application/json")


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    data = tokenizer.token_bytes(token_id)
    try:
        return tokenizer.token_text(token_id) if data is None else data.decode()
    except UnicodeDecodeError:
        return list(data or b"")


async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids, special tokens included."""
    service = state_of(request)
    await service.model(body.model)
    vocab_size = service.llm.model_config.vocab_size
    for token in (min(body.tokens), max(body.tokens)) if body.tokens else ():
        if not 0 <= token < vocab_size:
            raise ApiError(400, f"token ids are integers from 0 to {vocab_size - 1}, not {token}", param="tokens")
    text = await run_in_thread_if_large(request, _decode, service.llm.tokenizer, body.tokens)
    return Response(Detokenized(prompt=text, content=text).encode(), media_type="application/json")


async def tokenizer_info(request: Request) -> TokenizerInfo:
    """The tokenizer: its special tokens and chat templates."""
    service = state_of(request)
    tokenizer = service.llm.tokenizer
    templates = tokenizer.chat_templates
    return TokenizerInfo(
        tokenizer_class=type(tokenizer.backend.model).__name__,
        vocab_size=service.llm.model_config.vocab_size,
        model_max_length=service.llm.max_model_len,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=tokenizer.named_tokens,
        chat_template=templates if len(templates) > 1 else next(iter(templates.values()), None),
    )


def _decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """What ``tokenizer.decode`` gives, which of many is one long call in which no other thread has a turn."""
    if len(token_ids) < _SHORT:
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    stream = TextStream(tokenizer, [], skip_special_tokens=False)
    return "".join([*map(stream.push, token_ids), stream.flush()])
