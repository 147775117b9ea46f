"""The application: the table of its routes, its middleware, and the description of both. Read ``api_routes`` first."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.config.server_options import FORM_BYTES, ServerOptions
from octavo.server.answer_format import RELAXED_HEADER
from octavo.server.http.errors import handle_errors
from octavo.server.http.middleware import (
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    RequestMiddleware,
    SameOriginMiddleware,
    host_rule,
    make_budget,
)
from octavo.server.http.routing import ApiRoute
from octavo.server.metrics import Metrics
from octavo.server.page import UiMiddleware, engine_events
from octavo.server.state import ServerState


def api_routes(options: ServerOptions) -> list[ApiRoute]:
    """The routes of the API, in the order of their description."""
    openai, anthropic, vectors = (partial(ApiRoute, tag=tag) for tag in ("OpenAI", "Anthropic", "Vectors"))
    llama, cohere, tokens, server = (partial(ApiRoute, tag=tag) for tag in ("llama.cpp", "Cohere", "Tokens", "Server"))
    ollama = partial(ApiRoute, tag="Ollama", error="ollama.protocol:OllamaError")
    not_there = {404: "There is no such model, or it is not served here."}
    no_change = {403: "A web page, or the server has no allow_pull.", **not_there}
    one = "/v1/responses/{response_id}"
    missing = {400: "A parameter is wrong.", 404: "The response is not known, or forgotten."}
    unavailable = {503: "The engine has died, is started again or asleep, or the server shuts down."}
    no_adapter = {403: "A web page.", 404: "There is no such adapter.", 409: "The name is taken, or in use."}
    routes = [
        openai("POST", "/v1/completions", "openai.completions:create_completion", "openai.protocol:Completion",
               stream=True),
        openai("POST", "/v1/chat/completions", "openai.completions:create_chat_completion",
               "openai.protocol:ChatCompletion", stream=True),
        openai("POST", "/v1/chat/completions/batch", "openai.completions:create_batched_chats",
               "openai.protocol:ChatCompletion", task="generate"),
        openai("GET", "/v1/models", "status_routes:list_models", of_server=True),
        # A model's name may contain a slash.
        openai("GET", "/v1/models/{model:path}", "status_routes:retrieve_model",
               errors={404: "The model does not exist here."}, of_server=True),
        openai("POST", "/v1/responses", "openai.responses:create_response", "openai.response_protocol:ResponseObject",
               stream=True),
        openai("GET", one, "openai.responses:retrieve_response", "openai.response_protocol:ResponseObject",
               errors=missing, of_server=True),
        openai("DELETE", one, "openai.responses:delete_response", errors=missing, of_server=True),
        openai("GET", f"{one}/input_items", "openai.response_request:list_input_items", errors=missing, of_server=True),
        openai("POST", f"{one}/cancel", "openai.responses:cancel_response", "openai.response_protocol:ResponseObject",
               errors=missing, of_server=True),
        openai("POST", "/v1/responses/input_tokens", "openai.response_request:count_input_tokens"),
        openai("POST", "/v1/embeddings", "pooling:create_embeddings", "EmbeddingList", task="embed"),
        openai("POST", "/v1/audio/transcriptions", "audio:create_transcription", form="TranscriptionRequest",
               task="transcribe"),
        openai("POST", "/v1/audio/translations", "audio:create_translation", form="TranslationRequest",
               task="transcribe"),
        anthropic("POST", "/v1/messages", "anthropic:create_message", "MessageObject", stream=True,
                  error="AnthropicError"),
        anthropic("POST", "/v1/messages/count_tokens", "anthropic:count_tokens", error="AnthropicError"),
        cohere("POST", "/v2/chat", "cohere:chat", "CohereChat", stream=True),
        vectors("POST", "/v2/embed", "cohere:embed", "CohereEmbeddings", task="embed"),
        vectors("POST", "/embed", "pooling:embed_texts", "list[list[float]]", task="embed"),
        *(vectors("POST", path, "pooling:rerank", "Ranking", task="score") for path in ("/v1/rerank", "/v2/rerank")),
        vectors("POST", "/rerank", "pooling:rerank_texts", "Ranking | list[RankedText]", task="score"),
        *(vectors("POST", path, "pooling:score", "ScoreList", task="score") for path in ("/v1/score", "/score")),
        vectors("POST", "/classify", "pooling:classify", "ClassificationList", task="classify"),
        # A field of the request names the task.
        vectors("POST", "/pooling", "pooling:pool", "PooledList", is_busy=True),
        *(llama("POST", path, "llamacpp:complete", "LlamaCompletion | list[LlamaCompletion]", stream=True)
          for path in ("/completion", "/completions")),
        llama("POST", "/infill", "llamacpp:infill", "LlamaCompletion", stream=True),
        *(llama("POST", path, "pooling:embed", "list[LlamaVector]", task="embed")
          for path in ("/embedding", "/embeddings")),
        llama("POST", "/apply-template", "llamacpp:apply_template"),
        llama("GET", "/props", "llamacpp:props"),
        llama("GET", "/slots", "llamacpp:slots"),
        ollama("POST", "/api/chat", "ollama.routes:chat", "ollama.protocol:ChatAnswer", is_busy=True, lines=True),
        ollama("POST", "/api/generate", "ollama.routes:generate", "ollama.protocol:GenerateAnswer", is_busy=True,
               lines=True),
        ollama("POST", "/api/embed", "ollama.routes:embed", "ollama.protocol:Embeddings", is_busy=True),
        ollama("POST", "/api/embeddings", "ollama.routes:embeddings", "ollama.protocol:OneEmbedding", is_busy=True),
        ollama("GET", "/api/tags", "ollama.routes:tags", of_server=True),
        ollama("GET", "/api/ps", "ollama.routes:ps", of_server=True),
        ollama("POST", "/api/show", "ollama.routes:show", errors=not_there, of_server=True),
        ollama("POST", "/api/pull", "ollama.routes:pull", "ollama.protocol:Progress", lines=True, is_operators=True,
               of_server=True,
               errors={**no_change, 429: "Too many downloads run.", 502: "The download failed."}),
        ollama("DELETE", "/api/delete", "ollama.routes:delete", errors=no_change, is_operators=True, of_server=True),
        ollama("POST", "/api/copy", "ollama.routes:copy", errors=no_change, is_operators=True, of_server=True),
        *(ollama("POST", path, f"ollama.routes:{name}", "ollama.protocol:OllamaError", errors={400: "Always."},
                 of_server=True)
          for path, name in (
              ("/api/create", "create"), ("/api/blobs/{digest}", "upload_blob"), ("/api/push", "push"))),
        ollama("GET", "/api/version", "ollama.routes:version", of_server=True),
        tokens("GET", "/tokenizer_info", "status_routes:tokenizer_info"),
        tokens("POST", "/tokenize", "status_routes:tokenize"),
        tokens("POST", "/detokenize", "status_routes:detokenize"),
        server("GET", "/", "status_routes:index", of_server=True),
        server("GET", "/health", "status_routes:health", errors=unavailable, of_server=True),
        server("GET", "/version", "status_routes:version", of_server=True),
        server("GET", "/metrics", "status_routes:metrics", media_type="text/plain", of_server=True),
        server("POST", "/reset_prefix_cache", "status_routes:reset_prefix_cache", errors=unavailable),
    ]  # fmt: skip
    if options.enable_admin_routes:
        one_of_several = {
            403: "A web page.",
            404: "There is no such model.",
            409: "It is in use or pinned.",
        }
        refused = {400: "No such level or replica.", 403: "A web page.", 409: "Not now.", **unavailable}
        seen, changed = partial(server, errors=refused), partial(server, errors=refused, is_operators=True)
        routes += [
            changed("POST", "/sleep", "status_routes:sleep"),
            changed("POST", "/wake_up", "status_routes:wake_up"),
            seen("GET", "/is_sleeping", "status_routes:is_sleeping"),
            seen("GET", "/admin/replicas", "status_routes:replicas"),
            changed("POST", "/admin/drain", "status_routes:drain"),
            changed("POST", "/admin/undrain", "status_routes:undrain"),
            changed("POST", "/admin/restart", "status_routes:restart"),
            changed("POST", "/v1/cache/pin", "cache_routes:pin"),
            changed("POST", "/v1/cache/release", "cache_routes:release"),
            seen("GET", "/v1/cache", "cache_routes:list_cache"),
            changed("POST", "/v1/models/load", "status_routes:load_model", errors=one_of_several, of_server=True),
            changed("POST", "/v1/models/unload", "status_routes:unload_model", errors=one_of_several, of_server=True),
        ]
    if options.enable_lora_routes:
        changed = partial(server, errors=no_adapter, is_operators=True)
        routes += [
            changed("POST", "/v1/load_lora_adapter", "status_routes:load_adapter"),
            changed("POST", "/v1/unload_lora_adapter", "status_routes:unload_adapter"),
        ]
    return routes


def make_app(service: ServerState, api_keys: Sequence[str] = ()) -> Starlette:
    """The application for one engine; without ``api_keys`` no request needs authorization."""
    app = make_routes(service.options, service.metrics, api_keys)
    app.state.service = service
    return app


def make_routes(options: ServerOptions, metrics: Metrics, api_keys: Sequence[str] = ()) -> Starlette:
    """The application without ``app.state.service``, which the caller adds once the engine has loaded."""
    routes, has_keys = api_routes(options), bool(api_keys)
    has_page = options.ui and (options.is_local or has_keys)
    app = Starlette(routes=[*routes, Route("/engine/events", engine_events)])
    app.router.redirect_slashes = False
    app.state.has_keys, app.state.options, app.state.models = has_keys, options, None
    app.routes.append(Route("/openapi.json", _description(app, "as_json", "application/json")))
    app.routes.append(Route("/docs", _description(app, "as_page", "text/html")))
    if has_page:
        app.routes.append(Route("/ui/requests.json", _description(app, "requests_of_page", "application/json")))
    handle_errors(app)
    # The middleware added last is the outermost.
    uploads = {route.path: options.max_audio_bytes + FORM_BYTES for route in routes if route.is_form}
    app.add_middleware(
        BodyLimitMiddleware,
        max_bytes=options.max_body_bytes,
        timeout=options.body_timeout,
        budget=make_budget(options, max(options.max_body_bytes, *uploads.values())),
        by_path=uploads,
    )
    if api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=api_keys)
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
    app.add_middleware(
        SameOriginMiddleware,
        is_own_host=host_rule(options, has_keys=has_keys),
        origins=options.origins,
        operator_paths=[route.path for route in routes if route.is_operators],
    )
    app.add_middleware(RequestMiddleware, metrics=metrics, log_requests=options.log_requests)
    return app


def load_routes(app: Starlette, tasks: Sequence[str]) -> None:
    """Imports the modules of the routes for these tasks now, so that no request waits for them."""
    for route in app.routes:
        if isinstance(route, ApiRoute) and route.task in tasks:
            _ = route.target


def _description(app: Starlette, make: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a text that a function of ``octavo.server.http.openapi`` makes once, at the first request."""
    lock, texts = asyncio.Lock(), list[str]()

    def describe() -> str:
        text: str = getattr(importlib.import_module("octavo.server.http.openapi"), make)(app)
        return text

    async def respond(request: Request) -> Response:
        async with lock:
            if not texts:
                texts.append(await asyncio.to_thread(describe))
        return Response(texts[0], media_type=media_type)

    return respond
