"""Sizes of a network, derived from its weights and KV specs, which need no memory: ``build_without_weights``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.kv_spec import NUMBER_BYTES
from octavo.core.model_config import ModelConfig
from octavo.kernels.interface import AttentionSpec, Kernels
from octavo.kernels.lora import LowRankShape
from octavo.layers.context import LayerContext
from octavo.layers.layer import Weight
from octavo.models.network import Network
from octavo.models.registry import make_network


class _NoMemory:
    """What constructors of layers ask of kernels, without memory for anything."""

    def __init__(self) -> None:
        self.adapters = self

    def array(self, values: np.ndarray, dtype: DType | None = None) -> None: ...

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> None: ...

    def check_attention(self, spec: AttentionSpec) -> None: ...

    def make_low_rank(self, shape: LowRankShape, *, sampled: bool = False) -> LowRankShape:
        return shape

    def make_low_rank_embedding(self, shape: LowRankShape) -> LowRankShape:
        return shape


_NO_MEMORY = cast(Kernels, _NoMemory())


def build_rank_without_weights(config: ModelConfig, context: LayerContext) -> Network:
    """The network for ``context`` without memory: its sizes can be computed, it cannot be loaded or run.

    Raises:
        As ``make_network``.
    """
    return make_network(config, replace(context, kernels=_NO_MEMORY, positions=0))


def build_without_weights(
    config: ModelConfig,
    dtype: str,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    max_loras: int = 0,
) -> Network:
    """As ``build_rank_without_weights``, of the whole network on one rank; types are values of the engine's options."""
    context = LayerContext(
        _NO_MEMORY, DType(dtype), quantization=quantization, kv_cache_dtype=kv_cache_dtype, max_loras=max_loras
    )
    return build_rank_without_weights(config, context)


def matrices(network: Network) -> list[Weight]:
    """The matrices of the layers and the head, which every step reads, except those of experts that none chose; without
    those of a tower.
    """
    return [weight for weight in network.weights() if weight.kind in ("linear", "head") and weight.active]


def num_parameters(network: Network) -> int:
    """Numbers in the weights of this rank, tied ones once."""
    return sum(math.prod(weight.shape) for weight in _parameters(network))


def num_active_parameters(network: Network) -> int:
    """As ``num_parameters``, of a mixture of experts with as many experts as a token has, and without a tower."""
    return round(sum(math.prod(weight.shape) * weight.active for weight in _parameters(network)))


def _parameters(network: Network) -> list[Weight]:
    return [weight for weight in network.weights() if not weight.is_tied]


def size_bytes(*weights: Weight) -> int:
    """Bytes of these weights without scales of quantised ones."""
    return int(sum(math.prod(weight.shape) * NUMBER_BYTES[weight.dtype] for weight in weights))


def weight_bytes(network: Network) -> int:
    """Bytes of the weights in memory, without scales and padding of the backend (a lower bound)."""
    return size_bytes(*(weight for weight in network.weights() if not weight.is_tied))


def kv_bytes_per_token(network: Network) -> int:
    """Bytes of a token's KV entries in all layers of this rank, without padding."""
    return sum(spec.bytes_per_token for spec in network.kv_specs)
