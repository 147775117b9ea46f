"""Routes of the API: what each one takes and answers, and how its function is called."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from octavo.server.fields import ResponseModel
from octavo.server.http.bodies import read_request
from octavo.server.http.errors import invalid
from octavo.server.http.streaming import encode_in_slices

if TYPE_CHECKING:
    from octavo.server.model_set import ModelSet

PACKAGE = "octavo.server"


@dataclass(frozen=True)
class Endpoint:
    """A route's function, and what its annotations say of a request."""

    call: Callable[..., Awaitable[Any]]
    module: ModuleType
    #: Types of its parameters and of its answer.
    hints: Mapping[str, Any]
    #: The model of its parameter ``body``.
    body: type[BaseModel] | None
    #: The model of its parameters that are neither ``body`` nor part of the path.
    query: type[BaseModel] | None


class ApiRoute(Route):
    """A route of the API: a row of the table in ``octavo.server.app``.

    Its function takes the request and, by the names and annotations of its further parameters, the parts of the path,
    the ``body`` and parameters of the query. It returns a ``Response``, or a value that is sent as JSON.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: str | Callable[..., Awaitable[Any]],
        answer: str | None = None,
        *,
        tag: str = "",
        stream: bool = False,
        lines: bool = False,
        is_busy: bool = False,
        task: str | None = None,
        errors: Mapping[int, str] | None = None,
        error: str | None = None,
        form: str | None = None,
        media_type: str = "application/json",
        is_operators: bool = False,
        of_server: bool = False,
    ) -> None:
        """``endpoint``: the function, or ``module:function``, which is imported at the first request.

        ``answer``, ``error`` and ``form``: types by their names in the function's module, or ``module:type``: of the
        response (by default the function's return type), of an error, and of a multipart body that the function reads.
        ``stream``: it generates, and can answer by events. ``lines``: it can answer by JSON lines. ``task``: what the
        model must be able to do. ``is_busy``: its requests wait in the queue, as those with a task do. ``errors``:
        descriptions of further statuses. ``is_operators``: it changes the server, so pages of other origins are refused
        unless allowed by name. ``of_server``: with several models, its requests are about none of them, or about all.
        ``tag`` and ``media_type``, that of the response, are for the description.
        """
        super().__init__(path, self._respond, methods=[method], name=path)
        self.method, self._declared, self._answer = method, endpoint, answer
        self.tag, self.stream, self.task = tag, stream, "generate" if stream else task
        self.lines = lines
        self.is_busy = is_busy or self.task is not None
        self.errors, self._error, self._form = errors or {}, error, form
        self.media_type, self.is_operators, self.of_server = media_type, is_operators, of_server

    @cached_property
    def target(self) -> Endpoint:
        """The function, whose module is imported now if it was not; may be called from any thread."""
        if callable(self._declared):
            call, module = self._declared, importlib.import_module(self._declared.__module__)
        else:
            path, _, name = self._declared.partition(":")
            module = importlib.import_module(f"{PACKAGE}.{path}")
            call = getattr(module, name)
        hints = get_type_hints(call, include_extras=True)
        query: dict[str, Any] = {
            name: (hints[name], ... if parameter.default is inspect.Parameter.empty else parameter.default)
            for name, parameter in inspect.signature(call).parameters.items()
            if name not in ("request", "body", *self.param_convertors)
        }
        config = ConfigDict(protected_namespaces=())
        model = create_model(f"{call.__name__}_query", __config__=config, **query) if query else None
        return Endpoint(call, module, hints, hints.get("body"), model)

    @property
    def is_form(self) -> bool:
        """Whether the body is a multipart form."""
        return self._form is not None

    @property
    def answer(self) -> Any:
        """The type of the response's JSON; None: it is not described."""
        kind = self._type(self._answer) if self._answer else self.target.hints["return"]
        return None if isinstance(kind, type) and issubclass(kind, Response) else kind

    @property
    def error(self) -> Any:
        return self._error and self._type(self._error)

    @property
    def form(self) -> Any:
        return self._form and self._type(self._form)

    def _type(self, declared: str) -> Any:
        path, _, names = declared.rpartition(":")
        module = importlib.import_module(f"{PACKAGE}.{path}") if path else self.target.module
        return eval(names, vars(module))  # a text of the table, such as "Ranking | list[RankedText]"

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return match, {**child_scope, "route": self}  # for the metrics of requests

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        models: ModelSet | None = getattr(scope["app"].state, "models", None)
        if models is None or self.of_server or scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
        else:  # an operator's call is about an engine that runs
            await models.answer(scope, receive, send, super().handle, loads=not self.is_operators)

    async def _respond(self, request: Request) -> Response:
        if "target" not in vars(self):
            await asyncio.to_thread(lambda: self.target)
        target, arguments = self.target, dict(request.path_params)
        if target.query is not None:
            arguments |= read_query(target.query, request.query_params)
        if target.body is not None:
            arguments["body"] = await read_request(request, target.body, self.task)
        answer = await target.call(request, **arguments)
        if isinstance(answer, Response):
            return answer
        body = answer.encode() if isinstance(answer, ResponseModel) else encode_in_slices(answer)
        return Response(body, media_type="application/json")


def read_query(model: type[BaseModel], params: QueryParams) -> dict[str, Any]:
    """The parameters of an address, whose texts are read as the numbers or booleans that the model has."""
    values: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        is_list = any(get_origin(kind) is list for kind in (field.annotation, *get_args(field.annotation)))
        if name in params:
            values[name] = params.getlist(name) if is_list else params[name]
    try:
        return dict(model.model_validate(values))
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise invalid(name, f"{name}: {first['msg']}") from None
