"""The native routes of llama.cpp's server, as far as they apply here."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.engine.tokenizer import no_fill_in_middle
from octavo.server.answer_format import read_answer_format
from octavo.server.fields import EngineFields, Int, Name, Phrase, ResponseModel
from octavo.server.generation import Generation, LogprobsTracker, make_chat_logprobs, make_generation
from octavo.server.http.bodies import read_model
from octavo.server.http.errors import renamed_errors
from octavo.server.http.streaming import PendingResponse, event
from octavo.server.openai.protocol import ChatMessage, CompletionRequest, SamplingFields, TemplateOptions
from octavo.server.prompt_inputs import encode, read_prompts, write_conversation
from octavo.server.state import state_of

# /completion and /infill

#: Names of completion fields on these routes, for errors.
_RENAMED = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}


async def complete(request: Request, body: LlamaCompletionRequest) -> Response:
    """Completes a prompt, or a list of them."""
    prompt: Any = body.prompt
    are_several = isinstance(prompt, list) and all(isinstance(one, str | list) for one in prompt)
    with renamed_errors(_RENAMED):
        if isinstance(prompt, list) and not are_several and any(isinstance(part, str) for part in prompt):
            # One prompt of texts and token ids in turn.
            texts = [part for part in prompt if isinstance(part, str)]
            encoded = iter(await encode(state_of(request), texts, add_special_tokens=False))
            parts = [next(encoded) if isinstance(part, str) else [part] for part in prompt]
            prompt = [[token_id for part in parts for token_id in part]]
        return await _respond(request, body, {"prompt": prompt}, are_several=are_several)


async def infill(request: Request, body: InfillRequest) -> Response:
    """Completes the gap between two texts."""
    if state_of(request).llm.tokenizer.fill_in_middle is None:
        raise no_fill_in_middle().at("input_suffix")
    with renamed_errors({**_RENAMED, "prompt": "input_prefix", "suffix": "input_suffix"}):
        prompt = {"prompt": body.input_prefix, "suffix": body.input_suffix}
        return await _respond(request, body, prompt, are_several=False)


async def _respond(request: Request, body: LlamaFields, prompt: dict[str, Any], *, are_several: bool) -> Response:
    service = state_of(request)
    deadline = service.deadline()
    model = await service.model(body.model)
    fields = {name: value for name in SamplingFields.model_fields if (value := getattr(body, name)) is not None}
    fields |= {"stop": body.stop, "stream": body.stream, "grammar": body.grammar, "json_schema": body.json_schema}
    if body.n_predict is not None and body.n_predict >= 0:
        fields["max_tokens"] = body.n_predict
    if fields.get("seed") == -1:  # llama.cpp's random seed
        del fields["seed"]
    fields["logprobs"] = body.n_probs or None
    completion = read_model(CompletionRequest, {**fields, **prompt}, service)
    prompts = await read_prompts(service, completion)
    answer_format = read_answer_format(completion)
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
        answer_format=answer_format,
        names=None if answer_format is None else answer_format.names,
    )
    return await _PendingLlamaCompletion(body, generation, are_several).respond(request, body.stream, deadline)


@dataclass(slots=True)
class _PendingLlamaCompletion(PendingResponse):
    body: LlamaFields
    generation: Generation
    #: The response is a list with one entry per prompt.
    are_several: bool

    async def complete(self) -> bytes:
        answers = []
        for number, output in enumerate(await self.generation.finish()):
            completion = output.outputs[0]
            answer = self._last_event(number, output, completion, len(completion.token_ids))
            answer.content, answer.tokens = completion.text, self._tokens(completion)
            if self.body.n_probs:
                tracker = self.generation.track(LogprobsTracker, output)
                answer.completion_probabilities = self._probabilities(tracker, completion)
            answers.append(answer)
        bodies = [answer.encode() for answer in answers]
        return b"[" + b",".join(bodies) + b"]" if self.are_several else bodies[0]

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
                    data += event(self._last_event(number, output, completion, predicted[number]))
                if data:
                    yield data

    def _tokens(self, completion: CompletionOutput) -> list[int]:
        return completion.token_ids if self.body.return_tokens else []

    def _probabilities(self, tracker: LogprobsTracker, completion: CompletionOutput) -> list[LlamaToken]:
        tokens, top = tracker.advance(completion), self.body.n_probs or 0
        named = make_chat_logprobs(self.generation.token_names, tokens, top).content
        probabilities = []
        for token, entry in zip(tokens, named, strict=True):
            logprobs = token.logprobs or {}
            ids = sorted(logprobs, key=lambda i: (-logprobs[i].logprob, logprobs[i].rank))[: len(entry.top_logprobs)]
            top_logprobs = [
                LlamaTopToken(id=i, token=one.token, bytes=one.bytes, logprob=one.logprob)
                for i, one in zip(ids, entry.top_logprobs, strict=True)
            ]
            generated = {"id": token.token_id, "token": entry.token, "bytes": entry.bytes, "logprob": entry.logprob}
            probabilities.append(LlamaToken(**generated, top_logprobs=top_logprobs))
        return probabilities

    def _last_event(
        self, number: int, output: RequestOutput, completion: CompletionOutput, predicted: int
    ) -> LlamaCompletion:
        """The last event of a stream, which is a whole response without its text."""
        generation, prompt = self.generation, self.generation.prompts[number]
        evaluated, cached = len(prompt["prompt_token_ids"]), output.metrics.num_cached_tokens
        stop_type: Literal["eos", "limit", "word"] = "eos"
        word = ""
        if completion.finish_reason == "length":
            stop_type = "limit"
        elif isinstance(completion.stop_reason, str):
            stop_type, word = "word", completion.stop_reason
        times, timings = output.metrics, None
        if times.first_token_time is not None and times.last_token_time is not None:
            rest = times.last_token_time - times.first_token_time
            timings = LlamaTimings(
                prompt_n=evaluated - cached,
                prompt_ms=(times.first_token_time - times.arrival_time) * 1e3,
                predicted_n=predicted,
                predicted_ms=rest * 1e3,
                predicted_per_second=predicted / rest if rest else None,
            )
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
            stop_type=stop_type,
            stopping_word=word,
            generation_settings=_settings(generation),
            timings=timings,
        )


def _settings(generation: Generation) -> dict[str, Any]:
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


# /apply-template, /props and /slots


async def apply_template(request: Request, body: ApplyTemplateRequest) -> AppliedTemplate:
    """A conversation as the model's template writes it."""
    service = state_of(request)
    await service.model(None)
    return AppliedTemplate(prompt=await write_conversation(service, request, body.messages, body))


async def props(request: Request) -> Props:
    """The model, its template and its context."""
    service = state_of(request)
    tokenizer, name = service.llm.tokenizer, service.model_names[0]
    params = dict(service.llm.inputs.sampling_in_effect)
    # llama.cpp's names beside ours; -1: as many tokens as the context allows.
    params |= {"repeat_penalty": params["repetition_penalty"], "n_predict": params.get("max_tokens", -1)}
    return Props(
        default_generation_settings={"n_ctx": service.llm.max_model_len, "params": params},
        total_slots=service.llm.config.max_num_seqs,
        model_path=service.shown_path(name),
        model_alias=name,
        chat_template=tokenizer.chat_templates.get("default"),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        modalities={"vision": False, "audio": False},
        build_info=f"octavo-{__version__}",
    )


async def slots(request: Request) -> list[Slot]:
    """The sequences that can run at once. The running ones come first, as no sequence has a fixed slot."""
    service = state_of(request)
    running, length = (await service.llm.stats()).num_running, service.llm.max_model_len
    return [Slot(id=i, n_ctx=length, is_processing=i < running) for i in range(service.llm.config.max_num_seqs)]


# Request and response bodies.


class LlamaFields(SamplingFields, EngineFields):
    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    token_limits = ("n_predict",)

    n_predict: Int | None = Field(None, description="Maximum tokens to generate; -1 (default): as many as fit.")
    stop: Phrase | list[Phrase] | None = Field(None, description="Texts that end the answer, without being part of it.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    grammar: str | None = Field(None, description="The grammar that the answer follows.")
    json_schema: dict[str, Any] | None = Field(None, description="The JSON schema that the answer follows.")
    n_probs: Int | None = Field(None, description="Send the logprobs of this many most likely tokens per position.")
    return_tokens: bool | None = Field(None, description="Send token ids too.")


class LlamaCompletionRequest(LlamaFields):
    prompt: str | list[Int] | list[str | Int] | list[list[Int]] = Field(
        description="A text, token ids, or a mix of both; or a list of texts or of token ids."
    )


class InfillRequest(LlamaFields):
    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after it.")


class ApplyTemplateRequest(TemplateOptions):
    messages: list[ChatMessage] = Field(description="The conversation.")


class LlamaTimings(ResponseModel):
    """How long a completion took, in milliseconds."""

    prompt_n: int = Field(description="Tokens of the prompt that were computed.")
    prompt_ms: float = Field(description="Until the first token.")
    predicted_n: int
    predicted_ms: float = Field(description="From the first token to the last.")
    predicted_per_second: float | None


class LlamaTopToken(ResponseModel):
    id: int
    token: str
    bytes: list[int] | None
    logprob: float


class LlamaToken(LlamaTopToken):
    top_logprobs: list[LlamaTopToken]


class LlamaCompletion(ResponseModel):
    """A response of ``/completion``, or an event of its stream, of which only the last has all fields."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    prompt: str | None = None
    truncated: bool | None = None
    stop_type: Literal["eos", "limit", "word"] | None = None
    stopping_word: str | None = None
    completion_probabilities: list[LlamaToken] | None = None
    generation_settings: dict[str, Any] | None = None
    timings: LlamaTimings | None = None


class Props(ResponseModel):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_path: str
    model_alias: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    modalities: dict[str, bool]
    build_info: str


class Slot(ResponseModel):
    id: int
    n_ctx: int
    is_processing: bool


class AppliedTemplate(ResponseModel):
    prompt: str
