"""The fields of config.json of each GGUF architecture, from the file's metadata.

Each function returns those that ``gguf_config.model_config`` does not, under transformers' names.
"""

from __future__ import annotations

from typing import Any

from octavo.core.errors import UnsupportedModelError
from octavo.loader.gguf_keys import Keys


def llama(keys: Keys, **changes: Any) -> dict[str, Any]:
    """The fields of config.json that Llama and its descendants share."""
    sizes = keys.sizes
    config = {
        "hidden_size": sizes["E"],
        "intermediate_size": sizes["F"],
        "num_hidden_layers": sizes["L"],
        "num_attention_heads": sizes["H"],
        "num_key_value_heads": sizes["G"],
        "head_dim": sizes["D"],
        "hidden_act": "silu",
        "max_position_embeddings": sizes["C"],
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon", default=1e-5),
    }
    if "rope_parameters" not in changes:
        config["rope_parameters"] = keys.rope()
    return config | changes


def llama_biased(keys: Keys) -> dict[str, Any]:
    """Llama, whose projections may have biases."""
    biases = {"attention_bias": keys.holds("blk.0.attn_q.bias"), "mlp_bias": keys.holds("blk.0.ffn_up.bias")}
    return llama(keys, **biases)


def mistral(keys: Keys) -> dict[str, Any]:
    """Mistral: Llama with a window, without biases."""
    return llama(keys, sliding_window=keys.window())


def qwen3(keys: Keys) -> dict[str, Any]:
    """Qwen3."""
    return llama(keys, attention_bias=keys.holds("blk.0.attn_q.bias"))


def chosen_experts(keys: Keys, **changes: Any) -> dict[str, Any]:
    """``llama`` with the number of experts and how many of them a token is given to."""
    keys.sizes["X"] = keys.integer("expert_count")
    return llama(keys, num_experts=keys.sizes["X"], num_experts_per_tok=keys.integer("expert_used_count"), **changes)


def mixtral(keys: Keys) -> dict[str, Any]:
    """Mixtral."""
    config = chosen_experts(keys)
    return config | {"num_local_experts": config.pop("num_experts"), "sliding_window": None}


def expert_size(keys: Keys) -> int:
    """Inner size of an expert, as llama.cpp computes it for files that do not have it."""
    if keys.has("expert_feed_forward_length"):
        return keys.integer("expert_feed_forward_length")
    return keys.sizes["F"] // keys.integer("expert_used_count") or 1


def qwen2_moe(keys: Keys) -> dict[str, Any]:
    """Qwen2-MoE, with an expert that every token has."""
    shared = keys.integer("expert_shared_feed_forward_length", default=keys.sizes["F"])
    sizes = {"moe_intermediate_size": expert_size(keys), "shared_expert_intermediate_size": shared}
    return chosen_experts(keys, norm_topk_prob=False, **sizes)


def qwen3_moe(keys: Keys) -> dict[str, Any]:
    """Qwen3-MoE."""
    return chosen_experts(keys, norm_topk_prob=True, moe_intermediate_size=expert_size(keys), attention_bias=False)


def olmo2(keys: Keys) -> dict[str, Any]:
    """OLMo 2."""
    return llama(keys, attention_bias=False)


def olmoe(keys: Keys) -> dict[str, Any]:
    """OLMoE."""
    clip = keys.real("attention.clamp_kqv") if keys.has("attention.clamp_kqv") else None
    return chosen_experts(keys, norm_topk_prob=False, attention_bias=False, clip_qkv=clip)


def deepseek(keys: Keys) -> dict[str, Any]:
    """DeepSeek-V2 and V3: latent attention, and mixtures of experts after some dense layers."""
    sizes, heads = keys.sizes, keys.sizes["H"]
    rope = keys.rope(partial=True)
    del rope["partial_rotary_factor"]
    if keys.has("rope.scaling.yarn_log_multiplier"):  # written as a tenth of it
        rope["mscale"] = rope["mscale_all_dim"] = round(keys.real("rope.scaling.yarn_log_multiplier") * 10, 6)
    turned, rank = keys.rotated(), keys.integer("attention.kv_lora_rank")
    key = keys.integer("attention.key_length_mla", default=sizes["D"])
    value = keys.integer("attention.value_length_mla", default=keys.integer("attention.value_length"))
    query_rank = keys.integer("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None
    dense = keys.integer("leading_dense_block_count") if keys.has("leading_dense_block_count") else 0
    shared = keys.integer("expert_shared_count") if keys.has("expert_shared_count") else None
    groups = keys.integer("expert_group_count", default=1)
    expert = keys.integer("expert_feed_forward_length")
    sizes |= {"X": keys.integer("expert_count"), "S": expert * (shared or 0), "HK": heads * key, "HV": heads * value}
    sizes |= {"HB": heads * (key - turned + value), "N": key - turned, "W": value, "P": turned, "R": rank}
    keys.traits = {
        "compressed_queries": query_rank is not None,
        "split_kv_b": keys.holds("blk.0.attn_k_b.weight"),
        "dense": [i < dense for i in range(sizes["L"])],
        "shared": [i >= dense and shared is not None for i in range(sizes["L"])],
        "choice_bias": [i >= dense and is_v3(keys) for i in range(sizes["L"])],
    }
    return {
        **llama(keys, rope_parameters=rope),
        "num_key_value_heads": heads,
        "head_dim": turned,
        "q_lora_rank": query_rank,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": key - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": value,
        "first_k_dense_replace": dense,
        "n_routed_experts": sizes["X"],
        "n_shared_experts": shared,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": expert,
        "routed_scaling_factor": keys.real("expert_weights_scale") if keys.has("expert_weights_scale") else 1.0,
        "norm_topk_prob": keys.flag("expert_weights_norm"),
        "n_group": groups,
        "topk_group": keys.integer("expert_group_used_count", default=1),
        "topk_method": "noaux_tc" if is_v3(keys) else "greedy" if groups == 1 else "group_limited_greedy",
        "scoring_func": "sigmoid" if is_v3(keys) else "softmax",
        "num_nextn_predict_layers": 0,
    }


def is_v3(keys: Keys) -> bool:
    """Whether a "deepseek2" file is of DeepSeek-V3, whose routers are sigmoids."""
    return keys.integer("expert_gating_func", default=1) == 2


def gemma(keys: Keys, layers_of_largest: int, pattern: int, rope: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Gemma 2 and 3; the attention's scale is told from the number of layers, as files do not have it."""
    sizes = keys.sizes
    scale = sizes["E"] // sizes["H"] if sizes["L"] == layers_of_largest else sizes["D"]
    sliding = keys.sliding_layers(pattern) if keys.window() else [False] * sizes["L"]
    config = llama(keys, rope_parameters=rope, attention_bias=False, query_pre_attn_scalar=scale, **changes)
    config["hidden_activation"] = "gelu_pytorch_tanh"
    del config["hidden_act"]
    config["sliding_window"] = keys.window() or sizes["C"]
    config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    return config


def gemma1(keys: Keys) -> dict[str, Any]:
    """Gemma."""
    config = llama(keys, hidden_activation="gelu_pytorch_tanh", attention_bias=False)
    return config | {"hidden_act": "gelu_pytorch_tanh"}


def gemma2(keys: Keys) -> dict[str, Any]:
    """Gemma 2, with soft caps."""
    defaults = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    caps = {name: keys.real(name, default) for name, default in defaults.items()}
    return gemma(keys, 46, 2, keys.rope(), **caps)


def gemma3(keys: Keys) -> dict[str, Any]:
    """Gemma 3, with two bases of rotation."""
    cap = keys.real("final_logit_softcapping") if keys.has("final_logit_softcapping") else None
    local = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", default=10000.0)}
    rope = {"full_attention": keys.rope(), "sliding_attention": local}
    return gemma(keys, 62, 6, rope, final_logit_softcapping=cap, attn_logit_softcapping=None)


def phi3(keys: Keys) -> dict[str, Any]:
    """Phi-3."""
    rope = keys.rope(partial=True)
    original = rope.pop("original_max_position_embeddings", None)
    original = original or keys.integer("rope.scaling.original_context_length", default=keys.sizes["C"])
    window = keys.window()
    config = llama(keys, rope_parameters=rope, sliding_window=window, original_max_position_embeddings=original)
    del config["head_dim"]
    return config


def epsilon(keys: Keys) -> float:
    """Of layer norms."""
    return keys.real("attention.layer_norm_epsilon", default=1e-5)


def gpt2(keys: Keys) -> dict[str, Any]:
    """GPT-2."""
    sizes = keys.sizes
    return {
        "n_positions": sizes["C"],
        "n_embd": sizes["E"],
        "n_layer": sizes["L"],
        "n_head": sizes["H"],
        "n_inner": sizes["F"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": epsilon(keys),
    }


def gptj(keys: Keys) -> dict[str, Any]:
    """GPT-J."""
    return gpt2(keys) | {"rotary_dim": keys.rotated()}


def gptneox(keys: Keys) -> dict[str, Any]:
    """GPT-NeoX and Pythia."""
    sizes = keys.sizes
    rope = keys.rope(partial=True)
    return {
        "hidden_size": sizes["E"],
        "intermediate_size": sizes["F"],
        "num_hidden_layers": sizes["L"],
        "num_attention_heads": sizes["H"],
        "hidden_act": "gelu",
        "max_position_embeddings": sizes["C"],
        "layer_norm_eps": epsilon(keys),
        "use_parallel_residual": keys.flag("use_parallel_residual", default=True),
        "attention_bias": True,
        "rope_parameters": rope,
        # As older versions of transformers have them.
        "rotary_pct": rope["partial_rotary_factor"],
        "rotary_emb_base": rope["rope_theta"],
    }


def falcon(keys: Keys) -> dict[str, Any]:
    """Falcon, the older decoder and that of 40B and 180B."""
    sizes = keys.sizes
    return {
        "hidden_size": sizes["E"],
        "ffn_hidden_size": sizes["F"],
        "num_hidden_layers": sizes["L"],
        "num_attention_heads": sizes["H"],
        "num_kv_heads": sizes["G"],
        "max_position_embeddings": sizes["C"],
        "layer_norm_epsilon": epsilon(keys),
        "activation": "gelu",
        "alibi": False,
        "bias": False,
        "parallel_attn": True,
        "multi_query": sizes["G"] == 1,
        # Falcon 40B and 180B, which have a norm for each branch.
        "new_decoder_architecture": keys.holds("blk.0.attn_norm_2.weight"),
        "rope_parameters": keys.rope(),
    }


def bloom(keys: Keys) -> dict[str, Any]:
    """BLOOM."""
    sizes = keys.sizes
    if sizes["F"] != 4 * sizes["E"]:
        raise UnsupportedModelError(f"{keys.file.path}: {keys.arch} has an inner size of 4 times the hidden one")
    return {
        "hidden_size": sizes["E"],
        "n_layer": sizes["L"],
        "n_head": sizes["H"],
        "seq_length": sizes["C"],
        "layer_norm_epsilon": epsilon(keys),
    }
