"""Messages between scheduler and workers: ``StepPlan`` (vLLM: ``SchedulerOutput``), ``StepResult``, and their parts.

A plan is all that workers get. It has changes only: workers keep tokens and block tables of their sequences, and append
the tokens that they sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from octavo.core.failures import SequenceFailure
from octavo.core.request import AdmissionStats, AnyTask, BeamUpdate, DraftStats, Feature, Hypothesis, Preparation
from octavo.core.stats import StoreTierStats


class NewContext(msgspec.Struct, array_like=True):
    """The output of an encoder, with a block table as of a sequence; used until ``StepPlan.forget`` drops it."""

    context_id: int
    num_tokens: int
    #: Key of the prepared input to compute before the sequences; None: keys and values are in the blocks.
    encode: str | None = None


class NewSequence(msgspec.Struct, array_like=True):
    """A sequence that is new to the workers (admitted, or resumed after preemption); table changes have its blocks."""

    seq_id: int
    #: The prompt, and tokens generated before a preemption.
    token_ids: list[int]
    num_prompt_tokens: int
    #: Tokens with KV entries in the blocks.
    num_computed: int
    #: A ``Generate`` has the sequence's own seed, and no source of its grammar, which workers have compiled. Tokens of
    #: a ``Beam`` come with ``StepPlan.new_tokens``. For other tasks the worker computes the prompt.
    task: AnyTask
    #: Key of its adapter, which has a slot by now.
    adapter: str | None = None
    #: Id of the ``NewContext`` that it attends to.
    context: int | None = None
    #: Placeholder tokens of prepared images.
    features: list[Feature] = []


class Fork(msgspec.Struct, array_like=True, gc=False):
    """A new sequence: a copy of a parent, before the table changes, with its own seed.

    A child that is not scheduled while its parent is samples from the parent's logits.
    """

    parent: int
    child: int
    seed: int


class TableChange(msgspec.Struct, array_like=True, gc=False):
    """Blocks to write into a sequence's block table from ``index`` on: appended, or in place of a shared block.

    Each group of layers with equal KV specs has its own tables. Blocks before a window may belong to other sequences.
    """

    seq_id: int
    index: int
    blocks: list[int]
    group: int = 0


class Fetch(msgspec.Struct, array_like=True, gc=False):
    """Blocks to read from the KV stores in the background; they stay in the worker's memory until they are dropped."""

    fetch_id: int
    #: (KV group, digest of the content), in the order in which they are of use.
    blocks: list[tuple[int, bytes]]


class StepPlan(msgspec.Struct):
    """What every worker does in one step, in the order of the fields.

    Blocks move in all layers, before any computation, in the order out, in, copies: a block just swapped out may
    receive a copy. No block is the target of two moves.
    """

    step: int
    #: Sequences and contexts to drop: finished, aborted, preempted.
    forget: list[int] = []
    #: (device block, digest of its content): to be written to the KV stores in the background. Their bytes are read
    #: before any block moves, and were computed by steps whose results are known (``StepResult.not_stored``).
    blocks_to_store: list[tuple[int, bytes]] = []
    #: (device block, host block).
    blocks_to_swap_out: list[tuple[int, int]] = []
    #: (host block, device block).
    blocks_to_swap_in: list[tuple[int, int]] = []
    #: Fetches to begin. A result reports each one once (``StepResult.fetched``), unless a plan has dropped it.
    fetch: list[Fetch] = []
    #: (fetch id, index of its block, device block): fetched blocks to write to the device, beside the swaps in.
    blocks_fetched: list[tuple[int, int, int]] = []
    #: Ids of fetches to drop, begun, reported or unknown, after their blocks are written.
    drop_fetches: list[int] = []
    #: (source, target), both on the device; a source may have several targets.
    blocks_to_copy: list[tuple[int, int]] = []
    #: Keys of resources to drop, with their slots; also of failed preparations, as some workers may have them.
    drop: list[str] = []
    #: Resources to prepare in the background; a result reports them. After a failed step, drops, preparations and
    #: places may be repeated: done ones are reported again.
    prepare: list[Preparation] = []
    #: (slot, key): prepared resources to put into a slot of their kind.
    place: list[tuple[int, str]] = []
    #: Seconds for resources that are computed on the device, before the sequences; what is left goes on in later steps.
    compute_seconds: float = 0.0
    #: Whether the step is empty until something is prepared, fetched or fails: it waits for that, or for some
    #: milliseconds.
    awaits_prepared: bool = False
    contexts: list[NewContext] = []
    new: list[NewSequence] = []
    forks: list[Fork] = []
    #: By sequence id: tokens of a beam search, or forced by a grammar (``StepResult.forced_tokens``), to append.
    new_tokens: dict[int, list[int]] = {}
    table_changes: list[TableChange] = []
    seq_ids: list[int] = []
    #: Tokens to compute for each of ``seq_ids``, with drafts. A sequence whose last token is computed samples.
    num_tokens: list[int] = []
    #: By sequence id: draft tokens, computed with the last token and accepted up to the first that differs from the
    #: sampled token (lookahead slots in vLLM). Table blocks behind accepted tokens may belong to other sequences from
    #: the next plan on, whose changes then begin before them.
    drafts: dict[int, list[int]] = {}
    #: By sequence id: maximum draft tokens that the worker proposes itself, instead of ``drafts``; in ``num_tokens``.
    num_drafts: dict[int, int] = {}

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.num_tokens)


class PositionLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of the model's own distribution at one position; rank 1 is the most likely token."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    #: Ranks, if these are not the top tokens.
    top_ranks: list[int] = []

    def add(self, other: PositionLogprobs) -> None:
        """Adds another token at the position."""
        self.top_ids.append(other.token_id)
        self.top_logprobs.append(other.logprob)
        self.top_ranks.append(other.rank)


class SequenceResult(msgspec.Struct, array_like=True):
    """What a step adds to one sequence besides its tokens."""

    #: One for each sampled token, if requested.
    logprobs: list[PositionLogprobs] = []
    #: First prompt position that ``prompt_logprobs`` covers (position 0 has none).
    prompt_start: int = 0
    prompt_logprobs: list[PositionLogprobs] = []
    #: float32: result of a ``Pool``; or attention weights of alignment heads [heads, prompt tokens, encoder positions].
    pooled: bytes | None = None
    #: Ends this sequence alone, and replaces its last sampled token, if there is one.
    error: SequenceFailure | None = None


class StepResult(msgspec.Struct):
    """The result of a plan."""

    step: int
    #: Sequences that sampled, and all their tokens.
    seq_ids: list[int] = []
    token_ids: list[int] = []
    #: Number of ``token_ids`` of each sequence; empty: one each.
    num_tokens: list[int] = []
    #: By sequence id: tokens that its grammar forces after the sampled ones; a later plan has them as ``new_tokens``.
    forced_tokens: dict[int, list[int]] = {}
    #: By sequence id: proposed draft tokens, of ``StepPlan.num_drafts``; or an error message.
    num_drafts: dict[int, int] = {}
    draft_error: str | None = None
    #: Parts of ``seconds``: proposing them, and there computing sampled tokens that the drafter lacked; their number.
    draft_seconds: float = 0.0
    draft_catch_up_seconds: float = 0.0
    draft_catch_up_tokens: int = 0
    #: By sequence id.
    extras: dict[int, SequenceResult] = {}
    #: Keys of resources prepared since the last result.
    prepared: list[str] = []
    #: By key: why a preparation failed, which ends the waiting requests.
    prepare_errors: dict[str, SequenceFailure] = {}
    #: By id: how many leading blocks of a fetch every worker has.
    fetched: dict[int, int] = {}
    #: (blocks, seconds) of fetches that ended since the last result, which tell what a fetched block costs.
    fetch_times: list[tuple[int, float]] = []
    #: (KV group, digest): blocks to store for which a worker had no room.
    not_stored: list[tuple[int, bytes]] = []
    #: (KV group, digest): blocks that the first worker has written, or could not write; with ``replica_roles`` alone.
    written: list[tuple[int, bytes]] = []
    #: The KV stores of the first worker, from time to time: by tier.
    stores: list[StoreTierStats] = []
    #: Digest of this rank's sampled tokens since the last comparison of ranks; empty between comparisons.
    sampled_digest: bytes = b""
    #: Seconds of the step to fill slots and to wait for preparations.
    prepare_seconds: float = 0.0
    #: Part of ``seconds``: computing resources (``StepPlan.compute_seconds``).
    compute_seconds: float = 0.0
    #: Seconds of the step on the worker, and there inside kernels (0: not measured).
    seconds: float = 0.0
    kernel_seconds: float = 0.0
    #: Part of ``seconds``: swapping blocks and waiting for swaps.
    swap_seconds: float = 0.0
    #: (bytes, seconds) of swaps that ended since the last result.
    swaps: list[tuple[int, float]] = []
    #: On a GPU: seconds of the step's work, and idle seconds before it; 0: unknown.
    device_seconds: float = 0.0
    idle_seconds: float = 0.0


# Outputs of a step of the engine core (vLLM: ``EngineCoreOutputs``).


class SequenceOutput(msgspec.Struct, array_like=True, gc=False):
    """What a step added to one sequence of a group."""

    group_id: int
    index: int
    token_ids: list[int] = []
    extra: SequenceResult | None = None
    #: At its end: "stop", "length" or "error" (``SequenceResult.error``).
    finish_reason: str | None = None
    #: The request's stop token that ended it, if one did.
    stop_reason: int | None = None


class GroupOutput(msgspec.Struct, array_like=True):
    """The end of a whole group: a beam search, a prompt without sampling, or a failure."""

    group_id: int
    #: "stop", "length" (without sampling), "error" or "ignored".
    finish_reason: str
    error: SequenceFailure | None = None
    #: Of a beam search, best first.
    hypotheses: list[Hypothesis] | None = None


class EngineCoreOutputs(msgspec.Struct):
    """All outputs of a step."""

    admissions: list[AdmissionStats] = []
    #: Columns of the sequences that continue after one token without further data, which are nearly all.
    group_ids: list[int] = []
    indexes: list[int] = []
    token_ids: list[int] = []
    sequences: list[SequenceOutput] = []
    drafts: list[DraftStats] = []
    groups: list[GroupOutput] = []
    beams: list[BeamUpdate] = []
    #: Running groups whose prompts' blocks are in the KV stores since this step; with ``replica_roles`` alone.
    stored: list[int] = []

    def each_sequence(self) -> Iterator[SequenceOutput]:
        """The outputs of all sequences."""
        for group_id, index, token in zip(self.group_ids, self.indexes, self.token_ids, strict=True):
            yield SequenceOutput(group_id, index, [token])
        yield from self.sequences

    def parts(self, size: int) -> Iterator[EngineCoreOutputs]:
        """The same outputs in the same order, ``size`` sequences at a time."""
        if len(self.token_ids) + len(self.sequences) <= size:
            yield self
            return
        yield EngineCoreOutputs(admissions=self.admissions, drafts=self.drafts, beams=self.beams)
        for start in range(0, len(self.token_ids), size):
            part = slice(start, start + size)
            yield EngineCoreOutputs([], self.group_ids[part], self.indexes[part], self.token_ids[part])
        for start in range(0, len(self.sequences), size):
            yield EngineCoreOutputs(sequences=self.sequences[start : start + size])
        yield EngineCoreOutputs(groups=self.groups, stored=self.stored)
