"""Qwen3-Next, Qwen3.5 and Qwen3.6: gated delta networks, and gated attention in some layers; experts or an MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.core.model_config import ModelConfig
from octavo.kernels.interface import AttentionSpec, RoutingSpec
from octavo.layers.gated_delta import GatedAttention, GatedDeltaNet
from octavo.layers.layer import LayerContext
from octavo.models.checkpoint import CheckpointEntry, Drop, Permute, Rename, Split
from octavo.models.config_files import ConfigReader, rotary_fields, shape_fields
from octavo.models.decoder import Decoder, DecoderLayer, PreNormLayer
from octavo.models.gemma import GemmaNorm
from octavo.models.hybrid import DeltaConfig, LinearAttentionLayer, read_attends, read_delta_shape
from octavo.models.llama import make_mlp
from octavo.models.mixtures import Mixture, MixtureFamily, all_layers, every_step, read_mixture, stacked_experts


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(DeltaConfig):
    #: None: every layer has an MLP.
    mixture: Mixture | None = None

    @property
    def feed_forward_width(self) -> int:
        return super().feed_forward_width if self.mixture is None else self.mixture.width(self)


class Qwen3NextForCausalLM(Decoder):
    """Qwen3-Next, and the language models of Qwen3.5 and 3.6; image towers are not read."""

    def __init__(self, config: Qwen3NextConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        shape = config.delta
        group = shape.value_heads // shape.key_heads
        qkvz = (shape.key_dim, shape.key_dim, group * shape.value_dim, group * shape.value_dim)
        self.checkpoint_map: tuple[CheckpointEntry, ...] = (
            Rename(r"^(model\.)?language_model\.(model\.)?", "model."),
            Rename(r"^model\.lm_head\.", "lm_head."),
            Drop(r"^(model\.)?visual\."),
            Drop(r"^(model\.)?mtp\."),
            Drop(r"rotary_emb\.inv_freq$"),
            Drop(r"^lm_head\.weight$"),
            Permute(r"\.q_proj\.(weight|bias)$", _ungroup(config.num_heads, (config.head_dim, config.head_dim))),
            Split("q_proj", ("q_proj", "gate_proj")),
            Permute(r"\.in_proj_qkvz\.weight$", _ungroup(shape.key_heads, qkvz)),
            Split("in_proj_qkvz", tuple(f"in_proj_{name}" for name in "qkvz")),
            Permute(r"\.in_proj_ba\.weight$", _ungroup(shape.key_heads, (group, group))),
            Split("in_proj_ba", ("in_proj_b", "in_proj_a")),
            Split("in_proj_qkv", ("in_proj_q", "in_proj_k", "in_proj_v")),
            *(() if config.mixture is None else stacked_experts()),
        )

    def make_layer(self, index: int, config: Qwen3NextConfig, context: LayerContext) -> DecoderLayer:
        mlp = make_mlp(config, context) if config.mixture is None else config.mixture.make_layer(index, config, context)
        norms = [self.make_final_norm(config, context) for _ in range(2)]
        if not config.attends[index]:
            mixer = GatedDeltaNet(context, config.hidden_size, config.delta, config.rms_norm_eps)
            return LinearAttentionLayer(mixer, mlp, norms)
        spec = AttentionSpec(config.head_dim**-0.5)
        attention = GatedAttention(config, context, spec, self.rotary_table(config, context), GemmaNorm)
        return PreNormLayer(attention, mlp, norms)

    def make_final_norm(self, config: ModelConfig, context: LayerContext) -> GemmaNorm:
        return GemmaNorm(context, config.hidden_size, config.rms_norm_eps)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        if architecture.endswith("ForConditionalGeneration"):
            text = reader.table("text_config")
            names = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
            own = {name: reader.raw[name] for name in names if reader.raw.get(name) is not None}
            reader = replace(reader, raw={**own, **{name: value for name, value in text.items() if value is not None}})
        mixture = _MIXTURES.get(architecture.removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM"))
        reader = reader.with_defaults(**_DEFAULTS, **({} if mixture is None else mixture.defaults))
        if mixture is not None:  # without dense layers, files lack their size
            reader = reader.with_defaults(intermediate_size=reader.raw["moe_intermediate_size"])
        reader.only("hidden_act", "silu", "swish")
        fields = shape_fields(reader)
        layers, bias = fields["num_layers"], reader.flag("attention_bias")
        return Qwen3NextConfig(
            architecture=architecture,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            attends=read_attends(reader, layers, reader.positive("full_attention_interval")),
            delta=read_delta_shape(reader),
            mixture=None if mixture is None else read_mixture(mixture, reader, layers),
            **rotary_fields(_with_plain_rope(reader), fields["head_dim"]),
            **fields,
        )


#: Defaults of transformers, which config.json may leave out.
_DEFAULTS: dict[str, Any] = {
    **{"head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16},
    "linear_num_value_heads": 32,
}
_MIXTURE = MixtureFamily(
    routing=RoutingSpec(1, shared=1, renormalize=True),
    shared="shared_expert_intermediate_size",
    defaults={"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
)
_MIXTURES = {
    "Qwen3Next": replace(
        _MIXTURE,
        reads_renormalize=True,
        sparse=every_step,
        defaults={
            **{**_MIXTURE.defaults, "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10},
            "intermediate_size": 5632,
        },
    ),
    "Qwen3_5Moe": replace(
        _MIXTURE, sparse=all_layers, defaults={**_MIXTURE.defaults, "num_experts": 256, "num_experts_per_tok": 8}
    ),
}


def _ungroup(groups: int, sizes: tuple[int, ...]) -> Callable[[int], np.ndarray]:
    """For rows in groups that have parts of these sizes: the first part of every group, then the second, and so on."""

    def order(rows: int) -> np.ndarray:
        grouped = np.arange(rows).reshape(groups, -1)
        if grouped.shape[1] != sum(sizes):
            raise ValueError
        return np.concatenate([part.ravel() for part in np.split(grouped, np.cumsum(sizes)[:-1], axis=1)])

    return order


def _with_plain_rope(reader: ConfigReader) -> ConfigReader:
    """Without sections of a head: of a text, all rotary positions of a token are equal."""
    rope = reader.table("rope_parameters") or reader.table("rope_scaling")
    plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    if plain.get("rope_type", plain.get("type")) == "mrope":
        plain.pop("type", None)
        plain["rope_type"] = "default"
    return replace(reader, raw={**reader.raw, "rope_scaling": None, "rope_parameters": plain})
