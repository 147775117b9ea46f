"""The KV cache of each layer of a network, and which layers share block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from octavo.config.engine_config import EngineConfig


#: Bytes of a number of each type, scales left out; a GGUF file's numbers have 4 bits or more. The last ones are
#: names of ``CheckpointQuantization``.
NUMBER_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "int8": 1.0,
    "fp8": 1.0,
    "int4": 0.5,
    "gguf": 0.5,
    "gptq-int4": 0.5,
    "gptq-int8": 1.0,
    "awq-int4": 0.5,
    "compressed-tensors-int4": 0.5,
    "compressed-tensors-int8": 1.0,
}
#: Bytes of a scale, of which int8 and fp8 caches have one for each head's key and one for its value.
_SCALE_BYTES = 4

KVKind = Literal["full", "sliding", "cross", "latent", "none"]


@dataclass(frozen=True)
class KVSpec:
    """The KV cache of one layer on one rank."""

    #: Context that a token attends to: all before it, the last ``window`` tokens, an encoder's tokens, all before it in
    #: one compressed vector (whose size is ``head_dim``), or nothing that is cached.
    kind: KVKind
    #: KV heads that this rank holds.
    num_kv_heads: int
    head_dim: int
    #: Type of the numbers: float32, bfloat16, float16, int8 or fp8.
    dtype: str
    #: Tokens that a token of a "sliding" layer attends to, itself included.
    window: int | None = None

    @property
    def vectors(self) -> int:
        """Vectors of ``head_dim`` numbers that a token has for each head: a key and a value, or a latent one."""
        return {"none": 0, "latent": 1}.get(self.kind, 2)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in this layer's cache: keys, values and scales, without padding."""
        scale = _SCALE_BYTES if self.dtype in ("int8", "fp8") else 0
        return int(self.vectors * self.num_kv_heads * (self.head_dim * NUMBER_BYTES[self.dtype] + scale))


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal specs: they share block tables."""

    spec: KVSpec
    #: Indices among the layers of this rank, ascending; none if they belong to other pipeline stages.
    layers: tuple[int, ...]


def group_layers(specs: Sequence[KVSpec], stage: range | None = None) -> list[LayerGroup]:
    """The groups of layers with these specs, in the order of their first layers.

    ``stage``: those that this rank has, if it has not all. The groups are alike on every stage, with or without layers.
    """
    groups: dict[KVSpec, list[int]] = {}
    stage = range(len(specs)) if stage is None else stage
    for layer, spec in enumerate(specs):
        members = groups.setdefault(spec, [])
        if layer in stage:
            members.append(layer - stage.start)
    return [LayerGroup(spec, tuple(layers)) for spec, layers in groups.items()]


# Groups of layers with equal KV entries: what sequences hold in each, and how a memory budget is split into them.


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """The blocks of one KV group: layers with equal KV entries, which share block tables."""

    num_blocks: int
    num_host_blocks: int = 0
    #: Sliding window in tokens, the token itself included; None: a token attends to all tokens before it.
    window: int | None = None
    #: Of one block in all layers; only ratios between the groups count.
    block_bytes: int = 1


def window_blocks(window: int, block_size: int) -> int:
    """Blocks of a windowed group that one sequence holds at most, in addition to those of its chunk's tokens.

    These are the blocks that a window overlaps, one more as a chunk may begin and end inside a block, and one for a
    copy-on-write.
    """
    return -(-(window - 1) // block_size) + 3


def max_window_seqs(num_blocks: int, window: int, block_size: int, max_num_batched_tokens: int) -> int:
    """Sequences of any length for which a windowed group of ``num_blocks`` always suffices (0 or less: none)."""
    return (num_blocks - -(-max_num_batched_tokens // block_size)) // window_blocks(window, block_size)


@dataclass(frozen=True)
class KVLayout:
    """The KV groups of one worker, and the load that they are sized for."""

    #: For each group, bytes of one block in all its layers on this worker, perhaps none.
    block_bytes: Sequence[int]
    #: For each group, its attention window in tokens; None: all tokens are kept.
    windows: Sequence[int | None]
    block_size: int
    #: Sequences that run at once.
    max_num_seqs: int
    #: Tokens of all steps in flight.
    max_num_batched_tokens: int
    #: Whether a prompt may be computed in chunks of any length.
    cuts_prompts: bool = True
    #: Tokens of the shortest chunks in which every prompt can be computed.
    least_chunk: int = 1

    @classmethod
    def of(
        cls,
        groups: Sequence[tuple[int, int | None]],
        options: EngineConfig,
        max_num_batched_tokens: int,
        least_chunk: int = 1,
    ) -> KVLayout:
        """The layout of groups, each given by the bytes of a block and its window, under an engine's options."""
        sizes, windows = [size for size, _ in groups], [window for _, window in groups]
        return cls(
            sizes,
            windows,
            options.block_size,
            options.max_num_seqs,
            max_num_batched_tokens,
            cuts_prompts=options.cuts_prompts,
            least_chunk=least_chunk,
        )

    def held(self, num_tokens: int, chunk: int = 1) -> list[int]:
        """Blocks of each group that one sequence of ``num_tokens`` tokens needs in order to be computed, alone.

        ``chunk``: blocks of a chunk of its prompt beside a window; those of all tokens in flight if prompts are whole.
        """
        whole = -(-num_tokens // self.block_size)
        least = self._chunk if not self.cuts_prompts else -(-self.least_chunk // self.block_size)
        chunk = max(chunk, least)
        return [
            whole if window is None else min(whole, window_blocks(window, self.block_size) + chunk)
            for window in self.windows
        ]

    @property
    def _chunk(self) -> int:
        """Blocks of all tokens in flight."""
        return -(-self.max_num_batched_tokens // self.block_size)

    def full_length_seqs(self, blocks: Sequence[int], max_model_len: int) -> int:
        """Sequences of ``max_model_len`` tokens that so many blocks of each group hold at once."""
        whole = -(-max_model_len // self.block_size)
        counts = [self.max_num_seqs]
        for count, window in zip(blocks, self.windows, strict=True):
            seqs = count // whole
            if window is not None and count > (one := window_blocks(window, self.block_size)):
                seqs = max(seqs, (count - min(self._chunk, count - one)) // one)
            counts.append(seqs)
        return min(counts)

    def size(self, blocks: Sequence[int]) -> int:
        """Bytes of so many blocks of each group."""
        return sum(count * size for count, size in zip(blocks, self.block_bytes, strict=True))

    def longest(self, num_bytes: int, max_model_len: int) -> int:
        """Tokens of the longest sequence, of at most ``max_model_len``, for which ``num_bytes`` suffice."""
        if self.size(self.held(max_model_len)) <= num_bytes:
            return max_model_len
        low, high = 0, -(-max_model_len // self.block_size)
        while low < high - 1:  # so many blocks are enough for low, not for high
            middle = (low + high) // 2
            low, high = (middle, high) if self.size(self.held(middle * self.block_size)) <= num_bytes else (low, middle)
        return low * self.block_size

    def split(self, num_bytes: int, max_model_len: int, *, limited: bool = True) -> list[int]:
        """Blocks of each group in ``num_bytes``; see ``longest`` for those that ``max_model_len`` needs.

        Every group gets what one sequence of ``max_model_len`` needs, in long chunks if possible. How the rest is best
        divided depends on the lengths that come: short sequences hold as many blocks in every group, long ones more in
        those that keep more. The ratio taken is the one for which the two extremes, sequences within the smallest
        window and sequences of ``max_model_len``, lose the same share of those that could run at once. A windowed group
        gets no more than ``max_num_seqs`` sequences can use, and the others divide what it leaves; if ``limited``, so
        does every group.

        Returns:
            Blocks of each group; together they take at most ``num_bytes``.
        """
        size, seqs, whole = self.block_size, self.max_num_seqs, -(-max_model_len // self.block_size)
        # One sequence of full length, without its chunk.
        lengths = [whole if w is None else min(whole, window_blocks(w, size)) for w in self.windows]
        most = max(lengths)
        useful = [
            seqs * whole if w is None else min(seqs * whole, seqs * window_blocks(w, size) + self._chunk)
            for w in self.windows
        ]
        nothing = [0] * len(lengths)
        least = (self.held(max_model_len, self._chunk), self.held(max_model_len), nothing)
        counts = next((blocks for blocks in least if self.size(blocks) <= num_bytes), nothing)
        limits = {
            group: max(0, limit - counts[group])
            for group, limit in enumerate(useful)
            if limited or lengths[group] < most or not self.block_bytes[group]
        }
        extra = _divide(num_bytes - self.size(counts), self.block_bytes, self._weights(lengths), limits)
        return [count + more for count, more in zip(counts, extra, strict=True)]

    def _weights(self, lengths: list[int]) -> list[Fraction]:
        """The ratio of the groups' blocks that ``split`` aims at.

        With u bytes for a block of the groups that keep most, w for one of the others, which keep 1 / R as many, the
        groups that keep most get r times the blocks. Of short sequences there are then (u + w) / (u r + w) of those
        that fit at best, of long ones r (u R + w) / ((u r + w) R): equal for r = (u + w) R / (u R + w).
        """
        most, total = max(lengths), sum(self.block_bytes)
        if not most or not total:
            return [Fraction(1)] * len(lengths)
        u = sum(size for size, length in zip(self.block_bytes, lengths, strict=True) if length == most)
        return [Fraction(u * most + (total - u) * length, total * most) for length in lengths]


def _divide(
    num_bytes: int, block_bytes: Sequence[int], weights: Sequence[Fraction], limits: dict[int, int]
) -> list[int]:
    """Divides bytes into numbers of blocks in the ratio of ``weights``, but no more than ``limits`` by group."""
    limited = {group: limit for group, limit in limits.items() if not block_bytes[group]}
    while True:  # each group that is limited raises the share of the others, perhaps above another group's limit
        left = num_bytes - sum(count * block_bytes[group] for group, count in limited.items())
        rest = [group for group in range(len(block_bytes)) if group not in limited]
        if not rest:
            return [limited[group] for group in range(len(block_bytes))]
        share = max(left, 0) / sum((block_bytes[group] * weights[group] for group in rest), Fraction(0))
        above = {group: limits[group] for group in rest if group in limits and limits[group] < share * weights[group]}
        if not above:
            return [limited[g] if g in limited else int(share * weights[g]) for g in range(len(block_bytes))]
        limited |= above
