"""The route ``/v2/embed``."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.pooling_outputs import Pooled
from octavo.server.api_errors import invalid, wrong
from octavo.server.cohere.cohere_protocol import CohereEmbedRequest
from octavo.server.pooling.pooled_fields import EmbeddingRequest
from octavo.server.pooling.pooled_inputs import read_texts
from octavo.server.pooling.pooled_run import PooledRun, pooling_params, results
from octavo.server.pooling.pooling_json import encode_object, numbers
from octavo.server.pooling.vector_routes import prompt_name
from octavo.server.service import Service, service_of

#: Kinds of inputs that models have prompts for or have not.
_OTHER_TYPES = ("classification", "clustering")


async def embed(request: Request, body: CohereEmbedRequest) -> Response:
    """The vectors of texts, in as many types as are asked for."""
    service = service_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    field, texts = _texts(body)
    if body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = body.max_tokens or (None if body.truncate == "NONE" else -1)
    given = EmbeddingRequest(
        input=texts, input_type=_input_type(service, body), truncate_prompt_tokens=body.truncate_prompt_tokens
    )
    inputs = await read_texts(service, request, given, prompt_name(service, given), named=True, field=field)
    run = PooledRun(request, body, model, pooling_params(body, "embed", body.output_dimension), inputs, "embd")
    kinds = dict.fromkeys(body.embedding_types or ("float",))

    def answer(outputs: list[Pooled]) -> bytes:
        vectors = results(outputs)
        tokens = run.usage()["prompt_tokens"]
        return encode_object(
            {
                "id": run.response_id,
                "response_type": "embeddings_by_type",
                "embeddings": {kind: [_sent(vector, kind) for vector in vectors] for kind in kinds},
                "texts": texts,
                "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}},
            }
        )

    return await run.respond(answer, deadline)


def _texts(body: CohereEmbedRequest) -> tuple[str, list[str]]:
    """The name of the field that is given, and its texts.

    Raises:
        ApiError: none or both are given, or a part is no text.
    """
    if (body.texts is None) == (body.inputs is None):
        raise invalid("texts", "texts or inputs: " + ("it is missing" if body.texts is None else "one of them"))
    if body.texts is not None:
        return "texts", body.texts
    texts = []
    for i, each in enumerate(body.inputs or ()):
        for k, part in enumerate(each.content):
            if part.type != "text" or part.text is None:
                raise wrong(f"inputs[{i}].content[{k}]", "the model makes vectors of text alone")
        texts.append("".join(part.text or "" for part in each.content))
    return "inputs", texts


def _input_type(service: Service, body: CohereEmbedRequest) -> str | None:
    """What ``prompt_name`` knows; a kind that few models have a prompt for may have none."""
    kind = body.input_type
    return None if kind in _OTHER_TYPES and kind not in service.llm.model_config.pooler.prompts else kind


def _sent(vector: np.ndarray, kind: str) -> Any:
    if kind in ("float", "base64"):
        return numbers(vector, kind)
    packed = np.packbits(vector > 0)
    return (packed if kind == "ubinary" else (packed.astype(np.int16) - 128)).tolist()
