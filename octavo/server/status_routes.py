"""Routes about the server itself: models, health, version, metrics, cache, replicas, adapters, tokenizer."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.core.errors import ConfigError, EngineDeadError, EngineStateError, OctavoError
from octavo.engine.adapters import allowed_path
from octavo.engine.tokenizer import TextStream, Tokenizer
from octavo.server.fields import Int, Name, RequestModel, ResponseModel
from octavo.server.http.bodies import run_in_thread_if_large
from octavo.server.http.errors import ApiError, invalid, server_error
from octavo.server.http.streaming import with_cancellation
from octavo.server.openai.protocol import ChatMessage, TemplateOptions
from octavo.server.prompt_inputs import encode, write_conversation
from octavo.server.state import ServedModel, ServerState, models_of, operator_state, state_of

if TYPE_CHECKING:
    from octavo.server.model_set import ModelSet, Slot

logger = logging.getLogger("octavo.server")

# Bodies of requests and responses.


class NamedModel(RequestModel):
    model: Name = Field(description="Its name, or an alias.")


class TokenizeRequest(TemplateOptions):
    """Body of ``/tokenize``: a prompt or messages; or a content, as in llama.cpp."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    prompt: str | None = Field(None, description="A text.")
    messages: list[ChatMessage] | None = Field(None, description="A conversation, which the chat template renders.")
    add_special_tokens: bool | None = Field(None, description="Add special tokens to a text (default true).")
    content: str | None = Field(None, description="A text, as in llama.cpp; the response has its tokens only.")
    add_special: bool | None = Field(None, description="With content: add special tokens (default false).")
    with_pieces: bool | None = Field(None, description="With content: each token with its text.")
    return_token_strs: bool | None = Field(None, description="Send the tokens as the vocabulary writes them, too.")


class DetokenizeRequest(RequestModel):
    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    tokens: list[Int] = Field(description="Token ids.")


class Index(ResponseModel):
    name: Literal["Octavo"]
    version: str
    models: list[str]
    docs: str


class ModelStatus(ResponseModel):
    """One of several models of a server."""

    value: Literal["unloaded", "loading", "loaded", "draining", "sleeping", "failed"] = Field(
        description="draining: it gets no new requests until it was unloaded to make room; sleeping: its KV cache made "
        "room, its weights are in memory."
    )
    progress: str | None = Field(None, description="Of a model that is loading.")
    error: str | None = Field(None, description="Why the last load failed.")
    open_requests: int = Field(description="Requests that it answers, or that wait for it.")
    memory_bytes: int | None = Field(None, description="Bytes that it takes when it is loaded, as far as known.")
    pinned: bool
    keep_alive: float | None = Field(None, description="Seconds without a request after which it is unloaded.")
    aliases: list[str]


class Model(ResponseModel):
    id: str
    created: int
    object: Literal["model"]
    owned_by: str
    max_model_len: int | None = Field(
        None, description="Longest prompt and output together, in tokens; left out if it is not known yet."
    )
    root: str = Field(description="The model's first name; of an adapter, its path in lora_folder, or its last part.")
    parent: str | None = Field(description="Of an adapter: its base model.")
    tasks: list[str] = Field(
        description="generate, embed, token_embed, classify, token_classify, score (pairs of texts), transcribe."
    )
    input_modalities: list[str] = Field(description="text, also image; or audio.")
    dimensions: int | None = Field(None, description="Dimensions of the vectors, of models that embed.")
    default_sampling_params: dict[str, int | float] | None = Field(
        None, description="Sampling parameters of requests that leave them out, of models that generate."
    )
    own_sampling_params: list[str] | None = Field(
        None, description="Names of those that its own files set (generation_config.json, GGUF); others are the API's."
    )
    loaded: bool | None = Field(None, description="With several models: whether it answers without being loaded.")
    status: ModelStatus | None = Field(None, description="With several models: what it does now.")


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[Model]


class AnthropicModel(ResponseModel):
    """A served model, as Anthropic's API describes one."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModelList(ResponseModel):
    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TokenPiece(ResponseModel):
    """A token and its text; or its bytes, if they are no valid UTF-8."""

    id: int
    piece: str | list[int]


class TokenizedContent(ResponseModel):
    """A response of ``/tokenize`` to a content."""

    tokens: list[int] | list[TokenPiece]


class Tokenized(ResponseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    prompt: str | None = Field(None, description="The rendered chat template, if the request has messages.")
    token_strs: list[str] | None = Field(None, description="The tokens as the vocabulary writes them, if asked for.")


class TokenizerInfo(ResponseModel):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    special_tokens: dict[str, str] = Field(description="Under the names that templates use.")
    chat_template: str | dict[str, str] | None = Field(description="By name, where there are several.")


class Detokenized(ResponseModel):
    """A text under vLLM's and llama.cpp's names."""

    prompt: str
    content: str


class Version(ResponseModel):
    version: str


class Sleeping(ResponseModel):
    is_sleeping: bool


class ReplicaStatus(ResponseModel):
    replica: int
    #: drained: its engine core lives and gets no requests; dead: it is not started again.
    status: Literal["starting", "ready", "drained", "dead"]
    open_requests: int
    restarts: int


class Replicas(ResponseModel):
    replicas: list[ReplicaStatus]


class LoadAdapterRequest(RequestModel):
    lora_name: Name = Field(description="The adapter's name, as the model of requests.")
    lora_path: Annotated[str, Field(max_length=4096)] = Field(
        description="Its folder or GGUF file, within the server's lora_folder; relative to that, or absolute."
    )
    load_inplace: bool | None = Field(None, description="Replace an adapter of this name; running requests keep it.")
    base_model_name: Name | None = Field(None, description="If given, it must be a name of the served model.")


class UnloadAdapterRequest(RequestModel):
    lora_name: Name = Field(description="The adapter's name.")
    lora_int_id: Int | None = Field(None, description="Accepted, without effect.")
    wait: bool | None = Field(
        None, description="Wait for its running requests; else refuse to unload while it has any."
    )


class AdapterStatus(ResponseModel):
    lora_name: str
    status: Literal["loaded", "loaded already", "unloaded"]


class Health(ResponseModel):
    status: Literal["ok"]


# Models, health, metrics and the cache.


async def index(request: Request) -> Index:
    """The server's name, version and models."""
    models = models_of(request)
    names = state_of(request).model_names if models is None else [slot.name for slot in models.slots]
    return Index(name="Octavo", version=__version__, models=names, docs="/docs")


async def list_models(request: Request) -> ModelList | AnthropicModelList:
    """The served names of the model, or all models; and adapters. In Anthropic's format for its clients."""
    served = models_of(request)
    if served is None:
        service = state_of(request)
        models = [_describe_model(service, ServedModel(name)) for name in service.model_names]
        models += _describe_adapters(service)
    else:
        models = [_describe_slot(served, slot) for slot in served.slots]
        models += [each for slot in served.slots for each in _describe_adapters_of(slot)]
    if "anthropic-version" not in request.headers:
        return ModelList(object="list", data=models)
    ids = [model.id for model in models]
    data = [_in_anthropic_format(model) for model in models]
    return AnthropicModelList(data=data, first_id=ids[0], last_id=ids[-1], has_more=False)


async def retrieve_model(request: Request, model: str) -> Model | AnthropicModel:
    """One served name of the model, or an adapter; in Anthropic's format for its clients."""
    served = models_of(request)
    if not model:
        raise HTTPException(404)  # the address of the list with a slash at its end
    if served is None:
        service = state_of(request)
        described = _describe_model(service, await service.model(model))
    elif (slot := served.known(model)) is None:
        raise served.not_found(model)
    elif model in slot.model.lora_modules:
        described = next(each for each in _describe_adapters_of(slot) if each.id == model)
    else:
        described = _describe_slot(served, slot)
    return _in_anthropic_format(described) if "anthropic-version" in request.headers else described


def _in_anthropic_format(model: Model) -> AnthropicModel:
    created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(type="model", id=model.id, display_name=model.id, created_at=created)


async def health(request: Request) -> Health:
    """Status 200 while requests are computed; 503 while an engine is started again, after its end, or at shutdown."""
    models = models_of(request)
    if models is not None:
        models.check_open()
        return Health(status="ok")
    service = state_of(request)
    service.check_running()
    if not service.llm.is_available:
        message = "no engine computes requests at this moment; those that are sent now wait for one"
        headers = {"Retry-After": str(service.llm.retry_after)}
        raise server_error(503, message, "engine_starting", headers=headers)
    return Health(status="ok")


async def version(request: Request) -> Version:
    """The server's version."""
    return Version(version=__version__)


async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    models = models_of(request)
    page, content_type = state_of(request).metrics.render() if models is None else models.render_metrics()
    return Response(page, headers={"content-type": content_type})


async def reset_prefix_cache(request: Request) -> Response:
    """Empties the prefix cache."""
    await operator_state(request).llm.reset_prefix_cache()
    return Response(b"{}", media_type="application/json")


def _describe_adapters(service: ServerState) -> list[Model]:
    return [_describe_model(service, ServedModel(each.name, each.request)) for each in service.llm.adapters]


def _describe_adapters_of(slot: Slot) -> list[Model]:
    """The adapters of one of several models, whether it is loaded or not."""
    if slot.service is not None:
        return _describe_adapters(slot.service)
    tasks = [] if slot.sized is None else list(slot.sized.tasks)
    return [
        Model(
            id=name, created=slot.created, object="model", owned_by="octavo", root=Path(path).name, parent=slot.name,
            tasks=tasks, input_modalities=["text"],
        )
        for name, path in slot.model.lora_modules.items()
    ]  # fmt: skip


def _describe_slot(models: ModelSet, slot: Slot) -> Model:
    """One of several models, whether it is loaded or not."""
    if slot.service is not None:
        described = _describe_model(slot.service, ServedModel(slot.name))
    else:
        sized = slot.sized
        described = Model(
            id=slot.name, created=slot.created, object="model", owned_by="octavo", root=slot.name, parent=None,
            tasks=[] if sized is None else list(sized.tasks), input_modalities=[],
        )  # fmt: skip
        if sized is not None:
            described.max_model_len = sized.max_model_len
            described.input_modalities = ["audio" if "transcribe" in sized.tasks else "text"]
    described.loaded = slot.is_ready
    described.status = status = ModelStatus(
        value=slot.status,
        open_requests=slot.users,
        pinned=slot.model.pinned,
        keep_alive=slot.keep_alive,
        aliases=[name for name in models.names_of(slot) if name != slot.name],
    )
    if slot.progress:
        status.progress = slot.progress
    if slot.failure is not None and slot.service is None:
        status.error = slot.failure.message
    if slot.need:
        status.memory_bytes = slot.need
    return described


def _describe_model(service: ServerState, model: ServedModel) -> Model:
    base = service.model_names[0]
    modalities = ["audio"] if "transcribe" in service.tasks else ["text"]
    if service.images.are_seen and modalities == ["text"]:
        modalities.append("image")
    described = Model(
        id=model.name,
        created=service.created,
        object="model",
        owned_by="octavo",
        max_model_len=service.llm.max_model_len,
        root=base if model.adapter is None else service.shown_path(service.llm.adapters.named(model.name).ref.path),
        parent=None if model.adapter is None else base,
        tasks=list(service.tasks),
        input_modalities=modalities,
    )
    if "embed" in service.tasks:
        described.dimensions = service.llm.front_end.pooling.vector_size
    if "generate" in service.tasks:
        described.default_sampling_params = service.llm.inputs.sampling_in_effect
        described.own_sampling_params = list(service.llm.inputs.default_sampling)
    return described


# One of several models; only with ``enable_admin_routes``.


async def load_model(request: Request, body: NamedModel) -> Model:
    """Loads one of several models, unless it is loaded; it may be unloaded again as any other."""
    models, slot = await _slot(request, body.model)
    async with models.lease(slot, request.receive):
        return _describe_slot(models, slot)


async def unload_model(request: Request, body: NamedModel) -> Model:
    """Unloads one of several models, if it has no open requests."""
    models, slot = await _slot(request, body.model)
    if slot.service is not None and not await models.unload(slot):
        raise ApiError(409, f"the model {slot.name!r} is in use or pinned", param="model", code="model_in_use")
    return _describe_slot(models, slot)


async def _slot(request: Request, name: str) -> tuple[ModelSet, Slot]:
    models = models_of(request)
    if models is None:
        raise ApiError(409, "this server has one model, which stays loaded", code="one_model")
    return models, await models.find(name)


# Sleep mode and replicas; only with ``enable_admin_routes``.


async def sleep(request: Request, level: int = 1) -> Sleeping:
    """Frees the KV cache (level 1), or weights too (level 2), until ``/wake_up``; requests get 503 meanwhile."""
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


async def wake_up(request: Request, tags: list[str] | None = None) -> Sleeping:
    """Restores weights and KV cache, or one of them (``tags``); the engine sleeps until both are restored."""
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
    """The engine's replicas: the state of each, and the number of its requests."""
    return _replicas(state_of(request))


async def drain(request: Request, replica: int) -> Replicas:
    """Gives a replica no more requests; the others continue its open ones, and no stream breaks."""
    service = operator_state(request)
    try:
        await service.llm.drain_replica(replica)
    except ConfigError as e:
        raise invalid("replica", str(e)) from None
    except EngineStateError as e:
        raise ApiError(409, str(e), code="cannot_drain") from None
    return _replicas(service)


async def undrain(request: Request, replica: int) -> Replicas:
    """Gives a drained replica requests again; no effect on another."""
    service = operator_state(request)
    try:
        await service.llm.undrain_replica(replica)
    except ConfigError as e:
        raise invalid("replica", str(e)) from None
    return _replicas(service)


async def restart(request: Request) -> Replicas:
    """Restarts the engine cores one after the other, with the model's current files; no stream breaks."""
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


# Adapters, loaded and unloaded while the server runs; only with ``enable_lora_routes``.


async def load_adapter(request: Request, body: LoadAdapterRequest) -> AdapterStatus:
    """Loads an adapter from the server's folder, so that requests may name it as their model."""
    service = operator_state(request)
    if (base := body.base_model_name) is not None and base not in service.model_names:
        names = ", ".join(service.model_names)
        raise ApiError(404, f"the model {base!r} is not served here; served: {names}", param="base_model_name")
    folder = service.options.lora_folder
    assert folder is not None  # checked with the options
    path = await asyncio.to_thread(allowed_path, folder, body.lora_path)
    added = await service.load_adapter(body.lora_name, path, in_place=bool(body.load_inplace))
    return AdapterStatus(lora_name=body.lora_name, status="loaded" if added else "loaded already")


async def unload_adapter(request: Request, body: UnloadAdapterRequest) -> AdapterStatus:
    """Unloads an adapter; while requests use it, this is refused, or with ``wait`` done after the last one."""
    service = operator_state(request)
    adapter = service.llm.adapters.named(body.lora_name)
    deadline = service.deadline()
    await with_cancellation(request.receive, service.llm.remove_lora(adapter.number, wait=bool(body.wait)), deadline)
    logger.info("adapter %s unloaded", body.lora_name)
    return AdapterStatus(lora_name=body.lora_name, status="unloaded")


# The tokenizer.

#: Up to this many tokens are decoded in well under a millisecond.
_SHORT = 1000


async def tokenize(request: Request, body: TokenizeRequest) -> Tokenized | TokenizedContent:
    """Token ids of a text, or of a conversation as the model's template writes it."""
    service = state_of(request)
    await service.model(body.model)
    if sum(value is not None for value in (body.prompt, body.messages, body.content)) != 1:
        raise ApiError(400, "give exactly one of prompt, messages and content", param="prompt")
    if body.content is not None:
        [ids] = await encode(service, [body.content], body.add_special is True, param="content")
        content = TokenizedContent(tokens=ids)
        if body.with_pieces:
            content.tokens = [TokenPiece(id=token, piece=_piece(service.llm.tokenizer, token)) for token in ids]
        return content
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
    return response


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    data = tokenizer.token_bytes(token_id)
    try:
        return tokenizer.token_text(token_id) if data is None else data.decode()
    except UnicodeDecodeError:
        return list(data or b"")


async def detokenize(request: Request, body: DetokenizeRequest) -> Detokenized:
    """The text of token ids, special tokens included."""
    service = state_of(request)
    await service.model(body.model)
    vocab_size = service.llm.model_config.vocab_size
    for token in (min(body.tokens), max(body.tokens)) if body.tokens else ():
        if not 0 <= token < vocab_size:
            raise ApiError(400, f"token ids are integers from 0 to {vocab_size - 1}, not {token}", param="tokens")
    text = await run_in_thread_if_large(request, _decode, service.llm.tokenizer, body.tokens)
    return Detokenized(prompt=text, content=text)


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
    """``tokenizer.decode``, which decodes many tokens in one long call that gives no other thread a turn."""
    if len(token_ids) < _SHORT:
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    stream = TextStream(tokenizer, [], skip_special_tokens=False)
    return "".join([*map(stream.push, token_ids), stream.flush()])
