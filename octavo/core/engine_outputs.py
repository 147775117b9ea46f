"""Outputs of a step of the engine core: plain data, which can be sent to another process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from octavo.core.plan import SequenceResult


class SequenceOutput(msgspec.Struct, array_like=True, gc=False):
    """What a step added to one sequence of a group."""

    group_id: int
    #: Which of the group's completions it is.
    index: int
    #: In order; the last one may be the one that ended it.
    token_ids: list[int] = []
    #: Logprobs of ``token_ids`` and whatever else the workers say of the sequence.
    extra: SequenceResult | None = None
    #: Set at its end: "stop", "length" or "error" (``SequenceResult.error``).
    finish_reason: str | None = None
    #: The stop token id that the request named, if one ended it.
    stop_reason: int | None = None


class Hypothesis(msgspec.Struct, frozen=True):
    """A complete sequence of a beam search."""

    #: Generated tokens, with the stop token that ended it.
    token_ids: list[int]
    #: Sum of the logprobs of ``token_ids``.
    cumulative_logprob: float
    #: ``cumulative_logprob / len(token_ids) ** length_penalty``
    score: float
    finish_reason: Literal["stop", "length"]


class AdmissionStats(msgspec.Struct, array_like=True):
    """A group was admitted, for the first time or again; its totals so far (see ``RequestMetrics``)."""

    group_id: int
    first_scheduled_time: float | None = None
    num_cached_tokens: int = 0
    num_recomputes: int = 0
    num_recomputed_tokens: int = 0
    num_swaps: int = 0
    num_swapped_blocks: int = 0


class DraftStats(msgspec.Struct, array_like=True, gc=False):
    """Draft tokens of a group so far, over its sequences, and how many of them were accepted."""

    group_id: int
    num_draft_tokens: int
    num_accepted_tokens: int


class GroupOutput(msgspec.Struct, array_like=True):
    """The end of a whole group: of a beam search, of a prompt without sampling, or by a failure."""

    group_id: int
    #: "stop", "length" (where nothing is sampled), "error" or "ignored".
    finish_reason: str
    error: str | None = None
    #: Of a beam search, best first.
    hypotheses: list[Hypothesis] | None = None
    #: Whether the error is that the group does not fit all KV cache blocks.
    exceeds_kv_cache: bool = False
    #: Whether the error is that its adapter could not be loaded.
    adapter_failed: bool = False


class EngineCoreOutputs(msgspec.Struct):
    """All outputs of a step."""

    admissions: list[AdmissionStats] = []
    sequences: list[SequenceOutput] = []
    #: Of the groups that had drafts in this step.
    drafts: list[DraftStats] = []
    groups: list[GroupOutput] = []

    def parts(self, size: int) -> Iterator[EngineCoreOutputs]:
        """The same in the same order, ``size`` sequences at a time."""
        if len(self.sequences) <= size:
            yield self
            return
        yield EngineCoreOutputs(admissions=self.admissions, drafts=self.drafts)
        for start in range(0, len(self.sequences), size):
            yield EngineCoreOutputs(sequences=self.sequences[start : start + size])
        yield EngineCoreOutputs(groups=self.groups)
