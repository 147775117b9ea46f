"""The inputs of one HTTP request in the engine: admission to the queue, one engine request for each, failures."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import CompletionOutput
from octavo.core.pooling_outputs import Pooled
from octavo.core.pooling_params import PoolingParams, PoolingTask
from octavo.core.request_options import RequestOptions
from octavo.server.api_errors import invalid, server_error
from octavo.server.cancellation import with_cancellation
from octavo.server.logging import log_fields, log_prompt
from octavo.server.middleware import client_of
from octavo.server.pooling.pooled_fields import PooledFields
from octavo.server.pooling.pooled_inputs import PooledInput
from octavo.server.pooling.pooling_observer import PoolingObserver
from octavo.server.service import ServedModel, Service, engine_request_id, service_of

#: Least inputs of one request that are in the engine at once: enough for steps to be full, and so few that those of
#: another request do not wait for thousands.
MIN_IN_ENGINE = 256
#: Inputs that are sent to the engine before the event loop runs other tasks; each takes some 100 microseconds.
_AT_ONCE = 16
#: How the engine's message of a result that is not a number begins; it says in which layer, and nothing internal.
_NOT_FINITE = "the result is not finite"
#: Results of more numbers than this are written as JSON in a thread.
_SHORT = 20_000

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
    service: Service = field(init=False)
    response_id: str = field(init=False)
    options: RequestOptions = field(init=False)

    def __post_init__(self) -> None:
        self.service, body = service_of(self.request), self.body
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
        if sum(output.outputs.data.size for output in outputs) < _SHORT:
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
