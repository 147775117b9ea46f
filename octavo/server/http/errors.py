"""Errors as clients see them: OpenAI's format, an HTTP status, no internal details."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

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

if TYPE_CHECKING:
    from octavo.server.chat import Chat, ChoiceEvents


# Routes that are made when the first request for one of them comes, so that a server that gets none starts sooner.


class DeferredRoutes(BaseRoute):
    """Stands for routes of an application until they are made; then it is gone."""

    def __init__(self, app: FastAPI, paths: Sequence[str], make: Callable[[], None]) -> None:
        """``make`` adds the routes with these ``paths`` to the application."""
        self.paths = frozenset(paths)
        self._app, self._make = app, make
        self._lock = threading.Lock()
        app.router.routes.append(self)

    @property
    def _is_waiting(self) -> bool:
        return self in self._app.router.routes

    def make(self) -> None:
        """Makes the routes, unless that is done; from any thread."""
        with self._lock:
            if self._is_waiting:
                self._make()
                self._app.router.routes.remove(self)  # until here it stands before them

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See ``BaseRoute``."""
        is_one = scope["type"] == "http" and scope["path"] in self.paths
        return (Match.FULL if is_one else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Makes the routes beside the event loop, which takes 0.1 s, and passes the request on to its own."""
        if self._is_waiting:
            await asyncio.to_thread(self.make)
        await self._app.router(scope, receive, send)


def make_deferred(app: FastAPI) -> None:
    """Makes all routes that are not made yet."""
    for route in [route for route in app.router.routes if isinstance(route, DeferredRoutes)]:
        route.make()


logger = logging.getLogger("octavo.server")


class ApiError(OctavoError):
    """An error response. ``kind`` is the ``type`` of the OpenAI API."""

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
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``"""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        # In ASCII: a client's text quoted in the message may hold characters that UTF-8 cannot encode.
        return json.dumps({"error": error}).encode()

    def response(self, scope: Scope) -> Response:
        """The HTTP response to a request, in the format of its route."""
        of_anthropic = scope["path"].startswith("/v1/messages")
        body = anthropic_error(self) if of_anthropic else self.body()
        return Response(body, self.status, self.headers, "application/json")


#: Status -> Anthropic's type of error; others are "api_error".
_ANTHROPIC_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "invalid_request_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def anthropic_error(error: ApiError) -> bytes:
    """An error in the format of Anthropic's API; the name of a field is part of the message there."""
    kind = _ANTHROPIC_KINDS.get(error.status, "api_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id.get()}
    return json.dumps(body).encode()


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """The error for the value of a field."""
    return ApiError(400, message, param=param, code=code)


def wrong(where: str, message: str, code: str = "invalid_value") -> ApiError:
    """The error for a value at a place such as ``input[0].content``, whose first part is the field's name."""
    return invalid(re.split(r"[.[]", where, maxsplit=1)[0], f"{where}: {message}", code)


def unsupported(param: str, message: str) -> ApiError:
    """The error for a field that this server does not support."""
    return invalid(param, message, "unsupported_parameter")


def server_error(
    status: int, message: str, code: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> ApiError:
    """The error for what is not the client's fault."""
    return ApiError(status, message, kind="server_error", param=param, code=code, headers=headers)


def as_api_error(error: BaseException) -> ApiError:
    """The response to any exception. Details of internal errors go to the log only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (InvalidRequestError, TokenizerError)):
        return invalid(_param(str(error)), str(error))
    if isinstance(error, AdapterError):
        return _adapter_error(error)
    if isinstance(error, ClientLimitError):
        headers = {"Retry-After": str(error.retry_after)}
        return ApiError(429, str(error), kind="rate_limit_error", code="client_limit", headers=headers)
    if isinstance(error, SandboxError):
        return server_error(503, str(error), "sandbox_failed", headers={"Retry-After": "1"})
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return _http_error(error)
    if isinstance(error, EngineDeadError):
        return server_error(503, "the engine has stopped; the server will end", "engine_dead")
    if isinstance(error, EngineStateError):
        return server_error(503, str(error), "engine_asleep")
    if isinstance(error, TimeoutError):
        message = "the request took longer than this server allows (request_timeout)"
        return server_error(503, message, "request_timeout")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has more under this request id", kind="server_error")


def handle_errors(app: FastAPI) -> None:
    """Registers handlers that turn every error into a response of this format."""

    paths = [path for route in app.routes if (path := getattr(route, "path", None)) is not None]
    paths += [path for route in app.routes if isinstance(route, DeferredRoutes) for path in route.paths]

    async def respond(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            return _nothing_at(request.url.path, paths).response(request.scope)
        return as_api_error(error).response(request.scope)

    for kind in (OctavoError, TimeoutError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, respond)


#: Beginnings of addresses that other servers have -> what this one has instead.
_HEALTH = (
    "the address for probes is /health: 200 when requests are answered; /version answers while the server drains, too"
)
_STATE = "there are no conversations: /v1/responses goes on with an answer by previous_response_id"
_ELSEWHERE = {
    **dict.fromkeys(("/ping", "/ready", "/live", "/healthz", "/alive", "/startup", "/status", "/v1/health"), _HEALTH),
    **dict.fromkeys(("/v1/conversations", "/v1/threads", "/v1/assistants"), _STATE),
    "/v1/chat/completions/": "chats are not stored: responses are, at /v1/responses",
    "/v1/complete/": "the addresses for text are /v1/messages and /v1/completions",
    "/v1/embed/": "the address for vectors is /v1/embeddings, or /v2/embed in Cohere's form",
    "/v1/chat/": "the address for chats is /v1/chat/completions, or /v2/chat in Cohere's form",
    "/v1/engines": "the served models are listed at /v1/models",
    "/invocations": "the address for chats is /v1/chat/completions",
    "/embed": "the addresses for vectors are /v1/embeddings and /embed, for each token /pooling",
    "/info": "the served model is described at /v1/models, the server at /version",
    "/get_": "the served model is described at /v1/models, the server at /version",
    "/server_info": "the served model is described at /v1/models, the server at /version",
    "/predict": "the address for class scores is /classify",
    "/v1/audio": "this model reads and writes text only",
    "/v1/images": "this model reads and writes text only",
    "/v1/files": "batches of requests run with 'octavo batch FILE'",
    "/v1/batches": "batches of requests run with 'octavo batch FILE'",
    "/v1/moderations": "there is no moderation",
    "/api/": "Ollama's API is not served; OpenAI's is, at /v1/chat/completions, and Anthropic's, at /v1/messages",
    "/generate": "the address for text is /v1/completions",
}


def _nothing_at(path: str, paths: Sequence[str]) -> ApiError:
    """The error for an address that does not exist: what this server has instead."""
    known = path.rstrip("/")
    hint: str | None = None
    if known != path and (known in paths or f"/v1{known}" in paths):
        hint = f"without the slash at its end it is {known if known in paths else f'/v1{known}'}"
    else:
        # With a slash at its end each is an address of its own, and not the beginning of a longer word.
        hint = next((hint for begin, hint in _ELSEWHERE.items() if f"{path}/".startswith(begin)), None)
    if hint is None:
        # With or without the version, which clients add to the base address or do not.
        near = [address for address in (f"/v1{path}", path.removeprefix("/v1")) if address in paths]
        near += difflib.get_close_matches(path, paths, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "/docs lists all addresses"
    message = f"there is nothing at this address ({path[:100]}); {hint}"
    return ApiError(404, message, code="unknown_address")


def _param(message: str) -> str | None:
    """Messages about a parameter begin with its name."""
    match = re.match(r"([a-z_]+)(\.[a-z_]+|\[[^\]]*\])*(:? |$)", message)
    name = match.group(1) if match else ""
    name = _OTHER_NAMES.get(name, name)
    return name if "_" in name or name in _PLAIN_NAMES else None


#: Fields whose name over HTTP is another.
_OTHER_NAMES = {"extra_args": "vllm_xargs"}
_PLAIN_NAMES = (
    "n",
    "dimensions",
    "language",
    "messages",
    "priority",
    "prompt",
    "seed",
    "stop",
    "suffix",
    "temperature",
    "regex",
    "grammar",
    "ebnf",
    "tokens",
    "logprobs",
    "tools",
)


def _http_error(error: HTTPException) -> ApiError:
    message = "this address does not take this method" if error.status_code == 405 else str(error.detail)
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    return ApiError(error.status_code, message, kind=kind, headers=error.headers)


def _adapter_error(error: AdapterError) -> ApiError:
    if isinstance(error, AdapterNotFoundError):
        return ApiError(404, str(error), code="adapter_not_found")
    if isinstance(error, AdapterConflictError):
        return ApiError(409, str(error), code="adapter_conflict")
    return invalid(_param(str(error)), str(error), "invalid_adapter")


def _validation_error(error: RequestValidationError) -> ApiError:
    """A parameter of the query that is wrong, or a body that is not read as JSON."""
    first: dict[str, Any] = dict(error.errors()[0])
    where = [str(part) for part in first["loc"]]
    if where[0] == "body":
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        return ApiError(400, message, code="invalid_json")
    return invalid(where[-1], f"{where[-1]}: {first['msg']}")


# Chats of routes whose fields have other names: errors about them are told under these names.


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Tells errors about a chat under a route's names of the fields.

    Args:
        names: fields of a chat to those of the route.

    Raises:
        ApiError: in place of the errors that requests are to blame for.
    """
    try:
        yield
    except (ApiError, InvalidRequestError, TokenizerError) as e:
        raise _renamed(as_api_error(e), names) from None


async def renamed_outputs(chat: Chat, names: Mapping[str, str]) -> AsyncGenerator[ChoiceEvents, None]:
    """The increments of a chat with one choice.

    Raises:
        ApiError: as ``Chat.outputs``, under the route's names.
    """
    with renamed_errors(names):
        async with aclosing(chat.outputs()) as outputs:
            async for [choice] in outputs:
                yield choice


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """In ``param``, and in the message where the name cannot be another word."""
    message = re.sub(r"[a-z]+(_[a-z]+)+", lambda match: names.get(match[0], match[0]), error.message)
    param = None if error.param is None else names.get(error.param, error.param)
    return ApiError(error.status, message, kind=error.kind, param=param, code=error.code, headers=error.headers)
