"""What a step has to do at least: bytes to read and operations to compute, counted from the network's shape."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig

#: Bytes of a number, scales left out.
SIZES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
#: Bytes of a scale, of which int8 and fp8 caches have one for each head's key and one for its value.
_SCALE_BYTES = 4


def layer_weights(c: ModelConfig) -> int:
    """Weights in the matrices of all layers; the table of embeddings and the head are not among them."""
    attention = 2 * c.hidden_size * c.head_dim * (c.num_heads + c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)


def kind_of_head(quantization: str | None) -> str | None:
    """How the head is quantised where the layers are so: to 8 bits or, with fp8, not at all."""
    return "int8" if quantization in ("int8", "int4") else None


def weight_bytes_read(c: ModelConfig, dtype: str, quantization: str | None = None) -> int:
    """Bytes of the matrices that every step reads once: those of all layers, and the head.

    Of the table of embeddings a step reads a few rows, which are left out, as are the scales of quantised matrices.
    """
    size, head_size = SIZES[quantization or dtype], SIZES[kind_of_head(quantization) or dtype]
    return int(layer_weights(c) * size + c.vocab_size * c.hidden_size * head_size)


def kv_bytes_per_token(c: ModelConfig, cache_dtype: str) -> int:
    """Bytes that a token has in the KV cache of all layers."""
    scales = _SCALE_BYTES if cache_dtype in ("int8", "fp8") else 0
    return int(2 * c.num_layers * c.num_kv_heads * (c.head_dim * SIZES[cache_dtype] + scales))


def prefill_operations(c: ModelConfig, tokens: int) -> int:
    """Operations (a multiply-add is two) to prefill one prompt: matrices, causal attention, one row of logits."""
    products = 2 * layer_weights(c) * tokens
    pairs = tokens * (tokens + 1) // 2
    attention = 4 * c.num_layers * c.num_heads * c.head_dim * pairs
    return products + attention + 2 * c.vocab_size * c.hidden_size
