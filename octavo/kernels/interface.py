"""The arithmetic that a model is made of, as one interface with several backends.

A backend is chosen once at start. Layers hold the backend and call it; nothing else computes on tensors of activations.
Shapes: T tokens of a step (flat, no padding), S sequences, H query heads, K KV heads, D head size, E hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.core.errors import UnsupportedModelError
from octavo.core.kv_spec import KVGroup, KVSpec
from octavo.kernels.communicator import Communicator
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch
from octavo.kernels.gguf_rows import GGUFRows
from octavo.kernels.packed_weight import PackedWeight
from octavo.kernels.sampling import SamplingBackend


@dataclass(slots=True)
class LayerCache:
    """KV cache of one layer. The layout belongs to the backend that made it."""

    key: Tensor
    value: Tensor
    #: Which of the batch's block tables and slot mappings are this layer's.
    group: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class AttentionSpec:
    """How the tokens of a layer attend to the context of their sequence."""

    #: Times the product of a query and a key.
    scale: float
    #: A token attends to itself and the ``window - 1`` tokens before it; None: to all before it.
    window: int | None = None
    #: Scores become ``soft_cap * tanh(score / soft_cap)``; None: they do not.
    soft_cap: float | None = None
    #: A slope for each query head of this rank, times (position of the key - position of the query), is added to its
    #: scores (Press et al. 2021); after the soft cap.
    alibi_slopes: tuple[float, ...] | None = None
    #: A token attends to none after it; else, which goes without a window, to the whole context.
    causal: bool = True

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal:
            raise UnsupportedModelError(f"a window of {self.window} tokens goes with causal attention only")


class Kernels(ABC):
    """A backend. All tensors are contiguous unless said otherwise; outputs are new tensors unless said otherwise."""

    name: str
    #: Whether torch takes no part in a step, so that there is no gradient for it to keep track of.
    computes_outside_torch = False
    #: The tensor-parallel group, if there are several ranks.
    group: Communicator | None = None

    def describe(self) -> str:
        """What computes, for people."""
        return self.name

    @abstractmethod
    def set_threads(self, count: int | None, pin: bool = False) -> None:
        """How many threads compute; None takes one for each processor that this process may use.

        With ``pin`` each keeps to a processor of its own, on backends that compute with threads of their own.
        """

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        """What ``forward`` does, for batches of at most this size, with less work around the kernels.

        ``forward`` may be called here, with inputs that mean nothing. The captured function may return the same memory
        each time it is called.
        """
        return forward

    def take_sampled(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """The rows of hidden [T, E] whose logits are wanted: [N, E]; what is computed of them has N rows."""
        return hidden if batch.all_sampled else hidden.index_select(0, batch.sampled_rows)

    def host_call(self, function: Callable[[Tensor], None], x: Tensor) -> Tensor:
        """Calls a function of the host on x [T, ...], which it may change in place, at this point of every step."""
        function(x)
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x, contiguous float32 [T, width], over the ranks of ``group``; its memory may be reused."""
        return x if self.group is None else self.group.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' x, contiguous float32 [T, width], joined in order of rank: [T, size * width]."""
        return x if self.group is None else self.group.all_gather(x)

    @abstractmethod
    def make_sampling_backend(self, vocab_size: int) -> SamplingBackend:
        """What chooses tokens from logits [n, vocab_size] and scores them."""

    @abstractmethod
    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes of one KV cache block of one layer: keys, values, scales and padding.

        Raises:
            ConfigError: the backend has no such cache.
        """

    @abstractmethod
    def make_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        """The KV cache of ``layers`` layers of one group, all zero.

        Raises:
            ConfigError: the backend has no such cache.
        """

    def make_host_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        """As ``make_group_cache``, in host memory, for blocks that are swapped out."""
        return self.make_group_cache(spec, layers, blocks, block_size)

    def make_cache(self, groups: Sequence[KVGroup], blocks: Sequence[int], block_size: int) -> list[LayerCache]:
        """The KV cache with so many blocks of each group: one entry a layer, in the order of layers."""
        return _in_layer_order(groups, blocks, block_size, self.make_group_cache)

    def make_host_cache(self, groups: Sequence[KVGroup], blocks: Sequence[int], block_size: int) -> list[LayerCache]:
        """As ``make_cache``, in host memory, for blocks that are swapped out."""
        return _in_layer_order(groups, blocks, block_size, self.make_host_group_cache)

    @abstractmethod
    def pack(
        self,
        parts: Sequence[Tensor | GGUFRows],
        bias: Tensor | None = None,
        quantization: str | None = None,
        *,
        gated: bool = False,
    ) -> PackedWeight:
        """Takes matrices with the same input into the form that products want; the caller drops its own.

        Args:
            parts: [n_i, K] each, whose outputs stand one after the other; all tensors, or all blocks of a file, which
                keep their bits.
            bias: [sum of n_i].
            quantization: "int8", "int4" or "fp8": how tensors are quantised. None or "gguf": they are not.
            gated: the two parts are a gate and what it gates. Said here and not in the call, as a backend may pack
                both side by side, so that a tile of the product holds what the activation needs.

        Raises:
            ConfigError: the backend has no such products.
        """

    @abstractmethod
    def embedding(self, ids: Tensor, table: Tensor, first: int = 0) -> Tensor:
        """Rows of table [rows, E] for ids int64 [T]: float32 [T, E], as the residual stream begins with them.

        Row 0 is that of id ``first``. An id that the table does not hold, as another rank does, gives zeros.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension (Zhang & Sennrich 2019), computed in float32.

        x has any float type, and any strides over the other dimensions; the result has the weight's.
        """

    @abstractmethod
    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates q [T, H, D] and k [T, K, D]; they may be strided views and may be changed in place.

        cos_sin: float32 [max_position, R], R <= D rotated dimensions: R/2 cosines, then R/2 sines; dimension i is
        paired with i + R/2 (the "half" layout of Hugging Face checkpoints).
        """

    @abstractmethod
    def reshape_and_cache(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Writes k and v [T, K, D] (last dimension contiguous) to their slots."""

    def rotary_and_cache(
        self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, cos_sin: Tensor, cache: LayerCache
    ) -> Tensor:
        """``rotary`` of q and k at the batch's positions, ``reshape_and_cache`` of k and v; returns q rotated."""
        q, k = self.rotary(q, k, batch.positions, cos_sin)
        self.reshape_and_cache(k, v, cache, batch.slot_mapping[cache.group])
        return q

    def check_attention(self, spec: AttentionSpec) -> None:  # noqa: B027
        """Called when a layer is made, so that no step meets an attention that the backend does not compute.

        Raises:
            UnsupportedModelError: it does not; the message says what.
        """

    @abstractmethod
    def paged_attention(self, q: Tensor, cache: LayerCache, batch: ForwardBatch, spec: AttentionSpec) -> Tensor:
        """Attention of q [T, H, D] over the cached context of each token's sequence: [T, H, D].

        A query's position is that of ``batch.positions``: consecutive within a sequence, and not necessarily the last
        of its context, of which ``batch.seq_lens`` says how far it may be read.
        """

    @abstractmethod
    def copy_blocks(self, caches: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """Copies block to block (source, target), in every layer.

        A source may have several targets. All sources are read before any target is written; no target comes twice.
        """

    @abstractmethod
    def swap_blocks(self, sources: list[LayerCache], targets: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """Copies blocks (source, target) of one cache to another, in every layer.

        Both are caches of this backend, of the same shapes and types but for their number of blocks.
        """


def torch_dtype(name: str) -> torch.dtype:
    """The type that ``KVSpec.dtype`` names."""
    dtype: torch.dtype = torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)
    return dtype


def _in_layer_order(
    groups: Sequence[KVGroup],
    blocks: Sequence[int],
    block_size: int,
    make: Callable[[KVSpec, int, int, int], list[LayerCache]],
) -> list[LayerCache]:
    caches: dict[int, LayerCache] = {}
    for index, (group, count) in enumerate(zip(groups, blocks, strict=True)):
        made = make(group.spec, len(group.layers), count, block_size)
        for layer, cache in zip(group.layers, made, strict=True):
            cache.group = index
            caches[layer] = cache
    return [caches[layer] for layer in sorted(caches)]
