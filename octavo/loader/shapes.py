"""Shapes of well-known models for benchmarks: a config.json without weights and vocabulary."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from octavo.loader.model_cache import cache_dir, publish
from octavo.models.registry import model_type_of


def _decoder(
    architecture: str,
    vocab_size: int,
    width: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    context: int,
    ends: tuple[int, int],
    **others: Any,
) -> dict[str, Any]:
    """config.json of a model of Llama's kind; ``heads`` are those of queries and of keys, ``ends`` BOS and EOS."""
    return {
        "architectures": [architecture],
        "model_type": model_type_of(architecture),
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": context,
        "bos_token_id": ends[0],
        "eos_token_id": ends[1],
        **others,
    }


def _llama3(width: int, inner: int, layers: int, factor: float, **others: Any) -> dict[str, Any]:
    """A Llama 3.1 or 3.2 model."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    others |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_parameters": rope}
    others |= {"attention_bias": False, "mlp_bias": False}
    size = (128256, width, inner, layers, (32, 8), 131072, (128000, 128001))
    return _decoder("LlamaForCausalLM", *size, **others)


def _opt(width: int, layers: int, heads: int) -> dict[str, Any]:
    """An OPT model."""
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "dtype": "float16",
        "vocab_size": 50272,
        "hidden_size": width,
        "ffn_dim": 4 * width,
        "word_embed_proj_dim": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "bos_token_id": 2,
        "eos_token_id": 2,
    }


def _qwen3_moe(
    width: int, inner: int, layers: int, heads: tuple[int, int], experts: tuple[int, int, int], **others: Any
) -> dict[str, Any]:
    """A Qwen3 mixture of experts: how many, of a token, and their inner size."""
    others = {"head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, **others}
    others |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    others |= dict(zip(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), experts, strict=True))
    return _decoder("Qwen3MoeForCausalLM", 151936, width, inner, layers, heads, 40960, (151643, 151645), **others)


def _gemma3(
    window: int, width: int, inner: int, layers: int, heads: tuple[int, int], context: int, **others: Any
) -> dict[str, Any]:
    """The text part of a Gemma 3 model: every sixth layer attends to all tokens."""
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
    others |= {"sliding_window": window, "layer_types": kinds, "head_dim": 256, "query_pre_attn_scalar": 256}
    others |= {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    others |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    return _decoder("Gemma3ForCausalLM", 262144, width, inner, layers, heads, context, (2, 1), **others)


_MISTRAL = _decoder(
    "MistralForCausalLM", 32000, 4096, 14336, 32, (32, 8), 32768, (1, 2), hidden_act="silu", rms_norm_eps=1e-5
)
#: Name to the content of config.json, for load_format="dummy".
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b-shape": _llama3(2048, 8192, 16, 32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3.1-8b-shape": _llama3(4096, 14336, 32, 8.0, head_dim=128, tie_word_embeddings=False),
    "opt-125m-shape": _opt(768, layers=12, heads=12),
    "opt-13b-shape": _opt(5120, layers=40, heads=40),
    "gpt2-shape": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    # No model of this name exists: the proportions of Qwen3-30B-A3B at a thirtieth of its size.
    "qwen3-moe-1b-a0.3b-shape": _qwen3_moe(
        1024, 3072, 16, (16, 4), (48, 6, 384), head_dim=64, tie_word_embeddings=True
    ),
    "qwen3-30b-a3b-shape": _qwen3_moe(2048, 6144, 48, (32, 4), (128, 8, 768), tie_word_embeddings=False),
    "mistral-7b-v0.1-shape": _MISTRAL | {"rope_theta": 1e4, "sliding_window": 4096, "tie_word_embeddings": False},
    "gemma-3-270m-shape": _gemma3(512, 640, 2048, 18, (4, 1), 32768),
    "gemma-3-12b-shape": _gemma3(
        1024, 3840, 15360, 48, (16, 8), 131072, rope_scaling={"rope_type": "linear", "factor": 8.0}
    ),
}


def shape_folder(name: str) -> Path:
    """The folder with the config.json of a shape, in the cache.

    Raises:
        DownloadError: the cache cannot be written.
    """
    content = json.dumps(SHAPES[name], indent=2)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]

    def fill(folder: Path) -> None:
        (folder / "config.json").write_text(content, encoding="utf-8")

    return publish(cache_dir() / "shapes" / f"{name}-{digest}", fill)
