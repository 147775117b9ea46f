"""Converts a GGUF file's metadata to the files of a Hugging Face folder: config.json, tokenizer and pooling."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from octavo.core.errors import TokenizerError, UnsupportedModelError, WeightError
from octavo.kernels.weight_rows import dequantize
from octavo.loader.files import PROJECTOR_LINK
from octavo.loader.gguf_file import DENSE, GGUFFile, Metadata
from octavo.loader.projector import whole_config
from octavo.loader.sentencepiece import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    ByteLevelVocabulary,
    PreTokenizer,
    SentencePieceModel,
    add_by_type,
    gemma_bpe,
    parse_merges,
    surround,
    word_piece,
)
from octavo.models.pooling_files import PAIR_TEMPLATE
from octavo.models.registry import model_type_of, unsupported


def write_gguf_folder(
    path: Path, folder: Path, sampling: Mapping[str, float] | None = None, projector: Path | None = None
) -> None:
    """Writes config.json, generation_config.json and the tokenizer of a GGUF file into the existing ``folder``.

    ``sampling``: default sampling parameters where the file has none. ``projector``: the file of its images' tower,
    which is linked; the settings of its image processor are written too.
    """
    file = GGUFFile(path)
    config = model_config(Metadata(file))
    write_tokenizer(file, folder, config["vocab_size"])
    generation = {**(sampling or {}), **generation_config(file)}
    files = {"config.json": config, "generation_config.json": generation, **pooling_files(file)}
    if projector is not None:
        files["config.json"], files["preprocessor_config.json"] = whole_config(config, file, GGUFFile(projector))
        (folder / PROJECTOR_LINK).symlink_to(os.path.abspath(projector))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    for name, tensor in DENSE.items():
        if f"{name}/config.json" in files:
            entry = file.tensors[tensor]
            values = dequantize(entry.type.name, file.read_rows(entry)).reshape(entry.shape)
            save_file({"linear.weight": values}, folder / name / "model.safetensors")


def model_config(metadata: Metadata) -> dict[str, Any]:
    """The content of config.json."""
    architecture, fields = ARCHITECTURES[_kind(metadata)]
    config = {
        "architectures": [architecture],
        "model_type": model_type_of(architecture),
        "dtype": "bfloat16",  # values of some files exceed float16
        "vocab_size": metadata.vocab_size(),
        **fields(metadata),
        "tie_word_embeddings": metadata.file.ties_head(),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = metadata.file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
    metadata.refuse_unread()
    return config


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The content of generation_config.json: the BOS token, all EOS tokens and the file's sampling parameters."""
    ends = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = file.metadata.get("tokenizer.ggml.tokens") or []
    if "<|return|>" in tokens and "<|call|>" in tokens:  # gpt-oss ends its turn with either; files name one
        ends.append(tokens.index("<|call|>"))
    if "<tool_call|>" in tokens and "<|tool_response>" in tokens:  # behind its calls Gemma 4 waits for their results
        ends.append(tokens.index("<|tool_response>"))
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    for ours, theirs in (("bos", "bos"), ("pad", "padding")):
        if (token := file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[f"{ours}_token_id"] = token
    for key, name in _SAMPLING_KEYS.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            continue  # no number is no reason to refuse the model
        least, most = _SAMPLING_RANGES.get(key, (-math.inf, math.inf))
        value = min(max(value, least), most)
        # The shortest decimal: 0.95, not 0.949999988.
        config[name] = int(value) if key == "top_k" else float(str(np.float32(value)))
    return config


#: llama.cpp's ``pooling_type`` for vectors. 0: none, 4: class scores.
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}


def pooling_files(file: GGUFFile) -> dict[str, Any]:
    """modules.json and the files that it names; empty if the file does not say how vectors are made.

    Vectors are normalised, as llama.cpp does by default. The matrices of ``DENSE`` come between pooling and that.
    """
    kind = file.metadata.get(f"{file.metadata.get('general.architecture')}.pooling_type", 0)
    if kind in (0, 4):
        return {}
    if kind not in _POOLING:
        raise UnsupportedModelError(f"{file.path}: pooling_type {kind} is not supported; supported: {_POOLING}")
    dense = {folder: file.tensors[tensor] for folder, tensor in DENSE.items() if tensor in file.tensors}
    modules = {"": "Transformer", "1_Pooling": "Pooling", **dict.fromkeys(dense, "Dense"), "4_Normalize": "Normalize"}
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
            for index, (path, name) in enumerate(modules.items())
        ],
        "1_Pooling/config.json": {"pooling_mode": _POOLING[kind]},
    }
    for folder, tensor in dense.items():
        if len(tensor.shape) != 2:
            raise WeightError(f"tensor {tensor.name!r} must be a matrix, not {list(tensor.shape)}", file=file.path)
        outputs, inputs = tensor.shape
        sizes = {"in_features": inputs, "out_features": outputs, "bias": False}
        files[f"{folder}/config.json"] = sizes | {"activation_function": "torch.nn.modules.linear.Identity"}
    return files


#: llama.cpp's keys below ``general.sampling`` -> names in generation_config.json. Keys for samplers that do not exist
#: here (xtc, mirostat, their order) are not read.
_SAMPLING_KEYS = {
    **{"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"},
    "penalty_repeat": "repetition_penalty",
}
#: llama.cpp clamps these to (least, most).
_SAMPLING_RANGES = {"temp": (0.0, math.inf), "top_k": (0, math.inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}


def _decoder(m: Metadata, *, partly_rotated: bool = False, **changes: Any) -> dict[str, Any]:
    """The fields that decoders have under their most usual names, with ``changes``.

    ``partly_rotated``: the architecture can rotate a part of each head.
    """
    heads, head_dim = m.integer("attention.head_count"), m.head_dim()
    kv_heads = changes.get("num_key_value_heads") or m.integer("attention.head_count_kv", default=heads)
    if not m.has("attention.kv_lora_rank") and m.integer("attention.value_length", default=head_dim) != head_dim:
        raise UnsupportedModelError(f"{m.file.path}: key and value heads of different sizes are not supported")
    if heads % kv_heads:
        raise WeightError(f"{m.file.path}: {heads} heads cannot share {kv_heads} key-value heads")
    layer_norm_eps = m.real("attention.layer_norm_epsilon", default=1e-5)
    if "rope_parameters" not in changes:
        changes["rope_parameters"] = m.rope(partial=partly_rotated)
    return {
        "hidden_size": m.integer("embedding_length"),
        "intermediate_size": changes.get("intermediate_size") or m.integer("feed_forward_length"),
        "num_hidden_layers": m.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": m.integer("context_length"),
        "rms_norm_eps": m.real("attention.layer_norm_rms_epsilon", default=1e-5),
        "layer_norm_eps": layer_norm_eps,
        "layer_norm_epsilon": layer_norm_eps,
        "attention_bias": m.holds("blk.0.attn_output.bias"),
        "mlp_bias": m.holds("blk.0.ffn_up.bias"),
        **changes,
    }


def _mixture(m: Metadata, *, renormalize: bool = False) -> dict[str, Any]:
    """A mixture of experts; their size is computed as in llama.cpp where the file lacks it."""
    chosen, inner = m.integer("expert_used_count"), m.integer("feed_forward_length")
    return _decoder(
        m,
        num_experts=m.integer("expert_count"),
        num_experts_per_tok=chosen,
        moe_intermediate_size=m.optional("expert_feed_forward_length") or inner // chosen or 1,
        shared_expert_intermediate_size=m.optional("expert_shared_feed_forward_length") or inner,
        norm_topk_prob=renormalize,
    )


def _clip(m: Metadata) -> dict[str, Any]:
    return {"clip_qkv": m.real("attention.clamp_kqv") if m.has("attention.clamp_kqv") else None}


def _deepseek(m: Metadata) -> dict[str, Any]:
    rope = m.rope(partial=True)
    del rope["partial_rotary_factor"]
    if m.has("rope.scaling.yarn_log_multiplier"):  # written as a tenth of it
        rope["mscale"] = rope["mscale_all_dim"] = round(m.real("rope.scaling.yarn_log_multiplier") * 10, 6)
    turned, is_v3 = m.rotated(), _is_v3(m)
    groups = m.integer("expert_group_count", default=1)
    return _decoder(
        m,
        rope_parameters=rope,
        num_key_value_heads=m.integer("attention.head_count"),
        head_dim=turned,
        q_lora_rank=m.optional("attention.q_lora_rank"),
        kv_lora_rank=m.integer("attention.kv_lora_rank"),
        qk_nope_head_dim=m.integer("attention.key_length_mla", default=m.head_dim()) - turned,
        qk_rope_head_dim=turned,
        v_head_dim=m.optional("attention.value_length_mla") or m.integer("attention.value_length"),
        first_k_dense_replace=m.optional("leading_dense_block_count") or 0,
        n_routed_experts=m.integer("expert_count"),
        n_shared_experts=m.optional("expert_shared_count"),
        num_experts_per_tok=m.integer("expert_used_count"),
        moe_intermediate_size=m.integer("expert_feed_forward_length"),
        routed_scaling_factor=m.real("expert_weights_scale") if m.has("expert_weights_scale") else 1.0,
        norm_topk_prob=m.flag("expert_weights_norm"),
        n_group=groups,
        topk_group=m.integer("expert_group_used_count", default=1),
        topk_method="noaux_tc" if is_v3 else "greedy" if groups == 1 else "group_limited_greedy",
        scoring_func="sigmoid" if is_v3 else "softmax",
        **_prediction(m),
    )


def _is_v3(m: Metadata) -> bool:
    """Whether a "deepseek2" file is of DeepSeek-V3, whose routers are sigmoids."""
    return m.integer("expert_gating_func", default=1) == 2


def _prediction(m: Metadata) -> dict[str, Any]:
    """Layers for multi-token prediction are the last ones of a file, if it has them."""
    extra = m.optional("nextn_predict_layers") or 0
    return {"num_hidden_layers": m.layers() - extra, "num_nextn_predict_layers": extra}


def _like_deepseek3(m: Metadata, **changes: Any) -> dict[str, Any]:
    """The mixture of dots.llm1 and GLM-4-MoE."""
    if m.integer("expert_gating_func", default=2) != 2:
        raise UnsupportedModelError(f"{m.file.path}: {m.arch}.expert_gating_func other than sigmoid is not supported")
    return _decoder(
        m,
        attention_bias=m.holds("blk.0.attn_q.bias"),
        first_k_dense_replace=m.optional("leading_dense_block_count") or 0,
        n_routed_experts=m.integer("expert_count"),
        n_shared_experts=m.optional("expert_shared_count") or 0,
        num_experts_per_tok=m.integer("expert_used_count"),
        moe_intermediate_size=m.integer("expert_feed_forward_length"),
        routed_scaling_factor=m.real("expert_weights_scale") if m.has("expert_weights_scale") else 1.0,
        norm_topk_prob=m.flag("expert_weights_norm"),
        n_group=m.integer("expert_group_count", default=1),
        topk_group=m.integer("expert_group_used_count", default=1),
        **_prediction(m),
        **changes,
    )


def _glm4_moe(m: Metadata) -> dict[str, Any]:
    return _like_deepseek3(m, rope_parameters=m.rope(partial=True), use_qk_norm=m.holds("blk.0.attn_q_norm.weight"))


def _ernie_moe(m: Metadata) -> dict[str, Any]:
    return _decoder(
        m,
        use_bias=m.holds("blk.0.attn_output.bias"),
        moe_num_experts=m.integer("expert_count"),
        moe_k=m.integer("expert_used_count"),
        moe_intermediate_size=m.integer("expert_feed_forward_length"),
        moe_num_shared_experts=m.optional("expert_shared_count") or 0,
        moe_layer_interval=m.integer("interleave_moe_layer_step", default=1),
        moe_layer_start_index=m.optional("leading_dense_block_count") or 0,
        moe_layer_end_index=-1,
    )


def _granite_moe(m: Metadata) -> dict[str, Any]:
    return _granite(m) | {
        "num_local_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "shared_intermediate_size": m.optional("expert_shared_feed_forward_length") or 0,
    }


def _hunyuan_moe(m: Metadata) -> dict[str, Any]:
    inner = m.integer("feed_forward_length")
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if m.integer(key, default=inner) != inner:
            raise UnsupportedModelError(f"{m.file.path}: {m.arch} with experts of different sizes is not supported")
    return _decoder(m, num_experts=m.integer("expert_count"), moe_topk=m.integer("expert_used_count"))


def _minimax_m2(m: Metadata) -> dict[str, Any]:
    if m.integer("expert_gating_func", default=2) != 2:
        raise UnsupportedModelError(f"{m.file.path}: {m.arch}.expert_gating_func other than sigmoid is not supported")
    return _decoder(
        m,
        partly_rotated=True,
        intermediate_size=m.integer("expert_feed_forward_length"),
        num_local_experts=m.integer("expert_count"),
        num_experts_per_tok=m.integer("expert_used_count"),
    )


def _phimoe(m: Metadata) -> dict[str, Any]:
    return _phi3(m) | {
        "num_local_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "lm_head_bias": m.holds("output.bias"),
    }


def _llama4(m: Metadata) -> dict[str, Any]:
    """llama.cpp knows chunks, temperatures and norms of the published models, which files do not say."""
    experts, has_chunks = m.integer("expert_count"), m.file.metadata.get("llama4.attention.sliding_window") != 0
    return _decoder(
        m,
        intermediate_size=m.integer("expert_feed_forward_length"),
        intermediate_size_mlp=m.integer("feed_forward_length"),
        num_local_experts=experts,
        num_experts_per_tok=m.integer("expert_used_count"),
        interleave_moe_layer_step=m.integer("interleave_moe_layer_step", default=1),
        attention_chunk_size=m.integer("attention.sliding_window", default=8192) if has_chunks else None,
        use_qk_norm=experts != 128,
    )


def _gemma(m: Metadata, **changes: Any) -> dict[str, Any]:
    return _decoder(m, **{"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"} | changes)


def _gemma_with_windows(m: Metadata, layers_of_largest: int, pattern: int, **changes: Any) -> dict[str, Any]:
    """Gemma 2 and 3; the number of layers tells the attention's scale, which files lack."""
    layers, window = m.layers(), m.optional("attention.sliding_window")
    sliding = m.sliding_layers(pattern) if window else [False] * layers
    width = m.integer("embedding_length") // m.integer("attention.head_count")
    return _gemma(
        m,
        query_pre_attn_scalar=width if layers == layers_of_largest else m.head_dim(),
        sliding_window=window or m.integer("context_length"),
        layer_types=["sliding_attention" if slides else "full_attention" for slides in sliding],
        **changes,
    )


def _gemma2(m: Metadata) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _gemma_with_windows(m, 46, 2, **{name: m.real(name, default) for name, default in caps.items()})


def _gemma3(m: Metadata) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": m.real("rope.freq_base_swa", default=10000.0)}
    return _gemma_with_windows(
        m,
        62,
        6,
        rope_parameters={"full_attention": m.rope(), "sliding_attention": local},
        final_logit_softcapping=m.real("final_logit_softcapping") if m.has("final_logit_softcapping") else None,
        attn_logit_softcapping=None,
    )


def _gemma4(m: Metadata) -> dict[str, Any]:
    """Sizes of layers are arrays; that values are keys shows in what global layers lack."""
    sliding, shared = m.sliding_layers(6), m.optional("attention.shared_kv_layers") or 0
    kv_heads, inner = m.by_layer("attention.head_count_kv"), m.by_layer("feed_forward_length")
    layers = len(sliding)
    if all(sliding) or any(
        heads != kv_heads[sliding.index(kind)] for heads, kind in zip(kv_heads, sliding, strict=True)
    ):
        raise UnsupportedModelError(
            f"{m.file.path}: {m.arch}.attention.head_count_kv must have one number of KV heads for layers with a "
            f"window, and one for others, not {kv_heads}"
        )
    first_global = sliding.index(False)
    wide = bool(shared) and inner[-1] == 2 * inner[0]
    if inner != [inner[0] * (2 if wide and layer >= layers - shared else 1) for layer in range(layers)]:
        raise UnsupportedModelError(f"{m.file.path}: {m.arch}.feed_forward_length {inner} is not supported")
    experts = m.optional("expert_count") or 0
    mixture = {}
    if experts:
        mixture = {
            "top_k_experts": m.integer("expert_used_count"),
            "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        }
    return {
        "hidden_size": m.integer("embedding_length"),
        "intermediate_size": inner[0],
        "num_hidden_layers": layers,
        "num_attention_heads": m.integer("attention.head_count"),
        "num_key_value_heads": kv_heads[sliding.index(True)] if any(sliding) else kv_heads[0],
        "num_global_key_value_heads": kv_heads[first_global],
        "head_dim": m.integer("attention.key_length_swa", default=m.head_dim()),
        "global_head_dim": m.head_dim(),
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": m.integer("context_length"),
        "rms_norm_eps": m.real("attention.layer_norm_rms_epsilon", default=1e-6),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "sliding_window": m.integer("attention.sliding_window"),
        "attention_k_eq_v": not m.holds(f"blk.{first_global}.attn_v.weight"),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "hidden_size_per_layer_input": m.optional("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": m.rows("per_layer_token_embd.weight") or 0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": m.real("rope.freq_base", default=1e6),
                "partial_rotary_factor": m.rotated_share(),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": m.real("rope.freq_base_swa", default=10000.0),
            },
        },
        "final_logit_softcapping": m.real("final_logit_softcapping") if m.has("final_logit_softcapping") else None,
        "enable_moe_block": bool(experts),
        "num_experts": experts or None,
        **mixture,
    }


def _gemma_embedding(m: Metadata) -> dict[str, Any]:
    m.flag("attention.causal")  # it is not, whether the file says so or not
    return _gemma3(m) | {"use_bidirectional_attention": True}


def _bidirectional(m: Metadata) -> dict[str, Any]:
    m.flag("attention.causal")
    return _decoder(m)


def _phi3(m: Metadata) -> dict[str, Any]:
    rope = m.rope(partial=True)
    original = rope.pop("original_max_position_embeddings", None)
    original = original or m.integer("rope.scaling.original_context_length", default=m.integer("context_length"))
    window = m.optional("attention.sliding_window")
    config = _decoder(m, rope_parameters=rope, sliding_window=window, original_max_position_embeddings=original)
    del config["head_dim"]
    return config


def _gpt2(m: Metadata) -> dict[str, Any]:
    return {
        "n_positions": m.integer("context_length"),
        "n_embd": m.integer("embedding_length"),
        "n_layer": m.layers(),
        "n_head": m.integer("attention.head_count"),
        "n_inner": m.integer("feed_forward_length"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": m.real("attention.layer_norm_epsilon", default=1e-5),
    }


def _gpt_oss(m: Metadata) -> dict[str, Any]:
    rope = m.rope()
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as the models were trained
    return _decoder(
        m,
        rope_parameters=rope,
        intermediate_size=m.integer("expert_feed_forward_length"),
        num_local_experts=m.integer("expert_count"),
        num_experts_per_tok=m.integer("expert_used_count"),
        sliding_window=m.integer("attention.sliding_window"),
        layer_types=["sliding_attention" if slides else "full_attention" for slides in m.sliding_layers(2)],
    )


def _gptneox(m: Metadata) -> dict[str, Any]:
    parallel = m.flag("use_parallel_residual", default=True)
    return _decoder(m, partly_rotated=True, hidden_act="gelu", use_parallel_residual=parallel)


def _encoder(m: Metadata) -> dict[str, Any]:
    if m.flag("attention.causal", default=True):
        raise UnsupportedModelError(f"{m.file.path}: {m.arch} with causal attention is not supported")
    return {
        "hidden_size": m.integer("embedding_length"),
        "intermediate_size": m.integer("feed_forward_length"),
        "num_hidden_layers": m.layers(),
        "num_attention_heads": m.integer("attention.head_count"),
        "hidden_act": "gelu",
        "max_position_embeddings": m.rows("position_embd.weight") or m.integer("context_length"),
        "type_vocab_size": m.rows("token_types.weight") or 1,
        "layer_norm_eps": m.real("attention.layer_norm_epsilon", default=1e-12),
    }


def _classifier(m: Metadata) -> dict[str, Any]:
    count = m.rows("cls.output.weight") or m.rows("cls.output.bias") or 1
    labels = m.file.metadata.get(f"{m.arch}.classifier.output_labels")
    names = labels if isinstance(labels, list) and len(labels) == count else [f"LABEL_{i}" for i in range(count)]
    return _encoder(m) | {"id2label": {str(index): str(name) for index, name in enumerate(names)}}


def _yes_no_scorer(m: Metadata) -> dict[str, Any]:
    """A language model that scores pairs (Qwen3-Reranker): the head's rows of two answers are its classes."""
    count = m.rows("cls.output.weight") or 1
    labels = m.file.metadata.get(f"{m.arch}.classifier.output_labels")
    template = m.file.metadata.get("tokenizer.chat_template.rerank")
    if count != 2 or labels != ["yes", "no"] or not isinstance(template, str) or "{document}" not in template:
        raise UnsupportedModelError(
            f"{m.file.path}: {m.arch} with classes is supported if these are yes and no, and with the chat template "
            f"'rerank' of a query and a document; not with {labels!r}"
        )
    names = {str(index): name for index, name in enumerate(labels)}
    return _decoder(m, id2label=names, sentence_transformers={PAIR_TEMPLATE: template})


def _nomic(m: Metadata) -> dict[str, Any]:
    rope = m.rope()
    if rope.pop("rope_type") != "default":
        raise UnsupportedModelError(f"{m.file.path}: scaled rotary positions of {m.arch} are not supported")
    return _encoder(m) | {"rope_parameters": rope, "hidden_act": "silu"}


def _falcon(m: Metadata) -> dict[str, Any]:
    """Also the 40B and 180B models, which have a norm for each branch."""
    config = _decoder(m, activation="gelu", new_decoder_architecture=m.holds("blk.0.attn_norm_2.weight"))
    kv_heads = config["num_key_value_heads"]
    config |= {"ffn_hidden_size": config["intermediate_size"], "num_kv_heads": kv_heads}
    return config | {"multi_query": kv_heads == 1}


def _bloom(m: Metadata) -> dict[str, Any]:
    config = _decoder(m, seq_length=m.integer("context_length"))
    if config["intermediate_size"] != 4 * config["hidden_size"]:
        raise UnsupportedModelError(f"{m.file.path}: {m.arch} has an inner size of 4 times the hidden one")
    return config


def _layer_types(m: Metadata, pattern: int) -> dict[str, Any]:
    """The window, and the layers that have it; all layers are full without one."""
    window = m.optional("attention.sliding_window")
    sliding = m.sliding_layers(pattern) if window else [False] * m.layers()
    types = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    return {"sliding_window": window, "layer_types": types}


def _olmo3(m: Metadata) -> dict[str, Any]:
    """A file's scaling is that of the layers without a window."""
    full = m.rope()
    if m.has("rope.scaling.yarn_attn_factor"):
        full["attention_factor"] = m.real("rope.scaling.yarn_attn_factor")
    ropes = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": full["rope_theta"]}}
    return _decoder(m, rope_parameters=ropes, **_layer_types(m, 4))


def _granite(m: Metadata, **changes: Any) -> dict[str, Any]:
    def factor(key: str) -> float:
        return m.real(key) if m.has(key) else 1.0

    return _decoder(
        m,
        attention_multiplier=factor("attention.scale"),
        embedding_multiplier=factor("embedding_scale"),
        residual_multiplier=factor("residual_scale"),
        logits_scaling=factor("logit_scale"),
        **changes,
    )


def _mistral3(m: Metadata) -> dict[str, Any]:
    rope = m.rope()
    if m.has("rope.scaling.yarn_log_multiplier"):
        rope |= {"mscale": 1.0, "mscale_all_dim": m.real("rope.scaling.yarn_log_multiplier")}
    if m.has("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = m.real("attention.temperature_scale")
    return _decoder(m, rope_parameters=rope)


def _cohere(m: Metadata) -> dict[str, Any]:
    return _decoder(m, logit_scale=m.real("logit_scale"), use_qk_norm=m.holds("blk.0.attn_q_norm.weight"))


def _cohere2(m: Metadata) -> dict[str, Any]:
    return _decoder(m, logit_scale=m.real("logit_scale"), **_layer_types(m, 4))


def _lfm2(m: Metadata, **changes: Any) -> dict[str, Any]:
    kv_heads, attends = m.kv_heads()
    return _decoder(
        m,
        num_key_value_heads=kv_heads,
        layer_types=["full_attention" if attention else "conv" for attention in attends],
        conv_L_cache=m.integer("shortconv.l_cache"),
        conv_bias=m.holds_any("shortconv.in_proj.bias"),
        norm_eps=m.real("attention.layer_norm_rms_epsilon", default=1e-5),
        block_auto_adjust_ff_dim=False,
        **changes,
    )


def _lfm2_moe(m: Metadata) -> dict[str, Any]:
    if m.integer("expert_gating_func", default=2) != 2:
        raise UnsupportedModelError(f"{m.file.path}: {m.arch}.expert_gating_func other than sigmoid is not supported")
    return _lfm2(
        m,
        num_experts=m.integer("expert_count"),
        num_experts_per_tok=m.integer("expert_used_count"),
        num_dense_layers=m.optional("leading_dense_block_count") or 0,
        moe_intermediate_size=m.integer("expert_feed_forward_length"),
        routed_scaling_factor=m.real("expert_weights_scale") if m.has("expert_weights_scale") else 1.0,
        use_expert_bias=m.holds_any("exp_probs_b.bias"),
    )


def _gated_delta(m: Metadata, **changes: Any) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5. Sections of rotary positions are not read: of a text, all are equal."""
    layers, value_heads = _prediction(m)["num_hidden_layers"], m.integer("ssm.time_step_rank")
    if m.integer("ssm.inner_size") % value_heads:
        raise WeightError(f"{m.file.path}: {m.arch}.ssm.inner_size must be a multiple of its {value_heads} heads")
    return _decoder(
        m,
        rope_parameters=m.rope(partial=True),
        attention_bias=m.holds_any("attn_output.bias"),
        num_hidden_layers=layers,
        layer_types=["linear_attention" if has else "full_attention" for has in m.recurrent_layers()[:layers]],
        linear_conv_kernel_dim=m.integer("ssm.conv_kernel"),
        linear_key_head_dim=m.integer("ssm.state_size"),
        linear_value_head_dim=m.integer("ssm.inner_size") // value_heads,
        linear_num_key_heads=m.integer("ssm.group_count"),
        linear_num_value_heads=value_heads,
        **changes,
    )


def _gated_delta_moe(m: Metadata) -> dict[str, Any]:
    inner = m.integer("expert_feed_forward_length")
    return _gated_delta(
        m,
        intermediate_size=m.optional("feed_forward_length") or inner,
        num_experts=m.integer("expert_count"),
        num_experts_per_tok=m.integer("expert_used_count"),
        moe_intermediate_size=inner,
        shared_expert_intermediate_size=m.integer("expert_shared_feed_forward_length", default=inner),
        norm_topk_prob=True,
    )


def _mamba(m: Metadata, **changes: Any) -> dict[str, Any]:
    """Mamba 1 and 2. No file says how long texts may be: 2^20 is the converter's number."""
    hidden, inner = m.integer("embedding_length"), m.integer("ssm.inner_size")
    length = m.integer("context_length", default=1 << 20)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": m.layers(),
        "expand": inner / hidden,
        "state_size": m.integer("ssm.state_size"),
        "conv_kernel": m.integer("ssm.conv_kernel"),
        "use_conv_bias": m.holds("blk.0.ssm_conv1d.bias"),
        "use_bias": m.holds("blk.0.ssm_in.bias"),
        "layer_norm_epsilon": m.real("attention.layer_norm_rms_epsilon", default=1e-5),
        **({} if length == 1 << 20 else {"max_position_embeddings": length}),
        **changes,
    }


def _mamba1(m: Metadata) -> dict[str, Any]:
    return _mamba(m, time_step_rank=m.integer("ssm.time_step_rank"))


def _mamba2(m: Metadata) -> dict[str, Any]:
    heads, inner = m.integer("ssm.time_step_rank"), m.integer("ssm.inner_size")
    if inner % heads:
        raise WeightError(f"{m.file.path}: {m.arch}.ssm.inner_size ({inner}) must be a multiple of its {heads} heads")
    return _mamba(m, num_heads=heads, head_dim=inner // heads, n_groups=m.integer("ssm.group_count", default=1))


def _mamba_mixer(m: Metadata) -> dict[str, Any]:
    """The mixer of networks that have attention, too."""
    return {
        "mamba_expand": m.integer("ssm.inner_size") / m.integer("embedding_length"),
        "mamba_d_state": m.integer("ssm.state_size"),
        "mamba_d_conv": m.integer("ssm.conv_kernel"),
        "mamba_conv_bias": m.holds_any("ssm_conv1d.bias"),
        "mamba_proj_bias": m.holds_any("ssm_in.bias"),
    }


def _mamba2_mixer(m: Metadata) -> dict[str, Any]:
    heads, inner = m.integer("ssm.time_step_rank"), m.integer("ssm.inner_size")
    if inner % heads:
        raise WeightError(f"{m.file.path}: {m.arch}.ssm.inner_size ({inner}) must be a multiple of its {heads} heads")
    groups = m.integer("ssm.group_count", default=1)
    return {**_mamba_mixer(m), "mamba_n_heads": heads, "mamba_d_head": inner // heads, "mamba_n_groups": groups}


def _granite_hybrid(m: Metadata) -> dict[str, Any]:
    kv_heads, attends = m.kv_heads()
    inner = m.integer("feed_forward_length")
    return _granite(
        m,
        num_key_value_heads=kv_heads,
        layer_types=["attention" if attention else "mamba" for attention in attends],
        attention_bias=m.holds_any("attn_output.bias"),
        num_local_experts=m.optional("expert_count") or 0,
        num_experts_per_tok=m.optional("expert_used_count") or 1,
        shared_intermediate_size=m.optional("expert_shared_feed_forward_length") or inner,
        **_mamba2_mixer(m),
    )


def _bamba(m: Metadata) -> dict[str, Any]:
    kv_heads, attends = m.kv_heads()
    return _decoder(
        m,
        partly_rotated=True,
        num_key_value_heads=kv_heads,
        attn_layer_indices=[layer for layer, attention in enumerate(attends) if attention],
        attention_bias=m.holds_any("attn_output.bias"),
        **_mamba2_mixer(m),
    )


def _nemotron_h(m: Metadata) -> dict[str, Any]:
    """Layers are what their tensors say: files have numbers of KV heads and inner sizes for each."""
    layers, heads, head_dim = _prediction(m)["num_hidden_layers"], m.integer("attention.head_count"), m.head_dim()
    experts = m.optional("expert_count")  # some files without experts have a number
    mixer, tensors = _mamba2_mixer(m), {"ssm_in": "mamba", "attn_output": "attention", "ffn_gate_inp": "moe"}
    kinds = [
        next((kind for name, kind in tensors.items() if m.holds(f"blk.{layer}.{name}.weight")), "mlp")
        for layer in range(layers)
    ]
    config = {
        "hidden_size": m.integer("embedding_length"),
        "layers_block_type": kinds,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": m.kv_heads()[0],
        "head_dim": head_dim,
        "max_position_embeddings": m.integer("context_length"),
        "layer_norm_epsilon": m.real("attention.layer_norm_rms_epsilon", default=1e-5),
        "mlp_bias": m.holds_any("ffn_up.bias") or m.holds_any("ffn_up_shexp.bias"),
        "mamba_num_heads": mixer["mamba_n_heads"],
        "mamba_head_dim": mixer["mamba_d_head"],
        "n_groups": mixer["mamba_n_groups"],
        "ssm_state_size": mixer["mamba_d_state"],
        "conv_kernel": mixer["mamba_d_conv"],
        "use_conv_bias": mixer["mamba_conv_bias"],
        "use_bias": mixer["mamba_proj_bias"],
    }
    if "moe" in kinds:
        if m.integer("expert_gating_func", default=2) != 2:
            raise UnsupportedModelError(
                f"{m.file.path}: {m.arch}.expert_gating_func other than sigmoid is not supported"
            )
        config |= {
            "n_routed_experts": experts,
            "num_experts_per_tok": m.integer("expert_used_count"),
            "moe_intermediate_size": m.integer("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length"),
            "moe_latent_size": m.optional("moe_latent_size"),
            "routed_scaling_factor": m.real("expert_weights_scale") if m.has("expert_weights_scale") else 1.0,
            "norm_topk_prob": m.flag("expert_weights_norm", default=True),
            "n_group": m.optional("expert_group_count") or 1,
            "topk_group": m.optional("expert_group_used_count") or 1,
        }
    inner = m.rows(f"blk.{kinds.index('mlp')}.ffn_up.weight") if "mlp" in kinds else config.get("moe_intermediate_size")
    return config | {"intermediate_size": inner or 1}


def _falcon_h1(m: Metadata) -> dict[str, Any]:
    """The converter multiplies matrices by the model's factors. llama.cpp applies the gate before the norm."""
    return _decoder(
        m,
        mamba_d_ssm=m.integer("ssm.inner_size"),
        mamba_rms_norm=m.holds_any("ssm_norm.weight"),
        mamba_norm_before_gate=False,
        **_mamba2_mixer(m),
    )


def _jamba(m: Metadata) -> dict[str, Any]:
    """Files have no period of layers with attention or with experts, but the layers."""
    kv_heads, attends = m.kv_heads()
    sparse = [m.holds(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(m.layers())]
    periods: dict[str, Any] = {}
    for name, layers in {"attn": attends, "expert": sparse}.items():
        indices = [layer for layer, has in enumerate(layers) if has] or [0]
        period = indices[1] - indices[0] if len(indices) > 1 else len(layers)
        if any(layers) and indices != list(range(indices[0], len(layers), period)):
            raise UnsupportedModelError(
                f"{m.file.path}: the layers {indices} of {m.arch} with {name} are no arithmetic series: not supported"
            )
        periods |= {f"{name}_layer_period": period, f"{name}_layer_offset": indices[0]}
    return _decoder(
        m,
        num_key_value_heads=kv_heads,
        num_experts=m.integer("expert_count") if any(sparse) else 1,
        num_experts_per_tok=m.optional("expert_used_count") or 1,
        mamba_dt_rank=m.integer("ssm.time_step_rank"),
        **periods,
        **_mamba_mixer(m),
    )


def _kimi_linear(m: Metadata) -> dict[str, Any]:
    _, attends = m.kv_heads()
    if m.integer("expert_gating_func", default=2) != 2:
        raise UnsupportedModelError(f"{m.file.path}: {m.arch}.expert_gating_func other than sigmoid is not supported")
    heads, turned = m.integer("attention.head_count"), m.integer("rope.dimension_count")
    return {
        "hidden_size": m.integer("embedding_length"),
        "intermediate_size": m.integer("feed_forward_length"),
        "num_hidden_layers": m.layers(),
        "num_attention_heads": heads,
        "max_position_embeddings": m.integer("context_length"),
        "rms_norm_eps": m.real("attention.layer_norm_rms_epsilon", default=1e-5),
        "layer_types": ["full_attention" if attention else "linear_attention" for attention in attends],
        "linear_num_heads": heads,
        "linear_head_dim": m.integer("kda.head_dim"),
        "linear_conv_kernel_dim": m.integer("ssm.conv_kernel"),
        "q_lora_rank": m.optional("attention.q_lora_rank"),
        "kv_lora_rank": m.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": m.integer("attention.key_length_mla") - turned,
        "v_head_dim": m.integer("attention.value_length_mla"),
        "first_k_dense_replace": m.optional("leading_dense_block_count") or 0,
        "num_experts": m.integer("expert_count"),
        "num_experts_per_token": m.integer("expert_used_count"),
        "num_shared_experts": m.optional("expert_shared_count") or 0,
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "routed_scaling_factor": m.real("expert_weights_scale") if m.has("expert_weights_scale") else 1.0,
        "moe_renormalize": m.flag("expert_weights_norm", default=True),
        "n_group": m.optional("expert_group_count") or 1,
        "topk_group": m.optional("expert_group_used_count") or 1,
    }


def _stablelm(m: Metadata) -> dict[str, Any]:
    return _decoder(
        m,
        partly_rotated=True,
        use_qkv_bias=m.holds("blk.0.attn_q.bias"),
        qk_layernorm=m.holds("blk.0.attn_q_norm.weight"),
        use_parallel_residual=not m.holds("blk.0.ffn_norm.weight"),
    )


def _glm(m: Metadata) -> dict[str, Any]:
    has_bias = m.holds("blk.0.attn_q.bias") or m.holds("blk.0.attn_qkv.bias")
    return _decoder(m, partly_rotated=True, attention_bias=has_bias)


def _seed_oss(m: Metadata) -> dict[str, Any]:
    qkv, out = (m.holds(f"blk.0.{name}.bias") for name in ("attn_q", "attn_output"))
    return _decoder(m, attention_bias=qkv, attention_out_bias=out)


#: general.architecture, with a suffix where models share one -> the class in transformers, and its own settings.
ARCHITECTURES: dict[str, tuple[str, Callable[[Metadata], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _decoder),
    "llama-embed": ("LlamaBidirectionalModel", _bidirectional),
    "llama with a window": (
        "MistralForCausalLM",
        lambda m: _decoder(m, sliding_window=m.integer("attention.sliding_window")),
    ),
    "llama with experts": ("MixtralForCausalLM", _mixture),
    "qwen2": ("Qwen2ForCausalLM", _decoder),
    "qwen2vl": ("Qwen2ForCausalLM", _decoder),
    "qwen2moe": ("Qwen2MoeForCausalLM", _mixture),
    "qwen3": ("Qwen3ForCausalLM", _decoder),
    "qwen3 with classes": ("Qwen3ForSequenceClassification", _yes_no_scorer),
    "qwen3moe": ("Qwen3MoeForCausalLM", partial(_mixture, renormalize=True)),
    "qwen3vl": ("Qwen3ForCausalLM", _decoder),
    "qwen3vlmoe": ("Qwen3MoeForCausalLM", partial(_mixture, renormalize=True)),
    "olmo": ("OlmoForCausalLM", lambda m: _decoder(m, **_clip(m))),
    "olmo2": ("Olmo2ForCausalLM", _decoder),
    "olmo2 with a window": ("Olmo3ForCausalLM", _olmo3),
    "apertus": ("ApertusForCausalLM", partial(_decoder, hidden_act="xielu")),
    "arcee": ("ArceeForCausalLM", partial(_decoder, hidden_act="relu2")),
    "chatglm": ("GlmForCausalLM", _glm),
    "cohere2": ("Cohere2ForCausalLM", _cohere2),
    "command-r": ("CohereForCausalLM", _cohere),
    "ernie4_5": ("Ernie4_5ForCausalLM", lambda m: _decoder(m, use_bias=m.holds("blk.0.attn_output.bias"))),
    "exaone4": ("Exaone4ForCausalLM", lambda m: _decoder(m, **_layer_types(m, 4))),
    "glm4": ("Glm4ForCausalLM", _glm),
    "granite": ("GraniteForCausalLM", _granite),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", _granite_hybrid),
    "granitehybrid with positions": ("BambaForCausalLM", _bamba),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", _decoder),
    "jais2": ("Jais2ForCausalLM", partial(_decoder, hidden_act="relu2")),
    "mistral3": ("Ministral3ForCausalLM", _mistral3),
    "nemotron": (
        "NemotronForCausalLM",
        lambda m: _decoder(
            m, partly_rotated=True, hidden_act="relu2", norm_eps=m.real("attention.layer_norm_epsilon", default=1e-5)
        ),
    ),
    "phi2": ("PhiForCausalLM", partial(_decoder, partly_rotated=True, hidden_act="gelu_new")),
    "seed_oss": ("SeedOssForCausalLM", _seed_oss),
    "smollm3": ("SmolLM3ForCausalLM", _decoder),
    "stablelm": ("StableLmForCausalLM", _stablelm),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        lambda m: _decoder(
            m, hidden_act="gelu_pytorch_tanh", norm_epsilon=m.real("attention.layer_norm_epsilon", default=1e-5)
        ),
    ),
    "olmoe": ("OlmoeForCausalLM", lambda m: _mixture(m) | _clip(m)),
    "phimoe": ("PhimoeForCausalLM", _phimoe),
    "glm4moe": ("Glm4MoeForCausalLM", _glm4_moe),
    "dots1": ("Dots1ForCausalLM", partial(_like_deepseek3, sliding_window=None)),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", _ernie_moe),
    "granitemoe": ("GraniteMoeSharedForCausalLM", _granite_moe),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", _hunyuan_moe),
    "llama4": ("Llama4ForCausalLM", _llama4),
    "minimax-m2": ("MiniMaxM2ForCausalLM", _minimax_m2),
    "falcon-h1": ("FalconH1ForCausalLM", _falcon_h1),
    "jamba": ("JambaForCausalLM", _jamba),
    "kimi-linear": ("KimiLinearForCausalLM", _kimi_linear),
    "lfm2": ("Lfm2ForCausalLM", _lfm2),
    "lfm2moe": ("Lfm2MoeForCausalLM", _lfm2_moe),
    "mamba": ("MambaForCausalLM", _mamba1),
    "mamba with norms": ("FalconMambaForCausalLM", _mamba1),
    "mamba2": ("Mamba2ForCausalLM", _mamba2),
    "nemotron_h": ("NemotronHForCausalLM", _nemotron_h),
    "nemotron_h_moe": ("NemotronHForCausalLM", _nemotron_h),
    "qwen3next": ("Qwen3NextForCausalLM", _gated_delta_moe),
    "qwen35": ("Qwen3_5ForCausalLM", _gated_delta),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", _gated_delta_moe),
    "deepseek2": ("DeepseekV2ForCausalLM", _deepseek),
    "deepseek2 with sigmoids": ("DeepseekV3ForCausalLM", _deepseek),
    "gemma": ("GemmaForCausalLM", _gemma),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "gemma4": ("Gemma4ForCausalLM", _gemma4),
    "gemma-embedding": ("Gemma3TextModel", _gemma_embedding),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "gpt-oss": ("GptOssForCausalLM", _gpt_oss),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "gptj": ("GPTJForCausalLM", lambda m: _gpt2(m) | {"rotary_dim": m.rotated()}),
    "gptneox": ("GPTNeoXForCausalLM", _gptneox),
    "falcon": ("FalconForCausalLM", _falcon),
    "bloom": ("BloomForCausalLM", _bloom),
    "bert": ("BertModel", _encoder),
    "bert with classes": ("BertForSequenceClassification", _classifier),
    "eurobert": ("EuroBertModel", _bidirectional),
    "nomic-bert": ("NomicBertModel", _nomic),
}


def _kind(m: Metadata) -> str:
    """The key of ``ARCHITECTURES`` for a file."""
    name = m.arch
    if name == "llama" and m.has("expert_count"):
        name = "llama with experts"
    elif name == "llama" and m.has("attention.sliding_window"):
        name = "llama with a window"
    elif name == "olmo2" and m.has("attention.sliding_window"):
        name = "olmo2 with a window"
    elif name in ("bert", "qwen3") and m.holds("cls.output.weight"):
        name = f"{name} with classes"
    elif name == "granitehybrid" and m.flag("rope.scaling.finetuned"):
        name = "granitehybrid with positions"
    elif name == "mamba" and m.flag("ssm.dt_b_c_rms"):
        name = "mamba with norms"
    elif name == "deepseek2" and _is_v3(m):
        name = "deepseek2 with sigmoids"
    if name == "clip":
        raise UnsupportedModelError(
            f"{m.file.path} has the tower of a model's images, and no language model: give that model's GGUF file as "
            "the model, and this file as mmproj"
        )
    if name not in ARCHITECTURES:
        supported = [kind for kind in ARCHITECTURES if " " not in kind]
        raise unsupported(f"{m.file.path}: GGUF architecture", name, supported)
    return name


# tokenizer.json and tokenizer_config.json

#: llama.cpp's default ids of special tokens by kind (``tokenizer.ggml.model``).
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "gpt2": {},
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "bert": {"cls": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "gemma4": {},
}


def write_tokenizer(file: GGUFFile, folder: Path, vocab_size: int) -> None:
    """Writes the file's tokenizer in the format of the Hugging Face libraries."""
    data = _Data(file, vocab_size)
    if data.kind == "gpt2":
        tokenizer = _byte_level(data)
    elif data.kind == "gemma4":
        tokenizer = gemma_bpe(data.path, data.ids, parse_merges(data.path, data.get("merges") or ()))
        add_by_type(tokenizer, data.tokens, data.types, CONTROL)
    elif data.kind in ("llama", "t5"):
        tokenizer = _sentencepiece(data).build()
    else:
        tokenizer = _word_piece(data)
    config = _config(data)
    if data.kind == "bert":
        surround(tokenizer, [config["cls_token"]], [config["sep_token"]], between=[])
    else:
        before = [config["bos_token"]] if config["add_bos_token"] else []
        surround(tokenizer, before, [config["eos_token"]] if config["add_eos_token"] else [])
    # Not ``save``, which raises plain Exception where the disk is full.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


class _Data:
    """The checked metadata under ``tokenizer.``."""

    def __init__(self, file: GGUFFile, vocab_size: int) -> None:
        self.path = file.path
        self.metadata = file.metadata
        self.kind: str = self.get("model")
        tokens = self.get("tokens")
        if self.kind is None or not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
            raise TokenizerError(f"{file.path} has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
        if self.kind not in _DEFAULT_IDS:
            kinds = ", ".join(_DEFAULT_IDS)
            raise UnsupportedModelError(
                f"{file.path}: tokenizer.ggml.model = {self.kind!r} is not supported; supported: {kinds}"
            )
        self.tokens: list[str] = tokens
        if len(tokens) > vocab_size:
            raise TokenizerError(f"{file.path} has {len(tokens)} tokens but only {vocab_size} embeddings")
        self.ids = {token: i for i, token in enumerate(tokens)}
        if len(self.ids) != len(tokens):
            twice = next(t for i, t in enumerate(tokens) if self.ids[t] != i)
            raise TokenizerError(f"{file.path}: the token {twice!r} occurs twice")
        self.types = self._numbers("token_type", [NORMAL] * len(tokens))

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def scores(self) -> list[float]:
        return self._numbers("scores", None)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default))

    def token_id(self, key: str) -> int | None:
        """The id in ``tokenizer.ggml.<key>_token_id``, else the default of the kind; None if there is none."""
        name = f"{key}_token_id"
        default = _DEFAULT_IDS[self.kind].get(key, len(self.tokens))
        token = self.get(name, default if default < len(self.tokens) else None)
        if token is not None and (not isinstance(token, int) or not 0 <= token < len(self.tokens)):
            raise TokenizerError(f"{self.path}: tokenizer.ggml.{name} = {token} is no id of a token")
        return token

    def token(self, key: str) -> str | None:
        token_id = self.token_id(key)
        return None if token_id is None else self.tokens[token_id]

    def _numbers(self, key: str, default: list[Any] | None) -> list[Any]:
        value = self.get(key)
        values = default if value is None else value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, list) or len(values) != len(self.tokens):
            raise TokenizerError(f"{self.path}: tokenizer.ggml.{key} must have one entry for each token")
        return values


def _byte_level(data: _Data) -> Tokenizer:
    if not (lines := data.get("merges")):
        raise TokenizerError(f"{data.path} has no tokenizer.ggml.merges")
    tokenizer = ByteLevelVocabulary(data.path, data.ids, parse_merges(data.path, lines), _family(data)).build()
    add_by_type(tokenizer, data.tokens, data.types, CONTROL)
    return tokenizer


def _family(data: _Data) -> PreTokenizer:
    name = data.get("pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{data.path}: tokenizer.ggml.pre = {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _sentencepiece(data: _Data) -> SentencePieceModel:
    """BPE with byte fallback (Llama 2, Mistral, Gemma), or a unigram model (T5)."""
    unigram, unknown, charsmap = data.kind == "t5", data.token_id("unknown"), data.get("precompiled_charsmap")
    return SentencePieceModel(
        data.path,
        data.tokens,
        data.scores(),
        data.types,
        unigram=unigram,
        unk_id=unknown if unknown is not None else 0 if unigram else -1,
        byte_fallback=not unigram or BYTE in data.types,
        prefix_space=data.flag("add_space_prefix", True),
        collapse_spaces=unigram and data.flag("remove_extra_whitespaces", True),
        charsmap=charsmap.tobytes() if unigram and hasattr(charsmap, "tobytes") else b"",
    )


def _word_piece(data: _Data) -> Tokenizer:
    """The file marks the beginning of a word by ``▁``; BERT marks the continuation by ``##``."""
    kinds = list(zip(data.tokens, data.types, strict=True))
    whole = {t for t, k in kinds if k != NORMAL or (t[:1] == "[" and t[-1:] == "]")}
    tokens = [t if t in whole else t[1:] if t.startswith("▁") else f"##{t}" for t in data.tokens]
    needed = {key: data.token(key) for key in ("unknown", "cls", "seperator")}
    if missing := [key for key, token in needed.items() if token not in whole]:
        raise TokenizerError(f"{data.path}: tokenizer.ggml.{missing[0]}_token_id names no special token")
    lowercase = data.flag("normalizer.lowercase", True)
    accents = data.flag("normalizer.strip_accents", lowercase)
    unknown = str(needed["unknown"])
    tokenizer = word_piece(data.path, tokens, unknown=unknown, lowercase=lowercase, strip_accents=accents)
    add_by_type(tokenizer, tokens, data.types, CONTROL)
    return tokenizer


def _config(data: _Data) -> dict[str, Any]:
    names = {
        "bos_token": data.token("bos"),
        "eos_token": data.token("eos"),
        "unk_token": data.token("unknown"),
        "pad_token": data.token("padding"),
        "sep_token": data.token("seperator"),  # the format's own spelling
        "cls_token": data.token("cls"),
        "mask_token": data.token("mask"),
    }
    adds_bos = data.kind in ("gemma4", "llama") or (data.kind == "gpt2" and _family(data).adds_bos)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(data.get("add_bos_token", adds_bos)) and names["bos_token"] is not None,
        "add_eos_token": bool(data.get("add_eos_token", data.kind == "t5")) and names["eos_token"] is not None,
        **{name: token for name, token in names.items() if token is not None},
    }
    # The tokens around a gap; older files name them without "fim".
    keys = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid"}
    fim = {name: data.token(key) or data.token(name) for name, key in keys.items()}
    if all(fim.values()):
        config["fim_tokens"] = fim
    default, prefix = data.metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    named = {
        key.removeprefix(prefix): value
        for key, value in data.metadata.items()
        if key.startswith(prefix) and isinstance(value, str)
    }
    if named:
        templates = ({"default": default} if isinstance(default, str) else {}) | named
        config["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    elif isinstance(default, str) and default:
        config["chat_template"] = default
    return config
