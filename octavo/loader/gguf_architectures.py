"""GGUF architectures: what transformers calls their models, settings and tensors.

A table for each: ``ARCHITECTURES`` has all. Names of tensors and keys are those of the gguf package
(``gguf.constants``), layouts those that llama.cpp's converter writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from octavo.core.errors import UnsupportedModelError
from octavo.loader.gguf_keys import Keys
from octavo.models.registry import unsupported

#: The order of a file's rows, where transformers has another one. "interleaved": the rows of the two halves of each
#: head take turns. "qkv": all queries, then all keys, then all values; transformers has them by KV head.
RowOrder = Literal["interleaved", "qkv"]


@dataclass(frozen=True)
class Entry:
    """A tensor, by its names in the file and in transformers without the prefix of its layer."""

    source: str
    #: With ``{e}``: the file has the matrices of all experts in one tensor, transformers one for each expert.
    name: str
    #: Rows and columns in the file: sums of names of ``Keys.sizes`` or of the configuration, with factors ("Q+2K E").
    shape: str
    order: RowOrder | None = None
    #: What was added to the values, such as 1 to Gemma's norms.
    added: float = 0.0
    #: Whether transformers has rows as columns.
    transposed: bool = False
    #: Key of the configuration or of ``Keys.traits`` that is true where there is such a tensor, or false after "!";
    #: None: there always is.
    when: str | None = None
    #: Another tensor and its shape, of which this one is made too: "attn_v_b" beside "attn_k_b" of latent attention.
    beside: tuple[str, str] | None = None


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


def matrix(
    source: str,
    name: str,
    shape: str,
    *,
    bias: bool | str = False,
    order: RowOrder | None = None,
    transposed: bool = False,
    when: str | None = None,
) -> Iterator[Entry]:
    """A weight and, if ``bias`` is true, its bias; or, if the configuration has a true value of that name."""
    yield Entry(f"{source}.weight", f"{name}.weight", shape, order, transposed=transposed, when=when)
    if bias:
        when = bias if isinstance(bias, str) else None
        yield Entry(f"{source}.bias", f"{name}.bias", shape.split()[0], order, when=when)


def rms_norms(*names: tuple[str, str], size: str = "E", added: float = 0.0) -> Iterator[Entry]:
    """The weights of norms, given as (name in the file, name in transformers)."""
    for source, name in names:
        yield Entry(f"{source}.weight", f"{name}.weight", size, added=added)


def layer_norms(*names: tuple[str, str], when: str | None = None) -> Iterator[Entry]:
    """The weights and biases of norms."""
    for source, name in names:
        for kind in ("weight", "bias"):
            yield Entry(f"{source}.{kind}", f"{name}.{kind}", "E", when=when)


def attention(order: RowOrder | None = None, bias: bool | str = False, out_bias: bool | str = False) -> Iterator[Entry]:
    """Query, key, value and output projections under the names of Llama."""
    yield from matrix("attn_q", "self_attn.q_proj", "Q E", order=order, bias=bias)
    yield from matrix("attn_k", "self_attn.k_proj", "K E", order=order, bias=bias)
    yield from matrix("attn_v", "self_attn.v_proj", "K E", bias=bias)
    yield from matrix("attn_output", "self_attn.o_proj", "E Q", bias=out_bias)


def gated_mlp(
    name: str = "mlp", inner: str = "F", suffix: str = "", bias: bool | str = False, when: str | None = None
) -> Iterator[Entry]:
    """Gate, up and down projections under the names of Llama."""
    yield from matrix(f"ffn_gate{suffix}", f"{name}.gate_proj", f"{inner} E", bias=bias, when=when)
    yield from matrix(f"ffn_up{suffix}", f"{name}.up_proj", f"{inner} E", bias=bias, when=when)
    yield from matrix(f"ffn_down{suffix}", f"{name}.down_proj", f"E {inner}", bias=bias, when=when)


def experts(
    inner: str,
    name: str = "mlp",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    when: str | None = None,
) -> Iterator[Entry]:
    """The router and the matrices of all experts."""
    gate, up, down = (f"{name}.experts.{{e}}.{part}" for part in parts)
    yield from matrix("ffn_gate_inp", f"{name}.gate", "X E", when=when)
    yield from matrix("ffn_gate_exps", gate, f"X {inner} E", when=when)
    yield from matrix("ffn_up_exps", up, f"X {inner} E", when=when)
    yield from matrix("ffn_down_exps", down, f"X E {inner}", when=when)


_NORMS = (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"))
_HEAD_NORMS = (("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm"))


def ends(
    embedding: str = "model.embed_tokens", norm: str = "model.norm", head: str = "lm_head", *, added: float = 0.0
) -> tuple[Entry, ...]:
    """Embedding, last norm and head."""
    return (
        *matrix("token_embd", embedding, "V E"),
        *rms_norms(("output_norm", norm), added=added),
        *_head(head),
    )


def _head(name: str = "lm_head") -> Iterator[Entry]:
    yield Entry("output.weight", f"{name}.weight", "V E", when="!tie_word_embeddings")


def _llama(keys: Keys, **changes: Any) -> dict[str, Any]:
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


def _llama_biased(keys: Keys) -> dict[str, Any]:
    biases = {"attention_bias": keys.holds("blk.0.attn_q.bias"), "mlp_bias": keys.holds("blk.0.ffn_up.bias")}
    return _llama(keys, **biases)


def _mistral(keys: Keys) -> dict[str, Any]:
    return _llama(keys, sliding_window=keys.window())


def _qwen3(keys: Keys) -> dict[str, Any]:
    return _llama(keys, attention_bias=keys.holds("blk.0.attn_q.bias"))


def _chosen_experts(keys: Keys, **changes: Any) -> dict[str, Any]:
    """``_llama`` with the number of experts and how many of them a token is given to."""
    keys.sizes["X"] = keys.integer("expert_count")
    return _llama(keys, num_experts=keys.sizes["X"], num_experts_per_tok=keys.integer("expert_used_count"), **changes)


def _mixtral(keys: Keys) -> dict[str, Any]:
    config = _chosen_experts(keys)
    return config | {"num_local_experts": config.pop("num_experts"), "sliding_window": None}


def _expert_size(keys: Keys) -> int:
    """Inner size of an expert, as llama.cpp computes it for files that do not have it."""
    if keys.has("expert_feed_forward_length"):
        return keys.integer("expert_feed_forward_length")
    return keys.sizes["F"] // keys.integer("expert_used_count") or 1


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    shared = keys.integer("expert_shared_feed_forward_length", default=keys.sizes["F"])
    sizes = {"moe_intermediate_size": _expert_size(keys), "shared_expert_intermediate_size": shared}
    return _chosen_experts(keys, norm_topk_prob=False, **sizes)


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    return _chosen_experts(keys, norm_topk_prob=True, moe_intermediate_size=_expert_size(keys), attention_bias=False)


def _olmoe(keys: Keys) -> dict[str, Any]:
    clip = keys.real("attention.clamp_kqv") if keys.has("attention.clamp_kqv") else None
    return _chosen_experts(keys, norm_topk_prob=False, attention_bias=False, clip_qkv=clip)


def _deepseek(keys: Keys) -> dict[str, Any]:
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
        **_llama(keys, rope_parameters=rope),
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


def _gemma(keys: Keys, layers_of_largest: int, pattern: int, rope: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Gemma 2 and 3; the attention's scale is told from the number of layers, as files do not have it."""
    sizes = keys.sizes
    scale = sizes["E"] // sizes["H"] if sizes["L"] == layers_of_largest else sizes["D"]
    sliding = keys.sliding_layers(pattern) if keys.window() else [False] * sizes["L"]
    config = _llama(keys, rope_parameters=rope, attention_bias=False, query_pre_attn_scalar=scale, **changes)
    config["hidden_activation"] = "gelu_pytorch_tanh"
    del config["hidden_act"]
    config["sliding_window"] = keys.window() or sizes["C"]
    config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    return config


def _gemma1(keys: Keys) -> dict[str, Any]:
    config = _llama(keys, hidden_activation="gelu_pytorch_tanh", attention_bias=False)
    return config | {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(keys: Keys) -> dict[str, Any]:
    defaults = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    caps = {name: keys.real(name, default) for name, default in defaults.items()}
    return _gemma(keys, 46, 2, keys.rope(), **caps)


def _gemma3(keys: Keys) -> dict[str, Any]:
    cap = keys.real("final_logit_softcapping") if keys.has("final_logit_softcapping") else None
    local = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", default=10000.0)}
    rope = {"full_attention": keys.rope(), "sliding_attention": local}
    return _gemma(keys, 62, 6, rope, final_logit_softcapping=cap, attn_logit_softcapping=None)


def _phi3(keys: Keys) -> dict[str, Any]:
    rope = keys.rope(partial=True)
    original = rope.pop("original_max_position_embeddings", None)
    original = original or keys.integer("rope.scaling.original_context_length", default=keys.sizes["C"])
    window = keys.window()
    config = _llama(keys, rope_parameters=rope, sliding_window=window, original_max_position_embeddings=original)
    del config["head_dim"]
    return config


def _epsilon(keys: Keys) -> float:
    return keys.real("attention.layer_norm_epsilon", default=1e-5)


def _gpt2(keys: Keys) -> dict[str, Any]:
    sizes = keys.sizes
    return {
        "n_positions": sizes["C"],
        "n_embd": sizes["E"],
        "n_layer": sizes["L"],
        "n_head": sizes["H"],
        "n_inner": sizes["F"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": _epsilon(keys),
    }


def _gptj(keys: Keys) -> dict[str, Any]:
    return _gpt2(keys) | {"rotary_dim": keys.rotated()}


def _gptneox(keys: Keys) -> dict[str, Any]:
    sizes = keys.sizes
    rope = keys.rope(partial=True)
    return {
        "hidden_size": sizes["E"],
        "intermediate_size": sizes["F"],
        "num_hidden_layers": sizes["L"],
        "num_attention_heads": sizes["H"],
        "hidden_act": "gelu",
        "max_position_embeddings": sizes["C"],
        "layer_norm_eps": _epsilon(keys),
        "use_parallel_residual": keys.flag("use_parallel_residual", default=True),
        "attention_bias": True,
        "rope_parameters": rope,
        # As older versions of transformers have them.
        "rotary_pct": rope["partial_rotary_factor"],
        "rotary_emb_base": rope["rope_theta"],
    }


def _falcon(keys: Keys) -> dict[str, Any]:
    sizes = keys.sizes
    return {
        "hidden_size": sizes["E"],
        "ffn_hidden_size": sizes["F"],
        "num_hidden_layers": sizes["L"],
        "num_attention_heads": sizes["H"],
        "num_kv_heads": sizes["G"],
        "max_position_embeddings": sizes["C"],
        "layer_norm_epsilon": _epsilon(keys),
        "activation": "gelu",
        "alibi": False,
        "bias": False,
        "parallel_attn": True,
        "multi_query": sizes["G"] == 1,
        # Falcon 40B and 180B, which have a norm for each branch.
        "new_decoder_architecture": keys.holds("blk.0.attn_norm_2.weight"),
        "rope_parameters": keys.rope(),
    }


def _bloom(keys: Keys) -> dict[str, Any]:
    sizes = keys.sizes
    if sizes["F"] != 4 * sizes["E"]:
        raise UnsupportedModelError(f"{keys.file.path}: {keys.arch} has an inner size of 4 times the hidden one")
    return {
        "hidden_size": sizes["E"],
        "n_layer": sizes["L"],
        "n_head": sizes["H"],
        "seq_length": sizes["C"],
        "layer_norm_epsilon": _epsilon(keys),
    }


_LLAMA_LAYER = (
    *rms_norms(*_NORMS),
    *attention("interleaved", bias="attention_bias", out_bias="attention_bias"),
    *gated_mlp(bias="mlp_bias"),
)
_MIXTRAL_LAYER = (
    *rms_norms(*_NORMS),
    *attention("interleaved"),
    *experts("F", "block_sparse_moe", ("w1", "w3", "w2")),
)
_GEMMA_LAYER = (*rms_norms(*_NORMS, added=1.0), *attention(), *gated_mlp())
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
    *rms_norms(*_NORMS),
    *attention(bias=True),
    *experts("moe_intermediate_size"),
    *gated_mlp("mlp.shared_expert", "shared_expert_intermediate_size", "_shexp"),
    Entry("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", "1 E"),
)
_DEEPSEEK_LAYER = (
    *rms_norms(*_NORMS),
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
    *rms_norms(*_NORMS),
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


_LAYER_NORMS = tuple(layer_norms(*_NORMS))
_GPT_HEAD = (*layer_norms(("output_norm", "transformer.ln_f")), *_head())

#: By the value of general.architecture, with what tells apart the models that share one.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama_biased, "model.layers.{i}.", _LLAMA_LAYER, ends()),
    "llama with a window": Architecture(
        "mistral", "MistralForCausalLM", _mistral, "model.layers.{i}.", _LLAMA_LAYER, ends()
    ),
    "llama with experts": Architecture(
        "mixtral", "MixtralForCausalLM", _mixtral, "model.layers.{i}.", _MIXTRAL_LAYER, ends()
    ),
    "qwen2": Architecture(
        "qwen2",
        "Qwen2ForCausalLM",
        _llama,
        "model.layers.{i}.",
        (*rms_norms(*_NORMS), *attention(bias=True), *gated_mlp()),
        ends(),
    ),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe, "model.layers.{i}.", _QWEN2_MOE_LAYER, ends()
    ),
    "qwen3": Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        _qwen3,
        "model.layers.{i}.",
        (
            *rms_norms(*_NORMS),
            *rms_norms(*_HEAD_NORMS, size="D"),
            *attention(bias="attention_bias", out_bias="attention_bias"),
            *gated_mlp(),
        ),
        ends(),
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _qwen3_moe,
        "model.layers.{i}.",
        (
            *rms_norms(*_NORMS),
            *rms_norms(*_HEAD_NORMS, size="D"),
            *attention(),
            *experts("moe_intermediate_size"),
        ),
        ends(),
    ),
    "olmoe": Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        _olmoe,
        "model.layers.{i}.",
        (
            *rms_norms(*_NORMS),
            *rms_norms(_HEAD_NORMS[0], size="Q"),
            *rms_norms(_HEAD_NORMS[1], size="K"),
            *attention(),
            *experts("F"),
        ),
        ends(),
    ),
    "deepseek2": Architecture(
        "deepseek_v2", "DeepseekV2ForCausalLM", _deepseek, "model.layers.{i}.", _DEEPSEEK_LAYER, ends()
    ),
    "deepseek2 with sigmoids": Architecture(
        "deepseek_v3", "DeepseekV3ForCausalLM", _deepseek, "model.layers.{i}.", _DEEPSEEK_LAYER, ends()
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma1, "model.layers.{i}.", _GEMMA_LAYER, ends(added=1.0)),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, "model.layers.{i}.", _GEMMA2_LAYER, ends(added=1.0)),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _gemma3,
        "model.layers.{i}.",
        (*_GEMMA2_LAYER, *rms_norms(*_HEAD_NORMS, size="D", added=1.0)),
        ends(added=1.0),
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3, "model.layers.{i}.", _PHI3_LAYER, ends()),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        _gpt2,
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
        _gptj,
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
        _gptneox,
        "gpt_neox.layers.{i}.",
        (*_LAYER_NORMS, *_neox_like("attention", bias=True)),
        (
            *matrix("token_embd", "gpt_neox.embed_in", "V E"),
            *layer_norms(("output_norm", "gpt_neox.final_layer_norm")),
            *_head("embed_out"),
        ),
    ),
    "falcon": Architecture(
        "falcon",
        "FalconForCausalLM",
        _falcon,
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
        _bloom,
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
    elif name == "deepseek2" and is_v3(keys):
        name = "deepseek2 with sigmoids"
    if name not in ARCHITECTURES:
        known = [known for known in ARCHITECTURES if " " not in known]
        raise unsupported(f"{keys.file.path}: GGUF architecture", name, known)
    return ARCHITECTURES[name]
