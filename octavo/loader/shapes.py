"""Shapes of well-known models for benchmarks: a config.json without weights and vocabulary."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from octavo.loader.cache import cache_dir, publish


def _llama3(factor: float, **shape: Any) -> dict[str, Any]:
    """config.json of a Llama 3.1 or 3.2 model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 128256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        **shape,
    }


def _opt(width: int, layers: int, heads: int) -> dict[str, Any]:
    """config.json of an OPT model."""
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


def _qwen3_moe(**shape: Any) -> dict[str, Any]:
    """config.json of a Qwen3 mixture of experts."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "vocab_size": 151936,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        **shape,
    }


def _gemma3(window: int, layers: int, **shape: Any) -> dict[str, Any]:
    """config.json of the text part of a Gemma 3 model: every sixth layer attends to all tokens."""
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "vocab_size": 262144,
        "num_hidden_layers": layers,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": window,
        "layer_types": kinds,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        **shape,
    }


#: Name to the content of config.json, for load_format="dummy".
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b-shape": _llama3(
        32.0,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b-shape": _llama3(
        8.0,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        head_dim=128,
        tie_word_embeddings=False,
    ),
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
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=48,
        num_experts_per_tok=6,
        moe_intermediate_size=384,
        tie_word_embeddings=True,
    ),
    "qwen3-30b-a3b-shape": _qwen3_moe(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        tie_word_embeddings=False,
    ),
    "mistral-7b-v0.1-shape": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "dtype": "bfloat16",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gemma-3-270m-shape": _gemma3(
        512,
        18,
        hidden_size=640,
        intermediate_size=2048,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=32768,
    ),
    "gemma-3-12b-shape": _gemma3(
        1024,
        48,
        hidden_size=3840,
        intermediate_size=15360,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
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
