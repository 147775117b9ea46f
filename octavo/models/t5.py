"""T5 (Raffel et al. 2020), its versions 1.1 and Flan-T5, mT5 and UMT5: positions are a bias of the scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from octavo.core.model_config import EncoderFacts, ModelConfig
from octavo.kernels.interface import AttentionSpec
from octavo.layers.attention import Attention, CrossAttention, RelativeBias
from octavo.layers.layer import LayerContext, RMSNorm
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename, SameAs, Transform
from octavo.models.config_files import ConfigReader, decoder_fields, read_activation, read_token_ids
from octavo.models.encoder import EncoderConfig, EncoderDecoder, EncoderDecoderConfig

#: Positions have no end; longer inputs and outputs than these were never meant.
_LONGEST = 32768
#: Tokens of the inputs and outputs that the published models were trained with.
_TRAINED = 512


@dataclass(frozen=True, kw_only=True)
class T5EncoderConfig(EncoderConfig):
    """Relative positions: the number of buckets, and the distance from which on all share the last one."""

    buckets: int
    longest_distance: int


@dataclass(frozen=True, kw_only=True)
class T5Config(EncoderDecoderConfig):
    """The decoder's buckets are the encoder's."""

    encoder: T5EncoderConfig
    buckets: int
    longest_distance: int
    #: Tokens of a sequence where no option names another length.
    trained_length: int
    #: Whether the norm after the last layer is multiplied by hidden_size ** -0.5 for the logits.
    scales_logits: bool

    @property
    def default_length(self) -> int:
        return min(self.max_position, self.trained_length)


def _names(part: str, target: str, *sublayers: tuple[str, str, str]) -> tuple[CheckpointEntry, ...]:
    """Renames of encoder or decoder; ``sublayers``: (name in the checkpoint, ours, our norm), in a layer's order."""
    entries: list[CheckpointEntry] = [
        Rename(rf"^{part}\.final_layer_norm\.", f"{target}.norm."),
        Rename(rf"^{part}\.block\.", f"{target}.layers."),
    ]
    for index, (theirs, ours, norm) in enumerate(sublayers):
        before = rf"^({target}\.layers\.\d+)\.layer\.{index}\."
        entries += [Rename(rf"{before}layer_norm\.", rf"\1.{norm}."), Rename(rf"{before}{theirs}\.", rf"\1.{ours}.")]
    return tuple(entries)


_ATTENTION = ("SelfAttention", "self_attn", "attention_norm")
_CROSS = ("EncDecAttention", "cross_attn", "cross_norm")
_MLP = ("DenseReluDense", "mlp", "mlp_norm")
T5_NAMES: tuple[CheckpointEntry, ...] = (
    Drop(r"^(encoder|decoder)\.embed_tokens\."),
    # A table that old checkpoints have and nothing reads.
    Drop(r"EncDecAttention\.relative_attention_bias\."),
    *_names("encoder", "encoder", _ATTENTION, _MLP),
    *_names("decoder", "model", _ATTENTION, _CROSS, _MLP),
    Rename(r"^shared\.", "model.embed_tokens."),
    Rename(r"\.(self|cross)_attn\.([qkvo])\.", r".\1_attn.\2_proj."),
    Rename(r"\.self_attn\.relative_attention_bias\.", ".relative_bias."),
    Rename(r"\.mlp\.wi\.", ".mlp.fc1."),
    Rename(r"\.mlp\.wi_0\.", ".mlp.gate_proj."),
    Rename(r"\.mlp\.wi_1\.", ".mlp.up_proj."),
)


class T5ForConditionalGeneration(EncoderDecoder):
    """T5: the layers of encoder and decoder share the relative bias of the first layer of each."""

    config: T5Config
    #: feed_forward_proj where config.json has none.
    default_mlp: ClassVar[str] = "relu"
    may_scale_logits: ClassVar[bool] = True

    def __init__(self, config: T5Config, context: LayerContext) -> None:
        self._biases: dict[str, RelativeBias] = {}
        super().__init__(config, context)
        for name, bias in self._biases.items():
            self.attach(name, bias)
        gated, scale = config.gated_mlp, config.hidden_size**-0.5 if config.scales_logits else 1.0
        self.checkpoint_map = (
            *T5_NAMES,
            Rename(r"\.mlp\.wo\.", ".mlp.down_proj." if gated else ".mlp.fc2."),
            *((Drop(r"^lm_head\."),) if config.tie_word_embeddings else ()),
            # A head that its own file does not have is the embedding's, without the scale of the logits.
            SameAs("lm_head.weight", "model.embed_tokens.weight"),
            # The head is linear in the norm before it.
            Transform(r"^model\.norm\.weight$", lambda weight: weight * np.float32(scale)),
        )

    def bias_owner(self, index: int) -> int:
        """The layer whose relative bias layer ``index`` uses."""
        return 0

    def make_norm(self, config: Any, context: LayerContext) -> RMSNorm:
        return RMSNorm(context, config.hidden_size, config.layer_norm_eps)

    def make_attention(self, index: int, config: Any, context: LayerContext) -> Attention:
        bias = self._bias(f"model.layers.{self.bias_owner(index)}.relative_bias", config, context, causal=True)
        return Attention(config, context, AttentionSpec(1.0, bias=bias.bias))

    def make_encoder_attention(self, index: int, config: Any, context: LayerContext) -> Attention:
        bias = self._bias(f"encoder.layers.{self.bias_owner(index)}.relative_bias", config, context, causal=False)
        return Attention(config, context, AttentionSpec(1.0, causal=False, bias=bias.bias))

    def make_cross_attention(self, index: int, config: Any, context: LayerContext) -> CrossAttention:
        return CrossAttention(config, context, 1.0)

    def _bias(self, name: str, config: Any, context: LayerContext, *, causal: bool) -> RelativeBias:
        if name not in self._biases:
            self._biases[name] = RelativeBias(
                context, config.num_heads, config.buckets, config.longest_distance, causal=causal
            )
        return self._biases[name]

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader.only("is_encoder_decoder", True)
        kind = str(reader.raw.get("feed_forward_proj") or cls.default_mlp)
        # What is called gated-gelu is made with the tanh.
        name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
        shared: dict[str, Any] = {
            "architecture": architecture,
            "max_position": _LONGEST,
            "intermediate_size": reader.positive("d_ff"),
            "gated_mlp": kind.startswith("gated-"),
            "activation": read_activation(replace(reader, raw={"feed_forward_proj": name}), "feed_forward_proj", name),
            "layer_norm_eps": reader.number("layer_norm_epsilon", 1e-6),
            "buckets": reader.positive("relative_attention_num_buckets", 32),
            "longest_distance": reader.positive("relative_attention_max_distance", 128),
        }
        # Version 1.1 has a head of its own. The files of transformers 5 name what follows of it instead.
        scales = reader.with_defaults(scale_decoder_outputs=reader.raw.get("tie_word_embeddings") is not False)
        fields = decoder_fields(reader, hidden="d_model", layers="num_layers", heads="num_heads", head_dim="d_kv")
        fields["tie_word_embeddings"] = cls.may_scale_logits and scales.flag("scale_decoder_outputs")
        start = read_token_ids(reader, "decoder_start_token_id") or read_token_ids(reader, "pad_token_id") or (0,)
        return T5Config(
            encoder=T5EncoderConfig(**shared, **fields),
            encoder_facts=EncoderFacts(None, start[:1]),
            norm_first=True,
            final_norm=True,
            trained_length=reader.positive("n_positions", _TRAINED),
            scales_logits=fields["tie_word_embeddings"],
            **shared,
            **{**fields, "num_layers": reader.positive("num_decoder_layers", fields["num_layers"])},
        )


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    """mT5 (Xue et al. 2020): version 1.1."""

    default_mlp = "gated-gelu"
    may_scale_logits = False


class UMT5ForConditionalGeneration(T5ForConditionalGeneration):
    """UMT5 (Chung et al. 2023): each layer has a bias of its own."""

    default_mlp = "gated-gelu"

    def bias_owner(self, index: int) -> int:
        return index
