"""DeepSeek-V2 (arXiv 2405.04434), V3 (arXiv 2412.19437), V3.2 and relatives: latent attention, mixtures of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.interface import RoutingSpec
from octavo.layers.attention import LatentAttention, LatentShape
from octavo.layers.layer import LayerContext
from octavo.models.checkpoint import Drop, Transform
from octavo.models.config_files import ConfigReader, common_fields, longest_context, read_rope
from octavo.models.llama import LlamaForCausalLM, LlamaLayer
from octavo.models.mixtures import (
    DEEPSEEK_V3,
    Mixture,
    MixtureConfig,
    MixtureFamily,
    count,
    read_mixture,
    without_prediction,
)


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(MixtureConfig):
    """``head_dim`` is the number of rotated dimensions of a head; the latent is the one KV head."""

    latent: LatentShape
    attention_scale: float
    #: Whether the checkpoint's rotary dimensions are neighbouring pairs.
    rope_interleave: bool

    @property
    def attention_width(self) -> int:
        """Queries, absorbed queries, what they attend to and its expansion, and the latent."""
        shape = self.latent
        head = shape.nope + shape.rope + shape.cached + shape.kv_rank + shape.value
        return self.num_heads * head + (shape.q_rank or 0) + 2 * shape.cached


#: Values of transformers that config.json may leave out.
_V3 = {"norm_topk_prob": True, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8}
_V3 |= {"moe_intermediate_size": 2048}
_V2 = {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 6}
_V2 |= {"moe_intermediate_size": 1407}
#: V2 scores experts by a softmax, and a group by its best expert. V3 scores them by a sigmoid, chooses by score plus
#: bias, compares groups by their best two, and divides the weights by their sum.
_FAMILIES: dict[str, MixtureFamily] = {
    "DeepseekV2ForCausalLM": replace(
        DEEPSEEK_V3,
        routing=RoutingSpec(1),
        choice_bias=False,
        defaults=_V2,
        only={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1},
    ),
    "DeepseekV3ForCausalLM": replace(DEEPSEEK_V3, defaults=_V3, only={**DEEPSEEK_V3.only, "moe_layer_freq": 1}),
    "DeepseekV32ForCausalLM": replace(DEEPSEEK_V3, defaults={**_V3, "first_k_dense_replace": 3, "index_topk": 2048}),
    "GlmMoeDsaForCausalLM": replace(
        DEEPSEEK_V3,
        defaults={
            **{**_V3, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "index_topk": 2048},
            **{"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5},
            **{"n_routed_experts": 256, "n_shared_experts": 1},
        },
    ),
    "Glm4MoeLiteForCausalLM": replace(
        DEEPSEEK_V3,
        defaults={
            **{**DEEPSEEK_V3.defaults, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5},
            **{"moe_intermediate_size": 1536, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
            **{"n_routed_experts": 64, "n_shared_experts": 1, "first_k_dense_replace": 1},
        },
    ),
}


class DeepseekForCausalLM(LlamaForCausalLM):
    """Llama with latent attention, and mixtures of experts after the first layers.

    V3.2 and GLM-5 have indexers, which choose ``index_topk`` tokens that a token attends to. In contexts of at most
    this length they choose all: longer ones are refused, and indexers are not computed.
    """

    def __init__(self, config: DeepseekConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        shape = config.latent
        self.checkpoint_map = (*self.checkpoint_map, *without_prediction(config), Drop(r"\.self_attn\.indexer\."))
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
        return LlamaLayer(config, context, attention, config.mixture.make_layer(index, config, context))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        family = _FAMILIES[architecture]
        has_q_rank = reader.raw.get("q_lora_rank", 1) is not None
        reader = reader.with_defaults(**family.defaults)
        reader.only("hidden_act", "silu")
        for name, value in {"attention_bias": False, **family.only}.items():
            reader.only(name, value)
        v2 = architecture == "DeepseekV2ForCausalLM"
        heads, rope = reader.positive("num_attention_heads"), read_rope(reader)
        shape = LatentShape(
            heads,
            reader.positive("q_lora_rank", 1536) if has_q_rank else None,
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
        longest, chosen = longest_context(rope), count(reader, "index_topk")
        note = f"index_topk ({chosen}) limits it, as sparse attention is not computed" if 0 < chosen < longest else ""
        return DeepseekConfig(
            architecture=architecture,
            hidden_size=reader.positive("hidden_size"),
            intermediate_size=reader.positive("intermediate_size"),
            num_layers=reader.positive("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=1,
            head_dim=shape.rope,
            max_position=min(longest, chosen or longest),
            context_note=note,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            mlp_bias=reader.flag("mlp_bias"),
            rope=rope,
            latent=shape,
            attention_scale=(shape.nope + shape.rope) ** -0.5 * scale,
            rope_interleave=v2 or reader.raw.get("rope_interleave") is None or reader.flag("rope_interleave"),
            prediction_layers=count(reader, "num_nextn_predict_layers"),
            mixture=_read_mixture(family, reader),
            **common_fields(reader),
        )


def as_halves(weight: np.ndarray, head: int, rope: int) -> np.ndarray:
    """Reorders the last ``rope`` of every ``head`` rows from neighbouring pairs to the halves of ``Kernels.rotary``."""
    if len(weight) % head:
        return weight  # the layer refuses its shape
    rows = np.arange(len(weight)).reshape(-1, head)
    pairs = rows[:, -rope:].reshape(len(rows), -1, 2)
    return weight[np.concatenate((rows[:, :-rope], pairs[..., 0], pairs[..., 1]), axis=1).ravel()]


def _read_mixture(family: MixtureFamily, reader: ConfigReader) -> Mixture:
    layers = reader.positive("num_hidden_layers")
    if not reader.raw.get("n_routed_experts"):  # all layers are dense
        return Mixture(
            num_experts=0, inner=1, routing=RoutingSpec(1), choice_bias=False, shared_inner=0,
            sparse_layers=(False,) * layers,
        )  # fmt: skip
    if family.routing.scoring == "softmax" and reader.only("topk_method", "greedy", "group_limited_greedy") == "greedy":
        reader = replace(reader, raw={**reader.raw, "n_group": 1, "topk_group": 1})
    return read_mixture(family, reader, layers)
