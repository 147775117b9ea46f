"""What is known of a request that an engine core has begun: enough for another core to go on with the same bits."""

from __future__ import annotations

from typing import Literal

import msgspec

from octavo.core.untracked import untracked


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


class Hypothesis(msgspec.Struct, frozen=True):
    """A complete sequence of a beam search."""

    #: Generated tokens, with the stop token that ended it.
    token_ids: list[int]
    #: Sum of the logprobs of ``token_ids``.
    cumulative_logprob: float
    #: ``cumulative_logprob / len(token_ids) ** length_penalty``
    score: float
    finish_reason: Literal["stop", "length"]


class BeamUpdate(msgspec.Struct, array_like=True):
    """What a step of a beam search decided, which is not its last."""

    group_id: int
    #: The running beams, best first: which beam before the step each continues, and its new token.
    survivors: list[tuple[int, int]]
    #: Of the running beams: sums of the logprobs of their tokens.
    cumulative_logprobs: list[float]
    #: All so far, best first, if the step has added any.
    hypotheses: list[Hypothesis] | None = None


class BeamProgress(msgspec.Struct, array_like=True):
    """A beam search after some of its steps."""

    #: Generated tokens of the running beams, best first.
    token_ids: list[list[int]]
    cumulative_logprobs: list[float]
    hypotheses: list[Hypothesis] = []

    def apply(self, update: BeamUpdate) -> None:
        """Goes one step further."""
        self.token_ids = [[*self.token_ids[parent], token] for parent, token in update.survivors]
        self.cumulative_logprobs = update.cumulative_logprobs
        if update.hypotheses is not None:
            self.hypotheses = update.hypotheses


class CompletionProgress(msgspec.Struct, array_like=True, gc=False):
    """A completion that has not ended."""

    index: int
    #: Generated so far, with those that its grammar has forced.
    token_ids: list[int]

    def __post_init__(self) -> None:
        untracked(self.token_ids)


class Progress(msgspec.Struct, array_like=True):
    """A request that was begun elsewhere and goes on as after a preemption by recompute."""

    #: Those that have not ended; none: nothing was sampled yet.
    completions: list[CompletionProgress] = []
    #: Of a beam search that has generated something.
    beams: BeamProgress | None = None
    #: Counted on from here; None: it was never admitted.
    totals: AdmissionStats | None = None
    drafts: DraftStats | None = None
    #: Tokens that it must compute in steps of its own before it may share one: steps with it have failed repeatedly.
    alone: int = 0
