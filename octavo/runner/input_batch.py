"""The rows of running sequences, and the flat inputs of a step built from them without a loop over tokens."""

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
from octavo.sampling.sampler import TokenTable

# What sequences attend to beside their own tokens: where it lies, and which sequence sees which.

#: The arrays of a network that has no cross attention.
NO_CONTEXTS: dict[str, NDArray[Any]] = {
    "cross_lens": np.zeros(0, np.int32),
    "cross_tables": np.zeros((0, 0), np.int32),
}


class Contexts:
    """Owns a place for each context that the worker holds, with its block table, and the context of each row.

    Invariant: a context keeps its place from the plan that introduces it to the plan that forgets it.
    """

    def __init__(self, max_num_seqs: int, max_tokens: int, block_size: int) -> None:
        """There are at most as many contexts as rows of sequences, of at most ``max_tokens`` tokens each."""
        self.block_size = block_size
        self._tables = np.zeros((max_num_seqs, -(-max_tokens // block_size)), np.int32)
        self._lens = np.zeros(max_num_seqs, np.int32)
        self._places: dict[int, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        #: By row: the place of its context.
        self._of_row = np.zeros(max_num_seqs, np.int64)

    def add(self, context: NewContext) -> None:
        """Gives a new context its place."""
        place = self._places[context.context_id] = self._free.pop()
        self._lens[place] = context.num_tokens

    def forget(self, context_id: int) -> None:
        """Frees the place; nothing happens for the id of a sequence."""
        place = self._places.pop(context_id, None)
        if place is not None:
            self._free.append(place)

    def change_table(self, change: TableChange) -> bool:
        """Writes blocks into a context's block table; False if the change is that of a sequence."""
        place = self._places.get(change.seq_id)
        if place is None:
            return False
        self._tables[place, change.index : change.index + len(change.blocks)] = change.blocks
        return True

    def attach(self, row: int, context_id: int | None) -> None:
        """The row's sequence attends to a context, which is held."""
        if context_id is None:
            raise RuntimeError("the network attends to an encoder's output, but a sequence names none")
        self._of_row[row] = self._places[context_id]

    def copy(self, source: int, row: int) -> None:
        """A row's sequence attends to the context of another's."""
        self._of_row[row] = self._of_row[source]

    def table(self, context_id: int) -> NDArray[np.int32]:
        """The blocks of a context."""
        place = self._places[context_id]
        return self._tables[place, : -(-int(self._lens[place]) // self.block_size)]

    def arrays(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The arrays of ``ForwardBatch`` for these rows."""
        places = self._of_row[rows]
        lens = self._lens[places]
        longest = -(-int(lens.max(initial=0)) // self.block_size)
        return {"cross_lens": lens, "cross_tables": np.ascontiguousarray(self._tables[places, :longest])}


# What the heads of tokens are rotated by where images have positions in time, height and width (M-RoPE).

#: Time, height and width.
AXES = 3
#: ``ForwardBatch.rotary_positions`` of networks that rotate by the positions of tokens.
NO_ROTARY_POSITIONS: NDArray[np.int64] = np.zeros((0, 0), np.int64)


class RotaryPositions:
    """Owns those of each row's sequence up to the end of its last image, and how far its text is shifted from there."""

    def __init__(self, max_num_seqs: int) -> None:
        #: Tokens up to the end of the row's last image, 0 without one; and what is added to positions from there on.
        self._ends = np.zeros(max_num_seqs, np.int64)
        self._shifts = np.zeros(max_num_seqs, np.int64)
        #: By row: int64 [AXES, end].
        self._beginnings: dict[int, NDArray[np.int64]] = {}

    def add(self, row: int, features: Sequence[Feature]) -> None:
        """The row's sequence has these images."""
        if features:
            self._beginnings[row] = beginning = image_positions(features)
            self._ends[row] = beginning.shape[1]
            self._shifts[row] = beginning.max() + 1 - beginning.shape[1]

    def copy(self, source: int, row: int) -> None:
        """The row's sequence begins as that of another."""
        if source in self._beginnings:
            self._beginnings[row] = self._beginnings[source]
            self._ends[row], self._shifts[row] = self._ends[source], self._shifts[source]

    def forget(self, row: int) -> None:
        """The row's sequence is gone."""
        if self._beginnings.pop(row, None) is not None:
            self._ends[row] = self._shifts[row] = 0

    def are_text(self, rows: NDArray[np.int64], starts: NDArray[np.int64]) -> bool:
        """Whether the tokens of these rows from ``starts`` on are behind all images."""
        return not self._beginnings or bool((starts >= self._ends[rows]).all())

    def array(
        self,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        offsets: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """``ForwardBatch.rotary_positions`` [AXES, T] of the tokens from ``starts`` [S] on of these rows.

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


def image_positions(features: Sequence[Feature]) -> NDArray[np.int64]:
    """Positions in time, height and width [AXES, end] of the tokens of a prompt up to the end of its last image.

    Args:
        features: its images, each whole, in the order of their offsets.

    Raises:
        RuntimeError: one has no grid, or another one than its number of tokens.
    """
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


# The inputs of a step on the host, and where what it samples belongs.


@dataclass(slots=True)
class FlatInputs:
    """A network's inputs on the host: T tokens of S sequences, N sampled rows."""

    #: The arrays of ``ForwardBatch`` by name. Token ids are stale where a token is still on the device.
    arrays: dict[str, NDArray[Any]]
    num_decodes: int
    max_seq_len: int
    all_sampled: bool
    has_adapters: bool
    #: Whether a token of an image sees later ones.
    has_spans: bool = field(default=False, kw_only=True)


@dataclass(slots=True)
class StepInputs(FlatInputs):
    """A step's inputs, and what the runner knows of them."""

    #: The sequences: those with one token first. How many further steps may differ from this one in nothing but one
    #: more token for each.
    seq_ids: list[int]
    repeats: int
    #: Row of each sequence, first position computed, and one past the last: [S].
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    #: The sequences that sample, as indices into ``seq_ids``, and children that sample with them.
    sampling: NDArray[np.int64]
    forked: ForkedRows | None
    #: Drafts that are computed with them, if the plan has any.
    drafted: DraftedTokens | None


@dataclass(slots=True)
class DraftedTokens:
    """Draft tokens behind the known tokens of the sequences that sample, forked ones last."""

    #: The drafts of each.
    tokens: list[list[int]]
    #: Rows that each samples: one more than it has drafts.
    counts: NDArray[np.int64]
    #: Which of its sequence's sampled rows each sampled row is: 0 follows the last known token.
    offsets: NDArray[np.int64]

    def accept(self, sampled: list[int]) -> list[list[int]]:
        """The accepted tokens of each sequence: up to the first sampled one that differs from its draft, included."""
        accepted, start = [], 0
        for draft in self.tokens:
            tokens = sampled[start : start + len(draft) + 1]
            right = next((i for i, token in enumerate(draft) if token != tokens[i]), len(draft))
            accepted.append(tokens[: right + 1])
            start += len(tokens)
        return accepted


@dataclass(slots=True)
class ForkedRows:
    """Sequences just forked, without tokens of their own to compute, whose parents sample in the step."""

    seq_ids: list[int]
    #: Row of each: [F].
    rows: NDArray[np.int64]
    #: Index of each one's parent into ``StepInputs.seq_ids``: [F].
    parents: NDArray[np.int64]


@dataclass(slots=True)
class NewTokens:
    """Where the tokens that a step samples belong, once they are known."""

    #: Row of each sequence that appends what it samples: [n].
    rows: NDArray[np.int64]
    #: The token's position: [n].
    places: NDArray[np.int64]
    #: Which of the step's sampled tokens it is: [n].
    indices: NDArray[np.int64]
    #: Generation of the rows: sequences that had been forgotten until then.
    generation: int


_ADVANCING = [(array.name, array.advance) for array in ARRAYS if array.advance]


class InputBatch:
    """Owns a row for each sequence that the worker holds: its tokens, its block table, how much is computed.

    A token counts as known from the step that samples it, though its id may be on the device only until ``fill``.
    Drafts lie behind the known tokens and count when they are accepted.
    Invariant: a sequence keeps its row from the plan that introduces it to the plan that forgets it.

    The most frequent step is the last one once more: the same sequences decode, each one token further in the same
    block. Its arrays are those of the last one, changed in place. That is for small batches, whose steps are short: by
    then the caches of the processor hold weights, and whatever code is run for the first time costs many times as much.
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
        """Sizes the rows: ``max_model_len`` tokens each, with a block table for each KV group of ``num_blocks``.

        Without any group the sequences of a step lie behind each other in the workspace of an encoder.

        ``contexts``: of a network with cross attention, where each sequence attends to one of them. ``rotary``: of one
        where images have positions of their own.

        Without ``samples``, in a pipeline stage that is not the last, tokens come by ``append_sampled``.
        """
        self._samples = samples
        self.contexts, self._rotary = contexts, rotary
        self._has_blocks = len(num_blocks) > 0
        self.block_size = block_size
        # One place more than tokens: a step in flight may sample a token past the longest sequence, which is discarded.
        self.tokens = TokenTable(max_num_seqs, max_model_len + 1)
        # Zeros are virtual until written: an unused part of a long context takes no memory.
        self.block_tables = np.zeros((len(num_blocks), max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        #: The number that plans give each group's first block; and how many blocks there are.
        self.first_block = [0, *itertools.accumulate(num_blocks)]
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        #: Whether the row's sequence appends what it samples.
        self.appends = np.ones(max_num_seqs, dtype=bool)
        #: Slot of the row's adapter, -1 without one; and how many of the rows in use have one.
        self.adapters = np.full(max_num_seqs, -1, dtype=np.int32)
        self._num_adapted = 0
        #: Position of the second text of the row's pair, 0 without one; and how many of the rows in use have one.
        self._second_text = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_pairs = 0
        #: Zeros for the segments of the tokens of any step so far.
        self._no_types = np.zeros(max_num_seqs, dtype=np.int64)
        #: Sequences held that only compute their prompt.
        self._prompts: set[int] = set()
        #: Sequences forgotten so far, and the number of the last of each row: no token is given to its next sequence.
        self._generation = 0
        self._row_generation = np.zeros(max_num_seqs, dtype=np.int64)
        #: Those of the last step, if the next one may repeat it.
        self._last: StepInputs | None = None
        self._rows: dict[int, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def row(self, seq_id: int) -> int:
        """The row of a held sequence."""
        return self._rows[seq_id]

    def find_row(self, seq_id: int) -> int | None:
        """The row of a sequence, if it is held."""
        return self._rows.get(seq_id)

    def add(self, sequence: NewSequence, slot: int = -1) -> int:
        """Gives a new sequence its row; ``slot`` is that of its adapter, if it has one."""
        self._last = None
        row = self._free.pop()
        self._rows[sequence.seq_id] = row
        known = len(sequence.token_ids)
        self.tokens.ids[row, :known] = sequence.token_ids
        self.tokens.num_tokens[row] = known
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
        known = self.tokens.num_tokens[source]
        self.tokens.ids[row, :known] = self.tokens.ids[source, :known]
        held = int(known) // self.block_size + 1
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
        """Adds known tokens."""
        self._last = None
        row = self._rows[seq_id]
        start = self.tokens.num_tokens[row]
        self.tokens.ids[row, start : start + len(token_ids)] = token_ids
        self.tokens.num_tokens[row] += len(token_ids)

    def append_sampled(self, sampled: dict[int, list[int]]) -> None:
        """Adds tokens that another worker has sampled to the sequences that append what they sample."""
        for seq_id, token_ids in sampled.items():
            row = self._rows.get(seq_id)
            if row is not None and self.appends[row]:
                self.accept(seq_id, token_ids)  # some of them may be drafts, behind which others were rejected

    def forget(self, seq_id: int) -> int | None:
        """Frees the row and returns it; None for an unknown sequence."""
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
        if change.group:  # plans number the blocks of all groups, a group's own begin with 0
            self.block_tables[change.group, row, span] -= self.first_block[change.group]

    def build(self, plan: StepPlan) -> StepInputs:
        """The flat inputs of a plan whose changes have been applied; valid until the next plan's are built.

        They are the same object as the last ones if this step repeats the last; its arrays then lie where they lay.
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

    def _repeats(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
        """Further tokens of each sequence before one of them reaches its next block."""
        if self._rotary is not None and not self._rotary.are_text(rows, positions):
            return 0
        return self.block_size - 1 - max((positions % self.block_size).tolist())

    def _build(self, plan: StepPlan) -> StepInputs:
        seq_ids, lengths = self._decodes_first(plan)
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
        flat = self.flatten(rows, starts, ends, offsets, sampled_rows)
        return StepInputs(
            arrays=flat.arrays,
            num_decodes=flat.num_decodes,
            max_seq_len=flat.max_seq_len,
            all_sampled=flat.all_sampled,
            has_adapters=flat.has_adapters,
            seq_ids=seq_ids,
            repeats=self._repeats(rows, starts) if flat.all_sampled else 0,
            rows=rows,
            starts=starts,
            ends=ends,
            sampling=sampling,
            forked=forked,
            drafted=drafted,
        )

    def flatten(
        self,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sampled_rows: NDArray[np.int64],
        *,
        adapters: bool = True,
    ) -> FlatInputs:
        """The inputs for the tokens ``starts`` to ``ends`` [S] of these rows, those with one token first.

        ``offsets`` [S + 1]: where each row's tokens begin among all. Without ``adapters``, no token has one.
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
        max_seq_len = int(ends.max())
        if self._has_blocks:
            blocks = self.block_tables[:, token_rows, positions // self.block_size].astype(np.int64, order="C")
            # Indexing may leave the groups innermost.
            tables = np.ascontiguousarray(self.block_tables[:, rows, : -(-max_seq_len // self.block_size)])
        else:
            tables = self._workspace_tables(lengths, max_seq_len)
            blocks = (np.repeat(tables[0, :, 0], lengths) + positions // self.block_size).astype(np.int64)[None]
        slots = self.adapters[token_rows] if adapters else np.full(len(token_rows), -1, dtype=np.int32)
        return FlatInputs(
            arrays={
                "token_ids": self.tokens.ids[token_rows, positions].astype(np.int64),
                "positions": positions,
                "token_types": self._types(token_rows, positions),
                "slot_mapping": blocks * self.block_size + positions % self.block_size,
                "sampled_rows": sampled_rows,
                "query_start_loc": offsets.astype(np.int32),
                "seq_lens": ends.astype(np.int32),
                "block_tables": tables,
                "adapters": slots,
                "sees_until": np.full(len(positions), -1, np.int32),
                **(NO_CONTEXTS if self.contexts is None else self.contexts.arrays(rows)),
                "rotary_positions": NO_ROTARY_POSITIONS
                if self._rotary is None
                else self._rotary.array(rows, starts, offsets, positions),
            },
            num_decodes=len(rows) if one_each else int((lengths == 1).sum()),
            max_seq_len=max_seq_len,
            all_sampled=one_each and len(sampled_rows) == len(positions),
            has_adapters=adapters and self._num_adapted > 0 and bool((slots >= 0).any()),
        )

    def _workspace_tables(self, lengths: NDArray[np.int64], max_seq_len: int) -> NDArray[np.int32]:
        """Block tables [1, S, B] of sequences that lie behind each other: all of their tokens are in the step."""
        counts = -(-lengths // self.block_size)
        first = np.cumsum(counts) - counts
        return (first[:, None] + np.arange(-(-max_seq_len // self.block_size))).astype(np.int32)[None]

    def _types(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The segment of each token [T], of these rows: 1 from where the second text of a pair begins."""
        if not self._num_pairs:
            return self._no_types[: len(positions)]
        second = self._second_text[rows]
        return ((second > 0) & (positions >= second)).astype(np.int64)

    def _draft(
        self, plan: StepPlan, seq_ids: list[int], sampling: NDArray[np.int64], forked: ForkedRows | None
    ) -> DraftedTokens:
        """Writes the drafts behind the known tokens; a sequence samples at its last known token and at each of them."""
        tokens = self.tokens
        drafts = [plan.drafts.get(seq_ids[i], []) for i in sampling.tolist()]
        drafts += [[]] * (len(forked.rows) if forked else 0)
        for i, draft in zip(sampling.tolist(), drafts, strict=False):
            row = self._rows[seq_ids[i]]
            known = tokens.num_tokens[row]
            tokens.ids[row, known : known + len(draft)] = draft
        counts = np.array([1 + len(draft) for draft in drafts], dtype=np.int64)
        ends = counts.cumsum()
        return DraftedTokens(drafts, counts, np.arange(ends[-1]) - np.repeat(ends - counts, counts))

    @staticmethod
    def _decodes_first(plan: StepPlan) -> tuple[list[int], NDArray[np.int64]]:
        """The plan's sequences and their numbers of tokens: kernels want those with one token before all others."""
        seq_ids, lengths = plan.seq_ids, np.array(plan.num_tokens, dtype=np.int64)
        longer = lengths != 1
        if not longer.any():
            return seq_ids, lengths
        order = np.argsort(longer, kind="stable")
        return [seq_ids[i] for i in order.tolist()], lengths[order]

    def _forked(self, plan: StepPlan, seq_ids: list[int], sampling: NDArray[np.int64]) -> ForkedRows | None:
        parents = {seq_ids[i]: i for i in sampling.tolist()}
        scheduled = set(seq_ids)
        pairs = [(f.child, parents[f.parent]) for f in plan.forks if f.parent in parents and f.child not in scheduled]
        if not pairs:
            return None
        children = [child for child, _ in pairs]
        rows = np.array([self._rows[child] for child in children], dtype=np.int64)
        return ForkedRows(children, rows, np.array([parent for _, parent in pairs], dtype=np.int64))

    def advance(self, inputs: StepInputs, rows: NDArray[np.int64]) -> NewTokens:
        """Counts the step's tokens as computed, and those that these rows sample as known: ``fill`` must follow.

        With drafts both are counted by ``accept``, when it is known how many tokens there are.
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
        """Which of the sequences still have their row: [n]."""
        return self._row_generation[new.rows] <= new.generation

    def fill(self, new: NewTokens, token_ids: NDArray[np.int64]) -> None:
        """Writes the ids of the tokens that a step sampled."""
        sampled = token_ids if len(token_ids) == len(new.indices) else token_ids[new.indices]
        if new.generation == self._generation:
            self.tokens.ids[new.rows, new.places] = sampled
            return
        held = self.holds(new)
        self.tokens.ids[new.rows[held], new.places[held]] = sampled[held]

    def accept(self, seq_id: int, token_ids: list[int]) -> None:
        """Appends the tokens that a step with drafts gave a sequence; all but the last of them are computed.

        Nothing changes for one that does not append what it samples: its tokens come with a later plan.
        """
        row = self._rows[seq_id]
        if not self.appends[row]:
            return
        self.append(seq_id, token_ids)
        self.num_computed[row] = self.tokens.num_tokens[row] - 1

    def find_pending(self, inputs: StepInputs, new: NewTokens) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of a step's tokens are those that a step in flight samples, whose ids are not filled in yet.

        Returns:
            Their index among the flat tokens, and their index among the sampled ones: [m] each.
        """
        which = np.full(len(self._row_generation), -1, dtype=np.int64)
        held = np.flatnonzero(self.holds(new))
        which[new.rows[held]] = new.indices[held]
        sources = which[inputs.rows[inputs.sampling]]
        given = sources >= 0
        return inputs.arrays["sampled_rows"][: len(given)][given], sources[given]
