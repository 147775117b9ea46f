"""Descriptions of the routes, and routes that are made at the first request for one of them."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from octavo.config.server_options import ServerOptions
from octavo.server import page as ui_files
from octavo.server.app import DeferredRoutes, describe_requests, make_deferred, make_routes
from octavo.server.metrics import Metrics
from tests.server.running_server import Running


def test_the_fields_of_the_page_are_those_of_the_description() -> None:
    mine = describe_requests()
    whole = make_routes(ServerOptions(log_requests=False), Metrics("m", lambda: 0)).openapi()
    assert mine["paths"].keys() == set(re.findall(r'route: "([^"]+)"', (ui_files.FOLDER / "requests.js").read_text()))
    for path, methods in mine["paths"].items():
        [(kind, content)] = methods["post"]["requestBody"]["content"].items()
        described = resolved(whole, whole["paths"][path]["post"]["requestBody"]["content"][kind]["schema"])
        fields = {name: field for name, field in described["properties"].items() if name != "file"}
        shown = resolved(mine, content["schema"])["properties"]
        texts = [{name: field.get("description") for name, field in one.items()} for one in (shown, fields)]
        assert texts[0] == texts[1]
        for name in ("temperature", "seed", "response_format"):
            assert comparable(mine, shown[name]) == comparable(whole, fields[name])
    for name in set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(mine))):
        assert mine["components"]["schemas"][name]


def resolved(description: dict[str, Any], schema: dict[str, Any]) -> Any:
    """A schema that may stand elsewhere."""
    return description["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def comparable(description: dict[str, Any], schema: Any) -> Any:
    """A schema with those that it refers to, without nulls, which FastAPI leaves out, and bounds as floats."""
    if isinstance(schema, list):
        return [comparable(description, entry) for entry in schema]
    if not isinstance(schema, dict):
        return float(schema) if type(schema) is int else schema
    schema = resolved(description, schema)
    return {name: comparable(description, value) for name, value in schema.items() if value is not None}


def test_the_page_asks_for_no_description_of_all_routes() -> None:
    asked = [path.name for path in Path(ui_files.FOLDER).glob("*.js") if "openapi.json" in path.read_text()]
    assert asked == []


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
def test_a_description_is_made_once_and_the_event_loop_goes_on(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_routes(ServerOptions(log_requests=False), Metrics("m", lambda: 0))
    made_in: list[str] = []
    describe = app.openapi

    def slow() -> dict[str, Any]:
        made_in.append(threading.current_thread().name)
        time.sleep(0.3)
        return describe()

    monkeypatch.setattr(app, "openapi", slow)

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
    describe, calls = app.openapi, list[int]()

    def fails_once() -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return describe()

    monkeypatch.setattr(app, "openapi", fails_once)

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


async def hello() -> str:
    return "hello"


def test_routes_are_made_once_by_the_first_of_several_requests() -> None:
    app, made = FastAPI(), list[str]()

    def make() -> None:
        made.append("made")
        app.add_api_route("/a", hello, methods=["POST"])
        app.add_api_route("/b/{name}", hello)

    DeferredRoutes(app, ["/a"], make)
    app.add_api_route("/other", hello)

    async def send() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
            first = [(await http.get("/other")).status_code]
            assert not made
            answers = await asyncio.gather(*(http.post("/a") for _ in range(5)), http.get("/a"))
            return first + [answer.status_code for answer in answers]

    assert asyncio.run(send()) == [200, 200, 200, 200, 200, 200, 405]
    assert made == ["made"]
    make_deferred(app)
    assert made == ["made"] and not any(isinstance(route, DeferredRoutes) for route in app.router.routes)
