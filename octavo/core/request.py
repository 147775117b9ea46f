"""A request as the engine core takes it, and a sequence as the scheduler moves it."""

from __future__ import annotations

import enum

import msgspec

from octavo.core.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence is; the finished states say why it ended."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def finished(self) -> bool:
        """Whether no further token will come."""
        return self not in (SequenceStatus.WAITING, SequenceStatus.RUNNING)


class SequenceRequest(msgspec.Struct, kw_only=True):
    """One sequence to generate: tokenized, checked, with everything resolved that needs a tokenizer.

    A request for ``n`` completions becomes ``n`` of these with consecutive ids.
    """

    seq_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    #: Unsigned 64-bit; never None, so a resumed sequence draws the same numbers.
    seed: int
    #: End-of-sequence and stop tokens (without the former if ``ignore_eos``).
    stop_token_ids: list[int] = []
    #: ``bad_words`` as token id sequences.
    bad_words_ids: list[list[int]] = []
    arrival_time: float = 0.0
    priority: int = 0


class Sequence:
    """The scheduler's record of one sequence.

    Invariant: ``0 <= num_computed <= len(token_ids)``; the KV entries of the first ``num_computed`` tokens are in the
    blocks of its block table, which the block manager keeps under ``seq_id``.
    """

    __slots__ = (
        "first_scheduled_time",
        "num_computed",
        "num_preemptions",
        "num_prompt_tokens",
        "request",
        "seq_id",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, request: SequenceRequest) -> None:
        self.request = request
        self.seq_id = request.seq_id
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed = 0
        self.status = SequenceStatus.WAITING
        self.stop_token_ids = frozenset(request.stop_token_ids)
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without KV entries: 1 while decoding, more while prefilling."""
        return len(self.token_ids) - self.num_computed
