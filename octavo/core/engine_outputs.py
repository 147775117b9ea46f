"""Outputs of a step of the engine core: plain data, which can be sent to another process."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from octavo.core.plan import SequenceResult
from octavo.core.progress import AdmissionStats, BeamUpdate, DraftStats, Hypothesis


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
    #: Of the sequences that go on after one token of which nothing else is to be said, nearly all and nearly always:
    #: their groups, which of its group's completions each is, and the tokens.
    group_ids: list[int] = []
    indexes: list[int] = []
    token_ids: list[int] = []
    #: Of all others.
    sequences: list[SequenceOutput] = []
    #: Of the groups that had drafts in this step.
    drafts: list[DraftStats] = []
    groups: list[GroupOutput] = []
    #: Of the beam searches that go on.
    beams: list[BeamUpdate] = []

    def each_sequence(self) -> Iterator[SequenceOutput]:
        """What the step added to each sequence."""
        for group_id, index, token in zip(self.group_ids, self.indexes, self.token_ids, strict=True):
            yield SequenceOutput(group_id, index, [token])
        yield from self.sequences

    def parts(self, size: int) -> Iterator[EngineCoreOutputs]:
        """The same in the same order, ``size`` sequences at a time."""
        if len(self.token_ids) + len(self.sequences) <= size:
            yield self
            return
        yield EngineCoreOutputs(admissions=self.admissions, drafts=self.drafts, beams=self.beams)
        for start in range(0, len(self.token_ids), size):
            part = slice(start, start + size)
            columns = self.group_ids[part], self.indexes[part], self.token_ids[part]
            yield EngineCoreOutputs([], *columns)
        for start in range(0, len(self.sequences), size):
            yield EngineCoreOutputs(sequences=self.sequences[start : start + size])
        yield EngineCoreOutputs(groups=self.groups)
