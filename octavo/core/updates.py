"""What a step of the engine core tells those who hold the requests: plain data, which another process may read."""

from __future__ import annotations

import msgspec

from octavo.core.plan import SequenceResult


class SequenceUpdate(msgspec.Struct, array_like=True, gc=False):
    """What a step did to one sequence of a group."""

    group_id: int
    #: Which of the group's completions it is.
    index: int
    token_id: int | None = None
    extra: SequenceResult | None = None
    #: Set at its end: "stop", "length" or "error".
    finish_reason: str | None = None
    #: The stop token id that the request named, if one ended it.
    stop_reason: int | None = None
    error: str | None = None


class Hypothesis(msgspec.Struct, frozen=True):
    """A complete sequence of a beam search."""

    #: Generated tokens, with the stop token that ended it.
    token_ids: list[int]
    #: Sum of the logprobs of ``token_ids``.
    cumulative_logprob: float
    #: ``cumulative_logprob / len(token_ids) ** length_penalty``
    score: float
    #: "stop" or "length".
    finish_reason: str


class GroupMetrics(msgspec.Struct, array_like=True):
    """What became of a group on its way; see ``RequestMetrics``."""

    first_scheduled_time: float | None
    num_cached_tokens: int
    num_recomputes: int
    num_recomputed_tokens: int
    num_swaps: int
    num_swapped_blocks: int


class GroupUpdate(msgspec.Struct, array_like=True):
    """The end of a group: after its last sequence's, or for all that still ran."""

    group_id: int
    #: Of the sequences that have not ended before: "stop", "abort", "error" or "ignored".
    finish_reason: str
    metrics: GroupMetrics
    error: str | None = None
    #: Of a beam search, best first.
    hypotheses: list[Hypothesis] | None = None


class StepOutputs(msgspec.Struct):
    """All that came of a step, sequences before the groups that end with them."""

    sequences: list[SequenceUpdate] = []
    groups: list[GroupUpdate] = []
