"""The two messages between scheduler and workers: the plan of a step and its result.

A plan is all that a worker is sent. It carries changes only: a worker keeps the tokens and block tables of its
sequences, and appends the tokens that it samples.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from octavo.core.request import AdmissionStats, AnyTask, BeamUpdate, DraftStats, Feature, Hypothesis, Preparation


class NewContext(msgspec.Struct, array_like=True):
    """What sequences of this plan and later ones attend to beside their own tokens: the output of an encoder.

    It holds blocks as a sequence does: its block table is among the plan's table changes, under its id, which is none
    of a sequence, and ``StepPlan.forget`` names it when it goes.
    """

    context_id: int
    num_tokens: int
    #: Key of the prepared input that the step computes, before its sequences; None: keys and values are in the blocks.
    encode: str | None = None


class NewSequence(msgspec.Struct, array_like=True):
    """A sequence that the workers do not hold: newly admitted, or resumed after preemption.

    Its whole block table follows among the plan's table changes.
    """

    seq_id: int
    #: Every token known so far: the prompt, and what was generated before a preemption.
    token_ids: list[int]
    num_prompt_tokens: int
    #: Tokens whose KV entries are in the blocks already.
    num_computed: int
    #: A ``Generate`` has this sequence's own seed. Tokens of a ``Beam`` are not sampled: they come with
    #: ``StepPlan.new_tokens``. For a task that does not sample, the worker computes the prompt. The source of its
    #: grammar is left out: the workers have compiled it.
    task: AnyTask
    #: Key of its adapter, which has a slot from this plan on, or had one before.
    adapter: str | None = None
    #: Id of the context that it attends to, too.
    context: int | None = None
    #: Tokens of its prompt that stand for features of images; those are prepared.
    features: list[Feature] = []


class Fork(msgspec.Struct, array_like=True, gc=False):
    """A new sequence that starts as a copy of one that the workers hold: tokens, table, parameters; not the seed.

    The copy is taken before the plan's table changes. A child that the plan does not schedule, while it schedules its
    parent, samples with it: from the parent's logits, with its own seed.
    """

    parent: int
    child: int
    seed: int


class TableChange(msgspec.Struct, array_like=True, gc=False):
    """Blocks written into a sequence's block table from ``index`` on: appended, or in place of a shared block.

    A group of layers with equal KV specs has tables of its own. Of a group with an attention window, blocks before the
    window may belong to other sequences by now; they are not read.
    """

    seq_id: int
    index: int
    blocks: list[int]
    #: Index of the KV group.
    group: int = 0


class StepPlan(msgspec.Struct):
    """What every worker does in one step, in the order of the fields.

    Block moves concern all layers. They are done before anything is computed and in this order: out, in, copies, so
    that a block just swapped out may receive a copy. No block is the target of two moves.
    """

    step: int
    #: Sequences and contexts that the workers forget: finished, aborted, preempted.
    forget: list[int] = []
    #: (device block, host block).
    blocks_to_swap_out: list[tuple[int, int]] = []
    #: (host block, device block).
    blocks_to_swap_in: list[tuple[int, int]] = []
    #: (source, target), both on the device; a source may have several targets.
    blocks_to_copy: list[tuple[int, int]] = []
    #: Keys of what the workers forget, and take from the slot that it may have. Something whose preparation has failed
    #: may be among them: of several workers, some may have it.
    drop: list[str] = []
    #: What the workers begin to prepare, beside this step and those after it; a result says when it is done. After a
    #: step that failed, drops, preparations and places may come again: what is done already is no error, and is
    #: reported again.
    prepare: list[Preparation] = []
    #: (slot, key): prepared things that get a slot on the device, of those of their kind, in place of what is in it.
    place: list[tuple[int, str]] = []
    #: Whether nothing can be computed before something is prepared: the step waits until it is, or has failed, or for
    #: some milliseconds, after which new requests may be there.
    awaits_prepared: bool = False
    contexts: list[NewContext] = []
    new: list[NewSequence] = []
    forks: list[Fork] = []
    #: By sequence id: tokens to append that the worker has not appended itself: those that a beam search chose, or that
    #: a grammar forces (``StepResult.forced_tokens``).
    new_tokens: dict[int, list[int]] = {}
    table_changes: list[TableChange] = []
    #: Scheduled sequences.
    seq_ids: list[int] = []
    #: Tokens to compute for each of ``seq_ids``, with its drafts. One whose last known token is computed samples.
    num_tokens: list[int] = []
    #: By sequence id: draft tokens after the last known one. They are computed with it, and accepted up to the first
    #: that is not the token that the worker samples at its position. Blocks of the table behind those of computed
    #: tokens may belong to other sequences from the next plan on; the table's changes then begin before them.
    drafts: dict[int, list[int]] = {}
    #: By sequence id: most draft tokens that the worker itself proposes, at the beginning of the step and in place of
    #: ``drafts``. ``num_tokens`` counts them, and there are slots for them.
    num_drafts: dict[int, int] = {}

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step, over all sequences."""
        return sum(self.num_tokens)


class PositionLogprobs(msgspec.Struct, array_like=True):
    """Logprobs at one position, of the model's own distribution (natural logarithm)."""

    #: The token at the position, its logprob, and its rank (1 is the most likely).
    token_id: int
    logprob: float
    rank: int
    #: The most likely tokens, best first.
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    #: Their ranks, if they are others than the most likely ones.
    top_ranks: list[int] = []

    def add(self, other: PositionLogprobs) -> None:
        """Adds another token of the same position."""
        self.top_ids.append(other.token_id)
        self.top_logprobs.append(other.logprob)
        self.top_ranks.append(other.rank)


class SequenceResult(msgspec.Struct, array_like=True):
    """What a step adds to one sequence besides its tokens."""

    #: One for each sampled token, where they were asked for.
    logprobs: list[PositionLogprobs] = []
    #: First prompt position that ``prompt_logprobs`` covers (position 0 has none).
    prompt_start: int = 0
    prompt_logprobs: list[PositionLogprobs] = []
    #: Of a ``Pool`` whose prompt is computed: its vector or scores, float32, or those of each token in turn;
    #: of a ``Generate`` with alignment heads: their weights, float32 [heads, prompt tokens, encoder positions].
    pooled: bytes | None = None
    #: The sequence failed and ends with this message, in place of the last of its sampled tokens, if it has any; other
    #: sequences are not affected.
    error: str | None = None


class StepResult(msgspec.Struct):
    """The result of a plan."""

    step: int
    #: Sequences that sampled, and their tokens, one after the other.
    seq_ids: list[int] = []
    token_ids: list[int] = []
    #: How many of ``token_ids`` each sequence has; empty: one each.
    num_tokens: list[int] = []
    #: By sequence id: tokens that must follow the sampled ones, as the sequence's grammar allows no other. They are
    #: neither computed nor appended by the worker: they come back with the plan that computes them.
    forced_tokens: dict[int, list[int]] = {}
    #: By sequence id: draft tokens that the worker proposed, of those in ``StepPlan.num_drafts``; or why it could not.
    num_drafts: dict[int, int] = {}
    draft_error: str | None = None
    #: Of ``seconds``: proposing them, and of this for tokens that the drafter had not computed when they were sampled,
    #: and how many these were.
    draft_seconds: float = 0.0
    draft_catch_up_seconds: float = 0.0
    draft_catch_up_tokens: int = 0
    #: By sequence id; only for sequences that have any.
    extras: dict[int, SequenceResult] = {}
    #: Keys of what is prepared since the last result.
    prepared: list[str] = []
    #: By key: why something could not be prepared. The requests that wait for it end with this message.
    prepare_errors: dict[str, str] = {}
    #: What this rank has sampled since the ranks were last compared; empty where they are not compared now.
    sampled_digest: bytes = b""
    #: Seconds of the step that gave things their slots, or waited for one that was being prepared.
    prepare_seconds: float = 0.0
    #: Seconds of the step on the worker, and of them inside kernels (0 where it is not measured).
    seconds: float = 0.0
    kernel_seconds: float = 0.0
    #: Of ``seconds``: moving blocks between device and host, or waiting for them.
    swap_seconds: float = 0.0
    #: Swaps that have ended since the last result, perhaps those of earlier plans: bytes, and seconds on the way.
    swaps: list[tuple[int, float]] = []
    #: On a GPU: seconds between the beginning and the end of the step's work there, and those before it in which the
    #: device had nothing to do since the last step; 0 where they are not known.
    device_seconds: float = 0.0
    idle_seconds: float = 0.0


# Outputs of a step of the engine core: plain data, which can be sent to another process.


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
