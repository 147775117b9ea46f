"""The generation of one HTTP request: admission to the queue, one engine request for each prompt, usage, failures."""

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
from octavo.core.request import RequestOptions, TokensPrompt, num_prompt_tokens
from octavo.core.sampling_params import BeamSearchParams, DefaultMaxTokens, SamplingParams, defaults_beside
from octavo.engine.tokenizer import TextStream, Tokenizer
from octavo.server.answer_format import form_error, read_form, renamed, tell_relaxed_keywords
from octavo.server.http.errors import ApiError, invalid, server_error, unsupported
from octavo.server.http.middleware import client_of
from octavo.server.http.streaming import LazyList, cancel_tasks
from octavo.server.logging import log_fields, log_prompt
from octavo.server.metrics import RequestObserver
from octavo.server.openai.protocol import (
    ChoiceLogprobs,
    CompletionDetails,
    CompletionLogprobs,
    PromptDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from octavo.server.prompt_inputs import truncated
from octavo.server.state import engine_request_id

if TYPE_CHECKING:
    from octavo.server.openai.protocol import GenerationRequest
    from octavo.server.state import ServedModel, ServerState


# Logprobs of prompts and completions in the formats of the OpenAI API, in step with the text that is returned.

#: Lowest logprob that is sent, as JSON has no infinity.
_MIN_LOGPROB = -9999.0
_SPACES = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Token:
    """A token, the offset of its text in the text of the choice in characters, and its logprobs."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are named in logprobs: by their text, or as ``token_id:ID``."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def of_completion(self, token_id: int) -> str:
        """A token's text; for a part of a character its bytes, in OpenAI's notation."""
        if self.as_ids:
            return f"token_id:{token_id}"
        data = self.tokenizer.token_bytes(token_id)
        if not data:  # whole text, or no token of this tokenizer
            return self.tokenizer.token_text(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def of_chat(self, token_id: int, logprob: float) -> TopLogprob:
        """A token, its bytes and its logprob."""
        text = self.tokenizer.token_text(token_id)
        data = self.tokenizer.token_bytes(token_id)
        plain = list(text.encode() if data is None else data)
        name = f"token_id:{token_id}" if self.as_ids else text
        return TopLogprob(token=name, bytes=plain, logprob=_finite(logprob))


class _Tracker:
    """Follows the text of a completion's tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: Sequence[int],
        *,
        skip_special_tokens: bool,
        visible_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """For a completion after the tokens ``before``.

        ``visible_tokens``: special tokens that are not skipped with the others.
        """
        self._skipped = tokenizer.special_ids - visible_tokens if skip_special_tokens else frozenset[int]()
        self._stream = TextStream(
            tokenizer, before, skip_special_tokens=skip_special_tokens, visible_tokens=visible_tokens
        )


class LogprobsTracker(_Tracker):
    """Holds back the logprobs of a completion's tokens until their text is returned.

    Invariant: a token's logprobs are returned with its text, so they do not reveal text that is still held back.
    """

    def __init__(self, *args: Any, start: int = 0, **options: Any) -> None:
        """The text of the completion begins at offset ``start``; else see the base class."""
        super().__init__(*args, **options)
        self._start = start
        #: Characters of the text of all tokens, and of the text that was returned.
        self._end = self._returned = 0
        #: (end of its text, token) of the tokens whose text was not returned yet.
        self._held: deque[tuple[int, Token]] = deque()

    def advance(self, added: CompletionOutput) -> list[Token]:
        """The tokens whose text is complete with this increment; with a finished one, all that remain."""
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


class TextLogprobs(_Tracker):
    """Which tokens the texts of a choice are made of, where some of what the model writes is reasoning, calls or marks.

    Invariant: a token is given once, when the last of its text is, or with ``rest`` of the text that ends within it.
    Tokens whose text is in none, such as the one that ends the choice, are not given.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """See the base class."""
        super().__init__(*args, **options)
        #: (end of its text, the tokens that it is made of) of whole characters not asked for yet; then of one begun.
        self._held: deque[tuple[int, list[Token]]] = deque()
        self._begun: list[Token] = []
        self._end = 0

    def add(self, added: CompletionOutput) -> None:
        """Tokens were generated."""
        for token_id, logprobs in zip(added.token_ids, added.logprobs or (), strict=True):
            if token_id in self._skipped:
                continue
            self._begun.append(Token(token_id, self._end, logprobs))
            if text := self._stream.push(token_id):
                self._end += len(text)
                self._held.append((self._end, self._begun))
                self._begun = []

    def take(self, start: int, end: int) -> list[Token]:
        """The tokens whose text ends within that from ``start`` to ``end``; earlier ones are forgotten."""
        found: list[Token] = []
        while self._held and self._held[0][0] <= end:
            token_end, tokens = self._held.popleft()
            if token_end > start:
                found += tokens
        return found

    def rest(self, end: int) -> list[Token]:
        """The tokens of which only a beginning is within the text that ends at ``end``; nothing follows in it."""
        tokens = self._held[0][1] if self._held else self._begun
        if not tokens or tokens[0].offset >= end:
            return []
        if self._held:
            self._held.popleft()
        else:
            self._begun = []
        return tokens


def make_chat_logprobs(names: TokenNames, tokens: list[Token], top: int) -> ChoiceLogprobs:
    """Logprobs in the format of chat completions, with the ``top`` most likely tokens at each position."""
    content = []
    for token in tokens:
        logprobs = token.logprobs or {}
        name = names.of_chat(token.token_id, logprobs[token.token_id].logprob)
        most_likely = [names.of_chat(i, logprob) for i, logprob in _most_likely(token, top)]
        content.append(TokenLogprob(token=name.token, bytes=name.bytes, logprob=name.logprob, top_logprobs=most_likely))
    return ChoiceLogprobs(content=content, refusal=None)


def make_completion_logprobs(names: TokenNames, tokens: list[Token]) -> CompletionLogprobs:
    """Logprobs in the format of completions."""
    # Not validated, which is a single call for all of them.
    return CompletionLogprobs.model_construct(
        text_offset=[token.offset for token in tokens],
        token_logprobs=[_finite(t.logprobs[t.token_id].logprob) if t.logprobs else None for t in tokens],
        tokens=[names.of_completion(token.token_id) for token in tokens],
        top_logprobs=[_by_name(names, token.logprobs) for token in tokens],
    )


def prompt_tokens(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: list[TokenLogprobs | None], text: str
) -> list[Token]:
    """The tokens of a prompt; a special one that its text does not have, such as a beginning, takes none of it."""
    stream, tokens, start = TextStream(tokenizer, [], skip_special_tokens=False), [], 0
    for token_id, known in zip(token_ids, logprobs, strict=True):
        special = tokenizer.token_text(token_id) if token_id in tokenizer.special_ids else None
        if special is not None and _place(text, special, start) is None:
            tokens.append(Token(token_id, min(start, len(text)), known))
            continue
        piece = stream.push(token_id)
        if (place := _place(text, piece, start)) is not None:
            start = place
        elif text.startswith(piece.lstrip(" "), start):  # a word that a decoder begins with a space
            piece = piece.lstrip(" ")
        tokens.append(Token(token_id, min(start, len(text)), known))
        start += len(piece)
    return tokens


def _place(text: str, piece: str, start: int) -> int | None:
    """Where a piece stands in a text, from ``start`` on; special tokens may have taken the spaces before it."""
    if text.startswith(piece, start):
        return start
    after = _SPACES.match(text, start)
    return after.end() if after is not None and text.startswith(piece, after.end()) else None


def make_prompt_logprobs(logprobs: list[TokenLogprobs | None]) -> Any:
    """``PromptLogprobs``, for ``encode_in_slices``: for each token None, or a dict by token id."""
    return LazyList(logprobs, _plain)


def _plain(entry: TokenLogprobs | None) -> dict[str, dict[str, Any]] | None:
    if entry is None:
        return None
    return {
        str(token_id): {"logprob": _finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
        for token_id, p in entry.items()
    }


def _most_likely(token: Token, top: int) -> list[tuple[int, float]]:
    """(id, logprob) of the ``top`` most likely tokens of a position, the most likely first."""
    logprobs = dict(token.logprobs or {})
    if len(logprobs) > top:
        del logprobs[token.token_id]  # it is included as the generated token, not as one of the most likely
    return [(i, p.logprob) for i, p in sorted(logprobs.items(), key=lambda item: (-item[1].logprob, item[1].rank))]


def _by_name(names: TokenNames, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
    if logprobs is None:
        return None
    named: dict[str, float] = {}
    for token_id, p in logprobs.items():
        # Different tokens may have the same text; the generated one comes first.
        named.setdefault(names.of_completion(token_id), _finite(p.logprob))
    return named


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


# ``SamplingParams`` and ``BeamSearchParams`` from the fields of a request.

#: Fields of the same name and meaning in ``SamplingParams``.
_SHARED = (
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "logprob_token_ids",
    "thinking_token_budget",
)
#: Shared fields that clients send with beam search and that do not affect it: it draws no random numbers.
_IGNORED_BY_BEAM_SEARCH = frozenset({"n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed"})
_BEAM_FIELDS = ("length_penalty", "early_stopping", "ignore_eos", "skip_special_tokens")


def make_sampling_params(
    body: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The parameters of a request without beam search; ``defaults`` for fields that the body leaves out.

    Raises:
        InvalidRequestError: a value is out of range.
        ApiError: a field of beam search was given.
    """
    for name in ("length_penalty", "early_stopping"):
        if getattr(body, name) is not None:
            raise unsupported(name, f"{name} is of beam search only; set use_beam_search to true with it")
    form = read_form(body)
    fields = {
        "max_tokens": max_tokens,
        "logprobs": logprobs if body.logprob_token_ids is None else 0,
        "prompt_logprobs": prompt_logprobs,
        "structured_outputs": None if form is None else form.params,
        "extra_args": body.vllm_xargs,
    }
    given = {**_given(body, _SHARED), **fields}
    return SamplingParams(**defaults_beside(given, defaults), **given)


def make_beam_search_params(body: GenerationRequest, max_tokens: int) -> BeamSearchParams:
    """The parameters of a request with beam search; the width is ``best_of``, or ``n``.

    Raises:
        InvalidRequestError: a value is out of range.
        ApiError: a field that beam search does not support was given.
    """
    neutral = SamplingParams()
    for name, value in _given(body, (*_SHARED, "prompt_logprobs")).items():
        if name in _IGNORED_BY_BEAM_SEARCH or name in _BEAM_FIELDS or value == getattr(neutral, name):
            continue
        raise unsupported(name, f"{name} is not supported with use_beam_search")
    if (form := read_form(body)) is not None:
        raise unsupported(form.field, f"{form.field} is not supported with use_beam_search")
    # SamplingParams checks n and best_of.
    width = SamplingParams(n=body.n or 1, best_of=body.best_of).num_sequences
    return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **_given(body, _BEAM_FIELDS))


def _given(body: GenerationRequest, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}


#: Logprobs at each position where the engine's ``max_logprobs`` is not given: as many as OpenAI's API has.
DEFAULT_MAX_LOGPROBS = 20

logger = logging.getLogger("octavo.server")

T = TypeVar("T", LogprobsTracker, TextLogprobs)


@dataclass(slots=True)
class Generation:
    """The prompts of one HTTP request in the engine, and the tokens used so far."""

    service: ServerState
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
    service: ServerState,
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
    service: ServerState, body: GenerationRequest, prompts: int, logprobs: int | None, prompt_logprobs: int | None
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
    service: ServerState, body: GenerationRequest, prompts: list[TokensPrompt], max_tokens: int | None
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
