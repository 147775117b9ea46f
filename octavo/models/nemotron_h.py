"""Nemotron-H (arXiv 2504.03624) and Nemotron 3: each layer is a Mamba 2 mixer, attention, an MLP or experts.

Mixers bound dt by time_step_limit, as in the published code; transformers has time_step_min there, in prompts only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from octavo.config.kv_spec import KVSpec
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Activation, Array, AttentionSpec, LayerCache
from octavo.layers.attention import Attention
from octavo.layers.layer import LayerContext, RMSNorm
from octavo.layers.mamba import Mamba2Mixer, Mamba2Shape
from octavo.layers.mlp import MLP, SparseMoE
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename, Unstack
from octavo.models.config_files import ConfigReader, read_activation, shape_fields
from octavo.models.decoder import Decoder, ResidualLayer, SingleMixerLayer
from octavo.models.hybrid import HybridConfig
from octavo.models.mamba import MAMBA2_NAMES, read_mamba2
from octavo.models.mixtures import DEEPSEEK_V3, Mixture, count, read_mixture

#: Kinds of layers by their letters in hybrid_override_pattern, and by their names in lists.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NAMES = {"linear_attention": "mamba", "full_attention": "attention", **{name: name for name in _LETTERS.values()}}


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(HybridConfig):
    #: "mamba", "attention", "mlp" or "moe" for each layer.
    kinds: tuple[str, ...]
    mamba2: Mamba2Shape
    activation: Activation
    #: None: no layer has experts.
    mixture: Mixture | None
    #: Width of the experts' inputs; 0: that of the network.
    latent: int

    @property
    def attention_width(self) -> int:
        return max(super().attention_width, self.mamba2.width)

    @property
    def feed_forward_width(self) -> int:
        return super().feed_forward_width if self.mixture is None else self.mixture.width(self) + 2 * self.latent


class FeedForwardLayer(ResidualLayer):
    """x + mlp(norm(x)), without a cache."""

    def __init__(self, mlp: MLP | SparseMoE, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = self.attach("norm", norm)
        self.mlp = self.attach("mixer", mlp)

    @property
    def kv_specs(self) -> list[KVSpec]:
        return []

    def forward(self, residual: Array, caches: Iterator[LayerCache], batch: ForwardBatch) -> Array:
        return self.mlp.add_to(residual, self.norm(residual))


class NemotronHForCausalLM(Decoder):
    checkpoint_map: tuple[CheckpointEntry, ...] = (
        Drop(r"^lm_head\.weight$"),
        Drop(r"^(model\.|backbone\.)?mtp\."),
        Rename(r"^((model|backbone)\.)?embeddings\.", "model.embed_tokens."),
        Rename(r"^((model|backbone)\.)?norm_f\.", "model.norm."),
        Rename(r"^backbone\.", "model."),
        Rename(r"\.mixer\.(shared_experts\.)?up_proj\.", r".mixer.\1fc1."),
        Rename(r"\.mixer\.(shared_experts\.)?down_proj\.", r".mixer.\1fc2."),
        Unstack("up_proj", ("up_proj",)),
        Unstack("down_proj", ("down_proj",)),
        *MAMBA2_NAMES,
    )

    def make_layer(self, index: int, config: NemotronHConfig, context: LayerContext) -> ResidualLayer:
        kind, norm = config.kinds[index], self.make_final_norm(config, context)
        if kind == "mamba":
            mixer = Mamba2Mixer(context, config.hidden_size, config.mamba2, config.rms_norm_eps)
            return SingleMixerLayer(mixer, norm)
        if kind == "attention":
            return SingleMixerLayer(Attention(config, context, AttentionSpec(config.head_dim**-0.5)), norm)
        if kind == "mlp":
            sizes = config.hidden_size, config.intermediate_size
            return FeedForwardLayer(MLP(context, *sizes, config.mlp_bias, config.activation), norm)
        assert config.mixture is not None
        experts = SparseMoE(
            context,
            config.hidden_size,
            config.mixture.inner,
            config.mixture.num_experts,
            config.mixture.routing,
            shared_inner=config.mixture.shared_inner,
            shared_bias=config.mlp_bias,
            choice_bias=True,
            activation=config.activation,
            gated=False,
            latent=config.latent,
            latent_bias=config.mlp_bias,
        )
        return FeedForwardLayer(experts, norm)

    def make_final_norm(self, config: NemotronHConfig, context: LayerContext) -> RMSNorm:
        return RMSNorm(context, config.hidden_size, config.rms_norm_eps)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        older = {name: reader.raw.get(other) for name, other in _OLDER_NAMES.items()}
        reader = reader.with_defaults(**{name: value for name, value in older.items() if value is not None})
        reader = reader.with_defaults(**_DEFAULTS)
        reader.only("mamba_hidden_act", "silu", "swish")
        reader.only("attention_bias", False)
        reader.only("sliding_window", None)
        kinds = _read_kinds(reader)
        reader = replace(reader, raw={**reader.raw, "num_hidden_layers": len(kinds)})
        fields = shape_fields(reader)
        family = replace(DEEPSEEK_V3, shared="moe_shared_expert_intermediate_size", counts_shared=False)
        return NemotronHConfig(
            architecture=architecture,
            max_position=reader.positive("max_position_embeddings"),
            rms_norm_eps=reader.number(reader.named("layer_norm_epsilon", "norm_eps"), 1e-5),
            mlp_bias=reader.flag("mlp_bias"),
            attends=tuple(kind == "attention" for kind in kinds),
            kinds=kinds,
            mamba2=read_mamba2(reader, fields["hidden_size"], _MAMBA2_NAMES),
            activation=read_activation(reader, "mlp_hidden_act", "relu2"),
            mixture=read_mixture(family, reader, len(kinds)) if "moe" in kinds else None,
            latent=count(reader, "moe_latent_size") if "moe" in kinds else 0,
            **fields,
        )


#: How config.json calls the facts of a mixer.
_MAMBA2_NAMES = {
    **{"heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "groups": "n_groups", "states": "ssm_state_size"},
    **{"taps": "conv_kernel", "expand": "expand", "conv_bias": "use_conv_bias", "bias": "use_bias"},
}
#: Other names of some values in published files.
_OLDER_NAMES = {
    **{"head_dim": "attention_head_dim", "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv"},
    **{"expand": "mamba_expand", "use_conv_bias": "mamba_conv_bias", "time_step_limit": "mamba_dt_limit"},
}
#: Defaults of transformers, which config.json may leave out.
_DEFAULTS: dict[str, Any] = {
    **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "mamba_num_heads": 128},
    **{"mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "use_conv_bias": True},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "first_k_dense_replace": 0},
    "moe_shared_expert_intermediate_size": 7688,
}


def _read_kinds(reader: ConfigReader) -> tuple[str, ...]:
    """A list of names, or a letter for each layer."""
    name = reader.named("layers_block_type", "layer_types", "hybrid_override_pattern")
    known = _LETTERS if name == "hybrid_override_pattern" else _NAMES
    layers: Any = reader.raw.get(name)
    expected = str if name == "hybrid_override_pattern" else list
    if not isinstance(layers, expected) or not layers or not {*map(str, layers)} <= {*known}:
        raise ConfigError(f"{reader.file}: {name} must be a {expected.__name__} of {', '.join(known)}, not {layers!r}")
    return tuple(known[str(kind)] for kind in layers)
