"""The kernels of a step at the shapes of a model: what each reads and computes, and how to run it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import Forward, ForwardBatch, ForwardOutput, make_batch
from octavo.kernels.interface import AttentionSpec, Kernels
from octavo.kernels.lora import LowRank, LowRankPart, LowRankShape
from octavo.kernels.packed_weight import PackedWeight
from octavo.layers.layer import Weight
from octavo.models.network import Network
from octavo.models.sizes import build_without_weights, matrices, size_bytes

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
    dtype: torch.dtype
    #: "int8", "int4" or "fp8"; None: not quantised.
    quantization: str | None = None
    #: Of the KV cache, as in ``EngineConfig.kv_cache_dtype``.
    kv_cache_dtype: str = "auto"

    def network(self, config: ModelConfig) -> Network:
        """The network in these types, without memory for its weights."""
        dtype = str(self.dtype).removeprefix("torch.")
        return build_without_weights(config, dtype, self.quantization, self.kv_cache_dtype)


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


def linear_cases(
    kernels: Kernels, c: ModelConfig, types: Types, shapes: Shapes, device: torch.device
) -> Iterator[KernelCase]:
    """The matrix products of a layer and of the head, made one at a time as their tensors are large."""
    for name, weights in _layers(c, types, head=True).items():
        for use in _USES.get(name, [""]):
            yield from _linear_cases(kernels, name, weights, use, types.dtype, shapes.rows, device)


def _layers(c: ModelConfig, types: Types, *, head: bool = False) -> dict[str, list[Weight]]:
    """The matrices that every token is multiplied with, by name; with or without the head."""
    layers: dict[str, list[Weight]] = {}
    for weight in matrices(types.network(c)):
        if weight.active == 1 and (head or weight.kind != "head"):
            layers.setdefault(weight.name.split(".")[-2], []).append(weight)
    return layers


#: Fused variants that a step uses, by the layer's name; "" is the plain product.
_USES = {"o_proj": ["", "added"], "gate_up_proj": ["", "gated"], "down_proj": ["", "added"]}


def _linear_cases(
    kernels: Kernels,
    name: str,
    weights: list[Weight],
    use: str,
    dtype: torch.dtype,
    rows: list[int],
    device: torch.device,
) -> Iterator[KernelCase]:
    """The product of one layer, for each number of rows."""
    weight = weights[0]
    outputs, inputs = weight.shape
    kind = weight.dtype if weight.dtype in ("int8", "int4", "fp8") else None
    packed = []
    for _ in weights:
        values = _random(outputs, inputs, dtype=dtype, device=device)
        parts = values.chunk(2) if use == "gated" else [values]
        packed.append(kernels.pack(parts, quantization=kind, gated=use == "gated", pieces=weight.pieces))
    for count in rows:
        x = _random(count, inputs, dtype=dtype, device=device)
        options: dict[str, Any] = {}
        if use == "gated":
            options = {"activation": "silu"}
        elif use == "added":
            options = {"out_dtype": torch.float32, "add": torch.zeros(count, outputs, device=device)}
        elif weight.kind == "head":
            options = {"out_dtype": torch.float32}
        yield KernelCase(
            f"linear {name}{use and ', ' + use}",
            f"{outputs} x {inputs}",
            count,
            size_bytes(weight),
            2.0 * outputs * inputs * count,
            len(weights),
            _repeated(packed, x, options),
            _decodes(count, 1, device),
            arithmetic="int8" if kind in ("int8", "int4") else _name(dtype),
        )


def _name(dtype: torch.dtype) -> str:
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


#: Adapters of the low-rank products, and their rank.
_ADAPTERS, _RANK = 8, 16


def low_rank_cases(
    kernels: Kernels, c: ModelConfig, types: Types, shapes: Shapes, device: torch.device
) -> Iterator[KernelCase]:
    """What adapters add to each product of a layer: each row has one of several, in turn."""
    for name, weights in _layers(c, types).items():
        outputs, inputs = weights[0].shape
        products = []
        for _ in weights:
            product = kernels.adapters.make_low_rank(LowRankShape(inputs, (outputs,), _ADAPTERS, _RANK, types.dtype))
            for slot in range(_ADAPTERS):
                down, up = (
                    _random(*shape, dtype=types.dtype, device=torch.device("cpu"))
                    for shape in ((_RANK, inputs), (outputs, _RANK))
                )
                product.place(slot, product.pack([LowRankPart(down, up)]))
            products.append(product)
        for rows in shapes.rows:
            x = _random(rows, inputs, dtype=types.dtype, device=device)

            def forward(
                batch: ForwardBatch,
                x: Tensor = x,
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
                _decodes(rows, 1, device, [row % _ADAPTERS for row in range(rows)]),
                arithmetic=_name(types.dtype),
            )


def expert_cases(
    kernels: Kernels, c: ModelConfig, types: Types, shapes: Shapes, device: torch.device
) -> Iterator[KernelCase]:
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
    values = [_random(*weight.shape, dtype=types.dtype, device=device) for weight in (gate_up, down)]
    packed = []
    for _ in layers:
        pairs = [
            (
                kernels.pack(values[0].chunk(2), quantization=types.quantization, gated=True),
                kernels.pack([values[1]], quantization=types.quantization, pieces=down.pieces),
            )
            for _ in range(count)
        ]
        packed.append(kernels.pack_experts([first for first, _ in pairs], [second for _, second in pairs]))
    for rows in shapes.rows:
        x = _random(rows, gate_up.shape[1], dtype=types.dtype, device=device)
        chosen = torch.rand(rows, count, device=device).argsort(1)[:, :slots].int().contiguous()
        weights = torch.full((rows, slots), 1 / slots, device=device)
        add = torch.zeros(rows, down.shape[0], device=device)

        def forward(
            batch: ForwardBatch, x: Tensor = x, rest: tuple[Tensor, ...] = (chosen, weights, add)
        ) -> ForwardOutput:
            for experts in packed:
                out = experts(x, *rest)
            return ForwardOutput(out)

        size = size_bytes(gate_up, down)
        elements = math.prod(gate_up.shape) + math.prod(down.shape)
        yield KernelCase(
            "experts",
            f"{slots} of {count}, {down.shape[0]} x {down.shape[1]}",
            rows,
            len(chosen.unique()) * size,
            2.0 * elements * slots * rows,
            len(layers),
            forward,
            _decodes(rows, 1, device),
            arithmetic="int8" if types.quantization in ("int8", "int4") else _name(types.dtype),
        )


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _repeated(packed: list[PackedWeight], x: Tensor, options: dict[str, Any]) -> Forward:
    def forward(batch: ForwardBatch) -> ForwardOutput:
        for weight in packed:
            out = weight(x, **options)
        return ForwardOutput(out)

    return forward


def attention_cases(
    kernels: Kernels, c: ModelConfig, types: Types, shapes: Shapes, device: torch.device
) -> Iterator[KernelCase]:
    """Attention of decodes, then of prefills, one case at a time."""
    network = types.network(c)
    spec = network.kv_specs[0]
    token_bytes = spec.bytes_per_token
    pair_flops = 2.0 * c.num_heads * (spec.head_dim + (_latent_value(network) or spec.head_dim))
    for sequences, context in shapes.decodes:
        batch = _decodes(sequences, context, device)
        yield _attention_case(
            kernels, network, types, f"{sequences} x {context}", batch, sequences * context, token_bytes, pair_flops
        )
    for length in shapes.prefills:
        batch = _one_prefill(length, device)
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
    blocks = int(batch.block_tables.max()) + 1
    device, rows = batch.positions.device, len(batch.positions)
    # One layer exceeds a GPU's caches; the KV cache of all layers might not fit its memory.
    c, layers = network.config, len(network.kv_specs) if device.type == "cpu" else 1
    caches = kernels.make_group_cache(network.kv_specs[0], layers, blocks, BLOCK)
    for cache in caches:  # unwritten pages would all map to one zero page
        for part in (cache.key, cache.value):
            part.copy_(torch.ones((), dtype=part.dtype, device=device).expand_as(part))
    spec = AttentionSpec(c.head_dim**-0.5, value_dim=_latent_value(network))
    q = _random(rows, c.num_heads, network.kv_specs[0].head_dim, dtype=types.dtype, device=device)

    def forward(step: ForwardBatch) -> ForwardOutput:
        for cache in caches:
            out = kernels.paged_attention(q, cache, step, spec)
        return ForwardOutput(out.view(rows, -1))

    size, flops, arithmetic = tokens * token_bytes, tokens * token_flops, _name(types.dtype)
    return KernelCase("attention", shape, rows, size, flops, len(caches), forward, batch, True, arithmetic)


def _latent_value(network: Network) -> int | None:
    """Of latent attention, the numbers of a cached vector that are not rotated."""
    spec = network.kv_specs[0]
    return spec.head_dim - network.config.head_dim if spec.kind == "latent" else None


def _decodes(sequences: int, context: int, device: torch.device, adapters: list[int] | None = None) -> ForwardBatch:
    """Sequences of ``context`` tokens each that decode the last one; their blocks are interleaved."""
    blocks = -(-context // BLOCK)
    tables = torch.arange(blocks * sequences, dtype=torch.int32).view(blocks, sequences).t().contiguous()
    return make_batch([1] * sequences, [context] * sequences, tables, BLOCK, adapters=adapters, device=device)


def _one_prefill(length: int, device: torch.device) -> ForwardBatch:
    tables = torch.arange(-(-length // BLOCK), dtype=torch.int32).view(1, -1)
    return make_batch([length], [length], tables, BLOCK, device=device)
