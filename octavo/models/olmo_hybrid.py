"""OLMo-hybrid: gated delta networks in Llama's layers, and attention in OLMo 3's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.core.model_config import ModelConfig
from octavo.layers.gated_delta import GatedDeltaNet
from octavo.layers.layer import LayerContext, RMSNorm
from octavo.models.checkpoint import Join, Rename
from octavo.models.config_files import ConfigReader
from octavo.models.decoder import ResidualLayer
from octavo.models.dense import DenseConfig, DenseForCausalLM, Family, dense_fields
from octavo.models.hybrid import DeltaConfig, LinearAttentionLayer, read_attends, read_delta_shape

#: Of the norms of heads, whatever the network's eps is.
_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(DeltaConfig, DenseConfig):
    """A ``DenseConfig`` of the layers with attention."""


def _not_rotated(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Without rope_theta, as in the published models, attention has no positions."""
    rope = reader.table("rope_parameters") or reader.table("rope_scaling")
    if {**reader.raw, **rope}.get("rope_theta") is not None:
        return {}
    return {"ropes": (None,) * fields["num_layers"], "max_position": reader.positive("max_position_embeddings")}


class OlmoHybridForCausalLM(DenseForCausalLM):
    families: ClassVar[Mapping[str, Family]] = {
        "OlmoHybridForCausalLM": Family(
            names=(
                Rename(r"\.attention_layer_norm\.", ".input_layernorm."),
                Rename(r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
                Rename(r"\.linear_attn\.([qkvba])_proj\.", r".linear_attn.in_proj_\1."),
                Rename(r"\.linear_attn\.g_proj\.", ".linear_attn.in_proj_z."),
                Rename(r"\.linear_attn\.o_norm\.", ".linear_attn.norm."),
                Rename(r"\.linear_attn\.o_proj\.", ".linear_attn.out_proj."),
                Join(("q_conv1d", "k_conv1d", "v_conv1d"), "conv1d"),
            ),
            facts={"placement": "after", "qk_norms": "all heads"},
            defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 65536},
            only={"hidden_act": "silu"},
            read=_not_rotated,
        )
    }

    def make_layer(self, index: int, config: DenseConfig, context: LayerContext) -> ResidualLayer:
        assert isinstance(config, OlmoHybridConfig)
        if config.attends[index]:
            return super().make_layer(index, config, context)
        mixer = GatedDeltaNet(context, config.hidden_size, config.delta, _EPS)
        norms = [RMSNorm(context, config.hidden_size, config.rms_norm_eps) for _ in range(2)]
        return LinearAttentionLayer(mixer, self.make_mlp(index, config, context), norms)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        fields = dense_fields(architecture, reader, cls.families[architecture])
        heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), fields["num_heads"])
        reader = reader.with_defaults(linear_conv_kernel_dim=4, **heads)
        key_dim = int(0.75 * fields["hidden_size"] / reader.positive("linear_num_key_heads"))
        reader = reader.with_defaults(linear_key_head_dim=key_dim)
        reader = reader.with_defaults(linear_value_head_dim=2 * reader.positive("linear_key_head_dim"))
        beta_scale = 2.0 if reader.flag("linear_allow_neg_eigval", True) else 1.0
        return OlmoHybridConfig(
            attends=read_attends(reader, fields["num_layers"], 4),
            delta=read_delta_shape(reader, beta_scale=beta_scale),
            **fields,
        )
