"""The GPT family: decoders with layer norms; first the base network, then its variants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig, RopeConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Activation, Array, AttentionSpec, LayerCache
from octavo.layers.attention import Attention, HeadLayerNorm, alibi_slopes
from octavo.layers.layer import LayerContext, LayerNorm, PlainLayerNorm
from octavo.layers.linear import RowParallelLinear
from octavo.layers.vocabulary import PositionEmbedding
from octavo.models.checkpoint import (
    CheckpointEntry,
    Drop,
    Join,
    Permute,
    Rename,
    Split,
    Transform,
    halve_pairs,
    transpose,
    ungroup_heads,
)
from octavo.models.config_files import ConfigReader, decoder_fields, read_activation, read_windows, rotary_fields
from octavo.models.decoder import Decoder, DecoderLayer, PostNormLayer, PreNormLayer, make_feed_forward

#: Old checkpoints hold masks and rotary tables; those with tied embeddings may hold the head too.
GPT_NAMES: tuple[CheckpointEntry, ...] = (
    Drop(r"\.(attn|attention)\.(masked_bias|bias|embed_positions)$"),
    Drop(r"rotary_emb\.inv_freq$"),
    Rename(r"^embed_out\.", "lm_head."),
    Drop(r"^lm_head\.weight$"),
    Rename(r"^(transformer\.|gpt_neox\.)?(wte|word_embeddings|embed_in)\.", "model.embed_tokens."),
    Rename(r"^(transformer\.)?wpe\.", "model.embed_positions."),
    Rename(r"^(transformer\.|gpt_neox\.)?(ln_f|final_layer_norm)\.", "model.norm."),
    Rename(r"^(transformer\.h|h|gpt_neox\.layers|layers)\.", "model.layers."),
    Rename(r"\.(ln_1|ln_attn)\.", ".input_layernorm."),
    Rename(r"\.(ln_2|ln_mlp)\.", ".post_attention_layernorm."),
    Rename(r"\.(attn|attention|self_attention)\.", ".self_attn."),
    Rename(r"\.self_attn\.(c_proj|dense|out_proj)\.", ".self_attn.o_proj."),
    Rename(r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    Rename(r"\.mlp\.(c_fc|fc_in|dense_h_to_4h)\.", ".mlp.fc1."),
    Rename(r"\.mlp\.(c_proj|fc_out|dense_4h_to_h)\.", ".mlp.fc2."),
)


def split_by_kv_head(config: ModelConfig) -> tuple[CheckpointEntry, ...]:
    """For checkpoints in which the rows of queries, keys and values are grouped by KV head."""
    order = ungroup_heads(config.num_heads, config.num_kv_heads)
    return Permute(r"\.query_key_value\.", order), Split("query_key_value", ("q_proj", "k_proj", "v_proj"))


@dataclass(frozen=True)
class GPTConfig(ModelConfig):
    layer_norm_eps: float = 1e-5
    activation: Activation = "gelu_tanh"
    #: A learned table added to the embedding, rotation of queries and keys, or a bias of scores by distance (ALiBi).
    positions: Literal["learned", "rotary", "alibi"] = "rotary"
    #: Rows of the learned table, and the row of position 0.
    position_rows: int = 0
    position_offset: int = 0
    alibi_factor: float = 1.0
    layout: Literal["sequential", "parallel", "parallel, two norms"] = "sequential"
    gated_mlp: bool = False
    norm_bias: bool = True
    #: Layer norms of each head of queries and keys before the rotation: all heads have the same weight and bias, or
    #: each has a weight of its own.
    head_norms: Literal["", "shared", "own"] = ""
    #: Whether each layer is rotated; empty: all are.
    rotated_layers: tuple[bool, ...] = ()


class ParallelLayer(PreNormLayer):
    """x + attention(norm(x)) + mlp(other_norm(x)); with one norm, both read the same."""

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        x = self.attention_norm(residual)
        y = x if self.mlp_norm is self.attention_norm else self.mlp_norm(residual)
        return self.mlp.add_to(self.attention.add_to(residual, x, cache, batch), y)


class GPTDecoder(Decoder):
    """The base network; ``GPTConfig`` says positions, layout, biases and norms."""

    checkpoint_map: tuple[CheckpointEntry, ...] = GPT_NAMES

    def __init__(self, config: GPTConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        if self.is_first and config.positions == "learned":
            table = PositionEmbedding(context, config.position_rows, config.hidden_size, config.position_offset)
            self.embed_positions = self.attach("model.embed_positions", table)

    def make_layer(self, index: int, config: Any, context: LayerContext) -> DecoderLayer:
        attention = self.make_attention(index, config, context)
        norms = [self.make_norm(config, context) for _ in range(1 if config.layout == "parallel" else 2)]
        return self.layer_class(config)(attention, make_feed_forward(config, context), norms)

    def layer_class(self, config: Any) -> type[PreNormLayer]:
        return PreNormLayer if config.layout == "sequential" else ParallelLayer

    def make_attention(self, index: int, config: Any, context: LayerContext) -> Attention:
        slopes = rotary = None
        if config.positions == "alibi":
            slopes = tuple(config.alibi_factor * slope for slope in alibi_slopes(config.num_heads))
        if config.positions == "rotary" and (not config.rotated_layers or config.rotated_layers[index]):
            rotary = self.rotary_table(config, context)
        window = config.sliding_windows[index] if config.sliding_windows else None
        spec = AttentionSpec(config.head_dim**-0.5, window, alibi_slopes=slopes)
        attention, head_dim, eps = Attention(config, context, spec, rotary), config.head_dim, config.layer_norm_eps
        if config.head_norms == "shared":
            attention.set_norms(*(LayerNorm(context, head_dim, eps) for _ in range(2)))
        elif config.head_norms == "own":
            own, own_kv = attention.qkv.own, attention.qkv.own_kv
            attention.set_norms(
                HeadLayerNorm(context, config.num_heads, own, head_dim, eps),
                HeadLayerNorm(context, config.num_kv_heads, own_kv, head_dim, eps),
            )
        return attention

    def make_norm(self, config: Any, context: LayerContext) -> LayerNorm:
        return LayerNorm(context, config.hidden_size, config.layer_norm_eps, bias=config.norm_bias)

    def make_final_norm(self, config: Any, context: LayerContext) -> LayerNorm | None:
        return self.make_norm(config, context)


@dataclass(frozen=True)
class GPT2Config(GPTConfig):
    #: Whether scores are divided by the root of the head size, and by the number of the layer, from 1.
    scale_by_head_size: bool = True
    scale_by_layer: bool = False


class GPT2LMHeadModel(GPTDecoder):
    """GPT-2 (Radford et al. 2019): learned positions. Checkpoints have transposed matrices and fused QKV."""

    checkpoint_map: tuple[CheckpointEntry, ...] = (
        *GPT_NAMES,
        Transform(r"\.(c_attn|o_proj|fc1|fc2)\.weight$", transpose),
        Split("c_attn", ("q_proj", "k_proj", "v_proj")),
    )

    def make_attention(self, index: int, config: GPT2Config, context: LayerContext) -> Attention:
        """With the scale of this layer."""
        scale = config.head_dim**-0.5 if config.scale_by_head_size else 1.0
        return Attention(config, context, AttentionSpec(scale / (index + 1) if config.scale_by_layer else scale))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader = reader.with_defaults(tie_word_embeddings=True, scale_attn_weights=True)
        reader.only("add_cross_attention", False)
        positions = reader.positive("n_positions", 1024)
        fields = decoder_fields(reader, hidden="n_embd", layers="n_layer", heads="n_head", bias=True)
        return GPT2Config(
            architecture=architecture,
            intermediate_size=reader.positive("n_inner", 4 * fields["hidden_size"]),
            max_position=positions,
            layer_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            activation=read_activation(reader, "activation_function", "gelu_new"),
            positions="learned",
            position_rows=positions,
            scale_by_head_size=reader.flag("scale_attn_weights"),
            scale_by_layer=reader.flag("scale_attn_by_inverse_layer_idx"),
            **fields,
        )


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """StarCoder (Li et al. 2023): GPT-2 with one KV head for all queries, or with QKV rows grouped by head."""

    def __init__(self, config: GPT2Config, context: LayerContext) -> None:
        super().__init__(config, context)
        self.checkpoint_map = (
            *GPT_NAMES,
            Permute(r"\.c_attn\.", ungroup_heads(config.num_heads, config.num_kv_heads)),
            Split("c_attn", ("q_proj", "k_proj", "v_proj")),
        )

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader = reader.with_defaults(multi_query=True, activation_function="gelu_pytorch_tanh")
        config = super().read_config(architecture, reader)
        return replace(config, num_kv_heads=1) if reader.flag("multi_query") else config


# GPT-NeoX (Black et al. 2022) and Pythia: attention and MLP side by side, each behind a norm; partly rotated heads
class GPTNeoXForCausalLM(GPTDecoder):
    """GPT-NeoX; in its checkpoints, the rows of queries, keys and values are grouped by head."""

    def __init__(self, config: GPTConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.checkpoint_map = (*GPT_NAMES, *split_by_kv_head(config))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json, with the older names of rotary settings too."""
        rope = {
            "rope_theta": reader.raw.get("rotary_emb_base"),
            "partial_rotary_factor": reader.raw.get("rotary_pct", 0.25),
        }
        reader = reader.with_defaults(use_parallel_residual=True, attention_bias=True, **rope)
        bias = reader.flag("attention_bias")
        fields = decoder_fields(reader)
        return GPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("intermediate_size"),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=True,
            layer_norm_eps=reader.number("layer_norm_eps", 1e-5),
            activation=read_activation(reader, "hidden_act", "gelu"),
            layout="parallel, two norms" if reader.flag("use_parallel_residual") else "sequential",
            **rotary_fields(reader, fields["head_dim"]),
            **fields,
        )


class GPTJForCausalLM(GPTDecoder):
    """GPT-J (Wang & Komatsuzaki 2021): attention and MLP side by side behind one norm; rotates neighbouring pairs."""

    def __init__(self, config: GPTConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        rotated = int(config.head_dim * config.rope.partial_rotary_factor)
        self.checkpoint_map = (*GPT_NAMES, Permute(r"\.[qk]_proj\.weight$", halve_pairs(config.num_heads, rotated)))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        fields = decoder_fields(reader, hidden="n_embd", layers="n_layer", heads="n_head")
        head_dim, rotated = fields["head_dim"], reader.positive("rotary_dim", 64)
        if rotated > head_dim or rotated % 2:
            raise ConfigError(f"{reader.file}: rotary_dim must be even and at most {head_dim}, not {rotated}")
        positions = reader.positive("n_positions", 2048)
        return GPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("n_inner", 4 * fields["hidden_size"]),
            max_position=positions,
            mlp_bias=True,
            layout="parallel",
            head_bias=True,
            layer_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            activation=read_activation(reader, "activation_function", "gelu_new"),
            # A little more than the share, which may be rounded down.
            rope=RopeConfig(partial_rotary_factor=min(1.0, (rotated + 0.5) / head_dim)),
            **fields,
        )


class PhiForCausalLM(GPTDecoder):
    """Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023, Li et al. 2023): GPT-J's layer with biases everywhere."""

    checkpoint_map = (*GPT_NAMES, Rename(r"^(model\.)?final_layernorm\.", "model.norm."))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader = reader.with_defaults(partial_rotary_factor=0.5, max_position_embeddings=2048)
        fields = decoder_fields(reader, kv_heads="num_key_value_heads", bias=True)
        return GPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("intermediate_size", 4 * fields["hidden_size"]),
            head_bias=True,
            layout="parallel",
            head_norms="shared" if reader.flag("qk_layernorm") else "",
            layer_norm_eps=reader.number("layer_norm_eps", 1e-5),
            activation=read_activation(reader, "hidden_act", "gelu_new"),
            **rotary_fields(reader, fields["head_dim"]),
            **fields,
        )


class Starcoder2ForCausalLM(GPTDecoder):
    """StarCoder2 (Lozhkov et al. 2024): rotary positions, grouped-query attention, and a window."""

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader = reader.with_defaults(tie_word_embeddings=True, use_bias=True, max_position_embeddings=4096)
        fields = decoder_fields(reader, kv_heads="num_key_value_heads", bias=reader.flag("use_bias"))
        fields |= rotary_fields(reader, fields["head_dim"])
        window = reader.positive("sliding_window", fields["max_position"])
        return GPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("intermediate_size"),
            layer_norm_eps=reader.number("norm_epsilon", 1e-5),
            activation=read_activation(reader, "hidden_act", "gelu_pytorch_tanh"),
            sliding_windows=(window if window < fields["max_position"] else None,) * fields["num_layers"],
            **fields,
        )


class StableLmForCausalLM(GPTDecoder):
    """StableLM (Bellagente et al. 2024): gated MLPs and partly rotated heads; parallel in some checkpoints."""

    def __init__(self, config: GPTConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        counts = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
        stacks = (
            Join(tuple(f"{name}.norms.{head}" for head in range(count)), name, stack=True)
            for name, count in counts.items()
        )
        self.checkpoint_map = (*GPT_NAMES, *(stacks if config.head_norms else ()))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader.only("hidden_act", "silu", "swish")
        reader = reader.with_defaults(partial_rotary_factor=0.25)
        fields = decoder_fields(reader, kv_heads="num_key_value_heads")
        return GPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("intermediate_size"),
            qkv_bias=reader.flag("use_qkv_bias"),
            gated_mlp=True,
            head_norms="own" if reader.flag("qk_layernorm") else "",  # StableLM 2 12B
            activation="silu",
            layout="parallel" if reader.flag("use_parallel_residual") else "sequential",
            layer_norm_eps=reader.number("layer_norm_eps", 1e-5),
            **rotary_fields(reader, fields["head_dim"]),
            **fields,
        )


@dataclass(frozen=True)
class BloomConfig(GPTConfig):
    #: Whether a layer adds to its norms' results, and not to their inputs.
    residual_after_norm: bool = False


class NormedResidualLayer(PreNormLayer):
    """norm(x) + attention(norm(x)), and then other_norm(x) + mlp(other_norm(x)) of the sum."""

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        x = self.attention_norm.float32(residual)
        x = self.mlp_norm.float32(self.attention.add_to(x, x, cache, batch))
        return self.mlp.add_to(x, x)


class BloomForCausalLM(GPTDecoder):
    """Bloom (Le Scao et al. 2022): ALiBi, and a norm of the embedding. Checkpoints group QKV rows by head."""

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

    def layer_class(self, config: BloomConfig) -> type[PreNormLayer]:
        return NormedResidualLayer if config.residual_after_norm else PreNormLayer

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader = reader.with_defaults(tie_word_embeddings=True)
        fields = decoder_fields(
            reader,
            hidden=reader.named("n_embed", "hidden_size"),
            layers=reader.named("num_hidden_layers", "n_layer"),
            heads=reader.named("num_attention_heads", "n_head"),
            bias=True,
        )
        return BloomConfig(
            architecture=architecture,
            intermediate_size=4 * fields["hidden_size"],
            max_position=reader.positive("seq_length", 2048),  # of the training; ALiBi has no end
            layer_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            positions="alibi",
            residual_after_norm=reader.flag("apply_residual_connection_post_layernorm"),
            **fields,
        )


class FalconForCausalLM(GPTDecoder):
    """Falcon (Almazrouei et al. 2023): multi-query or grouped; parallel in most sizes. QKV rows grouped by KV head."""

    def __init__(self, config: GPTConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.checkpoint_map = (*GPT_NAMES, *split_by_kv_head(config))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader = reader.with_defaults(
            tie_word_embeddings=True, multi_query=True, parallel_attn=True, max_position_embeddings=2048
        )
        is_new = reader.flag("new_decoder_architecture")
        fields = decoder_fields(reader, kv_heads="num_kv_heads" if is_new else None, bias=reader.flag("bias"))
        layout: Literal["sequential", "parallel", "parallel, two norms"] = "parallel"
        if not reader.flag("parallel_attn"):
            layout = "sequential"
            if is_new:
                raise UnsupportedModelError(
                    f"{reader.file}: parallel_attn=false with new_decoder_architecture=true is not supported"
                )
        elif is_new and reader.positive("num_ln_in_parallel_attn", 2) == 2:
            layout = "parallel, two norms"
        head_dim = fields["head_dim"]
        if reader.flag("multi_query") and not is_new:
            fields["num_kv_heads"] = 1
        if reader.flag("alibi"):
            # The slopes are added before the scores are scaled.
            fields |= {"positions": "alibi", "alibi_factor": head_dim**-0.5}
            fields["max_position"] = reader.positive("max_position_embeddings")
        else:
            fields |= rotary_fields(reader, head_dim)
        return GPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("ffn_hidden_size", 4 * fields["hidden_size"]),
            layer_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            activation=read_activation(reader, "activation", "gelu"),
            layout=layout,
            **fields,
        )


#: The first two rows of the table of positions belong to padding.
_POSITION_OFFSET = 2


@dataclass(frozen=True)
class OPTConfig(GPTConfig):
    embedding_size: int = 0
    norm_first: bool = True
    final_norm: bool = True
    norm_weights: bool = True


class OPTForCausalLM(GPTDecoder):
    """OPT (Zhang et al. 2022): ReLU, narrower embeddings or post-norms in some sizes. Galactica: without biases."""

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
        return config.embedding_size

    def layer_class(self, config: OPTConfig) -> type[PreNormLayer]:
        return PreNormLayer if config.norm_first else PostNormLayer

    def make_norm(self, config: OPTConfig, context: LayerContext) -> LayerNorm:
        norm = LayerNorm if config.norm_weights else PlainLayerNorm
        return norm(context, config.hidden_size, config.layer_norm_eps)

    def make_final_norm(self, config: OPTConfig, context: LayerContext) -> LayerNorm | None:
        return self.make_norm(config, context) if config.final_norm else None

    def embed(self, token_ids: Array) -> Array:
        embedded = self.embed_tokens(token_ids)
        return embedded if self.project_in is None else self.project_in(embedded[:, self.project_in.columns])

    def logits(self, hidden: Array) -> Array:
        if self.project_out is not None:
            hidden = self.project_out(hidden[:, self.project_out.columns])
        return super().logits(hidden)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader = reader.with_defaults(
            tie_word_embeddings=True, enable_bias=True, layer_norm_elementwise_affine=True, do_layer_norm_before=True
        )
        fields = decoder_fields(reader, bias=reader.flag("enable_bias"))
        positions = reader.positive("max_position_embeddings", 2048)
        norm_first = reader.flag("do_layer_norm_before")
        return OPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("ffn_dim"),
            max_position=positions,
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


@dataclass(frozen=True)
class CohereConfig(GPTConfig):
    logit_scale: float = 0.0625


class CohereForCausalLM(GPTDecoder):
    """Command R (Cohere 2024): attention and a gated MLP side by side, norms without biases, neighbouring pairs.

    Command R7B and Command A (Cohere 2): layers with a window are rotated, the others are not.
    """

    def __init__(self, config: CohereConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        rotated = config.head_dim
        self._logit_scale = config.logit_scale
        halved = halve_pairs(1, rotated)(rotated)
        self.checkpoint_map = (
            *GPT_NAMES,
            Permute(r"\.q_proj\.(weight|bias)$", halve_pairs(config.num_heads, rotated)),
            Permute(r"\.k_proj\.(weight|bias)$", halve_pairs(config.num_kv_heads, rotated)),
            Transform(r"\.[qk]_norm\.weight$", lambda weight: weight[:, halved]),
        )

    def logits(self, hidden: Array) -> Array:
        return self.kernels.scale(super().logits(hidden), self._logit_scale)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader.only("hidden_act", "silu", "swish")
        has_windows = "sliding_window" not in reader.raw or reader.raw["sliding_window"] is not None
        is_cohere2 = architecture == "Cohere2ForCausalLM"
        # transformers' theta of Cohere 2 is that of all networks
        theta = 10000.0 if is_cohere2 else 500000.0
        reader = reader.with_defaults(tie_word_embeddings=True, rope_theta=theta, max_position_embeddings=8192)
        fields, bias = decoder_fields(reader, kv_heads="num_key_value_heads"), reader.flag("attention_bias")
        fields |= rotary_fields(reader, fields["head_dim"])
        layers = fields["num_layers"]
        if is_cohere2 and has_windows:
            window, pattern = reader.positive("sliding_window", 4096), reader.positive("sliding_window_pattern", 4)
            windows = read_windows(reader, layers, window)
            if windows is None:
                windows = tuple(window if (index + 1) % pattern else None for index in range(layers))
            fields |= {"sliding_windows": windows, "rotated_layers": tuple(value is not None for value in windows)}
        elif is_cohere2:
            fields["rotated_layers"] = (False,) * layers
        # max_position_embeddings is the context of the first training.
        fields["max_position"] = reader.positive("model_max_length", fields["max_position"])
        return CohereConfig(
            architecture=architecture,
            intermediate_size=reader.positive("intermediate_size"),
            qkv_bias=bias,
            o_bias=bias,
            gated_mlp=True,
            activation="silu",
            norm_bias=False,
            head_norms="own" if reader.flag("use_qk_norm") and not is_cohere2 else "",  # Command R+
            layout="parallel",
            layer_norm_eps=reader.number("layer_norm_eps", 1e-5),
            logit_scale=reader.number("logit_scale", 0.0625),
            **fields,
        )
