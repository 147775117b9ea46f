"""The routes ``/completion`` and ``/infill`` of llama.cpp."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.engine.fill_in_middle import no_fill_in_middle
from octavo.server.api_errors import unsupported
from octavo.server.generation import Generation, make_generation
from octavo.server.llamacpp.llama_protocol import (
    InfillRequest,
    LlamaCompletion,
    LlamaCompletionRequest,
    LlamaFields,
    LlamaTimings,
    LlamaToken,
    LlamaTopToken,
)
from octavo.server.logprobs import LogprobsTracker, make_chat_logprobs
from octavo.server.pending_response import PendingResponse
from octavo.server.prompt_fields import encode, read_prompts
from octavo.server.protocol import CompletionRequest
from octavo.server.renamed_chat import renamed_errors
from octavo.server.request_models import read_model
from octavo.server.sampling_fields import SamplingFields
from octavo.server.service import Service, service_of
from octavo.server.streaming import event

#: Fields of a completion by their names here; errors are told under these.
_RENAMED = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}


async def complete(request: Request, body: LlamaCompletionRequest) -> Response:
    """Completes a prompt, or a list of them."""
    service, prompt = service_of(request), body.prompt
    several = isinstance(prompt, list) and all(isinstance(one, str | list) for one in prompt)
    mixed = isinstance(prompt, list) and not several and any(isinstance(part, str) for part in prompt)
    with renamed_errors(_RENAMED):
        tokens = [await _joined(service, prompt)] if mixed and isinstance(prompt, list) else prompt
        return await _respond(request, body, {"prompt": tokens}, several=several)


async def infill(request: Request, body: InfillRequest) -> Response:
    """Completes the gap between two texts.

    Raises:
        ApiError: 400, the model does not fill gaps.
    """
    if service_of(request).llm.tokenizer.fill_in_middle is None:
        raise unsupported("input_suffix", str(no_fill_in_middle()))
    with renamed_errors({**_RENAMED, "prompt": "input_prefix", "suffix": "input_suffix"}):
        return await _respond(request, body, {"prompt": body.input_prefix, "suffix": body.input_suffix}, several=False)


async def _joined(service: Service, parts: list[Any]) -> list[int]:
    """Token ids of a prompt of texts and token ids in turn."""
    texts = [part for part in parts if isinstance(part, str)]
    encoded = iter(await encode(service, texts, add_special_tokens=False))
    tokens: list[int] = []
    for part in parts:
        tokens += next(encoded) if isinstance(part, str) else [part]
    return tokens


async def _respond(request: Request, body: LlamaFields, prompt: dict[str, Any], *, several: bool) -> Response:
    service = service_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    completion = read_model(CompletionRequest, {**_fields(body), **prompt}, service)
    prompts = await read_prompts(service, completion)
    generation = make_generation(
        service,
        request,
        completion,
        model,
        prompts,
        prefix="cmpl",
        max_tokens=service.default_max_tokens(None) if body.n_predict is None else completion.max_tokens,
        logprobs=completion.logprobs,
        prompt_logprobs=None,
    )
    pending = _PendingCompletion(body, generation, several)
    return await pending.respond(request, body.stream, deadline)


def _fields(body: LlamaFields) -> dict[str, Any]:
    """The fields of a completion that a body asks for."""
    fields = {name: value for name in SamplingFields.model_fields if (value := getattr(body, name)) is not None}
    fields |= {"stop": body.stop, "stream": body.stream, "grammar": body.grammar, "json_schema": body.json_schema}
    if body.n_predict is not None and body.n_predict >= 0:
        fields["max_tokens"] = body.n_predict
    if fields.get("seed") == -1:  # a random one
        del fields["seed"]
    return {**fields, "logprobs": body.n_probs or None}


class _PendingCompletion(PendingResponse):
    def __init__(self, body: LlamaFields, generation: Generation, several: bool) -> None:
        """``several``: whether the answer is a list, one entry for each prompt."""
        self.body, self.generation, self.several = body, generation, several

    async def complete(self) -> bytes:
        answers = []
        for number, output in enumerate(await self.generation.finish()):
            answer = self._last(number, output, output.outputs[0], len(output.outputs[0].token_ids))
            answer.content, answer.tokens = output.outputs[0].text, self._tokens(output.outputs[0])
            if self.body.n_probs:
                tracker = self.generation.track(LogprobsTracker, output)
                answer.completion_probabilities = self._probabilities(tracker, output.outputs[0])
            answers.append(answer)
        bodies = [answer.encode() for answer in answers]
        return b"[" + b",".join(bodies) + b"]" if self.several else bodies[0]

    async def stream(self) -> AsyncGenerator[bytes, None]:
        trackers: dict[int, LogprobsTracker] = {}
        predicted: dict[int, int] = {}
        async with aclosing(self.generation.outputs()) as outputs:
            async for number, output in outputs:
                completion = output.outputs[0]
                predicted[number] = predicted.get(number, 0) + len(completion.token_ids)
                chunk = LlamaCompletion(
                    index=number, content=completion.text, tokens=self._tokens(completion), stop=False, id_slot=-1
                )
                chunk.tokens_predicted, chunk.tokens_evaluated = predicted[number], len(output.prompt_token_ids)
                if self.body.n_probs:
                    tracker = trackers.setdefault(number, self.generation.track(LogprobsTracker, output))
                    chunk.completion_probabilities = self._probabilities(tracker, completion)
                data = event(chunk) if completion.text or completion.token_ids else b""
                if completion.finished:
                    data += event(self._last(number, output, completion, predicted[number]))
                if data:
                    yield data

    def _tokens(self, completion: CompletionOutput) -> list[int]:
        return completion.token_ids if self.body.return_tokens else []

    def _probabilities(self, tracker: LogprobsTracker, completion: CompletionOutput) -> list[LlamaToken]:
        tokens, top = tracker.advance(completion), self.body.n_probs or 0
        named = make_chat_logprobs(self.generation.token_names, tokens, top).content
        found = []
        for token, entry in zip(tokens, named, strict=True):
            logprobs = token.logprobs or {}
            ids = sorted(logprobs, key=lambda i: (-logprobs[i].logprob, logprobs[i].rank))[: len(entry.top_logprobs)]
            likeliest = [
                LlamaTopToken(id=i, token=one.token, bytes=one.bytes, logprob=one.logprob)
                for i, one in zip(ids, entry.top_logprobs, strict=True)
            ]
            generated = {"id": token.token_id, "token": entry.token, "bytes": entry.bytes, "logprob": entry.logprob}
            found.append(LlamaToken(**generated, top_logprobs=likeliest))
        return found

    def _last(
        self, number: int, output: RequestOutput, completion: CompletionOutput, predicted: int
    ) -> LlamaCompletion:
        """The whole answer of ``predicted`` tokens but for its text, as the last event of a stream has it."""
        generation, prompt = self.generation, self.generation.prompts[number]
        evaluated, cached = len(prompt["prompt_token_ids"]), output.metrics.num_cached_tokens
        kind, word = _end(completion)
        return LlamaCompletion(
            index=number,
            content="",
            tokens=[],
            stop=True,
            id_slot=-1,
            model=generation.model.name,
            tokens_predicted=predicted,
            tokens_evaluated=evaluated,
            tokens_cached=cached,
            prompt=prompt.get("prompt") or generation.service.llm.tokenizer.decode(prompt["prompt_token_ids"]),
            truncated=False,
            stop_type=kind,
            stopping_word=word,
            generation_settings=_settings(generation),
            timings=_timings(output.metrics, evaluated - cached, predicted),
        )


def _timings(times: RequestMetrics, computed: int, predicted: int) -> LlamaTimings | None:
    """What the engine measured; None: no token was generated."""
    if times.first_token_time is None or times.last_token_time is None:
        return None
    rest = times.last_token_time - times.first_token_time
    return LlamaTimings(
        prompt_n=computed,
        prompt_ms=(times.first_token_time - times.arrival_time) * 1e3,
        predicted_n=predicted,
        predicted_ms=rest * 1e3,
        predicted_per_second=predicted / rest if rest else None,
    )


def _end(completion: CompletionOutput) -> tuple[Literal["eos", "limit", "word"], str]:
    """Why a completion ended, and the stop text that ended it."""
    if completion.finish_reason == "length":
        return "limit", ""
    return ("word", completion.stop_reason) if isinstance(completion.stop_reason, str) else ("eos", "")


def _settings(generation: Generation) -> dict[str, Any]:
    """The parameters of sampling under llama.cpp's names."""
    params = generation.params
    if not isinstance(params, SamplingParams):
        return {}
    return {
        "n_ctx": generation.service.llm.max_model_len,
        "n_predict": params.max_tokens,
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop or []),
        "stream": bool(generation.body.stream),
    }
