"""The inputs of the network in a step (vLLM: attention metadata): flat arrays without padding, in one table.

Copies to a device, buffers of captured graphs and their padding, recording, warm-up and tests are derived from the
table, so a new array is one line of ``ForwardBatch``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_origin, get_type_hints

import numpy as np

from octavo.kernels.interface import Array, ArrayMaker


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The sizes of a batch, or the largest sizes of any batch."""

    tokens: int
    sequences: int
    #: Rows that logits are computed for.
    sampled: int
    #: Longest context in tokens.
    max_seq_len: int
    block_size: int
    #: KV groups.
    groups: int = 1
    #: Blocks of the longest context of cross attention; 0: there is none.
    cross_blocks: int = 0
    #: Rotary positions of a token; 0: heads are rotated by its position.
    rotary_axes: int = 0

    def shape(self, dims: str) -> tuple[int, ...]:
        """The shape of an array with these ``ArraySpec.dims``."""
        sizes = {
            "G": self.groups,
            "T": self.tokens,
            "S": self.sequences,
            "s": self.sequences + 1,
            "N": self.sampled,
            "B": -(-self.max_seq_len // self.block_size),
            "X": self.sequences if self.cross_blocks else 0,
            "C": self.cross_blocks,
            "R": self.rotary_axes,
        }
        return tuple(sizes[dim] for dim in dims)


class ArraySpec(NamedTuple):
    """Description of an array of the batch."""

    #: A letter for each dimension: T tokens, S sequences, s sequences + 1, N sampled rows, G KV groups, B blocks of the
    #: longest context, X sequences and C blocks of cross attention (0 without it), R rotary positions.
    dims: str
    dtype: type[np.integer[Any]]
    #: Value in padding rows, which neither read nor write the cache; None: the index.
    padding: int | None = 0
    #: Increment when every sequence advances by one token within its block.
    advance: int = 0
    name: str = ""

    def filled(self, size: BatchSize) -> np.ndarray:
        shape = size.shape(self.dims)
        if self.padding is None:
            return np.arange(shape[-1], dtype=self.dtype)
        return np.full(shape, self.padding, self.dtype)


@dataclass(slots=True)
class ForwardBatch:
    """The tokens that a step computes, their sequences, and the slots of their KV entries.

    The tokens of sequence ``s`` are rows ``query_start_loc[s]:query_start_loc[s + 1]``, with consecutive positions.
    """

    #: int64 [T]
    token_ids: Annotated[Array, ArraySpec("T", np.int64)]
    #: int64 [T]: position of each token in its sequence.
    positions: Annotated[Array, ArraySpec("T", np.int64, advance=1)]
    #: int64 [T]: segment of each token, 1 in the second of two texts that an encoder reads together.
    token_types: Annotated[Array, ArraySpec("T", np.int64)]
    #: int64 [G, T]: block * block_size + offset of each token in each KV group; negative: not written.
    slot_mapping: Annotated[Array, ArraySpec("GT", np.int64, padding=-1, advance=1)]
    #: int64 [N]: rows of the tokens that logits are computed for, in any order, possibly repeated.
    sampled_rows: Annotated[Array, ArraySpec("N", np.int64, padding=None)]
    #: int64 [R, T]: positions of each section of a head, such as time, height and width of an image (M-RoPE); empty
    #: for other networks.
    rotary_positions: Annotated[Array, ArraySpec("RT", np.int64, advance=1)]
    #: int32 [S + 1]
    query_start_loc: Annotated[Array, ArraySpec("s", np.int32, padding=None)]
    #: int32 [S]: context lengths, with the tokens of this step.
    seq_lens: Annotated[Array, ArraySpec("S", np.int32, advance=1)]
    #: int32 [S]: tokens at the end of each sequence's that are drafts, which may be rejected.
    num_drafts: Annotated[Array, ArraySpec("S", np.int32)]
    #: int32 [G, S, B]; entries past a sequence's last block, or outside a group's window, are never read.
    block_tables: Annotated[Array, ArraySpec("GSB", np.int32)]
    #: int32 [T]: slot of each token's adapter; -1: none.
    adapters: Annotated[Array, ArraySpec("T", np.int32, padding=-1)]
    #: int32 [X]: tokens of the context of each sequence's cross attention.
    cross_lens: Annotated[Array, ArraySpec("X", np.int32)]
    #: int32 [X, C]: blocks of these contexts, of the first KV group.
    cross_tables: Annotated[Array, ArraySpec("XC", np.int32)]
    #: int32 [T]: the last position that each token of an image sees, if it is later than its own; -1: none. It never
    #: decreases from a token of a sequence to the next.
    sees_until: Annotated[Array, ArraySpec("T", np.int32, padding=-1)]
    #: Number of sequences at the beginning of the batch that have one token each.
    num_decodes: int
    max_seq_len: int
    #: Whether ``sampled_rows`` lists all tokens in order.
    all_sampled: bool
    #: Whether a token has an adapter.
    has_adapters: bool = False
    #: Whether a token sees later ones; if not, ``sees_until`` is not read.
    has_spans: bool = False
    #: The sampled rows alone, for layers that write no cache (``Network.query_only_from``); its ``sampled_rows`` are
    #: those of this batch. None: all layers compute all rows.
    sampled_only: ForwardBatch | None = None

    @classmethod
    def of(cls, arrays: Sequence[Array], **facts: Any) -> ForwardBatch:
        """A batch from arrays in the order of ``ARRAYS``, and its other fields by name."""
        named = {array.name: value for array, value in zip(ARRAYS, arrays, strict=True)}
        return cls(**named, **facts)

    def arrays(self) -> list[Array]:
        return [getattr(self, array.name) for array in ARRAYS]


#: The table, in the order of the fields.
ARRAYS: tuple[ArraySpec, ...] = tuple(
    hint.__metadata__[0]._replace(name=name)
    for name, hint in get_type_hints(ForwardBatch, include_extras=True).items()
    if get_origin(hint) is Annotated
)


class ForwardOutput(NamedTuple):
    """The outputs of the network."""

    #: Hidden states [T, E] after the final norm; [N, E] with ``ForwardBatch.sampled_only``.
    hidden: Array
    #: float32 [N, vocab] of the sampled rows; None without a head.
    logits: Array | None = None
    #: float32 [T, E]: the residual stream between layers as a drafting head reads it; None: no head reads it.
    features: Array | None = None
    #: Of an image tower, float32 [N, E] each: what is added before each of ``ImageFacts.layers``.
    layer_features: tuple[Array, ...] = ()

    def arrays(self) -> list[Array]:
        arrays = self.hidden, self.logits, self.features, *self.layer_features
        return [array for array in arrays if array is not None]

    def first(self, tokens: int, sampled: int) -> ForwardOutput:
        """The first ``tokens`` rows of hidden states and features, and the first ``sampled`` rows of the others."""
        return ForwardOutput(
            self.hidden[:tokens],
            None if self.logits is None else self.logits[:sampled],
            None if self.features is None else self.features[:tokens],
            tuple(features[:sampled] for features in self.layer_features),
        )


#: A network as it is captured: embedding, layers, norm and head.
Forward = Callable[[ForwardBatch], ForwardOutput]


def padding_batch(size: BatchSize, kernels: ArrayMaker) -> ForwardBatch:
    """A batch of padding rows, with arrays of ``kernels``: one token for each sequence, all of them sampled."""
    arrays = [kernels.wrap(array.filled(size)) for array in ARRAYS]
    return ForwardBatch.of(arrays, num_decodes=size.sequences, max_seq_len=size.max_seq_len, all_sampled=True)


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: np.ndarray,
    block_size: int,
    kernels: ArrayMaker,
    *,
    starts: Sequence[int] | None = None,
    num_drafts: Sequence[int] | None = None,
    token_ids: np.ndarray | None = None,
    adapters: Sequence[int] | None = None,
    token_types: np.ndarray | None = None,
    cross_lens: Sequence[int] = (),
    cross_tables: np.ndarray | None = None,
    sees_until: np.ndarray | None = None,
    rotary_positions: np.ndarray | None = None,
) -> ForwardBatch:
    """A batch of sequences that compute ``query_lens`` of ``seq_lens`` tokens; the last token of each is sampled.

    For warm-up, benchmarks and tests; ``runner.input_batch`` makes the engine's batches.

    Args:
        query_lens: sequences with one token come first.
        block_tables: [G, S, B], or [S, B] for one group.
        starts: position of each sequence's first token to compute; by default its last tokens are computed.
        num_drafts: draft tokens of each sequence; by default there are none.
        token_ids, token_types: [T]; zeros by default.
        adapters: slot of each sequence's adapter, -1 without one; by default no sequence has one.
        cross_lens, cross_tables: [S] and [S, C], if the network has cross attention.
        sees_until: [T]; -1 by default.
        rotary_positions: [R, T], if the network has any.
    """
    tables = np.asarray(block_tables, np.int32)
    tables = tables if tables.ndim == 3 else tables[None]
    offsets = np.array([0, *itertools.accumulate(query_lens)], np.int32)
    first = starts or [end - count for count, end in zip(query_lens, seq_lens, strict=True)]
    spans = zip(first, query_lens, strict=True)
    positions = np.concatenate([np.arange(0), *(np.arange(start, start + count) for start, count in spans)])
    sequence = np.repeat(np.arange(len(first)), query_lens)
    slots = np.array(adapters or [-1] * len(first), np.int32)
    arrays = {
        "token_ids": np.zeros_like(positions) if token_ids is None else np.asarray(token_ids, np.int64),
        "positions": positions,
        "token_types": np.zeros_like(positions) if token_types is None else np.asarray(token_types, np.int64),
        "slot_mapping": tables[:, sequence, positions // block_size].astype(np.int64) * block_size
        + positions % block_size,
        "sampled_rows": offsets[1:].astype(np.int64) - 1,
        "query_start_loc": offsets,
        "seq_lens": np.array(seq_lens, np.int32),
        "num_drafts": np.array(num_drafts or [0] * len(first), np.int32),
        "block_tables": tables,
        "adapters": slots[sequence],
        "cross_lens": np.array(cross_lens, np.int32),
        "cross_tables": np.zeros((0, 0), np.int32) if cross_tables is None else np.asarray(cross_tables, np.int32),
        "sees_until": np.full(len(positions), -1, np.int32) if sees_until is None else np.asarray(sees_until, np.int32),
        "rotary_positions": np.zeros((0, 0), np.int64)
        if rotary_positions is None
        else np.asarray(rotary_positions, np.int64),
    }
    return ForwardBatch.of(
        [kernels.wrap(np.ascontiguousarray(arrays[array.name])) for array in ARRAYS],
        num_decodes=next((i for i, count in enumerate(query_lens) if count != 1), len(first)),
        max_seq_len=max(seq_lens, default=0),
        all_sampled=all(count == 1 for count in query_lens),
        has_adapters=bool((slots >= 0).any()),
        has_spans=sees_until is not None,
    )
