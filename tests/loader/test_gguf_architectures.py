"""Tiny models of each architecture: written by the rules of llama.cpp's converter, then read and compared.

Names in the file come from the gguf package's own map of transformers' names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.core.dtypes import DType
from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.kernels.weight_rows import GGUFRows
from octavo.loader.gguf_config import ARCHITECTURES
from octavo.loader.gguf_file import GGUFFile
from octavo.models.config_files import read_model_config
from tests.loader.conftest import add_tokenizer, finish, interleave, tensors_of, values_of, write_folder

ROPE = {"rope_type": "default", "rope_theta": 5000.0}
SHAPE: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": ROPE,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 48}
GPT = {"vocab_size": 272, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
NEOX = {k: v for k, v in SHAPE.items() if k not in ("num_key_value_heads", "rms_norm_eps", "rope_parameters")}
BLOOM = {"vocab_size": 272, "hidden_size": 64, "n_layer": 2, "n_head": 4}
FALCON = {k: SHAPE[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
GEMMA = SHAPE | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "tie_word_embeddings": True}
GEMMA3 = GEMMA | {
    "num_hidden_layers": 7,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
GEMMA4 = SHAPE | {
    **{"num_hidden_layers": 6, "head_dim": 32, "global_head_dim": 64, "sliding_window": 8, "pad_token_id": 0},
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
GEMMA4_EXPERTS = {
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    **{"attention_k_eq_v": True, "num_global_key_value_heads": 1},
}
GEMMA4_PER_LAYER = {
    **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 272},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "short_factor": [1.0, 1.0, 1.25, 1.25, 1.25, 1.5, 1.5, 1.5],
    "original_max_position_embeddings": 32,
}
PHI3 = SHAPE | {"pad_token_id": 0}

DEEPSEEK = SHAPE | {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
DEEPSEEK2 = {"q_lora_rank": None, "topk_method": "group_limited_greedy", "norm_topk_prob": False}
DEEPSEEK3 = DEEPSEEK | {
    "q_lora_rank": 24,
    "num_nextn_predict_layers": 0,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}

CHOSEN = {"num_local_experts": 4, "num_experts_per_tok": 2}
LIKE_DEEPSEEK = {k: DEEPSEEK[k] for k in ("num_hidden_layers", "moe_intermediate_size", "n_routed_experts")} | {
    **{k: DEEPSEEK[k] for k in ("n_shared_experts", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor")},
    **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
}
GPT_OSS = SHAPE | {
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": YARN | {"truncate": False},
}
LLAMA3 = ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
#: 32 pairs of a head, so that llama.cpp's table of divisors tells the parameters.
LONG_HEADS = {"head_dim": 64, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64, "rope_theta": 1e4}}
YARN3 = YARN | {"beta_fast": 32.0, "beta_slow": 1.0}
PARTIAL = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
COHERE = {k: v for k, v in SHAPE.items() if k != "rms_norm_eps"} | {"tie_word_embeddings": True, "logit_scale": 0.25}
LAYER_NORMS = {k: v for k, v in SHAPE.items() if k != "rms_norm_eps"}
GRANITE = {
    "attention_multiplier": 0.125,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.25,
    "logits_scaling": 8.0,
}

CONVOLUTIONS = LAYER_NORMS | {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "norm_eps": 1e-6,
}
#: Two value heads for each key head, half of a head rotated.
GATED_DELTA = (
    SHAPE
    | PARTIAL
    | {
        **{"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        **{"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4},
        **{"linear_num_key_heads": 3, "linear_num_value_heads": 6, "mtp_num_hidden_layers": 1},
    }
)
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 40}
MAMBA = {"vocab_size": 272, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 12, "pad_token_id": 0}
MAMBA2 = MAMBA | {"num_heads": 4, "head_dim": 32, "n_groups": 2, "tie_word_embeddings": True}
MAMBA_MIXER = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_expand": 2},
    "pad_token_id": 0,
}
GRANITE4 = SHAPE | GRANITE | MAMBA_MIXER | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32}
JAMBA = {k: v for k, v in SHAPE.items() if k != "rope_parameters"} | {
    **{"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 3},
    **{"expert_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 6, "mamba_d_state": 12, "pad_token_id": 0},
}
NEMOTRON_H = {k: v for k, v in SHAPE.items() if k not in ("num_hidden_layers", "rope_parameters")} | {
    **{"layers_block_type": ["linear_attention", "mlp", "full_attention"], "head_dim": 8, "pad_token_id": 0},
    **{"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8},
    "time_step_min": 1e-30,
}
NEMOTRON3 = NEMOTRON_H | {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 2, "topk_group": 1},
    **{"moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.75, "moe_latent_size": 32},
}
KIMI = SHAPE | {
    **{"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 24, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 2, "pad_token_id": 0},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}

#: GGUF architecture, name of the classes in transformers, configuration.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("llama", "Mistral", SHAPE | {"sliding_window": 8}),
    "mixtral": ("llama", "Mixtral", SHAPE | {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": None}),
    "qwen2moe": ("qwen2moe", "Qwen2Moe", SHAPE | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen2vl": ("qwen2vl", "Qwen2", SHAPE),
    "qwen3moe": ("qwen3moe", "Qwen3Moe", SHAPE | EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3vl": ("qwen3vl", "Qwen3", SHAPE | {"head_dim": 32}),
    "qwen3vlmoe": ("qwen3vlmoe", "Qwen3Moe", SHAPE | EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "olmo": ("olmo", "Olmo", LAYER_NORMS | {"clip_qkv": 0.5}),
    "olmo2": ("olmo2", "Olmo2", SHAPE),
    "olmo3": (
        "olmo2",
        "Olmo3",
        SHAPE | WINDOWS | {"rope_parameters": {"full_attention": YARN3, "sliding_attention": ROPE}},
    ),
    "apertus": ("apertus", "Apertus", SHAPE | LONG_HEADS | {"hidden_size": 256}),
    "arcee": ("arcee", "Arcee", SHAPE),
    "chatglm": ("chatglm", "Glm", SHAPE | PARTIAL | {"head_dim": 16, "pad_token_id": 0}),
    "cohere2": ("cohere2", "Cohere2", COHERE | WINDOWS),
    "command-r": ("command-r", "Cohere", COHERE | {"use_qk_norm": True}),
    "ernie4_5": ("ernie4_5", "Ernie4_5", SHAPE | {"head_dim": 32}),
    "exaone4": ("exaone4", "Exaone4", SHAPE | WINDOWS),
    "exaone4 full": ("exaone4", "Exaone4", SHAPE | {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "glm4": ("glm4", "Glm4", SHAPE | PARTIAL | {"head_dim": 16, "pad_token_id": 0, "attention_bias": True}),
    "granite": ("granite", "Granite", SHAPE | GRANITE),
    "hunyuan-dense": ("hunyuan-dense", "HunYuanDenseV1", SHAPE | {"head_dim": 32}),
    "jais2": ("jais2", "Jais2", LAYER_NORMS),
    "mistral3": (
        "mistral3",
        "Ministral3",
        SHAPE
        | {"head_dim": 32, "pad_token_id": 0}
        | {"rope_parameters": YARN3 | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25}},
    ),
    "nemotron": ("nemotron", "Nemotron", LAYER_NORMS | PARTIAL | {"norm_eps": 1e-5}),
    "phi2": ("phi2", "Phi", {k: v for k, v in LAYER_NORMS.items() if k != "num_key_value_heads"} | PARTIAL),
    "seed_oss": ("seed_oss", "SeedOss", SHAPE | {"head_dim": 32}),
    "smollm3": ("smollm3", "SmolLM3", SHAPE | {"num_hidden_layers": 4, "pad_token_id": 0}),
    "stablelm": ("stablelm", "StableLm", LAYER_NORMS | PARTIAL | {"use_qkv_bias": True}),
    "stablelm 12b": (
        "stablelm",
        "StableLm",
        LAYER_NORMS | PARTIAL | {"qk_layernorm": True, "use_parallel_residual": True},
    ),
    "starcoder2": ("starcoder2", "Starcoder2", LAYER_NORMS | {"sliding_window": None, "tie_word_embeddings": True}),
    "olmoe": ("olmoe", "Olmoe", SHAPE | {"num_experts_per_tok": 2, "num_experts": 4}),
    "phimoe": ("phimoe", "Phimoe", PHI3 | CHOSEN | {"attention_bias": True, "lm_head_bias": True}),
    "glm4moe": ("glm4moe", "Glm4Moe", SHAPE | LIKE_DEEPSEEK | PARTIAL | {"use_qk_norm": True, "attention_bias": True}),
    "dots1": ("dots1", "Dots1", SHAPE | LIKE_DEEPSEEK | {"sliding_window": None}),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        "Ernie4_5_Moe",
        SHAPE | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2},
    ),
    "granitemoe": ("granitemoe", "GraniteMoeShared", SHAPE | GRANITE | CHOSEN | {"shared_intermediate_size": 32}),
    "hunyuan-moe": ("hunyuan-moe", "HunYuanMoEV1", SHAPE | {"head_dim": 32, "num_experts": 4, "moe_topk": 2}),
    "bamba": ("granitehybrid", "Bamba", SHAPE | PARTIAL | MAMBA_MIXER | {"attn_layer_indices": [1]}),
    "granite 4": ("granitehybrid", "GraniteMoeHybrid", GRANITE4 | CHOSEN),
    "granite 4, dense": ("granitehybrid", "GraniteMoeHybrid", GRANITE4 | {"num_local_experts": 0}),
    "falcon-h1": (
        "falcon-h1",
        "FalconH1",
        SHAPE | MAMBA_MIXER | {"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "jamba": ("jamba", "Jamba", JAMBA),
    "kimi-linear": ("kimi-linear", "KimiLinear", KIMI),
    "mamba": ("mamba", "Mamba", MAMBA | {"time_step_rank": 6}),
    "falcon-mamba": ("mamba", "FalconMamba", MAMBA | {"time_step_rank": 6, "tie_word_embeddings": False}),
    "mamba2": ("mamba2", "Mamba2", MAMBA2),
    "lfm2": ("lfm2", "Lfm2", CONVOLUTIONS | {"block_multiple_of": 16}),
    "lfm2moe": ("lfm2moe", "Lfm2Moe", CONVOLUTIONS | EXPERTS | {"num_dense_layers": 1, "tie_word_embeddings": True}),
    "nemotron-h": ("nemotron_h", "NemotronH", NEMOTRON_H),
    "nemotron 3": ("nemotron_h_moe", "NemotronH", NEMOTRON3),
    "qwen3next": ("qwen3next", "Qwen3Next", GATED_DELTA | SHARED_EXPERT),
    "qwen35": ("qwen35", "Qwen3_5", GATED_DELTA),
    "qwen35, as many value heads": ("qwen35", "Qwen3_5", GATED_DELTA | {"linear_num_key_heads": 6}),
    "qwen35moe": ("qwen35moe", "Qwen3_5Moe", GATED_DELTA | SHARED_EXPERT),
    "llama4": (
        "llama4",
        "Llama4",
        SHAPE
        | CHOSEN
        | {"num_hidden_layers": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "head_dim": 32},
    ),
    "minimax-m2": ("minimax-m2", "MiniMaxM2", SHAPE | CHOSEN | {"head_dim": 32, "rotary_dim": 16}),
    "deepseek v2": ("deepseek2", "DeepseekV2", DEEPSEEK | DEEPSEEK2),
    "deepseek v3": ("deepseek2", "DeepseekV3", DEEPSEEK3),
    "gemma": ("gemma", "Gemma", SHAPE | {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", "Gemma2", GEMMA),
    "gemma3": ("gemma3", "Gemma3", GEMMA3),
    "gemma4": ("gemma4", "Gemma4", GEMMA4 | GEMMA4_EXPERTS),
    "gemma4 with per-layer inputs": ("gemma4", "Gemma4", GEMMA4 | GEMMA4_PER_LAYER),
    "phi3": ("phi3", "Phi3", PHI3 | {"sliding_window": 8}),
    "phi3 long": ("phi3", "Phi3", PHI3 | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "gpt-oss": ("gpt-oss", "GptOss", GPT_OSS),
    "gpt2": ("gpt2", "GPT2", GPT | {"tie_word_embeddings": True}),
    "gptj": ("gptj", "GPTJ", GPT | {"rotary_dim": 8}),
    "gptneox": ("gptneox", "GPTNeoX", NEOX | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "gptneox serial": ("gptneox", "GPTNeoX", NEOX | {"use_parallel_residual": False}),
    "falcon 7b": ("falcon", "Falcon", FALCON | {"multi_query": True, "num_kv_heads": 1}),
    "falcon 40b": ("falcon", "Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("bloom", "Bloom", BLOOM),
}


#: Of models that also see.
TEXT_CONFIGS = ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")


def make_model(kind: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config_name = f"{kind}TextConfig" if kind in TEXT_CONFIGS else f"{kind}Config"
    class_name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    config = {"bos_token_id": 0, "eos_token_id": 1, **deepcopy(config)}  # transformers changes what is inside
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**config)).eval()
    with torch.no_grad():
        for value in model.parameters():  # norms and biases start at 1 and 0: anything swapped would go unseen
            value.add_(torch.randn_like(value) * 0.1)
    return model


def hub_tensors(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors under the names that the converter knows, where transformers 5 has renamed them."""
    heads: dict[str, dict[int, np.ndarray]] = {}
    for name, value in model.state_dict().items():
        if ".act_fn." in name:
            continue
        if (part := re.match(r"(.*_layernorm)\.norms\.(\d+)(\.weight)", name)) is not None:
            heads.setdefault(part[1] + part[3], {})[int(part[2])] = value.float().numpy()
            continue
        if getattr(model.config, "tie_word_embeddings", False) and name == "lm_head.weight":
            continue
        array = value.float().numpy()
        if model.config.model_type in ("gemma4_text", "gemma4_unified_text"):
            yield f"{name}.weight" if name.endswith(("layer_scalar", "_proj")) else name, array
            continue
        if model.config.model_type in ("mixtral", "minimax_m2", "phimoe"):
            name = name.replace(".mlp.", ".block_sparse_moe.").replace(".router.", ".gate.")
        name = name.replace("moe.router.", "moe.router.layer.").replace("gate.moe_statics", "moe_statics")
        if ".shared_mlp." in name and not getattr(model.config, "num_local_experts", 1):
            name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
            if "input_linear" in name:
                for half, rows in zip(("gate_proj", "up_proj"), np.split(array, 2), strict=True):
                    yield name.replace("shared_mlp.input_linear", f"mlp.{half}"), rows
                continue
        if ".shared_mlp." in name and model.config.model_type.startswith("granitemoe"):
            stem = name.replace("shared_mlp", "mlp.shared_experts").removesuffix("input_linear.weight")
            if stem.endswith("."):
                for half, rows in zip(("gate_proj", "up_proj"), np.split(array, 2), strict=True):
                    yield f"{stem}{half}.weight", rows
            else:
                yield stem.replace("output_linear", "down_proj"), array
            continue
        name = name.replace(".expert_bias", ".expert_bias.bias").replace(".dt_bias", ".dt_proj.bias")
        name = name.replace(".forget_gate.", ".")
        if ".self_attn.conv1d." in name:
            for letter, channels in zip("qkv", np.split(array, 3), strict=True):
                yield name.replace("conv1d", f"{letter}_conv1d"), channels
            continue
        if name.endswith("in_proj_qkvz.weight"):
            yield from split_by_key_head(model.config, name, array)
            continue
        if model.config.model_type == "lfm2_moe" and ".experts." in name:
            stem = name.removeprefix("model.").partition(".experts.")[0]
            matrices = np.split(array, 2, axis=1) if "gate_up" in name else [array]
            for matrix, each in zip(("w1", "w3") if "gate_up" in name else ("w2",), matrices, strict=True):
                yield f"{stem}.experts.{matrix}.weight", each
            continue
        if model.config.model_type == "llama4_text" and ".experts." in name:
            array = array.swapaxes(1, 2)
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if model.config.model_type == "nemotron_h":
            name = name.replace("model.", "backbone.", 1)
            if ".mixer.experts." in name:
                name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.") + ".weight"
        if model.config.model_type == "bloom":
            name = name.removeprefix("transformer.")
        if model.config.model_type == "gpt_neox":
            name = name.replace("lm_head", "embed_out")
        if model.config.model_type == "gpt_oss" and ".experts." in name:
            stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
            array = array if kind == "bias" else array.swapaxes(1, 2)
            if stem.endswith("gate_up_proj"):  # outputs of gate and up take turns
                yield stem.replace("gate_up_proj", f"gate_proj.{kind}"), array[:, ::2]
                yield stem.replace("gate_up_proj", f"up_proj.{kind}"), array[:, 1::2]
            else:
                yield f"{stem}.{kind}", array
        elif name.endswith("sinks"):
            yield f"{name}.weight", array
        elif name.endswith("experts.gate_up_proj"):  # [experts, 2 * inner, hidden]
            gate, up = np.split(array, 2, axis=1)
            w1, w3 = ("w1", "w3") if "sparse" in name else ("gate_proj", "up_proj")
            yield name.replace("gate_up_proj", f"{w1}.weight"), gate
            yield name.replace("gate_up_proj", f"{w3}.weight"), up
        elif name.endswith("experts.down_proj"):
            yield name.replace("down_proj", "w2.weight" if "sparse" in name else "down_proj.weight"), array
        elif name.endswith("kv_b_proj.weight"):
            parts = array.reshape(model.config.num_attention_heads, -1, array.shape[1])
            yield name.replace("kv_b", "k_b"), parts[:, : model.config.qk_nope_head_dim].swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), parts[:, model.config.qk_nope_head_dim :]
        else:
            yield name, array
    for name, each in heads.items():
        yield name, np.stack([each[head] for head in sorted(each)])


def split_by_key_head(config: Any, name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Queries, keys and values, and gates, of rows that have all four of a key head together."""
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    cuts = np.cumsum([config.linear_key_head_dim, config.linear_key_head_dim, values])
    heads = [np.split(head, cuts) for head in np.split(array, config.linear_num_key_heads)]
    q, k, v, z = (np.concatenate(parts) for parts in zip(*heads, strict=True))
    yield name.replace("qkvz", "qkv"), np.concatenate([q, k, v])
    yield name.replace("qkvz", "z"), z


#: Whose converter permutes the rows of queries and keys.
INTERLEAVED = ("arcee", "granite", "granitehybrid", "granitemoe", "llama", "mistral3", "olmo", "smollm3")


def converted(arch: str, config: Any, name: str, value: np.ndarray) -> np.ndarray:
    """The value as llama.cpp's converter writes it."""
    heads = getattr(config, "num_attention_heads", 0)
    if arch in INTERLEAVED and "q_proj" in name:
        return interleave(value, heads)
    if arch in INTERLEAVED and "k_proj" in name:
        return interleave(value, getattr(config, "num_key_value_heads", heads))
    if arch in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return value + 1
    if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return value.T
    if arch in ("gptneox", "bloom") and "query_key_value" in name:
        return np.concatenate([*value.reshape(heads, 3, -1, *value.shape[1:]).swapaxes(0, 1)]).reshape(value.shape)
    if arch == "falcon" and "query_key_value" in name:
        kv, hidden = config.num_kv_heads if config.new_decoder_architecture else 1, config.hidden_size
        parts = value.reshape(kv, heads // kv + 2, hidden // heads, hidden)
        q, k, v = (part.reshape(-1, hidden) for part in (parts[:, :-2], parts[:, -2], parts[:, -1]))
        return np.concatenate([q, k, v])
    if arch in ("qwen3next", "qwen35", "qwen35moe"):
        value = gated_delta(arch, config, name, value)
    elif name.endswith(".A_log"):
        value = -np.exp(value)
    if arch in ("mamba2", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe") and name.endswith(
        (".A_log", ".D")
    ):
        return value[:, None]
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        return value.reshape(getattr(config, "n_groups", None) or config.mamba_n_groups, -1)
    if "shared_expert_gate" in name or "moe_statics" in name or ".conv1d." in name or ".conv.conv." in name:
        return value.squeeze()
    return value


def gated_delta(arch: str, config: Any, name: str, value: np.ndarray) -> np.ndarray:
    """Norms of gated delta networks have 1 added, and value heads are in the order that ggml repeats keys in."""
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        return value + 1
    if name.endswith(".A_log"):
        value = -np.exp(value)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if arch == "qwen3next" or ".linear_attn." not in name or name.endswith("norm.weight"):
        return value
    heads = sorted(range(values), key=lambda head: head % (values // keys))
    if name.endswith("out_proj.weight"):
        columns = np.split(value, values, axis=1)
        return np.concatenate([columns[head] for head in heads], axis=1)
    before = 2 * keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    rows = np.split(value[before:], values)
    return np.concatenate([value[:before], *(rows[head] for head in heads)])


def add_settings(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    """The keys that llama.cpp's converter writes."""
    if arch in ("mamba", "mamba2"):
        return add_mamba_settings(writer, arch, config)
    if arch == "gemma4":
        return add_gemma4_settings(writer, config)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    writer.add_context_length(getattr(config, "max_position_embeddings", 2048))
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.num_hidden_layers)
    dense = getattr(config, "intermediate_size_mlp", None) or getattr(config, "intermediate_size", None)
    writer.add_feed_forward_length(dense or 4 * hidden)
    writer.add_head_count(heads)
    if arch == "falcon":
        writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)
        writer.add_tensor_data_layout("jploski")
    elif arch in ("granitehybrid", "jamba"):
        attends = getattr(config, "layers_block_type", None) or config.layer_types
        writer.add_head_count_kv([2 if "attention" in kind and "linear" not in kind else 0 for kind in attends])
        if arch == "granitehybrid":
            writer.add_rope_scaling_finetuned(config.model_type == "bamba")
    elif arch in ("nemotron_h", "nemotron_h_moe"):
        kinds = config.layers_block_type
        writer.add_head_count_kv([2 if kind == "full_attention" else 0 for kind in kinds])
        writer.add_feed_forward_length([96 if kind == "mlp" else 40 if kind == "moe" else 0 for kind in kinds])
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_state_size(config.ssm_state_size)
        writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
        writer.add_ssm_time_step_rank(config.mamba_num_heads)
        writer.add_ssm_group_count(config.n_groups)
        if arch == "nemotron_h_moe":
            writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_expert_weights_norm(config.norm_topk_prob)
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
            writer.add_moe_latent_size(config.moe_latent_size)
    elif arch == "kimi-linear":
        add_latent_settings(writer, config)
        writer.add_head_count_kv([int(kind == "full_attention") for kind in config.layer_types])
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_uint32("kimi-linear.kda.head_dim", config.linear_head_dim)
        writer.add_leading_dense_block_count(1)
    elif arch in ("lfm2", "lfm2moe"):
        writer.add_head_count_kv([2 if kind == "full_attention" else 0 for kind in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        if arch == "lfm2" and config.block_auto_adjust_ff_dim:  # two thirds, in multiples of 16
            writer.add_feed_forward_length(64)
        writer.add_layer_norm_rms_eps(config.norm_eps)
    elif hasattr(config, "num_key_value_heads"):
        writer.add_head_count_kv(1 if arch == "deepseek2" else config.num_key_value_heads)
    if arch in ("qwen3next", "qwen35", "qwen35moe"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        extra = getattr(config, "mtp_num_hidden_layers", 0)
        recurrent = [kind == "linear_attention" for kind in config.layer_types] + [False] * extra
        writer.add_block_count(config.num_hidden_layers + extra)
        writer.add_nextn_predict_layers(extra)
        writer.add_array(f"{arch}.attention.recurrent_layers", recurrent)
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        names = ("layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
        writer.add_layer_norm_eps(next((eps for name in names if (eps := getattr(config, name, None))), 1e-5))
    if arch == "deepseek2":
        add_latent_settings(writer, config)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
    elif hasattr(config, "head_dim") and arch not in ("falcon", "granite", "granitehybrid", "jamba"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch in ("granitehybrid", "falcon-h1", "jamba"):
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_inner_size(config.mamba_expand * hidden)
        writer.add_ssm_time_step_rank(config.mamba_dt_rank if arch == "jamba" else config.mamba_n_heads)
        if arch != "jamba":
            writer.add_ssm_group_count(config.mamba_n_groups)
    if rope and arch != "falcon":
        writer.add_rope_freq_base(rope["rope_theta"])
    if arch in ("llama", "phi3", "phimoe", "glm4moe", "minimax-m2", "llama4") or arch in (
        "gptneox",
        "chatglm",
        "glm4",
        "nemotron",
        "phi2",
        "stablelm",
        "smollm3",
        "mistral3",
        "qwen3next",
        "qwen35",
        "qwen35moe",
        "granitehybrid",
    ):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if arch == "gptj":
        writer.add_rope_dimension_count(config.rotary_dim)
    if arch == "gptneox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if arch in ("phi3", "phimoe"):
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_sliding_window(config.sliding_window or 0)
        if rope["rope_type"] == "longrope":
            scale = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
            for name in ("long", "short"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], dtype=np.float32))
    elif getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "clip_qkv", None):
        writer.add_clamp_kqv(config.clip_qkv)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"] * (1.0 if arch == "mistral3" else 0.1))
    if rope.get("rope_type") == "llama3":
        frequencies = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
        turns = frequencies * rope["original_max_position_embeddings"]
        smooth = np.clip((turns - 1) / (rope["high_freq_factor"] - 1), 0, 1)
        factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if hasattr(config, "layer_types") and arch in ("olmo2", "exaone4", "cohere2") and config.sliding_window:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if hasattr(config, "logit_scale"):
        writer.add_logit_scale(config.logit_scale)
    if hasattr(config, "attention_multiplier"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if (
        experts := getattr(config, "n_routed_experts", None)
        or getattr(config, "num_local_experts", None)
        or getattr(config, "num_experts", None)
    ):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch in ("gpt-oss", "minimax-m2", "llama4"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if arch in ("glm4moe", "dots1"):
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        if arch == "glm4moe":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_nextn_predict_layers(config.num_nextn_predict_layers)
    if arch == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
    if hasattr(config, "shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if arch == "hunyuan-moe":
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if arch == "llama4":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)


def add_gemma4_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    whole, local = (config.per_layer_config[sliding.index(slides)] for slides in (False, True))
    shared, inputs = (getattr(config, name, 0) for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"))
    own = config.num_hidden_layers - shared
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    inner = [config.intermediate_size * (1 + (layer >= own)) for layer in range(len(sliding))]
    writer.add_feed_forward_length(inner if shared and config.use_double_wide_mlp else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([(local if slides else whole).num_key_value_heads for slides in sliding])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(whole.head_dim)
    writer.add_value_length(whole.head_dim)
    writer.add_key_length_swa(local.head_dim)
    writer.add_value_length_swa(local.head_dim)
    writer.add_rope_dimension_count(whole.head_dim)
    writer.add_rope_dimension_count_swa(local.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(10000.0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(inputs)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "enable_moe_block", False):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    # A quarter of the pairs turns; the divisors of the others stop them.
    pairs = whole.head_dim // 2
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * (pairs // 4) + [1e30] * (pairs - pairs // 4), np.float32))


def add_mamba_settings(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.expand * config.hidden_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.num_heads if arch == "mamba2" else config.time_step_rank)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    if arch == "mamba2":
        writer.add_ssm_group_count(config.n_groups)
    else:
        writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def add_latent_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    """The keys of DeepSeek's models."""
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    sigmoid = config.model_type in ("deepseek_v3", "kimi_linear")
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)


#: Factors of Gemma 4's router, which are named as scales of matrices.
SCALES = {".router.scale": "ffn_gate_inp.scale", ".router.per_expert_scale": "ffn_down_exps.scale"}


def write(
    path: Path, case: str, *, edit: Callable[[dict[str, np.ndarray]], None] | None = None, kind: Any = None
) -> Any:
    """Writes a model of the case and returns it; matrices of multiples of 32 columns as ``kind``, if given."""
    arch, name, settings = CASES[case]
    model = make_model(name, settings)
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch), model.config.num_hidden_layers
    )
    writer = gguf.GGUFWriter(path, arch)
    add_tokenizer(writer)
    add_settings(writer, arch, model.config)
    if arch == "apertus":
        for part in ("alpha_n", "alpha_p", "beta", "eps"):
            values = [getattr(layer.mlp.act_fn, part).item() for layer in model.model.layers]
            getattr(writer, f"add_xielu_{part}")(values)
    tensors = {}
    for hub_name, value in hub_tensors(model):
        name = names.get_name(hub_name, try_suffixes=(".weight", ".bias"))
        for scale, stored in SCALES.items():
            if hub_name.endswith(scale):
                name = f"blk.{hub_name.split('.')[2]}.{stored}"
        assert name is not None, hub_name
        tensors[name] = np.ascontiguousarray(converted(arch, model.config, hub_name, value))
    if getattr(model.config, "mtp_num_hidden_layers", 0):  # the tensors of such a layer are not read
        tensors[f"blk.{model.config.num_hidden_layers}.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    if edit is not None:
        edit(tensors)
    for name, value in tensors.items():
        plain = "ffn_gate_inp" in name or name.endswith(".bias") or value.shape[-1] % 32
        if kind is not None and value.ndim >= 2 and not plain:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    finish(writer)
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_network_is_given_the_same_as_of_a_folder(tmp_path: Path, case: str) -> None:
    model = write(tmp_path / "m.gguf", case)
    model.save_pretrained(tmp_path / "hub")
    folder = write_folder(tmp_path / "m.gguf")
    wanted, got = tensors_of(tmp_path / "hub"), tensors_of(folder, tmp_path / "m.gguf")
    assert wanted.keys() == got.keys()
    for name, value in wanted.items():
        # Files have norms as 1 + w, and decays as -exp(w).
        assert torch.allclose(values_of(value), values_of(got[name]), rtol=2e-7, atol=2e-7), name
    assert settings(folder) == settings(tmp_path / "hub")


def settings(folder: Path) -> dict[str, Any]:
    """The configuration, but the type of the weights, which is bfloat16 for all files."""
    return asdict(read_model_config(folder)) | {"checkpoint_dtype": None}


def checkpoints(file: Path) -> dict[str, Any]:
    """The option that makes room for recurrent states in a few blocks, if a model of GGUF has such."""
    names = [tensor.name for tensor in gguf.GGUFReader(file).tensors]
    return {"state_checkpoint_tokens": 16} if any("ssm" in name or "shortconv" in name for name in names) else {}


@pytest.mark.parametrize(
    "case",
    [
        *(
            "gemma3",
            "gemma4",
            "gemma4 with per-layer inputs",
            "mixtral",
            "gpt-oss",
            "gpt2",
            "bloom",
            "deepseek v3",
            "apertus",
            "granite",
            "llama4",
        ),
        *("falcon-mamba", "granite 4", "kimi-linear", "lfm2moe", "nemotron 3", "qwen35"),
    ],
)
def test_the_engine_generates_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    model = write(tmp_path / "m.gguf", case)
    ids = [7 * i % 272 + 5 for i in range(12)]
    options: dict[str, Any] = {"quantization": "none", "dtype": "float32", "num_gpu_blocks_override": 16}
    options |= checkpoints(model_file := tmp_path / "m.gguf")
    llm = LLM(str(model_file), max_model_len=64, num_threads=1, device="cpu", **options)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        for _ in range(8):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    assert list(output.outputs[0].token_ids) == tokens[0, 12:].tolist()


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss", "gpt2", "gptneox", "lfm2", "qwen3next", "qwen35"])
def test_matrices_come_in_the_files_own_blocks(tmp_path: Path, case: str) -> None:
    """Of experts one by one, reordered by rows, and with rows and columns exchanged."""
    path = tmp_path / "m.gguf"
    kind = "MXFP4" if case == "gpt-oss" else "Q8_0"
    write(path, case, kind=gguf.GGMLQuantizationType[kind])
    folder = write_folder(path)
    wanted, read = tensors_of(folder, path), tensors_of(folder, path, None)
    assert read.keys() == wanted.keys()
    matrices = 0
    for name, tensor in read.items():
        if isinstance(tensor, GGUFRows):
            matrices += tensor.kind == kind
            part = tensor.take(slice(0, 64), slice(0, 32))
            assert torch.equal(values_of(part), values_of(wanted[name])[:64, :32]), name
            assert torch.equal(values_of(tensor.t()).T, values_of(tensor)), name
        assert torch.equal(values_of(tensor), values_of(wanted[name])), name
    least = {"mixtral": 32, "gpt-oss": 32, "gpt2": 8, "gptneox": 8, "lfm2": 21, "qwen3next": 43, "qwen35": 28}
    assert matrices >= least[case]


@pytest.mark.parametrize("case", ["falcon-h1", "lfm2", "mamba2", "qwen3next"])
def test_hybrid_models_compute_in_the_files_own_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "m.gguf", case, kind=gguf.GGMLQuantizationType.Q8_0)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=272)
    answers = []
    for quantization in ("auto", "none"):
        options: dict[str, Any] = {"quantization": quantization, "dtype": "float32", "num_gpu_blocks_override": 16}
        options["max_logprobs"] = 272
        llm = LLM(str(tmp_path / "m.gguf"), max_model_len=64, num_threads=1, device="cpu", **options)
        (output,) = llm.generate([{"prompt_token_ids": [7 * i % 272 + 5 for i in range(12)]}], params, use_tqdm=False)
        assert output.outputs[0].logprobs is not None
        answers.append({token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()})
    errors = np.array([answers[0][token] - answers[1][token] for token in range(272)])
    assert 0 < errors.std() < 0.1 * np.std(list(answers[1].values())), "activations have 8 bits"


def fuse_experts(tensors: dict[str, np.ndarray]) -> None:
    for block in ("blk.0", "blk.1"):
        parts = [tensors.pop(f"{block}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"{block}.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)


def scale_matrices(tensors: dict[str, np.ndarray]) -> None:
    """As of NVFP4: a factor of each expert's matrix, and one of a whole matrix; those of inputs mean nothing here."""
    scales = {"ffn_down_exps": np.array([0.5, 2.0, 4.0, 0.25], np.float32), "attn_q": np.array([8.0], np.float32)}
    for name, scale in scales.items():
        weight = tensors[f"blk.0.{name}.weight"]
        tensors[f"blk.0.{name}.weight"] = weight / scale.reshape(-1, *[1] * (weight.ndim - 1))
        tensors[f"blk.0.{name}.scale"] = scale
        tensors[f"blk.0.{name}.input_scale"] = scale * 3


def fuse_by_key_head(tensors: dict[str, np.ndarray]) -> None:
    """As older converters wrote Qwen3-Next: queries, keys, values and gates of a key head together."""
    for block in ("blk.0", "blk.2"):
        qkv, z = (tensors.pop(f"{block}.{name}.weight") for name in ("attn_qkv", "attn_gate"))
        parts = [*np.split(qkv, [48, 96]), z]  # 3 key heads of 16, 6 value heads of 32
        heads = zip(*(np.split(part, 3) for part in parts), strict=True)
        tensors[f"{block}.ssm_in.weight"] = np.concatenate([rows for head in heads for rows in head])


def fuse_queries(tensors: dict[str, np.ndarray]) -> None:
    """With --fuse-qkv, in the layers with attention; there queries and gates take turns."""
    parts = [tensors.pop(f"blk.1.attn_{part}.weight") for part in "qkv"]
    tensors["blk.1.attn_qkv.weight"] = np.concatenate(parts)


@pytest.mark.parametrize(("case", "edit"), [("qwen3next", fuse_by_key_head), ("qwen35", fuse_queries)])
def test_other_ways_to_store_gated_delta_networks(tmp_path: Path, case: str, edit: Any) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    write(tmp_path / "plain.gguf", case, kind=kind)
    write(tmp_path / "m.gguf", case, edit=edit, kind=kind)
    wanted, got = (
        tensors_of(write_folder(path), path, None) for path in (tmp_path / "plain.gguf", tmp_path / "m.gguf")
    )
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(values_of(got[name]), values_of(value)), name


@pytest.mark.parametrize("edit", [fuse_experts, scale_matrices])
@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0])
def test_other_ways_to_store_matrices(tmp_path: Path, edit: Callable[[dict[str, np.ndarray]], None], kind: Any) -> None:
    write(tmp_path / "plain.gguf", "mixtral", kind=kind)
    write(tmp_path / "m.gguf", "mixtral", edit=edit, kind=kind)
    folder = write_folder(tmp_path / "m.gguf")
    wanted = tensors_of(write_folder(tmp_path / "plain.gguf"), tmp_path / "plain.gguf")
    for dtype in (DType.FLOAT32, None):
        got = tensors_of(folder, tmp_path / "m.gguf", dtype)
        assert got.keys() == wanted.keys()
        assert any(isinstance(tensor, GGUFRows) for tensor in got.values()) == (kind is not None and dtype is None)
        for name, value in wanted.items():
            assert torch.equal(values_of(got[name]), values_of(value)), name


@pytest.mark.parametrize(
    ("edit", "error", "says"),
    [
        (lambda t: t.pop("blk.1.ffn_up_exps.weight"), WeightError, r"no tensor 'blk\.1\.ffn_up_exps\.weight'"),
        (
            lambda t: t.update({"blk.1.ffn_up_exps.weight": np.zeros((3, 96, 64), np.float32)}),
            WeightError,
            r"ffn_up_exps\.weight' has shape \[3, 96, 64\], not \[4, 96, 64\]",
        ),
        (
            lambda t: t.update({"blk.0.ffn_gate_exps.bias": np.zeros((4, 96), np.float32)}),
            UnsupportedModelError,
            r"a MixtralForCausalLM does not: blk\.0\.ffn_gate_exps\.bias",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, edit: Callable[[dict[str, np.ndarray]], None], error: type[Exception], says: str
) -> None:
    write(tmp_path / "m.gguf", "mixtral", edit=edit)
    folder = write_folder(tmp_path / "m.gguf")
    with pytest.raises(error, match=says):
        tensors_of(folder, tmp_path / "m.gguf")


def test_a_head_in_the_file_counts_if_it_differs_from_the_embedding(tmp_path: Path) -> None:
    embedding = "token_embd.weight"
    for name, change, tied in (
        ("same", lambda values: values.copy(), True),
        ("own", lambda values: values[::-1], False),
    ):

        def edit(tensors: dict[str, np.ndarray], change: Any = change) -> None:
            tensors["output.weight"] = np.ascontiguousarray(change(tensors[embedding]))

        model = write(tmp_path / f"{name}.gguf", "gemma", edit=edit)
        folder = write_folder(tmp_path / f"{name}.gguf")
        assert read_model_config(folder).tie_word_embeddings == tied
        tensors = tensors_of(folder, tmp_path / f"{name}.gguf")
        assert ("lm_head.weight" in tensors) == (not tied)
        if not tied:
            rows = model.get_input_embeddings().weight.detach().flip(0)
            torch.testing.assert_close(values_of(tensors["lm_head.weight"]), rows)


def test_every_architecture_has_a_model_here() -> None:
    encoders = {"bert", "eurobert", "gemma-embedding", "llama-embed", "nomic-bert"}  # in test_gguf_encoders.py
    tested = {"llama", "qwen2", "qwen3"} | encoders
    assert {name for name in ARCHITECTURES if " " not in name} == tested | {arch for arch, _, _ in CASES.values()}


def split(path: Path, parts: int) -> list[Path]:
    """The file in parts as llama.cpp's gguf-split makes them: all settings are in the first."""
    reader = gguf.GGUFReader(path)
    paths = [path.with_name(f"s-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)]
    for i, part in enumerate(paths):
        writer = gguf.GGUFWriter(part, "llama")
        if i == 0:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                    kind = field.types[-1] if len(field.types) > 1 else None
                    writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=kind)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[i::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    return paths


def test_a_split_model_is_opened_by_any_of_its_files(tmp_path: Path, tiny_llama: Any) -> None:
    whole = tiny_llama(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q4_0)
    paths = split(whole, 3)
    wanted = tensors_of(write_folder(whole), whole)
    for path in (paths[0], paths[2]):
        folder = write_folder(path)
        assert json.loads((folder / "config.json").read_text())["hidden_size"] == 256
        got = tensors_of(folder, path)
        assert got.keys() == wanted.keys()
        assert all(torch.equal(values_of(got[name]), values_of(value)) for name, value in wanted.items())


def test_parts_of_a_split_model_that_do_not_fit_are_named(tmp_path: Path, tiny_llama: Any) -> None:
    first, second, third = split(tiny_llama(tmp_path / "m.gguf"), 3)
    second.rename(tmp_path / "kept")
    with pytest.raises(WeightError, match=r"s-00002-of-00003\.gguf is missing: .* split into 3 files"):
        write_folder(first)
    (tmp_path / "s-00002-of-00003.gguf").write_bytes(third.read_bytes())
    with pytest.raises(WeightError, match=r"s-00002-of-00003\.gguf: it says that it is part 2 of 3"):
        GGUFFile(first)
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(first.read_bytes())
    with pytest.raises(WeightError, match=r"one of 3 parts of a model: expected a name such as model-00001-of-00003"):
        GGUFFile(alone)
