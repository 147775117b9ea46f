"""The route ``/v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.prompts import TokensPrompt
from octavo.core.sampling_params import DEFAULT_MAX_TOKENS
from octavo.server.generation import Generation, make_generation
from octavo.server.large_answers import encode_in_slices, num_logprobs, run_if_large
from octavo.server.logprobs import LogprobsTracker, make_completion_logprobs, make_prompt_logprobs, prompt_tokens
from octavo.server.pending_response import PendingResponse
from octavo.server.prompt_fields import read_prompts
from octavo.server.protocol import CompletionRequest
from octavo.server.protocol_answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from octavo.server.service import ServedModel, Service, service_of
from octavo.server.streaming import DONE, event, large_event


async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Completes prompts: texts or token ids, one or many; as one response or as a stream of events."""
    service = service_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    if body.logprob_token_ids is not None and body.logprobs is None:
        body.logprobs = 0
    prompts = await read_prompts(service, body)
    pending = _PendingTexts(body, _generation(service, request, body, model, prompts))
    return await pending.respond(request, body.stream, deadline)


def _generation(
    service: Service, request: Request, body: CompletionRequest, model: ServedModel, prompts: list[TokensPrompt]
) -> Generation:
    max_tokens = body.max_tokens
    if max_tokens is None and not body.has_no_token_limit:
        max_tokens = service.default_max_tokens(DEFAULT_MAX_TOKENS)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return make_generation(
        service,
        request,
        body,
        model,
        prompts,
        prefix="cmpl",
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        reasoning=service.formats.named_marks(),
    )


@dataclass(slots=True)
class _PendingTexts(PendingResponse):
    body: CompletionRequest
    generation: Generation

    async def complete(self) -> bytes:
        outputs = await self.generation.finish()
        return await run_if_large(num_logprobs(outputs), self._whole, outputs)

    def _whole(self, outputs: list[RequestOutput]) -> bytes:
        choices = []  # the choices of the first prompt, then those of the next
        for number, output in enumerate(outputs):
            for completion in self.generation.choices(output):
                choice = self._choice(number, completion, completion.finish_reason)
                choice.text = completion.text
                tracker = self._tracker(number, output) if completion.token_ids else None
                logprobs = self._logprobs(completion, tracker)
                self._add_prompt(choice, logprobs, number, output)
                choice.stop_reason = completion.stop_reason
                if self.body.return_token_ids:
                    choice.token_ids, choice.prompt_token_ids = completion.token_ids, output.prompt_token_ids
                choices.append(choice)
        return encode_in_slices(self._completion(choices, usage=self.generation.usage()))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        trackers: dict[int, LogprobsTracker | None] = {}
        async with aclosing(self.generation.outputs()) as outputs:
            async for number, output in outputs:
                if data := await run_if_large(num_logprobs([output]), self._increment, number, output, trackers):
                    yield data
        usage = self.generation.usage()
        if self.generation.include_usage:
            yield event(self._completion([], usage=usage))
        yield DONE

    def _increment(self, number: int, output: RequestOutput, trackers: dict[int, LogprobsTracker | None]) -> bytes:
        """The events of an output; ``trackers``: of the choices that have begun."""
        events = []
        for completion in self.generation.choices(output):
            index = number * self.generation.n + completion.index
            if fresh := index not in trackers:
                trackers[index] = self._tracker(number, output)
            events += self._events(number, output, completion, trackers[index], fresh)
        return b"".join(map(event if output.prompt_logprobs is None else large_event, events))

    def _events(
        self,
        number: int,
        output: RequestOutput,
        completion: CompletionOutput,
        tracker: LogprobsTracker | None,
        fresh: bool,
    ) -> list[Completion]:
        """Chunks of one choice: the prompt if this is the first, new text, the finish reason in a chunk of its own."""
        logprobs = self._logprobs(completion, tracker)
        chunks = []
        ids = bool(self.body.return_token_ids)
        if fresh and (self.body.echo or output.prompt_logprobs is not None or ids):
            choice = self._choice(number, completion, None)
            self._add_prompt(choice, None, number, output)
            if ids:
                choice.prompt_token_ids, choice.token_ids = output.prompt_token_ids, []
            chunks.append(self._chunk(choice))
        if completion.text or (logprobs is not None and logprobs.tokens) or (ids and completion.token_ids):
            choice = self._choice(number, completion, None)
            choice.text = completion.text
            if ids:
                choice.token_ids = completion.token_ids
            choice.logprobs = logprobs
            chunks.append(self._chunk(choice))
        if completion.finished:
            choice = self._choice(number, completion, completion.finish_reason)
            choice.stop_reason = completion.stop_reason
            chunks.append(self._chunk(choice))
        return chunks

    def _tracker(self, number: int, output: RequestOutput) -> LogprobsTracker | None:
        """Tracks the logprobs of one choice; None if they are not requested."""
        if self.body.logprobs is None:
            return None
        start = len(self._prompt_text(number)) if self.body.echo else 0
        return self.generation.track(LogprobsTracker, output, start=start)

    def _choice(self, number: int, completion: CompletionOutput, finish_reason: str | None) -> CompletionChoice:
        reason: Literal["stop", "length"] | None = None
        if finish_reason is not None:
            reason = "length" if finish_reason == "length" else "stop"
        index = number * self.generation.n + completion.index
        return CompletionChoice(finish_reason=reason, index=index, logprobs=None, text="")

    def _logprobs(self, completion: CompletionOutput, tracker: LogprobsTracker | None) -> CompletionLogprobs | None:
        if tracker is None:
            return None
        return make_completion_logprobs(self.generation.token_names, tracker.advance(completion))

    def _add_prompt(
        self, choice: CompletionChoice, logprobs: CompletionLogprobs | None, number: int, output: RequestOutput
    ) -> None:
        """Puts the prompt (echo) and its logprobs before the text and logprobs of the choice."""
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
        choice.logprobs = logprobs
        if not self.body.echo:
            return
        text = self._prompt_text(number)
        choice.text = text + choice.text
        if self.body.logprobs is None or output.prompt_logprobs is None:
            return
        tokenizer = self.generation.service.llm.tokenizer
        tokens = prompt_tokens(tokenizer, output.prompt_token_ids, output.prompt_logprobs, text)
        choice.logprobs = make_completion_logprobs(self.generation.token_names, tokens)
        if logprobs is not None:
            choice.logprobs.tokens += logprobs.tokens
            choice.logprobs.token_logprobs += logprobs.token_logprobs
            choice.logprobs.top_logprobs += logprobs.top_logprobs
            choice.logprobs.text_offset += logprobs.text_offset

    def _prompt_text(self, number: int) -> str:
        prompt = self.generation.prompts[number]
        if (text := prompt.get("prompt")) is not None:
            return text
        return self.generation.service.llm.tokenizer.decode(prompt["prompt_token_ids"], skip_special_tokens=False)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return self._completion([choice], **self.generation.chunk_usage())

    def _completion(self, choices: list[CompletionChoice], **more: Usage | None) -> Completion:
        return Completion(choices=choices, object="text_completion", **self.generation.response_fields(), **more)
