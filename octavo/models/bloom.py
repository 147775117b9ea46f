"""Bloom (Le Scao et al. 2022): attention with linear biases (ALiBi), and a norm of the embedding."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.model_config import ModelConfig
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.layers.context import LayerContext
from octavo.layers.norm import LayerNorm
from octavo.models.checkpoint import Rename
from octavo.models.config_reader import ConfigReader, decoder_fields
from octavo.models.gpt import GPT_NAMES, GPTConfig, GPTDecoder, GPTLayer, split_by_kv_head


@dataclass(frozen=True)
class BloomConfig(GPTConfig):
    """What the sums of a layer start from."""

    #: Whether a layer adds to its norms' results, or to their inputs.
    residual_after_norm: bool = False


class NormedResidualLayer(GPTLayer):
    """norm(x) + attention(norm(x)), and then other_norm(x) + mlp(other_norm(x)) of the sum."""

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``GPTLayer``."""
        x = self.attention_norm.float32(residual)
        x = self.mlp_norm.float32(self.attention.add_to(x, x, cache, batch))
        return self.mlp.add_to(x, x)


class BloomForCausalLM(GPTDecoder):
    """Bloom; in its checkpoints, the rows of queries, keys and values are grouped by head."""

    def __init__(self, config: BloomConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        if self.is_first:
            norm = LayerNorm(context, config.hidden_size, config.layer_norm_eps)
            self.embed_norm = self.attach("model.embed_norm", norm)
        self.checkpoint_map = (
            Rename(r"^(transformer\.)?word_embeddings_layernorm\.", "model.embed_norm."),
            *GPT_NAMES,
            *split_by_kv_head(config),
        )

    def layer_class(self, config: BloomConfig) -> type[GPTLayer]:
        """What the sums start from."""
        return NormedResidualLayer if config.residual_after_norm else GPTLayer

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json, in the spellings of the published files and of transformers."""
        reader = reader.with_defaults(tie_word_embeddings=True)
        fields = decoder_fields(
            reader,
            hidden=reader.named("n_embed", "hidden_size"),
            layers=reader.named("num_hidden_layers", "n_layer"),
            heads=reader.named("num_attention_heads", "n_head"),
        )
        return BloomConfig(
            architecture=architecture,
            intermediate_size=4 * fields["hidden_size"],
            # No table ends here; it is the length of the texts that it was trained on.
            max_position=reader.positive("seq_length", 2048),
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            layer_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            positions="alibi",
            residual_after_norm=reader.flag("apply_residual_connection_post_layernorm"),
            **fields,
        )
