"""Vectors and scores: the routes for embeddings, ranking and classification. Read ``create_embeddings`` first."""

from __future__ import annotations

import asyncio
import binascii
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import CompletionOutput, Pooled, PoolingParams, PoolingTask
from octavo.core.request import Prompt
from octavo.server.fields import (
    Int,
    Name,
    PositiveInt,
    QueuedFields,
    RequestModel,
    ResponseModel,
    TokenLimit,
    hint,
    refused,
)
from octavo.server.generation import request_options
from octavo.server.http.errors import invalid, server_error, wrong
from octavo.server.http.streaming import with_cancellation
from octavo.server.logging import log_fields, log_prompt
from octavo.server.metrics import COMPLETE, Metrics
from octavo.server.openai.protocol import ChatMessage, TemplateOptions
from octavo.server.prompt_inputs import write_conversation
from octavo.server.state import ServedModel, ServerState, engine_request_id, state_of

logger = logging.getLogger("octavo.server")

T = TypeVar("T")

# Bodies of requests.

_ONE_TYPE = "vectors are computed in the model's precision and sent as float32"


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
    truncation_side: Any = refused("the model's tokenizer_config.json says where texts are cut", "right")
    activation: Any = refused("its name is use_activation")
    softmax: Any = refused("its name is use_activation")
    normalize: Any = refused("its name is use_activation")
    normalized: Any = refused("its name is use_activation")
    embed_dtype: Any = refused(_ONE_TYPE, "float32")
    output_dtype: Any = refused(_ONE_TYPE, "float", "float32")
    embedding_type: Any = refused("its name is encoding_format", "float")
    embedding_types: Any = refused("its name is encoding_format", ["float"])
    endianness: Any = refused("base64 is of little-endian numbers", "little", "native")
    late_chunking: Any = refused("each input is computed by itself", False)
    additional_data: Any = hint("a label of the client's")
    mm_processor_kwargs: Any = refused("images are not read for vectors and scores", {})
    lora_request: Any = refused("an adapter is named as the model (/v1/models lists them)")


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
    task: Any = refused("its name is input_type, or prompt_name")
    output_dimension: Any = refused("its name is dimensions")


class PoolingRequest(VectorFields, PooledTexts):
    task: PoolingTask | None = Field(None, description="Default: a task for each token, if the model has one.")


class ClassificationRequest(PooledTexts):
    """Body of ``/classify``."""


class TeiEmbedRequest(PooledFields):
    """Body of ``/embed``, of Text Embeddings Inference."""

    inputs: Input = Field(description="A text, token ids, or a list of either.")
    normalize: bool | None = Field(None, description="Vectors get length 1 (default true).")
    truncate: bool | None = Field(None, description="Cut longer inputs to as many tokens as the model takes.")
    truncation_direction: Any = refused("the model's tokenizer_config.json says where texts are cut", "right", "Right")
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
    max_chunks_per_doc: Any = refused("documents are not split: max_tokens_per_doc cuts them")
    rank_fields: Any = refused("a document is one text", ["text"])
    relevant_spans: Any = refused("documents are scored as a whole")
    return_embeddings: Any = refused("vectors are given by /v1/embeddings", False)
    encoding_format: Any = refused("scores are numbers", "float")


class TeiRerankRequest(RerankRequest):
    """Body of ``/rerank``; with ``texts`` in place of ``documents``, that of Text Embeddings Inference."""

    documents: Documents | None = Field(None, description='Texts, or objects {"text": ..}.')  # type: ignore[assignment]
    texts: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="Another name of documents: the response is then a list of index and score."
    )
    raw_scores: bool | None = Field(None, description="With texts: the model's scores, without activation.")
    return_text: bool | None = Field(None, description="With texts: send them too (default false).")
    truncate: bool | None = Field(None, description="With texts: cut them to as many tokens as the model takes.")
    truncation_direction: Any = refused("the model's tokenizer_config.json says where texts are cut", "right", "Right")


class ScoreRequest(PooledFields):
    """Body of ``/v1/score`` and ``/score``: one text with one or many, or pairs; under any of the names."""

    text_1: Texts | None = Field(None, description="The first texts; one alone goes with each of the others.")
    text_2: Texts | None = Field(None, description="The second texts.")
    queries: Texts | None = Field(None, description="Another name of text_1.")
    documents: Texts | None = Field(None, description="Another name of text_2.")
    data_1: Texts | None = Field(None, description="Another name of text_1.")
    data_2: Texts | None = Field(None, description="Another name of text_2.")
    encoding_format: Any = refused("scores are numbers", "float")


class LlamaEmbeddingRequest(PooledTexts):
    content: Input | None = Field(None, description="Another name of input.")
    embd_normalize: Int | None = Field(None, description="2: length 1; -1: unscaled; default: the model's setting.")
    encoding_format: Any = refused("/v1/embeddings gives vectors in base64", "float")
    dimensions: Any = refused("/v1/embeddings gives vectors of fewer numbers")


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


# Routes for vectors and classes.

#: The task of ``/pooling`` by default: the first that the model supports.
_DEFAULT_TASKS: tuple[PoolingTask, ...] = ("token_embed", "token_classify", "embed", "classify", "score")
#: ``input_type`` of clients -> names of such prompts in models; the first that the model has is used.
_PROMPT_NAMES = {
    "query": ("query", "search_query", "retrieval.query", "web_search_query"),
    "document": ("document", "passage", "search_document", "retrieval.passage", "corpus"),
}


async def _start(request: Request, body: PooledFields) -> tuple[ServerState, float, ServedModel]:
    """The server's state, the request's deadline and its model."""
    service = state_of(request)
    deadline = service.deadline()
    return service, deadline, await service.model(body.model)


async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """The vectors of texts or token ids, one or many."""
    service, deadline, model = await _start(request, body)
    inputs = await read_texts(service, request, body, prompt_name(service, body), named=True)
    run = PooledRun(request, body, model, pooling_params(body, "embed", body.dimensions), inputs, "embd")
    return await run.respond(_list_answer(run, "embedding", "embedding", body), deadline)


async def embed_texts(request: Request, body: TeiEmbedRequest) -> Response:
    """The vectors alone, as Text Embeddings Inference sends them."""
    service, deadline, model = await _start(request, body)
    body.use_activation = body.normalize is not False
    if body.truncate and body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1
    texts = PooledTexts(input=body.inputs, truncate_prompt_tokens=body.truncate_prompt_tokens)
    inputs = await read_texts(service, request, texts, body.prompt_name, named=True, field="inputs")
    run = PooledRun(request, body, model, pooling_params(body, "embed", body.dimensions), inputs, "embd")
    return await run.respond(lambda outputs: encode_object([data.tolist() for data in results(outputs)]), deadline)


async def pool(request: Request, body: PoolingRequest) -> Response:
    """The result of a pooling task for texts or token ids, by default for each token."""
    service, deadline, model = await _start(request, body)
    default: PoolingTask = next((each for each in _DEFAULT_TASKS if each in service.tasks), "embed")
    task = body.task or default
    service.require(task)
    params = pooling_params(body, task, body.dimensions)
    run = PooledRun(request, body, model, params, await read_texts(service, request, body), "pool")
    return await run.respond(_list_answer(run, "pooling", "data", body), deadline)


async def classify(request: Request, body: ClassificationRequest) -> Response:
    """The class scores of texts or token ids."""
    service, deadline, model = await _start(request, body)
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


def _list_answer(run: PooledRun, kind: str, field: str, how: VectorFields) -> Answer:
    def answer(outputs: list[Pooled]) -> bytes:
        entries = (
            {"object": kind, "index": i, field: numbers(data, how.encoding_format, how.embed_dtype, how.endianness)}
            for i, data in enumerate(results(outputs))
        )
        return encode_list(entries, run.response_fields())

    return answer


def prompt_name(service: ServerState, body: EmbeddingRequest) -> str | None:
    """The name of the model's prompt for a request; refuses two names, or one that the model does not have."""
    kind, prompts = body.input_type, service.llm.model_config.pooler.prompts
    if body.prompt_name is not None and kind is not None:
        raise invalid("input_type", "prompt_name and input_type exclude each other")
    if kind is None or kind in prompts:
        return body.prompt_name or kind
    names = next((names for names in _PROMPT_NAMES.values() if kind in names), None)
    if names is None:
        choice = f"one of the model's prompts ({', '.join(map(repr, prompts))})" if prompts else "left out"
        raise wrong("input_type", f"it must be query or document, or {choice}, not {kind[:100]!r}")
    # Many models read queries and documents without a prompt.
    return next((name for name in names if name in prompts), None)


async def embed(request: Request, body: LlamaEmbeddingRequest) -> Response:
    """The vectors of texts or token ids, one or many."""
    service, deadline, model = await _start(request, body)
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


# Routes for ranking and scores.

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
    body.documents = list(body.texts)
    if body.truncate and body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1
    if body.raw_scores is not None:
        body.use_activation = not body.raw_scores
    return await rerank(request, body)


async def rerank(request: Request, body: RerankRequest) -> Response:
    """Scores of documents for a query, the best first, in the formats of Jina's and of Cohere's API."""
    tei = body if isinstance(body, TeiRerankRequest) and body.texts is not None else None
    field = "documents" if tei is None else "texts"
    service, deadline, model = await _start(request, body)
    query = body.query if isinstance(body.query, str) else body.query.text
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    check_number(service, field, len(documents))
    places = [f"{field}[{i}]" for i in range(len(documents))]
    _check_texts({"query": query, **dict(zip(places, documents, strict=True))})
    texts = [(query, document) for document in documents]
    pairs = await read_pairs(service, texts, places, body.truncate_prompt_tokens, body.max_tokens_per_doc)
    params = service.llm.front_end.pooling.score_params(pooling_params(body, "score"))
    run = PooledRun(request, body, model, params, pairs.inputs, "rerank")
    with_documents = request.url.path != COHERE if body.return_documents is None else body.return_documents

    def answer(outputs: list[Pooled]) -> bytes:
        scores = _scores(service, pairs, outputs)
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        if tei is not None:
            texts = [{"text": documents[i]} if tei.return_text else {} for i in best]
            return encode_object([{"index": i, "score": scores[i], **t} for i, t in zip(best, texts, strict=True)])
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
    """Scores of pairs of texts, or of one text with each of several."""
    service, deadline, model = await _start(request, body)
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
    params = service.llm.front_end.pooling.score_params(pooling_params(body, "score"))
    run = PooledRun(request, body, model, params, pairs.inputs, "score")

    def answer(outputs: list[Pooled]) -> bytes:
        scores = _scores(service, pairs, outputs)
        entries = ({"index": i, "object": "score", "score": each} for i, each in enumerate(scores))
        return encode_list(entries, run.response_fields())

    return await run.respond(answer, deadline)


def _scores(service: ServerState, pairs: Pairs, outputs: list[Pooled]) -> list[float]:
    score = service.llm.front_end.pooling.score
    return [score([outputs[number] for number in numbers]) for numbers in pairs.of_pair]


def _one_of(body: ScoreRequest, *names: str) -> tuple[str, list[str]]:
    """The only field of these that the request has, and its texts."""
    fields: dict[str, Texts] = {name: value for name in names if (value := getattr(body, name)) is not None}
    if len(fields) != 1:
        raise invalid(names[0], f"{' or '.join(fields or names)}: {'one of them' if fields else 'it is missing'}")
    [(name, texts)] = fields.items()
    return name, [texts] if isinstance(texts, str) else list(texts)


def _check_texts(texts: dict[str, str]) -> None:
    for place, text in texts.items():
        if not text:
            raise wrong(place, "it is empty; a score of nothing means nothing")


# The inputs of one HTTP request in the engine.

#: Least inputs of one request in the engine at a time: enough for full steps, few enough that another request does not
#: wait for thousands.
MIN_IN_ENGINE = 256
#: Inputs that are sent to the engine in one turn of the event loop; each takes some 100 microseconds.
_AT_ONCE = 16
#: Begins the engine's message about a result with NaN or infinity, which names the layer and nothing internal.
_NOT_FINITE = "the result is not finite"
#: Results of more numbers are written as JSON in a thread.
_SHORT_INPUTS = 20_000

#: Writes a response as JSON from the outputs, in the order of the inputs.
Answer = Callable[[list[Pooled]], bytes]


class PooledRun:
    """The inputs of one HTTP request, each an engine request of its own. A failure ends all of them."""

    def __init__(
        self,
        request: Request,
        body: PooledFields,
        model: ServedModel,
        params: PoolingParams,
        inputs: list[PooledInput],
        prefix: str,
    ) -> None:
        """``params`` has the task; the response's id begins with ``prefix``."""
        self.service, self.request, self.model = state_of(request), request, model
        self.params, self.inputs = params, inputs
        self.response_id = f"{prefix}-{uuid.uuid4().hex}"
        self.options = request_options(request, body, model.adapter)

    async def respond(self, answer: Answer, deadline: float) -> Response:
        """The response; no input runs any more when this returns or raises. ``deadline``: on the loop's clock."""
        body = await with_cancellation(self.request.receive, self._answer(answer), deadline)
        return Response(body, media_type="application/json")

    def response_fields(self) -> dict[str, Any]:
        return {"model": self.model.name, "usage": self.usage(), "id": self.response_id, "created": int(time.time())}

    def usage(self) -> dict[str, int]:
        tokens = sum(len(each.token_ids) for each in self.inputs)
        return {"prompt_tokens": tokens, "total_tokens": tokens}

    async def _answer(self, answer: Answer) -> bytes:
        outputs = await self._outputs()
        if sum(output.outputs.data.size for output in outputs) < _SHORT_INPUTS:
            return answer(outputs)
        return await asyncio.to_thread(answer, outputs)

    async def _outputs(self) -> list[Pooled]:
        service, outputs = self.service, dict[int, Pooled]()
        if service.options.log_prompts:
            for each in self.inputs:
                log_prompt(each.prompt.get("prompt", each.token_ids))
        config = service.llm.config
        in_engine = max(MIN_IN_ENGINE, 2 * config.max_num_seqs * config.data_parallel_size)
        names = {self._name(i): len(each.token_ids) for i, each in enumerate(self.inputs[:in_engine])}
        service.queue.enter(names)
        waiting = iter(enumerate(self.inputs))

        async def take() -> None:
            for number, each in waiting:
                outputs[number] = await self._pool(self._name(number), each)

        try:
            if len(self.inputs) == 1:
                await take()
            else:
                async with asyncio.TaskGroup() as tasks:
                    for i in range(len(names)):
                        tasks.create_task(take())
                        if i % _AT_ONCE == 0:
                            await asyncio.sleep(0)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            service.queue.leave(*names)
            fields = log_fields(self.request.scope)
            if self.model.adapter is not None:
                fields["adapter"] = self.model.name
            fields.update(inputs=len(self.inputs), prompt_tokens=self.usage()["prompt_tokens"])
        return [outputs[i] for i in range(len(self.inputs))]

    def _name(self, number: int) -> str:
        return engine_request_id(self.response_id, number, len(self.inputs))

    async def _pool(self, name: str, each: PooledInput) -> Pooled:
        service = self.service
        try:
            stream = await service.llm.submit(name, each.prompt, self.params, self.options, streaming=False)
        finally:
            service.queue.leave(name)
        adapter = self.model.name if self.model.adapter else None
        with PoolingObserver(service.metrics, str(self.params.task), adapter) as observer, closing(stream):
            output: Any = await anext(stream)
            end = stream.request.completions[0].output
            observer.update(output, str(end.finish_reason))
            service.queue.observe(output)
            if service.tracer is not None:
                service.tracer.record(output, observer, self.request.headers)
            self._raise_if_failed(each, output, end)
        pooled: Pooled = output
        return pooled

    def _raise_if_failed(self, each: PooledInput, output: Pooled, end: CompletionOutput) -> None:
        error = output.outputs.error
        if error is None:
            return
        self.service.check_completion(end, self.model)
        param = each.place.partition("[")[0]
        if end.finish_reason == "ignored" or end.exceeds_kv_cache:
            raise invalid(param, f"{each.place}: {error}", "context_length_exceeded")
        logger.error("request %s failed: %s", output.request_id, error)
        if error.startswith(_NOT_FINITE):
            raise server_error(500, f"{each.place}: {error}", "result_not_finite", param=param)
        raise server_error(500, f"the engine failed on {each.place}", "engine_error", param=param)


def pooling_params(body: PooledFields, task: PoolingTask, dimensions: int | None = None) -> PoolingParams:
    return PoolingParams(
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        dimensions=dimensions,
        use_activation=body.use_activation,
        task=task,
    )


def results(outputs: list[Pooled]) -> list[np.ndarray]:
    return [output.outputs.data for output in outputs]


# Metrics.


class PoolingObserver:
    """Counts one input; at the end of the block as aborted, if it has no result."""

    def __init__(self, metrics: Metrics, task: str, adapter: str | None = None) -> None:
        self._metrics, self._task = metrics, task
        self._adapter = None if adapter is None else metrics.adapter_label(adapter)
        self._ended = False
        #: The fields of ``RequestObserver`` that a ``Tracer`` reads.
        self.num_tokens = 0
        self.finish_reasons: dict[int, str] = {}

    def update(self, output: Pooled, reason: str) -> None:
        metrics, times, tokens = self._metrics, output.metrics, len(output.prompt_token_ids)
        metrics.prompt_tokens.inc(tokens)
        metrics.pooled_tokens(self._task).inc(tokens)
        if self._adapter is not None:
            metrics.adapter_prompt_tokens(self._adapter).inc(tokens)
        if times.time_in_queue is not None:
            metrics.queue.observe(times.time_in_queue)
        if reason in COMPLETE:
            reason = "stop"  # whatever a core calls the end of a prompt after which nothing is generated
            seconds = time.monotonic() - times.arrival_time
            metrics.duration.observe(seconds)
            metrics.pooled_duration(self._task).observe(seconds)
        self._end(reason)

    def _end(self, reason: str) -> None:
        self._ended = True
        self.finish_reasons[0] = reason
        self._metrics.finished(reason).inc()
        self._metrics.pooled_finished(self._task, reason).inc()
        if self._adapter is not None:
            self._metrics.adapter_finished(self._adapter).inc()

    def __enter__(self) -> PoolingObserver:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            self._end("abort")


# Inputs: checked, tokenized and cut before any of them is computed.

#: Fewer characters are tokenized in well under a millisecond, and not in a thread.
_SHORT = 2000


@dataclass(slots=True)
class PooledInput:
    """A prompt, and its path in the request, such as ``input[3]``."""

    place: str
    prompt: Mapping[str, Any]

    @property
    def token_ids(self) -> list[int]:
        """Only after the prompt has been tokenized."""
        ids: list[int] = self.prompt["prompt_token_ids"]
        return ids


@dataclass(slots=True)
class Pairs:
    """Prompts, each computed once, and for each pair of texts the indices of its prompts."""

    inputs: list[PooledInput]
    of_pair: list[list[int]]


async def read_texts(
    service: ServerState,
    request: Request,
    body: PooledTexts,
    prompt_name: str | None = None,
    *,
    named: bool = False,
    field: str = "input",
) -> list[PooledInput]:
    """The inputs of a request, tokenized; ``field``: the route's name of ``input``, for errors.

    If ``named``, the model's prompt ``prompt_name`` is put before each input.
    """
    value: Any = body.input
    if (value is None) == (body.messages is None):
        raise invalid("input", "give input or messages, one of them")
    if body.messages is not None:
        if body.add_generation_prompt is None:
            body.add_generation_prompt = False
        text = await write_conversation(service, request, body.messages, body)
        single = PooledInput("messages", {"prompt": text})
        return await _tokenized(service, [single], body.truncate_prompt_tokens, body.add_special_tokens is True)
    several = isinstance(value, list) and not (value and isinstance(value[0], int))
    entries = value if several else [value]
    check_number(service, field, len(entries))
    inputs = []
    pooling = service.llm.front_end.pooling
    for i, entry in enumerate(entries):
        place = f"{field}[{i}]" if several else field
        if not entry:
            raise wrong(place, "it is empty; a vector or score of nothing means nothing")
        prompt = pooling.embedding_prompt(entry, prompt_name) if named else entry
        inputs.append(PooledInput(place, _fields(prompt)))
    return await _tokenized(service, inputs, body.truncate_prompt_tokens, body.add_special_tokens is not False)


async def read_pairs(
    service: ServerState,
    pairs: Sequence[tuple[str, str]],
    places: Sequence[str],
    truncate: int | None,
    max_tokens: int | None = None,
) -> Pairs:
    """The inputs that score pairs of texts, the second of which are cut to ``max_tokens`` first.

    ``places``: paths of the pairs in the request.
    """
    sizes = [len(first) + len(second) for first, second in pairs]
    if truncate is None and max_tokens is None:
        for place, size in zip(places, sizes, strict=True):
            _check_chars(service, place, size)
    read = await _run_in_thread_if_long(sum(sizes), _make_pairs, service, pairs, places, truncate, max_tokens)
    read.inputs = await _tokenized(service, read.inputs, truncate, special=True)
    return read


def check_number(service: ServerState, field: str, count: int) -> None:
    limit = service.options.max_inputs_per_request
    if not count:
        raise invalid(field, f"{field} must not be an empty list")
    if count > limit:
        message = f"{field} holds {count} inputs; at most {limit} are served at once: send them in several requests"
        raise invalid(field, message, "too_many_inputs")


def _fields(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, Mapping):
        return dict(prompt)
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def _make_pairs(
    service: ServerState,
    pairs: Sequence[tuple[str, str]],
    places: Sequence[str],
    truncate: int | None,
    max_tokens: int | None,
) -> Pairs:
    pooling = service.llm.front_end.pooling
    result, numbers = Pairs([], []), dict[Any, int]()
    for (first, second), place in zip(pairs, places, strict=True):
        if max_tokens is not None:
            # Up to the end of the last token that is kept.
            offsets = service.llm.tokenizer.backend.encode(second, add_special_tokens=False).offsets
            second = second if len(offsets) <= max_tokens else second[: offsets[max_tokens - 1][1]]
        numbers_of_pair = []
        for prompt in pooling.pair_prompts(first, second, truncate):
            fields = _fields(prompt)
            # A query whose vector is compared with many others is computed once.
            key = tuple(fields.items()) if "prompt_token_ids" not in fields else place
            number = numbers.setdefault(key, len(result.inputs))
            if number == len(result.inputs):
                result.inputs.append(PooledInput(place, fields))
            numbers_of_pair.append(number)
        result.of_pair.append(numbers_of_pair)
    return result


async def _tokenized(
    service: ServerState, inputs: list[PooledInput], truncate: int | None, special: bool
) -> list[PooledInput]:
    """The inputs with token ids, cut where the request asks for it."""
    limit, vocab_size = service.llm.max_model_len, service.llm.model_config.vocab_size
    if truncate == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, not 0")
    most = limit if truncate == -1 else truncate
    texts = [each for each in inputs if "prompt_token_ids" not in each.prompt]
    sizes = [len(each.prompt["prompt"]) for each in texts]
    if most is None:
        for each, size in zip(texts, sizes, strict=True):
            _check_chars(service, each.place, size)
    if texts:
        await _run_in_thread_if_long(sum(sizes), _tokenize, service, texts, most, special)
    for each in inputs:
        if most is not None and len(each.token_ids) > most:
            each.prompt = {**each.prompt, "prompt_token_ids": each.token_ids[:most]}
        ids = each.token_ids
        if not ids:
            raise wrong(each.place, "there is no token in it")
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocab_size:
                raise wrong(each.place, f"token ids are integers from 0 to {vocab_size - 1}, not {token}")
        if len(ids) > limit:
            message = f"it has {len(ids)} tokens; the model takes at most {limit}, {_HOW_TO_CUT}"
            raise wrong(each.place, message, "context_length_exceeded")
    return inputs


def _tokenize(service: ServerState, inputs: list[PooledInput], most: int | None, special: bool) -> None:
    tokenizer = service.llm.tokenizer
    texts = [each.prompt["prompt"] for each in inputs]
    batch = tokenizer.encode_batch(texts, special)  # unlike ``encode``, it lets other threads run
    for each, text, ids in zip(inputs, texts, batch, strict=True):
        if special and most is not None and len(ids) > most:
            ids = tokenizer.encode_cut(text, most)  # with the special tokens at the end
        each.prompt = {**each.prompt, "prompt_token_ids": ids}


async def _run_in_thread_if_long(size: int, call: Callable[..., T], *args: Any) -> T:
    return call(*args) if size < _SHORT else await asyncio.to_thread(call, *args)


def _check_chars(service: ServerState, place: str, size: int) -> None:
    if size > service.max_prompt_chars:
        message = f"it has {size} characters; at most {service.max_prompt_chars} can be served, {_HOW_TO_CUT}"
        raise wrong(place, message, "context_length_exceeded")


_HOW_TO_CUT = "and truncate_prompt_tokens=-1 cuts it there"


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


def encode_list(entries: Iterable[Mapping[str, Any]], rest: Mapping[str, Any]) -> bytes:
    """``{"object": "list", "data": entries, **rest}``.

    Entries are made and encoded one by one, so that a thread that writes a large response gives others turns.
    """
    data = b",".join(map(encode_object, entries))
    return b'{"object":"list","data":[' + data + b"]," + encode_object(rest)[1:]
