"""The interface of kernel backends: all operations on activations. Read ``Kernels`` first.

One backend is chosen at start; layers hold it and call it.
Shapes: T tokens of a step (flat, no padding), S sequences, H query heads, K KV heads, D head size, E hidden size.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from octavo.config.kv_spec import KVSpec, LayerGroup
from octavo.core.dtypes import DType
from octavo.core.errors import AdapterError, ConfigError
from octavo.kernels.weight_rows import QuantizedRows, to_values

if TYPE_CHECKING:
    from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch, ForwardOutput
    from octavo.kernels.sampling import SamplingBackend

#: An array of a backend, which alone makes it and computes with it: a ``CpuArray``, or a tensor of torch. Other rooms
#: may read its ``shape`` and length and take views: by slices, integers and None, and by ``reshape`` without a copy.
#: No protocol: a backend's operations take its own arrays only, which would narrow their parameters.
Array: TypeAlias = Any
#: Waits for a copy that a device may still be doing; may be called from any thread, and repeatedly.
Wait: TypeAlias = Callable[[], None]


class ArrayMaker(ABC):
    """How a backend converts between its arrays and those of numpy."""

    @abstractmethod
    def array(self, values: np.ndarray, dtype: DType | None = None) -> Array:
        """A copy of the values, by default of their own type; ``dtype`` rounds to nearest even."""

    @abstractmethod
    def wrap(self, values: np.ndarray) -> Array:
        """The values on the backend's device: on the host over their own memory, which must not change meanwhile."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An array of zeros."""

    @abstractmethod
    def write(self, target: Array, values: np.ndarray) -> None:
        """Copies values of the target's shape into it, rounded to its type."""

    @abstractmethod
    def to_numpy(self, x: Array) -> np.ndarray:
        """The values once they are computed; on the host over the array's own memory."""

    # Called between recorded steps:

    @abstractmethod
    def take_rows(self, x: Array, rows: np.ndarray) -> Array:
        """A copy of these rows of x."""

    @abstractmethod
    def put_rows(self, target: Array, rows: np.ndarray, x: Array) -> None:
        """Copies the rows of x to these rows of the target, converted to its type."""

    @abstractmethod
    def scatter_columns(self, x: Array, columns: Array, width: int) -> Array:
        """x, float32 [n, m], in the columns int64 [m] of [n, width] that is -inf elsewhere."""

    @abstractmethod
    def mask_clusters(self, logits: Array, scores: Array, clusters: Array, count: int) -> None:
        """Sets logits, float32 [n, V], to -inf outside of each row's ``count`` clusters of the best scores.

        ``scores``: of the clusters, float32 [n, C]. ``clusters``: the columns of each, int64 [C, V / C].
        """

    @abstractmethod
    def as_token_ids(self, tokens: Any) -> Array:
        """Tokens of a ``SamplingBackend`` as token ids of a step; negative ones (``NO_TOKEN``) become 0."""

    @abstractmethod
    def put_tokens(self, token_ids: Array, targets: np.ndarray, tokens: Any, sources: np.ndarray) -> None:
        """Copies the sampled tokens at ``sources`` to ``targets`` of a step's token ids, negative ones as 0."""


class Kernels(ArrayMaker):
    """A backend. Unless stated otherwise, arrays are contiguous and results are new arrays."""

    name: str
    adapters: Adapters
    #: Whether ``keep_table`` keeps the mapped file, where its type allows.
    maps_tables: ClassVar[bool] = False
    #: The tensor-parallel group, if there are several ranks.
    group: Communicator | None = None
    #: Context in which steps are computed, such as torch without gradients.
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext

    def describe(self) -> str:
        """The backend and its settings, for logs."""
        return self.name

    @abstractmethod
    def numerics(self) -> str:
        """The settings, devices and libraries that decide the bits of results; equal text, equal bits."""

    @abstractmethod
    def set_threads(self, count: int | None, pin: bool = False) -> None:
        """Sets the number of compute threads; None: one for each processor that this process may use.

        ``pin`` binds each thread to a processor, on backends that have their own threads.
        """

    def check_dtype(self, dtype: DType) -> None:
        """Called before a network is made; raises ConfigError if the backend cannot compute in ``dtype``."""

    @abstractmethod
    def make_sampling_backend(self, vocab_size: int) -> SamplingBackend:
        """The sampling backend for logits [n, vocab_size]."""

    # Steps, recorded to reduce the work outside kernels.

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        """``forward`` for batches of at most this size, recorded: as a CUDA graph, or as a tape on a CPU.

        ``forward`` may be called here with dummy inputs. The captured function may return the same memory every time.
        """
        return forward

    def capture_parts(self, forward: Forward, largest: BatchSize) -> PartedForward:
        """``forward`` as captured by ``capture``, in memory of its own, to be run in parts between other steps."""
        return PartedForward(self.capture(forward, largest))

    def graph_bytes(self, forward: Forward, largest: BatchSize, in_use: Callable[[], int]) -> int:
        """Estimates the bytes of the device that ``capture`` will take in all, by recording some graphs.

        ``in_use`` returns the bytes in use. 0 on backends whose recordings take no memory of the device.
        """
        return 0

    @abstractmethod
    def take_sampled(self, hidden: Array, batch: ForwardBatch, rows: int = 1) -> Array:
        """The sampled rows of hidden [T, E], each with the ``rows - 1`` that follow it, concatenated.

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
        """Uninitialised memory for float32 [T, width], into which another pipeline stage's results are copied."""

    # Products and pointwise operations.

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
        """Packs matrices with the same input for products, and keeps no reference to them.

        Args:
            parts: [n_i, K] each; their outputs follow each other. Either all are arrays, of any floating types and
                strides, or all are in a checkpoint's own bits, and ``has_products`` is true of them.
            bias: [sum of n_i].
            quantization: "int8", "int4" or "fp8" quantises arrays; None or "gguf" does not.
            dtype: of the activations, and of the weight if it is not quantised: arrays are rounded to it first.
            gated: whether the two parts are gate and up projections. A backend may interleave them, so that a tile of
                the product holds both inputs of the activation.
            pieces: 1, 2 or 4: K, a multiple of 2 * pieces, is summed in this number of equal pieces, which are joined
                as a binary tree. Ignored by backends whose ranks need not give the bits of one rank, and by quantised
                products, whose scales depend on the rank's inputs.

        Raises:
            ConfigError: the backend does not support the format.
        """

    def has_products(self, rows: QuantizedRows) -> bool:
        """Whether ``pack`` takes this matrix in its own bits; else it is dequantised as it is loaded."""
        return False

    def form_of(self, kind: str) -> StoredForm | None:
        """How ``pack`` keeps a matrix in the blocks of a GGUF type; None: it is dequantised as it is loaded."""
        return None

    @abstractmethod
    def pack_heads(self, weight: np.ndarray, dtype: DType) -> PackedHeads:
        """Packs a matrix for each head, weight [H, N, K] of any floating type, rounded to ``dtype``."""

    @abstractmethod
    def pack_experts(
        self,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        shared: int = 0,
        activation: Activation = "silu",
        *,
        weighs_input: bool = False,
    ) -> PackedExperts:
        """The experts of a layer, made from the results of ``pack``, which the caller then drops.

        Args:
            gate_up: of each expert, all gated or none, all with a bias or none, and none if they are not gated; the
                sizes between the two matrices may differ.
            down: of each expert, without bias (see ``add_expert_bias``), all with the same ``pieces``.
            shared: number of experts at the end that every token has.
            activation: of the gates, or of matrices without one.
            weighs_input: whether the weights are factors of the experts' inputs, rounded to their type, and not of
                their results. Without shared experts only.

        Raises:
            ConfigError: the backend has no products of experts in that format.
        """

    @abstractmethod
    def route(
        self, logits: Array, spec: RoutingSpec, bias: Array | None = None, factors: Array | None = None
    ) -> tuple[Array, Array]:
        """The experts of each token, int32 [T, top_k + shared], and their weights, float32, chosen by ``spec``.

        A token whose logits have a NaN gets some experts, with NaN as their weights.

        Args:
            logits: float32 [T, experts + shared].
            spec: checked against the number of experts by ``RoutingSpec.check``.
            bias: float32 [experts], added to the scores for the choice alone (DeepSeek-AI 2024, arXiv 2412.19437,
                section 2.1.2).
            factors: float32 [experts], by which the weights are multiplied last; not with "sparsemixer".
        """

    @abstractmethod
    def add_expert_bias(self, x: Array, experts: Array, weights: Array, bias: Array) -> Array:
        """x + the sum over a token's experts of weight * the expert's row of ``bias``, in the order of the slots.

        These are the biases of the experts' down projections. Ranks that share the projections' inputs sum their
        products only, and all have the whole biases.

        Args:
            x: float32 [T, E]; its memory may be reused.
            experts: int32 [T, slots].
            weights: float32 [T, slots].
            bias: float32 [experts, E].
        """

    def keep_table(self, tensor: np.ndarray | QuantizedRows, dtype: DType) -> Array:
        """A checkpoint's tensor [rows, E] as a table for ``embedding``, by default a copy that is rounded to ``dtype``.

        On the host it may be the mapped file itself, of which ``embedding`` reads only the rows of a step's tokens.
        """
        return self.array(to_values(tensor), dtype)

    @abstractmethod
    def embedding(
        self,
        ids: Array,
        table: Array,
        first: int = 0,
        *,
        scale: float = 1.0,
        add: Array | None = None,
        otherwise: int | None = None,
    ) -> Array:
        """scale * rows of table [rows, E] + add, for ids int64 [T]: float32 [T, E].

        Row 0 is that of id ``first``. Ids outside the table, which other ranks hold, have rows of zeros, or the row
        ``otherwise``. ``ids`` may be the batch's token ids, their positions or their types. The memory of ``add``,
        float32 [T, E], may be reused.
        """

    @abstractmethod
    def rms_norm(
        self, x: Array, weight: Array, eps: float, *, out_dtype: DType | None = None, add: Array | None = None
    ) -> Array:
        """Root mean square norm over the last dimension (Zhang & Sennrich 2019), computed in float32.

        x [T, E], or [T, heads, D] with any strides over the first two, has any float type; the weight is that of the
        last dimension, or [heads, D]. The result has ``out_dtype``, by default the weight's. With ``add``, contiguous
        float32 of x's shape, it is float32: add + norm; the memory of ``add`` may be reused.
        """

    @abstractmethod
    def layer_norm(
        self, x: Array, weight: Array, bias: Array | None, eps: float, *, out_dtype: DType | None = None
    ) -> Array:
        """Layer norm over the last dimension (Ba et al. 2016), computed in float32; x and result as in ``rms_norm``."""

    @abstractmethod
    def clamp(self, x: Array, limit: float, least: float | None = None) -> Array:
        """min(max(x, least), limit) in place, ``least`` by default -limit; x [T, E], rows may be strided.

        NaN stays NaN.
        """

    @abstractmethod
    def soft_cap(self, x: Array, cap: float) -> Array:
        """cap * tanh(x / cap) of logits x, float32 [n, vocab]; its memory may be reused."""

    @abstractmethod
    def scale(self, x: Array, factor: float) -> Array:
        """factor * x, float32 [T, width]; its memory may be reused."""

    @abstractmethod
    def activate(self, x: Array, activation: Activation) -> Array:
        """activation(x) in place; x [T, width] of any float type."""

    @abstractmethod
    def multiply(self, x: Array, factors: Array, bias: Array | None = None) -> Array:
        """factors * x + bias in place, computed in float32; x [T, width] of any float type, rows may be strided.

        Args:
            factors: float32 [T, width], rows may be strided; or [width].
            bias: float32 [width].
        """

    @abstractmethod
    def xielu(self, x: Array, parameters: Xielu) -> Array:
        """xIELU of x, float32 [T, width]; its memory may be reused."""

    # Attention.

    @abstractmethod
    def rotary(
        self, q: Array, k: Array, positions: Array, cos_sin: Array, sections: Sequence[int] = ()
    ) -> tuple[Array, Array]:
        """Rotates q [T, H, D] and k [T, K, D]; they may be strided views and may be changed in place.

        Args:
            positions: int64 [T]; with ``sections`` [axes, T], such as time, height and width.
            cos_sin: float32 [max_position, R], R <= D rotated dimensions: R/2 cosines, then R/2 sines; dimension i is
                paired with i + R/2 (the "half" layout of Hugging Face checkpoints).
            sections: numbers of pairs, R/2 in all, that are rotated by the rows of ``positions`` in turn, beginning
                again with the first (M-RoPE; sections of one pair: interleaved M-RoPE).
        """

    @abstractmethod
    def scale_queries(self, q: Array, positions: Array, temperature: AttentionTemperature) -> Array:
        """q [T, H, D], tokens and heads strided, times the temperature at positions int64 [T]; q may be changed."""

    @abstractmethod
    def reshape_and_cache(self, k: Array, v: Array, cache: LayerCache, slots: Array) -> None:
        """Writes k and v [T, K, D] (last dimension contiguous) to their slots; negative slots are skipped.

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
        """The queries of multi-head latent attention (MLA); writes the tokens' vectors to a latent cache.

        Keys are never expanded (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): a head's query of N dimensions without
        positions is multiplied by the matrix that would expand its keys.

        Args:
            q: [T, H, N + R], tokens strided; may be changed in place.
            latent: [T, L], after its norm.
            k_rope: [T, R], the keys' dimensions with positions, rows strided; may be changed in place.
            absorb: from N to L dimensions.
            cos_sin: [max_position, R], see ``rotary``.
            cache: vectors of L + R numbers.

        Returns:
            [T, H, L + R]: N dimensions of q absorbed, and its last R rotated.
        """

    def check_attention(self, spec: AttentionSpec) -> None:
        """Called when a layer is created; raises UnsupportedModelError for features that the backend lacks."""

    @abstractmethod
    def paged_attention(self, q: Array, cache: LayerCache, batch: ForwardBatch, spec: AttentionSpec) -> Array:
        """Attention of q [T, H, D] over the cached context of each token's sequence: [T, H, D], or [T, H, value_dim].

        The positions of queries, ``batch.positions``, are consecutive within a sequence, but need not be the last of
        its context, which has ``batch.seq_lens`` tokens.
        """

    # Recurrent states.
    #
    # ``cache.key`` has a state, float32 numbers, for each block. With n = ``cache.state_tokens``, block
    # ``block_tables[cache.group, s, i]`` has the state of sequence s after token (i + 1) * n - 1, or after its last
    # computed token. A step that computes tokens p to e of a sequence begins with the state of block (p - 1) // n, with
    # zeros if p is 0, and writes the state to every block from p // n to (e - 1) // n. Slot mappings are meaningless.
    # Tokens are computed one after the other in one order, so that the bits of a result and of a state do not depend on
    # the cutting of a sequence into steps. See ``state_spans`` of ``octavo.kernels.reference_states``.
    #
    # Draft tokens. The last ``batch.num_drafts[s]`` tokens of a sequence are drafts, at most
    # ``cache.draft_tokens`` and never all, and the next step begins behind those that were accepted. A state cannot be
    # cut back, so none is advanced by a draft. If ``cache.draft_tokens`` is not 0, a block has the state after token q,
    # the last one in the block or before it that was no draft, the position q as a float32 number, and for the drafts
    # after q their *changes*: whatever advances the state by a token, in the same bits. A step that begins at p applies
    # the first p - 1 - q changes of the block that it reads. Rejected drafts are changes that no step applies, so a
    # block is valid for any number of accepted drafts: a full one stays a checkpoint, wherever it was copied.
    # Each channel or head has its own q and changes, for kernels that compute them in parallel.

    @abstractmethod
    def causal_conv(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        cache: LayerCache,
        batch: ForwardBatch,
        *,
        offset: int = 0,
        activation: Literal["silu"] | None = None,
        in_gate: Array | None = None,
        out_gate: Array | None = None,
    ) -> Array:
        """Causal depthwise convolution over the tokens of each sequence: activation(conv(x * in_gate)) * out_gate.

        A channel's sum starts with the bias and goes from the oldest input to the token's own, in float32. The state
        is the last K - 1 inputs, [K - 1, C] numbers from ``offset`` on, the oldest first. The change of a draft is its
        input, which follows them; last comes q, [1, C]. See ``conv_numbers``.

        Args:
            x, in_gate, out_gate: [T, C] of one type, rows may be strided.
            weight: float32 [K, C], K at least 2: the last row is the factor of the token's own input.
            bias: float32 [C].
            offset: of the convolution's numbers in a state, which may have others beside them.

        Returns:
            [T, C] of the type of x, rounded once.
        """

    @abstractmethod
    def gated_delta_rule(
        self,
        qkv: Array,
        z: Array,
        b: Array,
        a: Array,
        heads: DeltaHeads,
        cache: LayerCache,
        batch: ForwardBatch,
        *,
        offset: int = 0,
    ) -> Array:
        """The gated delta rule (Yang et al. 2024, arXiv 2412.06464) and the gated RMS norm of each head's result.

        The state of value head h is a matrix S [key_dim, value_dim]. With q and k of key head h * key_heads //
        value_heads, divided by their lengths: S *= exp(decay * softplus(a + dt_bias)),
        S += k (beta_scale * sigmoid(b) * (v - k S)), o = q S / sqrt(key_dim), and the result is
        rms_norm(o) * norm * gate(z). With ``per_channel`` each row of S has a decay of its own (Kimi delta attention,
        arXiv 2510.26692).

        Args:
            qkv: [T, 2 * key_heads * key_dim + value_heads * value_dim]: queries, keys, values; rows may be strided.
            z: [T, value_heads * value_dim], rows may be strided; of the type of qkv, as b and a.
            b, a: [T, value_heads], rows may be strided; with ``per_channel`` a is [T, value_heads * key_dim].
            offset: of the matrices [value_heads, key_dim, value_dim] in a state, which may have others beside them.
                With draft tokens D, [value_heads, 1 + D * (1 + key_dim + value_dim)] numbers follow: q, and for each
                draft the factor of S, k divided by its length, and what multiplies k. With ``per_channel`` each draft
                has key_dim factors. See ``delta_numbers``.

        Returns:
            [T, value_heads * value_dim] of the type of qkv, computed in float32 and rounded once.
        """

    @abstractmethod
    def selective_scan(
        self,
        x: Array,
        dt: Array,
        b: Array,
        c: Array,
        z: Array,
        channels: ScanChannels,
        cache: LayerCache,
        batch: ForwardBatch,
        *,
        offset: int = 0,
    ) -> Array:
        """The selective scan of Mamba 1 (Gu & Dao 2023, arXiv 2312.00752) with its gate.

        Each channel has a state S of N numbers. With dt = softplus(dt + dt_bias):
        S = exp(dt * decay) * S + dt * x * b, and the result is (S c + skip * x) * silu(z).

        Args:
            x, z: [T, C] of one type, rows may be strided.
            dt: float32 [T, C], rows may be strided, as those of b and c.
            b, c: float32 [T, N].
            offset: of the states [N, C] in a state, which may have others beside them. With draft tokens D, rows [C]
                follow: q, a number h that is 0 or 1, and for each draft dt and dt * x; then b [2, D, N] of the drafts.
                A step reads b[h] and writes the other, as all channels have the same b. See ``scan_numbers``.

        Returns:
            [T, C] of the type of x, computed in float32 and rounded once.
        """

    @abstractmethod
    def ssd_scan(
        self,
        xbc: Array,
        dt: Array,
        heads: ScanHeads,
        cache: LayerCache,
        batch: ForwardBatch,
        *,
        z: Array | None = None,
        offset: int = 0,
        out_dtype: DType | None = None,
    ) -> Array:
        """The selective scan of Mamba 2, with a gate (state space duality: Dao & Gu 2024, arXiv 2405.21060).

        The state of head h is a matrix S [state_size, head_dim]; b and c are those of group h * groups // heads. With
        dt = softplus(dt_scale * dt + dt_bias), kept within ``dt_limits``: S = exp(dt * decay) * S + b (dt * x), and the
        result is (c S + skip * x) * scale, with z times silu(gate_scale * z).

        Args:
            xbc: [T, heads * head_dim + 2 * groups * state_size]: x, b, c; rows may be strided.
            dt: [T, heads], of the type of xbc, rows may be strided, as those of z.
            z: [T, heads * head_dim] of the type of xbc.
            offset: of the matrices [heads, state_size, head_dim] in a state, which may have others beside them. With
                draft tokens D, [heads, 1 + D * (1 + state_size + head_dim)] numbers follow: q, and for each draft the
                factor of S, b and dt * x. See ``ssd_numbers``.
            out_dtype: of the result; None: that of xbc.

        Returns:
            [T, heads * head_dim], computed in float32 and rounded once.
        """

    @abstractmethod
    def silu_gate(self, x: Array, gate: Array, scale: float = 1.0) -> Array:
        """x * silu(scale * gate) of the gate's type; x float32 [T, C], gate [T, C], rows may be strided."""

    @abstractmethod
    def sigmoid_gate(self, x: Array, gate: Array) -> Array:
        """x * sigmoid(gate), both [T, C] of one type with perhaps strided rows; in place."""

    # The paged KV cache.

    @abstractmethod
    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes of one KV cache block of one layer: keys, values, scales and padding.

        Raises:
            ConfigError: the backend does not support such a cache.
        """

    @abstractmethod
    def make_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        """The KV cache of ``layers`` layers of one group, all zero; ConfigError as in ``block_bytes``."""

    def make_host_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        """Like ``make_group_cache``, in host memory, for swapped blocks."""
        return self.make_group_cache(spec, layers, blocks, block_size)

    def make_cache(self, groups: Sequence[LayerGroup], blocks: Sequence[int], block_size: int) -> list[LayerCache]:
        """The KV cache of all layers, in order, with ``blocks[i]`` blocks for group i."""
        return _in_layer_order(groups, blocks, block_size, self.make_group_cache)

    def make_host_cache(self, groups: Sequence[LayerGroup], blocks: Sequence[int], block_size: int) -> list[LayerCache]:
        """Like ``make_cache``, in host memory, for swapped blocks."""
        return _in_layer_order(groups, blocks, block_size, self.make_host_group_cache)

    @abstractmethod
    def copy_blocks(self, caches: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """Copies blocks (source, target) in every layer.

        A source may have several targets, a target has one source. All sources are read before any target is written.
        """

    @abstractmethod
    def swap_blocks(self, sources: list[LayerCache], targets: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """Copies blocks (source, target) from one cache to another, in every layer.

        Both are caches of this backend, with equal shapes and types except for the number of blocks.
        """

    def host_bytes(self, count: int) -> np.ndarray:
        """Uninitialised host memory, uint8 [count], for ``read_blocks`` and ``write_blocks``; from any thread."""
        return np.empty(count, np.uint8)

    @abstractmethod
    def read_blocks(self, caches: list[LayerCache], blocks: list[int], rows: np.ndarray) -> Wait:
        """Copies the bytes of blocks to host memory: a row has keys, values and scales of all layers, in their order.

        After the work that is queued on the device, and before any later work.

        Args:
            rows: uint8 [n, bytes of a block in all these layers], contiguous; complete when the result has returned.
        """

    @abstractmethod
    def write_blocks(self, caches: list[LayerCache], blocks: list[int], rows: np.ndarray) -> Wait:
        """The reverse of ``read_blocks``; ``rows`` must not change until the result has returned."""

    # Collectives of a tensor-parallel group; a single rank sums nothing.

    def join(self, group: Communicator) -> None:
        """Makes the backend a rank of the group."""
        self.group = group

    @abstractmethod
    def all_reduce(self, x: Array, bias: Array | None = None, add: Array | None = None) -> Array:
        """The sum of x, contiguous float32 [T, width], over the ranks of ``group``, then + bias, then + add.

        On all ranks alike, in the order of a product's own bias and ``add``. The memory of x may be reused.

        Args:
            bias: float32 [width].
            add: float32 [T, width].
        """

    @abstractmethod
    def all_gather(self, x: Array) -> Array:
        """The ranks' x, contiguous float32 [T, width], concatenated in rank order: [T, size * width]."""


class PartedForward:
    """A forward that is run in parts; a backend that cannot interrupt one runs all of it at once, as here."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._batch: ForwardBatch | None = None

    def begin(self, batch: ForwardBatch) -> None:
        """Starts a new batch and drops one that is not finished."""
        self._batch = batch

    def advance(self, seconds: float) -> ForwardOutput | None:
        """Computes for about ``seconds``, at least some rows of an operation; the output once all is computed."""
        batch, self._batch = self._batch, None
        assert batch is not None, "begin comes first"
        return self._forward(batch)


class Communicator(Protocol):
    """One rank of a tensor-parallel group; all ranks make the same calls in the same order.

    Arrays are tensors of a GPU; on a CPU they are numpy's or torch's, and become each other over the same memory.
    """

    @property
    def rank(self) -> int:
        """This rank: 0 to ``size - 1``."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_reduce(self, x: Any) -> Any:
        """The sum over the ranks, on every rank; x, contiguous float32, is overwritten.

        The ranks are joined as a binary tree, as even as possible: (0 + 1) + (2 + 3), (0 + 1) + 2.
        """
        ...

    def all_gather(self, x: Any) -> Any:
        """The ranks' x [n, width], contiguous float32, concatenated in rank order: [n, size * width], on every rank."""
        ...


# Attention of a layer, and its KV cache.


class PositionBias:
    """Numbers that are added to scores by distance, float32 [heads, 2 * reach + 1]; written in place.

    Number ``reach + d`` of a head is for keys d positions after the query. The first ``MARGIN`` numbers of a head are
    equal, and so are the last ones: they stand for all greater distances.
    """

    #: At least the width of any kernel's vectors.
    MARGIN = 16

    def __init__(self, values: np.ndarray, reach: int) -> None:
        self.values, self.reach = values, reach

    @classmethod
    def zeros(cls, heads: int, longest: int) -> PositionBias:
        """For numbers that are the same from the distance ``longest`` on."""
        reach = longest + cls.MARGIN
        return cls(np.zeros((heads, 2 * reach + 1), np.float32), reach)

    def of_heads(self, heads: slice) -> PositionBias:
        """The numbers of some heads, over the same memory."""
        return PositionBias(self.values[heads], self.reach)

    @property
    def layout(self) -> tuple[int, int]:
        """Numbers from one head to the next, and ``reach``."""
        return self.values.shape[1], self.reach


@dataclass(frozen=True)
class AttentionTemperature:
    """Factor of queries that grows with their position: 1 + beta * log(1 + floor((position + offset) / period))."""

    beta: float
    period: int
    offset: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of a layer."""

    #: Scores are query * key * scale.
    scale: float
    #: A token attends to itself and the ``window - 1`` tokens before it; None: to itself and all tokens before it. If
    #: attention is not causal, to itself and the ``window`` tokens on either side of it.
    window: int | None = None
    #: Scores become ``soft_cap * tanh(score / soft_cap)``; None: no cap.
    soft_cap: float | None = None
    #: ALiBi (Press et al. 2021): a slope for each query head of this rank; slope * (position of the key - position of
    #: the query) is added to the scores, after the soft cap.
    alibi_slopes: tuple[float, ...] | None = None
    #: Whether a token attends to no later token. If not, it attends to the whole context, or to its window.
    causal: bool = True
    #: Over a latent cache: a token's value is the first ``value_dim`` numbers of its key.
    value_dim: int | None = None
    #: Cross attention: the context is that of the batch's cross tables and lengths, all of which is seen.
    cross: bool = False
    #: Whether tokens of an image see later ones of the same image, up to the batch's ``sees_until``. Causal only.
    sees_spans: bool = False
    #: Relative position bias (Raffel et al. 2020, section 2.1), after the soft cap; of the query heads of this rank.
    bias: PositionBias | None = None
    #: Attention sinks, float32 [query heads of this rank]: a logit for each head that joins the softmax's denominator
    #: and has no value, so that a token may attend to nothing (gpt-oss: arXiv 2508.10925, section 2.2).
    sinks: Array | None = field(default=None, compare=False)
    #: Whether windows are chunks of the context (Llama 4): a token attends to itself and the tokens before it from the
    #: last multiple of ``window`` on. Causal only.
    chunked: bool = False

    @property
    def before(self) -> int | None:
        """Maximum number of tokens before itself that a token attends to; None: all."""
        return self.window - 1 if self.window is not None and self.causal else self.window

    @property
    def after(self) -> int | None:
        """Maximum number of tokens after itself that a token attends to; None: all."""
        return 0 if self.causal else self.window


@dataclass(slots=True)
class LayerCache:
    """KV cache of one layer, in the layout of the backend that made it."""

    key: Array
    #: The same array as ``key`` in a latent cache.
    value: Array
    #: KV group of the layer: index of its block tables and slot mapping in the batch.
    group: int = field(default=0, kw_only=True)
    #: Of a recurrent state: tokens of a block, by which its block tables are indexed; 0: keys and values.
    state_tokens: int = field(default=0, kw_only=True)
    #: Of a recurrent state: ``KVSpec.draft_tokens``.
    draft_tokens: int = field(default=0, kw_only=True)


def conv_numbers(taps: int, channels: int, draft_tokens: int = 0) -> int:
    """Numbers of ``Kernels.causal_conv`` in a block of states."""
    return (taps - 1 + (draft_tokens + 1 if draft_tokens else 0)) * channels


def delta_numbers(
    value_heads: int, key_dim: int, value_dim: int, draft_tokens: int = 0, *, per_channel: bool = False
) -> int:
    """Numbers of ``Kernels.gated_delta_rule`` in a block of states."""
    change = (key_dim if per_channel else 1) + key_dim + value_dim
    return value_heads * (key_dim * value_dim + (1 + draft_tokens * change if draft_tokens else 0))


def scan_numbers(channels: int, state_size: int, draft_tokens: int = 0) -> int:
    """Numbers of ``Kernels.selective_scan`` in a block of states."""
    changes = (2 + 2 * draft_tokens) * channels + 2 * draft_tokens * state_size if draft_tokens else 0
    return state_size * channels + changes


def ssd_numbers(heads: int, head_dim: int, state_size: int, draft_tokens: int = 0) -> int:
    """Numbers of ``Kernels.ssd_scan`` in a block of states."""
    changes = 1 + draft_tokens * (1 + state_size + head_dim) if draft_tokens else 0
    return heads * (state_size * head_dim + changes)


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of ``Kernels.gated_delta_rule`` and their weights."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float
    #: float32 [value_heads], negative: -exp(A_log).
    decay: Array
    #: float32 [value_heads], or with ``per_channel`` [value_heads * key_dim].
    dt_bias: Array
    #: float32 [value_dim]: the weight of the norm.
    norm: Array
    #: With 2 a step may turn a part of the state around (negative eigenvalues; Grazzi et al. 2024, arXiv 2411.12537).
    beta_scale: float = 1.0
    #: Whether each key channel has a decay of its own.
    per_channel: bool = False
    gate: Literal["silu", "sigmoid"] = "silu"


@dataclass(frozen=True)
class ScanChannels:
    """The weights of ``Kernels.selective_scan``."""

    #: float32 [N, C], negative: -exp(A_log).
    decay: Array
    #: float32 [C]
    dt_bias: Array
    #: float32 [C]: D.
    skip: Array


@dataclass(frozen=True)
class ScanHeads:
    """The heads of ``Kernels.ssd_scan`` and their weights."""

    heads: int
    groups: int
    head_dim: int
    state_size: int
    #: float32 [heads], negative: -exp(A_log).
    decay: Array
    #: float32 [heads]
    dt_bias: Array
    #: float32 [heads]: D.
    skip: Array
    #: Bounds of dt after softplus.
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    #: Factors of dt, of the gate, and of the result.
    dt_scale: float = 1.0
    gate_scale: float = 1.0
    scale: float = 1.0


def check_pairs(pairs: Sequence[tuple[int, int]], sources: int, targets: int) -> None:
    """Raises IndexError if a block of the pairs (source, target) is not within ``sources`` and ``targets`` blocks."""
    for source, target in pairs:
        if not (0 <= source < sources and 0 <= target < targets):
            raise IndexError(
                f"cannot copy block {source} of {sources} to block {target} of {targets}: index out of range"
            )


def check_rows(caches: Sequence[LayerCache], blocks: Sequence[int], rows: np.ndarray, row_bytes: int) -> None:
    """Raises if a block is in none of the caches (IndexError), or the rows are not those of the blocks (ValueError)."""
    available = min((len(cache.key) for cache in caches), default=0)
    for block in blocks:
        if not 0 <= block < available:
            raise IndexError(f"block {block} of {available} cannot be read or written: index out of range")
    if rows.shape != (len(blocks), row_bytes) or rows.dtype != np.uint8 or not rows.flags.c_contiguous:
        raise ValueError(
            f"{len(blocks)} blocks need contiguous rows, uint8 {[len(blocks), row_bytes]}, not {rows.dtype} "
            f"{[*rows.shape]}"
        )


def no_wait() -> None:
    """The ``Wait`` for a copy that is done."""


def _in_layer_order(
    groups: Sequence[LayerGroup],
    blocks: Sequence[int],
    block_size: int,
    make: Callable[[KVSpec, int, int, int], list[LayerCache]],
) -> list[LayerCache]:
    caches: dict[int, LayerCache] = {}
    for index, (group, count) in enumerate(zip(groups, blocks, strict=True)):
        made = make(group.spec, len(group.layers), count, group.spec.places(block_size))
        for layer, cache in zip(group.layers, made, strict=True):
            cache.group, cache.draft_tokens = index, group.spec.draft_tokens
            caches[layer] = cache
    return [caches[layer] for layer in sorted(caches)]


# Packed weights.


class StoredForm(NamedTuple):
    """How a backend keeps a quantised matrix of a file."""

    #: Of a weight, with its share of scales.
    bits: float
    #: Whether the values are those of the file, or quantised again.
    is_exact: bool


#: Activation of a product: silu(x) = x * sigmoid(x), gelu by erf, gelu by tanh (Hendrycks & Gimpel 2016), gelu as
#: x * sigmoid(1.702 x) (same, section 2), relu, or the square of relu (So et al. 2021). "swiglu_oai" is the clamped
#: SwiGLU of gpt-oss (swigluoai in vLLM): of a gated weight quick_gelu(min(gate, 7)) * (1 + up), with up clamped to -7
#: and 7; of others the first factor.
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu_oai", "relu2"]
#: Greatest gate, and greatest magnitude of up, in "swiglu_oai".
SWIGLU_LIMIT = 7.0


class Xielu(NamedTuple):
    """xIELU (Huang & Schlag 2024): positive x^2 + beta x above 0, else negative (e^min(x, eps) - 1 - x) + beta x."""

    positive: float
    negative: float
    beta: float
    eps: float


class PackedWeight(ABC):
    """A weight [N, K] with its bias, made by ``Kernels.pack``; there is a class for each backend and format."""

    #: Whether the first half of the N rows is a gate projection and the second half the up projection.
    gated: bool
    #: Whether ``rows`` gives the exact values of the packed matrix, so that a tied embedding needs no table.
    has_rows = False

    def rows(self, ids: Array, first: int, *, scale: float, dtype: DType) -> Array:
        """scale * rows of the weight, rounded to ``dtype`` first, for ids of ``Kernels.embedding``: float32 [T, K]."""
        raise NotImplementedError(f"{type(self).__name__} has no rows to look up")

    @abstractmethod
    def __call__(
        self, x: Array, out_dtype: DType | None = None, add: Array | None = None, activation: Activation | None = None
    ) -> Array:
        """activation(x W^T + bias + add); of a gated weight activation(gate) * up, each a half of the columns.

        On backends with batch-invariant results, a row of zeros in ``add`` does not change the bits of the row.

        Args:
            x: [T, K], rows may be strided; of the weight's type, or float32, which is rounded to it.
            out_dtype: of the result; x's type if None. float32 for logits, as the best two often tie in bfloat16.
            add: float32 [T, N]: the residual stream, or an adapter's product. A float32 result of the same shape may
                reuse its memory.
            activation: required for a gated weight, optional for others.

        Returns:
            [T, N]; [T, N / 2] of a gated weight.
        """


class PackedHeads(ABC):
    """A matrix [N, K] for each of H heads, made by ``Kernels.pack_heads``."""

    @abstractmethod
    def __call__(self, x: Array) -> Array:
        """Each head times its own matrix: x [T, H, K], tokens and heads strided, to [T, H, N] of the same type."""


# Mixtures of experts.


@dataclass(frozen=True)
class RoutingSpec:
    """How experts are chosen from the logits of a router, and weighted.

    Scores are the softmax of a token's logits or the sigmoid of each, in float32. The ``top_k`` experts with the
    highest scores are chosen, of equal ones the lowest; with a bias, those with the highest sum of score and bias. A
    weight is the score, without the bias. Sigmoids without bias and groups are compared by their logits: those of
    large logits are all 1.

    "sparsemixer" (Phi-3.5-MoE; Liu et al. 2023, arXiv 2310.00811) chooses the experts with the highest logits, one
    after the other. The weight of one is its softmax among those that are left and near it, which are the ones with
    (its logit - logit) / max(|logit|, its logit) <= 2 * jitter.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    #: Whether the weights are divided by their sum, or by ``least_sum`` if that is greater.
    renormalize: bool = False
    least_sum: float = 0.0
    jitter: float = 0.0
    #: Factor of the weights, applied last.
    scale: float = 1.0
    #: Number of equal groups of experts; only experts of the best ``top_groups`` groups are chosen (DeepSeek-AI 2024,
    #: arXiv 2405.04434, section 2.2.2).
    num_groups: int = 1
    top_groups: int = 1
    #: Number of highest scores that are summed to a group's score: 1 in DeepSeek-V2, 2 in V3.
    best_of_group: int = 1
    #: See ``Kernels.pack_experts``.
    weighs_input: bool = False
    #: Number of experts after the routed ones that every token has: in the last slots, weighted by the sigmoid of their
    #: logits.
    shared: int = 0

    def check(self, num_experts: int) -> None:
        """Raises ConfigError if the number of routed experts does not fit the groups and ``top_k``."""
        groups, size = self.num_groups, num_experts // max(1, self.num_groups)
        if groups < 1 or num_experts % groups or not 1 <= self.top_groups <= groups:
            raise ConfigError(f"{num_experts} experts cannot be limited to {self.top_groups} of {groups} equal groups")
        if not 1 <= self.best_of_group <= size or not 1 <= self.top_k <= size * self.top_groups:
            raise ConfigError(
                f"{self.top_k} experts of a token cannot be chosen from {size * self.top_groups}, with groups of "
                f"{size} compared by their best {self.best_of_group}"
            )


class PackedExperts(ABC):
    """The feed-forward networks of a layer's experts, made by ``Kernels.pack_experts``."""

    @abstractmethod
    def __call__(self, x: Array, experts: Array, weights: Array, add: Array | None = None) -> Array:
        """add + the sum over the token's experts of weight * down(activation(gate(x)) * up(x)).

        Without gates, of weight * down(activation(up(x))).

        The sum is in ascending order of the experts, whatever the order of the slots: it depends on the token alone, so
        that batch-invariant backends can hold it, and lets a backend read each expert's weights once. The weights of
        experts that no token has are not read.

        Args:
            x: [T, E], rows may be strided.
            experts: int32 [T, slots], each below the number of experts, those of a token distinct.
            weights: float32 [T, slots].
            add: float32 [T, E]; its memory may be reused.

        Returns:
            Float32 [T, E].
        """


# Low-rank products of adapters (LoRA, Hu et al. 2021, section 4.1).

#: Value that changes no bit of its summand: x + -0.0 has the bits of x for every x, zeros included.
NEGATIVE_ZERO = -0.0


class LowRankShape(NamedTuple):
    """The slots for adapters of one layer, on this rank."""

    #: Of an embedding: the rows of its table.
    inputs: int
    #: Of each part; of an embedding: its width.
    outputs: tuple[int, ...]
    #: Adapters that are held at once.
    slots: int
    max_rank: int
    #: Of the network.
    dtype: DType


class LowRankPart(NamedTuple):
    """The two matrices of an adapter for one part of a layer's outputs."""

    #: [rank, inputs] of any floating type.
    down: np.ndarray
    #: [outputs, rank] of any floating type, multiplied by the adapter's scale.
    up: np.ndarray


#: An adapter's matrices for one layer in host memory, made by ``pack``.
PackedAdapter: TypeAlias = Any


class Adapters(ABC):
    """Makes a backend's low-rank products, and holds the adapter slot of each row of the current step."""

    low_rank: ClassVar[type[LowRank]]
    low_rank_embedding: ClassVar[type[LowRankEmbedding]]

    def __init__(self) -> None:
        self._tokens: Array | None = None
        self._sampled: Array | None = None

    def begin(self, batch: ForwardBatch) -> None:
        """Called before a step's network: its low-rank products are of the adapters in ``batch.adapters``."""
        tokens = batch.adapters if batch.has_adapters else None
        self.use(tokens, None if tokens is None or batch.all_sampled else self._take(tokens, batch.sampled_rows))

    @abstractmethod
    def _take(self, slots: Array, rows: Array) -> Array:
        """The slots of these rows."""

    def use(self, tokens: Array | None, sampled: Array | None = None) -> None:
        """Like ``begin``, for products of any rows.

        Args:
            tokens: int32 [n], their slots; None: none has an adapter.
            sampled: of the rows that logits are computed for; None: they are the same.
        """
        self._tokens, self._sampled = tokens, tokens if sampled is None else sampled

    def slots(self, *, sampled: bool = False) -> Array | None:
        """The slots of the step's tokens, int32 [T], or of its sampled rows, [N], -1 of a row without an adapter.

        None if no row has one, and in recorded steps, which take the slots from the recording.
        """
        return self._sampled if sampled else self._tokens

    def make_low_rank(self, shape: LowRankShape, *, sampled: bool = False) -> LowRank:
        """Empty slots for the low-rank products of a linear layer.

        ``sampled``: whether the rows of x are the step's sampled rows, not its tokens.
        """
        return self.low_rank(self, shape, sampled=sampled)

    def make_low_rank_embedding(self, shape: LowRankShape) -> LowRankEmbedding:
        """Empty slots for the low-rank products of a token embedding."""
        return self.low_rank_embedding(self, shape)


class LowRank(ABC):
    """The low-rank products of a linear layer, made by ``Adapters.make_low_rank``."""

    def __init__(self, adapters: Any, shape: LowRankShape, *, sampled: bool = False) -> None:
        """``adapters``: the backend's, which make it."""
        self.inputs, self.outputs, self.slots, self.max_rank, self.dtype = shape
        self._adapters, self._sampled = adapters, sampled

    def check(self, parts: Sequence[LowRankPart | None]) -> None:
        """Raises AdapterError if the matrices do not fit the layer."""
        if len(parts) != len(self.outputs):
            raise AdapterError(f"a layer of {len(self.outputs)} parts has no low-rank products of {len(parts)}")
        for part, outputs in zip(parts, self.outputs, strict=True):
            if part is not None:
                check_part(part, self.inputs, outputs, self.max_rank)

    @abstractmethod
    def pack(self, parts: Sequence[LowRankPart | None]) -> PackedAdapter:
        """The matrices of an adapter in host memory, rounded to the layer's type, for ``place``.

        Any thread may call it while steps run.

        Args:
            parts: for each part of the outputs; None where the adapter has none. Ranks may differ.

        Raises:
            AdapterError: see ``check``.
        """

    @abstractmethod
    def place(self, slot: int, packed: Any | None) -> None:
        """Replaces a slot's adapter by a result of ``pack``, or empties the slot; between steps."""

    @abstractmethod
    def __call__(self, x: Array, add: Array | None = None) -> Array | None:
        """add + up(down(x)) of each row's adapter, see ``Adapters.begin``: the ``add`` of the layer's product.

        Rows whose slot is -1 or empty, and columns of parts that their adapter does not have, keep the bits of ``add``;
        without it they are -0.0, which changes no bit when it is added. x and down(x) are rounded to the layer's
        type. On batch-invariant backends a row's bits do not depend on the other rows.

        Args:
            x: [T, inputs], rows may be strided; of the layer's type or float32.
            add: float32 [T, sum of outputs]; its memory may be reused.

        Returns:
            Float32 [T, sum of outputs]; ``add`` itself, perhaps None, if no row of the step has an adapter. In a
            recorded step it is a buffer, which products ignore in steps without adapters.
        """


class LowRankEmbedding(ABC):
    """The low-rank products of a token embedding, made by ``Adapters.make_low_rank_embedding``."""

    def __init__(self, adapters: Any, shape: LowRankShape) -> None:
        self.rows, (self.outputs,), self.slots, self.max_rank, self.dtype = shape
        self._adapters = adapters

    @abstractmethod
    def pack(self, part: LowRankPart) -> PackedAdapter:
        """Like ``LowRank.pack``, for down [rank, rows] and up [outputs, rank]."""

    @abstractmethod
    def place(self, slot: int, packed: Any | None) -> None:
        """Like ``LowRank.place``."""

    @abstractmethod
    def __call__(self, ids: Array, add: Array, first: int = 0) -> Array:
        """add + up(column id - first of down) of each token's adapter; ids outside ``down`` add nothing.

        Args:
            ids: int64 [T], the batch's token ids.
            add: float32 [T, outputs]; its memory is reused.
            first: the id of column 0.
        """


def check_part(part: LowRankPart, inputs: int, outputs: int, max_rank: int) -> None:
    """Raises AdapterError unless the matrices are [rank, inputs] and [outputs, rank], and rank is 1 to ``max_rank``."""
    down, up = tuple(part.down.shape), tuple(part.up.shape)
    rank = down[0] if down else 0
    if down != (rank, inputs) or up != (outputs, rank):
        raise AdapterError(
            f"low-rank matrices of shapes {list(down)} and {list(up)} do not fit a layer of {inputs} inputs and "
            f"{outputs} outputs: they must be [rank, {inputs}] and [{outputs}, rank]"
        )
    if not 1 <= rank <= max_rank:
        raise AdapterError(f"rank {rank} is not within 1 and max_lora_rank, {max_rank}")


def round_part(part: LowRankPart, dtype: DType) -> LowRankPart:
    """Copies of both matrices, rounded to ``dtype`` and contiguous."""
    return LowRankPart(*(np.array(matrix, dtype.numpy, order="C") for matrix in part))


class KernelClock:
    """Wraps every kernel of a backend and sums the time spent inside.

    Nested calls are counted once: calls within the backend are not wrapped, and a captured forward counts as a whole.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.seconds = 0.0

    def time(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed as a kernel."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, start = self.seconds, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds = before + time.perf_counter() - start

        return timed

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        """The backend's capture. A replay is timed as one kernel; an uncaptured forward calls timed kernels."""
        captured = self._kernels.capture(forward, largest)
        return captured if captured is forward else self.time(captured)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._kernels, name)
        if not callable(attribute):
            return attribute
        timed = self.time(attribute)
        setattr(self, name, timed)  # the next access does not come here
        return timed
