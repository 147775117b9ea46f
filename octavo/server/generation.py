"""One HTTP request's way through the engine: its place in the queue, its prompts side by side, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.server.answers import PromptDetails, Usage
from octavo.server.errors import ApiError
from octavo.server.metrics import RequestObserver
from octavo.server.prompts import ReadPrompt
from octavo.server.service import Service

logger = logging.getLogger("octavo.server")


@dataclass(slots=True)
class Generation:
    """The prompts of one request on their way through the engine, and what they used of it so far."""

    service: Service
    #: Of the answer, such as ``cmpl-...``; the engine's requests are numbered after it.
    answer_id: str
    prompts: list[ReadPrompt]
    params: SamplingParams | BeamSearchParams
    streaming: bool
    #: Choices of each prompt.
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    #: Headers of the HTTP request, by lower-case name.
    headers: dict[str, str] = field(default_factory=dict)
    #: Tokens of the choices that are handed out.
    completion_tokens: int = 0
    #: Tokens of prompts found in the prefix cache, of prompts that have ended.
    cached_tokens: int = 0

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs as they come, each with the number of its prompt: increments if ``streaming``, else wholes.

        Raises:
            ApiError: the queue is full, or a completion failed; all prompts are then ended.
            InvalidRequestError: a prompt cannot be served; likewise.
        """
        self.service.queue.check([len(prompt.token_ids) for prompt in self.prompts])
        runs = [self._run(i) for i in range(len(self.prompts))]
        try:
            if len(runs) == 1:
                async for output in runs[0]:
                    yield 0, output
            else:
                async with aclosing(_side_by_side(runs)) as merged:
                    async for item in merged:
                        yield item
        finally:
            for run in runs:
                await run.aclose()

    async def finish(self) -> list[RequestOutput]:
        """The whole output of each prompt, of a request that is not streaming.

        Raises:
            ApiError, InvalidRequestError: as ``outputs``.
        """
        async with aclosing(self.outputs()) as outputs:
            wholes = {number: output async for number, output in outputs}
        return [wholes[i] for i in range(len(self.prompts))]

    def choices(self, output: RequestOutput) -> list[CompletionOutput]:
        """What of an output is asked for: beam search returns its whole width."""
        return output.outputs[: self.n]

    def usage(self, *, uncounted: bool = False) -> Usage:
        """Tokens used so far; ``uncounted`` where what was generated is not handed out."""
        prompt = sum(len(p.token_ids) for p in self.prompts)
        completion = 0 if uncounted else self.completion_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=self.cached_tokens),
        )

    async def _run(self, number: int) -> AsyncGenerator[RequestOutput, None]:
        """One prompt's outputs."""
        service = self.service
        stream = await service.llm.submit(
            f"{self.answer_id}-{number}",
            {"prompt_token_ids": self.prompts[number].token_ids},
            self.params,
            priority=self.priority,
            cache_salt=self.cache_salt,
            streaming=self.streaming,
        )
        observer = RequestObserver(service.metrics)
        try:
            with closing(stream):
                async for output in stream:
                    observer.update(output)
                    self.completion_tokens += sum(len(c.token_ids) for c in self.choices(output))
                    if output.finished:
                        self.cached_tokens += output.metrics.num_cached_tokens
                        service.queue.observe(output)
                        if service.tracer is not None:
                            service.tracer.record(output, observer, self.headers)
                    _refuse_failed(output)
                    yield output
        finally:
            observer.close()


async def _side_by_side(
    runs: list[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several runs as they come; of each run one at most waits to be taken."""
    waiting = {asyncio.ensure_future(_next(run)): i for i, run in enumerate(runs)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                output = task.result()
                if output is None:
                    continue
                waiting[asyncio.ensure_future(_next(runs[number]))] = number
                yield number, output
    finally:
        await end_tasks(*waiting)


async def _next(run: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(run, None)


def _refuse_failed(output: RequestOutput) -> None:
    """Raises if a completion ended in another way than by its own."""
    for completion in output.outputs:
        if completion.finish_reason == "ignored":
            raise ApiError(400, completion.error or "the request could never run", code="context_length_exceeded")
        if completion.finish_reason == "abort":
            raise ApiError(503, "the request was ended as the server shuts down", kind="server_error", code="aborted")
        if completion.outgrown:
            raise ApiError(400, f"the request asks for too much at once: {completion.error}", code="too_large")
        if completion.finish_reason == "error":
            logger.error("request %s failed: %s", output.request_id, completion.error)
            raise ApiError(500, "the engine failed on this request", kind="server_error", code="engine_error")


async def unless_gone(receive: Any, work: Coroutine[Any, Any, Any], deadline: float) -> Any:
    """The result of the work, which is cancelled when the client goes away or the time is over.

    Args:
        receive: of the request, whose body has been read.
        work: what takes long.
        deadline: on the loop's clock.

    Raises:
        TimeoutError: the deadline has passed.
        ApiError: of status 499, which no one will see.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client has closed the connection")
    finally:
        await end_tasks(task, gone)


async def disconnected(receive: Any) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancels what still runs, and waits until nothing does."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
