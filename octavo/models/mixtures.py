"""Mixtures of experts in place of the MLP: what families differ in is a row of ``MIXTURES``.

The rest of their networks is that of ``octavo.models.dense``, whose facts a row has too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.kernels.interface import AttentionTemperature, RoutingSpec
from octavo.layers.attention import Attention
from octavo.layers.layer import LayerContext
from octavo.layers.mlp import GatedMLP, SparseMoE
from octavo.models.checkpoint import CheckpointEntry, Drop, Pairs, Rename, Shapes, Split, Tensor, Unstack
from octavo.models.config_files import ConfigReader, longest_context, read_rope, read_windows, rotary_fields
from octavo.models.decoder import FeedForward
from octavo.models.dense import DenseConfig, DenseForCausalLM, Family, clip_of_queries, dense_fields, granite, ntk_alpha
from octavo.models.llama import make_mlp


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The experts of a network."""

    num_experts: int
    #: Inner size of an expert.
    inner: int
    routing: RoutingSpec
    #: Whether each expert has a bias that takes part in the choice.
    choice_bias: bool
    #: Inner size of the expert that every token has; 0: none. It has a weight if ``routing.shared``.
    shared_inner: int
    #: For each layer, whether it has experts.
    sparse_layers: tuple[bool, ...]

    def width(self, config: ModelConfig) -> int:
        """``ModelConfig.feed_forward_width``."""
        chosen = self.routing.top_k * (config.hidden_size + 3 * self.inner)
        return max(3 * config.intermediate_size, chosen + 3 * self.shared_inner)

    def make_layer(self, index: int, config: ModelConfig, context: LayerContext) -> GatedMLP | SparseMoE:
        """The feed-forward network of a layer."""
        if not self.sparse_layers[index]:
            return make_mlp(config, context)
        return SparseMoE(
            context,
            config.hidden_size,
            self.inner,
            self.num_experts,
            self.routing,
            shared_inner=self.shared_inner,
            shared_bias=config.mlp_bias,
            choice_bias=self.choice_bias,
        )


# Which layers have experts.


def all_layers(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    return (True,) * layers


def every_step(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer, except those of mlp_only_layers (Qwen)."""
    step, dense = reader.positive("decoder_sparse_step", 1), _layer_list(reader, "mlp_only_layers") or []
    return tuple((index + 1) % step == 0 and index not in dense for index in range(layers))


def after_first(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Those that mlp_layer_types names, or all after the first first_k_dense_replace (DeepSeek)."""
    kinds = reader.raw.get("mlp_layer_types")
    if kinds is None:
        dense = count(reader, "first_k_dense_replace")
        return tuple(index >= dense for index in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {"dense", "sparse"}:
        raise ConfigError(
            f"{reader.file}: mlp_layer_types must be a list of {layers} 'dense' or 'sparse', not {kinds!r}"
        )
    return tuple(kind == "sparse" for kind in kinds)


def within_interval(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Every moe_layer_interval-th layer from moe_layer_start_index to moe_layer_end_index, -1: the last (ERNIE)."""
    step, first, last = (_index(reader, f"moe_layer_{name}") for name in ("interval", "start_index", "end_index"))
    if step < 1:
        raise ConfigError(f"{reader.file}: moe_layer_interval must be a positive integer, not {step}")
    last = layers - 1 if last == -1 else last
    return tuple((index + 1) % step == 0 and first <= index <= last for index in range(layers))


def interleaved(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Those of moe_layers, or every interleave_moe_layer_step-th (Llama 4)."""
    step, sparse = reader.positive("interleave_moe_layer_step", 1), _layer_list(reader, "moe_layers")
    return tuple((index + 1) % step == 0 if sparse is None else index in sparse for index in range(layers))


def _layer_list(reader: ConfigReader, name: str) -> list[int] | None:
    value = reader.raw.get(name)
    if value is not None and (not isinstance(value, list) or not all(isinstance(index, int) for index in value)):
        raise ConfigError(f"{reader.file}: {name} must be a list of layers, not {value!r}")
    return value


def _index(reader: ConfigReader, name: str) -> int:
    value = reader.raw[name]
    if not isinstance(value, int):
        raise ConfigError(f"{reader.file}: {name} must be an integer, not {value!r}")
    return value


def count(reader: ConfigReader, name: str) -> int:
    """A number that may be 0, which is its default."""
    return reader.positive(name) if reader.raw.get(name) else 0


def common(reader: ConfigReader, name: str) -> ConfigReader:
    """With one number in the place of a list that has it for every layer."""
    value = reader.raw.get(name)
    if not isinstance(value, list):
        return reader
    if len(set(map(str, value))) != 1:
        raise UnsupportedModelError(f"{reader.file}: {name} that differs between layers is not supported: {value}")
    return replace(reader, raw={**reader.raw, name: value[0]})


# What config.json says of the rest of the network: fields of ``MixtureConfig``, of which ``fields`` are known already.

Fields = dict[str, Any]


def window_of_all(reader: ConfigReader, fields: Fields) -> Fields:
    """The same window in all layers, if it is shorter than the longest context."""
    window = reader.positive("sliding_window") if reader.raw.get("sliding_window") else None
    longest = reader.positive("max_position_embeddings")
    return {"sliding_windows": (window if window is not None and window < longest else None,) * fields["num_layers"]}


def window_in_use(reader: ConfigReader, fields: Fields) -> Fields:
    """The same window in all layers, if use_sliding_window says so (Qwen3-MoE)."""
    window = reader.positive("sliding_window") if reader.raw.get("sliding_window") else None
    return {"sliding_windows": (window if reader.flag("use_sliding_window") else None,) * fields["num_layers"]}


def window_of_types(reader: ConfigReader, fields: Fields) -> Fields:
    """As ``window_in_use``, but in the layers that layer_types names (Qwen2-MoE)."""
    layers = fields["num_layers"]
    if (window := window_in_use(reader, fields)["sliding_windows"][0]) is None:
        return {}
    if (windows := read_windows(reader, layers, window)) is None:
        raise ConfigError(f"{reader.file}: with use_sliding_window, layer_types must name the layers that have it")
    return {"sliding_windows": windows}


def window_of_last(reader: ConfigReader, fields: Fields) -> Fields:
    """In the layers that layer_types names, else from number max_window_layers on (dots.llm1)."""
    if reader.raw.get("sliding_window", 4096) is None:
        return {}
    layers, window = fields["num_layers"], reader.positive("sliding_window", 4096)
    first = reader.positive("max_window_layers", 62)
    by_number = tuple(window if index >= first else None for index in range(layers))
    return {"sliding_windows": read_windows(reader, layers, window) or by_number}


def _glm4(reader: ConfigReader, fields: Fields) -> Fields:
    return {"qk_norms": "head" if reader.flag("use_qk_norm") else ""}


def _hunyuan(reader: ConfigReader, fields: Fields) -> Fields:
    if reader.raw.get("moe_layer_num_skipped"):
        raise UnsupportedModelError(f"{reader.file}: layers without experts (moe_layer_num_skipped) are not supported")
    return ntk_alpha(reader, fields)


def _minimax(reader: ConfigReader, fields: Fields) -> Fields:
    """Published files have the number of rotated dimensions of a head, not their share."""
    if any(kind != 1 for kind in reader.raw.get("attn_type_list") or ()):
        raise UnsupportedModelError(f"{reader.file}: attn_type_list has linear attention, which is not supported")
    head_dim = fields["head_dim"]
    share = {"partial_rotary_factor": reader.positive("rotary_dim", head_dim) / head_dim}
    rope = rotary_fields(replace(reader, raw={**share, **reader.raw}), head_dim)
    return {"ropes": (rope["rope"],) * fields["num_layers"], "max_position": rope["max_position"]}


def _phimoe(reader: ConfigReader, fields: Fields) -> Fields:
    return {"head_bias": reader.flag("lm_head_bias"), **window_of_all(reader, fields)}


def _llama4(reader: ConfigReader, fields: Fields) -> Fields:
    """Chunks of the context in rotated layers; others see all of it, with queries that grow with the position."""
    layers, rope = fields["num_layers"], read_rope(reader)
    longest = longest_context(rope)
    rotated = reader.raw.get("no_rope_layers")  # 1 of a layer that is rotated, in spite of the name
    if not rotated:
        interval = reader.positive("no_rope_layer_interval", 4)
        rotated = [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or any(value not in (0, 1) for value in rotated):
        raise ConfigError(f"{reader.file}: no_rope_layers must have a 0 or 1 for each of {layers} layers: {rotated!r}")
    has_chunks = reader.raw.get("attention_chunk_size", 8192) is not None
    chunk = reader.positive("attention_chunk_size", 8192) if has_chunks else longest
    kinds = reader.raw.get("layer_types") or ["chunked_attention" if value else "full_attention" for value in rotated]
    if len(kinds) != layers or not {*map(str, kinds)} <= {"chunked_attention", "full_attention"}:
        raise ConfigError(
            f"{reader.file}: layer_types must have chunked_attention or full_attention for each of {layers} layers: "
            f"{kinds!r}"
        )
    # Files have true, or the number 4, which means the same.
    is_tuned = bool(reader.raw.get("attn_temperature_tuning", True))
    beta = reader.number("attn_scale", 0.1) if is_tuned else 0.0
    temperature = AttentionTemperature(beta, reader.positive("floor_scale", 8192), offset=1) if is_tuned else None
    return {
        "intermediate_size": reader.positive("intermediate_size_mlp", 16384),
        "sliding_windows": tuple(chunk if kind == "chunked_attention" and chunk < longest else None for kind in kinds),
        "chunked": True,
        "ropes": tuple(rope if value else None for value in rotated),
        "max_position": longest,
        "temperatures": tuple(None if value else temperature for value in rotated),
        "qk_norms": "head, no weight" if reader.flag("use_qk_norm", True) else "",
    }


_SOFTMAX = RoutingSpec(1)
_RENORMALIZED = RoutingSpec(1, renormalize=True)


@dataclass(frozen=True)
class MixtureFamily(Family):
    """How the config.json of an architecture is read; strings are names there."""

    experts: str = "num_experts"
    chosen: str = "num_experts_per_tok"
    #: Inner size of an expert.
    inner: str = "moe_intermediate_size"
    #: Without what config.json says.
    routing: RoutingSpec = _SOFTMAX
    #: Whether norm_topk_prob says that weights are divided by their sum.
    reads_renormalize: bool = False
    choice_bias: bool = False
    #: Whether n_group, topk_group and routed_scaling_factor are read.
    grouped: bool = False
    #: The inner size of the shared expert, or with ``counts_shared`` that over the size of the others; empty: none.
    shared: str = ""
    counts_shared: bool = False
    sparse: Callable[[ConfigReader, int], tuple[bool, ...]] = all_layers


#: DeepSeek-V3, without its attention.
DEEPSEEK_V3 = MixtureFamily(
    experts="n_routed_experts",
    routing=RoutingSpec(1, "sigmoid", best_of_group=2),
    reads_renormalize=True,
    choice_bias=True,
    grouped=True,
    shared="n_shared_experts",
    counts_shared=True,
    sparse=after_first,
    defaults={"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    only={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
)
_MIXTRAL = MixtureFamily(
    experts="num_local_experts", inner="intermediate_size", routing=_RENORMALIZED, read=window_of_all
)
_GRANITE = replace(_MIXTRAL, defaults={"rms_norm_eps": 1e-6}, read=granite)

MIXTURES: dict[str, MixtureFamily] = {
    "Dots1ForCausalLM": replace(
        DEEPSEEK_V3,
        facts={"qk_norms": "head"},
        defaults={**DEEPSEEK_V3.defaults, "norm_topk_prob": False, "rms_norm_eps": 1e-6},
        read=window_of_last,
    ),
    "Ernie4_5_MoeForCausalLM": MixtureFamily(
        experts="moe_num_experts",
        chosen="moe_k",
        routing=_RENORMALIZED,
        choice_bias=True,
        shared="moe_num_shared_experts",
        counts_shared=True,
        sparse=within_interval,
        facts={"interleaved": True},
        defaults={
            **{"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "rope_theta": 500000.0},
            **{"tie_word_embeddings": True, "moe_num_shared_experts": 2, "moe_norm_min": 1e-12},
        },
        biases=("use_bias", "use_bias", "use_bias"),
        read=lambda reader, fields: {"head_bias": reader.flag("use_bias")},
    ),
    "FlexOlmoForCausalLM": MixtureFamily(
        inner="intermediate_size",
        reads_renormalize=True,
        facts={"placement": "after", "qk_norms": "all heads"},
        defaults={"rope_theta": 500000.0, "rms_norm_eps": 1e-6},
    ),
    "Glm4MoeForCausalLM": replace(
        DEEPSEEK_V3,
        defaults={
            **{**DEEPSEEK_V3.defaults, "first_k_dense_replace": 1, "n_shared_experts": 1},
            **{"partial_rotary_factor": 0.5},
        },
        biases=("attention_bias", "", ""),
        read=_glm4,
    ),
    "GraniteMoeForCausalLM": _GRANITE,
    "GraniteMoeSharedForCausalLM": replace(_GRANITE, shared="shared_intermediate_size"),
    "HunYuanMoEV1ForCausalLM": MixtureFamily(
        chosen="moe_topk",
        inner="intermediate_size",
        routing=_RENORMALIZED,
        shared="intermediate_size",
        names=(Rename(r"\.query_layernorm\.", ".q_norm."), Rename(r"\.key_layernorm\.", ".k_norm.")),
        facts={"qk_norms": "rotated head"},
        only={"use_cla": False, "use_qk_norm": True, "use_mixed_mlp_moe": True, "group_limited_greedy": False},
        read=_hunyuan,
    ),
    "Llama4ForCausalLM": MixtureFamily(
        experts="num_local_experts",
        inner="intermediate_size",
        routing=RoutingSpec(1, "sigmoid", weighs_input=True),
        shared="intermediate_size",
        sparse=interleaved,
        names=(Rename(r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),),
        facts={"interleaved": True},
        defaults={"head_dim": 128, "num_experts_per_tok": 1, "rope_theta": 500000.0},
        read=_llama4,
    ),
    "MiniMaxM2ForCausalLM": replace(
        _MIXTRAL,
        routing=RoutingSpec(1, "sigmoid", renormalize=True),
        choice_bias=True,
        facts={"qk_norms": "all heads"},
        defaults={"head_dim": 128, "rope_theta": 5e6, "rms_norm_eps": 1e-6},
        only={
            **{"scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True},
            "shared_intermediate_size": 0,
        },
        biases=("", "", ""),
        read=_minimax,
    ),
    "MixtralForCausalLM": _MIXTRAL,
    "OlmoeForCausalLM": MixtureFamily(
        inner="intermediate_size",
        reads_renormalize=True,
        facts={"qk_norms": "all heads"},
        read=clip_of_queries,
    ),
    "PhimoeForCausalLM": replace(
        _MIXTRAL,
        routing=RoutingSpec(1, "sparsemixer"),
        facts={"norm": "layer"},
        defaults={"rope_theta": 1e6, "router_jitter_noise": 0.01},
        only={"num_experts_per_tok": 2},
        read=_phimoe,
    ),
    "Qwen2MoeForCausalLM": MixtureFamily(
        routing=RoutingSpec(1, shared=1),
        reads_renormalize=True,
        shared="shared_expert_intermediate_size",
        sparse=every_step,
        defaults={"qkv_bias": True, "rms_norm_eps": 1e-6},
        biases=("qkv_bias", "", ""),
        read=window_of_types,
    ),
    "Qwen3MoeForCausalLM": MixtureFamily(
        reads_renormalize=True,
        sparse=every_step,
        facts={"qk_norms": "head"},
        defaults={"rms_norm_eps": 1e-6},
        read=window_in_use,
    ),
    "SolarOpenForCausalLM": replace(
        DEEPSEEK_V3,
        sparse=all_layers,
        defaults={
            **{**DEEPSEEK_V3.defaults, "head_dim": 128, "rope_theta": 1e6},
            **{"n_shared_experts": 1, "moe_intermediate_size": 1280},
        },
        biases=("attention_bias", "", ""),
    ),
}


# The name in Microsoft's files.
MIXTURES["PhiMoEForCausalLM"] = MIXTURES["PhimoeForCausalLM"]


def read_mixture(family: MixtureFamily, reader: ConfigReader, layers: int) -> Mixture:
    """The mixture of a config.json."""
    reader = reader.with_defaults(**family.defaults)
    # transformers 5 writes another name for most.
    number = reader.named("num_local_experts", "num_experts", family.experts)
    for name in (number, family.chosen):
        reader = common(reader, name)
    experts, chosen, inner = (reader.positive(name) for name in (number, family.chosen, family.inner))
    if chosen > experts:
        raise ConfigError(f"{reader.file}: {family.chosen} ({chosen}) is more than the {experts} experts")
    routing = replace(
        family.routing,
        top_k=chosen,
        least_sum=reader.number("moe_norm_min", 1e-12) if "moe_norm_min" in family.defaults else 0.0,
        jitter=reader.number("router_jitter_noise", 0.01) if family.routing.scoring == "sparsemixer" else 0.0,
    )
    if family.reads_renormalize:
        routing = replace(routing, renormalize=reader.flag("norm_topk_prob"))
    if family.grouped:
        routing = replace(
            routing,
            num_groups=reader.positive("n_group"),
            top_groups=reader.positive("topk_group"),
            scale=reader.number("routed_scaling_factor", 1.0),
        )
    shared = count(reader, family.shared) if family.shared else 0
    return Mixture(
        num_experts=experts,
        inner=inner,
        routing=routing,
        choice_bias=family.choice_bias,
        shared_inner=shared * inner if family.counts_shared else shared,
        sparse_layers=family.sparse(reader, layers),
    )


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(DenseConfig):
    """``intermediate_size`` is that of layers without experts."""

    mixture: Mixture
    #: Layers for multi-token prediction, after the last one, which ``octavo.models.mtp`` reads.
    prediction_layers: int = 0

    @property
    def feed_forward_width(self) -> int:
        return self.mixture.width(self)


class Flatten:
    """Tensors with names that end in ``ending`` as one dimension."""

    def __init__(self, ending: str) -> None:
        self._ending = ending

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            if isinstance(tensor, np.ndarray) and name.endswith(self._ending):
                tensor = tensor.reshape(-1)
            yield name, tensor


#: What families call the parts of their mixtures, and the forms of stacked experts.
MIXTURE_NAMES: tuple[CheckpointEntry, ...] = (
    Rename(r"\.(block_sparse_moe|feed_forward)\.", ".mlp."),
    Rename(r"\.mlp\.router\.(layer\.)?", ".mlp.gate."),
    Rename(r"\.mlp\.gate\.wg\.", ".mlp.gate."),
    Rename(r"\.mlp\.(moe_statics\.)?e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
    Flatten(".e_score_correction_bias"),
    Rename(r"\.mlp\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
    Rename(r"\.mlp\.output_linear\.weight$", ".mlp.experts.down_proj"),
    Rename(r"(\.mlp)?\.shared_mlp\.", ".mlp.shared_experts."),
    Rename(r"\.shared_experts\.output_linear\.", ".shared_experts.down_proj."),
    Split("input_linear", ("gate_proj", "up_proj")),
    Rename(r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
    Rename(r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    Rename(r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
)


def stacked_experts(*, transposed: bool | None = False) -> tuple[CheckpointEntry, ...]:
    return (
        Unstack("gate_up_proj", ("gate_proj", "up_proj"), transposed),
        Unstack("down_proj", ("down_proj",), transposed),
    )


def without_prediction(config: MixtureConfig) -> tuple[CheckpointEntry, ...]:
    """Drops the layers for multi-token prediction."""
    last = config.num_layers + config.prediction_layers
    unused = "|".join(str(layer) for layer in range(config.num_layers, last))
    return (Drop(rf"^model\.layers\.({unused})\."),) if unused else ()


class MixtureForCausalLM(DenseForCausalLM):
    """The decoder of ``MixtureConfig``."""

    families: ClassVar[Mapping[str, Family]] = MIXTURES
    #: Whether tensors of stacked experts have inputs before outputs; None: some files have, as their shapes say.
    transposed_experts: ClassVar[bool | None] = False

    def __init__(self, config: MixtureConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        experts = stacked_experts(transposed=self.transposed_experts)
        self.checkpoint_map = (*MIXTURE_NAMES, *experts, *self.checkpoint_map, *without_prediction(config))

    def make_mlp(self, index: int, config: DenseConfig, context: LayerContext) -> FeedForward:
        assert isinstance(config, MixtureConfig)
        return config.mixture.make_layer(index, config, context)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        return MixtureConfig(**mixture_fields(architecture, reader, MIXTURES[architecture]))


def mixture_fields(architecture: str, reader: ConfigReader, family: MixtureFamily) -> Fields:
    """The fields of a ``MixtureConfig``."""
    if family.inner in reader.raw:  # without dense layers, files may lack their size
        reader = replace(reader, raw={"intermediate_size": reader.raw[family.inner], **reader.raw})
    reader.only("hidden_act", "silu", "swish")
    fields = dense_fields(architecture, reader, family)
    return {
        **fields,
        "mixture": read_mixture(family, reader, fields["num_layers"]),
        "prediction_layers": count(reader, "num_nextn_predict_layers"),
    }


class Llama4ForCausalLM(MixtureForCausalLM):
    """Llama 4: norms of heads in rotated layers only."""

    transposed_experts = True

    def make_attention(self, index: int, config: DenseConfig, context: LayerContext) -> Attention:
        config = replace(config, qk_norms="") if config.ropes[index] is None else config
        return super().make_attention(index, config, context)


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The language model of Llama 4; its image tower is not read."""

    families: ClassVar[Mapping[str, Family]] = {
        "Llama4ForConditionalGeneration": replace(
            MIXTURES["Llama4ForCausalLM"],
            names=(
                *MIXTURES["Llama4ForCausalLM"].names,
                Rename(r"^(model\.)?language_model\.(model\.)?", "model."),
                Rename(r"^model\.lm_head\.", "lm_head."),
                Drop(r"^(model\.)?(vision_model|multi_modal_projector)\."),
            ),
        )
    }

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        text = reader.table("text_config")
        own = {name: reader.raw.get(name) for name in ("bos_token_id", "eos_token_id", "dtype", "torch_dtype")}
        text = {**{name: value for name, value in own.items() if value is not None}, **text}
        return MixtureConfig(**mixture_fields(architecture, replace(reader, raw=text), MIXTURES["Llama4ForCausalLM"]))
