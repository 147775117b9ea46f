"""Bamba, Granite 4 and Jamba: Mamba layers, and attention in some; experts or an MLP after each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.interface import RoutingSpec
from octavo.layers.layer import LayerContext, RMSNorm
from octavo.layers.mamba import Mamba1Mixer, Mamba1Shape, Mamba2Mixer, Mamba2Shape
from octavo.layers.states import StateLayer
from octavo.models.checkpoint import Rename, Split
from octavo.models.config_files import ConfigReader
from octavo.models.decoder import FeedForward, PreNormLayer, ResidualLayer
from octavo.models.dense import DenseConfig, DenseForCausalLM, Family, dense_fields, granite
from octavo.models.hybrid import HybridConfig
from octavo.models.mamba import HYBRID_NAMES, MAMBA1_NAMES, MAMBA2_NAMES, read_mamba1, read_mamba2
from octavo.models.mixtures import MIXTURE_NAMES, Mixture, MixtureFamily, count, read_mixture, stacked_experts


@dataclass(frozen=True, kw_only=True)
class MambaHybridConfig(HybridConfig, DenseConfig):
    #: One of them.
    mamba1: Mamba1Shape | None = None
    mamba2: Mamba2Shape | None = None
    #: None: every layer has an MLP.
    mixture: Mixture | None = None

    @property
    def attention_width(self) -> int:
        shape = self.mamba1 or self.mamba2
        assert shape is not None
        return max(super().attention_width, shape.width)

    @property
    def feed_forward_width(self) -> int:
        return super().feed_forward_width if self.mixture is None else self.mixture.width(self)


class MambaBlock(PreNormLayer):
    mixer_name = "mamba"


@dataclass(frozen=True)
class HybridFamily(MixtureFamily):
    #: Whether its layers with a state are those of Mamba 2.
    is_mamba2: bool = True
    #: Number of experts in config.json that stands for an MLP.
    no_experts: int = 0
    #: Names of the size of that MLP.
    mlp_inner: str = "intermediate_size"
    attends: Callable[[ConfigReader, int], tuple[bool, ...]] = lambda reader, layers: ()


class MambaHybridForCausalLM(DenseForCausalLM):
    """The decoder of ``MambaHybridConfig``."""

    families: ClassVar[Mapping[str, Family]]

    def __init__(self, config: MambaHybridConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        mlp = _MLP_NAMES if config.mixture is None else (*MIXTURE_NAMES, *stacked_experts())
        mixer = MAMBA1_NAMES if config.mamba2 is None else MAMBA2_NAMES
        self.checkpoint_map = (*_NAMES, *mlp, *mixer, *self.checkpoint_map)

    def make_layer(self, index: int, config: DenseConfig, context: LayerContext) -> ResidualLayer:
        assert isinstance(config, MambaHybridConfig)
        if config.attends[index]:
            return super().make_layer(index, config, context)
        mixer: StateLayer
        if config.mamba2 is not None:
            mixer = Mamba2Mixer(context, config.hidden_size, config.mamba2, config.rms_norm_eps)
        else:
            assert config.mamba1 is not None
            mixer = Mamba1Mixer(context, config.hidden_size, config.mamba1, RMSNorm, config.rms_norm_eps)
        norms = [self.make_norm(config, context) for _ in range(2)]
        return MambaBlock(mixer, self.make_mlp(index, config, context), norms)

    def make_mlp(self, index: int, config: DenseConfig, context: LayerContext) -> FeedForward:
        assert isinstance(config, MambaHybridConfig)
        if config.mixture is None:
            return super().make_mlp(index, config, context)
        return config.mixture.make_layer(index, config, context)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        family = HYBRIDS[architecture]
        reader = reader.with_defaults(**family.defaults)
        reader.only("hidden_act", "silu", "swish")
        fields = dense_fields(architecture, reader, family)
        layers, hidden = fields["num_layers"], fields["hidden_size"]
        experts = count(reader, reader.named("num_local_experts", family.experts))
        return MambaHybridConfig(
            attends=family.attends(reader, layers),
            mamba1=None if family.is_mamba2 else read_mamba1(reader, hidden, HYBRID_NAMES),
            mamba2=read_mamba2(reader, hidden, HYBRID_NAMES) if family.is_mamba2 else None,
            mixture=None if experts <= family.no_experts else read_mixture(family, reader, layers),
            **{**fields, "intermediate_size": reader.positive(family.mlp_inner)},
        )


# Which layers have attention, and which experts.


def _by_types(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Those that layer_types names; published files have other names than transformers 5."""
    kinds = reader.get("layer_types", ["mamba"] * layers)
    known = {"mamba", "linear_attention", "attention", "full_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= known:
        raise ConfigError(
            f"{reader.file}: layer_types must be a list of {layers} 'mamba' or 'attention' ('linear_attention' or "
            f"'full_attention'), not {kinds!r}"
        )
    return tuple(kind in ("attention", "full_attention") for kind in kinds)


def _by_indices(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Those of attn_layer_indices."""
    indices = reader.get("attn_layer_indices", [])
    if not isinstance(indices, list) or not all(isinstance(index, int) for index in indices):
        raise ConfigError(f"{reader.file}: attn_layer_indices must be a list of layers, not {indices!r}")
    return tuple(index in indices for index in range(layers))


def _every(period: str, offset: str) -> Callable[[ConfigReader, int], tuple[bool, ...]]:
    """Layers by two names of config.json."""

    def chosen(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
        every, first = reader.positive(period), count(reader, offset)
        if first >= every:
            raise ConfigError(f"{reader.file}: {offset} must be less than {period} ({every}), not {first}")
        return tuple(index % every == first for index in range(layers))

    return chosen


def _without_rotation(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    return {"ropes": (None,) * fields["num_layers"], "max_position": reader.positive("max_position_embeddings")}


def _granite4(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Granite's factors; attention is rotated only where config.json says so."""
    is_rotated = reader.only("position_embedding_type", None, "nope", "rope") == "rope"
    return {**granite(reader, fields), **({} if is_rotated else _without_rotation(reader, fields))}


_NAMES = (
    Rename(r"^model\.final_layernorm\.", "model.norm."),
    Rename(r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
)
#: Of MLPs without experts.
_MLP_NAMES = (
    Rename(r"\.(feed_forward|shared_mlp)\.", ".mlp."),
    Rename(r"\.mlp\.output_linear\.", ".mlp.down_proj."),
    Split("input_linear", ("gate_proj", "up_proj")),
)
#: Defaults of transformers, which config.json may leave out.
_MAMBA2: dict[str, Any] = {
    **{"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_conv_bias": True},
}
_ATTENTION_HEADS = {"num_attention_heads": 32, "num_hidden_layers": 32}
HYBRIDS: dict[str, HybridFamily] = {
    "BambaForCausalLM": HybridFamily(
        attends=_by_indices,
        defaults={
            **{**_MAMBA2, **_ATTENTION_HEADS, "num_key_value_heads": 8, "max_position_embeddings": 262144},
            "partial_rotary_factor": 0.5,
        },
        biases=("attention_bias", "attention_bias", "mlp_bias"),
    ),
    "GraniteMoeHybridForCausalLM": HybridFamily(
        attends=_by_types,
        experts="num_local_experts",
        inner="intermediate_size",
        routing=RoutingSpec(1, renormalize=True),
        shared="shared_intermediate_size",
        mlp_inner="shared_intermediate_size",
        defaults={
            **{**_MAMBA2, **_ATTENTION_HEADS, "num_local_experts": 8, "num_experts_per_tok": 2},
            **{"shared_intermediate_size": 1024, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        },
        read=_granite4,
    ),
    "JambaForCausalLM": HybridFamily(
        is_mamba2=False,
        no_experts=1,
        attends=_every("attn_layer_period", "attn_layer_offset"),
        sparse=_every("expert_layer_period", "expert_layer_offset"),
        inner="intermediate_size",
        defaults={
            **{**_ATTENTION_HEADS, "num_key_value_heads": 8, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6},
            **{"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True},
            **{"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
            **{"num_experts": 16, "num_experts_per_tok": 2},
        },
        biases=("", "", ""),
        read=_without_rotation,
    ),
}
MambaHybridForCausalLM.families = HYBRIDS
