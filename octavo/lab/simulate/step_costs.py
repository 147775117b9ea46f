"""Bytes that a step of a network reads, and operations that it computes, derived from its weights and KV specs."""

from __future__ import annotations

import math

from octavo.models.network import Network, attended_specs, matrices, size_bytes


def weight_bytes_read(network: Network, tokens: int = 1) -> int:
    """Least bytes of weights that a step of ``tokens`` tokens reads: each matrix once.

    Of experts those that are chosen, on average if all are chosen equally often and independently.
    """
    return round(sum(size_bytes(weight) * (1 - (1 - weight.active) ** tokens) for weight in matrices(network)))


def layer_weights(network: Network) -> int:
    """Elements of the matrices of all layers that a token is multiplied with, without the embedding and the head."""
    weights = (weight for weight in network.weights() if weight.kind == "linear")
    return round(sum(math.prod(weight.shape) * weight.active for weight in weights))


def prefill_operations(network: Network, tokens: int) -> int:
    """Operations (a multiply-add is two) to prefill one prompt: matrices, causal attention, one row of logits.

    Recurrences are left out: they are a few percent, and not products of matrices.
    """
    c = network.config
    products = 2 * layer_weights(network) * tokens
    attends = [spec for spec in attended_specs(network) if spec.kind != "state"]
    attention = 4 * c.num_heads * sum(spec.head_dim * _pairs(tokens, spec.window) for spec in attends)
    return products + attention + 2 * c.vocab_size * c.hidden_size


def _pairs(tokens: int, window: int | None) -> int:
    """Pairs of a token of a prompt and one that it attends to, itself included."""
    near = min(tokens, window or tokens)
    return near * (near + 1) // 2 + (tokens - near) * near
