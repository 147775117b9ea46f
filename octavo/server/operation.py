"""Routes about the server itself: its models, health, version, metrics and cache."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.server.api_errors import ApiError
from octavo.server.protocol_admin import Model, ModelList, Version
from octavo.server.service import ServedModel, Service, service_of


async def list_models(request: Request) -> ModelList:
    """The names that the model is served under, and its adapters."""
    service = service_of(request)
    models = [_model(service, ServedModel(name)) for name in service.model_names]
    models += [_model(service, ServedModel(adapter.name, adapter.request)) for adapter in service.llm.adapters]
    return ModelList(object="list", data=models)


async def retrieve_model(request: Request, model: str) -> Model:
    """One name that the model is served under, or an adapter."""
    service = service_of(request)
    return _model(service, await service.model(model))


async def health(request: Request) -> Response:
    """Status 200 while requests are accepted; 503 after the engine has died or during shutdown."""
    service = service_of(request)
    if service.closing:
        raise ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
    service.llm.check_alive()
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


def _model(service: Service, model: ServedModel) -> Model:
    base = service.model_names[0]
    return Model(
        id=model.name,
        created=service.created,
        object="model",
        owned_by="octavo",
        max_model_len=service.llm.max_model_len,
        root=base if model.adapter is None else service.shown_path(service.llm.adapters.known(model.name).ref.path),
        parent=None if model.adapter is None else base,
    )
