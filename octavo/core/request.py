"""A request as the engine core takes it: one group of sequences that share a prompt."""

from __future__ import annotations

import enum

import msgspec

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence is; the finished states say why it ended."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_IGNORED = "ignored"
    FINISHED_ERROR = "error"

    @property
    def finished(self) -> bool:
        """Whether no further token will come."""
        return self not in _UNFINISHED


_UNFINISHED = frozenset({SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED})


class GroupRequest(msgspec.Struct, kw_only=True):
    """What to generate from one prompt: tokenized, checked, with everything resolved that needs a tokenizer."""

    group_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    #: Unsigned 64-bit; never None, so a resumed sequence draws the same numbers. Sequence ``i`` uses ``seed + i``.
    seed: int
    #: End-of-sequence and stop tokens (without the former if ``ignore_eos``).
    stop_token_ids: list[int] = []
    #: ``bad_words`` as token id sequences.
    bad_words_ids: list[list[int]] = []
    arrival_time: float = 0.0
    #: Lower goes first, under the policies that look at it.
    priority: int = 0
    #: Requests with different salts share no cached prefix.
    cache_salt: str = ""
    #: Set for beam search; ``params`` then asks for greedy sampling with the logprobs that the search reads.
    beam: BeamSearchParams | None = None

    @property
    def num_sequences(self) -> int:
        """Most sequences of the group that run at once."""
        if self.beam is not None:
            return self.beam.beam_width
        return self.params.num_sequences
