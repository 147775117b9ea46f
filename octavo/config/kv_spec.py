"""KV cache specs of layers, groups of layers that share block tables, and the division of memory among groups.

``KVSpec`` and ``LayerGroup`` are vLLM's ``KVCacheSpec`` and ``KVCacheGroupSpec``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from octavo.config.engine_config import EngineConfig


#: Bytes of a number of each type, or ``CheckpointQuantization``, without scales; those of GGUF have 4 bits or more.
NUMBER_BYTES = {
    "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5, "gguf": 0.5,
    "gptq-int4": 0.5, "gptq-int8": 1.0, "awq-int4": 0.5, "compressed-tensors-int4": 0.5, "compressed-tensors-int8": 1.0,
    "mxfp4": 0.5,
}  # fmt: skip
#: Bytes of a scale; int8 and fp8 caches have one for each key and value of a head.
_SCALE_BYTES = 4

KVKind = Literal["full", "sliding", "cross", "latent", "state", "none"]

#: Tokens that a token of a layer with states reads through a block: its predecessor, whose state goes on.
STATE_WINDOW = 2


@dataclass(frozen=True)
class KVSpec:
    """The KV cache of one layer on one rank."""

    #: What a token attends to: all earlier tokens, the last ``window`` tokens, an encoder's output, all earlier tokens
    #: as compressed vectors of ``head_dim`` numbers, a recurrent state of ``head_dim`` numbers that sums them up, or
    #: nothing cached.
    kind: KVKind
    num_kv_heads: int
    head_dim: int
    #: float32, bfloat16, float16, int8 or fp8.
    dtype: str
    #: Tokens that a token of a "sliding" layer attends to, including itself.
    window: int | None = None
    #: Of a state: draft tokens after it whose changes a block keeps, see ``Kernels``.
    draft_tokens: int = 0

    @classmethod
    def state(cls, numbers: int, draft_tokens: int = 0) -> KVSpec:
        """A recurrent state. A block of it has one state, whatever its number of tokens.

        ``numbers``: float32 numbers of the state and of the changes of ``draft_tokens`` tokens after it.
        """
        return cls("state", 1, numbers, "float32", STATE_WINDOW, draft_tokens)

    @property
    def vectors(self) -> int:
        """Vectors of a token for each head: a key and a value, or a latent one; of a block if it is a state."""
        return {"none": 0, "latent": 1, "state": 1}.get(self.kind, 2)

    def places(self, block_size: int) -> int:
        """Of a block, for vectors: one for each token, or one for a state."""
        return 1 if self.kind == "state" else block_size

    @property
    def bytes_per_state(self) -> int:
        return int(self.head_dim * NUMBER_BYTES[self.dtype]) if self.kind == "state" else 0

    @property
    def bytes_per_token(self) -> int:
        """Keys, values and scales, without padding; a state takes no more with each token."""
        if self.kind == "state":
            return 0
        scale = _SCALE_BYTES if self.dtype in ("int8", "fp8") else 0
        return int(self.vectors * self.num_kv_heads * (self.head_dim * NUMBER_BYTES[self.dtype] + scale))


@dataclass(frozen=True)
class LayerGroup:
    """Layers with equal specs, which share block tables."""

    spec: KVSpec
    #: Ascending indices among the layers of this rank; empty if they are on other pipeline stages.
    layers: tuple[int, ...]


def group_layers(specs: Sequence[KVSpec], stage: range | None = None) -> list[LayerGroup]:
    """The groups in the order of their first layers; ``stage``: layers of this rank. All ranks have the same groups."""
    groups: dict[KVSpec, list[int]] = {}
    stage = range(len(specs)) if stage is None else stage
    for layer, spec in enumerate(specs):
        members = groups.setdefault(spec, [])
        if layer in stage:
            members.append(layer - stage.start)
    return [LayerGroup(spec, tuple(layers)) for spec, layers in groups.items()]


# Blocks of groups.


class GroupShape(NamedTuple):
    """A KV group on one worker."""

    #: Of a block in all its layers; may be 0.
    block_bytes: int
    #: Attention window in tokens; None: the whole context.
    window: int | None = None
    #: Of a group of recurrent states: tokens between two checkpoints, which are its blocks; None: blocks are those of
    #: all other groups.
    state_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    num_blocks: int
    num_host_blocks: int = 0
    #: Attention window in tokens; None: the whole context.
    window: int | None = None
    #: Of a block in all layers; only ratios between groups count.
    block_bytes: int = 1
    #: As in ``GroupShape``.
    state_tokens: int | None = None


def window_blocks(window: int, block_size: int) -> int:
    """Maximum blocks of a windowed group for a sequence, beside its chunk's."""
    # Those that a window overlaps, one as a chunk may start and end inside a block, and one for copy-on-write.
    return -(-(window - 1) // block_size) + 3


def max_window_seqs(num_blocks: int, window: int, block_size: int, max_num_batched_tokens: int) -> int:
    """Number of sequences of any length for which a windowed group always has enough blocks (0 or less: none)."""
    return (num_blocks - -(-max_num_batched_tokens // block_size)) // window_blocks(window, block_size)


@dataclass(frozen=True)
class KVLayout:
    """The KV groups of one worker, and the load that they are sized for."""

    groups: Sequence[GroupShape]
    block_size: int
    max_num_seqs: int
    #: Tokens of all steps in flight.
    max_num_batched_tokens: int
    cuts_prompts: bool = True
    #: Minimum chunk size in which every prompt can be computed.
    least_chunk: int = 1
    #: Whether the prefix cache keeps checkpoints of states.
    keeps_checkpoints: bool = False

    @classmethod
    def of(
        cls,
        groups: Sequence[tuple[int, int | None] | GroupShape],
        options: EngineConfig,
        max_num_batched_tokens: int,
        least_chunk: int = 1,
    ) -> KVLayout:
        load = options.max_num_seqs, max_num_batched_tokens, options.cuts_prompts, least_chunk
        shapes = [GroupShape(*group) for group in groups]
        return cls(shapes, options.block_size, *load, keeps_checkpoints=options.enable_prefix_caching)

    @property
    def block_bytes(self) -> list[int]:
        return [group.block_bytes for group in self.groups]

    def _blocks(self, group: GroupShape, num_tokens: int) -> int:
        return -(-num_tokens // (group.state_tokens or self.block_size))

    def _window(self, group: GroupShape) -> int | None:
        """Blocks of a window; None: the group keeps all tokens."""
        size = group.state_tokens or self.block_size
        return None if group.window is None else window_blocks(group.window, size)

    def held(self, num_tokens: int, chunk: int = 1) -> list[int]:
        """Blocks of each group that a single sequence of ``num_tokens`` tokens needs.

        ``chunk``: tokens of a prompt chunk beside a window; all tokens in flight if prompts are computed whole.
        """
        chunk = max(chunk, self.least_chunk if self.cuts_prompts else self.max_num_batched_tokens)
        counts = []
        for group in self.groups:
            whole, window = self._blocks(group, num_tokens), self._window(group)
            counts.append(whole if window is None else min(whole, window + self._blocks(group, chunk)))
        return counts

    def full_length_seqs(self, blocks: Sequence[int], max_model_len: int) -> int:
        """Number of concurrent sequences of ``max_model_len`` tokens for these blocks of each group."""
        counts = [self.max_num_seqs]
        for count, group in zip(blocks, self.groups, strict=True):
            seqs, one = count // self._blocks(group, max_model_len), self._window(group)
            if one is not None and count > one:
                seqs = max(seqs, (count - min(self._blocks(group, self.max_num_batched_tokens), count - one)) // one)
            counts.append(seqs)
        return min(counts)

    def size(self, blocks: Sequence[int]) -> int:
        return sum(count * size for count, size in zip(blocks, self.block_bytes, strict=True))

    def longest(self, num_bytes: int, max_model_len: int) -> int:
        """Maximum length of a sequence, up to ``max_model_len``, that fits ``num_bytes``."""
        if self.size(self.held(max_model_len)) <= num_bytes:
            return max_model_len
        low, high = 0, -(-max_model_len // self.block_size)
        while low < high - 1:  # low blocks fit, high ones do not
            middle = (low + high) // 2
            low, high = (middle, high) if self.size(self.held(middle * self.block_size)) <= num_bytes else (low, middle)
        return low * self.block_size

    def split(self, num_bytes: int, max_model_len: int, *, limited: bool = True) -> list[int]:
        """Blocks of each group that fit ``num_bytes``.

        Every group gets what one sequence of ``max_model_len`` needs, in long chunks if possible. The rest is divided
        so that the shortest sequences, which hold equal blocks in every group, and the longest lose the same share of
        their maximum concurrency. A windowed group (with ``limited``, any group) gets no more than ``max_num_seqs``
        sequences can use; the others divide its rest. Such sequences use all their checkpoints, if those are kept.
        """
        seqs, in_flight = self.max_num_seqs, self.max_num_batched_tokens
        whole = [self._blocks(group, max_model_len) for group in self.groups]
        windows = [self._window(group) for group in self.groups]
        # Of one sequence with full length, without its chunk.
        lengths = [all_ if w is None else min(all_, w) for all_, w in zip(whole, windows, strict=True)]
        most = max(lengths)
        checkpoints = [self.keeps_checkpoints and group.state_tokens is not None for group in self.groups]
        useful = [
            seqs * all_ if w is None else min(seqs * all_, seqs * w + self._blocks(group, in_flight))
            for group, all_, w in zip(self.groups, whole, windows, strict=True)
        ]
        useful = [  # all checkpoints, and the ends of a prompt and an answer
            seqs * (all_ + 2) if kept else count for count, kept, all_ in zip(useful, checkpoints, whole, strict=True)
        ]
        nothing = [0] * len(lengths)
        least = (self.held(max_model_len, in_flight), self.held(max_model_len), nothing)
        counts = next((blocks for blocks in least if self.size(blocks) <= num_bytes), nothing)
        limits = {
            group: max(0, limit - counts[group])
            for group, limit in enumerate(useful)
            if limited or (lengths[group] < most and not checkpoints[group]) or not self.block_bytes[group]
        }
        extra = _divide(num_bytes - self.size(counts), self.block_bytes, self._weights(lengths), limits)
        return [count + more for count, more in zip(counts, extra, strict=True)]

    def _weights(self, lengths: list[int]) -> list[Fraction]:
        """The ratio of the groups' blocks for ``split``.

        u, w: bytes of a block of the groups that keep most, and of the others, which keep 1 / R as many blocks; r:
        ratio of their blocks. Relative concurrency of short sequences is (u + w) / (u r + w), of long ones
        r (u R + w) / ((u r + w) R): equal for r = (u + w) R / (u R + w).
        """
        most, total = max(lengths), sum(self.block_bytes)
        if not most or not total:
            return [Fraction(1)] * len(lengths)
        u = sum(size for size, length in zip(self.block_bytes, lengths, strict=True) if length == most)
        return [Fraction(u * most + (total - u) * length, total * most) for length in lengths]


def _divide(
    num_bytes: int, block_bytes: Sequence[int], weights: Sequence[Fraction], limits: dict[int, int]
) -> list[int]:
    limited = {group: limit for group, limit in limits.items() if not block_bytes[group]}
    while True:  # a limited group raises the share of the others, perhaps above their limits
        left = num_bytes - sum(count * block_bytes[group] for group, count in limited.items())
        if not (rest := [group for group in range(len(block_bytes)) if group not in limited]):
            return [limited[group] for group in range(len(block_bytes))]
        share = max(left, 0) / sum((block_bytes[group] * weights[group] for group in rest), Fraction(0))
        above = {group: limits[group] for group in rest if group in limits and limits[group] < share * weights[group]}
        if not above:
            return [limited[g] if g in limited else int(share * weights[g]) for g in range(len(block_bytes))]
        limited |= above
