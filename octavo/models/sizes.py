"""Sizes of a network, derived from its weights and KV specs, which need no memory: ``build_without_weights``."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from octavo.core.kv_spec import NUMBER_BYTES
from octavo.core.model_config import ModelConfig
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.context import LayerContext
from octavo.layers.layer import Weight
from octavo.models.network import Network
from octavo.models.registry import make_network


def build_rank_without_weights(config: ModelConfig, context: LayerContext) -> Network:
    """The network for ``context`` on torch's meta device: its sizes can be computed, it cannot be loaded or run.

    Raises:
        As ``make_network``.
    """
    return make_network(config, replace(context, kernels=ReferenceKernels("meta"), device="meta"))


def build_without_weights(
    config: ModelConfig, dtype: str, quantization: str | None = None, kv_cache_dtype: str = "auto"
) -> Network:
    """As ``build_rank_without_weights``, of the whole network on one rank; types are values of the engine's options."""
    context = LayerContext(
        ReferenceKernels("meta"), getattr(torch, dtype), quantization=quantization, kv_cache_dtype=kv_cache_dtype
    )
    return build_rank_without_weights(config, context)


def matrices(network: Network) -> list[Weight]:
    """The matrices of the layers and the head, which every step reads, except those of experts that none chose."""
    return [weight for weight in network.weights() if weight.kind in ("linear", "head")]


def num_parameters(network: Network) -> int:
    """Numbers in the weights of this rank, tied ones once."""
    return sum(math.prod(weight.shape) for weight in _parameters(network))


def num_active_parameters(network: Network) -> int:
    """As ``num_parameters``, of a mixture of experts with as many experts as a token has."""
    return round(sum(math.prod(weight.shape) * weight.active for weight in _parameters(network)))


def _parameters(network: Network) -> list[Weight]:
    return [weight for weight in network.weights() if not weight.is_tied]


def size_bytes(*weights: Weight) -> int:
    """Bytes of these weights without scales of quantised ones."""
    return int(sum(math.prod(weight.shape) * NUMBER_BYTES[weight.dtype] for weight in weights))


def weight_bytes(network: Network) -> int:
    """Bytes of the weights in memory, without scales and padding of the backend (a lower bound)."""
    return size_bytes(*(weight for weight in network.weights() if not weight.is_tied))


def loading_bytes(network: Network, *, copies: bool) -> int:
    """Bytes in use while the weights are loaded: ``weight_bytes`` and, if packing ``copies``, what is copied.

    That is a tied head beside its table, and the largest matrix before it is packed (a lower bound, as scales and
    padding are left out).
    """
    weights = [*network.weights()] if copies else [weight for weight in network.weights() if not weight.is_tied]
    return size_bytes(*weights) + (max(map(size_bytes, matrices(network)), default=0) if copies else 0)


def kv_bytes_per_token(network: Network) -> int:
    """Bytes of a token's KV entries in all layers of this rank, without padding."""
    return sum(spec.bytes_per_token for spec in network.kv_specs)
