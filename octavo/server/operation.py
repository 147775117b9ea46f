"""Routes about the server itself: its models, health, version, metrics and cache."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.server.api_errors import server_error
from octavo.server.messages.message_protocol import AnthropicModel, AnthropicModelList
from octavo.server.protocol_admin import Index, Model, ModelList, Version
from octavo.server.service import ServedModel, Service, service_of


async def index(request: Request) -> Index:
    """What answers at this address."""
    service = service_of(request)
    return Index(name="Octavo", version=__version__, models=service.model_names, docs="/docs")


async def list_models(request: Request) -> ModelList | AnthropicModelList:
    """The names that the model is served under, and its adapters; in Anthropic's form for its clients."""
    service = service_of(request)
    models = [_model(service, ServedModel(name)) for name in service.model_names]
    models += [_model(service, ServedModel(adapter.name, adapter.request)) for adapter in service.llm.adapters]
    if not _is_of_anthropic(request):
        return ModelList(object="list", data=models)
    ids = [model.id for model in models]
    data = [_of_anthropic(model) for model in models]
    return AnthropicModelList(data=data, first_id=ids[0], last_id=ids[-1], has_more=False)


async def retrieve_model(request: Request, model: str) -> Model | AnthropicModel:
    """One name that the model is served under, or an adapter; in Anthropic's form for its clients."""
    service = service_of(request)
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
    service = service_of(request)
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
    page, content_type = service_of(request).metrics.render()
    return Response(page, headers={"content-type": content_type})


async def reset_prefix_cache(request: Request) -> Response:
    """Empties the prefix cache."""
    service = service_of(request)
    service.llm.check_alive()
    await service.llm.reset_prefix_cache()
    return Response(b"{}", media_type="application/json")


def _modalities(service: Service) -> list[str]:
    """What the model reads."""
    if "transcribe" in service.tasks:
        return ["audio"]
    return ["text", "image"] if service.images.are_seen else ["text"]


def _model(service: Service, model: ServedModel) -> Model:
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
