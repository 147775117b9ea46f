"""``InputBatch``: the rows of running sequences (vLLM's persistent batch), and the flat inputs of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import NewContext, NewSequence, StepPlan, TableChange
from octavo.core.request import Beam, Feature, Pool
from octavo.kernels.forward_batch import ARRAYS
from octavo.sampling.sampler import Int64Array, TokenTable

#: Time, height and width: the positions of image tokens (M-RoPE).
AXES = 3
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
        contexts: Contexts | None = None,
        rotary: RotaryPositions | None = None,
    ) -> None:
        """Allocates the rows, with a block table for each KV group of ``num_blocks``.

        Without groups, the sequences of a step lie one after the other in an encoder's workspace. ``samples``: False on
        a pipeline stage that is not the last, where tokens come by ``append_sampled``.
        """
        self._samples = samples
        self.contexts, self._rotary = contexts, rotary
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
        #: Slot of the row's adapter, -1 without one; and the number of rows with an adapter.
        self.adapters = np.full(max_num_seqs, -1, dtype=np.int32)
        self._num_adapted = 0
        #: Position of the second text of the row's pair, 0 without one; and the number of rows with a pair.
        self._second_text = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_pairs = 0
        #: Zeros, as many as the largest step so far has tokens.
        self._no_types = np.zeros(max_num_seqs, dtype=np.int64)
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

    def add(self, sequence: NewSequence, slot: int = -1) -> int:
        self._last = None
        row = self._free.pop()
        self._rows[sequence.seq_id] = row
        num_tokens = len(sequence.token_ids)
        self.tokens.ids[row, :num_tokens] = sequence.token_ids
        self.tokens.num_tokens[row] = num_tokens
        self.tokens.num_prompt[row] = sequence.num_prompt_tokens
        self.num_computed[row] = sequence.num_computed
        self.appends[row] = not isinstance(sequence.task, Beam)
        self._set_adapter(row, slot)
        if self.contexts is not None:
            self.contexts.attach(row, sequence.context)
        if self._rotary is not None:
            self._rotary.add(row, sequence.features)
        if not sequence.task.samples:
            self._prompts.add(sequence.seq_id)
        if isinstance(sequence.task, Pool) and sequence.task.second_text:
            self._second_text[row] = sequence.task.second_text
            self._num_pairs += 1
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
        self._set_adapter(row, int(self.adapters[source]))
        if self.contexts is not None:
            self.contexts.copy(source, row)
        if self._rotary is not None:
            self._rotary.copy(source, row)
        return row

    def _set_adapter(self, row: int, slot: int) -> None:
        self._num_adapted += (slot >= 0) - (int(self.adapters[row]) >= 0)
        self.adapters[row] = slot

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
            self._num_pairs -= bool(self._second_text[row])
            self._second_text[row] = 0
            self._set_adapter(row, -1)
            if self._rotary is not None:
                self._rotary.forget(row)
            self._free.append(row)
            self._generation += 1
            self._row_generation[row] = self._generation
        return row

    def change_table(self, change: TableChange) -> None:
        """Writes blocks into the block table of a sequence, or of a context."""
        if self.contexts is not None and self.contexts.change_table(change):
            return
        self._last = None
        row = self._rows[change.seq_id]
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
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
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
        if flat.all_sampled and (self._rotary is None or self._rotary.are_text(rows, starts)):
            repeats = self.block_size - 1 - max((starts % self.block_size).tolist())
        sizes = flat.num_decodes, flat.max_seq_len, flat.all_sampled, flat.has_adapters
        return StepInputs(flat.arrays, *sizes, seq_ids, repeats, rows, starts, ends, sampling, forked, drafted)

    def flatten(
        self,
        rows: Int64Array,
        starts: Int64Array,
        ends: Int64Array,
        offsets: Int64Array,
        sampled_rows: Int64Array,
        *,
        adapters: bool = True,
    ) -> FlatInputs:
        """The inputs for the tokens ``starts`` to ``ends`` [S] of these rows, rows with one token first.

        ``offsets`` [S + 1]: index of each row's first token. Without ``adapters``, no token has one.
        """
        one_each = len(rows) == offsets[-1]
        lengths = ends - starts
        if one_each:
            positions, token_rows = starts, rows
        else:
            positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
            token_rows = np.repeat(rows, lengths)
        if len(positions) > len(self._no_types):
            self._no_types = np.zeros(len(positions), dtype=np.int64)
        token_types = self._no_types[: len(positions)]
        if self._num_pairs:
            second = self._second_text[token_rows]
            token_types = ((second > 0) & (positions >= second)).astype(np.int64)
        max_seq_len = int(ends.max())
        if self._has_blocks:
            blocks = self.block_tables[:, token_rows, positions // self.block_size].astype(np.int64, order="C")
            # Indexing may leave the groups innermost.
            tables = np.ascontiguousarray(self.block_tables[:, rows, : -(-max_seq_len // self.block_size)])
        else:
            # Sequences lie one after the other, with all of their tokens in the step.
            counts = -(-lengths // self.block_size)
            first = np.cumsum(counts) - counts
            tables = (first[:, None] + np.arange(-(-max_seq_len // self.block_size))).astype(np.int32)[None]
            blocks = (np.repeat(tables[0, :, 0], lengths) + positions // self.block_size).astype(np.int64)[None]
        slots = self.adapters[token_rows] if adapters else np.full(len(token_rows), -1, dtype=np.int32)
        arrays = flat_arrays(
            len(positions),
            token_ids=self.tokens.ids[token_rows, positions].astype(np.int64),
            positions=positions,
            token_types=token_types,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            sampled_rows=sampled_rows,
            query_start_loc=offsets.astype(np.int32),
            seq_lens=ends.astype(np.int32),
            block_tables=tables,
            adapters=slots,
        )
        if self.contexts is not None:
            arrays |= self.contexts.arrays(rows)
        if self._rotary is not None:
            arrays["rotary_positions"] = self._rotary.array(rows, starts, offsets, positions)
        return FlatInputs(
            arrays=arrays,
            num_decodes=len(rows) if one_each else int((lengths == 1).sum()),
            max_seq_len=max_seq_len,
            all_sampled=one_each and len(sampled_rows) == len(positions),
            has_adapters=adapters and self._num_adapted > 0 and bool((slots >= 0).any()),
        )

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


def flat_arrays(num_tokens: int, **arrays: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The arrays of ``ForwardBatch``; by default without segments, adapters, images, contexts and M-RoPE."""
    return {
        "token_types": np.zeros(num_tokens, np.int64),
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
    has_adapters: bool
    #: Whether a token of an image attends to later tokens.
    has_spans: bool = field(default=False, kw_only=True)


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


class Contexts:
    """The encoder outputs (contexts) that rows attend to. A context keeps its place until a plan forgets it."""

    def __init__(self, max_num_seqs: int, max_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self._tables = np.zeros((max_num_seqs, -(-max_tokens // block_size)), np.int32)
        self._lens = np.zeros(max_num_seqs, np.int32)
        self._places: dict[int, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._of_row = np.zeros(max_num_seqs, np.int64)

    def add(self, context: NewContext) -> None:
        place = self._places[context.context_id] = self._free.pop()
        self._lens[place] = context.num_tokens

    def forget(self, context_id: int) -> None:
        """Frees the place; ignores ids of sequences."""
        place = self._places.pop(context_id, None)
        if place is not None:
            self._free.append(place)

    def change_table(self, change: TableChange) -> bool:
        """Writes blocks into a context's block table; False if the change is for a sequence."""
        place = self._places.get(change.seq_id)
        if place is None:
            return False
        self._tables[place, change.index : change.index + len(change.blocks)] = change.blocks
        return True

    def attach(self, row: int, context_id: int | None) -> None:
        if context_id is None:
            raise RuntimeError("the network attends to an encoder's output, but a sequence names none")
        self._of_row[row] = self._places[context_id]

    def copy(self, source: int, row: int) -> None:
        self._of_row[row] = self._of_row[source]

    def table(self, context_id: int) -> NDArray[np.int32]:
        place = self._places[context_id]
        return self._tables[place, : -(-int(self._lens[place]) // self.block_size)]

    def arrays(self, rows: Int64Array) -> dict[str, NDArray[Any]]:
        """The arrays of ``ForwardBatch`` for these rows."""
        places = self._of_row[rows]
        lens = self._lens[places]
        longest = -(-int(lens.max(initial=0)) // self.block_size)
        return {"cross_lens": lens, "cross_tables": np.ascontiguousarray(self._tables[places, :longest])}


class RotaryPositions:
    """M-RoPE positions of each row up to the end of its last image, and the shift of the text after it."""

    def __init__(self, max_num_seqs: int) -> None:
        #: End of the row's last image, 0 without one; and the number that is added to positions from there on.
        self._ends = np.zeros(max_num_seqs, np.int64)
        self._shifts = np.zeros(max_num_seqs, np.int64)
        #: By row: int64 [AXES, end].
        self._beginnings: dict[int, Int64Array] = {}

    def add(self, row: int, features: Sequence[Feature]) -> None:
        if features:
            self._beginnings[row] = beginning = image_positions(features)
            self._ends[row] = beginning.shape[1]
            self._shifts[row] = beginning.max() + 1 - beginning.shape[1]

    def copy(self, source: int, row: int) -> None:
        if source in self._beginnings:
            self._beginnings[row] = self._beginnings[source]
            self._ends[row], self._shifts[row] = self._ends[source], self._shifts[source]

    def forget(self, row: int) -> None:
        if self._beginnings.pop(row, None) is not None:
            self._ends[row] = self._shifts[row] = 0

    def are_text(self, rows: Int64Array, starts: Int64Array) -> bool:
        """Whether the tokens from ``starts`` on are behind all images of these rows."""
        return not self._beginnings or bool((starts >= self._ends[rows]).all())

    def array(self, rows: Int64Array, starts: Int64Array, offsets: Int64Array, positions: Int64Array) -> Int64Array:
        """``ForwardBatch.rotary_positions`` [AXES, T] of the tokens from ``starts`` [S] on of these rows [S].

        ``offsets`` [S + 1]: where each row's tokens begin among the ``positions`` [T].
        """
        if not self._beginnings:
            return np.tile(positions, (AXES, 1))
        rotary = np.tile(positions + np.repeat(self._shifts[rows], np.diff(offsets)), (AXES, 1))
        for i in np.flatnonzero(starts < self._ends[rows]).tolist():
            beginning = self._beginnings[int(rows[i])][:, starts[i] :]
            count = min(beginning.shape[1], int(offsets[i + 1] - offsets[i]))
            rotary[:, offsets[i] : offsets[i] + count] = beginning[:, :count]
        return rotary


def image_positions(features: Sequence[Feature]) -> Int64Array:
    """Positions [AXES, end] of a prompt's tokens up to the end of its last image; ``features``: all images in order."""
    beginning = np.empty((AXES, features[-1].offset + features[-1].length), np.int64)
    start = position = 0
    for feature in features:
        if feature.grid is None or np.prod(feature.grid) != feature.length:
            raise RuntimeError(f"an image of {feature.length} features has the grid {feature.grid}")
        end, text = feature.offset + feature.length, feature.offset - start
        beginning[:, start : feature.offset] = np.arange(position, position + text)
        position += text
        beginning[:, feature.offset : end] = np.indices(feature.grid).reshape(AXES, -1) + position
        start, position = end, position + max(feature.grid)
    return beginning
