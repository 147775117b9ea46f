"""The generation of one HTTP request: admission to the queue, one engine request for each prompt, usage, failures."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from octavo import __version__
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.errors import InvalidRequestError
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.prompts import TokensPrompt, num_prompt_tokens
from octavo.core.reasoning import ReasoningMarks
from octavo.core.request_options import RequestOptions
from octavo.core.sampling_params import DefaultMaxTokens, SamplingParams
from octavo.server.api_errors import ApiError, invalid, server_error, unsupported
from octavo.server.cancellation import cancel_tasks
from octavo.server.formats import form_error, renamed, tell_relaxed_keywords
from octavo.server.logging import log_fields, log_prompt
from octavo.server.logprobs import LogprobsTracker, TextLogprobs, TokenNames
from octavo.server.metrics import RequestObserver
from octavo.server.middleware import client_of
from octavo.server.prompt_fields import truncated
from octavo.server.protocol import GenerationRequest
from octavo.server.protocol_answers import CompletionDetails, PromptDetails, Usage
from octavo.server.request_params import make_beam_search_params, make_sampling_params
from octavo.server.service import ServedModel, Service, engine_request_id

#: Logprobs at each position where the engine's ``max_logprobs`` is not given: as many as OpenAI's API has.
DEFAULT_MAX_LOGPROBS = 20

logger = logging.getLogger("octavo.server")

T = TypeVar("T", LogprobsTracker, TextLogprobs)


@dataclass(slots=True)
class Generation:
    """The prompts of one HTTP request in the engine, and the tokens used so far."""

    service: Service
    request: Request
    body: GenerationRequest
    #: The model or adapter, with its name in the response.
    model: ServedModel
    #: Id of the response, such as ``cmpl-...``; the engine's requests have ``engine_request_id``.
    response_id: str
    prompts: list[TokensPrompt]
    params: SamplingParams | BeamSearchParams
    #: Of each prompt.
    options: RequestOptions
    #: Seconds since 1970.
    created: int = field(default_factory=lambda: int(time.time()))
    #: Tokens of the choices that are returned, or were to be.
    completion_tokens: int = 0
    #: Prompt tokens found in the prefix cache, over the prompts that have finished.
    cached_tokens: int = 0
    #: Draft tokens of the prompts that have finished, and how many of them were accepted.
    draft_tokens: int = 0
    accepted_tokens: int = 0
    #: Tokens of reasoning; None: reasoning is not told apart.
    reasoning_tokens: int | None = None

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt index, output) pairs: increments as they come if streaming, else one complete output a prompt.

        Raises:
            ApiError: the queue is full, or a completion failed; all prompts are aborted.
            InvalidRequestError: a prompt cannot be served; all prompts are aborted.
        """
        count = len(self.prompts)
        prompts = {engine_request_id(self.response_id, i, count): prompt for i, prompt in enumerate(self.prompts)}
        self.service.queue.enter({name: num_prompt_tokens(prompt) for name, prompt in prompts.items()})
        runs = [self._run(name, prompt) for name, prompt in prompts.items()]
        try:
            if len(runs) == 1:
                async for output in runs[0]:
                    yield 0, output
            else:
                async with aclosing(_merge_outputs(runs)) as merged:
                    async for item in merged:
                        yield item
        finally:
            self.service.queue.leave(*prompts)
            for run in runs:
                await run.aclose()
            if self.model.adapter is not None:
                log_fields(self.request.scope)["adapter"] = self.model.name
            log_fields(self.request.scope).update(
                prompt_tokens=sum(map(num_prompt_tokens, self.prompts)),
                completion_tokens=self.completion_tokens,
            )

    async def finish(self) -> list[RequestOutput]:
        """The complete output of each prompt of a request that is not streaming.

        Raises:
            ApiError, InvalidRequestError: as ``outputs``.
        """
        async with aclosing(self.outputs()) as outputs:
            complete = {index: output async for index, output in outputs}
        return [complete[i] for i in range(len(self.prompts))]

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return self.body.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    def choices(self, output: RequestOutput) -> list[CompletionOutput]:
        """The first ``n`` completions of an output; beam search returns its whole width."""
        return output.outputs[: self.n]

    @property
    def token_names(self) -> TokenNames:
        """How logprobs name tokens."""
        return TokenNames(self.service.llm.tokenizer, self.body.return_tokens_as_token_ids is True)

    def track(self, kind: type[T], output: RequestOutput, **options: Any) -> T:
        """What follows the tokens of a choice: a ``LogprobsTracker`` or a ``TextLogprobs``."""
        return kind(
            self.service.llm.tokenizer,
            output.prompt_token_ids,
            skip_special_tokens=self.body.skip_special_tokens is not False,
            visible_tokens=self.options.visible_tokens,
            **options,
        )

    def usage(self) -> Usage:
        """Tokens used so far."""
        prompt, completion = sum(map(num_prompt_tokens, self.prompts)), self.completion_tokens
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=self.cached_tokens),
        )
        details: dict[str, int] = {}
        if self.draft_tokens or self.options.prediction is not None:
            details["accepted_prediction_tokens"] = self.accepted_tokens
            details["rejected_prediction_tokens"] = self.draft_tokens - self.accepted_tokens
        if self.reasoning_tokens is not None:
            details["reasoning_tokens"] = self.reasoning_tokens
        if details:
            usage.completion_tokens_details = CompletionDetails(**details)
        return usage

    def chunk_usage(self) -> dict[str, Usage | None]:
        """The usage field of a chunk: absent, or an explicit null before the last one, as the OpenAI API sends it."""
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return {}
        return {"usage": self.usage() if options.continuous_usage_stats else None}

    def response_fields(self) -> dict[str, Any]:
        """Fields common to responses and chunks."""
        return {
            "id": self.response_id,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"octavo-{__version__}",
        }

    async def _run(self, name: str, prompt: TokensPrompt) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one prompt."""
        service = self.service
        try:
            stream = await service.llm.submit(name, prompt, self.params, self.options, streaming=bool(self.body.stream))
        except InvalidRequestError as e:
            raise renamed(e, self.body) from None
        finally:
            service.queue.leave(name)
        self._tell_relaxed_keywords()
        observer = RequestObserver(service.metrics, self.model.name if self.model.adapter else None)
        try:
            with closing(stream):
                async for output in stream:
                    observer.update(output)
                    self.completion_tokens += sum(len(c.token_ids) for c in self.choices(output))
                    if output.finished:
                        self.cached_tokens += output.metrics.num_cached_tokens
                        self.draft_tokens += output.metrics.num_draft_tokens
                        self.accepted_tokens += output.metrics.num_accepted_draft_tokens
                        service.queue.observe(output)
                        if service.tracer is not None:
                            service.tracer.record(output, observer, self.request.headers)
                    self._raise_if_failed(output)
                    yield output
        finally:
            # Of a request that is left: tokens that were generated all the same.
            self.completion_tokens += stream.request.num_untaken_tokens
            observer.close(stream.request.num_untaken_tokens)

    def _tell_relaxed_keywords(self) -> None:
        """Has a header and the access log say which keywords of a schema the answer is not held to."""
        form = self.params.structured_outputs if isinstance(self.params, SamplingParams) else None
        if form is not None and (relaxed := self.service.llm.inputs.grammars.relaxed(form)):
            tell_relaxed_keywords(self.request.scope, relaxed)

    def _raise_if_failed(self, output: RequestOutput) -> None:
        """Raises if a completion was ignored, aborted or failed."""
        for completion in output.outputs:
            if completion.finish_reason == "ignored":
                raise ApiError(400, completion.error or "the request could never run", code="context_length_exceeded")
            self.service.check_completion(completion, self.model)
            if completion.exceeds_kv_cache:
                raise ApiError(400, f"the request asks for too much at once: {completion.error}", code="too_large")
            if completion.excludes_all_tokens:
                raise renamed(InvalidRequestError(completion.error or ""), self.body)
            if (about_form := form_error(completion.error, self.params)) is not None:
                raise renamed(InvalidRequestError(about_form), self.body)
            if completion.finish_reason == "error":
                logger.error("request %s failed: %s", output.request_id, completion.error)
                raise server_error(500, "the engine failed on this request", "engine_error")


def make_generation(
    service: Service,
    request: Request,
    body: GenerationRequest,
    model: ServedModel,
    prompts: list[TokensPrompt],
    *,
    prefix: str,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    prediction: list[int] | None = None,
    visible_tokens: frozenset[int] = frozenset(),
    reasoning: ReasoningMarks | None = None,
) -> Generation:
    """Checks the size and the parameters of a request and prepares its generation.

    ``prefix`` is that of the response id, which is never a request id, as a client may use one twice. ``prediction``,
    ``visible_tokens`` and ``reasoning``: see ``RequestOptions``, whose other fields are those of the body.

    Raises:
        InvalidRequestError, ApiError: a parameter is out of range or not supported.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is allowed only with stream=true", param="stream_options")
    _check_size(service, body, len(prompts), logprobs, prompt_logprobs)
    prompts = _fitted(service, body, prompts, max_tokens)
    if service.options.log_prompts:
        for prompt in prompts:
            log_prompt(prompt.get("prompt", prompt["prompt_token_ids"]))
    params: SamplingParams | BeamSearchParams
    if body.use_beam_search:
        if logprobs is not None:
            raise unsupported("logprobs", "logprobs is not supported with use_beam_search")
        longest = service.llm.max_model_len - min(len(p["prompt_token_ids"]) for p in prompts)
        params = make_beam_search_params(body, DefaultMaxTokens(longest) if max_tokens is None else max_tokens)
    else:
        params = make_sampling_params(
            body,
            service.llm.inputs.default_sampling,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    options = RequestOptions(
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        user=body.user or "",
        ttft_target=body.ttft_target,
        tpot_target=body.tpot_target,
        lora_request=model.adapter,
        prediction=prediction,
        visible_tokens=visible_tokens,
        reasoning=reasoning,
        client=client_of(request),
    )
    return Generation(service, request, body, model, f"{prefix}-{uuid.uuid4().hex}", prompts, params, options)


def _check_size(
    service: Service, body: GenerationRequest, prompts: int, logprobs: int | None, prompt_logprobs: int | None
) -> None:
    """Bounds the memory that one request can take in this process."""
    sequences = prompts * max(body.n or 1, body.best_of or 1)
    limit = service.options.max_sequences_per_request
    if sequences > limit:
        param = "n" if body.best_of is None else "best_of"
        raise ApiError(400, f"the request asks for {sequences} sequences; at most {limit} are served", param=param)
    most = service.llm.config.max_logprobs
    limit = DEFAULT_MAX_LOGPROBS if most is None else service.llm.model_config.vocab_size if most == -1 else most
    if max(logprobs or 0, prompt_logprobs or 0) > limit:
        raise ApiError(
            400,
            f"logprobs of at most {limit} most likely tokens are served (the engine's option max_logprobs)",
            param="logprobs",
        )


def _fitted(
    service: Service, body: GenerationRequest, prompts: list[TokensPrompt], max_tokens: int | None
) -> list[TokensPrompt]:
    """The prompts, cut where the body allows it.

    Raises:
        ApiError: the context has no room for a prompt and what the body asks for after it.
    """
    limit = service.llm.max_model_len
    named = max_tokens is not None and not isinstance(max_tokens, DefaultMaxTokens)
    needed = max_tokens if named and max_tokens is not None else 1
    if (most := body.truncate_prompt_tokens) is not None:
        most = max(1, limit - needed) if most == -1 else most
        if most == 0:
            raise ApiError(
                400, "truncate_prompt_tokens must be -1 or at least 1, not 0", param="truncate_prompt_tokens"
            )
        prompts = [truncated(prompt, most, body.truncation_side or "left") for prompt in prompts]
    longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
    if longest + needed <= limit:
        return prompts
    param = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) is not None else "max_tokens"
    # Clients look for the first words, which are those of the OpenAI API.
    message = f"this model's maximum context length is {limit} tokens, but the prompt has {longest}"
    if named and longest < limit:
        message += f" and {param} asks for {needed} more; lower it, or leave it out for as many as fit"
    else:
        param = "prompt" if hasattr(body, "prompt") else "messages"
        message += f" tokens, which leaves no room for an answer; shorten the {param}"
    raise invalid(param, message, "context_length_exceeded")


async def _merge_outputs(
    runs: list[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several runs as they come; at most one of each run is buffered."""
    pending = {asyncio.ensure_future(_next(run)): i for i, run in enumerate(runs)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                output = task.result()
                if output is None:
                    continue
                pending[asyncio.ensure_future(_next(runs[index]))] = index
                yield index, output
    finally:
        await cancel_tasks(*pending)


async def _next(run: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(run, None)
