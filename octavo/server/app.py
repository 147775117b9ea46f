"""The FastAPI application: routes, middleware, OpenAPI description."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic.warnings import UnsupportedFieldAttributeWarning

from octavo import __version__
from octavo.core.server_options import FORM_BYTES, ServerOptions
from octavo.server import adapter_routes, admin, completions, operation, tokenization
from octavo.server.api_description import add_description_routes
from octavo.server.api_errors import handle_errors
from octavo.server.body_budget import make_budget
from octavo.server.chat_completions import create_chat_completion
from octavo.server.deferred_routes import DeferredRoutes, make_deferred
from octavo.server.engine_events import engine_events
from octavo.server.formats import RELAXED_HEADER
from octavo.server.large_bodies import BodyRoute
from octavo.server.llamacpp.llama_routes import add_llama_routes
from octavo.server.messages import message_routes as messages
from octavo.server.messages.message_protocol import (
    AnthropicError,
    AnthropicModel,
    AnthropicModelList,
    MessageObject,
    TokenCount,
)
from octavo.server.metrics import Metrics
from octavo.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware, RequestMiddleware
from octavo.server.protocol_admin import (
    AdapterStatus,
    Detokenized,
    Error,
    Health,
    Index,
    Model,
    ModelList,
    Replicas,
    Sleeping,
    Tokenized,
    TokenizedContent,
    TokenizerInfo,
    Version,
)
from octavo.server.protocol_answers import ChatCompletion, Completion
from octavo.server.responses import input_routes as inputs
from octavo.server.responses import response_routes as responses
from octavo.server.responses.response_protocol import DeletedResponse, InputTokens, ItemList, ResponseObject
from octavo.server.same_origin import SameOriginMiddleware, host_rule
from octavo.server.service import Service
from octavo.server.ui_middleware import UiMiddleware
from octavo.server.unversioned_paths import UnversionedPaths

# FastAPI silences it while it builds validators; those of models that are built at their first use come later.
warnings.filterwarnings("ignore", category=UnsupportedFieldAttributeWarning)

#: Status -> its description in OpenAPI.
_ALWAYS = {401: "No API key, or an unknown one.", 500: "The server failed; its log says more."}
_WITH_BODY = {
    400: "A field is missing, out of range, unknown to this model or not supported.",
    404: "The model does not exist here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body's Content-Encoding is not known.",
    503: "The engine has died, the server shuts down, or the response took too long.",
}
#: Routes for vectors and scores; what serves them takes 0.1 s to import and to register.
_POOLING_PATHS = (
    "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify", "/pooling",
    "/embedding", "/embeddings", "/embed", "/v2/embed",
)  # fmt: skip
#: Routes that change the server: web pages may use them only if their origin is named in allowed_origins.
_OPERATOR_PATHS = (
    "/sleep", "/wake_up", "/admin/drain", "/admin/undrain", "/admin/restart", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)  # fmt: skip
#: Chats in forms that few clients send.
_FURTHER_CHAT_PATHS = ("/v2/chat", "/v1/chat/completions/batch")
#: Routes for recordings, whose bodies may be larger than others'.
_AUDIO_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
_BUSY = {429: "The queue is full, or the client has taken its share; Retry-After gives the seconds to wait."}


def make_app(service: Service, api_keys: Sequence[str] = ()) -> FastAPI:
    """The application for one engine; without keys no request needs authorization."""
    app = make_routes(service.options, service.metrics, api_keys)
    app.state.service = service
    return app


def make_routes(options: ServerOptions, metrics: Metrics, api_keys: Sequence[str] = ()) -> FastAPI:
    """The application without its ``app.state.service``, which a server that still loads its engine has not yet."""
    app = FastAPI(
        title="Octavo",
        version=__version__,
        description="Serves a large language model under the routes of OpenAI's and of Anthropic's API.",
        openapi_tags=[
            {"name": "OpenAI"},
            {"name": "Anthropic"},
            {"name": "Cohere"},
            {"name": "Vectors"},
            {"name": "llama.cpp"},
            {"name": "Tokens"},
            {"name": "Server"},
        ],
        redirect_slashes=False,
        openapi_url=None,  # see add_description_routes
        docs_url=None,
        redoc_url=None,
        license_info={"name": "Apache-2.0"},
    )
    app.router.route_class = BodyRoute
    has_page = options.ui and (options.is_local or bool(api_keys))
    add_description_routes(app, page=has_page)
    with _without_pydantic_v1():
        _add_openai_routes(app)
        _add_anthropic_routes(app)
        _add_other_routes(app)
        DeferredRoutes(app, _POOLING_PATHS, partial(_add_pooling_routes, app))
        DeferredRoutes(app, _FURTHER_CHAT_PATHS, partial(_add_further_chat_routes, app))
        DeferredRoutes(app, _AUDIO_PATHS, partial(_add_audio_routes, app))
        if options.enable_admin_routes:
            _add_admin_routes(app)
        if options.enable_lora_routes:
            _add_adapter_routes(app)
    handle_errors(app)
    # The middleware added last is the outermost.
    uploads = dict.fromkeys(_AUDIO_PATHS, options.max_audio_bytes + FORM_BYTES)
    app.add_middleware(
        BodyLimitMiddleware,
        max_bytes=options.max_body_bytes,
        timeout=options.body_timeout,
        budget=make_budget(options, max(options.max_body_bytes, *uploads.values())),
        by_path=uploads,
    )
    if api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=api_keys)
    _describe(app, with_keys=bool(api_keys))
    if options.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", RELAXED_HEADER],
        )
    if has_page:
        app.add_middleware(UiMiddleware)
    app.state.has_keys = bool(api_keys)
    app.add_middleware(
        SameOriginMiddleware,
        is_own_host=host_rule(options, has_keys=bool(api_keys)),
        origins=options.origins,
        operator_paths=_OPERATOR_PATHS,
    )
    app.add_middleware(RequestMiddleware, metrics=metrics, log_requests=options.log_requests)
    app.add_middleware(UnversionedPaths)
    return app


@contextmanager
def _without_pydantic_v1() -> Iterator[None]:
    """FastAPI asks of every type of a route whether it is of pydantic's version 1, which takes long to import."""
    known = "pydantic.v1" in sys.modules
    sys.modules.setdefault("pydantic.v1", None)  # type: ignore[arg-type]  # as if it were not installed
    try:
        yield
    finally:
        if not known:
            del sys.modules["pydantic.v1"]


def _add_openai_routes(app: FastAPI) -> None:
    _add(app, "POST", "/v1/completions", completions.create_completion, Completion, "OpenAI", stream=True)
    _add(app, "POST", "/v1/chat/completions", create_chat_completion, ChatCompletion, "OpenAI", stream=True)
    _add(app, "GET", "/v1/models", operation.list_models, ModelList | AnthropicModelList, "OpenAI")
    _add(app, "POST", "/v1/responses", responses.create_response, ResponseObject, "OpenAI", stream=True)
    one = "/v1/responses/{response_id}"
    forgotten = {400: "A parameter is wrong.", 404: "The response is not known, or forgotten."}
    _add(app, "GET", one, responses.retrieve_response, ResponseObject, "OpenAI", errors=forgotten)
    _add(app, "GET", f"{one}/input_items", inputs.list_input_items, ItemList, "OpenAI", errors=forgotten)
    _add(app, "POST", f"{one}/cancel", responses.cancel_response, ResponseObject, "OpenAI", errors=forgotten)
    _add(app, "POST", "/v1/responses/input_tokens", inputs.count_input_tokens, InputTokens, "OpenAI")
    _add(app, "DELETE", one, responses.delete_response, DeletedResponse, "OpenAI", errors=forgotten)
    # Hub ids contain a slash.
    unknown = {404: _WITH_BODY[404]}
    path = "/v1/models/{model:path}"
    _add(app, "GET", path, operation.retrieve_model, Model | AnthropicModel, "OpenAI", errors=unknown)


def _add_pooling_routes(app: FastAPI) -> None:
    from octavo.server.pooling.pooling_routes import add_pooling_routes

    with _without_pydantic_v1():
        add_pooling_routes(partial(_add, app, is_busy=True))


def _add_further_chat_routes(app: FastAPI) -> None:
    from octavo.server.batched_chats import create_batched_chats
    from octavo.server.cohere.cohere_chat import chat
    from octavo.server.cohere.cohere_protocol import CohereChat

    with _without_pydantic_v1():
        _add(app, "POST", "/v2/chat", chat, CohereChat, "Cohere", stream=True)
        path = "/v1/chat/completions/batch"
        _add(app, "POST", path, create_batched_chats, ChatCompletion, "OpenAI", is_busy=True, task="generate")


def _add_audio_routes(app: FastAPI) -> None:
    from octavo.server.audio.audio_routes import add_audio_routes

    with _without_pydantic_v1():
        add_audio_routes(partial(_add, app, is_busy=True))


def _add_anthropic_routes(app: FastAPI) -> None:
    path = "/v1/messages"
    add = partial(_add, app, "POST", tag="Anthropic", error=AnthropicError)
    add(path, messages.create_message, MessageObject, stream=True)
    add(f"{path}/count_tokens", messages.count_tokens, TokenCount)


def _add_other_routes(app: FastAPI) -> None:
    add_llama_routes(partial(_add, app, tag="llama.cpp"))
    _add(app, "GET", "/tokenizer_info", tokenization.tokenizer_info, TokenizerInfo, "Tokens")
    _add(app, "POST", "/tokenize", tokenization.tokenize, Tokenized | TokenizedContent, "Tokens")
    _add(app, "POST", "/detokenize", tokenization.detokenize, Detokenized, "Tokens")
    _add(app, "GET", "/", operation.index, Index, "Server")
    _add(app, "GET", "/health", operation.health, Health, "Server", errors={503: _WITH_BODY[503]})
    _add(app, "GET", "/version", operation.version, Version, "Server")
    app.add_route("/engine/events", engine_events, include_in_schema=False)
    text: dict[int | str, dict[str, Any]] = {
        200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}}
    }
    app.add_api_route(
        "/metrics", operation.metrics, tags=["Server"], response_model=None, responses={**text, **_errors(_ALWAYS)}
    )
    app.add_api_route(
        "/reset_prefix_cache",
        operation.reset_prefix_cache,
        methods=["POST"],
        tags=["Server"],
        response_model=None,
        responses=_errors({**_ALWAYS, 503: _WITH_BODY[503]}),
    )


def _add_admin_routes(app: FastAPI) -> None:
    refused = {**_ALWAYS, 400: "No such level or replica.", 403: "A web page.", 409: "Not now.", 503: _WITH_BODY[503]}
    for method, path, endpoint, response in (
        ("POST", "/sleep", admin.sleep, Sleeping),
        ("POST", "/wake_up", admin.wake_up, Sleeping),
        ("GET", "/is_sleeping", admin.is_sleeping, Sleeping),
        ("GET", "/admin/replicas", admin.replicas, Replicas),
        ("POST", "/admin/drain", admin.drain, Replicas),
        ("POST", "/admin/undrain", admin.undrain, Replicas),
        ("POST", "/admin/restart", admin.restart, Replicas),
    ):
        app.add_api_route(
            path, endpoint, methods=[method], tags=["Server"], response_model=response, responses=_errors(refused)
        )


def _add_adapter_routes(app: FastAPI) -> None:
    refused = {403: "A web page.", 404: "There is no such adapter.", 409: "The name is taken, or in use."}
    for path, endpoint in (("load", adapter_routes.load_adapter), ("unload", adapter_routes.unload_adapter)):
        _add(app, "POST", f"/v1/{path}_lora_adapter", endpoint, AdapterStatus, "Server", errors=refused)


def _add(
    app: FastAPI,
    method: str,
    path: str,
    endpoint: Callable[..., Any],
    response_model: Any,
    tag: str,
    *,
    stream: bool = False,
    is_busy: bool = False,
    task: str | None = None,
    errors: dict[int, str] | None = None,
    error: type = Error,
    form: dict[str, Any] | None = None,
) -> None:
    """Adds a route with the description of its responses.

    Its requests wait in the queue if it ``is_busy``. A route that can ``stream`` generates; others are for a ``task``
    of the model, or for none. ``form``: the JSON schema of a body that is one.
    """
    is_busy = is_busy or stream
    texts = {**_ALWAYS, **(_WITH_BODY if method == "POST" else {}), **(errors or {}), **(_BUSY if is_busy else {})}
    responses: dict[int | str, dict[str, Any]] = _errors(texts, error)
    if stream:
        responses[200] = {"content": {"text/event-stream": {"schema": {}}}}
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        response_model=response_model,
        response_model_exclude_unset=True,
        tags=[tag],
        responses=responses,
        openapi_extra=form
        and {"requestBody": {"content": {"multipart/form-data": {"schema": form}}, "required": True}},
    )
    route = app.routes[-1]
    assert isinstance(route, BodyRoute)
    route.task = "generate" if stream else task


def _errors(texts: dict[int, str], error: type = Error) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": error, "description": text} for status, text in sorted(texts.items())}


def _describe(app: FastAPI, *, with_keys: bool) -> None:
    """Corrects the OpenAPI page: invalid bodies are refused with 400, not 422, and keys may be required."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        make_deferred(app)
        page = describe()
        for path in page["paths"].values():
            for route in path.values():
                route["responses"].pop("422", None)
        parts = page["components"]
        for name in ("HTTPValidationError", "ValidationError"):
            parts["schemas"].pop(name, None)
        if with_keys:
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            page["security"] = [{"key": []}]
        return page

    app.openapi = openapi  # type: ignore[method-assign]
