"""Kimi Linear (arXiv 2510.26692): Kimi delta attention, latent attention without positions, mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig, RopeConfig
from octavo.kernels.interface import RoutingSpec
from octavo.layers.attention import LatentAttention, LatentShape
from octavo.layers.gated_delta import DeltaShape, KimiDeltaNet
from octavo.layers.layer import LayerContext, RMSNorm
from octavo.models.checkpoint import CheckpointEntry, Drop, Join, Rename
from octavo.models.config_files import ConfigReader, common_fields
from octavo.models.decoder import Decoder, PreNormLayer
from octavo.models.deepseek import DeepseekConfig
from octavo.models.hybrid import DeltaConfig, read_delta_shape, read_layer_types
from octavo.models.mixtures import MIXTURE_NAMES, Flatten, MixtureFamily, after_first, read_mixture, stacked_experts


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(DeltaConfig, DeepseekConfig):
    """A ``DeepseekConfig`` of the layers with attention."""


#: DeepSeek-V3's experts, with other names in config.json.
_MIXTURE = MixtureFamily(
    experts="num_experts",
    chosen="num_experts_per_token",
    routing=RoutingSpec(1, "sigmoid", best_of_group=2),
    reads_renormalize=True,
    choice_bias=True,
    grouped=True,
    shared="num_shared_experts",
    counts_shared=True,
    sparse=after_first,
    defaults={
        **{"first_k_dense_replace": 1, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1},
        **{"moe_intermediate_size": 1024, "topk_group": 1, "routed_scaling_factor": 2.446},
    },
)


class KimiLinearForCausalLM(Decoder):
    checkpoint_map: tuple[CheckpointEntry, ...] = (
        Drop(r"^lm_head\.weight$"),
        Rename(r"\.self_attn\.forget_gate\.", ".self_attn."),
        Flatten(".A_log"),
        Flatten(".dt_bias"),
        Join(("q_conv1d", "k_conv1d", "v_conv1d"), "conv1d"),
        *MIXTURE_NAMES,
        *stacked_experts(),
    )

    def make_layer(self, index: int, config: KimiLinearConfig, context: LayerContext) -> PreNormLayer:
        norms = [self.make_final_norm(config, context) for _ in range(2)]
        mlp = config.mixture.make_layer(index, config, context)
        if not config.attends[index]:
            return PreNormLayer(
                KimiDeltaNet(context, config.hidden_size, config.delta, config.rms_norm_eps), mlp, norms
            )
        rotary = self.rotary_table(config, context)
        attention = LatentAttention(context, config.hidden_size, config.latent, config.attention_scale, rotary)
        return PreNormLayer(attention, mlp, norms)

    def make_final_norm(self, config: ModelConfig, context: LayerContext) -> RMSNorm:
        return RMSNorm(context, config.hidden_size, config.rms_norm_eps)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        for name, value in {"hidden_act": "silu", "attention_bias": False, "mla_use_nope": True}.items():
            reader.only(name, value)
        reader.only("moe_router_activation_func", "sigmoid")
        layers, heads = reader.positive("num_hidden_layers"), reader.positive("num_attention_heads")
        renormalize = reader.flag("moe_renormalize", reader.flag("norm_topk_prob", True))
        groups = reader.positive(reader.named("n_group", "num_expert_group"), 1)
        reader = replace(reader, raw={**reader.raw, "norm_topk_prob": renormalize, "n_group": groups})
        shape = LatentShape(
            heads,
            reader.positive("q_lora_rank") if reader.raw.get("q_lora_rank") else None,
            reader.positive("kv_lora_rank", 512),
            reader.positive("qk_nope_head_dim", 128),
            reader.positive("qk_rope_head_dim", 64),
            reader.positive("v_head_dim", 128),
        )
        if shape.cached % 2:
            raise ConfigError(
                f"{reader.file}: kv_lora_rank ({shape.kv_rank}) + qk_rope_head_dim ({shape.rope}) must be even"
            )
        longest = reader.positive(reader.named("max_position_embeddings", "model_max_length"), 1048576)
        return KimiLinearConfig(
            architecture=architecture,
            hidden_size=reader.positive("hidden_size"),
            intermediate_size=reader.positive("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=1,
            head_dim=shape.rope,
            max_position=longest,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-5),
            rope=RopeConfig(partial_rotary_factor=0.0),
            rope_interleave=False,
            latent=shape,
            attention_scale=(shape.nope + shape.rope) ** -0.5,
            mixture=read_mixture(_MIXTURE, reader, layers),
            attends=_attends(reader, layers),
            delta=_delta_shape(reader),
            **common_fields(reader),
        )


def _delta_shape(reader: ConfigReader) -> DeltaShape:
    """From linear_attn_config of published files, or the fields that transformers writes."""
    inside = replace(reader, raw=reader.table("linear_attn_config"))
    heads = inside.positive("num_heads", reader.positive("linear_num_heads", 32))
    dim = inside.positive("head_dim", reader.positive("linear_head_dim", 128))
    taps = inside.positive("short_conv_kernel_size", reader.positive("linear_conv_kernel_dim", 4))
    names = {"linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_conv_kernel_dim": taps}
    dims = {"linear_key_head_dim": dim, "linear_value_head_dim": dim}
    return read_delta_shape(replace(reader, raw={**names, **dims}))


def _attends(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """By full_attn_layers and kda_layers, which count from 1, or by layer_types; else every fourth after the first."""
    lists = reader.table("linear_attn_config")
    full, linear = (lists.get(name) for name in ("full_attn_layers", "kda_layers"))
    if isinstance(full, list) and isinstance(linear, list):
        if sorted(map(str, full + linear)) != sorted(map(str, range(1, layers + 1))):
            raise ConfigError(
                f"{reader.file}: full_attn_layers and kda_layers of linear_attn_config must have the layers 1 to "
                f"{layers} once each, not {full!r} and {linear!r}"
            )
        return tuple(index + 1 in full for index in range(layers))
    kinds = read_layer_types(reader, layers, "linear_attention", "full_attention")
    if kinds is None:
        return tuple(index > 0 and index % 4 == 0 for index in range(layers))
    return tuple(kind == "full_attention" for kind in kinds)
