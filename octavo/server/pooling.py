"""Routes for vectors and scores: embeddings, ranking, classification."""

from __future__ import annotations

import asyncio
import binascii
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import CompletionOutput, Pooled, PoolingParams, PoolingTask
from octavo.core.request import Prompt, RequestOptions
from octavo.server.fields import Int, Labels, Name, RequestModel, ResponseModel, hint, refused
from octavo.server.http.errors import invalid, server_error, wrong
from octavo.server.http.middleware import client_of
from octavo.server.http.streaming import with_cancellation
from octavo.server.logging import log_fields, log_prompt
from octavo.server.metrics import COMPLETE, Metrics
from octavo.server.openai.protocol import ChatMessage, TemplateOptions
from octavo.server.prompt_inputs import write_conversation
from octavo.server.state import ServedModel, ServerState, engine_request_id, state_of

# Bodies of requests for vectors and scores.

_ONE_TYPE = "vectors are computed in the model's precision and sent as float32"


def _of_one_kind(value: Any) -> Any:
    """Refuses a list of texts and token ids, whose errors as one or the other would not say what is wrong."""
    if isinstance(value, list) and value:
        kinds = [_KINDS.get(type(entry)) for entry in value]
        other = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None and None not in kinds:
            text = "texts and token ids cannot be in one list: entry 0 is {first}, entry {other} {second}"
            raise PydanticCustomError("mixed", text, {"first": kinds[0], "other": other, "second": kinds[other]})
    return value


_KINDS = {str: "a text", int: "a token id", list: "a list of token ids"}

#: What is pooled: a text, token ids, or a list of either.
Input = Annotated[
    str
    | Annotated[list[str], Field(fail_fast=True)]
    | Annotated[list[Int], Field(fail_fast=True)]
    | Annotated[list[list[Int]], Field(fail_fast=True)],
    BeforeValidator(_of_one_kind),
]


#: Types of the numbers of a vector, in vLLM's words.
VectorType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]


class PooledFields(Labels):
    """Fields of every request for vectors or scores."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None,
        description="Cut longer inputs to so many tokens, special tokens included; -1: to as many as the model takes. "
        "Without it they are refused.",
    )
    use_activation: bool | None = Field(
        None, description="Vectors get length 1, class scores become probabilities (default: as the model has it)."
    )
    user: Name | None = Field(
        None, description="Whose request it is, for scheduling policies that look at it; the result is the same."
    )
    priority: Int | float | None = Field(
        None, description="Lower goes first; only 0 under a scheduling policy that does not look at it."
    )
    ttft_target: float | None = Field(
        None, description="Seconds to the result that the deadline policy aims at; refused under others."
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Requests with different salts share no cached prefix."
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
    """Fields of requests with inputs that do not depend on each other: ``input``, or a conversation."""

    input: Input | None = Field(None, description="A text, token ids, or a list of either.")
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = Field(
        None, description="In place of input: a conversation, put into words by the model's chat template."
    )
    add_special_tokens: bool | None = Field(
        None, description="Put the model's own tokens around texts (true), and around a conversation (false)."
    )


class VectorFields(RequestModel):
    """How vectors are sent."""

    embed_dtype: VectorType | None = Field(
        None, description="Type of the numbers of a vector (default float32), to which they are rounded."
    )
    endianness: Literal["native", "little", "big"] | None = Field(
        None, description="Order of the bytes of a number in base64 (default little)."
    )

    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float: lists of numbers (default); base64: of their bytes, of embed_dtype."
    )
    dimensions: Int | None = Field(
        None, description="Numbers of a vector, of models that were trained for fewer than all (Matryoshka)."
    )


class EmbeddingRequest(VectorFields, PooledTexts):
    """Body of ``/v1/embeddings``."""

    prompt_name: Name | None = Field(
        None, description="Which of the texts that the model's files name is put before each input, such as query."
    )
    input_type: Name | None = Field(
        None,
        description="query, document, or in other words: the model's prompt of such a name, if it has one, is put "
        "before each input.",
    )
    task: Any = refused("its name is input_type, or prompt_name")
    output_dimension: Any = refused("its name is dimensions")


class PoolingRequest(VectorFields, PooledTexts):
    """Body of ``/pooling``."""

    task: PoolingTask | None = Field(
        None, description="What is computed; default: of each token, or what the model does where it cannot."
    )


class ClassificationRequest(PooledTexts):
    """Body of ``/classify``."""


class TeiEmbedRequest(PooledFields):
    """Body of ``/embed``, of Text Embeddings Inference."""

    inputs: Input = Field(description="A text, token ids, or a list of either.")
    normalize: bool | None = Field(None, description="Vectors get length 1 (default true).")
    truncate: bool | None = Field(None, description="Cut longer inputs to as many tokens as the model takes.")
    truncation_direction: Any = refused("the model's tokenizer_config.json says where texts are cut", "right", "Right")
    prompt_name: Name | None = Field(
        None, description="Which of the texts that the model's files name is put before each input, such as query."
    )
    dimensions: Int | None = Field(
        None, description="Numbers of a vector, of models that were trained for fewer than all (Matryoshka)."
    )


class TextDocument(RequestModel):
    """A document as an object."""

    text: str


Texts = str | Annotated[list[str], Field(fail_fast=True)]


class RerankRequest(PooledFields):
    """Body of ``/v1/rerank``, ``/v2/rerank`` and ``/rerank``."""

    query: str | TextDocument = Field(description="What documents are ranked for.")
    documents: Annotated[list[str | TextDocument], Field(fail_fast=True)] = Field(
        description='Texts, or objects {"text": ..}.'
    )
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Send the best so many (default: all)."
    )
    return_documents: bool | None = Field(
        None, description="Send the documents' texts too (default true; false on /v2/rerank, as Cohere's has none)."
    )
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Cut documents to so many tokens, before they are put together with the query."
    )
    max_chunks_per_doc: Any = refused("documents are not split: max_tokens_per_doc cuts them")
    rank_fields: Any = refused("a document is one text", ["text"])
    relevant_spans: Any = refused("documents are scored as a whole")
    return_embeddings: Any = refused("vectors are given by /v1/embeddings", False)
    encoding_format: Any = refused("scores are numbers", "float")


class TeiRerankRequest(RerankRequest):
    """Body of ``/rerank``: with ``texts`` in place of ``documents`` that of Text Embeddings Inference."""

    documents: Annotated[list[str | TextDocument], Field(fail_fast=True)] | None = Field(  # type: ignore[assignment]
        None, description='Texts, or objects {"text": ..}.'
    )
    texts: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="Another name of documents: the answer is then a list of index and score."
    )
    raw_scores: bool | None = Field(None, description="With texts: scores as the model gives them, no probabilities.")
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


# The inputs of requests for vectors and scores: checked, tokenized and cut, before any of them is computed.

#: Up to this many characters are tokenized in well under a millisecond, and not in a thread.
_SHORT = 2000


@dataclass(slots=True)
class PooledInput:
    """A prompt, which has its token ids once it is tokenized, and its place in the request, such as ``input[3]``."""

    place: str
    prompt: Mapping[str, Any]

    @property
    def token_ids(self) -> list[int]:
        """Its tokens."""
        ids: list[int] = self.prompt["prompt_token_ids"]
        return ids


@dataclass(slots=True)
class Pairs:
    """Pairs of texts: what is computed, each prompt once, and which of these prompts each pair is scored by."""

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
    """The inputs of a request, tokenized. If they are ``named``, the model's prompt of that name is before each.

    ``field``: what the route calls ``input``; errors name it.

    Raises:
        ApiError: there is none, there are too many, or one cannot be served; it names the first.
        InvalidRequestError: the model has no such prompt.
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
    """What is computed to score pairs of texts; ``places`` are those of the pairs in the request.

    ``max_tokens``: second texts are cut to so many first.

    Raises:
        ApiError: a pair cannot be served; it names the first.
        InvalidRequestError: the model does not score, or there is no room for texts.
    """
    sizes = [len(first) + len(second) for first, second in pairs]
    if truncate is None and max_tokens is None:
        for place, size in zip(places, sizes, strict=True):
            _check_chars(service, place, size)
    found = await _beside_loop(sum(sizes), _find_pairs, service, pairs, places, truncate, max_tokens)
    found.inputs = await _tokenized(service, found.inputs, truncate, special=True)
    return found


def check_number(service: ServerState, field: str, count: int) -> None:
    """Refuses a request without inputs, or with too many.

    Raises:
        ApiError: 400.
    """
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


def _find_pairs(
    service: ServerState,
    pairs: Sequence[tuple[str, str]],
    places: Sequence[str],
    truncate: int | None,
    max_tokens: int | None,
) -> Pairs:
    pooling = service.llm.front_end.pooling
    found, numbers = Pairs([], []), dict[Any, int]()
    for (first, second), place in zip(pairs, places, strict=True):
        if max_tokens is not None:
            second = _cut(service, second, max_tokens)
        numbers_of_pair = []
        for prompt in pooling.pair_prompts(first, second, truncate):
            fields = _fields(prompt)
            # A query whose vector is compared with many others is computed once.
            key = tuple(fields.items()) if "prompt_token_ids" not in fields else place
            number = numbers.setdefault(key, len(found.inputs))
            if number == len(found.inputs):
                found.inputs.append(PooledInput(place, fields))
            numbers_of_pair.append(number)
        found.of_pair.append(numbers_of_pair)
    return found


def _cut(service: ServerState, text: str, max_tokens: int) -> str:
    """The text up to the end of its token of this number."""
    offsets = service.llm.tokenizer.backend.encode(text, add_special_tokens=False).offsets
    return text if len(offsets) <= max_tokens else text[: offsets[max_tokens - 1][1]]


async def _tokenized(
    service: ServerState, inputs: list[PooledInput], truncate: int | None, special: bool
) -> list[PooledInput]:
    """The inputs with token ids, cut where that is asked for.

    Raises:
        ApiError: an input cannot be served.
        InvalidRequestError: it is cut to fewer tokens than are put around a text.
    """
    limit = service.llm.max_model_len
    if truncate == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, not 0")
    most = limit if truncate == -1 else truncate
    texts = [each for each in inputs if "prompt_token_ids" not in each.prompt]
    sizes = [len(each.prompt["prompt"]) for each in texts]
    if most is None:
        for each, size in zip(texts, sizes, strict=True):
            _check_chars(service, each.place, size)
    if texts:
        await _beside_loop(sum(sizes), _tokenize, service, texts, most, special)
    for each in inputs:
        if most is not None and len(each.token_ids) > most:
            each.prompt = {**each.prompt, "prompt_token_ids": each.token_ids[:most]}
        _check_tokens(service, each, limit)
    return inputs


def _tokenize(service: ServerState, inputs: list[PooledInput], most: int | None, special: bool) -> None:
    tokenizer = service.llm.tokenizer
    texts = [each.prompt["prompt"] for each in inputs]
    batch = tokenizer.encode_batch(texts, special)  # unlike ``encode``, it lets other threads run
    for each, text, ids in zip(inputs, texts, batch, strict=True):
        if special and most is not None and len(ids) > most:
            ids = tokenizer.encode_cut(text, most)  # with the special tokens at the end
        each.prompt = {**each.prompt, "prompt_token_ids": ids}


async def _beside_loop(size: int, call: Any, *args: Any) -> Any:
    """The result of a call that works on so many characters: made in a thread, if they are many."""
    return call(*args) if size < _SHORT else await asyncio.to_thread(call, *args)


def _check_chars(service: ServerState, place: str, size: int) -> None:
    if size > service.max_prompt_chars:
        message = f"it has {size} characters; at most {service.max_prompt_chars} can be served, {_HOW_TO_CUT}"
        raise wrong(place, message, "context_length_exceeded")


def _check_tokens(service: ServerState, each: PooledInput, limit: int) -> None:
    ids = each.token_ids
    if not ids:
        raise wrong(each.place, "there is no token in it")
    vocab_size = service.llm.model_config.vocab_size
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise wrong(each.place, f"token ids are integers from 0 to {vocab_size - 1}, not {token}")
    if len(ids) > limit:
        message = f"it has {len(ids)} tokens; the model takes at most {limit}, {_HOW_TO_CUT}"
        raise wrong(each.place, message, "context_length_exceeded")


_HOW_TO_CUT = "and truncate_prompt_tokens=-1 cuts it there"


# What the metrics show of requests for vectors and scores.


class PoolingObserver:
    """Counts one input of a request for vectors or scores; at the end of a block as aborted, if it has no result."""

    def __init__(self, metrics: Metrics, task: str, adapter: str | None = None) -> None:
        """``adapter``: the name of the request's, if it has one."""
        self._metrics, self._task = metrics, task
        self._adapter = None if adapter is None else metrics.adapter_label(adapter)
        self._ended = False
        #: Tokens that were generated, and finish reasons, as ``RequestObserver`` has them.
        self.num_tokens = 0
        self.finish_reasons: dict[int, str] = {}

    def update(self, output: Pooled, reason: str) -> None:
        """Counts its output, and the reason of its end."""
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


# The inputs of one HTTP request in the engine: admission to the queue, one engine request for each, failures.

#: Least inputs of one request that are in the engine at once: enough for steps to be full, and so few that those of
#: another request do not wait for thousands.
MIN_IN_ENGINE = 256
#: Inputs that are sent to the engine before the event loop runs other tasks; each takes some 100 microseconds.
_AT_ONCE = 16
#: How the engine's message of a result that is not a number begins; it says in which layer, and nothing internal.
_NOT_FINITE = "the result is not finite"
#: Results of more numbers than this are written as JSON in a thread.
_SHORT_INPUTS = 20_000

logger = logging.getLogger("octavo.server")

#: The JSON of a response, of the outputs in the order of the inputs.
Answer = Callable[[list[Pooled]], bytes]


@dataclass(slots=True)
class PooledRun:
    """The inputs of one HTTP request, each an engine request of its own. One that fails ends the others."""

    request: Request
    body: PooledFields
    #: The model or adapter, with its name in the response.
    model: ServedModel
    #: Its task is named.
    params: PoolingParams
    inputs: list[PooledInput]
    #: Of its id in the response; the engine's requests have ``engine_request_id``.
    prefix: str
    service: ServerState = field(init=False)
    response_id: str = field(init=False)
    options: RequestOptions = field(init=False)

    def __post_init__(self) -> None:
        self.service, body = state_of(self.request), self.body
        self.response_id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.options = RequestOptions(
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            user=body.user or "",
            ttft_target=body.ttft_target,
            lora_request=self.model.adapter,
            client=client_of(self.request),
        )

    async def respond(self, answer: Answer, deadline: float) -> Response:
        """The response, until a ``deadline`` on the loop's clock.

        Raises:
            ApiError: the queue is full, an input failed, or the client has left; no input runs any more.
            InvalidRequestError: the model cannot be asked for this.
            TimeoutError: the deadline has passed.
        """
        body = await with_cancellation(self.request.receive, self._answer(answer), deadline)
        return Response(body, media_type="application/json")

    def response_fields(self) -> dict[str, Any]:
        """Fields common to responses."""
        return {"model": self.model.name, "usage": self.usage(), "id": self.response_id, "created": int(time.time())}

    def usage(self) -> dict[str, int]:
        """The tokens that were computed."""
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
            self._log()
        return [outputs[i] for i in range(len(self.inputs))]

    def _name(self, number: int) -> str:
        return engine_request_id(self.response_id, number, len(self.inputs))

    def _log(self) -> None:
        fields = log_fields(self.request.scope)
        if self.model.adapter is not None:
            fields["adapter"] = self.model.name
        fields.update(inputs=len(self.inputs), prompt_tokens=self.usage()["prompt_tokens"])

    async def _pool(self, name: str, each: PooledInput) -> Pooled:
        """The result of one input; if this is cancelled, the engine's request is aborted."""
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
            message = f"{each.place}: {error}"
            raise server_error(500, message, "result_not_finite", param=param)
        message = f"the engine failed on {each.place}"
        raise server_error(500, message, "engine_error", param=param)


def pooling_params(body: PooledFields, task: PoolingTask, dimensions: int | None = None) -> PoolingParams:
    """What a body asks for, of a task."""
    return PoolingParams(
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        dimensions=dimensions,
        use_activation=body.use_activation,
        task=task,
    )


def results(outputs: list[Pooled]) -> list[np.ndarray]:
    """What was computed, float32."""
    return [output.outputs.data for output in outputs]


# Responses of many numbers, as JSON.

_encode = msgspec.json.Encoder().encode


def numbers(data: np.ndarray, encoding_format: str | None, dtype: str | None = None, order: str | None = None) -> Any:
    """float32 numbers of any shape as JSON has them: lists of numbers, or base64 of their bytes.

    Args:
        data: the numbers.
        encoding_format: "base64", or anything else for lists.
        dtype: what they are rounded to: a ``VectorType``; None: nothing.
        order: of the bytes of a number: "big", or anything else for "little".
    """
    if dtype not in (None, "float32"):
        data = data.astype(_rounded_type(str(dtype)))
    if encoding_format == "base64":
        size = data.dtype.itemsize
        words = data.view(f"u{size}").astype(f"{'>' if order == 'big' else '<'}u{size}", copy=False)
        return binascii.b2a_base64(words.tobytes(), newline=False).decode()
    return data.astype(np.float32, copy=False).tolist()


def _rounded_type(name: str) -> np.dtype[Any]:
    import ml_dtypes

    types = {
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "fp8_e4m3": ml_dtypes.float8_e4m3fn,
        "fp8_e5m2": ml_dtypes.float8_e5m2,
    }
    return np.dtype(types[name])


def encode_list(entries: Iterable[Mapping[str, Any]], rest: Mapping[str, Any]) -> bytes:
    """``{"object": "list", "data": entries, **rest}``; each entry is made and written before the next one.

    So that a thread that writes a large response leaves others their turn between two entries.
    """
    data = b",".join(map(_encode, entries))
    return b'{"object":"list","data":[' + data + b"]," + _encode(rest)[1:]


def encode_object(value: Mapping[str, Any] | list[Any]) -> bytes:
    """As JSON."""
    return _encode(value)


# The routes ``/v1/rerank``, ``/v2/rerank``, ``/rerank``, ``/v1/score`` and ``/score``.

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
    service = state_of(request)
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
    service = state_of(request)
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


def _params(service: ServerState, body: PooledFields) -> PoolingParams:
    return service.llm.front_end.pooling.score_params(pooling_params(body, "score"))


def _scores(service: ServerState, pairs: Pairs, outputs: list[Pooled]) -> list[float]:
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


# The routes ``/v1/embeddings``, ``/embed``, ``/pooling`` and ``/classify``.

#: What ``/pooling`` computes where a request does not say it: the first that the model can do.
_BY_TOKEN_FIRST: tuple[PoolingTask, ...] = ("token_embed", "token_classify", "embed", "classify", "score")
#: Words of clients' ``input_type`` -> names that models give such prompts; the first that a model has is meant.
_PROMPT_NAMES = {
    "query": ("query", "search_query", "retrieval.query", "web_search_query"),
    "document": ("document", "passage", "search_document", "retrieval.passage", "corpus"),
}


async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """The vectors of texts or token ids, one or many."""
    service = state_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    inputs = await read_texts(service, request, body, prompt_name(service, body), named=True)
    params = pooling_params(body, "embed", body.dimensions)
    run = PooledRun(request, body, model, params, inputs, "embd")
    return await run.respond(_list_of(run, "embedding", "embedding", body), deadline)


async def embed_texts(request: Request, body: TeiEmbedRequest) -> Response:
    """The vectors alone, as Text Embeddings Inference sends them."""
    service = state_of(request)
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
    service = state_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    task = body.task or _by_token(service)
    service.require(task)
    params = pooling_params(body, task, body.dimensions)
    run = PooledRun(request, body, model, params, await read_texts(service, request, body), "pool")
    return await run.respond(_list_of(run, "pooling", "data", body), deadline)


async def classify(request: Request, body: ClassificationRequest) -> Response:
    """The class scores of texts or token ids."""
    service = state_of(request)
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


def _by_token(service: ServerState) -> PoolingTask:
    return next((task for task in _BY_TOKEN_FIRST if task in service.tasks), "embed")


def prompt_name(service: ServerState, body: EmbeddingRequest) -> str | None:
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


# Responses of the routes for vectors and scores, as the OpenAPI page describes them.


class PooledUsage(ResponseModel):
    """Tokens that were computed."""

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
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(_ListOfInputs):
    """A response of ``/v1/embeddings``."""

    data: list[Embedding]


class PooledData(ResponseModel):
    """What was computed of one input."""

    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str = Field(
        description="Numbers, or a list of them for each token; in base64 those of all tokens after each other."
    )


class PooledList(_ListOfInputs):
    """A response of ``/pooling``."""

    data: list[PooledData]


class Classification(ResponseModel):
    """The class scores of one input."""

    index: int
    label: str | None = Field(description="Name of the class with the highest score.")
    probs: list[float]
    num_classes: int


class ClassificationList(_ListOfInputs):
    """A response of ``/classify``."""

    data: list[Classification]


class RankedDocument(ResponseModel):
    """The text of a document."""

    text: str


class Ranked(ResponseModel):
    """A document's place in the request, and how well it fits the query."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(ResponseModel):
    """A response of ``/v1/rerank``, ``/v2/rerank`` and ``/rerank``: the best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PooledUsage
    meta: dict[str, Any] = Field(description="Version of Cohere's API, and the tokens in its words.")


class RankedText(ResponseModel):
    """An entry of the list that ``/rerank`` answers to ``texts``: the best first."""

    index: int
    score: float
    text: str | None = None


class Score(ResponseModel):
    """How well two texts fit."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(_ListOfInputs):
    """A response of ``/v1/score`` and ``/score``."""

    data: list[Score]


# The routes ``/embedding`` and ``/embeddings`` of llama.cpp.


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
    service = state_of(request)
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
