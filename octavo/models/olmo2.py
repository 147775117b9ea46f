"""OLMo 2: Llama whose layers have no norms before attention and MLP, but on what these add to the residual stream.

Queries and keys are normalised over all heads together, as OLMoE's are.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.models.config_reader import ConfigReader
from octavo.models.decoder import DecoderLayer
from octavo.models.llama import LlamaForCausalLM, make_mlp


class Olmo2ForCausalLM(LlamaForCausalLM):
    """A decoder-only transformer with its language-model head."""

    def make_layer(self, index: int, config: ModelConfig, context: LayerContext) -> DecoderLayer:
        """Layer ``index`` of the network."""
        attention = norm_over_heads(self.make_attention(index, config, context), config, context)
        return Olmo2Layer(config, context, attention, make_mlp(config, context))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """Llama's, under its own name."""
        return replace(super().read_config("LlamaForCausalLM", reader), architecture=architecture)


class Olmo2Layer(DecoderLayer):
    """Attention, then the MLP; each has the residual stream as its input, and a norm on what it adds to the stream."""

    attention: Attention

    def __init__(self, config: ModelConfig, context: LayerContext, attention: Attention, mlp: GatedMLP) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention = self.attach("self_attn", attention)
        self.attention_norm = self.attach("post_attention_layernorm", RMSNorm(context, hidden, eps))
        self.mlp = self.attach("mlp", mlp)
        self.mlp_norm = self.attach("post_feedforward_layernorm", RMSNorm(context, hidden, eps))

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``DecoderLayer``."""
        residual = self.attention_norm.add_to(residual, self.attention(residual, cache, batch))
        return self.mlp_norm.add_to(residual, self.mlp(residual))


class ProjectionNorm(RMSNorm):
    """Root mean square norm over all heads together."""

    def __call__(self, x: Array) -> Array:
        """The norm of x [T, heads, D], of the same shape and of the network's type."""
        return super().__call__(x.reshape(len(x), -1)).reshape(*x.shape)


def norm_over_heads(attention: Attention, config: ModelConfig, context: LayerContext) -> Attention:
    """The attention, with norms over all heads of q and over all of k before the rotation.

    Raises:
        ConfigError: the heads are shared by ranks, each of which would know a part of the norm alone.
    """
    if context.tp_size > 1:
        raise ConfigError(
            f"{config.architecture} normalises q and k over all heads, which tensor-parallel workers cannot share: "
            "set tensor_parallel_size=1"
        )
    head_dim, eps = config.head_dim, config.rms_norm_eps
    attention.q_norm = attention.attach("q_norm", ProjectionNorm(context, config.num_heads * head_dim, eps))
    attention.k_norm = attention.attach("k_norm", ProjectionNorm(context, config.num_kv_heads * head_dim, eps))
    return attention
