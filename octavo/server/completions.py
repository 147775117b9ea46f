"""``/v1/completions``"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.server import choices
from octavo.server.answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from octavo.server.errors import ApiError, unsupported
from octavo.server.generation import Generation, unless_gone
from octavo.server.logging import log_prompt
from octavo.server.prompts import ReadPrompt, read_prompts
from octavo.server.protocol import CompletionRequest, GenerationRequest
from octavo.server.sampling import beam_search_params, sampling_params
from octavo.server.service import Service, service_of
from octavo.server.streaming import DONE, EventStream, event

#: As the OpenAI API has it.
DEFAULT_MAX_TOKENS = 16
FINGERPRINT = f"octavo-{__version__}"


async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Completes prompts: texts or token ids, one or many; as one answer or as a stream of events."""
    service = service_of(request)
    deadline = asyncio.get_running_loop().time() + service.options.request_timeout
    model = service.model_name(body.model)
    check_fields(service, body)
    prompts = await read_prompts(service, body)
    asked = _Asked(request, body, _generation(request, service, body, prompts), model)
    if body.stream:
        return EventStream(asked.stream(), deadline)
    outputs = await unless_gone(request.receive, asked.generation.finish(), deadline)
    return Response(asked.answer(outputs).encode(), media_type="application/json")


def check_fields(service: Service, body: GenerationRequest) -> None:
    """Refuses what is not supported, and notes what is unknown.

    Raises:
        ApiError: 400, with the name of the field.
    """
    for name, message in body.unsupported().items():
        raise unsupported(name, message)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is allowed only with stream=true", param="stream_options")
    service.note_unknown(body.model_extra or ())


def new_answer_id(prefix: str) -> str:
    """Of an answer; never that of a request, as a client may use one twice."""
    return f"{prefix}-{uuid.uuid4().hex}"


def generation_for(
    request: Request,
    service: Service,
    body: GenerationRequest,
    prompts: list[ReadPrompt],
    *,
    prefix: str,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> Generation:
    """What the engine is to do for a request.

    Raises:
        InvalidRequestError, ApiError: a parameter is out of range or not supported.
    """
    _check_size(service, body, len(prompts), logprobs, prompt_logprobs)
    if service.options.log_prompts:
        for prompt in prompts:
            log_prompt(prompt.text if prompt.text is not None else prompt.token_ids)
    params: SamplingParams | BeamSearchParams
    if body.use_beam_search:
        if logprobs is not None:
            raise unsupported("logprobs", "logprobs is not supported with use_beam_search")
        longest = service.llm.max_model_len - min(len(p.token_ids) for p in prompts)
        params = beam_search_params(body, max(1, longest) if max_tokens is None else max_tokens)
    else:
        params = sampling_params(body, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    return Generation(
        service,
        new_answer_id(prefix),
        prompts,
        params,
        streaming=bool(body.stream),
        n=body.n or 1,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        headers=dict(request.headers) if service.tracer is not None else {},
    )


def _check_size(
    service: Service, body: GenerationRequest, prompts: int, logprobs: int | None, prompt_logprobs: int | None
) -> None:
    """Bounds what one request can make this process hold."""
    sequences = prompts * max(body.n or 1, body.best_of or 1)
    limit = service.options.max_sequences_per_request
    if sequences > limit:
        param = "n" if body.best_of is None else "best_of"
        raise ApiError(400, f"the request asks for {sequences} sequences; at most {limit} are served", param=param)
    limit = service.options.max_logprobs
    if max(logprobs or 0, prompt_logprobs or 0) > limit:
        raise ApiError(400, f"logprobs of at most {limit} likeliest tokens are served", param="logprobs")


def note_usage(request: Request, usage: Usage) -> None:
    """Adds the number of tokens to the request's line in the log."""
    request.state.log_fields = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def _generation(request: Request, service: Service, body: CompletionRequest, prompts: list[ReadPrompt]) -> Generation:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return generation_for(
        request,
        service,
        body,
        prompts,
        prefix="cmpl",
        max_tokens=1 if _prompt_only(body) else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _prompt_only(body: CompletionRequest) -> bool:
    """Whether only the prompt and its logprobs are wanted; the engine generates a token all the same."""
    return bool(body.echo) and body.max_tokens == 0


@dataclass(slots=True)
class _Asked:
    """A request and what it takes to answer it."""

    request: Request
    body: CompletionRequest
    generation: Generation
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self) -> Usage:
        """Tokens used, which the log is told too."""
        usage = self.generation.usage(uncounted=_prompt_only(self.body))
        note_usage(self.request, usage)
        return usage

    def answer(self, outputs: list[RequestOutput]) -> Completion:
        """The whole answer; the choices of the first prompt, then those of the next."""
        found = []
        for number, output in enumerate(outputs):
            for completion in self.generation.choices(output):
                choice = self._choice(number, completion, completion.finish_reason)
                logprobs = None
                if not _prompt_only(self.body):
                    choice.text = completion.text
                    logprobs = self._logprobs(completion, self._tracker(number, output))
                self._add_prompt(choice, logprobs, number, output)
                choice.stop_reason = completion.stop_reason
                found.append(choice)
        return self._completion(found, usage=self.usage())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of the answer."""
        trackers: dict[int, choices.Tracker | None] = {}
        async with aclosing(self.generation.outputs()) as outputs:
            async for number, output in outputs:
                events = []
                for completion in self.generation.choices(output):
                    index = number * self.generation.n + completion.index
                    if fresh := index not in trackers:
                        trackers[index] = self._tracker(number, output)
                    events += self._events(number, output, completion, trackers[index], fresh)
                if events:
                    yield b"".join(map(event, events))
        usage = self.usage()
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield event(self._completion([], usage=usage))
        yield DONE

    def _events(
        self,
        number: int,
        output: RequestOutput,
        completion: CompletionOutput,
        tracker: choices.Tracker | None,
        fresh: bool,
    ) -> list[Completion]:
        """What is new of one choice: its prompt if nothing came before, text, and the end as a chunk of its own."""
        logprobs = self._logprobs(completion, tracker)
        found = []
        if fresh and (self.body.echo or output.prompt_logprobs is not None):
            choice = self._choice(number, completion, None)
            self._add_prompt(choice, None, number, output)
            found.append(self._chunk(choice))
        if (completion.text or (logprobs is not None and logprobs.tokens)) and not _prompt_only(self.body):
            choice = self._choice(number, completion, None)
            choice.text = completion.text
            choice.logprobs = logprobs
            found.append(self._chunk(choice))
        if completion.finished:
            choice = self._choice(number, completion, completion.finish_reason)
            choice.stop_reason = completion.stop_reason
            found.append(self._chunk(choice))
        return found

    def _tracker(self, number: int, output: RequestOutput) -> choices.Tracker | None:
        """For the logprobs of one choice, if they are wanted."""
        if self.body.logprobs is None:
            return None
        skip = self.body.skip_special_tokens is not False
        tokenizer = self.generation.service.llm.tokenizer
        start = len(self._prompt_text(number)) if self.body.echo else 0
        return choices.Tracker(tokenizer, output.prompt_token_ids, skip_special_tokens=skip, start=start)

    def _choice(self, number: int, completion: CompletionOutput, finish_reason: str | None) -> CompletionChoice:
        reason: Literal["stop", "length"] | None = None
        if finish_reason is not None:
            reason = "length" if finish_reason == "length" or _prompt_only(self.body) else "stop"
        index = number * self.generation.n + completion.index
        return CompletionChoice(finish_reason=reason, index=index, logprobs=None, text="")

    def _logprobs(self, completion: CompletionOutput, tracker: choices.Tracker | None) -> CompletionLogprobs | None:
        if tracker is None:
            return None
        return choices.completion_logprobs(self.generation.service.llm.tokenizer, tracker.advance(completion))

    def _add_prompt(
        self, choice: CompletionChoice, logprobs: CompletionLogprobs | None, number: int, output: RequestOutput
    ) -> None:
        """Puts the prompt (echo) and its logprobs before what the choice has."""
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = choices.prompt_logprobs(output.prompt_logprobs)
        choice.logprobs = logprobs
        if not self.body.echo:
            return
        text = self._prompt_text(number)
        choice.text = text + choice.text
        if self.body.logprobs is None or output.prompt_logprobs is None:
            return
        tokenizer = self.generation.service.llm.tokenizer
        tokens = choices.prompt_tokens(tokenizer, output.prompt_token_ids, output.prompt_logprobs, len(text))
        choice.logprobs = choices.completion_logprobs(tokenizer, tokens)
        if logprobs is not None:
            choice.logprobs.tokens += logprobs.tokens
            choice.logprobs.token_logprobs += logprobs.token_logprobs
            choice.logprobs.top_logprobs += logprobs.top_logprobs
            choice.logprobs.text_offset += logprobs.text_offset

    def _prompt_text(self, number: int) -> str:
        prompt = self.generation.prompts[number]
        return self.generation.service.llm.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _chunk(self, choice: CompletionChoice) -> Completion:
        chunk = self._completion([choice])
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            chunk.usage = None  # spelled out, as the OpenAI API does
        return chunk

    def _completion(self, found: list[CompletionChoice], **more: Usage) -> Completion:
        return Completion(
            id=self.generation.answer_id,
            choices=found,
            created=self.created,
            model=self.model,
            object="text_completion",
            system_fingerprint=FINGERPRINT,
            **more,
        )
