"""The Llama family: first Llama, Mistral, Qwen2 and Qwen3, which differ in biases, head norms and windows only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, AttentionSpec, LayerCache, RoutingSpec
from octavo.layers.attention import Attention, LatentAttention
from octavo.layers.layer import LayerContext, RMSNorm
from octavo.layers.mlp import GatedMLP, SparseMoE
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename, Split, Unstack
from octavo.models.config_files import (
    ConfigReader,
    fields_of,
    longest_context,
    read_rope,
    read_windows,
    rotary_fields,
    shape_fields,
)
from octavo.models.decoder import Decoder, DecoderLayer, PreNormLayer


class LlamaForCausalLM(Decoder):
    """Llama, Mistral, Qwen2 and Qwen3."""

    # Old checkpoints hold the rotary table; those with tied embeddings may hold the head too.
    checkpoint_map: tuple[CheckpointEntry, ...] = (Drop(r"rotary_emb\.inv_freq$"), Drop(r"^lm_head\.weight$"))

    def make_layer(self, index: int, config: ModelConfig, context: LayerContext) -> DecoderLayer:
        return LlamaLayer(config, context, self.make_attention(index, config, context), make_mlp(config, context))

    def make_attention(self, index: int, config: ModelConfig, context: LayerContext) -> Attention:
        spec = AttentionSpec(config.head_dim**-0.5, config.sliding_windows[index] if config.sliding_windows else None)
        return Attention(config, context, spec, self.rotary_table(config, context))

    def make_final_norm(self, config: ModelConfig, context: LayerContext) -> RMSNorm:
        return RMSNorm(context, config.hidden_size, config.rms_norm_eps)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader.only("hidden_act", "silu", "swish")
        is_qwen3, rope = architecture == "Qwen3ForCausalLM", read_rope(reader)
        fields = shape_fields(reader, 128 if is_qwen3 else None)
        # Qwen2 has biases of q, k and v only, Mistral has none.
        bias = architecture not in ("Qwen2ForCausalLM", "MistralForCausalLM") and reader.flag("attention_bias")
        return ModelConfig(
            architecture=architecture,
            max_position=longest_context(rope),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            o_bias=bias,
            mlp_bias=architecture == "LlamaForCausalLM" and reader.flag("mlp_bias"),
            qk_norm=is_qwen3,
            rope=rope,
            sliding_windows=_windows(architecture, reader, fields["num_layers"]),
            **fields,
        )


class LlamaLayer(PreNormLayer):
    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        attention: Attention | LatentAttention,
        mlp: GatedMLP | SparseMoE,
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__(attention, mlp, [norm(context, config.hidden_size, config.rms_norm_eps) for _ in range(2)])


def make_mlp(config: ModelConfig, context: LayerContext) -> GatedMLP:
    """The feed-forward network down(silu(gate(x)) * up(x))."""
    return GatedMLP(context, config.hidden_size, config.intermediate_size, config.mlp_bias)


def _windows(architecture: str, reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    raw = reader.raw
    if architecture == "MistralForCausalLM":
        # Absent: 4096, as in the first Mistral; null: no window.
        has_window = "sliding_window" not in raw or raw["sliding_window"] is not None
        return (reader.positive("sliding_window", 4096) if has_window else None,) * layers
    if architecture == "LlamaForCausalLM" or not reader.flag("use_sliding_window"):
        return (None,) * layers
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return (None,) * layers
    window = reader.positive("sliding_window", 4096)
    if (windows := read_windows(reader, layers, window)) is not None:
        return windows
    first = raw.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise ConfigError(f"{reader.file}: max_window_layers must be an integer, not {first!r}")
    return tuple(window if i >= first else None for i in range(layers))


class Olmo2ForCausalLM(LlamaForCausalLM):
    """OLMo 2: no norms before attention and MLP, but on what these add to the residual stream."""

    def make_layer(self, index: int, config: ModelConfig, context: LayerContext) -> DecoderLayer:
        attention = norm_over_heads(self.make_attention(index, config, context), config, context)
        return Olmo2Layer(config, context, attention, make_mlp(config, context))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        return replace(super().read_config("LlamaForCausalLM", reader), architecture=architecture)


class Olmo2Layer(DecoderLayer):
    """x + norm(attention(x)), and then x + norm(mlp(x)) of the sum."""

    attention: Attention

    def __init__(self, config: ModelConfig, context: LayerContext, attention: Attention, mlp: GatedMLP) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention = self.attach("self_attn", attention)
        self.attention_norm = self.attach("post_attention_layernorm", RMSNorm(context, hidden, eps))
        self.mlp = self.attach("mlp", mlp)
        self.mlp_norm = self.attach("post_feedforward_layernorm", RMSNorm(context, hidden, eps))

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``DecoderLayer``."""
        residual = self.attention_norm.add_to(residual, self.attention(residual, cache, batch))
        return self.mlp_norm.add_to(residual, self.mlp(residual))


class ProjectionNorm(RMSNorm):
    """RMS norm over all heads together, [T, heads, D]."""

    def __call__(self, x: Array) -> Array:
        return super().__call__(x.reshape(len(x), -1)).reshape(*x.shape)


def norm_over_heads(attention: Attention, config: ModelConfig, context: LayerContext) -> Attention:
    """The attention, with norms over all heads of q and over all of k before the rotation."""
    if context.tp_size > 1:
        raise ConfigError(
            f"{config.architecture} normalises q and k over all heads, which tensor-parallel workers cannot share: "
            "set tensor_parallel_size=1"
        )
    head_dim, eps = config.head_dim, config.rms_norm_eps
    attention.q_norm = attention.attach("q_norm", ProjectionNorm(context, config.num_heads * head_dim, eps))
    attention.k_norm = attention.attach("k_norm", ProjectionNorm(context, config.num_kv_heads * head_dim, eps))
    return attention


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 and Phi-4 (Abdin et al. 2024): fused matrices, longer contexts by LongRoPE, and a window."""

    checkpoint_map = (
        *LlamaForCausalLM.checkpoint_map,
        Split("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        Split("gate_up_proj", ("gate_proj", "up_proj")),
    )

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader.only("hidden_act", "silu", "swish")
        scaling = reader.table("rope_scaling")
        if scaling.get("type") in ("su", "yarn"):  # names of LongRoPE in older files
            reader = replace(reader, raw={**reader.raw, "rope_scaling": {**scaling, "type": "longrope"}})
        fields = shape_fields(reader)
        fields |= rotary_fields(reader, fields["head_dim"])
        window = reader.positive("sliding_window", fields["max_position"])
        return ModelConfig(
            architecture=architecture,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-5),
            sliding_windows=(window if window < fields["max_position"] else None,) * fields["num_layers"],
            **fields,
        )


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(ModelConfig):
    """``intermediate_size`` is that of layers without experts."""

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    #: Of the expert that every token has; 0: none.
    shared_intermediate_size: int
    #: Whether the weights of a token's experts are divided by their sum.
    renormalize: bool
    #: For each layer, whether it has experts.
    sparse_layers: tuple[bool, ...]

    @property
    def feed_forward_width(self) -> int:
        chosen = self.experts_per_token * (self.hidden_size + 3 * self.expert_intermediate_size)
        return max(3 * self.intermediate_size, chosen + 3 * self.shared_intermediate_size)


class MixtureForCausalLM(LlamaForCausalLM):
    """Mixtral, Qwen2-MoE and Qwen3-MoE: a mixture of experts in place of the MLP."""

    # Mixtral's names, and those of checkpoints with stacked experts.
    checkpoint_map: tuple[CheckpointEntry, ...] = (
        *LlamaForCausalLM.checkpoint_map,
        Rename(r"\.block_sparse_moe\.", ".mlp."),
        Rename(r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        Rename(r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        Rename(r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        Unstack("gate_up_proj", ("gate_proj", "up_proj")),
        Unstack("down_proj", ("down_proj",)),
    )

    def make_layer(self, index: int, config: ModelConfig, context: LayerContext) -> LlamaLayer:
        assert isinstance(config, MixtureConfig)
        if not config.sparse_layers[index]:
            return LlamaLayer(config, context, self.make_attention(index, config, context), make_mlp(config, context))
        hidden, inner, shared = config.hidden_size, config.expert_intermediate_size, config.shared_intermediate_size
        routing = RoutingSpec(config.experts_per_token, renormalize=config.renormalize, shared=int(shared > 0))
        experts = SparseMoE(context, hidden, inner, config.num_experts, routing, shared_inner=shared)
        return LlamaLayer(config, context, self.make_attention(index, config, context), experts)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        base = super().read_config("LlamaForCausalLM", reader)
        values = fields_of(base)
        qwen, qwen2 = architecture.startswith("Qwen"), architecture == "Qwen2MoeForCausalLM"
        reader.only("clip_qkv", None)
        experts = reader.positive("num_local_experts" if "num_local_experts" in reader.raw else "num_experts")
        chosen = reader.positive("num_experts_per_tok")
        if chosen > experts:
            raise ConfigError(f"{reader.file}: num_experts_per_tok ({chosen}) is more than the {experts} experts")
        layers, sparse = base.num_layers, (True,) * base.num_layers
        if qwen:  # every decoder_sparse_step-th layer has experts, except those of mlp_only_layers
            step, dense = reader.positive("decoder_sparse_step", 1), reader.raw.get("mlp_only_layers") or []
            if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
                raise ConfigError(f"{reader.file}: mlp_only_layers must be a list of layers, not {dense!r}")
            sparse = tuple((index + 1) % step == 0 and index not in dense for index in range(layers))
        values |= {
            "architecture": architecture,
            "qkv_bias": base.qkv_bias or (qwen2 and (reader.raw.get("qkv_bias") is None or reader.flag("qkv_bias"))),
            "qk_norm": architecture == "Qwen3MoeForCausalLM",
            "sliding_windows": _mixture_windows(architecture, reader, base.num_layers),
        }
        return MixtureConfig(
            **values,
            num_experts=experts,
            experts_per_token=chosen,
            expert_intermediate_size=reader.positive("moe_intermediate_size") if qwen else base.intermediate_size,
            shared_intermediate_size=reader.positive("shared_expert_intermediate_size") if qwen2 else 0,
            renormalize=architecture == "MixtralForCausalLM" or reader.flag("norm_topk_prob"),
            sparse_layers=sparse,
        )


class OlmoeForCausalLM(MixtureForCausalLM):
    """OLMoE: a mixture with norms over all heads of q and over all of k, before the rotation."""

    def make_attention(self, index: int, config: ModelConfig, context: LayerContext) -> Attention:
        return norm_over_heads(super().make_attention(index, config, context), config, context)


def _mixture_windows(architecture: str, reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """The window of all layers (Mixtral, Qwen3-MoE), or of the layers that layer_types names (Qwen2-MoE)."""
    has_windows = architecture == "MixtralForCausalLM" or reader.flag("use_sliding_window")
    if not has_windows or not reader.raw.get("sliding_window"):
        return (None,) * layers
    window = reader.positive("sliding_window")
    if architecture != "Qwen2MoeForCausalLM":
        return (window,) * layers
    windows = read_windows(reader, layers, window)
    if windows is None:
        raise ConfigError(f"{reader.file}: with use_sliding_window, layer_types must name the layers that have it")
    return windows
