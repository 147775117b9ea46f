"""The generation of one HTTP request: admission to the queue, one engine request per prompt, usage, failures."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from octavo import __version__
from octavo.core.errors import InvalidRequestError
from octavo.core.model_config import ReasoningMarks
from octavo.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from octavo.core.request import LoRARequest, RequestOptions, TokensPrompt, num_prompt_tokens
from octavo.core.sampling_params import BeamSearchParams, DefaultMaxTokens, SamplingParams, defaults_beside
from octavo.engine.tokenizer import TextStream, Tokenizer
from octavo.server.answer_format import (
    format_error,
    read_answer_format,
    rename_structured_outputs,
    report_relaxed_keywords,
)
from octavo.server.http.errors import ApiError, invalid, server_error, unsupported
from octavo.server.http.middleware import client_of
from octavo.server.http.streaming import LazyList, cancel_tasks
from octavo.server.logging import log_fields, log_prompt
from octavo.server.metrics import RequestObserver
from octavo.server.openai import protocol
from octavo.server.prompt_inputs import truncate_prompt
from octavo.server.state import engine_request_id

if TYPE_CHECKING:
    from octavo.server.state import ServedModel, ServerState

#: The default of the engine's ``max_logprobs``: the limit of OpenAI's API.
DEFAULT_MAX_LOGPROBS = 20

logger = logging.getLogger("octavo.server")

T = TypeVar("T", bound="_TokenTracker")


@dataclass(slots=True)
class Generation:
    """The prompts of one HTTP request in the engine, and the tokens used so far."""

    service: ServerState
    request: Request
    body: protocol.GenerationRequest
    #: The model or adapter, with its name in the response.
    model: ServedModel
    #: Such as ``cmpl-...``; the ids of the engine's requests are made of it (``engine_request_id``).
    response_id: str
    prompts: list[TokensPrompt]
    params: SamplingParams | BeamSearchParams
    #: The same for each prompt.
    options: RequestOptions
    #: Seconds since 1970.
    created: int = field(default_factory=lambda: int(time.time()))
    #: Tokens of the choices that are returned, or would have been.
    completion_tokens: int = 0
    #: Prefix cache hits and draft tokens of the prompts that have finished.
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    #: None: reasoning is not separated from the content.
    reasoning_tokens: int | None = None

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt index, output) pairs: increments as they come if streaming, else one complete output per prompt.

        If one prompt fails, all are aborted.
        """
        count = len(self.prompts)
        prompts = {engine_request_id(self.response_id, i, count): prompt for i, prompt in enumerate(self.prompts)}
        self.service.queue.enter({name: num_prompt_tokens(prompt) for name, prompt in prompts.items()})
        runs = [self._run(name, prompt) for name, prompt in prompts.items()]
        try:
            if count == 1:
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
        """The complete output of each prompt of a request without streaming."""
        async with aclosing(self.outputs()) as outputs:
            complete = {index: output async for index, output in outputs}
        return [complete[i] for i in range(len(self.prompts))]

    async def _run(self, name: str, prompt: TokensPrompt) -> AsyncGenerator[RequestOutput, None]:
        service = self.service
        try:
            stream = await service.llm.submit(name, prompt, self.params, self.options, streaming=bool(self.body.stream))
        except InvalidRequestError as e:
            raise rename_structured_outputs(e, self.body) from None
        finally:
            service.queue.leave(name)
        grammar = self.params.structured_outputs if isinstance(self.params, SamplingParams) else None
        if grammar is not None and (relaxed := service.llm.inputs.grammars.relaxed(grammar)):
            report_relaxed_keywords(self.request.scope, relaxed)
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
            # Tokens that were generated before an abort and never read.
            self.completion_tokens += stream.request.num_untaken_tokens
            observer.close(stream.request.num_untaken_tokens)

    def _raise_if_failed(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            if completion.finish_reason == "ignored":
                raise ApiError(400, completion.error or "the request could never run", code="context_length_exceeded")
            self.service.check_completion(completion, self.model)
            if completion.exceeds_kv_cache:
                raise ApiError(400, f"the request is too large: {completion.error}", code="too_large")
            if completion.excludes_all_tokens:
                raise rename_structured_outputs(InvalidRequestError(completion.error or ""), self.body)
            if (message := format_error(completion.error, self.params)) is not None:
                raise rename_structured_outputs(InvalidRequestError(message), self.body)
            if completion.finish_reason == "error":
                logger.error("request %s failed: %s", output.request_id, completion.error)
                raise server_error(500, "the engine failed on this request", "engine_error")

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.body.n or 1

    @property
    def include_usage(self) -> bool:
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    @property
    def token_names(self) -> TokenNames:
        return TokenNames(self.service.llm.tokenizer, self.body.return_tokens_as_token_ids is True)

    def choices(self, output: RequestOutput) -> list[CompletionOutput]:
        """The first ``n`` completions of an output; beam search returns its whole width."""
        return output.outputs[: self.n]

    def track(self, kind: type[T], output: RequestOutput, **options: Any) -> T:
        """A tracker for the tokens of one choice: a ``LogprobsTracker`` or a ``TextLogprobs``."""
        return kind(
            self.service.llm.tokenizer,
            output.prompt_token_ids,
            skip_special_tokens=self.body.skip_special_tokens is not False,
            visible_tokens=self.options.visible_tokens,
            **options,
        )

    def usage(self) -> protocol.Usage:
        prompt, completion = sum(map(num_prompt_tokens, self.prompts)), self.completion_tokens
        usage = protocol.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=protocol.PromptDetails(cached_tokens=self.cached_tokens),
        )
        details: dict[str, int] = {}
        if self.draft_tokens or self.options.prediction is not None:
            details["accepted_prediction_tokens"] = self.accepted_tokens
            details["rejected_prediction_tokens"] = self.draft_tokens - self.accepted_tokens
        if self.reasoning_tokens is not None:
            details["reasoning_tokens"] = self.reasoning_tokens
        if details:
            usage.completion_tokens_details = protocol.CompletionDetails(**details)
        return usage

    def chunk_usage(self) -> dict[str, protocol.Usage | None]:
        """The usage field of a chunk: absent, or an explicit null before the last one, as the OpenAI API sends it."""
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return {}
        return {"usage": self.usage() if options.continuous_usage_stats else None}

    def response_fields(self) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"octavo-{__version__}",
        }


async def _merge_outputs(
    runs: list[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several runs as they come; at most one output per run is buffered."""

    async def next_output(run: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
        return await anext(run, None)

    pending = {asyncio.ensure_future(next_output(run)): i for i, run in enumerate(runs)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                output = task.result()
                if output is None:
                    continue
                pending[asyncio.ensure_future(next_output(runs[index]))] = index
                yield index, output
    finally:
        await cancel_tasks(*pending)


def make_generation(
    service: ServerState,
    request: Request,
    body: protocol.GenerationRequest,
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

    ``prefix`` begins the response id, which is never the client's request id, as a client may use one twice. The last
    three are fields of ``RequestOptions``.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is allowed only with stream=true", param="stream_options")
    _check_size(service, body, len(prompts), logprobs, prompt_logprobs)
    prompts = _fit_into_context(service, body, prompts, max_tokens)
    if service.options.log_prompts:
        for prompt in prompts:
            log_prompt(prompt.get("prompt", prompt["prompt_token_ids"]))
    params: SamplingParams | BeamSearchParams
    if body.use_beam_search:
        if logprobs is not None:
            raise unsupported("logprobs", "logprobs is not supported with use_beam_search")
        room = service.llm.max_model_len - min(len(p["prompt_token_ids"]) for p in prompts)
        params = make_beam_search_params(body, DefaultMaxTokens(room) if max_tokens is None else max_tokens)
    else:
        params = make_sampling_params(
            body,
            service.llm.inputs.default_sampling,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    options = request_options(
        request, body, model.adapter, prediction=prediction, visible_tokens=visible_tokens, reasoning=reasoning
    )
    return Generation(service, request, body, model, f"{prefix}-{uuid.uuid4().hex}", prompts, params, options)


def request_options(request: Request, body: Any, adapter: LoRARequest | None = None, **others: Any) -> RequestOptions:
    """The options of an engine request from the fields that all bodies share, and ``others``."""
    return RequestOptions(
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        user=body.user or "",
        ttft_target=body.ttft_target,
        tpot_target=getattr(body, "tpot_target", None),
        lora_request=adapter,
        client=client_of(request),
        **others,
    )


def _check_size(
    service: ServerState,
    body: protocol.GenerationRequest,
    prompts: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> None:
    sequences = prompts * max(body.n or 1, body.best_of or 1)
    limit = service.options.max_sequences_per_request
    if sequences > limit:
        param = "n" if body.best_of is None else "best_of"
        raise ApiError(400, f"the request asks for {sequences} sequences; at most {limit} are served", param=param)
    most = service.llm.config.max_logprobs
    limit = DEFAULT_MAX_LOGPROBS if most is None else service.llm.model_config.vocab_size if most == -1 else most
    if max(logprobs or 0, prompt_logprobs or 0) > limit:
        message = f"at most {limit} logprobs per position are served (the engine's option max_logprobs)"
        raise ApiError(400, message, param="logprobs")


def _fit_into_context(
    service: ServerState, body: protocol.GenerationRequest, prompts: list[TokensPrompt], max_tokens: int | None
) -> list[TokensPrompt]:
    """The prompts, truncated if the body allows it; raises if a prompt and its answer exceed the context."""
    limit = service.llm.max_model_len
    is_explicit = max_tokens is not None and not isinstance(max_tokens, DefaultMaxTokens)
    needed = max_tokens if is_explicit and max_tokens is not None else 1
    if (most := body.truncate_prompt_tokens) is not None:
        most = max(1, limit - needed) if most == -1 else most
        if most == 0:
            raise ApiError(
                400, "truncate_prompt_tokens must be -1 or at least 1, not 0", param="truncate_prompt_tokens"
            )
        prompts = [truncate_prompt(prompt, most, body.truncation_side or "left") for prompt in prompts]
    longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
    if longest + needed <= limit:
        return prompts
    param = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) is not None else "max_tokens"
    # Clients search for these words of the OpenAI API.
    message = f"this model's maximum context length is {limit} tokens, but the prompt has {longest}"
    if is_explicit and longest < limit:
        message += f" and {param} asks for {needed} more; lower it, or leave it out for as many as fit"
    else:
        param = "prompt" if hasattr(body, "prompt") else "messages"
        message += f" tokens, which leaves no room for an answer; shorten the {param}"
    raise invalid(param, message, "context_length_exceeded")


#: Fields of the same name and meaning in ``SamplingParams``.
_SHARED = (
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "bad_words", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "logit_bias", "allowed_token_ids", "logprob_token_ids", "thinking_token_budget",
)  # fmt: skip
#: Shared fields that clients send with beam search and that do not affect it: it draws no random numbers.
_IGNORED_BY_BEAM_SEARCH = frozenset({"n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed"})
_BEAM_FIELDS = ("length_penalty", "early_stopping", "ignore_eos", "skip_special_tokens")


def make_sampling_params(
    body: protocol.GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The parameters of a request without beam search; ``defaults`` are the model's, for fields left out."""
    for name in ("length_penalty", "early_stopping"):
        if getattr(body, name) is not None:
            raise unsupported(name, f"{name} is a field of beam search: set use_beam_search to true")
    answer_format = read_answer_format(body)
    values = {
        **_set_fields(body, _SHARED),
        "max_tokens": max_tokens,
        "logprobs": logprobs if body.logprob_token_ids is None else 0,
        "prompt_logprobs": prompt_logprobs,
        "structured_outputs": None if answer_format is None else answer_format.params,
        "extra_args": body.vllm_xargs,
    }
    return SamplingParams(**defaults_beside(values, defaults), **values)


def make_beam_search_params(body: protocol.GenerationRequest, max_tokens: int) -> BeamSearchParams:
    """The parameters of a request with beam search; the width is ``best_of``, or ``n``."""
    neutral = SamplingParams()
    for name, value in _set_fields(body, (*_SHARED, "prompt_logprobs")).items():
        if name in _IGNORED_BY_BEAM_SEARCH or name in _BEAM_FIELDS or value == getattr(neutral, name):
            continue
        raise unsupported(name, f"{name} is not supported with use_beam_search")
    if (answer_format := read_answer_format(body)) is not None:
        raise unsupported(answer_format.field, f"{answer_format.field} is not supported with use_beam_search")
    # SamplingParams checks n and best_of.
    width = SamplingParams(n=body.n or 1, best_of=body.best_of).num_sequences
    return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **_set_fields(body, _BEAM_FIELDS))


def _set_fields(body: protocol.GenerationRequest, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}


# Logprobs in the formats of the OpenAI API, in step with the text that is returned.

#: Lowest logprob that is sent, as JSON has no infinity.
_MIN_LOGPROB = -9999.0
_SPACES = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Token:
    """A token, its offset in the text of the choice in characters, and its logprobs."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are named in logprobs: by their text, or as ``token_id:ID``."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def of_completion(self, token_id: int) -> str:
        """The text of a token, or its bytes in OpenAI's notation if it is an incomplete character."""
        if self.as_ids:
            return f"token_id:{token_id}"
        data = self.tokenizer.token_bytes(token_id)
        if not data:  # whole text, or no token of this tokenizer
            return self.tokenizer.token_text(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def of_chat(self, token_id: int, logprob: float) -> protocol.TopLogprob:
        text = self.tokenizer.token_text(token_id)
        data = self.tokenizer.token_bytes(token_id)
        plain = list(text.encode() if data is None else data)
        name = f"token_id:{token_id}" if self.as_ids else text
        return protocol.TopLogprob(token=name, bytes=plain, logprob=_finite(logprob))


class _TokenTracker:
    """Decodes the tokens of one choice, to know which text each stands for."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: Sequence[int],
        *,
        skip_special_tokens: bool,
        visible_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """``before``: the tokens of the prompt. ``visible_tokens``: special tokens that are never skipped."""
        self._skipped = tokenizer.special_ids - visible_tokens if skip_special_tokens else frozenset[int]()
        self._stream = TextStream(
            tokenizer, before, skip_special_tokens=skip_special_tokens, visible_tokens=visible_tokens
        )


class LogprobsTracker(_TokenTracker):
    """Holds back the logprobs of a completion's tokens until their text is returned.

    Invariant: a token's logprobs are returned with its text, so they do not reveal text that is still held back.
    """

    def __init__(self, *args: Any, start: int = 0, **options: Any) -> None:
        """``start``: the offset of the completion in the text of the choice."""
        super().__init__(*args, **options)
        self._start = start
        #: Characters of all tokens, and of the text that was returned.
        self._end = self._returned = 0
        #: Tokens whose text was not returned yet, each with the end of its text.
        self._held: deque[tuple[int, Token]] = deque()

    def advance(self, added: CompletionOutput) -> list[Token]:
        """The tokens whose whole text was returned with this increment; all that remain with a finished one."""
        self._returned += len(added.text)
        for token_id, logprobs in zip(added.token_ids, added.logprobs or (), strict=True):
            # A token that ends within a character has no text of its own: its offset is that of the character.
            token = Token(token_id, self._end, logprobs)
            self._end += len(self._stream.push(token_id))
            self._held.append((self._end, token))
        ready = []
        while self._held and (added.finished or self._held[0][0] <= self._returned):
            token = self._held.popleft()[1]
            ready.append(replace(token, offset=self._start + min(token.offset, self._returned)))
        return ready


class TextLogprobs(_TokenTracker):
    """Finds the tokens of parts of a choice's text, of which other parts are reasoning, tool calls or marks.

    Invariant: a token is returned once: by ``take`` of the text in which it ends, or by ``rest`` of a text that ends
    within it. Tokens outside of these texts, such as the EOS token, are never returned.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Tokens that were not taken yet, grouped until they end at a whole character, each with the end of its text.
        self._held: deque[tuple[int, list[Token]]] = deque()
        #: Tokens of a character that has begun.
        self._begun: list[Token] = []
        self._end = 0

    def add(self, added: CompletionOutput) -> None:
        for token_id, logprobs in zip(added.token_ids, added.logprobs or (), strict=True):
            if token_id in self._skipped:
                continue
            self._begun.append(Token(token_id, self._end, logprobs))
            if text := self._stream.push(token_id):
                self._end += len(text)
                self._held.append((self._end, self._begun))
                self._begun = []

    def take(self, start: int, end: int) -> list[Token]:
        """The tokens that end after ``start`` and not after ``end``; earlier ones are dropped."""
        taken: list[Token] = []
        while self._held and self._held[0][0] <= end:
            token_end, tokens = self._held.popleft()
            if token_end > start:
                taken += tokens
        return taken

    def rest(self, end: int) -> list[Token]:
        """The tokens that begin before ``end`` and end after it, for a text that ends there."""
        tokens = self._held[0][1] if self._held else self._begun
        if not tokens or tokens[0].offset >= end:
            return []
        if self._held:
            self._held.popleft()
        else:
            self._begun = []
        return tokens


def make_chat_logprobs(names: TokenNames, tokens: list[Token], top: int) -> protocol.ChoiceLogprobs:
    """Logprobs in the format of chat completions, with the ``top`` most likely tokens at each position."""
    content = []
    for token in tokens:
        logprobs = token.logprobs or {}
        own = names.of_chat(token.token_id, logprobs[token.token_id].logprob)
        # With more than ``top`` entries, the generated token is there beside the most likely ones.
        likely = [(i, entry) for i, entry in logprobs.items() if i != token.token_id or len(logprobs) <= top]
        likely.sort(key=lambda item: (-item[1].logprob, item[1].rank))
        top_logprobs = [names.of_chat(i, entry.logprob) for i, entry in likely]
        content.append(
            protocol.TokenLogprob(token=own.token, bytes=own.bytes, logprob=own.logprob, top_logprobs=top_logprobs)
        )
    return protocol.ChoiceLogprobs(content=content, refusal=None)


def make_completion_logprobs(names: TokenNames, tokens: list[Token]) -> protocol.CompletionLogprobs:
    top_logprobs: list[dict[str, float] | None] = []
    for token in tokens:
        if token.logprobs is None:
            top_logprobs.append(None)
            continue
        by_name: dict[str, float] = {}
        for token_id, entry in token.logprobs.items():
            # Different tokens may have the same text; the generated one comes first.
            by_name.setdefault(names.of_completion(token_id), _finite(entry.logprob))
        top_logprobs.append(by_name)
    # Not validated, for speed.
    return protocol.CompletionLogprobs.model_construct(
        text_offset=[token.offset for token in tokens],
        token_logprobs=[_finite(t.logprobs[t.token_id].logprob) if t.logprobs else None for t in tokens],
        tokens=[names.of_completion(token.token_id) for token in tokens],
        top_logprobs=top_logprobs,
    )


def prompt_tokens(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: list[TokenLogprobs | None], text: str
) -> list[Token]:
    """The tokens of a prompt with their offsets in its text; special tokens that it does not contain have no width."""
    stream, tokens, start = TextStream(tokenizer, [], skip_special_tokens=False), [], 0
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        special = tokenizer.token_text(token_id) if token_id in tokenizer.special_ids else None
        if special is not None and _find_piece(text, special, start) is None:
            tokens.append(Token(token_id, min(start, len(text)), entry))
            continue
        piece = stream.push(token_id)
        if (offset := _find_piece(text, piece, start)) is not None:
            start = offset
        elif text.startswith(piece.lstrip(" "), start):  # a word that a decoder begins with a space
            piece = piece.lstrip(" ")
        tokens.append(Token(token_id, min(start, len(text)), entry))
        start += len(piece)
    return tokens


def _find_piece(text: str, piece: str, start: int) -> int | None:
    """The offset of a piece at ``start``, or after spaces there, which special tokens may have taken."""
    if text.startswith(piece, start):
        return start
    after = _SPACES.match(text, start)
    return after.end() if after is not None and text.startswith(piece, after.end()) else None


def make_prompt_logprobs(logprobs: list[TokenLogprobs | None]) -> Any:
    """``PromptLogprobs``, for ``encode_in_slices``: for each token None, or a dict by token id."""

    def convert(entry: TokenLogprobs | None) -> dict[str, dict[str, Any]] | None:
        if entry is None:
            return None
        return {
            str(token_id): {"logprob": _finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
            for token_id, p in entry.items()
        }

    return LazyList(logprobs, convert)


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
