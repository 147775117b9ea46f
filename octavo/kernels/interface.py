"""The interface of kernel backends: all operations on activations.

One backend is chosen at start; layers hold it and call it.
Shapes: T tokens of a step (flat, no padding), S sequences, H query heads, K KV heads, D head size, E hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.core.dtypes import DType
from octavo.kernels.arrays import Array, ArrayMaker
from octavo.kernels.cache import CacheKernels, LayerCache
from octavo.kernels.communicator import Collectives
from octavo.kernels.experts import ExpertKernels
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch, ForwardOutput
from octavo.kernels.lora import Adapters
from octavo.kernels.packed_weight import PackedHeads, PackedWeight
from octavo.kernels.quantized_rows import QuantizedRows
from octavo.kernels.sampling import SamplingBackend


class PartedForward:
    """A forward that is run in parts; here, of backends that cannot interrupt one, there is one part."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._batch: ForwardBatch | None = None

    def begin(self, batch: ForwardBatch) -> None:
        """A new batch, in place of one that is not finished."""
        self._batch = batch

    def advance(self, seconds: float) -> ForwardOutput | None:
        """Computes about so many seconds, at least some rows of an operation; the output once all is computed."""
        batch, self._batch = self._batch, None
        assert batch is not None, "begin comes first"
        return self._forward(batch)


class PositionBias:
    """Numbers that are added to scores by distance, float32 [heads, 2 * reach + 1]; written in place.

    Number ``reach + d`` of a head is for keys whose position is that of the query and d. The first ``MARGIN`` numbers
    of a head are one value, and so are the last ones: each stands for all that is further away.
    """

    #: As many as a vector of any kernel has, or more.
    MARGIN = 16

    def __init__(self, values: np.ndarray, reach: int) -> None:
        self.values, self.reach = values, reach

    @classmethod
    def zeros(cls, heads: int, longest: int) -> PositionBias:
        """For numbers that are the same from the distance ``longest`` on."""
        reach = longest + cls.MARGIN
        return cls(np.zeros((heads, 2 * reach + 1), np.float32), reach)

    def of_heads(self, heads: slice) -> PositionBias:
        """Those of some heads, over the same memory."""
        return PositionBias(self.values[heads], self.reach)

    @property
    def layout(self) -> tuple[int, int]:
        """Numbers from one head to the next, and ``reach``."""
        return self.values.shape[1], self.reach


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of a layer."""

    #: Scores are query * key * scale.
    scale: float
    #: A token attends to itself and the ``window - 1`` tokens before it; None: to itself and all tokens before it. If
    #: attention is not causal, to itself and the ``window`` tokens on either side of it.
    window: int | None = None
    #: If given, scores become ``soft_cap * tanh(score / soft_cap)``.
    soft_cap: float | None = None
    #: ALiBi (Press et al. 2021): a slope for each query head of this rank; slope * (position of the key - position of
    #: the query) is added to the scores, after the soft cap.
    alibi_slopes: tuple[float, ...] | None = None
    #: Whether a token attends to no later token. If not, it attends to the whole context, or to its window.
    causal: bool = True
    #: Over a latent cache: a token's value is the first ``value_dim`` numbers of its key.
    value_dim: int | None = None
    #: Whether the context is another one than that of the tokens themselves, and all of it is seen: the batch's cross
    #: tables and lengths.
    cross: bool = False
    #: Whether a token also sees later ones, up to the batch's ``sees_until``: those of the same image. Causal only.
    sees_spans: bool = False
    #: Relative position bias (Raffel et al. 2020, section 2.1), after the soft cap; of the query heads of this rank.
    bias: PositionBias | None = None

    @property
    def before(self) -> int | None:
        """How many tokens before itself a token attends to at most; None: all."""
        return self.window - 1 if self.window is not None and self.causal else self.window

    @property
    def after(self) -> int | None:
        """How many tokens after itself a token attends to at most; None: all."""
        return 0 if self.causal else self.window


class Kernels(ArrayMaker, CacheKernels, Collectives, ExpertKernels, ABC):
    """A backend. Unless stated otherwise, tensors are contiguous and outputs are new tensors.

    Cut by what it is asked for: here products, attention and the rest of a layer; the cache (``CacheKernels``), what
    joins ranks (``Collectives``), experts (``ExpertKernels``), and low-rank products (``adapters``).
    """

    name: str
    adapters: Adapters
    #: What steps are computed within, such as torch without gradients.
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext

    def describe(self) -> str:
        """The backend and its settings, for logs."""
        return self.name

    @abstractmethod
    def set_threads(self, count: int | None, pin: bool = False) -> None:
        """Sets the number of compute threads; None: one for each processor that this process may use.

        ``pin`` binds each thread to a processor, on backends that have their own threads.
        """

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        """``forward`` for batches of at most this size, recorded to reduce the work outside kernels.

        ``forward`` may be called here with dummy inputs. The captured function may return the same memory every time.
        """
        return forward

    def capture_parts(self, forward: Forward, largest: BatchSize) -> PartedForward:
        """``forward`` as ``capture`` has it, with memory of its own, to be run in parts between other steps."""
        return PartedForward(self.capture(forward, largest))

    def graph_bytes(self, forward: Forward, largest: BatchSize, in_use: Callable[[], int]) -> int:
        """Bytes of the device that ``capture`` will take in all for what it records, estimated by recording some of it.

        ``in_use`` tells the bytes in use. 0 on backends whose recording takes no memory of the device.
        """
        return 0

    @abstractmethod
    def take_sampled(self, hidden: Array, batch: ForwardBatch, rows: int = 1) -> Array:
        """The sampled rows of hidden [T, E], each with the ``rows - 1`` that follow it, behind each other.

        Returns:
            [N, rows * E]; results computed from them have N rows.
        """

    @abstractmethod
    def mean_sampled(self, hidden: Array, batch: ForwardBatch, rows: int) -> Array:
        """The mean of each sampled row of hidden, float32 [T, E], and the ``rows - 1`` that follow it: [N, E]."""

    @abstractmethod
    def host_call(self, function: Callable[[Any], None], x: Array) -> Array:
        """Calls a Python function on x [T, ...], which it may change in place, at this point of every step.

        The function gets an array of numpy or a tensor of torch, as the backend's communicators do.
        """

    @abstractmethod
    def token_rows(self, batch: ForwardBatch, width: int) -> Array:
        """Memory for float32 [T, width], uninitialised: what another pipeline stage computes of each token."""

    def check_dtype(self, dtype: DType) -> None:
        """Called before a network is made, to refuse a type of weights and activations.

        Raises:
            ConfigError: the backend does not compute in it; the message says in what it does.
        """

    @abstractmethod
    def make_sampling_backend(self, vocab_size: int) -> SamplingBackend:
        """The sampling backend for logits [n, vocab_size]."""

    @abstractmethod
    def pack(
        self,
        parts: Sequence[np.ndarray | QuantizedRows],
        bias: np.ndarray | None = None,
        quantization: str | None = None,
        *,
        dtype: DType,
        gated: bool = False,
        pieces: int = 1,
    ) -> PackedWeight:
        """Packs matrices with the same input for products, of which it keeps nothing.

        Args:
            parts: [n_i, K] each; their outputs follow each other. Either all are arrays, of any floating types and
                strides, or all are in a checkpoint's own bits, of which ``has_products`` is true.
            bias: [sum of n_i].
            quantization: "int8", "int4" or "fp8" quantises arrays; None or "gguf" does not.
            dtype: of the activations, and of the weight if it is not quantised: arrays are rounded to it first.
            gated: whether the two parts are gate and up projections. It is given here, as a backend may interleave
                both so that a tile of the product holds both inputs of the activation.
            pieces: 1, 2 or 4: K is summed in so many equal pieces, which are joined as a binary tree. K is a multiple
                of 2 * pieces. Backends whose ranks need not give the bits of one rank ignore it, as do quantised
                products, whose scales depend on the rank's inputs.

        Raises:
            ConfigError: the backend does not support the format.
        """

    def has_products(self, rows: QuantizedRows) -> bool:
        """Whether ``pack`` takes this matrix in its own bits; else it is dequantised as it is loaded."""
        return False

    @abstractmethod
    def pack_heads(self, weight: np.ndarray, dtype: DType) -> PackedHeads:
        """Packs a matrix for each head, weight [H, N, K] of any floating type, rounded to ``dtype``."""

    @abstractmethod
    def embedding(
        self, ids: Array, table: Array, first: int = 0, *, scale: float = 1.0, add: Array | None = None
    ) -> Array:
        """scale * rows of table [rows, E] + add, for ids int64 [T]: float32 [T, E].

        Row 0 is that of id ``first``. Ids outside the table, which other ranks hold, have rows of zeros. ``ids`` may be
        the batch's token ids, their positions or their types. The memory of ``add``, float32 [T, E], may be reused.
        """

    @abstractmethod
    def rms_norm(
        self,
        x: Array,
        weight: Array,
        eps: float,
        *,
        out_dtype: DType | None = None,
        add: Array | None = None,
    ) -> Array:
        """Root mean square norm over the last dimension (Zhang & Sennrich 2019), computed in float32.

        x has any float type, and any strides over the other dimensions; the result has ``out_dtype``, by default the
        weight's. With ``add``, contiguous float32 of x's shape, the result is float32: add + norm; its memory may be
        reused.
        """

    @abstractmethod
    def layer_norm(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        eps: float,
        *,
        out_dtype: DType | None = None,
    ) -> Array:
        """Layer norm over the last dimension (Ba et al. 2016), computed in float32.

        x [T, E], or [T, heads, D] with any strides over the first two, of any float type; the result has ``out_dtype``,
        by default the weight's.
        """

    @abstractmethod
    def soft_cap(self, x: Array, cap: float) -> Array:
        """cap * tanh(x / cap) of logits x, float32 [n, vocab]; its memory may be reused."""

    def rotary(
        self, q: Array, k: Array, positions: Array, cos_sin: Array, sections: Sequence[int] = ()
    ) -> tuple[Array, Array]:
        """Rotates q [T, H, D] and k [T, K, D]; they may be strided views and may be changed in place.

        cos_sin: float32 [max_position, R], R <= D rotated dimensions: R/2 cosines, then R/2 sines; dimension i is
        paired with i + R/2 (the "half" layout of Hugging Face checkpoints). Backends that override
        ``rotary_and_cache`` need not have it.

        positions: int64 [T]. With ``sections``, which have together R/2 pairs, [sections, T]: the pairs of a section
        are rotated by positions of their own.
        """
        raise NotImplementedError(f"{type(self).__name__} rotates in rotary_and_cache only")

    @abstractmethod
    def reshape_and_cache(self, k: Array, v: Array, cache: LayerCache, slots: Array) -> None:
        """Writes k and v [T, K, D] (last dimension contiguous) to their slots.

        To a latent cache: k [T, 1, value_dim] and v [T, 1, D - value_dim] are the two parts of the tokens' vectors.
        """

    def rotary_and_cache(
        self,
        q: Array,
        k: Array,
        v: Array,
        batch: ForwardBatch,
        cos_sin: Array,
        cache: LayerCache,
        sections: Sequence[int] = (),
    ) -> Array:
        """``rotary`` of q and k, ``reshape_and_cache`` of k and v; returns q rotated.

        By the batch's positions, or with ``sections`` by its rotary positions.
        """
        q, k = self.rotary(q, k, batch.rotary_positions if sections else batch.positions, cos_sin, sections)
        self.reshape_and_cache(k, v, cache, batch.slot_mapping[cache.group])
        return q

    @abstractmethod
    def latent_rotary_and_cache(
        self,
        q: Array,
        latent: Array,
        k_rope: Array,
        absorb: PackedHeads,
        batch: ForwardBatch,
        cos_sin: Array,
        cache: LayerCache,
    ) -> Array:
        """The queries of multi-head latent attention, and the tokens' vectors to a latent cache.

        Keys are never expanded (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): a head's query of N dimensions without
        positions is multiplied by the matrix that would expand its keys.

        Args:
            q: [T, H, N + R], tokens strided; may be changed in place.
            latent: [T, L], after its norm.
            k_rope: [T, R], the keys' dimensions with positions, rows strided; may be changed in place.
            absorb: from N to L dimensions.
            batch: positions and slots.
            cos_sin: [max_position, R], see ``rotary``.
            cache: vectors of L + R numbers.

        Returns:
            [T, H, L + R]: N dimensions of q absorbed, and its last R rotated.
        """

    def check_attention(self, spec: AttentionSpec) -> None:
        """Called when a layer is created, to refuse attention that the backend does not support.

        Raises:
            UnsupportedModelError: it does not; the message says what.
        """

    @abstractmethod
    def paged_attention(self, q: Array, cache: LayerCache, batch: ForwardBatch, spec: AttentionSpec) -> Array:
        """Attention of q [T, H, D] over the cached context of each token's sequence: [T, H, D], or [T, H, value_dim].

        The positions of queries, ``batch.positions``, are consecutive within a sequence, but need not be the last of
        its context, which has ``batch.seq_lens`` tokens.
        """
