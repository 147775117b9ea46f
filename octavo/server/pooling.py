"""Vectors and scores: the routes for embeddings, ranking and classification.

There are two operations, ``pool_inputs`` and ``score_pairs``. A route says in which fields its clients give the inputs,
and how it writes the results. Read ``create_embeddings`` first.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import Pooled, PoolingParams, PoolingTask
from octavo.core.request import Prompt
from octavo.server.engine_call import EngineCall, new_response_id, request_options
from octavo.server.fields import (
    Int,
    Name,
    PositiveInt,
    QueuedFields,
    RequestModel,
    ResponseModel,
    TokenLimit,
)
from octavo.server.http.errors import invalid, invalid_at
from octavo.server.http.streaming import with_cancellation
from octavo.server.openai.protocol import ChatMessage, TemplateOptions
from octavo.server.prompt_inputs import write_conversation
from octavo.server.state import ServedModel, ServerState, state_of

T = TypeVar("T")

# Bodies of requests.


def _check_one_kind(value: Any) -> Any:
    """Refuses a list of texts and token ids, as the errors of the union's members would be misleading."""
    if isinstance(value, list) and value:
        kinds = [_KINDS.get(type(entry)) for entry in value]
        other = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None and None not in kinds:
            text = "texts and token ids cannot be in one list: entry 0 is {first}, entry {other} {second}"
            raise PydanticCustomError("mixed", text, {"first": kinds[0], "other": other, "second": kinds[other]})
    return value


_KINDS = {str: "a text", int: "a token id", list: "a list of token ids"}

#: A text, token ids, or a list of either.
Input = Annotated[
    str
    | Annotated[list[str], Field(fail_fast=True)]
    | Annotated[list[Int], Field(fail_fast=True)]
    | Annotated[list[list[Int]], Field(fail_fast=True)],
    BeforeValidator(_check_one_kind),
]


Texts = str | Annotated[list[str], Field(fail_fast=True)]
#: Types of the numbers of a vector, as vLLM names them.
VectorType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]


PromptName = Annotated[Name | None, Field(description="Name of the model's prompt to put before each input.")]
Dimensions = Annotated[Int | None, Field(description="Dimensions of the vectors, for Matryoshka models.")]


class PooledFields(QueuedFields):
    """Fields of every request for vectors or scores."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    truncate_prompt_tokens: TokenLimit | None = Field(
        None, description="Cut longer inputs, else refused, to this many tokens; -1: to as many as the model takes."
    )
    use_activation: bool | None = Field(
        None, description="Vectors get length 1, class scores become probabilities (default: the model's setting)."
    )


class PooledTexts(PooledFields, TemplateOptions):
    """Fields of requests with independent inputs: ``input``, or a conversation."""

    input: Input | None = Field(None, description="A text, token ids, or a list of either.")
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = Field(
        None, description="In place of input: a conversation, which the chat template renders."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens (default: true for texts, false for a conversation)."
    )


class VectorFields(RequestModel):
    embed_dtype: VectorType | None = Field(None, description="Type of a vector's numbers (default float32).")
    endianness: Literal["native", "little", "big"] | None = Field(
        None, description="Order of the bytes of a number in base64 (default little)."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float: lists of numbers (default); base64: of their bytes, of embed_dtype."
    )
    dimensions: Dimensions = None


class EmbeddingRequest(VectorFields, PooledTexts):
    prompt_name: PromptName = None
    input_type: Name | None = Field(None, description="query, document, or the name of one of the model's prompts.")


class PoolingRequest(VectorFields, PooledTexts):
    task: PoolingTask | None = Field(None, description="Default: a task for each token, if the model has one.")


class ClassificationRequest(PooledTexts):
    """Body of ``/classify``."""


class TeiEmbedRequest(PooledFields):
    """Body of ``/embed``, of Text Embeddings Inference."""

    inputs: Input = Field(description="A text, token ids, or a list of either.")
    normalize: bool | None = Field(None, description="Vectors get length 1 (default true).")
    truncate: bool | None = Field(None, description="Cut longer inputs to as many tokens as the model takes.")
    prompt_name: PromptName = None
    dimensions: Dimensions = None


class TextDocument(RequestModel):
    text: str


Documents = Annotated[list[str | TextDocument], Field(fail_fast=True)]


class RerankRequest(PooledFields):
    """Body of ``/v1/rerank``, ``/v2/rerank`` and ``/rerank``."""

    query: str | TextDocument = Field(description="The query that documents are ranked for.")
    documents: Documents = Field(description='Texts, or objects {"text": ..}.')
    top_n: PositiveInt | None = Field(None, description="Send only this many of the best (default: all).")
    return_documents: bool | None = Field(
        None, description="Send the documents' texts too (default true; false on /v2/rerank, as Cohere's has none)."
    )
    max_tokens_per_doc: PositiveInt | None = Field(None, description="Cut each document to this many tokens first.")


class TeiRerankRequest(RerankRequest):
    """Body of ``/rerank``; with ``texts`` in place of ``documents``, that of Text Embeddings Inference."""

    documents: Documents | None = Field(None, description='Texts, or objects {"text": ..}.')  # type: ignore[assignment]
    texts: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="Another name of documents: the response is then a list of index and score."
    )
    raw_scores: bool | None = Field(None, description="With texts: the model's scores, without activation.")
    return_text: bool | None = Field(None, description="With texts: send them too (default false).")
    truncate: bool | None = Field(None, description="With texts: cut them to as many tokens as the model takes.")


class ScoreRequest(PooledFields):
    """Body of ``/v1/score`` and ``/score``: one text with one or many, or pairs; under any of the names."""

    text_1: Texts | None = Field(None, description="The first texts; one alone goes with each of the others.")
    text_2: Texts | None = Field(None, description="The second texts.")
    queries: Texts | None = Field(None, description="Another name of text_1.")
    documents: Texts | None = Field(None, description="Another name of text_2.")
    data_1: Texts | None = Field(None, description="Another name of text_1.")
    data_2: Texts | None = Field(None, description="Another name of text_2.")


class LlamaEmbeddingRequest(PooledTexts):
    content: Input | None = Field(None, description="Another name of input.")
    embd_normalize: Int | None = Field(None, description="2: length 1; -1: unscaled; default: the model's setting.")


# Responses, for the OpenAPI description.


class PooledUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int


class _ListOfInputs(ResponseModel):
    """A response with an entry for each input."""

    object: Literal["list"]
    data: list[Any]
    model: str
    usage: PooledUsage
    id: str
    created: int


class Embedding(ResponseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(_ListOfInputs):
    data: list[Embedding]


class PooledData(ResponseModel):
    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str = Field(
        description="Numbers, or a list of them for each token; base64 concatenates those of all tokens."
    )


class PooledList(_ListOfInputs):
    data: list[PooledData]


class Classification(ResponseModel):
    index: int
    label: str | None = Field(description="Name of the class with the highest score.")
    probs: list[float]
    num_classes: int


class ClassificationList(_ListOfInputs):
    data: list[Classification]


class Ranked(ResponseModel):
    """A document's index in the request, and its relevance to the query."""

    index: int
    relevance_score: float
    document: TextDocument | None = None


class Ranking(ResponseModel):
    """A response of ``/v1/rerank``, ``/v2/rerank`` and ``/rerank``: the best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PooledUsage
    meta: dict[str, Any] = Field(description="The version of Cohere's API, and the tokens under its names.")


class RankedText(ResponseModel):
    """An entry of the response of ``/rerank`` to ``texts``: the best first."""

    index: int
    score: float
    text: str | None = None


class Score(ResponseModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(_ListOfInputs):
    data: list[Score]


class LlamaVector(ResponseModel):
    """The vector of one input, as the only row of a matrix."""

    index: int
    embedding: list[list[float]]


# Vectors and classes: a route says which task it asks for and how it writes a result.

#: Writes a response as JSON from the results in the order of the inputs: arrays of float32, or scores of pairs.
Write = Callable[[EngineCall[Pooled], Sequence[Any]], bytes]

#: The task of ``/pooling`` by default: the first that the model supports.
_DEFAULT_TASKS: tuple[PoolingTask, ...] = ("token_embed", "token_classify", "embed", "classify", "score")
#: ``input_type`` of clients -> names of such prompts in models; the first that the model has is used.
_PROMPT_NAMES = {
    "query": ("query", "search_query", "retrieval.query", "web_search_query"),
    "document": ("document", "passage", "search_document", "retrieval.passage", "corpus"),
}


async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """The vectors of texts or token ids, one or many."""
    named = prompt_name(state_of(request), body.input_type, body.prompt_name)
    inputs = Inputs(body.input, prompt_name=named)
    return await pool_inputs(request, body, "embed", inputs, _vectors("embedding", "embedding", body), body.dimensions)


async def embed_texts(request: Request, body: TeiEmbedRequest) -> Response:
    """The vectors alone, as Text Embeddings Inference sends them."""
    body.use_activation = body.normalize is not False
    _cut_if_asked(body, body.truncate)
    inputs = Inputs(body.inputs, "inputs", body.prompt_name)
    return await pool_inputs(request, body, "embed", inputs, _plain(lambda i, row: row.tolist()), body.dimensions)


async def pool(request: Request, body: PoolingRequest) -> Response:
    """The result of a pooling task for texts or token ids, by default for each token."""
    service = state_of(request)
    default: PoolingTask = next((each for each in _DEFAULT_TASKS if each in service.tasks), "embed")
    task = body.task or default
    service.require(task)
    write, inputs = _vectors("pooling", "data", body), Inputs(body.input, is_named=False)
    return await pool_inputs(request, body, task, inputs, write, body.dimensions, prefix="pool")


async def classify(request: Request, body: ClassificationRequest) -> Response:
    """The class scores of texts or token ids."""
    labels = state_of(request).llm.model_config.labels

    def entry(i: int, scores: np.ndarray) -> dict[str, Any]:
        best = int(np.argmax(scores))
        label = labels[best] if best < len(labels) else None
        return {"index": i, "label": label, "probs": scores.tolist(), "num_classes": len(scores)}

    inputs = Inputs(body.input, is_named=False)
    return await pool_inputs(request, body, "classify", inputs, _listed(entry), prefix="classify")


async def embed(request: Request, body: LlamaEmbeddingRequest) -> Response:
    """The vectors of texts or token ids, one or many."""
    if body.embd_normalize not in (None, 2, -1):
        raise invalid_at("embd_normalize", f"it must be 2 or -1, not {body.embd_normalize}")
    if body.content is not None and body.input is not None:
        raise invalid_at("content", "content and input exclude each other")
    if body.embd_normalize is not None:
        body.use_activation = body.embd_normalize == 2
    inputs = Inputs(body.input if body.content is None else body.content)
    write = _plain(lambda i, row: {"index": i, "embedding": [row.tolist()]})
    return await pool_inputs(request, body, "embed", inputs, write)


def prompt_name(service: ServerState, kind: str | None, name: str | None = None) -> str | None:
    """The name of the model's prompt by ``input_type`` or ``prompt_name``; refuses both, and an unknown kind."""
    prompts = service.llm.model_config.pooler.prompts
    if name is not None and kind is not None:
        raise invalid("input_type", "prompt_name and input_type exclude each other")
    if kind is None or kind in prompts:
        return name or kind
    names = next((names for names in _PROMPT_NAMES.values() if kind in names), None)
    if names is None:
        choice = f"one of the model's prompts ({', '.join(map(repr, prompts))})" if prompts else "left out"
        raise invalid_at("input_type", f"it must be query or document, or {choice}, not {kind[:100]!r}")
    # Many models read queries and documents without a prompt.
    return next((name for name in names if name in prompts), None)


def _vectors(kind: str, field: str, body: VectorFields) -> Write:
    def entry(i: int, data: np.ndarray) -> dict[str, Any]:
        encoded = numbers(data, body.encoding_format, body.embed_dtype, body.endianness)
        return {"object": kind, "index": i, field: encoded}

    return _listed(entry)


def _listed(entry: Callable[[int, Any], Any]) -> Write:
    """``{"object": "list", "data": ..}`` of entries made of an index and a result.

    Entries are made and encoded one by one, so that a thread that writes a large response gives others turns.
    """

    def write(call: EngineCall[Pooled], results: Sequence[Any]) -> bytes:
        data = b",".join(encode_object(entry(i, result)) for i, result in enumerate(results))
        rest = {"model": call.model.name, "usage": _usage(call), "id": call.response_id, "created": call.created}
        return b'{"object":"list","data":[' + data + b"]," + encode_object(rest)[1:]

    return write


def _plain(entry: Callable[[int, Any], Any]) -> Write:
    return lambda call, results: encode_object([entry(i, result) for i, result in enumerate(results)])


def _usage(call: EngineCall[Pooled]) -> dict[str, int]:
    return {"prompt_tokens": call.prompt_tokens, "total_tokens": call.prompt_tokens}


def _cut_if_asked(body: PooledFields, truncate: bool | None) -> None:
    if truncate and body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1


# Ranking and scores: a route says which pairs it has and how it writes their scores.

#: The route of Cohere's API, whose responses have no documents.
COHERE = "/v2/rerank"


async def rerank_texts(request: Request, body: TeiRerankRequest) -> Response:
    """Ranks ``documents``, or ``texts`` as Text Embeddings Inference does."""
    if (body.texts is None) == (body.documents is None):
        raise invalid("documents", "documents or texts: " + ("it is missing" if body.texts is None else "one of them"))
    if body.texts is None:
        for name in ("raw_scores", "return_text", "truncate"):
            if getattr(body, name) is not None:
                raise invalid(name, f"{name} goes with texts, not with documents")
        return await rerank(request, body)
    _cut_if_asked(body, body.truncate)
    if body.raw_scores is not None:
        body.use_activation = not body.raw_scores

    def write(texts: list[str], best: list[int], call: EngineCall[Pooled], scores: Sequence[float]) -> bytes:
        shown = [{"text": texts[i]} if body.return_text else {} for i in best]
        return encode_object([{"index": i, "score": scores[i], **text} for i, text in zip(best, shown, strict=True)])

    return await _rank(request, body, "texts", body.texts, write)


async def rerank(request: Request, body: RerankRequest) -> Response:
    """Scores of documents for a query, the best first, in the formats of Jina's and of Cohere's API."""
    with_documents = request.url.path != COHERE if body.return_documents is None else body.return_documents

    def write(texts: list[str], best: list[int], call: EngineCall[Pooled], scores: Sequence[float]) -> bytes:
        shown = [{"document": {"text": texts[i]}} if with_documents else {} for i in best]
        results = [{"index": i, "relevance_score": scores[i], **text} for i, text in zip(best, shown, strict=True)]
        meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": call.prompt_tokens}}
        fields = {"id": call.response_id, "model": call.model.name, "results": results, "usage": _usage(call)}
        return encode_object({**fields, "meta": meta})

    return await _rank(request, body, "documents", body.documents, write)


async def _rank(
    request: Request,
    body: RerankRequest,
    field: str,
    documents: Sequence[str | TextDocument],
    write: Callable[[list[str], list[int], EngineCall[Pooled], Sequence[float]], bytes],
) -> Response:
    query, *texts = (each if isinstance(each, str) else each.text for each in (body.query, *documents))
    check_number(state_of(request), field, len(texts))
    for place, text in (("query", query), *((f"{field}[{i}]", text) for i, text in enumerate(texts))):
        _check_text(place, text)

    def write_best(call: EngineCall[Pooled], scores: Sequence[float]) -> bytes:
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        return write(texts, best, call, scores)

    pairs = [(query, text) for text in texts]
    return await score_pairs(request, body, field, pairs, write_best, "rerank", body.max_tokens_per_doc)


async def score(request: Request, body: ScoreRequest) -> Response:
    """Scores of pairs of texts, or of one text with each of several."""
    first_name, first = _one_of(body, "text_1", "queries", "data_1")
    second_name, second = _one_of(body, "text_2", "documents", "data_2")
    for name, texts in ((first_name, first), (second_name, second)):
        check_number(state_of(request), name, len(texts))
        for i, text in enumerate(texts):
            _check_text(f"{name}[{i}]", text)
    if len(first) not in (1, len(second)):
        message = f"{first_name} has {len(first)} texts and {second_name} {len(second)}: give one, or as many"
        raise invalid(first_name, message)
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    write = _listed(lambda i, score: {"index": i, "object": "score", "score": score})
    return await score_pairs(request, body, second_name, pairs, write, "score")


def _one_of(body: ScoreRequest, *names: str) -> tuple[str, list[str]]:
    """The only field of these that the request has, and its texts."""
    fields: dict[str, Texts] = {name: value for name in names if (value := getattr(body, name)) is not None}
    if len(fields) != 1:
        raise invalid(names[0], f"{' or '.join(fields or names)}: {'one of them' if fields else 'it is missing'}")
    [(name, texts)] = fields.items()
    return name, [texts] if isinstance(texts, str) else list(texts)


# The operations: inputs are checked, tokenized and cut before any of them is computed.

#: Fewer characters are tokenized in well under a millisecond, and not in a thread.
_SHORT = 2000
#: Results of more numbers are written as JSON in a thread.
_SHORT_RESULTS = 20_000
_HOW_TO_CUT = "and truncate_prompt_tokens=-1 cuts it there"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The independent inputs of a request: a text, token ids, or a list of either; None: a conversation."""

    value: Any
    #: The name of their field.
    field: str = "input"
    #: The model's prompt to put before each, or its default one; none if not ``is_named``.
    prompt_name: str | None = None
    is_named: bool = True


async def pool_inputs(
    request: Request,
    body: PooledFields,
    task: PoolingTask,
    inputs: Inputs,
    write: Write,
    dimensions: int | None = None,
    prefix: str = "embd",
) -> Response:
    """Answers a request with the result of a task for each input; ``prefix`` begins the response's id."""
    service = state_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    messages = body.messages if isinstance(body, PooledTexts) else None
    special = body.add_special_tokens if isinstance(body, PooledTexts) else None
    if (inputs.value is None) == (messages is None):
        raise invalid("input", "give input or messages, one of them")
    if messages is not None and isinstance(body, PooledTexts):
        if body.add_generation_prompt is None:
            body.add_generation_prompt = False
        text = await write_conversation(service, request, messages, body)
        places, prompts, special = ["messages"], [{"prompt": text}], special is True
    else:
        places, prompts = _read_inputs(service, inputs)
    await _tokenize_all(service, places, prompts, body.truncate_prompt_tokens, special is not False)
    call = _make_call(request, body, model, _params(body, task, dimensions), places, prompts, prefix)
    return await _respond(call, lambda outputs: [output.outputs.data for output in outputs], write, deadline)


def _read_inputs(service: ServerState, inputs: Inputs) -> tuple[list[str], list[dict[str, Any]]]:
    value, field, pooling = inputs.value, inputs.field, service.llm.front_end.pooling
    are_several = isinstance(value, list) and not (value and isinstance(value[0], int))
    entries = value if are_several else [value]
    check_number(service, field, len(entries))
    places = [f"{field}[{i}]" for i in range(len(entries))] if are_several else [field]
    for place, entry in zip(places, entries, strict=True):
        _check_text(place, entry)
    if inputs.is_named:
        entries = [pooling.embedding_prompt(entry, inputs.prompt_name) for entry in entries]
    return places, list(map(_fields, entries))


async def score_pairs(
    request: Request,
    body: PooledFields,
    field: str,
    pairs: Sequence[tuple[str, str]],
    write: Write,
    prefix: str,
    max_tokens: int | None = None,
) -> Response:
    """Answers a request with the score of each pair; the second texts, of ``field``, are cut to ``max_tokens``."""
    service = state_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    truncate, sizes = body.truncate_prompt_tokens, [len(first) + len(second) for first, second in pairs]
    if truncate is None and max_tokens is None:
        for i, size in enumerate(sizes):
            _check_chars(service, f"{field}[{i}]", size)
    made = await _run_in_thread_if_long(sum(sizes), _make_pairs, service, field, pairs, truncate, max_tokens)
    places, prompts, of_pair = made
    await _tokenize_all(service, places, prompts, truncate, special=True)
    pooling = service.llm.front_end.pooling
    params = pooling.score_params(_params(body, "score"))
    call = _make_call(request, body, model, params, places, prompts, prefix)

    def scores(outputs: list[Pooled]) -> list[float]:
        return [pooling.score([outputs[i] for i in indices]) for indices in of_pair]

    return await _respond(call, scores, write, deadline)


def _make_pairs(
    service: ServerState, field: str, pairs: Sequence[tuple[str, str]], truncate: int | None, max_tokens: int | None
) -> tuple[list[str], list[dict[str, Any]], list[list[int]]]:
    """Places and prompts, each computed once, and for each pair the indices of its prompts."""
    pooling = service.llm.front_end.pooling
    places, prompts, of_pair, indices = list[str](), list[dict[str, Any]](), list[list[int]](), dict[Any, int]()
    for i, (first, second) in enumerate(pairs):
        place = f"{field}[{i}]"
        if max_tokens is not None:
            # Up to the end of the last token that is kept.
            offsets = service.llm.tokenizer.backend.encode(second, add_special_tokens=False).offsets
            second = second if len(offsets) <= max_tokens else second[: offsets[max_tokens - 1][1]]
        of_pair.append([])
        for prompt in map(_fields, pooling.pair_prompts(first, second, truncate)):
            # A query whose vector is compared with many others is computed once.
            key = tuple(prompt.items()) if "prompt_token_ids" not in prompt else place
            index = indices.setdefault(key, len(prompts))
            if index == len(prompts):
                places.append(place)
                prompts.append(prompt)
            of_pair[-1].append(index)
    return places, prompts, of_pair


def _params(body: PooledFields, task: PoolingTask, dimensions: int | None = None) -> PoolingParams:
    return PoolingParams(
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        dimensions=dimensions,
        use_activation=body.use_activation,
        task=task,
    )


def _make_call(
    request: Request,
    body: PooledFields,
    model: ServedModel,
    params: PoolingParams,
    places: list[str],
    prompts: list[dict[str, Any]],
    prefix: str,
) -> EngineCall[Pooled]:
    return EngineCall(
        service=state_of(request),
        request=request,
        model=model,
        response_id=new_response_id(prefix),
        prompts=prompts,
        params=params,
        options=request_options(request, body, model.adapter),
        places=places,
    )


async def _respond(
    call: EngineCall[Pooled], read: Callable[[list[Pooled]], Sequence[Any]], write: Write, deadline: float
) -> Response:
    """The response; no input runs any more when this returns or raises.

    ``read`` makes results of the outputs; ``deadline`` is on the loop's clock.
    """

    async def answer() -> bytes:
        outputs = await call.finish()
        if sum(output.outputs.data.size for output in outputs) < _SHORT_RESULTS:
            return write(call, read(outputs))
        return await asyncio.to_thread(lambda: write(call, read(outputs)))

    body = await with_cancellation(call.request.receive, answer(), deadline)
    return Response(body, media_type="application/json")


def check_number(service: ServerState, field: str, count: int) -> None:
    limit = service.options.max_inputs_per_request
    if not count:
        raise invalid(field, f"{field} must not be an empty list")
    if count > limit:
        message = f"{field} holds {count} inputs; at most {limit} are served at once: send them in several requests"
        raise invalid(field, message, "too_many_inputs")


def _check_text(place: str, text: str | list[int]) -> None:
    if not text:
        raise invalid_at(place, "it is empty; a vector or score of nothing means nothing")


def _check_chars(service: ServerState, place: str, size: int) -> None:
    if size > service.max_prompt_chars:
        message = f"it has {size} characters; at most {service.max_prompt_chars} can be served, {_HOW_TO_CUT}"
        raise invalid_at(place, message, "context_length_exceeded")


def _fields(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, Mapping):
        return dict(prompt)
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}


async def _tokenize_all(
    service: ServerState, places: list[str], prompts: list[dict[str, Any]], truncate: int | None, special: bool
) -> None:
    """Adds token ids to the prompts, cut where the request asks for it."""
    limit, vocab_size = service.llm.max_model_len, service.llm.model_config.vocab_size
    if truncate == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, not 0")
    most = limit if truncate == -1 else truncate
    texts = [(place, each) for place, each in zip(places, prompts, strict=True) if "prompt_token_ids" not in each]
    if most is None:
        for place, each in texts:
            _check_chars(service, place, len(each["prompt"]))
    if texts:
        size, missing = sum(len(each["prompt"]) for _, each in texts), [each for _, each in texts]
        await _run_in_thread_if_long(size, _tokenize, service, missing, most, special)
    for place, each in zip(places, prompts, strict=True):
        if most is not None:
            each["prompt_token_ids"] = each["prompt_token_ids"][:most]
        ids: list[int] = each["prompt_token_ids"]
        if not ids:
            raise invalid_at(place, "there is no token in it")
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocab_size:
                raise invalid_at(place, f"token ids are integers from 0 to {vocab_size - 1}, not {token}")
        if len(ids) > limit:
            message = f"it has {len(ids)} tokens; the model takes at most {limit}, {_HOW_TO_CUT}"
            raise invalid_at(place, message, "context_length_exceeded")


def _tokenize(service: ServerState, prompts: list[dict[str, Any]], most: int | None, special: bool) -> None:
    tokenizer = service.llm.tokenizer
    # Unlike ``encode``, it lets other threads run.
    batch = tokenizer.encode_batch([each["prompt"] for each in prompts], special)
    for each, ids in zip(prompts, batch, strict=True):
        if special and most is not None and len(ids) > most:
            ids = tokenizer.encode_cut(each["prompt"], most)  # with the special tokens at the end
        each["prompt_token_ids"] = ids


async def _run_in_thread_if_long(size: int, call: Callable[..., T], *args: Any) -> T:
    return call(*args) if size < _SHORT else await asyncio.to_thread(call, *args)


# Numbers as JSON.

encode_object = msgspec.json.Encoder().encode


def numbers(data: np.ndarray, encoding_format: str | None, dtype: str | None = None, order: str | None = None) -> Any:
    """float32 numbers of any shape for JSON: lists of numbers, or with "base64" their bytes.

    ``dtype``: the ``VectorType`` to which they are rounded, if any. ``order``: "big", or little-endian bytes.
    """
    if dtype not in (None, "float32"):
        import ml_dtypes

        types = {
            "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
            "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2,
        }  # fmt: skip
        data = data.astype(types[str(dtype)])
    if encoding_format == "base64":
        size = data.dtype.itemsize
        words = data.view(f"u{size}").astype(f"{'>' if order == 'big' else '<'}u{size}", copy=False)
        return binascii.b2a_base64(words.tobytes(), newline=False).decode()
    return data.astype(np.float32, copy=False).tolist()
