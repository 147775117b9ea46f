"""OPT (Zhang et al. 2022), in all its sizes, and Galactica (Taylor et al. 2022), which has its shape without biases.

Most sizes have norms before attention and feed-forward network, and one after the last layer. The 350m one has them
after each residual sum, none after the last layer, and a narrower embedding, projected to the layers' width and back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from octavo.core.model_config import ModelConfig
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.layers.context import LayerContext
from octavo.layers.linear import RowParallelLinear
from octavo.layers.norm import LayerNorm
from octavo.models.checkpoint import Drop, Rename
from octavo.models.config_reader import ConfigReader, decoder_fields, read_activation
from octavo.models.gpt import GPTConfig, GPTDecoder, GPTLayer

#: The first two rows of the table of positions belong to padding.
_POSITION_OFFSET = 2


@dataclass(frozen=True)
class OPTConfig(GPTConfig):
    """Where the norms are, and what they have."""

    embedding_size: int = 0
    #: Norms before attention and feed-forward network, or after the residual sums.
    norm_first: bool = True
    final_norm: bool = True
    #: Whether norms have weights and biases.
    norm_weights: bool = True


class PlainLayerNorm(LayerNorm):
    """A norm with neither weight nor bias in the checkpoint."""

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__(context, size, eps, bias=False)
        self.weight = context.kernels.array(np.ones(size, np.float32), context.dtype)
        self.expected.clear()
        self.holds.clear()


class PostNormLayer(GPTLayer):
    """norm(x + attention(x)), and then other_norm(x + mlp(x)) of that."""

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``GPTLayer``."""
        residual = self.attention_norm.float32(self.attention.add_to(residual, residual, cache, batch))
        return self.mlp_norm.float32(self.mlp.add_to(residual, residual))


class OPTForCausalLM(GPTDecoder):
    """OPT."""

    checkpoint_map = (
        Drop(r"^lm_head\.weight$"),
        Rename(r"^(model\.)?decoder\.", "model."),
        Rename(r"^model\.final_layer_norm\.", "model.norm."),
        Rename(r"\.self_attn_layer_norm\.", ".input_layernorm."),
        Rename(r"\.final_layer_norm\.", ".post_attention_layernorm."),
        Rename(r"\.out_proj\.", ".o_proj."),
        Rename(r"\.(fc[12])\.", r".mlp.\1."),
    )

    def __init__(self, config: OPTConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        hidden, width = config.hidden_size, config.embedding_size
        self.project_in = self.project_out = None
        context = replace(context, max_loras=0)  # adapters of the projections are refused
        if hidden != width and self.is_first:
            self.project_in = self.attach("model.project_in", RowParallelLinear(context, width, hidden, bias=False))
        if hidden != width and self.is_last:
            self.project_out = self.attach("model.project_out", RowParallelLinear(context, hidden, width, bias=False))

    def embedding_size(self, config: OPTConfig) -> int:
        """As config.json says."""
        return config.embedding_size

    def layer_class(self, config: OPTConfig) -> type[GPTLayer]:
        """Where its norms are."""
        return GPTLayer if config.norm_first else PostNormLayer

    def make_norm(self, config: OPTConfig, context: LayerContext) -> LayerNorm:
        """With or without weights."""
        norm = LayerNorm if config.norm_weights else PlainLayerNorm
        return norm(context, config.hidden_size, config.layer_norm_eps)

    def make_final_norm(self, config: OPTConfig, context: LayerContext) -> LayerNorm | None:
        """None where norms are after the sums."""
        return self.make_norm(config, context) if config.final_norm else None

    def embed(self, token_ids: Array) -> Array:
        """Projected to the width of the layers."""
        embedded = self.embed_tokens(token_ids)
        return embedded if self.project_in is None else self.project_in(embedded[:, self.project_in.columns])

    def logits(self, hidden: Array) -> Array:
        """Projected to the width of the embedding."""
        if self.project_out is not None:
            hidden = self.project_out(hidden[:, self.project_out.columns])
        return super().logits(hidden)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json of OPT or Galactica."""
        reader = reader.with_defaults(
            tie_word_embeddings=True, enable_bias=True, layer_norm_elementwise_affine=True, do_layer_norm_before=True
        )
        fields = decoder_fields(reader)
        positions, bias = reader.positive("max_position_embeddings", 2048), reader.flag("enable_bias")
        norm_first = reader.flag("do_layer_norm_before")
        return OPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("ffn_dim"),
            max_position=positions,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
            activation=read_activation(reader, "activation_function", "relu"),
            positions="learned",
            position_rows=positions + _POSITION_OFFSET,
            position_offset=_POSITION_OFFSET,
            embedding_size=reader.positive("word_embed_proj_dim", fields["hidden_size"]),
            norm_first=norm_first,
            final_norm=norm_first and not reader.flag("_remove_final_layer_norm"),
            norm_weights=reader.flag("layer_norm_elementwise_affine"),
            **fields,
        )
