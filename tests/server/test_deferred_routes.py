"""Routes that are made at the first request for one of them."""

from __future__ import annotations

import asyncio

import httpx
from fastapi import FastAPI

from octavo.server.http.errors import DeferredRoutes, make_deferred


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
