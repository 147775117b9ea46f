"""The Gemma family: Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118), Gemma 3 (arXiv 2503.19786).

All scale the embeddings by the root of their size, store norm weights minus 1, and gate the MLP by gelu. Gemma 2 adds
norms after attention and MLP, caps of scores and logits, and a window in every other layer. Gemma 3 has norms of
queries and keys instead of caps, five layers with a window for each global one, and a RoPE base for each kind.
EmbeddingGemma (arXiv 2509.20354) is a Gemma 3 whose attention is bidirectional.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ImageFacts, ModelConfig, RopeConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, AttentionSpec, LayerCache
from octavo.layers.attention import Attention
from octavo.layers.layer import LayerContext, RMSNorm
from octavo.layers.mlp import GatedMLP
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename, Transform, transpose
from octavo.models.config_files import (
    ConfigReader,
    fields_of,
    read_rope,
    read_windows,
    shape_fields,
)
from octavo.models.decoder import Decoder, DecoderLayer, SandwichNormLayer
from octavo.models.llama import LlamaLayer
from octavo.models.network import Tower
from octavo.models.vision import VIT_NAMES, Projection, VisionTransformer, VitConfig, VitTower, read_pixels, read_siglip


@dataclass(frozen=True)
class GemmaConfig(ModelConfig):
    """``rope`` is that of the global layers, ``local_rope`` that of the layers with a window."""

    local_rope: RopeConfig = field(default_factory=RopeConfig)
    #: Scores are query * key * query_scale.
    query_scale: float = 0.0625
    #: Caps of attention scores and of logits: ``cap * tanh(x / cap)``.
    score_cap: float | None = None
    logit_cap: float | None = None
    post_norms: bool = False


class GemmaForCausalLM(Decoder):
    checkpoint_map: tuple[CheckpointEntry, ...] = (Drop(r"rotary_emb\.inv_freq$"), Drop(r"^lm_head\.weight$"))

    def __init__(self, config: GemmaConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.kernels, self.logit_cap = context.kernels, config.logit_cap
        if self.is_first:
            # As it was trained: the factor is rounded to the type of the embeddings.
            self.embed_tokens.scale = float(np.array(config.hidden_size**0.5).astype(context.dtype.numpy))

    def make_layer(self, index: int, config: GemmaConfig, context: LayerContext) -> DecoderLayer:
        window = config.sliding_windows[index]
        rotary = self.rotary_table(replace(config, rope=config.local_rope) if window else config, context)
        # Tokens of an image see each other in both directions.
        sees_spans = config.image_facts is not None
        is_causal = not config.is_encoder
        spec = AttentionSpec(config.query_scale, window, config.score_cap, causal=is_causal, sees_spans=sees_spans)
        attention = Attention(config, context, spec, rotary, GemmaNorm)
        mlp = GatedMLP(context, config.hidden_size, config.intermediate_size, False, "gelu_tanh")
        if config.post_norms:
            norms = [GemmaNorm(context, config.hidden_size, config.rms_norm_eps) for _ in range(4)]
            return SandwichNormLayer(attention, mlp, norms[:2], norms[2:])
        return LlamaLayer(config, context, attention, mlp, GemmaNorm)

    def make_final_norm(self, config: GemmaConfig, context: LayerContext) -> GemmaNorm:
        return GemmaNorm(context, config.hidden_size, config.rms_norm_eps)

    def logits(self, hidden: Array) -> Array:
        logits = super().logits(hidden)
        return logits if self.logit_cap is None else self.kernels.soft_cap(logits, self.logit_cap)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        raw = reader.raw | reader.table("text_config")
        raw["hidden_act"] = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
        reader = replace(reader, raw=_DEFAULTS[architecture] | raw)
        # "gelu" in the first Gemma's files means what it was trained with, which is by tanh.
        reader.only("hidden_act", "gelu_pytorch_tanh", *(["gelu"] if architecture == "GemmaForCausalLM" else []))
        fields = shape_fields(reader)
        rope, local_rope = _ropes(reader)
        windows = _windows(reader, fields["num_layers"])
        supported = [False, *([True] if architecture.startswith("Gemma3") else [])]
        is_encoder = reader.only("use_bidirectional_attention", *supported) is True
        if is_encoder:  # the file's window is that of both sides together
            windows = tuple(None if window is None else window // 2 for window in windows)
            if 0 in windows:
                raise UnsupportedModelError(f"{reader.file}: sliding_window must be at least 2, not 1")
        return GemmaConfig(
            architecture=architecture,
            max_position=reader.positive("max_position_embeddings"),  # a scaled rope is part of it
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            qkv_bias=reader.flag("attention_bias"),
            o_bias=reader.flag("attention_bias"),
            qk_norm=architecture.startswith("Gemma3"),
            rope=rope,
            local_rope=local_rope,
            sliding_windows=windows,
            query_scale=reader.number("query_pre_attn_scalar", fields["head_dim"]) ** -0.5,
            score_cap=_cap(reader, "attn_logit_softcapping"),
            logit_cap=_cap(reader, "final_logit_softcapping"),
            post_norms=architecture != "GemmaForCausalLM",
            is_encoder=is_encoder,
            **fields,
        )


class GemmaNorm(RMSNorm):
    """An RMS norm whose weight is 1 plus the checkpoint's."""

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__(context, size, eps, unit_offset=True)


#: Defaults of transformers, which config.json may leave out.
_COMMON: dict[str, Any] = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192},
    **{"rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 1, "bos_token_id": 2},
}
_GEMMA = _COMMON | {
    **{"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 16},
}
_GEMMA2 = _COMMON | {
    **{"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    **{"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
_GEMMA3 = _GEMMA2 | {
    **{"vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 10000.0},
    **{"sliding_window_pattern": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None},
}
_DEFAULTS = {
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}


def _ropes(reader: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """The rope of global layers and of those with a window: ``rope_parameters`` by layer type, or the older spelling.

    In that one Gemma 3 has ``rope_theta`` and ``rope_scaling`` for the former, ``rope_local_base_freq`` for the latter.
    """
    raw = reader.raw
    if "rope_local_base_freq" not in raw:  # before Gemma 3 all layers rotate alike
        rope = read_rope(reader)
        return rope, rope
    by_type = replace(reader, raw=reader.table("rope_parameters"))
    full = {"rope_theta": raw["rope_theta"]} | reader.table("rope_scaling") | by_type.table("full_attention")
    local = {"rope_theta": raw["rope_local_base_freq"]} | by_type.table("sliding_attention")
    read = [read_rope(replace(reader, raw=raw | {"rope_parameters": rope})) for rope in (full, local)]
    return read[0], read[1]


def _windows(reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """The window of each layer: by layer_types, else by sliding_window_pattern, whose last layer has none."""
    if "sliding_window_pattern" not in reader.raw:
        return (None,) * layers
    window = reader.positive("sliding_window")
    if (windows := read_windows(reader, layers, window)) is not None:
        return windows
    pattern = reader.positive("sliding_window_pattern")
    return tuple(window if (i + 1) % pattern else None for i in range(layers))


def _cap(reader: ConfigReader, name: str) -> float | None:
    return None if reader.raw.get(name) is None else reader.number(name, 1.0)


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    vision: VitConfig
    #: Side, in patches, of the square that makes a feature.
    pooled_side: int


class Gemma3Tower(VitTower):
    """SigLIP, the mean of each square of patches, and a matrix (arXiv 2503.19786, section 2.1)."""

    def __init__(self, config: Gemma3Config, context: LayerContext) -> None:
        vision = config.vision
        super().__init__(VisionTransformer(vision, context), context.kernels, config.pooled_side)
        self.norm = self.attach("norm", GemmaNorm(context, vision.hidden_size, vision.layer_norm_eps))
        projector = Projection(context, vision.hidden_size, config.hidden_size, bias=False)
        self.projector = self.attach("projector", projector)

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        assert self.vision.post_norm is not None
        stream = self.vision.post_norm.float32(self.vision(rows, batch, caches[0]))
        return self.projector(self.norm(self.kernels.mean_sampled(stream, batch, self.merge**2)))


class Gemma3ForConditionalGeneration(GemmaForCausalLM):
    """Gemma 3 with images; without a tower in the checkpoint, its language model."""

    checkpoint_map = (
        Rename(r"^(model\.)?vision_tower\.(vision_model\.)?", "tower.vision."),
        Rename(r"^(model\.)?multi_modal_projector\.mm_soft_emb_norm\.", "tower.norm."),
        Rename(r"^(model\.)?multi_modal_projector\.mm_input_projection_weight$", "tower.projector.weight"),
        Transform(r"^tower\.projector\.weight$", transpose),
        *VIT_NAMES,
        Rename(r"^(model\.)?language_model\.(model\.)?", "model."),
        Rename(r"^model\.lm_head\.", "lm_head."),
        Drop(r"^tower\."),
        *GemmaForCausalLM.checkpoint_map,
    )

    def make_tower(self, config: GemmaConfig, context: LayerContext) -> Tower | None:
        return Gemma3Tower(config, context) if isinstance(config, Gemma3Config) else None

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        text = GemmaForCausalLM.read_config(architecture, reader)
        table = reader.table("vision_config")
        if not table:
            return text
        if text.is_encoder:
            raise UnsupportedModelError(f"{reader.file}: use_bidirectional_attention=true is not supported with images")
        inside = replace(reader, raw=table)
        inside.only("model_type", "siglip_vision_model")
        vision = replace(read_siglip(inside), normalisation=read_pixels(reader, "gemma3"))
        tokens = reader.positive("mm_tokens_per_image", 256)
        side = math.isqrt(tokens)
        if side * side != tokens or vision.side % side:
            raise ConfigError(
                f"{reader.file}: mm_tokens_per_image ({tokens}) must be the square of a divisor of image_size / "
                f"patch_size ({vision.side})"
            )
        token = reader.positive(reader.named("image_token_id", "image_token_index"), 262144)
        fields = fields_of(text) | {"image_facts": ImageFacts("gemma3", token, whole=tokens)}
        return Gemma3Config(vision=vision, pooled_side=vision.side // side, **fields)
