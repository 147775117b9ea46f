"""Outputs of requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Logprob:
    """Logprob of one token at one position."""

    logprob: float
    #: 1 is the most likely token of the vocabulary.
    rank: int
    decoded_token: str | None = None


#: Token id -> logprob: the chosen token first, then the most likely ones.
TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request; seconds, on the clock of ``time.monotonic()``."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    #: Known when the request has ended; None for beam search, like the first token's.
    last_token_time: float | None = None
    finished_time: float | None = None
    #: Prompt tokens whose KV entries were found instead of computed.
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    #: Of them, those that moved its blocks to host memory; the others computed them again.
    num_preemptions_by_swap: int = 0
    #: Tokens computed again after preemption, and blocks moved out.
    num_recomputed_tokens: int = 0
    num_swapped_blocks: int = 0
    #: Tokens that were guessed and computed ahead, and how many of them were right; of all completions.
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that computed something of it."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt, or an increment of it. ``index`` and the scores are those of the whole."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    #: Sum of its tokens' logprobs, where they were computed.
    cumulative_logprob: float | None = None
    #: Score by which a hypothesis of a beam search is ranked.
    score: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    #: "stop", "length", "abort", "error" or "ignored" (it could never run); None while unfinished.
    finish_reason: str | None = None
    #: The stop string or stop token id that ended it; None for the end-of-sequence token.
    stop_reason: str | int | None = None
    #: Why, if ``finish_reason`` is "error" or "ignored".
    error: str | None = None
    #: Whether the error is that the request's sequences do not fit the whole KV cache.
    exceeds_kv_cache: bool = False
    #: Whether the error is that the request's adapter could not be loaded.
    adapter_failed: bool = False
    #: Whether the error is that the request's own fields (its form, ``bad_words``, ...) leave no token to choose.
    excludes_all_tokens: bool = False

    @property
    def finished(self) -> bool:
        """Whether no further token will come."""
        return self.finish_reason is not None

    def __add__(self, later: CompletionOutput) -> CompletionOutput:
        """This completion with the increment ``later`` appended."""
        ending = later if self.finish_reason is None else self
        return replace(
            ending,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            cumulative_logprob=later.cumulative_logprob,
            logprobs=None if self.logprobs is None or later.logprobs is None else self.logprobs + later.logprobs,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """A hypothesis of a beam search with its prompt."""

    #: Token ids of prompt and continuation.
    tokens: list[int]
    #: Texts of both; of the continuation alone where the prompt was token ids, except from ``LLM.beam_search``.
    text: str
    #: Sum of the logprobs of the continuation's tokens.
    cum_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True)
class RequestOutput:
    """The output of a request, or an increment: what is new since the output before.

    An increment has an entry for every completion, empty if nothing was added to it. The finish reason of a completion
    is in the one increment that ends it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    #: One entry a prompt token; the first is None, as nothing comes before it. Of increments, the first one has them.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    #: Of an encoder-decoder model, whose decoder's the prompt is: what its encoder has read, as text and token ids if
    #: it was text, and how many positions.
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_encoder_tokens: int = 0
    #: Of a request that asks for them: weights of cross attention, float32 [heads, prompt tokens, encoder positions].
    attention_weights: bytes | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, with those of the encoder's input."""
        return len(self.prompt_token_ids) + self.num_encoder_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV entries were found instead of computed."""
        return self.metrics.num_cached_tokens

    @property
    def sequences(self) -> list[BeamSearchSequence]:
        """The hypotheses of a beam search, best first, each with its prompt."""
        return [
            BeamSearchSequence(
                tokens=self.prompt_token_ids + output.token_ids,
                text=(self.prompt or "") + output.text,
                cum_logprob=output.cumulative_logprob,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
            for output in self.outputs
        ]

    def __add__(self, later: RequestOutput) -> RequestOutput:
        """This output with the next increment ``later`` appended. A new object; copies all tokens so far."""
        return replace(
            later,
            outputs=[mine + added for mine, added in zip(self.outputs, later.outputs, strict=True)],
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
            attention_weights=self.attention_weights or later.attention_weights,
        )
