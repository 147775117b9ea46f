"""The description of the routes: ``/openapi.json``, the excerpt that the page reads, and ``/docs``."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal

from pydantic import TypeAdapter
from starlette.applications import Starlette

from octavo import __version__
from octavo.server.fields import ResponseModel
from octavo.server.http.routing import ApiRoute


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(ResponseModel):
    error: ErrorDetail


#: Descriptions of statuses: of all routes, of those that read a body, and of those whose requests wait in the queue.
_ALWAYS = {401: "No API key, or an unknown one.", 500: "The server failed; its log says more."}
_WITH_BODY = {
    400: "A field is missing, out of range, unknown to this model or not supported.",
    404: "The model does not exist here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body's Content-Encoding is not known.",
    503: "The engine has died, the server shuts down, or the response took too long.",
}
_BUSY = {429: "The queue is full, or the client has taken its share; Retry-After gives the seconds to wait."}
#: Groups of routes.
_TAGS = ("OpenAI", "Anthropic", "Cohere", "Vectors", "llama.cpp", "Ollama", "Tokens", "Server")

#: Paths of the requests that the page makes.
_PAGE = ("/v1/chat/completions", "/v1/completions", "/v1/audio/transcriptions", "/v1/audio/translations")

_STYLE = "body{font:16px/1.4 sans-serif;margin:2em;max-width:70em}td{padding:.2em 1em .2em 0;vertical-align:top}"

Mode = Literal["validation", "serialization"]


def as_json(app: Starlette) -> str:
    return json.dumps(describe(app), ensure_ascii=False)


def requests_of_page(app: Starlette) -> str:
    """The excerpt with the requests that the page makes, as JSON."""
    return json.dumps(
        describe_routes(route for route in app.routes if isinstance(route, ApiRoute) and route.path in _PAGE)
    )


def as_page(app: Starlette) -> str:
    """The description as HTML without scripts, which loads nothing from elsewhere."""
    description = describe(app)
    info, schemas = description["info"], description["components"]["schemas"]
    title = escape(f"{info['title']} {info['version']}")
    routes = "".join(
        _describe_in_html(f"{method.upper()} {path}", route, schemas)
        for path, methods in description["paths"].items()
        for method, route in methods.items()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{escape(info['description'])} For programs: <a href=openapi.json>openapi.json</a>.</p>"
        f"{routes}</html>"
    )


def describe(app: Starlette) -> dict[str, Any]:
    """The OpenAPI description of all routes of an application."""
    keys: dict[str, Any] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    has_keys = app.state.has_keys
    described = describe_routes(route for route in app.routes if isinstance(route, ApiRoute))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "description": "Serves a large language model under the routes of OpenAI's and of Anthropic's API.",
            "license": {"name": "Apache-2.0"},
            "version": __version__,
        },
        "paths": described["paths"],
        "components": {**described["components"], **(keys if has_keys else {})},
        "tags": [{"name": name} for name in _TAGS],
        **({"security": [{"key": []}]} if has_keys else {}),
    }


def describe_routes(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """The members ``paths`` and ``components`` of a description, with these routes only."""
    routes = list(routes)
    kinds: dict[tuple[Any, Mode], TypeAdapter[Any]] = {}
    for route in routes:
        found = (route.target.body, "validation"), (route.answer, "serialization"), (_error(route), "serialization")
        kinds |= {(kind, mode): TypeAdapter(kind) for kind, mode in found if kind is not None}  # type: ignore[misc]
    schemas, shared = TypeAdapter.json_schemas(
        [(kind, mode, adapter) for (kind, mode), adapter in kinds.items()],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path_format, {})[route.method.lower()] = _describe(route, schemas)
    return {"paths": paths, "components": {"schemas": shared.get("$defs", {})}}


def _error(route: ApiRoute) -> Any:
    return route.error or Error


def _describe(route: ApiRoute, schemas: Mapping[tuple[Any, Mode], Any]) -> dict[str, Any]:
    target = route.target
    name = target.call.__name__
    operation: dict[str, Any] = {
        "tags": [route.tag],
        "summary": name.replace("_", " ").title(),
        "description": inspect.getdoc(target.call) or "",
        "operationId": re.sub(r"\W", "_", name + route.path_format) + f"_{route.method.lower()}",
    }
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    body: dict[str, Any] = {}
    if route.is_form:
        from octavo.server.audio import form_schema

        body = {"multipart/form-data": {"schema": form_schema(route.form)}}
    elif target.body is not None:
        body = {"application/json": {"schema": schemas[target.body, "validation"]}}
    if body:
        operation["requestBody"] = {"content": body, "required": True}
    texts = {**_ALWAYS, **(_WITH_BODY if body else {}), **route.errors, **(_BUSY if route.is_busy else {})}
    answers = {route.media_type: {"schema": schemas.get((route.answer, "serialization"), {})}}
    if route.stream:
        answers["text/event-stream"] = {"schema": {}}
    if route.lines:
        answers["application/x-ndjson"] = {"schema": {}}
    error = {"application/json": {"schema": schemas[_error(route), "serialization"]}}
    operation["responses"] = {
        "200": {"description": "Successful Response", "content": answers},
        **{str(status): {"description": text, "content": error} for status, text in sorted(texts.items())},
    }
    return operation


def _parameters(route: ApiRoute) -> list[dict[str, Any]]:
    """Of the path and of the query."""
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.param_convertors
    ]
    if route.target.query is not None:
        schema = route.target.query.model_json_schema()
        required = schema.get("required", [])
        parameters += [
            {"name": name, "in": "query", "required": name in required, "schema": kind}
            for name, kind in schema["properties"].items()
        ]
    return parameters


def _describe_in_html(name: str, route: dict[str, Any], schemas: dict[str, Any]) -> str:
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
