"""The kernels of a step at the shapes of a model: what each reads and computes, and how to run it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType, rounded
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import Forward, ForwardBatch, ForwardOutput, make_batch
from octavo.kernels.interface import (
    Array,
    AttentionSpec,
    DeltaHeads,
    Kernels,
    LayerCache,
    LowRank,
    LowRankPart,
    LowRankShape,
    PackedWeight,
)
from octavo.layers.gated_delta import DeltaShape
from octavo.layers.layer import Weight
from octavo.models.network import Network, build_without_weights, matrices, size_bytes

#: Tokens of a block of the KV cache.
BLOCK = 16


@dataclass(frozen=True)
class Shapes:
    """The sizes that are measured."""

    #: Rows of the matrix products.
    rows: list[int]
    #: (sequences, context) of decode attention.
    decodes: list[tuple[int, int]]
    #: Lengths of prompts for prefill attention.
    prefills: list[int]


@dataclass(frozen=True)
class Types:
    """Types of activations, weights and KV cache."""

    #: Of activations, and of weights that are not quantised.
    dtype: DType
    #: "int8", "int4" or "fp8"; None: not quantised.
    quantization: str | None = None
    #: Of the KV cache, as in ``EngineConfig.kv_cache_dtype``.
    kv_cache_dtype: str = "auto"

    def network(self, config: ModelConfig) -> Network:
        """The network in these types, without memory for its weights."""
        return build_without_weights(config, self.dtype, self.quantization, self.kv_cache_dtype)


def cpu_shapes(rows: list[int]) -> Shapes:
    """Sizes that a few cores compute within milliseconds."""
    decodes = [(1, 128), (1, 1024), (1, 4096), (16, 128), (16, 1024), (16, 4096), (64, 1024)]
    return Shapes(rows, decodes, [128, 512, 2048])


def gpu_shapes(rows: list[int]) -> Shapes:
    """Sizes that fill a GPU."""
    decodes = [(1, 1024), (1, 8192), (8, 8192), (32, 1024), (32, 8192), (64, 1024), (256, 1024)]
    return Shapes(rows, decodes, [512, 2048, 8192])


@dataclass(frozen=True)
class KernelCase:
    """The work of one kernel at one shape."""

    kernel: str
    shape: str
    rows: int
    bytes: float
    flops: float
    #: Calls in one run: one a layer, as in a step, so that weights are in the processor's caches only as in a step.
    calls: int
    forward: Forward
    batch: ForwardBatch
    #: Whether memory is read in pieces of some kilobytes, not one after the other.
    in_pieces: bool = False
    #: What is multiplied, which decides on the peak: "float32", "bfloat16" or "int8".
    arithmetic: str = "float32"


def linear_cases(kernels: Kernels, c: ModelConfig, types: Types, shapes: Shapes) -> Iterator[KernelCase]:
    """The matrix products of a layer and of the head, made one at a time as their tensors are large."""
    for name, weights in _layers(c, types, head=True).items():
        for use in _USES.get(name, [""]):
            yield from _linear_cases(kernels, name, weights, use, types.dtype, shapes.rows)


def _layers(c: ModelConfig, types: Types, *, head: bool = False) -> dict[str, list[Weight]]:
    """The matrices that every token is multiplied with, by name; with or without the head."""
    layers: dict[str, list[Weight]] = {}
    for weight in matrices(types.network(c)):
        if weight.active == 1 and (head or weight.kind != "head"):
            layers.setdefault(weight.name.split(".")[-2], []).append(weight)
    return layers


#: Of the matrices that a product goes through in turn.
_MOST_BYTES = 1 << 30

#: Fused variants that a step uses, by the layer's name; "" is the plain product.
_USES = {"o_proj": ["", "added"], "gate_up_proj": ["", "gated"], "down_proj": ["", "added"]}


def _linear_cases(
    kernels: Kernels,
    name: str,
    weights: list[Weight],
    use: str,
    dtype: DType,
    rows: list[int],
) -> Iterator[KernelCase]:
    """The product of one layer, for each number of rows."""
    weight = weights[0]
    outputs, inputs = weight.shape
    kind = weight.dtype if weight.dtype in ("int8", "int4", "fp8") else None
    packed = []
    # As many as no cache holds, at most those of all layers.
    weights = weights[: max(2, -(-_MOST_BYTES // size_bytes(weight)))]
    for _ in weights:
        values = _random(outputs, inputs, dtype=dtype)
        parts = np.split(values, 2) if use == "gated" else [values]
        packed.append(kernels.pack(parts, None, kind, dtype=dtype, gated=use == "gated", pieces=weight.pieces))
    for count in rows:
        x = kernels.array(_random(count, inputs, dtype=dtype))
        options: dict[str, Any] = {}
        if use == "gated":
            options = {"activation": "silu"}
        elif use == "added":
            options = {"out_dtype": DType.FLOAT32, "add": kernels.zeros((count, outputs), DType.FLOAT32)}
        elif weight.kind == "head":
            options = {"out_dtype": DType.FLOAT32}
        yield KernelCase(
            f"linear {name}{use and ', ' + use}",
            f"{outputs} x {inputs}",
            count,
            size_bytes(weight),
            2.0 * outputs * inputs * count,
            len(weights),
            _repeated(packed, x, options),
            _decodes(kernels, count, 1),
            arithmetic="int8" if kind in ("int8", "int4") else _name(dtype),
        )


def _name(dtype: DType) -> str:
    return "bfloat16" if dtype is DType.BFLOAT16 else "float32"


#: Adapters of the low-rank products, and their rank.
_ADAPTERS, _RANK = 8, 16


def low_rank_cases(kernels: Kernels, c: ModelConfig, types: Types, shapes: Shapes) -> Iterator[KernelCase]:
    """What adapters add to each product of a layer: each row has one of several, in turn."""
    for name, weights in _layers(c, types).items():
        outputs, inputs = weights[0].shape
        products = []
        for _ in weights:
            product = kernels.adapters.make_low_rank(LowRankShape(inputs, (outputs,), _ADAPTERS, _RANK, types.dtype))
            for slot in range(_ADAPTERS):
                down, up = (_random(*shape, dtype=types.dtype) for shape in ((_RANK, inputs), (outputs, _RANK)))
                product.place(slot, product.pack([LowRankPart(down, up)]))
            products.append(product)
        for rows in shapes.rows:
            x = kernels.array(_random(rows, inputs, dtype=types.dtype))

            def forward(
                batch: ForwardBatch,
                x: Array = x,
                products: list[LowRank] = products,
            ) -> ForwardOutput:
                kernels.adapters.begin(batch)
                for product in products:
                    out = product(x)
                assert out is not None
                return ForwardOutput(out)

            numbers = _RANK * (outputs + inputs)
            yield KernelCase(
                f"low-rank {_RANK} {name}",
                f"{outputs} x {inputs}",
                rows,
                min(rows, _ADAPTERS) * numbers * types.dtype.itemsize,
                2.0 * numbers * rows,
                len(products),
                forward,
                _decodes(kernels, rows, 1, [row % _ADAPTERS for row in range(rows)]),
                arithmetic=_name(types.dtype),
            )


def expert_cases(kernels: Kernels, c: ModelConfig, types: Types, shapes: Shapes) -> Iterator[KernelCase]:
    """The experts of each layer, of which each row has as many random ones as a token of the model."""
    layers: dict[str, list[Weight]] = {}
    for weight in matrices(types.network(c)):
        if weight.active < 1:
            layers.setdefault(weight.name.split(".experts.")[0], []).append(weight)
    if not layers:
        return
    gate_up, down = next(iter(layers.values()))[:2]
    count = len(next(iter(layers.values()))) // 2
    slots = round(count * gate_up.active)
    values = [_random(*weight.shape, dtype=types.dtype) for weight in (gate_up, down)]
    kind, dtype = types.quantization, types.dtype
    packed = []
    for _ in layers:
        pairs = [
            (
                kernels.pack(np.split(values[0], 2), None, kind, dtype=dtype, gated=True),
                kernels.pack([values[1]], None, kind, dtype=dtype, pieces=down.pieces),
            )
            for _ in range(count)
        ]
        packed.append(kernels.pack_experts([first for first, _ in pairs], [second for _, second in pairs]))
    for rows in shapes.rows:
        x = kernels.array(_random(rows, gate_up.shape[1], dtype=dtype))
        chosen = np.ascontiguousarray(_RNG.random((rows, count)).argsort(1)[:, :slots], np.int32)
        weights = np.full((rows, slots), 1 / slots, np.float32)
        rest = kernels.array(chosen), kernels.array(weights), kernels.zeros((rows, down.shape[0]), DType.FLOAT32)

        def forward(batch: ForwardBatch, x: Array = x, rest: tuple[Array, ...] = rest) -> ForwardOutput:
            for experts in packed:
                out = experts(x, *rest)
            return ForwardOutput(out)

        size = size_bytes(gate_up, down)
        elements = math.prod(gate_up.shape) + math.prod(down.shape)
        yield KernelCase(
            "experts",
            f"{slots} of {count}, {down.shape[0]} x {down.shape[1]}",
            rows,
            len(np.unique(chosen)) * size,
            2.0 * elements * slots * rows,
            len(layers),
            forward,
            _decodes(kernels, rows, 1),
            arithmetic="int8" if types.quantization in ("int8", "int4") else _name(types.dtype),
        )


_RNG = np.random.default_rng(0)


def _random(*shape: int, dtype: DType) -> np.ndarray:
    return rounded(_RNG.standard_normal(shape, np.float32), dtype)


def _repeated(packed: list[PackedWeight], x: Array, options: dict[str, Any]) -> Forward:
    def forward(batch: ForwardBatch) -> ForwardOutput:
        for weight in packed:
            out = weight(x, **options)
        return ForwardOutput(out)

    return forward


def attention_cases(kernels: Kernels, c: ModelConfig, types: Types, shapes: Shapes) -> Iterator[KernelCase]:
    """Attention of decodes, then of prefills, one case at a time."""
    network = types.network(c)
    if all(spec.kind == "state" for spec in network.kv_specs):
        return
    spec = _attention_spec(network)
    token_bytes = spec.bytes_per_token
    pair_flops = 2.0 * c.num_heads * (spec.head_dim + (_latent_value(network) or spec.head_dim))
    for sequences, context in shapes.decodes:
        batch = _decodes(kernels, sequences, context)
        yield _attention_case(
            kernels, network, types, f"{sequences} x {context}", batch, sequences * context, token_bytes, pair_flops
        )
    for length in shapes.prefills:
        batch = _one_prefill(kernels, length)
        pairs = length * (length + 1) // 2
        yield _attention_case(
            kernels, network, types, f"prefill {length}", batch, length, token_bytes, pair_flops * pairs / length
        )


def _attention_case(
    kernels: Kernels,
    network: Network,
    types: Types,
    shape: str,
    batch: ForwardBatch,
    tokens: int,
    token_bytes: float,
    token_flops: float,
) -> KernelCase:
    blocks = int(kernels.to_numpy(batch.block_tables).max()) + 1
    rows = len(batch.positions)
    # One layer exceeds a GPU's caches; the KV cache of all layers might not fit its memory.
    kv_spec = _attention_spec(network)
    c, layers = network.config, 1
    if kernels.name == "cpu":
        layers = sum(spec.kind != "state" for spec in network.kv_specs)
    caches = kernels.make_group_cache(kv_spec, layers, blocks, BLOCK)
    _fill(kernels, caches, kv_spec, _latent_value(network), types.dtype, blocks)
    spec = AttentionSpec(c.head_dim**-0.5, value_dim=_latent_value(network))
    q = kernels.array(_random(rows, c.num_heads, kv_spec.head_dim, dtype=types.dtype))

    def forward(step: ForwardBatch) -> ForwardOutput:
        for cache in caches:
            out = kernels.paged_attention(q, cache, step, spec)
        return ForwardOutput(out.reshape(rows, -1))

    size, flops, arithmetic = tokens * token_bytes, tokens * token_flops, _name(types.dtype)
    return KernelCase("attention", shape, rows, size, flops, len(caches), forward, batch, True, arithmetic)


#: Bytes of the states of a case at least: more than any processor's caches.
_STATE_BYTES = 1 << 28


def state_cases(kernels: Kernels, c: ModelConfig, types: Types, shapes: Shapes) -> Iterator[KernelCase]:
    """The gated delta rule of a layer, if the network has any: decodes of up to 256 sequences, then prefills."""
    delta: DeltaShape | None = getattr(c, "delta", None)
    if delta is None:
        return
    for sequences in shapes.rows:
        if sequences <= 256:
            yield _delta_case(kernels, delta, types, f"{sequences} sequences", [1] * sequences, 2)
    for length in shapes.prefills:
        yield _delta_case(kernels, delta, types, f"prefill {length}", [length], length)


def _delta_case(
    kernels: Kernels, delta: DeltaShape, types: Types, shape: str, counts: list[int], end: int
) -> KernelCase:
    """``end``: position after the last token of each sequence."""
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    numbers, rows = values * delta.key_dim, sum(counts)
    state_bytes = 4 * numbers * len(counts)
    caches = kernels.make_group_cache(KVSpec.state(numbers), -(-_STATE_BYTES // state_bytes), len(counts), 1)
    for cache in caches:
        cache.state_tokens = end
    widths = (2 * keys + values, values, delta.value_heads, delta.value_heads)
    qkv, z, b, a = (kernels.array(_random(rows, width, dtype=types.dtype)) for width in widths)
    decay, dt_bias, norm = (_random(n, dtype=DType.FLOAT32) for n in (*widths[2:], delta.value_dim))
    vectors = (kernels.array(vector) for vector in (-np.abs(decay), dt_bias, norm))
    heads = DeltaHeads(delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, 1e-6, *vectors)
    tables = np.arange(len(counts), dtype=np.int32).reshape(-1, 1)
    batch = make_batch(counts, [end] * len(counts), tables, end, kernels)

    def forward(step: ForwardBatch) -> ForwardOutput:
        for cache in caches:
            out = kernels.gated_delta_rule(qkv, z, b, a, heads, cache, step)
        return ForwardOutput(out)

    inputs = (sum(widths) + values) * rows * types.dtype.itemsize
    # The state is read and written; a token multiplies it by its decay, adds to it, and is a product with it twice.
    size, flops = 2 * state_bytes + inputs, 7.0 * numbers * rows
    return KernelCase("gated delta rule", shape, rows, size, flops, len(caches), forward, batch, True)


#: Tokens whose random keys and values are written at once.
_FILLED_AT_ONCE = 4096


def _fill(
    kernels: Kernels, caches: list[LayerCache], spec: KVSpec, latent: int | None, dtype: DType, blocks: int
) -> None:
    """Numbers of the size that real ones have: denormals would be slow, unwritten pages would all map to one."""
    parts = (spec.head_dim,) * 2 if latent is None else (latent, spec.head_dim - latent)
    tokens = blocks * BLOCK
    k, v = (
        kernels.array(_random(min(tokens, _FILLED_AT_ONCE), spec.num_kv_heads, width, dtype=dtype)) for width in parts
    )
    for start in range(0, tokens, _FILLED_AT_ONCE):
        slots = np.arange(start, min(start + _FILLED_AT_ONCE, tokens))
        for cache in caches:
            kernels.reshape_and_cache(k[: len(slots)], v[: len(slots)], cache, kernels.wrap(slots))


def _attention_spec(network: Network) -> KVSpec:
    """Of the first layer with attention."""
    return next(spec for spec in network.kv_specs if spec.kind != "state")


def _latent_value(network: Network) -> int | None:
    """Of latent attention, the numbers of a cached vector that are not rotated."""
    spec = _attention_spec(network)
    return spec.head_dim - network.config.head_dim if spec.kind == "latent" else None


def _decodes(kernels: Kernels, sequences: int, context: int, adapters: list[int] | None = None) -> ForwardBatch:
    """Sequences of ``context`` tokens each that decode the last one; their blocks are interleaved."""
    blocks = -(-context // BLOCK)
    tables = np.arange(blocks * sequences, dtype=np.int32).reshape(blocks, sequences).T
    return make_batch([1] * sequences, [context] * sequences, tables, BLOCK, kernels, adapters=adapters)


def _one_prefill(kernels: Kernels, length: int) -> ForwardBatch:
    tables = np.arange(-(-length // BLOCK), dtype=np.int32).reshape(1, -1)
    return make_batch([length], [length], tables, BLOCK, kernels)
