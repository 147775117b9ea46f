"""``InputBatch``: the rows of running sequences (vLLM's persistent batch), and the flat inputs of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import NewSequence, StepPlan, TableChange
from octavo.core.request import Beam
from octavo.kernels.forward_batch import ARRAYS
from octavo.runner.row_feature import RowFeature
from octavo.sampling.sampler import Int64Array, TokenTable

_ADVANCING = [(array.name, array.advance) for array in ARRAYS if array.advance]


class InputBatch:
    """Owns a row for each sequence that the worker holds: its tokens, its block table, its number of computed tokens.

    A token counts as known from the step that samples it, though its id may be on the device only until ``fill``.
    Drafts lie behind the known tokens and count when they are accepted. Inputs are built without a loop over tokens.
    Invariant: a sequence keeps its row from the plan that introduces it to the plan that forgets it.

    The most frequent step repeats the last one: the same sequences decode the next token in the same block. It changes
    the arrays of the last step in place, for the sake of small batches, whose steps are short: by then weights have
    filled the processor's caches, and code that has to be fetched again costs many times as much.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: Sequence[int] = (0,),
        *,
        samples: bool = True,
        features: Sequence[RowFeature] = (),
    ) -> None:
        """Allocates the rows, with a block table for each KV group of ``num_blocks``.

        Without groups, the sequences of a step lie one after the other in an encoder's workspace. ``samples``: False on
        a pipeline stage that is not the last, where tokens come by ``append_sampled``.
        """
        self._samples = samples
        self.features = features
        self._has_blocks = len(num_blocks) > 0
        self.block_size = block_size
        # One more: a step in flight may sample a token past the longest sequence, which is discarded.
        self.tokens = TokenTable(max_num_seqs, max_model_len + 1)
        # Zeros take no memory until they are written.
        self.block_tables = np.zeros((len(num_blocks), max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        #: The number that plans give each group's first block; last, the number of all blocks.
        self.first_block = [0, *itertools.accumulate(num_blocks)]
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        #: Whether the row's sequence appends its sampled tokens: not with beam search.
        self.appends = np.ones(max_num_seqs, dtype=bool)
        self._prompts: set[int] = set()
        #: Number of sequences forgotten so far; and, by row, when its last one was, so that its tokens go to no other.
        self._generation = 0
        self._row_generation = np.zeros(max_num_seqs, dtype=np.int64)
        #: The last step's inputs, if the next step may repeat it.
        self._last: StepInputs | None = None
        self._rows: dict[int, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def row(self, seq_id: int) -> int:
        return self._rows[seq_id]

    def find_row(self, seq_id: int) -> int | None:
        return self._rows.get(seq_id)

    def add(self, sequence: NewSequence) -> int:
        self._last = None
        row = self._free.pop()
        self._rows[sequence.seq_id] = row
        num_tokens = len(sequence.token_ids)
        self.tokens.ids[row, :num_tokens] = sequence.token_ids
        self.tokens.num_tokens[row] = num_tokens
        self.tokens.num_prompt[row] = sequence.num_prompt_tokens
        self.num_computed[row] = sequence.num_computed
        self.appends[row] = not isinstance(sequence.task, Beam)
        if not sequence.task.samples:
            self._prompts.add(sequence.seq_id)
        for feature in self.features:
            feature.add(sequence, row)
        return row

    def fork(self, parent: int, child: int) -> int:
        """Gives a new sequence a row that is a copy of its parent's."""
        self._last = None
        source, row = self._rows[parent], self._free.pop()
        self._rows[child] = row
        num_tokens = self.tokens.num_tokens[source]
        self.tokens.ids[row, :num_tokens] = self.tokens.ids[source, :num_tokens]
        held = int(num_tokens) // self.block_size + 1
        self.block_tables[:, row, :held] = self.block_tables[:, source, :held]
        for state in (self.tokens.num_tokens, self.tokens.num_prompt, self.num_computed, self.appends):
            state[row] = state[source]
        for feature in self.features:
            feature.fork(source, row)
        return row

    def append(self, seq_id: int, token_ids: list[int]) -> None:
        self._last = None
        row = self._rows[seq_id]
        start = self.tokens.num_tokens[row]
        self.tokens.ids[row, start : start + len(token_ids)] = token_ids
        self.tokens.num_tokens[row] += len(token_ids)

    def append_sampled(self, sampled: dict[int, list[int]]) -> None:
        for seq_id, token_ids in sampled.items():
            row = self._rows.get(seq_id)
            if row is not None and self.appends[row]:
                self.accept(seq_id, token_ids)  # other drafts behind them may have been rejected

    def forget(self, seq_id: int) -> int | None:
        """Frees the row and returns it; None if the worker does not hold the sequence."""
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._prompts.discard(seq_id)
            self._last = None
            for feature in self.features:
                feature.forget(seq_id, row)
            self._free.append(row)
            self._generation += 1
            self._row_generation[row] = self._generation
        return row

    def change_table(self, change: TableChange) -> None:
        """Writes blocks into the block table of a sequence, or of what a feature has under the id."""
        row = self._rows.get(change.seq_id)
        if row is None:
            if not any(feature.change_table(change) for feature in self.features):
                raise KeyError(change.seq_id)
            return
        self._last = None
        span = slice(change.index, change.index + len(change.blocks))
        self.block_tables[change.group, row, span] = change.blocks
        if change.group:  # plans number the blocks of all groups one after the other
            self.block_tables[change.group, row, span] -= self.first_block[change.group]

    def build(self, plan: StepPlan) -> StepInputs:
        """Builds the flat inputs of a plan whose changes have been applied (vLLM's ``_prepare_inputs``).

        They are valid until the next call. If this step repeats the last, they are the same object, and its arrays are
        changed in place.
        """
        last, self._last = self._last, None
        if last is not None and plan.seq_ids == last.seq_ids and plan.total_tokens == len(last.seq_ids):
            return self._repeat(last)
        return self._build(plan)

    def _repeat(self, inputs: StepInputs) -> StepInputs:
        arrays = inputs.arrays
        for name, advance in _ADVANCING:
            arrays[name] += advance  # the starts, too: they are the positions
        inputs.ends += 1
        inputs.max_seq_len += 1
        arrays["token_ids"][:] = self.tokens.ids[inputs.rows, inputs.starts]
        inputs.repeats -= 1
        return inputs

    def _build(self, plan: StepPlan) -> StepInputs:
        seq_ids, lengths = plan.seq_ids, np.array(plan.num_tokens, dtype=np.int64)
        if (longer := lengths != 1).any():  # kernels need sequences with one token first
            order = np.argsort(longer, kind="stable")
            seq_ids, lengths = [seq_ids[i] for i in order.tolist()], lengths[order]
        rows = np.array([self._rows[s] for s in seq_ids], dtype=np.int64)
        starts = self.num_computed[rows]
        ends = starts + lengths
        offsets = offsets_of(lengths)
        sampling = np.flatnonzero(ends >= self.tokens.num_tokens[rows])
        if self._prompts:
            sampling = sampling[[seq_ids[i] not in self._prompts for i in sampling.tolist()]]
        forked = self._forked(plan, seq_ids, sampling) if plan.forks else None
        sources = sampling if forked is None else np.concatenate([sampling, forked.parents])
        sampled_rows, drafted = offsets[1:][sources] - 1, None
        if plan.drafts:
            drafted = self._draft(plan, seq_ids, sampling, forked)
            sampled_rows = np.repeat(sampled_rows - drafted.counts + 1, drafted.counts) + drafted.offsets
        flat, repeats = self.flatten(rows, starts, ends, offsets, sampled_rows), 0
        if drafted is not None:
            flat.arrays["num_drafts"][sampling] = drafted.counts[: len(sampling)] - 1
        if flat.all_sampled and flat.repeatable:
            repeats = self.block_size - 1 - max((starts % self.block_size).tolist())
        return StepInputs(
            flat.arrays,
            flat.num_decodes,
            flat.max_seq_len,
            flat.all_sampled,
            seq_ids,
            repeats,
            rows,
            starts,
            ends,
            sampling,
            forked,
            drafted,
            has_adapters=flat.has_adapters,
        )

    def flatten(
        self,
        rows: Int64Array,
        starts: Int64Array,
        ends: Int64Array,
        offsets: Int64Array,
        sampled_rows: Int64Array,
    ) -> FlatInputs:
        """The inputs for the tokens ``starts`` to ``ends`` [S] of these rows, rows with one token first.

        ``offsets`` [S + 1]: index of each row's first token.
        """
        one_each = len(rows) == offsets[-1]
        lengths = ends - starts
        if one_each:
            positions, token_rows = starts, rows
        else:
            positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
            token_rows = np.repeat(rows, lengths)
        max_seq_len = int(ends.max())
        if self._has_blocks:
            blocks = self.block_tables[:, token_rows, positions // self.block_size].astype(np.int64, order="C")
            # Indexing may leave the groups innermost.
            tables = np.ascontiguousarray(self.block_tables[:, rows, : -(-max_seq_len // self.block_size)])
        else:
            tables = workspace_tables(lengths, self.block_size)[None]  # all tokens of a sequence are in the step
            blocks = (np.repeat(tables[0, :, 0], lengths) + positions // self.block_size).astype(np.int64)[None]
        arrays = flat_arrays(
            len(positions),
            token_ids=self.tokens.ids[token_rows, positions].astype(np.int64),
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            sampled_rows=sampled_rows,
            query_start_loc=offsets.astype(np.int32),
            seq_lens=ends.astype(np.int32),
            block_tables=tables,
        )
        inputs = FlatInputs(
            arrays=arrays,
            num_decodes=len(rows) if one_each else int((lengths == 1).sum()),
            max_seq_len=max_seq_len,
            all_sampled=one_each and len(sampled_rows) == len(positions),
        )
        for feature in self.features:
            feature.add_arrays(inputs, rows, starts)
        return inputs

    def _draft(
        self, plan: StepPlan, seq_ids: list[int], sampling: Int64Array, forked: ForkedRows | None
    ) -> DraftedTokens:
        """Writes the drafts behind the known tokens; a sequence samples at its last known token and at each draft."""
        tokens = self.tokens
        drafts = [plan.drafts.get(seq_ids[i], []) for i in sampling.tolist()]
        drafts += [[]] * (len(forked.rows) if forked else 0)
        for i, draft in zip(sampling.tolist(), drafts, strict=False):
            row = self._rows[seq_ids[i]]
            start = tokens.num_tokens[row]
            tokens.ids[row, start : start + len(draft)] = draft
        counts = np.array([1 + len(draft) for draft in drafts], dtype=np.int64)
        ends = counts.cumsum()
        return DraftedTokens(drafts, counts, np.arange(ends[-1]) - np.repeat(ends - counts, counts))

    def _forked(self, plan: StepPlan, seq_ids: list[int], sampling: Int64Array) -> ForkedRows | None:
        parents = {seq_ids[i]: i for i in sampling.tolist()}
        scheduled = set(seq_ids)
        pairs = [(f.child, parents[f.parent]) for f in plan.forks if f.parent in parents and f.child not in scheduled]
        if not pairs:
            return None
        children = [child for child, _ in pairs]
        rows = np.array([self._rows[child] for child in children], dtype=np.int64)
        return ForkedRows(children, rows, np.array([parent for _, parent in pairs], dtype=np.int64))

    def advance(self, inputs: StepInputs, rows: Int64Array) -> NewTokens:
        """Counts the step's tokens as computed, and the tokens that these rows sample as known; ``fill`` must follow.

        With drafts ``accept`` counts both, when the number of accepted tokens is known.
        """
        self._last = inputs if inputs.repeats else None
        if not self._samples:
            rows = rows[:0]
        self.num_computed[inputs.rows] = inputs.ends
        if inputs.forked is not None:
            self.num_computed[inputs.forked.rows] = inputs.ends[inputs.forked.parents]
        indices = np.arange(len(rows)) if inputs.drafted is None else np.empty(0, dtype=np.int64)
        if not self.appends[rows].all():
            indices = indices[self.appends[rows[indices]]]
        if len(indices) != len(rows):
            rows = rows[indices]
        places = self.tokens.num_tokens[rows]
        self.tokens.num_tokens[rows] = places + 1
        return NewTokens(rows, places, indices, self._generation)

    def holds(self, new: NewTokens) -> NDArray[np.bool_]:
        """Whether each sequence still has its row: [n]."""
        return self._row_generation[new.rows] <= new.generation

    def fill(self, new: NewTokens, token_ids: Int64Array) -> None:
        sampled = token_ids if len(token_ids) == len(new.indices) else token_ids[new.indices]
        if new.generation == self._generation:
            self.tokens.ids[new.rows, new.places] = sampled
            return
        held = self.holds(new)
        self.tokens.ids[new.rows[held], new.places[held]] = sampled[held]

    def accept(self, seq_id: int, token_ids: list[int]) -> None:
        """Appends the tokens of a step with drafts, of which all but the last are computed.

        Ignores sequences of beam search, whose tokens come with a later plan.
        """
        row = self._rows[seq_id]
        if not self.appends[row]:
            return
        self.append(seq_id, token_ids)
        self.num_computed[row] = self.tokens.num_tokens[row] - 1

    def find_pending(self, inputs: StepInputs, new: NewTokens) -> tuple[Int64Array, Int64Array]:
        """Finds tokens that a step in flight samples: their indices among flat and sampled tokens, [m] each."""
        which = np.full(len(self._row_generation), -1, dtype=np.int64)
        held = np.flatnonzero(self.holds(new))
        which[new.rows[held]] = new.indices[held]
        sources = which[inputs.rows[inputs.sampling]]
        pending = sources >= 0
        return inputs.arrays["sampled_rows"][: len(pending)][pending], sources[pending]


def offsets_of(lengths: Int64Array) -> Int64Array:
    """The index of each sequence's first token, and the number of all tokens: [S + 1]."""
    return np.append(0, np.cumsum(lengths))


def workspace_tables(lengths: Int64Array, block_size: int) -> NDArray[np.int32]:
    """Block tables [S, B] of sequences that lie one after the other in a workspace, each in blocks of its own."""
    blocks = -(-lengths // block_size)
    return ((np.cumsum(blocks) - blocks)[:, None] + np.arange(int(blocks.max()))).astype(np.int32)


def flat_arrays(num_tokens: int, **arrays: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The arrays of ``ForwardBatch``; by default as if no feature changed them."""
    return {
        "token_types": np.zeros(num_tokens, np.int64),
        "num_drafts": np.zeros(len(arrays["seq_lens"]), np.int32),
        "adapters": np.full(num_tokens, -1, np.int32),
        "sees_until": np.full(num_tokens, -1, np.int32),
        "cross_lens": np.zeros(0, np.int32),
        "cross_tables": np.zeros((0, 0), np.int32),
        "rotary_positions": np.zeros((0, 0), np.int64),
        **arrays,
    }


@dataclass(slots=True)
class FlatInputs:
    """A network's inputs on the host: T tokens of S sequences, N sampled rows."""

    #: The arrays of ``ForwardBatch`` by name. Token ids are stale where a token is still on the device.
    arrays: dict[str, NDArray[Any]]
    num_decodes: int
    max_seq_len: int
    all_sampled: bool
    #: Whether a token has an adapter, and whether one of an image attends to later tokens.
    has_adapters: bool = field(default=False, kw_only=True)
    has_spans: bool = field(default=False, kw_only=True)
    #: Whether the next step's arrays may be these, one token further (``ArraySpec.advance``).
    repeatable: bool = field(default=True, kw_only=True)

    def sampled_only(self) -> FlatInputs:
        """The sampled rows alone (``ForwardBatch.sampled_only``): each is a sequence with one token."""
        rows = self.arrays["sampled_rows"]
        sequence = np.searchsorted(self.arrays["query_start_loc"], rows, side="right") - 1
        indices = {"T": rows, "S": sequence, "X": sequence}
        arrays = {}
        for array in ARRAYS:
            values = self.arrays[array.name]
            axis = next((i for i, dim in enumerate(array.dims) if dim in indices), None)
            if axis is not None and values.shape[axis]:
                values = np.ascontiguousarray(values.take(indices[array.dims[axis]], axis))
            arrays[array.name] = values
        # A row sees the tokens up to its own, as it does among those of its sequence.
        arrays["seq_lens"] = (arrays["positions"] + 1).astype(np.int32)
        arrays["num_drafts"] = np.zeros(len(rows), np.int32)
        arrays["query_start_loc"] = np.arange(len(rows) + 1, dtype=np.int32)
        return FlatInputs(
            arrays, len(rows), self.max_seq_len, True, has_adapters=self.has_adapters, has_spans=self.has_spans
        )


@dataclass(slots=True)
class StepInputs(FlatInputs):
    """A step's inputs, and the rows and sequences that they come from."""

    #: Sequences with one token first.
    seq_ids: list[int]
    #: Number of next steps that may differ from this one by one more token of each sequence alone.
    repeats: int
    #: Row of each sequence, first position computed, and one past the last: [S].
    rows: Int64Array
    starts: Int64Array
    ends: Int64Array
    #: Indices into ``seq_ids`` of the sequences that sample, and their forks that sample with them.
    sampling: Int64Array
    forked: ForkedRows | None
    drafted: DraftedTokens | None


@dataclass(slots=True)
class DraftedTokens:
    """Draft tokens behind the known tokens of the sequences that sample, forks last."""

    #: By sequence.
    tokens: list[list[int]]
    #: Sampled rows of each sequence: one more than its drafts.
    counts: Int64Array
    #: For each sampled row, its number within its sequence: 0 follows the last known token.
    offsets: Int64Array

    def accept(self, sampled: list[int]) -> list[list[int]]:
        """Accepts the sampled tokens of each sequence up to the first that differs from its draft, included."""
        accepted, start = [], 0
        for draft in self.tokens:
            tokens = sampled[start : start + len(draft) + 1]
            agreeing = next((i for i, token in enumerate(draft) if token != tokens[i]), len(draft))
            accepted.append(tokens[: agreeing + 1])
            start += len(tokens)
        return accepted


@dataclass(slots=True)
class ForkedRows:
    """Sequences just forked from a parent that samples in the step, without tokens of their own to compute."""

    seq_ids: list[int]
    rows: Int64Array
    #: Indices of the parents into ``StepInputs.seq_ids``: [F].
    parents: Int64Array


@dataclass(slots=True)
class NewTokens:
    """The places in the token table where a step's sampled tokens belong; [n] each."""

    rows: Int64Array
    places: Int64Array
    #: Indices among the step's sampled tokens.
    indices: Int64Array
    #: Number of sequences that had been forgotten by then.
    generation: int
