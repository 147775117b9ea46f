"""Routes: when their modules are imported, what they read of an address, and what they send."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pytest
from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.fields import ResponseModel
from octavo.server.http import routing
from octavo.server.http.errors import handle_errors
from octavo.server.http.routing import ApiRoute


class Inner(ResponseModel):
    a: int
    b: int | None = None


class Outer(ResponseModel):
    inner: list[Inner]
    name: str | None = None


async def search(
    request: Request,
    key: str,
    count: Annotated[int, Field(ge=1, le=9)] = 3,
    flag: bool = False,
    order: Literal["up", "down"] = "up",
    tags: list[str] | None = None,
) -> dict[str, Any]:
    return {"key": key, "count": count, "flag": flag, "order": order, "tags": tags}


async def needs(request: Request, number: int) -> Outer:
    return Outer(inner=[Inner(a=number), Inner(a=2, b=None)])


async def listed(request: Request) -> list[Inner]:
    return [Inner(a=1)]


async def whole(request: Request) -> Response:
    return Response(b"whole", media_type="text/plain")


def get(*addresses: str, routes: list[ApiRoute] | None = None) -> list[httpx.Response]:
    app = Starlette(
        routes=routes
        or [
            ApiRoute("GET", "/search/{key}", search),
            ApiRoute("GET", "/needs", needs),
            ApiRoute("GET", "/listed", listed),
            ApiRoute("GET", "/whole", whole),
        ]
    )
    handle_errors(app)

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
            return list(await asyncio.gather(*map(http.get, addresses)))

    return asyncio.run(ask())


def test_parts_of_an_address_become_arguments() -> None:
    plain, full = get("/search/x", "/search/y?count=9&flag=true&order=down&tags=a&tags=b&other=1")
    assert plain.json() == {"key": "x", "count": 3, "flag": False, "order": "up", "tags": None}
    assert full.json() == {"key": "y", "count": 9, "flag": True, "order": "down", "tags": ["a", "b"]}


@pytest.mark.parametrize(
    ("address", "param"),
    [("/search/x?count=0", "count"), ("/search/x?count=a", "count"), ("/search/x?order=left", "order"),
     ("/search/x?flag=perhaps&count=10", "count"), ("/needs", "number"), ("/needs?number=", "number")],
)  # fmt: skip
def test_a_wrong_or_missing_parameter_is_named(address: str, param: str) -> None:
    [answer] = get(address)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and error["message"].startswith(f"{param}: ")


def test_fields_that_were_not_set_are_not_sent() -> None:
    model, models, response = get("/needs?number=1", "/listed", "/whole")
    assert model.json() == {"inner": [{"a": 1}, {"a": 2, "b": None}]} and models.json() == [{"a": 1}]
    assert model.headers["content-type"] == "application/json"
    assert response.text == "whole"


def test_other_methods_and_addresses_are_refused() -> None:
    [answer] = get("/nowhere")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_address"
    [answer] = get("/a", routes=[ApiRoute("POST", "/a", whole)])
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"


def test_a_route_s_module_is_imported_once_by_the_first_of_several_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "within").mkdir()
    (tmp_path / "within" / "rare_routes.py").write_text(
        "import threading, time\nimported_in = threading.current_thread().name\ntime.sleep(0.1)\nrequests = []\n"
        "async def answer(request) -> 'dict[str, int]':\n    requests.append(request)\n"
        "    return {'requests': len(requests)}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(routing, "PACKAGE", "within")
    routes = [ApiRoute("GET", "/rare", "rare_routes:answer")]
    assert "within.rare_routes" not in sys.modules
    try:
        answers = get(*["/rare"] * 5, routes=routes)
        assert sorted(answer.json()["requests"] for answer in answers) == [1, 2, 3, 4, 5]
        assert sys.modules["within.rare_routes"].imported_in != "MainThread"
    finally:
        sys.modules.pop("within.rare_routes", None)
        sys.modules.pop("within", None)
