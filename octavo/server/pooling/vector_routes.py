"""The routes ``/v1/embeddings``, ``/embed``, ``/pooling`` and ``/classify``."""

from __future__ import annotations

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.pooling_outputs import Pooled
from octavo.core.pooling_params import PoolingTask
from octavo.server.api_errors import invalid, wrong
from octavo.server.pooling.pooled_fields import (
    ClassificationRequest,
    EmbeddingRequest,
    PooledTexts,
    PoolingRequest,
    TeiEmbedRequest,
    VectorFields,
)
from octavo.server.pooling.pooled_inputs import read_texts
from octavo.server.pooling.pooled_run import Answer, PooledRun, pooling_params, results
from octavo.server.pooling.pooling_json import encode_list, encode_object, numbers
from octavo.server.service import Service, service_of

#: What ``/pooling`` computes where a request does not say it: the first that the model can do.
_BY_TOKEN_FIRST: tuple[PoolingTask, ...] = ("token_embed", "token_classify", "embed", "classify", "score")
#: Words of clients' ``input_type`` -> names that models give such prompts; the first that a model has is meant.
_PROMPT_NAMES = {
    "query": ("query", "search_query", "retrieval.query", "web_search_query"),
    "document": ("document", "passage", "search_document", "retrieval.passage", "corpus"),
}


async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """The vectors of texts or token ids, one or many."""
    service = service_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    inputs = await read_texts(service, request, body, prompt_name(service, body), named=True)
    params = pooling_params(body, "embed", body.dimensions)
    run = PooledRun(request, body, model, params, inputs, "embd")
    return await run.respond(_list_of(run, "embedding", "embedding", body), deadline)


async def embed_texts(request: Request, body: TeiEmbedRequest) -> Response:
    """The vectors alone, as Text Embeddings Inference sends them."""
    service = service_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    body.use_activation = body.normalize is not False
    if body.truncate and body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1
    given = PooledTexts(input=body.inputs, truncate_prompt_tokens=body.truncate_prompt_tokens)
    inputs = await read_texts(service, request, given, body.prompt_name, named=True, field="inputs")
    run = PooledRun(request, body, model, pooling_params(body, "embed", body.dimensions), inputs, "embd")
    return await run.respond(lambda outputs: encode_object([data.tolist() for data in results(outputs)]), deadline)


async def pool(request: Request, body: PoolingRequest) -> Response:
    """What the model makes of texts or token ids: by default of each token."""
    service = service_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    task = body.task or _by_token(service)
    service.require(task)
    params = pooling_params(body, task, body.dimensions)
    run = PooledRun(request, body, model, params, await read_texts(service, request, body), "pool")
    return await run.respond(_list_of(run, "pooling", "data", body), deadline)


async def classify(request: Request, body: ClassificationRequest) -> Response:
    """The class scores of texts or token ids."""
    service = service_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    inputs = await read_texts(service, request, body)
    run = PooledRun(request, body, model, pooling_params(body, "classify"), inputs, "classify")
    labels = service.llm.model_config.labels

    def answer(outputs: list[Pooled]) -> bytes:
        entries = []
        for i, data in enumerate(results(outputs)):
            best = int(np.argmax(data))
            label = labels[best] if best < len(labels) else None
            entries.append({"index": i, "label": label, "probs": data.tolist(), "num_classes": len(data)})
        return encode_list(entries, run.response_fields())

    return await run.respond(answer, deadline)


def _list_of(run: PooledRun, kind: str, field: str, how: VectorFields) -> Answer:
    """What writes a list of objects of this kind, with the numbers in this field."""

    def answer(outputs: list[Pooled]) -> bytes:
        entries = (
            {
                "object": kind,
                "index": i,
                field: numbers(data, how.encoding_format, how.embed_dtype, how.endianness),
            }
            for i, data in enumerate(results(outputs))
        )
        return encode_list(entries, run.response_fields())

    return answer


def _by_token(service: Service) -> PoolingTask:
    return next((task for task in _BY_TOKEN_FIRST if task in service.tasks), "embed")


def prompt_name(service: Service, body: EmbeddingRequest) -> str | None:
    """The name of the model's prompt that a request asks for.

    Raises:
        ApiError: it asks for two, or for one that the model does not have.
    """
    kind, prompts = body.input_type, service.llm.model_config.pooler.prompts
    if body.prompt_name is not None and kind is not None:
        raise invalid("input_type", "prompt_name and input_type exclude each other")
    if kind is None or kind in prompts:
        return body.prompt_name or kind
    meant = next((names for names in _PROMPT_NAMES.values() if kind in names), None)
    if meant is None:
        raise wrong("input_type", f"it must be query or document, or {_listed(prompts)}, not {kind[:100]!r}")
    # Many models take queries and documents as they are.
    return next((name for name in meant if name in prompts), None)


def _listed(names: object) -> str:
    words = [repr(name) for name in names] if isinstance(names, dict) else []
    return f"one of the model's prompts ({', '.join(words)})" if words else "left out"
