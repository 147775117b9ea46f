"""The FastAPI application: routes, middleware, OpenAPI description."""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from pydantic.warnings import UnsupportedFieldAttributeWarning
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from octavo import __version__
from octavo.config.server_options import FORM_BYTES, ServerOptions
from octavo.server import anthropic as messages
from octavo.server import status_routes as adapter_routes
from octavo.server import status_routes as admin
from octavo.server import status_routes as operation
from octavo.server import status_routes as tokenization
from octavo.server.answer_format import RELAXED_HEADER
from octavo.server.anthropic import AnthropicError, AnthropicModel, AnthropicModelList, MessageObject, TokenCount
from octavo.server.http.bodies import BodyRoute
from octavo.server.http.errors import DeferredRoutes, handle_errors, make_deferred
from octavo.server.http.middleware import (
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    RequestMiddleware,
    SameOriginMiddleware,
    UnversionedPaths,
    host_rule,
    make_budget,
)
from octavo.server.llamacpp import add_llama_routes
from octavo.server.metrics import Metrics
from octavo.server.openai import completions
from octavo.server.openai import response_request as inputs
from octavo.server.openai import responses as responses
from octavo.server.openai.completions import create_chat_completion
from octavo.server.openai.protocol import ChatCompletion, ChatCompletionRequest, Completion, CompletionRequest
from octavo.server.openai.response_protocol import DeletedResponse, InputTokens, ItemList, ResponseObject
from octavo.server.page import UiMiddleware, engine_events
from octavo.server.state import ServerState
from octavo.server.status_routes import (
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

# The page ``/docs``: the OpenAPI description as plain HTML, without scripts, which loads nothing from elsewhere.

_STYLE = "body{font:16px/1.4 sans-serif;margin:2em;max-width:70em}td{padding:.2em 1em .2em 0;vertical-align:top}"


def docs_page(description: dict[str, Any]) -> str:
    """The page; ``description`` as of ``FastAPI.openapi``."""
    info, schemas = description["info"], description["components"]["schemas"]
    title = escape(f"{info['title']} {info['version']}")
    routes = "".join(
        _route(f"{method.upper()} {path}", route, schemas)
        for path, methods in description["paths"].items()
        for method, route in methods.items()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{escape(info['description'])} For programs: <a href=openapi.json>openapi.json</a>.</p>"
        f"{routes}</html>"
    )


def _route(name: str, route: dict[str, Any], schemas: dict[str, Any]) -> str:
    page = f"<h2>{escape(name)}</h2><p>{escape(route.get('description', ''))}</p>"
    if "requestBody" in route:
        [body] = route["requestBody"]["content"].values()  # JSON, or a form
        page += _fields(_schema(body["schema"], schemas))
    statuses = [(status, response["description"]) for status, response in route["responses"].items()]
    return page + _details("Responses", _table(statuses))


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        (name, _kind(field), ("Required. " if name in required else "") + field.get("description", ""))
        for name, field in schema["properties"].items()
    ]
    return _details("Fields", _table(rows))


def _schema(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """A schema, which a form has in its place and others by name."""
    named: dict[str, Any] = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return named


def _kind(field: dict[str, Any]) -> str:
    """A type in words."""
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(kind) for kind in field["anyOf"] if kind.get("type") != "null"))
    if "enum" in field or "const" in field:
        return ", ".join(map(str, field.get("enum", [field.get("const")])))
    return f"list of {_kind(field.get('items', {}))}" if field.get("type") == "array" else str(field.get("type", "any"))


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    return "<table>" + "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in rows) + "</table>"


def _details(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


# Descriptions of the routes: all of them (``/openapi.json``, ``/docs``), and the requests that the page makes.

#: A single thread: descriptions are made one after the other.
_describer = ThreadPoolExecutor(1, thread_name_prefix="octavo-describe")


class _MadeOnce:
    """A text that is made in a thread when it is first asked for; all who ask meanwhile wait for the same."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._made: asyncio.Future[bytes] | None = None

    async def get(self) -> bytes:
        """The text.

        Raises:
            Exception: it could not be made; the next who asks tries again.
        """
        if self._made is None:
            self._made = asyncio.get_running_loop().run_in_executor(_describer, self._make)
        made = self._made
        try:
            return await asyncio.shield(made)
        except Exception:
            self._made = None
            raise


def add_description_routes(app: FastAPI, *, page: bool) -> None:
    """Adds ``/openapi.json``, ``/docs`` and, for the ``page``, ``/ui/requests.json``."""
    openapi = _MadeOnce(lambda: json.dumps(app.openapi(), ensure_ascii=False).encode())
    docs = _MadeOnce(lambda: docs_page(app.openapi()).encode())
    requests = _MadeOnce(lambda: json.dumps(describe_requests()).encode())

    async def get_openapi(request: Request) -> Response:
        return Response(await openapi.get(), media_type="application/json")

    async def get_docs(request: Request) -> Response:
        return HTMLResponse(await docs.get())

    async def get_requests(request: Request) -> Response:
        return Response(await requests.get(), media_type="application/json")

    app.add_route("/openapi.json", get_openapi, include_in_schema=False)
    app.add_route("/docs", get_docs, include_in_schema=False)
    if page:
        app.add_route("/ui/requests.json", get_requests, include_in_schema=False)


def describe_requests() -> dict[str, Any]:
    """The requests of the page: the part of ``/openapi.json`` that has their fields."""
    from octavo.server.audio import TranscriptionRequest, TranslationRequest

    models: dict[str, tuple[str, type[BaseModel]]] = {
        "/v1/chat/completions": ("application/json", ChatCompletionRequest),
        "/v1/completions": ("application/json", CompletionRequest),
        "/v1/audio/transcriptions": ("multipart/form-data", TranscriptionRequest),
        "/v1/audio/translations": ("multipart/form-data", TranslationRequest),
    }
    given = [(model, "validation") for _, model in models.values()]
    named, schemas = models_json_schema(given, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    contents = {path: {kind: {"schema": named[model, "validation"]}} for path, (kind, model) in models.items()}
    paths = {path: {"post": {"requestBody": {"content": content}}} for path, content in contents.items()}
    return {"paths": paths, "components": {"schemas": schemas["$defs"]}}


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


def make_app(service: ServerState, api_keys: Sequence[str] = ()) -> FastAPI:
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
    from octavo.server.pooling_routes import add_pooling_routes

    with _without_pydantic_v1():
        add_pooling_routes(partial(_add, app, is_busy=True))


def _add_further_chat_routes(app: FastAPI) -> None:
    from octavo.server.cohere import CohereChat, chat
    from octavo.server.openai.completions import create_batched_chats

    with _without_pydantic_v1():
        _add(app, "POST", "/v2/chat", chat, CohereChat, "Cohere", stream=True)
        path = "/v1/chat/completions/batch"
        _add(app, "POST", path, create_batched_chats, ChatCompletion, "OpenAI", is_busy=True, task="generate")


def _add_audio_routes(app: FastAPI) -> None:
    from octavo.server.audio import add_audio_routes

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
