"""Text of one HTTP request: its size and parameters, its call of the engine, usage, logprobs."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from octavo import __version__
from octavo.core.cache_hints import Breakpoint
from octavo.core.model_config import ReasoningMarks
from octavo.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from octavo.core.request import TokensPrompt
from octavo.core.sampling_params import (
    NOT_IN_BEAM_SEARCH,
    BeamSearchParams,
    DefaultMaxTokens,
    SamplingParams,
    defaults_beside,
    parameters,
)
from octavo.engine.tokenizer import TextStream, Tokenizer
from octavo.server.answer_format import AnswerFormat
from octavo.server.engine_call import EngineCall, new_response_id, request_options
from octavo.server.http.errors import invalid_at, unsupported
from octavo.server.http.streaming import LazyList
from octavo.server.openai import protocol
from octavo.server.prompt_inputs import truncate_prompt

if TYPE_CHECKING:
    from octavo.server.state import ServedModel, ServerState

T = TypeVar("T", bound="_TokenTracker")


@dataclass(slots=True, kw_only=True)
class Generation(EngineCall[RequestOutput]):
    """The texts that a body of the OpenAI API asks for."""

    body: protocol.GenerationRequest
    params: SamplingParams | BeamSearchParams
    #: None: reasoning is not separated from the content.
    reasoning_tokens: int | None = None

    @property
    def include_usage(self) -> bool:
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    @property
    def token_names(self) -> TokenNames:
        return TokenNames(self.service.llm.tokenizer, self.body.return_tokens_as_token_ids is True)

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
        prompt, completion = self.prompt_tokens, self.completion_tokens
        usage = protocol.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=protocol.PromptDetails(cached_tokens=self.cached_tokens),
        )
        if self.options.cache_hints is not None:
            usage.prompt_tokens_details.cache_write_tokens = self.created_tokens
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
    answer_format: AnswerFormat | None = None,
    names: Mapping[str, str] | None = None,
    prediction: list[int] | None = None,
    visible_tokens: frozenset[int] = frozenset(),
    reasoning: ReasoningMarks | None = None,
    breakpoints: Sequence[Breakpoint] = (),
) -> Generation:
    """Checks the size and the parameters of a request and prepares its generation.

    ``prefix`` begins the response id. ``names``: of fields of ``SamplingParams``, and "prompt", in the request, for
    later errors. ``prediction``, ``visible_tokens`` and ``reasoning`` are fields of ``RequestOptions``; ``breakpoints``
    is part of its ``cache_hints``.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid_at("stream_options", "is allowed only with stream=true")
    sequences = len(prompts) * max(body.n or 1, body.best_of or 1)
    if sequences > (limit := service.options.max_sequences_per_request):
        path = "n" if body.best_of is None else "best_of"
        raise invalid_at(path, f"the request asks for {sequences} sequences; at most {limit} are served")
    inputs, lengths = service.llm.inputs, [len(prompt["prompt_token_ids"]) for prompt in prompts]
    if (most := body.truncate_prompt_tokens) is not None:
        if most == 0:
            raise invalid_at("truncate_prompt_tokens", "must be -1 or at least 1, not 0")
        if most == -1:
            is_explicit = max_tokens is not None and not isinstance(max_tokens, DefaultMaxTokens)
            most = max(1, inputs.max_model_len - (max_tokens if is_explicit and max_tokens is not None else 1))
        prompts = [truncate_prompt(prompt, most, body.truncation_side or "left") for prompt in prompts]
        if [len(prompt["prompt_token_ids"]) for prompt in prompts] != lengths:
            breakpoints = ()
    params: SamplingParams | BeamSearchParams
    if body.use_beam_search:
        if logprobs is not None:
            raise unsupported("logprobs", "is not supported with use_beam_search")
        if answer_format is not None:
            raise unsupported(answer_format.field, "is not supported with use_beam_search")
        room = DefaultMaxTokens(inputs.max_model_len - min(lengths))
        params = make_beam_search_params(body, room if max_tokens is None else max_tokens)
    else:
        params = make_sampling_params(
            body,
            inputs.default_sampling,
            max_tokens=max_tokens,
            logprobs=logprobs if body.logprob_token_ids is None else 0,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=None if answer_format is None else answer_format.params,
        )
        inputs.check_params(params)
    for prompt in prompts:
        inputs.check_length(len(prompt["prompt_token_ids"]), max_tokens)
    options = request_options(
        request,
        body,
        model.adapter,
        breakpoints,
        prediction=prediction,
        visible_tokens=visible_tokens,
        reasoning=reasoning,
    )
    return Generation(
        service=service,
        request=request,
        model=model,
        response_id=new_response_id(prefix),
        prompts=prompts,
        params=params,
        options=options,
        streams=bool(body.stream),
        n=body.n or 1,
        names=names or {},
        body=body,
    )


#: Parameters that the body has under their own names, without those that ``make_sampling_params`` takes.
_SHARED = tuple(
    name
    for name in parameters(SamplingParams)
    if name in protocol.GenerationRequest.model_fields
    and name not in ("max_tokens", "prompt_logprobs", "truncate_prompt_tokens", "structured_outputs")
)
_BEAM_FIELDS = ("length_penalty", "early_stopping", "ignore_eos", "skip_special_tokens")


def make_sampling_params(
    body: protocol.GenerationRequest, defaults: Mapping[str, Any], **others: Any
) -> SamplingParams:
    """The parameters of a request without beam search: its fields, and ``others``.

    ``defaults`` are the model's, for fields left out.
    """
    for name in ("length_penalty", "early_stopping"):
        if getattr(body, name) is not None:
            raise unsupported(name, "is a field of beam search: set use_beam_search to true")
    values = {**_set_fields(body, _SHARED), **others, "extra_args": body.vllm_xargs}
    return SamplingParams(**defaults_beside(values, defaults), **values)


def make_beam_search_params(body: protocol.GenerationRequest, max_tokens: int) -> BeamSearchParams:
    """The parameters of a request with beam search; the width is ``best_of``, or ``n``."""
    neutral = SamplingParams()
    for name, value in _set_fields(body, (*_SHARED, "prompt_logprobs")).items():
        if name in NOT_IN_BEAM_SEARCH or name in _BEAM_FIELDS or value == getattr(neutral, name):
            continue
        raise unsupported(name, "is not supported with use_beam_search")
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
