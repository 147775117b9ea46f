"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, which differ in biases, head norms and windows only.

A network is a stack of layers; a layer is attention and an MLP, each with a norm before it and a residual around it.
"""

from __future__ import annotations

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.layers.latent_attention import LatentAttention
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import SparseMoE
from octavo.layers.norm import RMSNorm
from octavo.models.checkpoint import CheckpointEntry, Drop
from octavo.models.config_reader import (
    ConfigReader,
    longest_context,
    read_rope,
    read_windows,
    refuse_activations,
    shape_fields,
)
from octavo.models.decoder import Decoder, DecoderLayer


class LlamaForCausalLM(Decoder):
    """A decoder-only transformer with its language-model head."""

    # Old checkpoints hold the rotary table; those with tied embeddings may hold the head too.
    checkpoint_map: tuple[CheckpointEntry, ...] = (Drop(r"rotary_emb\.inv_freq$"), Drop(r"^lm_head\.weight$"))

    def make_layer(self, index: int, config: ModelConfig, context: LayerContext) -> DecoderLayer:
        """Layer ``index`` of the network."""
        return LlamaLayer(config, context, self.make_attention(index, config, context), make_mlp(config, context))

    def make_attention(self, index: int, config: ModelConfig, context: LayerContext) -> Attention:
        """Grouped-query attention with rotary positions, in some layers within a window."""
        spec = AttentionSpec(config.head_dim**-0.5, config.sliding_windows[index] if config.sliding_windows else None)
        return Attention(config, context, spec, self.rotary_table(config, context))

    def make_final_norm(self, config: ModelConfig, context: LayerContext) -> RMSNorm:
        """The norm after the last layer."""
        return RMSNorm(context, config.hidden_size, config.rms_norm_eps)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json of any of the four architectures."""
        refuse_activations(reader, "silu", "swish")
        is_qwen3, rope = architecture == "Qwen3ForCausalLM", read_rope(reader)
        fields = shape_fields(reader, 128 if is_qwen3 else None)
        qkv_bias, o_bias = _attention_biases(architecture, reader)
        return ModelConfig(
            architecture=architecture,
            max_position=longest_context(rope),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and reader.flag("mlp_bias"),
            qk_norm=is_qwen3,
            rope=rope,
            sliding_windows=_windows(architecture, reader, fields["num_layers"]),
            **fields,
        )


class LlamaLayer(DecoderLayer):
    """Attention, then the MLP; each has the norm of the residual stream as its input and is added to the stream."""

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        attention: Attention | LatentAttention,
        mlp: GatedMLP | SparseMoE,
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = self.attach("input_layernorm", norm(context, hidden, eps))
        self.attention = self.attach("self_attn", attention)
        self.mlp_norm = self.attach("post_attention_layernorm", norm(context, hidden, eps))
        self.mlp = self.attach("mlp", mlp)

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``DecoderLayer``."""
        residual = self.attention.add_to(residual, self.attention_norm(residual), cache, batch)
        return self.mlp.add_to(residual, self.mlp_norm(residual))


def make_mlp(config: ModelConfig, context: LayerContext) -> GatedMLP:
    """The feed-forward network down(silu(gate(x)) * up(x))."""
    return GatedMLP(context, config.hidden_size, config.intermediate_size, config.mlp_bias)


def _attention_biases(architecture: str, reader: ConfigReader) -> tuple[bool, bool]:
    """(bias on q, k and v; bias on the output): Qwen2 has the first only, Mistral none, others attention_bias."""
    if architecture == "Qwen2ForCausalLM":
        return True, False
    if architecture == "MistralForCausalLM":
        return False, False
    bias = reader.flag("attention_bias")
    return bias, bias


def _windows(architecture: str, reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    raw = reader.raw
    if architecture == "MistralForCausalLM":
        # Absent: 4096, as in the first Mistral; null: no window.
        given = "sliding_window" not in raw or raw["sliding_window"] is not None
        return (reader.positive("sliding_window", 4096) if given else None,) * layers
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
