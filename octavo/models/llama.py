"""The Llama family: first Llama, Mistral, Qwen2 and Qwen3, which differ in biases, head norms and windows only."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.interface import AttentionSpec
from octavo.layers.attention import Attention, LatentAttention
from octavo.layers.layer import LayerContext, RMSNorm
from octavo.layers.mlp import GatedMLP, SparseMoE
from octavo.models.checkpoint import CheckpointEntry, Drop, Split
from octavo.models.config_files import (
    ConfigReader,
    is_bidirectional,
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
        window = config.sliding_windows[index] if config.sliding_windows else None
        spec = AttentionSpec(config.head_dim**-0.5, window, causal=not config.is_encoder)
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
            is_encoder=is_bidirectional(reader),
            **fields,
        )


class LlamaLayer(PreNormLayer):
    attention: Attention | LatentAttention

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
