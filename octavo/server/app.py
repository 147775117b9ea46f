"""The FastAPI application: its routes, its middleware and the description of both. Read ``make_routes`` first."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo import __version__
from octavo.config.server_options import FORM_BYTES, ServerOptions
from octavo.process.children import WorkThread
from octavo.server import anthropic, status_routes
from octavo.server.answer_format import RELAXED_HEADER
from octavo.server.anthropic import AnthropicError, AnthropicModel, AnthropicModelList, MessageObject, TokenCount
from octavo.server.http.bodies import BodyRoute
from octavo.server.http.errors import handle_errors
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
from octavo.server.openai import completions, response_request, responses
from octavo.server.openai.protocol import ChatCompletion, ChatCompletionRequest, Completion, CompletionRequest
from octavo.server.openai.response_protocol import DeletedResponse, InputTokens, ItemList, ResponseObject
from octavo.server.page import UiMiddleware, engine_events
from octavo.server.state import ServerState

# FastAPI silences it while it builds validators; those of models that are built at their first use come later.
warnings.filterwarnings("ignore", category=UnsupportedFieldAttributeWarning)

#: Descriptions of statuses in OpenAPI: of all routes, and of those with a body.
_ALWAYS = {401: "No API key, or an unknown one.", 500: "The server failed; its log says more."}
_WITH_BODY = {
    400: "A field is missing, out of range, unknown to this model or not supported.",
    404: "The model does not exist here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body's Content-Encoding is not known.",
    503: "The engine has died, the server shuts down, or the response took too long.",
}
#: Routes for vectors and scores, whose modules take 0.1 s to import and to register.
_POOLING_PATHS = (
    "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify", "/pooling",
    "/embedding", "/embeddings", "/embed", "/v2/embed",
)  # fmt: skip
#: Routes that change the server; the origin of a web page must be named in allowed_origins for them.
_OPERATOR_PATHS = (
    "/sleep", "/wake_up", "/admin/drain", "/admin/undrain", "/admin/restart", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)  # fmt: skip
#: Chats in formats that few clients send.
_FURTHER_CHAT_PATHS = ("/v2/chat", "/v1/chat/completions/batch")
#: Routes for recordings: their bodies may be larger than those of others.
_AUDIO_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
#: Groups of routes in OpenAPI.
_TAGS = ("OpenAI", "Anthropic", "Cohere", "Vectors", "llama.cpp", "Tokens", "Server")
_BUSY = {429: "The queue is full, or the client has taken its share; Retry-After gives the seconds to wait."}


def make_app(service: ServerState, api_keys: Sequence[str] = ()) -> FastAPI:
    """The application for one engine; without ``api_keys`` no request needs authorization."""
    app = make_routes(service.options, service.metrics, api_keys)
    app.state.service = service
    return app


def make_routes(options: ServerOptions, metrics: Metrics, api_keys: Sequence[str] = ()) -> FastAPI:
    """The application without ``app.state.service``, which the caller adds once the engine has loaded."""
    app = FastAPI(
        title="Octavo",
        version=__version__,
        description="Serves a large language model under the routes of OpenAI's and of Anthropic's API.",
        openapi_tags=[{"name": name} for name in _TAGS],
        redirect_slashes=False,
        openapi_url=None,  # see _add_description_routes
        docs_url=None,
        redoc_url=None,
        license_info={"name": "Apache-2.0"},
    )
    app.router.route_class = BodyRoute
    has_page = options.ui and (options.is_local or bool(api_keys))
    _add_description_routes(app, page=has_page)
    with _without_pydantic_v1():
        _add_routes(app)
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
    """Hides pydantic.v1, which FastAPI would import, slowly, to test whether a type is of that version."""
    was_imported = "pydantic.v1" in sys.modules
    sys.modules.setdefault("pydantic.v1", None)  # type: ignore[arg-type]  # as if it were not installed
    try:
        yield
    finally:
        if not was_imported:
            del sys.modules["pydantic.v1"]


def _add_routes(app: FastAPI) -> None:
    add_openai = partial(_add, app, tag="OpenAI")
    add_openai("POST", "/v1/completions", completions.create_completion, Completion, stream=True)
    add_openai("POST", "/v1/chat/completions", completions.create_chat_completion, ChatCompletion, stream=True)
    add_openai("GET", "/v1/models", status_routes.list_models, status_routes.ModelList | AnthropicModelList)
    add_openai("POST", "/v1/responses", responses.create_response, ResponseObject, stream=True)
    one = "/v1/responses/{response_id}"
    missing = {400: "A parameter is wrong.", 404: "The response is not known, or forgotten."}
    add_openai("GET", one, responses.retrieve_response, ResponseObject, errors=missing)
    add_openai("GET", f"{one}/input_items", response_request.list_input_items, ItemList, errors=missing)
    add_openai("POST", f"{one}/cancel", responses.cancel_response, ResponseObject, errors=missing)
    add_openai("POST", "/v1/responses/input_tokens", response_request.count_input_tokens, InputTokens)
    add_openai("DELETE", one, responses.delete_response, DeletedResponse, errors=missing)
    model = status_routes.Model | AnthropicModel  # whose id may contain a slash
    add_openai("GET", "/v1/models/{model:path}", status_routes.retrieve_model, model, errors={404: _WITH_BODY[404]})

    add_anthropic = partial(_add, app, "POST", tag="Anthropic", error=AnthropicError)
    add_anthropic("/v1/messages", anthropic.create_message, MessageObject, stream=True)
    add_anthropic("/v1/messages/count_tokens", anthropic.count_tokens, TokenCount)

    add_llama_routes(partial(_add, app, tag="llama.cpp"))
    _add(app, "GET", "/tokenizer_info", status_routes.tokenizer_info, status_routes.TokenizerInfo, "Tokens")
    tokenized = status_routes.Tokenized | status_routes.TokenizedContent
    _add(app, "POST", "/tokenize", status_routes.tokenize, tokenized, "Tokens")
    _add(app, "POST", "/detokenize", status_routes.detokenize, status_routes.Detokenized, "Tokens")
    _add(app, "GET", "/", status_routes.index, status_routes.Index, "Server")
    _add(app, "GET", "/health", status_routes.health, status_routes.Health, "Server", errors={503: _WITH_BODY[503]})
    _add(app, "GET", "/version", status_routes.version, status_routes.Version, "Server")
    app.add_route("/engine/events", engine_events, include_in_schema=False)
    text: dict[int | str, Any] = {200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}}}
    add_server = partial(app.add_api_route, tags=["Server"], response_model=None)
    add_server("/metrics", status_routes.metrics, responses={**text, **_errors(_ALWAYS)})
    errors = _errors({**_ALWAYS, 503: _WITH_BODY[503]})
    add_server("/reset_prefix_cache", status_routes.reset_prefix_cache, methods=["POST"], responses=errors)


def _add_pooling_routes(app: FastAPI) -> None:
    from octavo.server import cohere, pooling

    add = partial(_add, app, "POST", is_busy=True)
    add("/v1/embeddings", pooling.create_embeddings, pooling.EmbeddingList, "OpenAI", task="embed")
    for path in ("/v1/rerank", pooling.COHERE):
        add(path, pooling.rerank, pooling.Ranking, "Vectors", task="score")
    rankings = pooling.Ranking | list[pooling.RankedText]
    add("/rerank", pooling.rerank_texts, rankings, "Vectors", task="score")
    add("/v2/embed", cohere.embed, cohere.CohereEmbeddings, "Vectors", task="embed")
    add("/embed", pooling.embed_texts, list[list[float]], "Vectors", task="embed")
    for path in ("/v1/score", "/score"):
        add(path, pooling.score, pooling.ScoreList, "Vectors", task="score")
    add("/classify", pooling.classify, pooling.ClassificationList, "Vectors", task="classify")
    add("/pooling", pooling.pool, pooling.PooledList, "Vectors")  # a field of the request names the task
    for path in ("/embedding", "/embeddings"):
        add(path, pooling.embed, list[pooling.LlamaVector], "llama.cpp", task="embed")


def _add_further_chat_routes(app: FastAPI) -> None:
    from octavo.server.cohere import CohereChat, chat

    _add(app, "POST", "/v2/chat", chat, CohereChat, "Cohere", stream=True)
    path, create = "/v1/chat/completions/batch", completions.create_batched_chats
    _add(app, "POST", path, create, ChatCompletion, "OpenAI", is_busy=True, task="generate")


def _add_audio_routes(app: FastAPI) -> None:
    from octavo.server import audio

    endpoints = (audio.create_transcription, audio.create_translation)
    bodies: tuple[type[audio.AudioRequest], ...] = (audio.TranscriptionRequest, audio.TranslationRequest)
    for path, endpoint, body in zip(_AUDIO_PATHS, endpoints, bodies, strict=True):
        _add(app, "POST", path, endpoint, None, "OpenAI", is_busy=True, form=audio.form_schema(body))


def _add_admin_routes(app: FastAPI) -> None:
    refused = {**_ALWAYS, 400: "No such level or replica.", 403: "A web page.", 409: "Not now.", 503: _WITH_BODY[503]}
    for method, path, endpoint, response in (
        ("POST", "/sleep", status_routes.sleep, status_routes.Sleeping),
        ("POST", "/wake_up", status_routes.wake_up, status_routes.Sleeping),
        ("GET", "/is_sleeping", status_routes.is_sleeping, status_routes.Sleeping),
        ("GET", "/admin/replicas", status_routes.replicas, status_routes.Replicas),
        ("POST", "/admin/drain", status_routes.drain, status_routes.Replicas),
        ("POST", "/admin/undrain", status_routes.undrain, status_routes.Replicas),
        ("POST", "/admin/restart", status_routes.restart, status_routes.Replicas),
    ):
        app.add_api_route(
            path, endpoint, methods=[method], tags=["Server"], response_model=response, responses=_errors(refused)
        )


def _add_adapter_routes(app: FastAPI) -> None:
    refused = {403: "A web page.", 404: "There is no such adapter.", 409: "The name is taken, or in use."}
    for path, endpoint in (("load", status_routes.load_adapter), ("unload", status_routes.unload_adapter)):
        _add(app, "POST", f"/v1/{path}_lora_adapter", endpoint, status_routes.AdapterStatus, "Server", errors=refused)


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
    error: type = status_routes.Error,
    form: dict[str, Any] | None = None,
) -> None:
    """Adds a route with the description of its responses; ``form``: the JSON schema of a multipart body.

    ``is_busy``: its requests wait in the queue. ``stream``: it generates; others need the model's ``task``, or none.
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


def _errors(texts: dict[int, str], error: type = status_routes.Error) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": error, "description": text} for status, text in sorted(texts.items())}


def _describe(app: FastAPI, *, with_keys: bool) -> None:
    """Corrects the OpenAPI description: invalid bodies are refused with 400, not 422, and keys may be required."""
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


class DeferredRoutes(BaseRoute):
    """Stands for routes whose modules are imported at the first request for one of them; then it is gone."""

    def __init__(self, app: FastAPI, paths: Sequence[str], make: Callable[[], None]) -> None:
        """``make`` adds the routes with these ``paths`` to the application."""
        self.paths = frozenset(paths)
        self._app, self._make = app, make
        self._lock = threading.Lock()
        app.router.routes.append(self)

    def make(self) -> None:
        """Makes the routes once; may be called from any thread."""
        with self._lock:
            if self in self._app.router.routes:
                with _without_pydantic_v1():
                    self._make()
                self._app.router.routes.remove(self)  # only now: until here it stands before them

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        is_one = scope["type"] == "http" and scope["path"] in self.paths
        return (Match.FULL if is_one else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self in self._app.router.routes:
            await asyncio.to_thread(self.make)  # 0.1 s
        await self._app.router(scope, receive, send)


def make_deferred(app: FastAPI) -> None:
    for route in [route for route in app.router.routes if isinstance(route, DeferredRoutes)]:
        route.make()


# Descriptions: of all routes (``/openapi.json``, ``/docs``), and of the requests that the page makes.

_describer = WorkThread("describe")


class _Description:
    """A text that is made at the first request for it; all requests meanwhile wait for the same one."""

    def __init__(self, make: Callable[[], str], media_type: str) -> None:
        self._make, self._media_type = make, media_type
        self._task: asyncio.Task[str] | None = None

    async def respond(self, request: Request) -> Response:
        if self._task is None:
            self._task = asyncio.create_task(_describer.run(self._make))
        task = self._task
        try:
            return Response(await asyncio.shield(task), media_type=self._media_type)
        except Exception:
            self._task = None  # the next request tries again
            raise


def _add_description_routes(app: FastAPI, *, page: bool) -> None:
    """Adds ``/openapi.json``, ``/docs`` and, for the ``page``, ``/ui/requests.json``."""
    descriptions = {
        "/openapi.json": _Description(lambda: json.dumps(app.openapi(), ensure_ascii=False), "application/json"),
        "/docs": _Description(lambda: docs_page(app.openapi()), "text/html"),
    }
    if page:
        descriptions["/ui/requests.json"] = _Description(lambda: json.dumps(describe_requests()), "application/json")
    for path, description in descriptions.items():
        app.add_route(path, description.respond, include_in_schema=False)


def describe_requests() -> dict[str, Any]:
    """The excerpt of ``/openapi.json`` with the fields of the requests that the page makes."""
    from octavo.server.audio import TranscriptionRequest, TranslationRequest

    models: dict[str, tuple[str, type[BaseModel]]] = {
        "/v1/chat/completions": ("application/json", ChatCompletionRequest),
        "/v1/completions": ("application/json", CompletionRequest),
        "/v1/audio/transcriptions": ("multipart/form-data", TranscriptionRequest),
        "/v1/audio/translations": ("multipart/form-data", TranslationRequest),
    }
    modes = [(model, "validation") for _, model in models.values()]
    named, schemas = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    contents = {path: {kind: {"schema": named[model, "validation"]}} for path, (kind, model) in models.items()}
    paths = {path: {"post": {"requestBody": {"content": content}}} for path, content in contents.items()}
    return {"paths": paths, "components": {"schemas": schemas["$defs"]}}


_STYLE = "body{font:16px/1.4 sans-serif;margin:2em;max-width:70em}td{padding:.2em 1em .2em 0;vertical-align:top}"


def docs_page(description: dict[str, Any]) -> str:
    """The result of ``FastAPI.openapi`` as HTML without scripts, which loads nothing from elsewhere."""
    info, schemas = description["info"], description["components"]["schemas"]
    title = escape(f"{info['title']} {info['version']}")
    routes = "".join(
        _describe_route(f"{method.upper()} {path}", route, schemas)
        for path, methods in description["paths"].items()
        for method, route in methods.items()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{escape(info['description'])} For programs: <a href=openapi.json>openapi.json</a>.</p>"
        f"{routes}</html>"
    )


def _describe_route(name: str, route: dict[str, Any], schemas: dict[str, Any]) -> str:
    page = f"<h2>{escape(name)}</h2><p>{escape(route.get('description', ''))}</p>"
    if "requestBody" in route:
        [body] = route["requestBody"]["content"].values()
        schema = body["schema"]
        if "$ref" in schema:  # JSON; the schema of a form stands in its place
            schema = schemas[schema["$ref"].rpartition("/")[2]]
        required = schema.get("required", [])
        rows = [
            (name, _type_name(field), ("Required. " if name in required else "") + field.get("description", ""))
            for name, field in schema["properties"].items()
        ]
        page += _details("Fields", rows)
    return page + _details("Responses", [(code, answer["description"]) for code, answer in route["responses"].items()])


def _type_name(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type_name(kind) for kind in field["anyOf"] if kind.get("type") != "null"))
    if "enum" in field or "const" in field:
        return ", ".join(map(str, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        return f"list of {_type_name(field.get('items', {}))}"
    return str(field.get("type", "any"))


def _details(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    table = "".join(f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in rows)
    return f"<details><summary>{title}</summary><table>{table}</table></details>"


class HttpProtocol(H11Protocol):
    """uvicorn's protocol of one connection, with a limit on the time that the head of a request may take.

    Invariant: while the server answers no request, the client has ``header_timeout`` seconds for a whole head, counted
    from its first byte (on a new connection: from the connection's begin), or for the rest of a body whose request was
    refused. Between requests uvicorn's ``timeout_keep_alive`` holds.
    """

    def __init__(self, *args: Any, header_timeout: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timeout = header_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        #: Set when the connection has ended.
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        self.closed.set()

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None:
            # uvicorn's own way to end an idle connection.
            self._head_timer = self.loop.call_later(self._header_timeout, self.timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
