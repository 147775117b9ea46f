"""The page ``/docs``: the OpenAPI description as plain HTML, without scripts, which loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

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
