"""One HTTP request in the engine: admission to the queue, its prompts as engine requests, usage, metrics, failure.

The routes for text (``Generation``), for vectors and scores (``pooling``) and for recordings (``audio``) all make an
``EngineCall``.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.requests import Request

from octavo.core.cache_hints import Breakpoint
from octavo.core.errors import InvalidRequestError
from octavo.core.failures import NOT_FINITE
from octavo.core.outputs import CompletionOutput, Pooled, PoolingParams, RequestOutput
from octavo.core.request import LoRARequest, RequestOptions, num_prompt_tokens
from octavo.core.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.answer_format import report_relaxed_keywords
from octavo.server.http.errors import ApiError, server_error
from octavo.server.http.middleware import client_of, owner_of
from octavo.server.http.streaming import cancel_tasks
from octavo.server.logging import log_fields, log_prompt
from octavo.server.metrics import COMPLETE, RequestObserver
from octavo.server.prompt_cache import cache_hints

if TYPE_CHECKING:
    from octavo.server.state import ServedModel, ServerState

#: Fewest prompts of one HTTP request in the engine at a time: enough for full steps, few enough that another request
#: does not wait for thousands.
MIN_IN_ENGINE = 256
#: Prompts that are sent to the engine in one turn of the event loop; each takes some 100 microseconds.
_AT_ONCE = 16

logger = logging.getLogger("octavo.server")

Output = TypeVar("Output", RequestOutput, Pooled)


def new_response_id(prefix: str) -> str:
    """An id such as ``cmpl-...``; never the client's request id, as a client may use one twice."""
    return f"{prefix}-{uuid.uuid4().hex}"


def request_options(
    request: Request,
    body: Any,
    adapter: LoRARequest | None = None,
    breakpoints: Sequence[Breakpoint] = (),
    **others: Any,
) -> RequestOptions:
    """The options of an engine request from the fields that all bodies share, and ``others``."""
    return RequestOptions(
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        user=body.user or owner_of(request),
        ttft_target=body.ttft_target,
        tpot_target=getattr(body, "tpot_target", None),
        lora_request=adapter,
        client=client_of(request),
        cache_hints=cache_hints(body, breakpoints),
        **others,
    )


@dataclass(slots=True, kw_only=True)
class EngineCall(Generic[Output]):
    """The prompts of one HTTP request, each an engine request, and the tokens used so far. A failure ends all."""

    service: ServerState
    request: Request
    #: The model or adapter, with its name in the response.
    model: ServedModel
    #: The ids of the engine's requests are made of it.
    response_id: str
    #: Tokenized, as ``TokensPrompt``.
    prompts: Sequence[Mapping[str, Any]] = ()
    params: SamplingParams | BeamSearchParams | PoolingParams = field(default_factory=SamplingParams)
    #: The same for each prompt.
    options: RequestOptions
    #: Whether outputs are increments; else each prompt has one complete output.
    streams: bool = False
    #: Choices per prompt.
    n: int = 1
    #: The path of each prompt in the request, such as ``input[3]``, for errors; empty: errors name none.
    places: Sequence[str] = ()
    #: Paths in the engine's errors -> those of the request.
    names: Mapping[str, str] = field(default_factory=dict)
    #: Seconds since 1970.
    created: int = field(default_factory=lambda: int(time.time()))
    #: Tokens of the choices that are returned, or would have been.
    completion_tokens: int = 0
    #: Prefix cache hits of the prompts that run or have finished; and tokens that were not found, and are held now.
    cached_tokens: int = 0
    created_tokens: int = 0
    #: Draft tokens of the prompts that have finished.
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(map(num_prompt_tokens, self.prompts))

    async def finish(self) -> list[Output]:
        """The complete output of each prompt of a request without streaming."""
        async with aclosing(self.outputs()) as outputs:
            complete = {index: output async for index, output in outputs}
        return [complete[i] for i in range(len(self.prompts))]

    async def outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        """(prompt index, output) pairs as they come; at most one output per prompt is buffered if ``streams``."""
        service, count = self.service, len(self.prompts)
        if service.options.log_prompts:
            for prompt in self.prompts:
                log_prompt(prompt.get("prompt", prompt["prompt_token_ids"]))
        config = service.llm.config
        in_engine = min(count, max(MIN_IN_ENGINE, 2 * config.max_num_seqs * config.data_parallel_size))
        try:
            with self.admitted({self._name(i): num_prompt_tokens(self.prompts[i]) for i in range(in_engine)}):
                if count == 1:
                    async with aclosing(self._run(0)) as run:
                        async for output in run:
                            yield 0, output
                else:
                    async with aclosing(self._merged(in_engine)) as merged:
                        async for item in merged:
                            yield item
        finally:
            fields = log_fields(self.request.scope)
            if self.model.adapter is not None:
                fields["adapter"] = self.model.name
            fields["prompt_tokens"] = self.prompt_tokens
            if isinstance(self.params, PoolingParams):
                fields["inputs"] = count
            else:
                fields["completion_tokens"] = self.completion_tokens

    @contextmanager
    def admitted(self, lengths: Mapping[str, int]) -> Iterator[None]:
        """Counts engine requests (id -> prompt tokens) in the server's queue until they run; 429 if it is full."""
        self.service.queue.enter(lengths)
        try:
            yield
        finally:
            self.service.queue.leave(*lengths)

    async def _merged(self, in_engine: int) -> AsyncGenerator[tuple[int, Output], None]:
        merged = asyncio.Queue[tuple[int, Output] | Exception](1 if self.streams else 0)
        remaining, waiting, tasks = len(self.prompts), iter(range(len(self.prompts))), list[asyncio.Task[None]]()

        async def run_next() -> None:
            try:
                for index in waiting:
                    async with aclosing(self._run(index)) as run:
                        async for output in run:
                            await merged.put((index, output))
            except Exception as e:
                await merged.put(e)

        try:
            for i in range(in_engine):
                tasks.append(asyncio.create_task(run_next()))
                if i % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            while remaining:
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                remaining -= item[1].finished
                yield item
        finally:
            await cancel_tasks(*tasks)

    async def _run(self, index: int) -> AsyncGenerator[Output, None]:
        """The outputs of one prompt."""
        service, params, name = self.service, self.params, self._name(index)
        prompt = self.prompts[index]
        try:
            stream: Any = await service.llm.submit(name, prompt, params, self.options, streaming=self.streams)
        except InvalidRequestError as e:
            raise e.renamed(self.names) from None
        finally:
            service.queue.leave(name)
        grammar = params.structured_outputs if isinstance(params, SamplingParams) else None
        if grammar is not None and (relaxed := service.llm.inputs.grammars.relaxed(grammar)):
            report_relaxed_keywords(self.request.scope, relaxed)
        task = params.task if isinstance(params, PoolingParams) else None
        observer = RequestObserver(service.metrics, self.model.name if self.model.adapter else None, task)
        try:
            with closing(stream):
                is_first = True
                async for output in stream:
                    if is_first:
                        self._count_begin(output)
                        is_first = False
                    if isinstance(output, RequestOutput):
                        observer.update(output)
                        ends = [completion for completion in output.outputs if completion.finished]
                        self.completion_tokens += sum(len(c.token_ids) for c in self.choices(output))
                    else:  # a vector or score has an error of its own
                        ends = [replace(stream.request.completions[0].output, error=output.outputs.error)]
                        observer.update(output, ends[0].finish_reason)
                    if output.finished:
                        self._count_end(output, observer)
                    for end in ends:
                        if end.error is not None or end.finish_reason not in COMPLETE:
                            raise self._error(index, end)
                    yield output
        finally:
            # Tokens that were generated before an abort and never read.
            self.completion_tokens += stream.request.num_untaken_tokens
            observer.close(stream.request.num_untaken_tokens)

    def _count_begin(self, output: RequestOutput | Pooled) -> None:
        cached, held = output.metrics.num_cached_tokens, output.metrics.num_held_tokens
        self.cached_tokens += cached
        self.created_tokens += max(0, held - cached)

    def _count_end(self, output: RequestOutput | Pooled, observer: RequestObserver) -> None:
        self.draft_tokens += output.metrics.num_draft_tokens
        self.accepted_tokens += output.metrics.num_accepted_draft_tokens
        self.service.queue.observe(output)
        if self.service.tracer is not None:
            self.service.tracer.record(output, observer, self.request.headers)

    def choices(self, output: RequestOutput) -> list[CompletionOutput]:
        """The first ``n`` completions of an output; beam search returns its whole width."""
        return output.outputs[: self.n]

    def _error(self, index: int, end: CompletionOutput) -> Exception:
        """The error of a prompt with a completion that did not end by itself."""
        place, error = self.places[index] if self.places else "", end.error or "the request could never run"
        param, at = place.partition("[")[0] or None, f"{place}: " if place else ""
        if end.finish_reason == "ignored":
            return ApiError(400, at + error, param=param, code="context_length_exceeded")
        self.service.check_completion(end, self.model)
        if end.exceeds_kv_cache:
            code = "context_length_exceeded" if place else "too_large"
            return ApiError(400, f"{at or 'the request is too large: '}{error}", param=param, code=code)
        if end.invalid is not None:
            return end.invalid.renamed(self.names)
        failure = self.engine_failed(self._name(index), error, place or "this request", param)
        if place and end.error_kind == NOT_FINITE:
            return server_error(500, at + error, "result_not_finite", param=param)
        return failure

    def engine_failed(self, name: str, error: object, where: str, param: str | None) -> ApiError:
        """The response to an error of the engine, which is logged: its details are not for clients."""
        logger.error("request %s failed: %s", name, error)
        return server_error(500, f"the engine failed on {where}", "engine_error", param=param)

    def _name(self, index: int) -> str:
        """The id of a prompt's request in the engine and the log."""
        return self.response_id if len(self.prompts) == 1 else f"{self.response_id}-{index}"
