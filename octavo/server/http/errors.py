"""Errors as clients see them: OpenAI's format, an HTTP status, no internal details."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from octavo.core.errors import (
    AdapterConflictError,
    AdapterError,
    AdapterNotFoundError,
    ClientLimitError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    OctavoError,
    SandboxError,
    TokenizerError,
)
from octavo.server.logging import request_id

logger = logging.getLogger("octavo.server")


class ApiError(OctavoError):
    """An error response; ``kind`` is the ``type`` of OpenAI's API."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``"""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        # In ASCII: a client's text quoted in the message may hold characters that UTF-8 cannot encode.
        return json.dumps({"error": error}).encode()

    def response(self, scope: Scope) -> Response:
        if scope["path"].startswith(OLLAMA_PATH):
            return Response(ollama_error(self), self.status, self.headers, "application/json")
        if not scope["path"].startswith("/v1/messages"):
            return Response(self.body(), self.status, self.headers, "application/json")
        return Response(anthropic_error(self), self.status, self.headers, "application/json")


#: The beginning of the addresses of Ollama's API.
OLLAMA_PATH = "/api/"
#: Status -> Anthropic's type of error; others are "api_error".
_ANTHROPIC_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "invalid_request_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


#: Paths of the engine -> fields over HTTP, where the names differ.
_HTTP_NAMES = {
    "extra_args": "vllm_xargs",
    "encoder_prompt": "prompt.encoder_prompt",
    "decoder_prompt": "prompt.decoder_prompt",
}

#: The error for a body that is not an object or not declared as JSON.
NOT_AN_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"


def anthropic_error(error: ApiError) -> bytes:
    """The error in the format of Anthropic's API, which names a field in the message only."""
    kind = _ANTHROPIC_KINDS.get(error.status, "api_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id.get()}
    return json.dumps(body).encode()


def ollama_error(error: ApiError) -> bytes:
    """The error in the format of Ollama's API, which is its message alone."""
    return json.dumps({"error": error.message}).encode()


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """The error for a value of the field ``param``."""
    return ApiError(400, message, param=param, code=code)


#: The code of errors about fields that are not supported.
UNSUPPORTED = "unsupported_parameter"


def invalid_at(path: str, problem: str, code: str = "invalid_value", *, got: object = ...) -> InvalidRequestError:
    """The error for a value at a path such as ``input[0].content``."""
    return InvalidRequestError(problem, path=path, got=got, kind=code)


def unsupported(path: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, path=path, kind=UNSUPPORTED)


def server_error(
    status: int, message: str, code: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> ApiError:
    return ApiError(status, message, kind="server_error", param=param, code=code, headers=headers)


def as_api_error(error: BaseException) -> ApiError:
    """The response to any exception; details of internal errors are only logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        error = error.renamed(_HTTP_NAMES)
        return invalid(error.field, str(error), error.kind)
    if isinstance(error, TokenizerError):
        return invalid(None, str(error))
    if isinstance(error, AdapterNotFoundError):
        return ApiError(404, str(error), code="adapter_not_found")
    if isinstance(error, AdapterConflictError):
        return ApiError(409, str(error), code="adapter_conflict")
    if isinstance(error, AdapterError):
        return invalid(error.field, str(error), "invalid_adapter")
    if isinstance(error, ClientLimitError):
        headers = {"Retry-After": str(error.retry_after)}
        return ApiError(429, str(error), kind="rate_limit_error", code="client_limit", headers=headers)
    if isinstance(error, SandboxError):
        return server_error(503, str(error), "sandbox_failed", headers={"Retry-After": "1"})
    if isinstance(error, HTTPException):
        message = "this address does not take this method" if error.status_code == 405 else str(error.detail)
        kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
        return ApiError(error.status_code, message, kind=kind, headers=error.headers)
    if isinstance(error, EngineDeadError):
        return server_error(503, "the engine has stopped; try again later", "engine_dead")
    if isinstance(error, EngineStateError):
        return server_error(503, str(error), "engine_asleep")
    if isinstance(error, TimeoutError):
        message = "the request took longer than this server allows (request_timeout)"
        return server_error(503, message, "request_timeout")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has more under this request id", kind="server_error")


def handle_errors(app: Starlette) -> None:
    paths = [route.path for route in app.routes if isinstance(route, Route)]

    async def respond(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            return _unknown_address(request.url.path, paths).response(request.scope)
        return as_api_error(error).response(request.scope)

    for kind in (OctavoError, TimeoutError, HTTPException):
        app.add_exception_handler(kind, respond)


_HEALTH = (
    "the address for probes is /health: 200 when requests are answered; /version answers while the server drains, too"
)
_STATE = "there are no conversations: /v1/responses goes on with an answer by previous_response_id"
_MODEL = "the served model is described at /v1/models, the server at /version"
#: Beginnings of other servers' addresses -> hint about this server's.
_OTHER_ADDRESSES = {
    **dict.fromkeys(("/ping", "/ready", "/live", "/healthz", "/alive", "/startup", "/status", "/v1/health"), _HEALTH),
    **dict.fromkeys(("/v1/conversations", "/v1/threads", "/v1/assistants"), _STATE),
    "/v1/chat/completions/": "chats are not stored: responses are, at /v1/responses",
    "/v1/complete/": "the addresses for text are /v1/messages and /v1/completions",
    "/v1/embed/": "the address for vectors is /v1/embeddings, or /v2/embed in Cohere's form",
    "/v1/chat/": "the address for chats is /v1/chat/completions, or /v2/chat in Cohere's form",
    "/v1/engines": "the served models are listed at /v1/models",
    "/invocations": "the address for chats is /v1/chat/completions",
    "/embed": "the addresses for vectors are /v1/embeddings and /embed, for each token /pooling",
    **dict.fromkeys(("/info", "/get_", "/server_info"), _MODEL),
    "/predict": "the address for class scores is /classify",
    **dict.fromkeys(("/v1/audio", "/v1/images"), "this model reads and writes text only"),
    **dict.fromkeys(("/v1/files", "/v1/batches"), "batches of requests run with 'octavo batch FILE'"),
    "/v1/moderations": "there is no moderation",
    OLLAMA_PATH: "of Ollama's API there are chat, generate, embed, tags, show, ps, pull, delete, copy and version",
    "/generate": "the address for text is /v1/completions",
}


def _unknown_address(path: str, paths: Sequence[str]) -> ApiError:
    """The error for an address that does not exist, with the address that the client may have meant."""
    bare = path.rstrip("/")
    hint: str | None = None
    if bare != path and (bare in paths or f"/v1{bare}" in paths):
        hint = f"without the slash at its end it is {bare if bare in paths else f'/v1{bare}'}"
    else:
        # With a slash at its end no beginning matches the start of a longer word.
        hint = next((hint for begin, hint in _OTHER_ADDRESSES.items() if f"{path}/".startswith(begin)), None)
    if hint is None:
        # Clients may or may not add the version to the base address.
        near = [address for address in (f"/v1{path}", path.removeprefix("/v1")) if address in paths]
        near += difflib.get_close_matches(path, paths, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "/docs lists all addresses"
    message = f"there is nothing at this address ({path[:100]}); {hint}"
    return ApiError(404, message, code="unknown_address")


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the fields in errors (``InvalidRequestError.renamed``) for a route that has other names for them."""
    try:
        yield
    except InvalidRequestError as e:
        raise e.renamed(names) from None
