"""Decoders that differ from Llama in known ways: one network, and a table of families, ``FAMILIES``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig, RopeConfig
from octavo.kernels.interface import Activation, Array, AttentionSpec, AttentionTemperature
from octavo.layers.attention import Attention, ProjectionNorm
from octavo.layers.layer import LayerContext, LayerNorm, PlainLayerNorm, PlainRMSNorm, RMSNorm
from octavo.layers.mlp import GatedMLP, SparseMoE, XieluMLP
from octavo.models.checkpoint import CheckpointEntry, Drop, Permute, Rename, Split, halve_pairs
from octavo.models.config_files import (
    ConfigReader,
    longest_context,
    read_activation,
    read_rope,
    read_windows,
    rotary_fields,
    shape_fields,
)
from octavo.models.decoder import (
    Decoder,
    FeedForward,
    PreNormLayer,
    ResidualLayer,
    SandwichNormLayer,
    make_feed_forward,
)
from octavo.models.registry import find_base


@dataclass(frozen=True, kw_only=True)
class DenseConfig(ModelConfig):
    """How a decoder differs from Llama. ``rope`` is that of the first rotated layer."""

    #: Norms of the inputs of attention and MLP, of their results, or of both.
    placement: Literal["before", "after", "around"] = "before"
    #: RMS norms; layer norms, perhaps with weights stored less 1, or without weights.
    norm: Literal["rms", "layer", "layer, less 1", "layer, no weight"] = "rms"
    #: Norms of queries and keys: of each head, before the rotation or after it, without a weight; or over all heads.
    qk_norms: Literal["", "head", "rotated head", "head, no weight", "all heads"] = ""
    #: The rotation of each layer; None: not rotated.
    ropes: tuple[RopeConfig | None, ...] = ()
    #: Whether checkpoints rotate neighbouring dimensions, not those half of the rotated ones apart.
    interleaved: bool = False
    #: Factor of the queries of each layer by position; empty: none.
    temperatures: tuple[AttentionTemperature | None, ...] = ()
    #: Whether windows are chunks, see ``AttentionSpec``.
    chunked: bool = False
    #: Queries, keys and values are clamped to this magnitude, before the rotation; None: not.
    qkv_clip: float | None = None
    gated_mlp: bool = True
    activation: Activation | Literal["xielu"] = "silu"
    #: Factors of the scores, the embeddings, what a layer adds to the residual stream, and the logits.
    attention_scale: float
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0


class DenseForCausalLM(Decoder):
    """The decoder of ``DenseConfig``.

    A factor of what layers add, m, is not computed: the residual stream is kept divided by m. Norms have the same
    results on it with an eps divided by m^2.
    """

    #: Families by architecture; a subclass has its own.
    families: ClassVar[Mapping[str, Family]]

    def __init__(self, config: DenseConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self._residual_scale = config.residual_scale
        self._scale = config.embedding_scale / config.residual_scale
        if self.is_first:
            self.embed_tokens.scale = self._scale
        self._logit_scale = config.logit_scale
        # Old checkpoints hold the rotary table; those with tied embeddings may hold the head too.
        common = Drop(r"rotary_emb\.inv_freq$"), Drop(r"^lm_head\.weight$")
        names = self.families[find_base(config.text_architecture or config.architecture) or ""].names
        self.checkpoint_map = (*common, *names, *(halves(config) if config.interleaved else ()))

    def make_layer(self, index: int, config: DenseConfig, context: LayerContext) -> ResidualLayer:
        attention, mlp = self.make_attention(index, config, context), self.make_mlp(index, config, context)
        if config.placement == "before":
            return PreNormLayer(attention, mlp, [self.make_norm(config, context) for _ in range(2)])
        assert isinstance(mlp, GatedMLP | SparseMoE)
        after = [RMSNorm(context, config.hidden_size, config.rms_norm_eps) for _ in range(2)]
        if config.placement == "after":
            return SandwichNormLayer(attention, mlp, None, after)
        eps = config.rms_norm_eps / config.residual_scale**2
        return GlmLayer(attention, mlp, [RMSNorm(context, config.hidden_size, eps) for _ in range(2)], after)

    def make_attention(self, index: int, config: DenseConfig, context: LayerContext) -> Attention:
        window = config.sliding_windows[index] if config.sliding_windows else None
        spec = AttentionSpec(config.attention_scale, window, chunked=config.chunked and window is not None)
        rope = config.ropes[index]
        rotary = None if rope is None else self.rotary_table(replace(config, rope=rope), context)
        attention = Attention(
            config,
            context,
            spec,
            rotary,
            whole_qk=config.qk_norms == "all heads",
            temperature=config.temperatures[index] if config.temperatures else None,
        )
        attention.clip = config.qkv_clip
        if config.qk_norms:
            norms = [qk_norm(config, context, heads) for heads in (config.num_heads, config.num_kv_heads)]
            attention.set_norms(*norms, last=config.qk_norms == "rotated head")
        return attention

    def make_mlp(self, index: int, config: DenseConfig, context: LayerContext) -> FeedForward:
        """The feed-forward network of a layer."""
        if config.activation == "xielu":
            return XieluMLP(context, config.hidden_size, config.intermediate_size, config.mlp_bias)
        return make_feed_forward(config, context)

    def make_norm(self, config: DenseConfig, context: LayerContext) -> RMSNorm | LayerNorm:
        eps = config.rms_norm_eps / config.residual_scale**2
        if config.norm == "rms":
            return RMSNorm(context, config.hidden_size, eps)
        if config.norm == "layer, no weight":
            return PlainLayerNorm(context, config.hidden_size, eps)
        return LayerNorm(context, config.hidden_size, eps, unit_offset=config.norm == "layer, less 1")

    def make_final_norm(self, config: DenseConfig, context: LayerContext) -> RMSNorm | LayerNorm:
        return self.make_norm(config, context)

    def set_virtual_tokens(self, first: int, embeddings: np.ndarray) -> None:
        super().set_virtual_tokens(first, embeddings * np.float32(self._scale) if self._scale != 1.0 else embeddings)

    def set_features(self, first: int, features: np.ndarray) -> None:
        """Vectors that layers add are of the whole stream."""
        width, scale = self.config.hidden_size, self._residual_scale
        if scale != 1.0 and features.shape[1] > width:
            features = np.concatenate((features[:, :width], features[:, width:] / np.float32(scale)), axis=1)
        super().set_features(first, features)

    def logits(self, hidden: Array) -> Array:
        logits = super().logits(hidden)
        return logits if self._logit_scale == 1.0 else self.kernels.scale(logits, self._logit_scale)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        return DenseConfig(**dense_fields(architecture, reader, cls.families[architecture]))


class GlmLayer(SandwichNormLayer):
    norm_names = "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"


def qk_norm(config: DenseConfig, context: LayerContext, heads: int) -> RMSNorm:
    """The norm of queries, or of keys, which have this number of heads."""
    if config.qk_norms == "all heads":
        return ProjectionNorm(context, heads * config.head_dim, config.rms_norm_eps)
    kind = PlainRMSNorm if config.qk_norms == "head, no weight" else RMSNorm
    return kind(context, config.head_dim, config.rms_norm_eps)


def halves(config: ModelConfig) -> tuple[CheckpointEntry, ...]:
    """Reorders queries and keys that are rotated in pairs of neighbours, as ``Kernels.rotary`` pairs dimensions."""
    rotated = int(config.head_dim * config.rope.partial_rotary_factor)
    return (
        Permute(r"\.q_proj\.(weight|bias)$", halve_pairs(config.num_heads, rotated)),
        Permute(r"\.k_proj\.(weight|bias)$", halve_pairs(config.num_kv_heads, rotated)),
    )


#: The two matrices of a feed-forward network without a gate.
PLAIN_MLP = (Rename(r"\.mlp\.up_proj\.", ".mlp.fc1."), Rename(r"\.mlp\.down_proj\.", ".mlp.fc2."))
#: Gate and up projections in one tensor.
FUSED_GATE = (Split("gate_up_proj", ("gate_proj", "up_proj")),)


@dataclass(frozen=True)
class Family:
    """How the config.json of an architecture is read."""

    #: From the checkpoint's names to those of the layers.
    names: tuple[CheckpointEntry, ...] = ()
    #: Fields of ``DenseConfig`` that all its models have.
    facts: Mapping[str, Any] = field(default_factory=dict)
    #: Values that its config.json may leave out.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: Values that the network does not compute otherwise.
    only: Mapping[str, Any] = field(default_factory=dict)
    #: Names of the flags for biases: of q, k and v; of the attention's output; of the MLP. Empty: none.
    biases: tuple[str, str, str] = ("attention_bias", "attention_bias", "")
    #: Changes ``DenseConfig`` fields by other values of config.json.
    read: Callable[[ConfigReader, dict[str, Any]], dict[str, Any]] = lambda reader, fields: {}
    #: rope_parameters where config.json has none.
    rope: Mapping[str, Any] | None = None
    activation: str = "silu"
    eps: str = "rms_norm_eps"


def dense_fields(architecture: str, reader: ConfigReader, family: Family) -> dict[str, Any]:
    """The fields of a ``DenseConfig``."""
    given, reader = reader, reader.with_defaults(**family.defaults)
    if family.rope is not None and not any(reader.raw.get(name) for name in ("rope_parameters", "rope_scaling")):
        reader = reader.with_defaults(rope_parameters=dict(family.rope))
    for name, value in family.only.items():
        reader.only(name, value)
    fields = {"architecture": architecture, **family.facts, **shape_fields(reader)}
    for name, flag in zip(("qkv_bias", "o_bias", "mlp_bias"), family.biases, strict=True):
        fields[name] = bool(flag) and reader.flag(flag)
    fields["rms_norm_eps"] = reader.number(family.eps, 1e-5)
    if family.activation == "xielu":
        reader.only("hidden_act", "xielu")
        fields["activation"] = "xielu"
    else:
        fields["activation"] = read_activation(reader, "hidden_act", family.activation)
    fields["attention_scale"] = fields["head_dim"] ** -0.5
    fields |= family.read(replace(reader, raw={**given.raw, **reader.raw}), fields)
    layers = fields["num_layers"]
    if "ropes" not in fields:
        fields |= rotary_fields(reader, fields["head_dim"])
        fields["ropes"] = (fields["rope"],) * layers
    rope = next((rope for rope in fields["ropes"] if rope is not None), RopeConfig())
    length = {} if "max_position" in fields else {"max_position": longest_context(rope)}
    return {**fields, "rope": rope, **length}


def _windows(
    reader: ConfigReader, layers: int, default: int | None, pattern: int | str | None
) -> tuple[int | None, ...]:
    """The window of each layer: of those that layer_types names, else by a pattern; without one, of all layers.

    Args:
        default: the window if config.json does not say; null there means that no layer has one.
        pattern: the n-th of n layers has no window; or letters that repeat, "L" of a layer with a window.
    """
    if reader.raw.get("sliding_window", default) is None:
        return (None,) * layers
    window = reader.positive("sliding_window", default)
    if (windows := read_windows(reader, layers, window)) is not None:
        return windows
    if pattern is None:
        return (window,) * layers
    letters = pattern if isinstance(pattern, str) else "L" * (pattern - 1) + "G"
    if not letters or set(letters) - set("LG"):
        raise ConfigError(f"{reader.file}: sliding_window_pattern must be a number or letters L and G, not {pattern!r}")
    return tuple(window if letters[index % len(letters)] == "L" else None for index in range(layers))


def _ropes_by_type(reader: ConfigReader, windows: tuple[int | None, ...]) -> tuple[RopeConfig, ...]:
    """rope_parameters by layer type; or one rope, of which layers with a window have the base alone."""
    raw = reader.raw
    by_type = replace(reader, raw=reader.table("rope_parameters"))
    if "full_attention" in by_type.raw:
        tables = [by_type.table(name) for name in ("full_attention", "sliding_attention")]
        full, sliding = (read_rope(replace(reader, raw={**raw, "rope_parameters": table})) for table in tables)
    else:
        full = read_rope(reader)
        sliding = RopeConfig(full.theta, scaling={"max_position_embeddings": full.scaling["max_position_embeddings"]})
    return tuple(full if window is None else sliding for window in windows)


def _olmo3(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    windows = _windows(reader, fields["num_layers"], 4096, 4)
    ropes = _ropes_by_type(reader, windows)
    return {"sliding_windows": windows, "ropes": ropes, "max_position": max(map(longest_context, ropes))}


def _exaone4(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Where layers have windows, the others are not rotated."""
    pattern = reader.get("sliding_window_pattern", 4)
    windows, rope = _windows(reader, fields["num_layers"], 4096, pattern), read_rope(reader)
    is_hybrid = reader.raw.get("sliding_window", 4096) is not None
    ropes = tuple(None if is_hybrid and window is None else rope for window in windows)
    return {"sliding_windows": windows, "ropes": ropes, "max_position": longest_context(rope)}


def _smollm3(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    layers, rope = fields["num_layers"], read_rope(reader)
    rotated = reader.raw.get("no_rope_layers")  # 1 of a layer that is rotated, in spite of the name
    if rotated is None:
        interval = reader.positive("no_rope_layer_interval", 4)
        rotated = [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or any(value not in (0, 1) for value in rotated):
        raise ConfigError(f"{reader.file}: no_rope_layers must have a 0 or 1 for each of {layers} layers: {rotated!r}")
    windows: tuple[int | None, ...] = (None,) * layers
    if reader.flag("use_sliding_window") and reader.raw.get("sliding_window") is not None:
        window = reader.positive("sliding_window")
        by_rotation = tuple(None if value else window for value in rotated)
        windows = read_windows(reader, layers, window) or by_rotation
    elif "sliding_attention" in (reader.raw.get("layer_types") or ()):
        raise UnsupportedModelError(f"{reader.file}: layer_types has windows, but use_sliding_window is false")
    return {
        "sliding_windows": windows,
        "ropes": tuple(rope if value else None for value in rotated),
        "max_position": longest_context(rope),
    }


def clip_of_queries(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_clip": None if reader.raw.get("clip_qkv") is None else reader.number("clip_qkv", 1.0)}


def granite(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_scale": reader.number("attention_multiplier", 1.0),
        "embedding_scale": reader.number("embedding_multiplier", 1.0),
        "residual_scale": reader.number("residual_multiplier", 1.0),
        "logit_scale": 1.0 / reader.number("logits_scaling", 1.0),
    }


def _hyperclovax(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Granite's factors, but that logits are multiplied."""
    scales = granite(reader.with_defaults(attention_multiplier=fields["attention_scale"]), fields)
    return {**scales, "logit_scale": 1.0 / scales["logit_scale"]}


def ntk_alpha(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """The rope of Hunyuan's models: "dynamic" with an alpha means a fixed, larger base."""
    scaling = reader.table("rope_parameters") or reader.table("rope_scaling")
    if not scaling.get("alpha") or (scaling.get("rope_type") or scaling.get("type")) != "dynamic":
        return {}
    inside, dim = ConfigReader({"rope_theta": reader.raw.get("rope_theta"), **scaling}, reader.file), fields["head_dim"]
    theta = inside.number("rope_theta", 10000.0) * inside.number("alpha", 1.0) ** (dim / (dim - 2))
    length = reader.positive("max_position_embeddings")
    rope = RopeConfig(theta, scaling={"max_position_embeddings": length})
    return {"ropes": (rope,) * fields["num_layers"]}


def _ministral3(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """A window of all layers, and queries that grow with the position."""
    layers, rope = fields["num_layers"], read_rope(reader)
    temperatures: tuple[AttentionTemperature, ...] = ()
    if (beta := rope.scaling.get("llama_4_scaling_beta")) is not None:
        inside = ConfigReader(rope.scaling, reader.file)
        period = inside.positive("original_max_position_embeddings")
        if not isinstance(beta, int | float) or isinstance(beta, bool) or beta < 0:
            raise ConfigError(f"{reader.file}: llama_4_scaling_beta must be a number, not {beta!r}")
        temperatures = (AttentionTemperature(float(beta), period),) * layers
    return {
        "sliding_windows": _windows(reader, layers, None, None),
        "ropes": (rope,) * layers,
        "max_position": longest_context(rope),
        "temperatures": temperatures,
    }


#: transformers' rope of a Ministral 3 whose config.json has none.
_MINISTRAL3_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
_CWM_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
_APERTUS_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def _mistral(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """A window of all layers, or of those that layer_types names; absent, it is 4096."""
    return {"sliding_windows": _windows(reader, fields["num_layers"], 4096, None)}


MISTRAL = Family(defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 131072}, biases=("", "", ""), read=_mistral)
_GLM = Family(
    names=FUSED_GATE,
    facts={"interleaved": True},
    defaults={
        **{"head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "attention_bias": True},
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07},
    },
    biases=("attention_bias", "", ""),
)
_ERNIE = Family(
    facts={"interleaved": True},
    defaults={
        **{"head_dim": 128, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 500000.0},
        "max_position_embeddings": 131072,
    },
    only={"compression_ratio": 1.0},
    biases=("use_bias", "use_bias", "use_bias"),
)
FAMILIES: dict[str, Family] = {
    "ApertusForCausalLM": Family(
        names=(
            Rename(r"\.attention_layernorm\.", ".input_layernorm."),
            Rename(r"\.feedforward_layernorm\.", ".post_attention_layernorm."),
            *PLAIN_MLP,
        ),
        facts={"qk_norms": "head", "gated_mlp": False},
        defaults={"max_position_embeddings": 65536},
        rope=_APERTUS_ROPE,
        activation="xielu",
    ),
    "ArceeForCausalLM": Family(
        names=PLAIN_MLP,
        facts={"gated_mlp": False},
        defaults={"max_position_embeddings": 4096},
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        activation="relu2",
    ),
    "CwmForCausalLM": Family(
        defaults={"head_dim": 128, "max_position_embeddings": 131072},
        biases=("", "", "mlp_bias"),
        rope=_CWM_ROPE,
        read=lambda reader, fields: {"sliding_windows": _windows(reader, fields["num_layers"], 8192, "GLLL")},
    ),
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_ForCausalLM": _ERNIE,  # the name of its first release
    "Exaone4ForCausalLM": Family(facts={"placement": "after", "qk_norms": "head"}, biases=("", "", ""), read=_exaone4),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(
        _GLM,
        facts={"interleaved": True, "placement": "around"},
    ),
    "GraniteForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        read=granite,
    ),
    "HeliumForCausalLM": Family(
        facts={"interleaved": True},
        defaults={"head_dim": 128, "rope_theta": 100000.0, "max_position_embeddings": 4096, "rms_norm_eps": 1e-8},
        biases=("attention_bias", "", "mlp_bias"),
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        names=(Rename(r"\.query_layernorm\.", ".q_norm."), Rename(r"\.key_layernorm\.", ".k_norm.")),
        facts={"qk_norms": "rotated head"},
        only={"use_cla": False, "use_qk_norm": True},
        read=ntk_alpha,
    ),
    "HyperCLOVAXForCausalLM": Family(
        names=(
            Rename(r"\.post_norm1\.", ".post_self_attn_layernorm."),
            Rename(r"\.post_norm2\.", ".post_mlp_layernorm."),
        ),
        facts={"placement": "around"},
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        only={"use_post_norm": True},
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        read=_hyperclovax,
    ),
    "IQuestCoderForCausalLM": Family(
        defaults={"head_dim": 128, "max_position_embeddings": 131072},
        only={"clip_qkv": None, "use_sliding_window": False},
        biases=("attention_bias", "attention_bias", "mlp_bias"),
    ),
    "InternLM3ForCausalLM": Family(
        defaults={"head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 32768},
        biases=("qkv_bias", "bias", "bias"),
    ),
    "Jais2ForCausalLM": Family(
        names=PLAIN_MLP,
        facts={"norm": "layer", "gated_mlp": False},
        defaults={"attention_bias": True, "mlp_bias": True, "max_position_embeddings": 8192},
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        activation="relu2",
        eps="layer_norm_eps",
    ),
    # Qwen2, with modules that ``octavo.models.mtp`` reads.
    "MiMoForCausalLM": Family(
        names=(Drop(r"^model\.mtp_layers\."),),
        defaults={"attention_bias": True, "max_position_embeddings": 32768},
        only={"attention_bias": True, "use_sliding_window": False},
        biases=("attention_bias", "", ""),
    ),
    "MinistralForCausalLM": MISTRAL,
    "Ministral3ForCausalLM": Family(
        defaults={"head_dim": 128, "max_position_embeddings": 262144},
        biases=("", "", ""),
        rope=_MINISTRAL3_ROPE,
        read=_ministral3,
    ),
    "NemotronForCausalLM": Family(
        names=PLAIN_MLP,
        facts={"norm": "layer, less 1", "gated_mlp": False},
        defaults={"partial_rotary_factor": 0.5, "max_position_embeddings": 4096},
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        activation="relu2",
        eps="norm_eps",
    ),
    "OlmoForCausalLM": Family(
        facts={"norm": "layer, no weight"},
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        read=clip_of_queries,
    ),
    "Olmo2ForCausalLM": Family(facts={"placement": "after", "qk_norms": "all heads"}),
    "Olmo3ForCausalLM": Family(
        facts={"placement": "after", "qk_norms": "all heads"}, defaults={"rope_theta": 500000.0}, read=_olmo3
    ),
    "SeedOssForCausalLM": Family(
        defaults={"head_dim": 128, "attention_bias": True, "max_position_embeddings": 524288},
        biases=("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    "SmolLM3ForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 2e6},
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        read=_smollm3,
    ),
}
DenseForCausalLM.families = FAMILIES
