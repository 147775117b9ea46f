"""The routes ``/embedding`` and ``/embeddings`` of llama.cpp."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.pooling_outputs import Pooled
from octavo.server.api_errors import wrong
from octavo.server.field_marks import refused
from octavo.server.pooling.pooled_fields import Input, PooledTexts
from octavo.server.pooling.pooled_inputs import read_texts
from octavo.server.pooling.pooled_run import PooledRun, pooling_params, results
from octavo.server.pooling.pooling_json import encode_object
from octavo.server.protocol_base import Int, ResponseModel
from octavo.server.service import service_of


class LlamaEmbeddingRequest(PooledTexts):
    """Body of ``/embedding`` and ``/embeddings``."""

    content: Input | None = Field(None, description="Another name of input.")
    embd_normalize: Int | None = Field(
        None, description="2: vectors of length 1; -1: as they are; default: as the model has it."
    )
    encoding_format: Any = refused("/v1/embeddings gives vectors in base64", "float")
    dimensions: Any = refused("/v1/embeddings gives vectors of fewer numbers")


class LlamaVector(ResponseModel):
    """The vector of one input, as the only row of a matrix."""

    index: int
    embedding: list[list[float]]


async def embed(request: Request, body: LlamaEmbeddingRequest) -> Response:
    """The vectors of texts or token ids, one or many."""
    service = service_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    if body.embd_normalize not in (None, 2, -1):
        raise wrong("embd_normalize", f"it must be 2 or -1, not {body.embd_normalize}")
    if body.content is not None:
        if body.input is not None:
            raise wrong("content", "content and input exclude each other")
        body.input = body.content
    if body.embd_normalize is not None:
        body.use_activation = body.embd_normalize == 2
    inputs = await read_texts(service, request, body, named=True)
    run = PooledRun(request, body, model, pooling_params(body, "embed"), inputs, "embd")

    def answer(outputs: list[Pooled]) -> bytes:
        return encode_object([{"index": i, "embedding": [row.tolist()]} for i, row in enumerate(results(outputs))])

    return await run.respond(answer, deadline)
