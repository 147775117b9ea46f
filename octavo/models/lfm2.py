"""LFM2 and LFM2-MoE: gated short convolutions, with attention in some layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.interface import AttentionSpec, RoutingSpec
from octavo.layers.attention import Attention
from octavo.layers.layer import LayerContext, RMSNorm
from octavo.layers.mlp import SparseMoE
from octavo.layers.states import ShortConv
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename, Split, Unstack
from octavo.models.config_files import ConfigReader, longest_context, read_rope, shape_fields
from octavo.models.decoder import Decoder, DecoderLayer, FeedForward, PreNormLayer
from octavo.models.hybrid import HybridConfig, read_layer_types
from octavo.models.llama import make_mlp


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(HybridConfig):
    #: Inputs of a convolution, with a token's own.
    conv_taps: int
    conv_bias: bool
    #: Experts of the layers from ``dense_layers`` on; 0: there are none.
    num_experts: int = 0
    dense_layers: int = 0
    expert_inner: int = 0
    top_k: int = 0
    renormalize: bool = False
    routing_scale: float = 1.0
    expert_bias: bool = False

    @property
    def feed_forward_width(self) -> int:
        return max(3 * self.intermediate_size, self.top_k * (self.hidden_size + 3 * self.expert_inner))


class Lfm2AttentionLayer(PreNormLayer):
    norm_names = ("operator_norm", "ffn_norm")


class Lfm2ConvLayer(Lfm2AttentionLayer):
    mixer_name = "conv"


class Lfm2ForCausalLM(Decoder):
    """LFM2 and LFM2-MoE."""

    checkpoint_map: tuple[CheckpointEntry, ...] = (
        Drop(r"^lm_head\.weight$"),
        Rename(r"^(model\.)?embedding_norm\.", "model.norm."),
        Rename(r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        Rename(r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
        Rename(r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
        Rename(r"\.feed_forward\.", ".mlp."),
        Rename(r"\.mlp(\.experts\.\d+)?\.w1\.", r".mlp\1.gate_proj."),
        Rename(r"\.mlp(\.experts\.\d+)?\.w3\.", r".mlp\1.up_proj."),
        Rename(r"\.mlp(\.experts\.\d+)?\.w2\.", r".mlp\1.down_proj."),
        Split("in_proj", ("b_proj", "c_proj", "x_proj")),
        Unstack("gate_up_proj", ("gate_proj", "up_proj")),
        Unstack("down_proj", ("down_proj",)),
    )

    def make_layer(self, index: int, config: Lfm2Config, context: LayerContext) -> DecoderLayer:
        norms = [RMSNorm(context, config.hidden_size, config.rms_norm_eps) for _ in range(2)]
        feed_forward: FeedForward = make_mlp(config, context)
        if config.num_experts and index >= config.dense_layers:
            routing = RoutingSpec(
                config.top_k, "sigmoid", renormalize=config.renormalize, least_sum=1e-6, scale=config.routing_scale
            )
            sizes = config.hidden_size, config.expert_inner, config.num_experts
            feed_forward = SparseMoE(context, *sizes, routing, choice_bias=config.expert_bias)
        if config.attends[index]:
            spec = AttentionSpec(config.head_dim**-0.5)
            return Lfm2AttentionLayer(
                Attention(config, context, spec, self.rotary_table(config, context)), feed_forward, norms
            )
        return Lfm2ConvLayer(
            ShortConv(context, config.hidden_size, config.conv_taps, config.conv_bias), feed_forward, norms
        )

    def make_final_norm(self, config: ModelConfig, context: LayerContext) -> RMSNorm:
        return RMSNorm(context, config.hidden_size, config.rms_norm_eps)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> Lfm2Config:
        reader = replace(reader, raw={"rope_theta": 1000000.0, **reader.raw})
        fields, rope = shape_fields(reader), read_rope(reader)
        fields["tie_word_embeddings"] = reader.flag("tie_embedding", reader.flag("tie_word_embeddings", True))
        if architecture == "Lfm2MoeForCausalLM":
            fields |= {
                "num_experts": reader.positive("num_experts", 32),
                "dense_layers": reader.raw.get("num_dense_layers", 2),
                "expert_inner": reader.positive("moe_intermediate_size"),
                "top_k": reader.positive("num_experts_per_tok", 4),
                "renormalize": reader.flag("norm_topk_prob", True),
                "routing_scale": reader.number("routed_scaling_factor", 1.0),
                "expert_bias": reader.flag("use_expert_bias", True),
            }
        else:
            fields["intermediate_size"] = _inner_size(reader)
        taps = reader.positive("conv_L_cache", 3)
        if not 2 <= taps <= 16:
            raise ConfigError(f"{reader.file}: conv_L_cache must be 2 to 16, not {taps}")
        return Lfm2Config(
            architecture=architecture,
            rms_norm_eps=reader.number("norm_eps", 1e-5),
            qk_norm=True,
            rope=rope,
            max_position=longest_context(rope),
            attends=_attends(reader, fields["num_layers"]),
            conv_taps=taps,
            conv_bias=reader.flag("conv_bias"),
            **fields,
        )


def _inner_size(reader: ConfigReader) -> int:
    """Of the feed-forward networks: two thirds of the given size, rounded up, unless it is the size itself."""
    size = reader.positive("block_ff_dim", reader.positive("intermediate_size", 12288))
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = reader.positive("block_multiple_of", 256)
    size = int(2 * size / 3)
    if reader.raw.get("block_ffn_dim_multiplier", 1.0) is None:
        return size
    return -(-int(reader.number("block_ffn_dim_multiplier", 1.0) * size) // multiple) * multiple


def _attends(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    kinds = read_layer_types(reader, layers, "conv", "full_attention")
    if kinds is None:
        indices = reader.raw.get("full_attn_idxs")
        return tuple(indices is None or index in indices for index in range(layers))
    return tuple(kind == "full_attention" for kind in kinds)
