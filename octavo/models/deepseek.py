"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention, and mixtures of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig, RopeConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import LayerCache
from octavo.layers.base import Layer
from octavo.layers.context import LayerContext
from octavo.layers.latent_attention import LatentAttention, LatentShape
from octavo.layers.norm import RMSNorm
from octavo.models.checkpoint import Drop, Transform
from octavo.models.config import ConfigReader, common_fields, longest_context, read_rope, refuse_activations
from octavo.models.llama import MLP, LlamaForCausalLM


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """``head_dim`` is the dimensions of a head that are rotated, and the one KV head the latent."""

    latent: LatentShape
    #: Factor on the scores beside that of the head size.
    score_scale: float = 1.0
    #: Whether the checkpoint's rotary dimensions are neighbouring pairs.
    rope_interleave: bool = True
    #: Layers after the last one, which predict further tokens and are not used.
    prediction_layers: int = 0

    @property
    def attention_width(self) -> int:
        """Queries, absorbed queries, what they attend to and its expansion, and the latent."""
        shape = self.latent
        head = shape.nope + shape.rope + shape.cached + shape.kv_rank + shape.value
        return self.num_heads * head + (shape.q_rank or 0) + 2 * shape.cached


class DeepseekForCausalLM(LlamaForCausalLM):
    """A decoder-only transformer with latent attention."""

    def __init__(self, config: DeepseekConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        shape, last = config.latent, config.num_layers + config.prediction_layers
        unused = "|".join(str(layer) for layer in range(config.num_layers, last))
        if unused:
            self.checkpoint_map = (*self.checkpoint_map, Drop(rf"^model\.layers\.({unused})\."))  # type: ignore[misc]
        if config.rope_interleave:
            head = partial(as_halves, head=shape.nope + shape.rope, rope=shape.rope)
            key = partial(as_halves, head=shape.cached, rope=shape.rope)
            self.checkpoint_map = (  # type: ignore[misc]
                *self.checkpoint_map,
                Transform(r"\.(q_proj|q_b_proj)\.weight$", head),
                Transform(r"\.kv_a_proj_with_mqa\.weight$", key),
            )

    def make_layer(self, index: int, config: ModelConfig, context: LayerContext, cos_sin: Tensor) -> Layer:
        """Latent attention and a feed-forward network or a mixture of them."""
        assert isinstance(config, DeepseekConfig)
        return DeepseekLayer(config, context, cos_sin)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json of DeepSeek-V2 or V3."""
        refuse_activations(reader, "silu")
        if reader.flag("attention_bias"):
            raise UnsupportedModelError("latent attention with attention_bias=true is not supported")
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
                f"{reader.file}: kv_lora_rank ({shape.kv_rank}) and qk_rope_head_dim ({shape.rope}) must be even, and "
                f"partial_rotary_factor 1, not {rope.partial_rotary_factor}"
            )
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
            score_scale=_score_scale(rope),
            rope_interleave=not v3 or reader.raw.get("rope_interleave") is None or reader.flag("rope_interleave"),
            prediction_layers=int(reader.raw.get("num_nextn_predict_layers") or 0),
            **common_fields(reader),
        )


class DeepseekLayer(Layer):
    """Attention, then the feed-forward network, each with the norm of the residual stream as its input."""

    def __init__(self, config: DeepseekConfig, context: LayerContext, cos_sin: Tensor) -> None:
        super().__init__()
        hidden, eps, shape = config.hidden_size, config.rms_norm_eps, config.latent
        scale = config.score_scale * (shape.nope + shape.rope) ** -0.5
        self.attention_norm = self.attach("input_layernorm", RMSNorm(context, hidden, eps))
        self.attention = self.attach("self_attn", LatentAttention(context, hidden, shape, scale, cos_sin))
        self.mlp_norm = self.attach("post_attention_layernorm", RMSNorm(context, hidden, eps))
        self.mlp = self.attach("mlp", MLP(config, context))

    def __call__(self, residual: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """The residual stream after this layer, float32 [T, E]; the input's memory may be reused."""
        residual = self.attention.add_to(residual, self.attention_norm(residual), cache, batch)
        return self.mlp.add_to(residual, self.mlp_norm(residual))


def as_halves(weight: Tensor, head: int, rope: int) -> Tensor:
    """Reorders the last ``rope`` of every ``head`` rows from neighbouring pairs to the halves of ``Kernels.rotary``."""
    if len(weight) % head:
        return weight  # the layer refuses its shape
    rows = torch.arange(len(weight)).view(-1, head)
    rows[:, -rope:] = rows[:, -rope:].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    return weight[rows.flatten()]


def _score_scale(rope: RopeConfig) -> float:
    """The square of YaRN's temperature for all dimensions (Peng et al. 2023, section 3.3)."""
    weight, factor = rope.scaling.get("mscale_all_dim"), rope.scaling.get("factor", 1.0)
    if rope.rope_type == "default" or not weight or factor <= 1:
        return 1.0
    return float((0.1 * weight * math.log(factor) + 1.0) ** 2)
