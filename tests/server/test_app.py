"""The table of routes, and its descriptions."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from octavo.config.server_options import ServerOptions
from octavo.server import cache_routes, status_routes
from octavo.server import page as ui_files
from octavo.server.app import api_routes, make_routes
from octavo.server.http import openapi
from octavo.server.metrics import Metrics
from tests.server.running_server import Running


def test_the_fields_of_the_page_are_those_of_the_description() -> None:
    app = make_routes(ServerOptions(log_requests=False), Metrics("m", lambda: 0))
    mine, whole = json.loads(openapi.requests_of_page(app)), openapi.describe(app)
    assert mine["paths"].keys() == set(re.findall(r'route: "([^"]+)"', (ui_files.FOLDER / "requests.js").read_text()))
    for path, methods in mine["paths"].items():
        [(kind, content)] = methods["post"]["requestBody"]["content"].items()
        described = resolved(whole, whole["paths"][path]["post"]["requestBody"]["content"][kind]["schema"])
        fields = {name: field for name, field in described["properties"].items() if name != "file"}
        shown = resolved(mine, content["schema"])["properties"]
        shown.pop("file", None)
        assert expanded(mine, shown) == expanded(whole, fields)
    for name in set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(mine))):
        assert mine["components"]["schemas"][name]


def resolved(description: dict[str, Any], schema: dict[str, Any]) -> Any:
    """A schema that may stand elsewhere."""
    return description["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def expanded(description: dict[str, Any], schema: Any) -> Any:
    """A schema with those that it refers to in their places."""
    if isinstance(schema, list):
        return [expanded(description, entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: expanded(description, value) for name, value in resolved(description, schema).items()}


def test_the_page_asks_for_no_description_of_all_routes() -> None:
    asked = [path.name for path in Path(ui_files.FOLDER).glob("*.js") if "openapi.json" in path.read_text()]
    assert asked == []


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
def test_a_description_is_made_once_and_the_event_loop_goes_on(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_routes(ServerOptions(log_requests=False), Metrics("m", lambda: 0))
    made_in: list[str] = []
    describe = openapi.describe

    def slow(app: Starlette) -> dict[str, Any]:
        made_in.append(threading.current_thread().name)
        time.sleep(0.3)
        return describe(app)

    monkeypatch.setattr(openapi, "describe", slow)

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            asked = [asyncio.ensure_future(http.get(path)) for _ in range(3)]
            ticks = 0
            while not all(one.done() for one in asked):
                await asyncio.sleep(0.01)
                ticks += 1
            answers = [one.result() for one in asked]
            assert {answer.status_code for answer in answers} == {200} and len({answer.text for answer in answers}) == 1
            assert ticks >= 5
            assert (await http.get(path)).text == answers[0].text

    asyncio.run(main())
    assert len(made_in) == 1 and made_in[0] != threading.current_thread().name


def test_a_description_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_routes(ServerOptions(log_requests=False), Metrics("m", lambda: 0))
    describe, calls = openapi.describe, list[int]()

    def fails_once(app: Starlette) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return describe(app)

    monkeypatch.setattr(openapi, "describe", fails_once)

    async def main() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            return [(await http.get("/openapi.json")).status_code for _ in range(2)]

    assert asyncio.run(main()) == [500, 200]


def test_without_a_page_its_requests_are_not_described() -> None:
    app = make_routes(ServerOptions(log_requests=False, ui=False), Metrics("m", lambda: 0))

    async def main() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            return (await http.get("/ui/requests.json")).status_code

    assert asyncio.run(main()) == 404


def test_the_docs_name_every_route_and_field_and_load_nothing(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        answer = http.get("/docs")
        description = http.get("/openapi.json").json()
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    page = answer.text
    assert not re.search(r"<(script|link|img|iframe)|\bsrc=|url\(|@import|https?://", page)
    for path, methods in description["paths"].items():
        for method in methods:
            assert f"<h2>{method.upper()} {path}</h2>" in page
    for name in description["components"]["schemas"]["ChatCompletionRequest"]["properties"]:
        assert f"<td>{name}<td>" in page
    assert (
        "<td>prompt<td>string or list of string or list of integer or list of list of integer or EncoderDecoderParts "
        "or list of EncoderDecoderParts<td>Required." in page
    )


def test_every_route_names_a_function_and_types_that_exist() -> None:
    options = ServerOptions(enable_admin_routes=True, enable_lora_routes=True, lora_folder=Path("/"))
    routes = api_routes(options)
    for route in routes:
        assert route.target.call.__doc__ and "request" in inspect.signature(route.target.call).parameters
        assert (route.answer is None) == (route.path in ("/metrics", "/reset_prefix_cache") or route.is_form)
        assert route.error is not None or not route.path.startswith("/v1/messages")
    assert len({(route.method, route.path) for route in routes}) == len(routes)
    # Whoever changes the server does so by POST, and no page may unless it is allowed by name.
    changing = [
        route.path
        for route in routes
        if route.method == "POST" and route.target.module in (status_routes, cache_routes)
    ]
    changing += ["/api/pull", "/api/delete", "/api/copy"]
    assert {route.path for route in routes if route.is_operators} == {*changing} - {
        "/tokenize",
        "/detokenize",
        "/reset_prefix_cache",
    }
