"""GGUF architectures: what transformers calls their models, settings and tensors.

A table for each: ``ARCHITECTURES`` has all. Names of tensors and keys are those of the gguf package
(``gguf.constants``), layouts those that llama.cpp's converter writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.loader import gguf_settings as settings
from octavo.loader.gguf_entries import (
    HEAD_NORMS,
    NORMS,
    Entry,
    attention,
    ends,
    experts,
    gated_mlp,
    head,
    layer_norms,
    matrix,
    rms_norms,
)
from octavo.loader.gguf_keys import Keys
from octavo.models.registry import unsupported


@dataclass(frozen=True)
class Architecture:
    """A kind of model in GGUF files."""

    model_type: str
    #: The class in transformers.
    architecture: str
    #: The fields of config.json, except those of all architectures.
    config: Callable[[Keys], dict[str, Any]]
    #: Before the names of a layer's tensors in transformers; ``{i}`` is the layer.
    prefix: str
    layer: tuple[Entry, ...]
    #: The tensors that are in no layer.
    others: tuple[Entry, ...]


_LLAMA_LAYER = (
    *rms_norms(*NORMS),
    *attention("interleaved", bias="attention_bias", out_bias="attention_bias"),
    *gated_mlp(bias="mlp_bias"),
)
_MIXTRAL_LAYER = (
    *rms_norms(*NORMS),
    *attention("interleaved"),
    *experts("F", "block_sparse_moe", ("w1", "w3", "w2")),
)
#: Norms over all heads together.
_PROJECTION_NORMS = (*rms_norms(HEAD_NORMS[0], size="Q"), *rms_norms(HEAD_NORMS[1], size="K"))
_GEMMA_LAYER = (*rms_norms(*NORMS, added=1.0), *attention(), *gated_mlp())
_GEMMA2_LAYER = (
    *rms_norms(
        ("attn_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        added=1.0,
    ),
    *attention(),
    *gated_mlp(),
)
_QWEN2_MOE_LAYER = (
    *rms_norms(*NORMS),
    *attention(bias=True),
    *experts("moe_intermediate_size"),
    *gated_mlp("mlp.shared_expert", "shared_expert_intermediate_size", "_shexp"),
    Entry("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", "1 E"),
)
_DEEPSEEK_LAYER = (
    *rms_norms(*NORMS),
    *matrix("attn_q", "self_attn.q_proj", "HK E", when="!compressed_queries"),
    *matrix("attn_q_a", "self_attn.q_a_proj", "q_lora_rank E", when="compressed_queries"),
    Entry("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", "q_lora_rank", when="compressed_queries"),
    *matrix("attn_q_b", "self_attn.q_b_proj", "HK q_lora_rank", when="compressed_queries"),
    *matrix("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", "R+P E"),
    *rms_norms(("attn_kv_a_norm", "self_attn.kv_a_layernorm"), size="R"),
    *matrix("attn_kv_b", "self_attn.kv_b_proj", "HB R", when="!split_kv_b"),
    Entry(
        "attn_k_b.weight",
        "self_attn.kv_b_proj.weight",
        "H R N",
        when="split_kv_b",
        beside=("attn_v_b.weight", "H W R"),
    ),
    *matrix("attn_output", "self_attn.o_proj", "E HV"),
    *gated_mlp(when="dense"),
    *experts("moe_intermediate_size", when="!dense"),
    Entry("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", "X", when="choice_bias"),
    *gated_mlp("mlp.shared_experts", "S", "_shexp", when="shared"),
)
_PHI3_LAYER = (
    *rms_norms(*NORMS),
    *matrix("attn_qkv", "self_attn.qkv_proj", "Q+2K E"),
    *matrix("attn_output", "self_attn.o_proj", "E Q"),
    *matrix("ffn_up", "mlp.gate_up_proj", "2F E"),
    *matrix("ffn_down", "mlp.down_proj", "E F"),
)
_GPT2_LAYER = (
    *layer_norms(("attn_norm", "ln_1"), ("ffn_norm", "ln_2")),
    *matrix("attn_qkv", "attn.c_attn", "3E E", bias=True, transposed=True),
    *matrix("attn_output", "attn.c_proj", "E E", bias=True, transposed=True),
    *matrix("ffn_up", "mlp.c_fc", "F E", bias=True, transposed=True),
    *matrix("ffn_down", "mlp.c_proj", "E F", bias=True, transposed=True),
)
_GPTJ_LAYER = (
    *layer_norms(("attn_norm", "ln_1")),
    *matrix("attn_q", "attn.q_proj", "E E"),
    *matrix("attn_k", "attn.k_proj", "E E"),
    *matrix("attn_v", "attn.v_proj", "E E"),
    *matrix("attn_output", "attn.out_proj", "E E"),
    *matrix("ffn_up", "mlp.fc_in", "F E", bias=True),
    *matrix("ffn_down", "mlp.fc_out", "E F", bias=True),
)


def _neox_like(attention_name: str, bias: bool) -> tuple[Entry, ...]:
    """The matrices of GPT-NeoX, Falcon and BLOOM, which differ in biases."""
    return (
        *matrix("attn_qkv", f"{attention_name}.query_key_value", "Q+2K E", bias=bias, order="qkv"),
        *matrix("attn_output", f"{attention_name}.dense", "E Q", bias=bias),
        *matrix("ffn_up", "mlp.dense_h_to_4h", "F E", bias=bias),
        *matrix("ffn_down", "mlp.dense_4h_to_h", "E F", bias=bias),
    )


_LAYER_NORMS = tuple(layer_norms(*NORMS))
_GPT_HEAD = (*layer_norms(("output_norm", "transformer.ln_f")), *head())

#: By the value of general.architecture, with what tells apart the models that share one.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", settings.llama_biased, "model.layers.{i}.", _LLAMA_LAYER, ends()
    ),
    "llama with a window": Architecture(
        "mistral", "MistralForCausalLM", settings.mistral, "model.layers.{i}.", _LLAMA_LAYER, ends()
    ),
    "llama with experts": Architecture(
        "mixtral", "MixtralForCausalLM", settings.mixtral, "model.layers.{i}.", _MIXTRAL_LAYER, ends()
    ),
    "qwen2": Architecture(
        "qwen2",
        "Qwen2ForCausalLM",
        settings.llama,
        "model.layers.{i}.",
        (*rms_norms(*NORMS), *attention(bias=True), *gated_mlp()),
        ends(),
    ),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", settings.qwen2_moe, "model.layers.{i}.", _QWEN2_MOE_LAYER, ends()
    ),
    "qwen3": Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        settings.qwen3,
        "model.layers.{i}.",
        (
            *rms_norms(*NORMS),
            *rms_norms(*HEAD_NORMS, size="D"),
            *attention(bias="attention_bias", out_bias="attention_bias"),
            *gated_mlp(),
        ),
        ends(),
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        settings.qwen3_moe,
        "model.layers.{i}.",
        (
            *rms_norms(*NORMS),
            *rms_norms(*HEAD_NORMS, size="D"),
            *attention(),
            *experts("moe_intermediate_size"),
        ),
        ends(),
    ),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        settings.olmo2,
        "model.layers.{i}.",
        (
            *rms_norms(("post_attention_norm", "post_attention_layernorm")),
            *rms_norms(("post_ffw_norm", "post_feedforward_layernorm")),
            *_PROJECTION_NORMS,
            *attention(),
            *gated_mlp(),
        ),
        ends(),
    ),
    "olmoe": Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        settings.olmoe,
        "model.layers.{i}.",
        (
            *rms_norms(*NORMS),
            *_PROJECTION_NORMS,
            *attention(),
            *experts("F"),
        ),
        ends(),
    ),
    "deepseek2": Architecture(
        "deepseek_v2", "DeepseekV2ForCausalLM", settings.deepseek, "model.layers.{i}.", _DEEPSEEK_LAYER, ends()
    ),
    "deepseek2 with sigmoids": Architecture(
        "deepseek_v3", "DeepseekV3ForCausalLM", settings.deepseek, "model.layers.{i}.", _DEEPSEEK_LAYER, ends()
    ),
    "gemma": Architecture(
        "gemma", "GemmaForCausalLM", settings.gemma1, "model.layers.{i}.", _GEMMA_LAYER, ends(added=1.0)
    ),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", settings.gemma2, "model.layers.{i}.", _GEMMA2_LAYER, ends(added=1.0)
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        settings.gemma3,
        "model.layers.{i}.",
        (*_GEMMA2_LAYER, *rms_norms(*HEAD_NORMS, size="D", added=1.0)),
        ends(added=1.0),
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", settings.phi3, "model.layers.{i}.", _PHI3_LAYER, ends()),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        settings.gpt2,
        "transformer.h.{i}.",
        _GPT2_LAYER,
        (
            *matrix("token_embd", "transformer.wte", "V E"),
            *matrix("position_embd", "transformer.wpe", "C E"),
            *_GPT_HEAD,
        ),
    ),
    "gptj": Architecture(
        "gptj",
        "GPTJForCausalLM",
        settings.gptj,
        "transformer.h.{i}.",
        _GPTJ_LAYER,
        (
            *matrix("token_embd", "transformer.wte", "V E"),
            *_GPT_HEAD,
            Entry("output.bias", "lm_head.bias", "V"),
        ),
    ),
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        settings.gptneox,
        "gpt_neox.layers.{i}.",
        (*_LAYER_NORMS, *_neox_like("attention", bias=True)),
        (
            *matrix("token_embd", "gpt_neox.embed_in", "V E"),
            *layer_norms(("output_norm", "gpt_neox.final_layer_norm")),
            *head("embed_out"),
        ),
    ),
    "falcon": Architecture(
        "falcon",
        "FalconForCausalLM",
        settings.falcon,
        "transformer.h.{i}.",
        (
            *layer_norms(("attn_norm", "input_layernorm"), when="!new_decoder_architecture"),
            *layer_norms(("attn_norm", "ln_mlp"), ("attn_norm_2", "ln_attn"), when="new_decoder_architecture"),
            *_neox_like("self_attention", bias=False),
        ),
        (*matrix("token_embd", "transformer.word_embeddings", "V E"), *_GPT_HEAD),
    ),
    "bloom": Architecture(
        "bloom",
        "BloomForCausalLM",
        settings.bloom,
        "transformer.h.{i}.",
        (*_LAYER_NORMS, *_neox_like("self_attention", bias=True)),
        (
            *matrix("token_embd", "transformer.word_embeddings", "V E"),
            *layer_norms(("token_embd_norm", "transformer.word_embeddings_layernorm")),
            *_GPT_HEAD,
        ),
    ),
}


def architecture_of(keys: Keys) -> Architecture:
    """The architecture of a file.

    Raises:
        UnsupportedModelError: it is not one of ``ARCHITECTURES``.
    """
    name = keys.arch
    if name == "llama" and keys.has("expert_count"):
        name = "llama with experts"
    elif name == "llama" and keys.window():
        name = "llama with a window"
    elif name == "deepseek2" and settings.is_v3(keys):
        name = "deepseek2 with sigmoids"
    if name not in ARCHITECTURES:
        known = [known for known in ARCHITECTURES if " " not in known]
        raise unsupported(f"{keys.file.path}: GGUF architecture", name, known)
    return ARCHITECTURES[name]
