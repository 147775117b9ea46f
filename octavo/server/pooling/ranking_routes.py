"""The routes ``/v1/rerank``, ``/v2/rerank``, ``/rerank``, ``/v1/score`` and ``/score``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.pooling_outputs import Pooled
from octavo.core.pooling_params import PoolingParams
from octavo.server.api_errors import invalid, wrong
from octavo.server.pooling.pooled_fields import PooledFields, RerankRequest, ScoreRequest, TeiRerankRequest, Texts
from octavo.server.pooling.pooled_inputs import Pairs, check_number, read_pairs
from octavo.server.pooling.pooled_run import PooledRun, pooling_params
from octavo.server.pooling.pooling_json import encode_list, encode_object
from octavo.server.service import Service, service_of

#: The route of Cohere's API, whose responses have no documents.
COHERE = "/v2/rerank"


async def rerank_texts(request: Request, body: TeiRerankRequest) -> Response:
    """As ``rerank``; where ``texts`` are given in place of ``documents``, as Text Embeddings Inference."""
    if (body.texts is None) == (body.documents is None):
        raise invalid("documents", "documents or texts: " + ("it is missing" if body.texts is None else "one of them"))
    if body.texts is None:
        for name in ("raw_scores", "return_text", "truncate"):
            if getattr(body, name) is not None:
                raise invalid(name, f"{name} goes with texts, not with documents")
        return await rerank(request, body)
    body.documents = list(body.texts)
    if body.truncate and body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1
    if body.raw_scores is not None:
        body.use_activation = not body.raw_scores
    return await rerank(request, body)


async def rerank(request: Request, body: RerankRequest) -> Response:
    """How well documents fit a query, the best first: in one answer the forms of Jina's and of Cohere's API."""
    tei = body if isinstance(body, TeiRerankRequest) and body.texts is not None else None
    field = "documents" if tei is None else "texts"
    service = service_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    query = body.query if isinstance(body.query, str) else body.query.text
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    check_number(service, field, len(documents))
    places = [f"{field}[{i}]" for i in range(len(documents))]
    _check_texts({"query": query, **dict(zip(places, documents, strict=True))})
    texts = [(query, document) for document in documents]
    pairs = await read_pairs(service, texts, places, body.truncate_prompt_tokens, body.max_tokens_per_doc)
    run = PooledRun(request, body, model, _params(service, body), pairs.inputs, "rerank")
    with_documents = request.url.path != COHERE if body.return_documents is None else body.return_documents

    def answer(outputs: list[Pooled]) -> bytes:
        scores = _scores(service, pairs, outputs)
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        if tei is not None:
            texts = [{"text": documents[i]} if tei.return_text else {} for i in best]
            return encode_object(
                [{"index": i, "score": scores[i], **text} for i, text in zip(best, texts, strict=True)]
            )
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
        if with_documents:
            for entry in results:
                entry["document"] = {"text": documents[entry["index"]]}
        usage = run.usage()
        meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": usage["prompt_tokens"]}}
        fields = {"id": run.response_id, "model": model.name, "results": results, "usage": usage, "meta": meta}
        return encode_object(fields)

    return await run.respond(answer, deadline)


async def score(request: Request, body: ScoreRequest) -> Response:
    """How well texts fit: one with each of several, or pairs."""
    service = service_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    first_name, first = _one_of(body, "text_1", "queries", "data_1")
    second_name, second = _one_of(body, "text_2", "documents", "data_2")
    for name, texts in ((first_name, first), (second_name, second)):
        check_number(service, name, len(texts))
        _check_texts({f"{name}[{i}]": text for i, text in enumerate(texts)})
    if len(first) not in (1, len(second)):
        message = f"{first_name} has {len(first)} texts and {second_name} {len(second)}: give one, or as many"
        raise invalid(first_name, message)
    first = first * len(second) if len(first) == 1 else first
    places = [f"{second_name}[{i}]" for i in range(len(second))]
    pairs = await read_pairs(service, list(zip(first, second, strict=True)), places, body.truncate_prompt_tokens)
    run = PooledRun(request, body, model, _params(service, body), pairs.inputs, "score")

    def answer(outputs: list[Pooled]) -> bytes:
        scores = _scores(service, pairs, outputs)
        entries = ({"index": i, "object": "score", "score": each} for i, each in enumerate(scores))
        return encode_list(entries, run.response_fields())

    return await run.respond(answer, deadline)


def _params(service: Service, body: PooledFields) -> PoolingParams:
    return service.llm.front_end.pooling.score_params(pooling_params(body, "score"))


def _scores(service: Service, pairs: Pairs, outputs: list[Pooled]) -> list[float]:
    score = service.llm.front_end.pooling.score
    return [score([outputs[number] for number in numbers]) for numbers in pairs.of_pair]


def _one_of(body: ScoreRequest, *names: str) -> tuple[str, list[str]]:
    """The name of the field that is given, and its texts.

    Raises:
        ApiError: none of the fields is given, or several.
    """
    fields: dict[str, Texts] = {name: value for name in names if (value := getattr(body, name)) is not None}
    if len(fields) != 1:
        what = "one of them" if fields else "it is missing"
        raise invalid(names[0], f"{' or '.join(fields or names)}: {what}")
    [(name, texts)] = fields.items()
    return name, [texts] if isinstance(texts, str) else list(texts)


def _check_texts(texts: dict[str, str]) -> None:
    for place, text in texts.items():
        if not text:
            raise wrong(place, "it is empty; a score of nothing means nothing")
