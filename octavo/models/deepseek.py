"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention, and mixtures of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.kernels.interface import Array, RoutingSpec
from octavo.layers.attention import LatentAttention, LatentShape
from octavo.layers.layer import LayerContext
from octavo.layers.mlp import GatedMLP, SparseMoE
from octavo.models.checkpoint import Drop, Transform
from octavo.models.config_files import ConfigReader, common_fields, longest_context, read_rope
from octavo.models.llama import LlamaForCausalLM, LlamaLayer, make_mlp


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """``head_dim`` is the number of rotated dimensions of a head; the latent is the one KV head."""

    latent: LatentShape
    attention_scale: float
    #: Whether the checkpoint's rotary dimensions are neighbouring pairs.
    rope_interleave: bool
    #: Layers for multi-token prediction, after the last one; not used.
    prediction_layers: int
    #: Routed experts of each layer but the first ``dense_layers``; 0: all layers are dense.
    num_experts: int
    dense_layers: int
    routing: RoutingSpec
    #: Whether each expert has a bias that takes part in the choice.
    choice_bias: bool
    shared_experts: int
    expert_intermediate_size: int

    @property
    def attention_width(self) -> int:
        """Queries, absorbed queries, what they attend to and its expansion, and the latent."""
        shape = self.latent
        head = shape.nope + shape.rope + shape.cached + shape.kv_rank + shape.value
        return self.num_heads * head + (shape.q_rank or 0) + 2 * shape.cached

    @property
    def feed_forward_width(self) -> int:
        chosen = self.routing.top_k * (self.hidden_size + 3 * self.expert_intermediate_size)
        return 3 * max(self.intermediate_size, self.shared_experts * self.expert_intermediate_size) + chosen


class DeepseekForCausalLM(LlamaForCausalLM):
    """Llama with latent attention, and mixtures of experts after the first layers."""

    def __init__(self, config: DeepseekConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        shape, last = config.latent, config.num_layers + config.prediction_layers
        if unused := "|".join(str(layer) for layer in range(config.num_layers, last)):
            self.checkpoint_map = (*self.checkpoint_map, Drop(rf"^model\.layers\.({unused})\."))
        if config.rope_interleave:
            head = partial(as_halves, head=shape.nope + shape.rope, rope=shape.rope)
            key = partial(as_halves, head=shape.cached, rope=shape.rope)
            self.checkpoint_map = (
                *self.checkpoint_map,
                Transform(r"\.(q_proj|q_b_proj)\.weight$", head),
                Transform(r"\.kv_a_proj_with_mqa\.weight$", key),
            )

    def make_layer(self, index: int, config: ModelConfig, context: LayerContext) -> LlamaLayer:
        assert isinstance(config, DeepseekConfig)
        rotary = self.rotary_table(config, context)
        attention = LatentAttention(context, config.hidden_size, config.latent, config.attention_scale, rotary)
        sparse = config.num_experts > 0 and index >= config.dense_layers
        mlp = SharedAndRouted(config, context) if sparse else make_mlp(config, context)
        return LlamaLayer(config, context, attention, mlp)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader.only("hidden_act", "silu")
        reader.only("attention_bias", False)
        v3 = architecture == "DeepseekV3ForCausalLM"
        heads, rope = reader.positive("num_attention_heads"), read_rope(reader)
        shape = LatentShape(
            heads,
            None if reader.raw.get("q_lora_rank", 1536) is None else reader.positive("q_lora_rank", 1536),
            reader.positive("kv_lora_rank", 512),
            reader.positive("qk_nope_head_dim", 128),
            reader.positive("qk_rope_head_dim", 64),
            reader.positive("v_head_dim", 128),
        )
        if shape.rope % 2 or shape.cached % 2 or rope.partial_rotary_factor != 1:
            raise ConfigError(
                f"{reader.file}: kv_lora_rank ({shape.kv_rank}) and qk_rope_head_dim ({shape.rope}) must be even, "
                f"partial_rotary_factor ({rope.partial_rotary_factor}) 1"
            )
        # YaRN's temperature for all dimensions, squared (Peng et al. 2023, section 3.3).
        scale, weight, factor = 1.0, rope.scaling.get("mscale_all_dim"), rope.scaling.get("factor", 1.0)
        if rope.rope_type != "default" and weight and factor > 1:
            scale = float((0.1 * weight * math.log(factor) + 1.0) ** 2)
        return DeepseekConfig(
            architecture=architecture,
            hidden_size=reader.positive("hidden_size"),
            intermediate_size=reader.positive("intermediate_size"),
            num_layers=reader.positive("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=1,
            head_dim=shape.rope,
            max_position=longest_context(rope),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            mlp_bias=reader.flag("mlp_bias"),
            rope=rope,
            latent=shape,
            attention_scale=(shape.nope + shape.rope) ** -0.5 * scale,
            rope_interleave=not v3 or reader.raw.get("rope_interleave") is None or reader.flag("rope_interleave"),
            prediction_layers=_count(reader, "num_nextn_predict_layers"),
            **_experts(reader, v3),
            **common_fields(reader),
        )


class SharedAndRouted(SparseMoE):
    """Experts that every token has, as one feed-forward network, and routed ones (DeepSeek-V2, section 2.2)."""

    def __init__(self, config: DeepseekConfig, context: LayerContext) -> None:
        hidden, inner = config.hidden_size, config.expert_intermediate_size
        super().__init__(context, hidden, inner, config.num_experts, config.routing, choice_bias=config.choice_bias)
        self.shared = None
        if config.shared_experts:
            shared = GatedMLP(context, hidden, config.shared_experts * inner, config.mlp_bias)
            self.shared = self.attach("shared_experts", shared)

    def add_to(self, residual: Array, x: Array) -> Array:
        return super().add_to(self.shared.add_to(residual, x) if self.shared else residual, x)


def as_halves(weight: np.ndarray, head: int, rope: int) -> np.ndarray:
    """Reorders the last ``rope`` of every ``head`` rows from neighbouring pairs to the halves of ``Kernels.rotary``."""
    if len(weight) % head:
        return weight  # the layer refuses its shape
    rows = np.arange(len(weight)).reshape(-1, head)
    pairs = rows[:, -rope:].reshape(len(rows), -1, 2)
    return weight[np.concatenate((rows[:, :-rope], pairs[..., 0], pairs[..., 1]), axis=1).ravel()]


def _experts(reader: ConfigReader, v3: bool) -> dict[str, Any]:
    """The fields of ``DeepseekConfig`` for the mixture of experts.

    V2 scores experts by a softmax, and a group by its best expert. V3 scores them by a sigmoid, chooses by score plus
    bias, compares groups by their best two, and divides the weights by their sum.
    """
    method = reader.raw.get("topk_method") or ("noaux_tc" if v3 else "greedy")
    methods = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    normalised = reader.flag("norm_topk_prob") or (v3 and reader.raw.get("norm_topk_prob") is None)
    if method not in methods or (normalised and not v3) or reader.positive("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError(
            f"{reader.file}: routing with topk_method={method!r}, norm_topk_prob={normalised} and moe_layer_freq="
            f"{reader.raw.get('moe_layer_freq', 1)} is not supported; supported: {' or '.join(methods)}, "
            f"{'any' if v3 else 'false'} and 1"
        )
    grouped = method != "greedy"
    routing = RoutingSpec(
        reader.positive("num_experts_per_tok", 8 if v3 else 6),
        "sigmoid" if v3 else "softmax",
        renormalize=normalised,
        scale=reader.number("routed_scaling_factor", 2.5 if v3 else 1.0),
        num_groups=reader.positive("n_group", 8) if grouped else 1,
        top_groups=reader.positive("topk_group", 4) if grouped else 1,
        best_of_group=2 if v3 else 1,
    )
    return {
        "num_experts": _count(reader, "n_routed_experts"),
        "dense_layers": _count(reader, "first_k_dense_replace"),
        "routing": routing,
        "choice_bias": v3,
        "shared_experts": _count(reader, "n_shared_experts"),
        "expert_intermediate_size": reader.positive("moe_intermediate_size", 2048 if v3 else 1407),
    }


def _count(reader: ConfigReader, name: str) -> int:
    return reader.positive(name) if reader.raw.get(name) else 0
