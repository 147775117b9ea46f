"""Descriptions of the routes: all of them (``/openapi.json``, ``/docs``), and the requests that the page makes.

To describe all routes builds the models of all requests, which takes a second of processor time: it is done once, when
somebody asks, and in a thread. The page does not ask: the settings that it shows are those of a few requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from octavo.server.docs_page import docs_page
from octavo.server.protocol import ChatCompletionRequest, CompletionRequest

#: A single thread: descriptions are made one after the other.
_describer = ThreadPoolExecutor(1, thread_name_prefix="octavo-describe")


class _MadeOnce:
    """A text that is made in a thread when it is first asked for; all who ask meanwhile wait for the same."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._made: asyncio.Future[bytes] | None = None

    async def get(self) -> bytes:
        """The text.

        Raises:
            Exception: it could not be made; the next who asks tries again.
        """
        if self._made is None:
            self._made = asyncio.get_running_loop().run_in_executor(_describer, self._make)
        made = self._made
        try:
            return await asyncio.shield(made)
        except Exception:
            self._made = None
            raise


def add_description_routes(app: FastAPI, *, page: bool) -> None:
    """Adds ``/openapi.json``, ``/docs`` and, for the ``page``, ``/ui/requests.json``."""
    openapi = _MadeOnce(lambda: json.dumps(app.openapi(), ensure_ascii=False).encode())
    docs = _MadeOnce(lambda: docs_page(app.openapi()).encode())
    requests = _MadeOnce(lambda: json.dumps(describe_requests()).encode())

    async def get_openapi(request: Request) -> Response:
        return Response(await openapi.get(), media_type="application/json")

    async def get_docs(request: Request) -> Response:
        return HTMLResponse(await docs.get())

    async def get_requests(request: Request) -> Response:
        return Response(await requests.get(), media_type="application/json")

    app.add_route("/openapi.json", get_openapi, include_in_schema=False)
    app.add_route("/docs", get_docs, include_in_schema=False)
    if page:
        app.add_route("/ui/requests.json", get_requests, include_in_schema=False)


def describe_requests() -> dict[str, Any]:
    """The requests of the page: the part of ``/openapi.json`` that has their fields."""
    from octavo.server.audio.audio_fields import TranscriptionRequest, TranslationRequest

    models: dict[str, tuple[str, type[BaseModel]]] = {
        "/v1/chat/completions": ("application/json", ChatCompletionRequest),
        "/v1/completions": ("application/json", CompletionRequest),
        "/v1/audio/transcriptions": ("multipart/form-data", TranscriptionRequest),
        "/v1/audio/translations": ("multipart/form-data", TranslationRequest),
    }
    given = [(model, "validation") for _, model in models.values()]
    named, schemas = models_json_schema(given, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    contents = {path: {kind: {"schema": named[model, "validation"]}} for path, (kind, model) in models.items()}
    paths = {path: {"post": {"requestBody": {"content": content}}} for path, content in contents.items()}
    return {"paths": paths, "components": {"schemas": schemas["$defs"]}}
