"""Projector files of llama.cpp (``mmproj-*.gguf``): the image tower of a model whose language model is another file.

``clip.projector_type`` names a family, of which ``FAMILIES`` says all: the language models that it is for, config.json
and the settings of the image processor by the metadata, and the network's names of the file's tensors.
Format: llama.cpp's tools/mtmd; names of keys and tensors: ``gguf.constants`` (``Keys.Clip``, ``MODEL_ARCH.MMPROJ``).
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import OctavoError, UnsupportedModelError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.kernels.weight_rows import dequantize
from octavo.loader.files import PROJECTOR_LINK, split_paths
from octavo.loader.gguf_file import GGUFCheckpoint, GGUFFile, GGUFTensor, Metadata
from octavo.loader.sentencepiece import CONTROL, UNKNOWN, USER_DEFINED
from octavo.models.checkpoint import (
    CheckpointEntry,
    Drop,
    Pairs,
    Permute,
    Rename,
    Shapes,
    Tensor,
    Transform,
    halve_pairs,
    has_values,
    without_values,
)
from octavo.models.registry import model_type_of

logger = logging.getLogger(__name__)

#: The tensors of a tower in a network.
_TOWER = "tower."
_BLOCK = re.compile(r"v\.blk\.(\d+)\.")
_MIN_PIXELS, _MAX_PIXELS = "vision.image_min_pixels", "vision.image_max_pixels"


@dataclass(frozen=True)
class Projector:
    """The metadata and tensors of a projector file, beside the language model that it is for."""

    m: Metadata
    language: GGUFFile
    #: config.json of the language model alone.
    text: Mapping[str, Any]

    @property
    def layers(self) -> int:
        """The layers of the tower, by its tensors; those that the network computes may be fewer."""
        count = len({match[1] for name in self.m.file.tensors if (match := _BLOCK.match(name))})
        if (said := self.m.integer("vision.block_count")) > count:
            raise WeightError(f"clip.vision.block_count is {said}, but there are {count} layers", file=self.m.file.path)
        return count

    @property
    def transformer(self) -> dict[str, Any]:
        """``vision_config`` of a vision transformer, as CLIP's and SigLIP's."""
        m = self.m
        gelu = "gelu_pytorch_tanh" if m.flag("use_gelu") else "quick_gelu"
        return {
            "hidden_size": m.integer("vision.embedding_length"),
            "intermediate_size": m.integer("vision.feed_forward_length"),
            "num_hidden_layers": self.layers,
            "num_attention_heads": m.integer("vision.attention.head_count"),
            "image_size": m.integer("vision.image_size"),
            "patch_size": m.integer("vision.patch_size"),
            "layer_norm_eps": m.real("vision.attention.layer_norm_epsilon"),
            "hidden_act": "silu" if m.flag("use_silu") else gelu,
        }

    @property
    def normalisation(self) -> dict[str, list[float]]:
        """The settings of all image processors: mean and standard deviation of the channels."""
        return {f"image_{name}": self._channels(f"vision.image_{name}") for name in ("mean", "std")}

    def _channels(self, key: str) -> list[float]:
        values = self.m.file.metadata.get(f"clip.{key}")
        if not isinstance(values, np.ndarray) or values.shape != (3,) or not np.isfinite(values).all():
            raise WeightError(f"clip.{key} must be three numbers, not {values!r:.80}", file=self.m.file.path)
        return [float(str(np.float32(value))) for value in values]

    def numbers(self, key: str) -> list[int]:
        """The integers of an array, none below 0; empty if the file has no such array."""
        values = np.ravel(self.m.file.metadata.get(f"clip.{key}", ()))
        if values.size and (values.dtype.kind not in "iu" or (values < 0).any()):
            problem = f"clip.{key} must be integers from 0 on, not {values.tolist()!r:.80}"
            raise WeightError(problem, file=self.m.file.path)
        return [int(value) for value in values]

    def shape(self, tensor: str, dimensions: int) -> tuple[int, ...]:
        """The shape of a tensor that must have this number of dimensions."""
        entry = self.m.file.tensors.get(tensor)
        if entry is None or len(entry.shape) != dimensions:
            raise WeightError(f"has no tensor {tensor!r} with {dimensions} dimensions", file=self.m.file.path)
        return tuple(entry.shape)

    def bounds(self, side: int, **keys: str) -> dict[str, int]:
        """Settings of the number of an image's features, of ``side`` x ``side`` pixels, by keys that bound its pixels.

        Published files have no such keys: the default of the image processor then applies.
        """
        return {name: self.m.integer(key) // side**2 or 1 for name, key in keys.items() if self.m.has(key)}

    def token(self, *names: str, stand_in: str = "") -> int:
        """The id of the first of these tokens of the language model, else of the first that matches ``stand_in``.

        No text but its own may be encoded as a token that stands in; such ones have a type of their own in the file.
        """
        tokens = self.language.metadata.get("tokenizer.ggml.tokens")
        tokens = tokens if isinstance(tokens, list) else []
        for name in names:
            if name in tokens:
                return tokens.index(name)
        types = np.ravel(self.language.metadata.get("tokenizer.ggml.token_type", ()))
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False)):
            if stand_in and kind in (CONTROL, USER_DEFINED, UNKNOWN) and re.fullmatch(stand_in, str(token)):
                return index
        raise UnsupportedModelError(
            f"{self.language.path}: the vocabulary has no token {' or '.join(map(repr, names))}, which stands for an "
            f"image in prompts; a language model for {self.m.file.path.name} has one"
        )


@dataclass(frozen=True)
class Family:
    """A kind of projectors."""

    #: ``general.architecture`` of the language models -> the architecture of the whole.
    languages: Mapping[str, str]
    #: The tensor that makes the features, and its dimension of their width.
    output: tuple[str, int]
    #: (pattern of names in the file, the network's name).
    names: tuple[tuple[str, str], ...]
    #: config.json of the whole, but for what all have.
    config: Callable[[Projector], dict[str, Any]]
    #: preprocessor_config.json, but for the normalisation.
    settings: Callable[[Projector], dict[str, Any]]
    #: From the layout of the file to that of transformers' checkpoints, under the network's names.
    layout: Callable[[Metadata], Sequence[CheckpointEntry]] = lambda m: ()
    #: Beginnings of the network's names whose tensors are not computed, if the network lacks them.
    unused: str = ""


#: Of LLaVA-NeXT: ends each line of features. Without it a file is of LLaVA 1.5.
_NEWLINE = "model.image_newline"


def _llava(p: Projector) -> dict[str, Any]:
    """LLaVA 1.5, LLaVA-NeXT and Granite Vision 3, with CLIP's or SigLIP's tower."""
    m, has_class, is_next = p.m, p.m.holds("v.class_embd"), p.m.holds(_NEWLINE)
    if m.has("vision.image_grid_pinpoints") and not is_next:
        raise UnsupportedModelError(
            f"{m.file.path} has clip.vision.image_grid_pinpoints, as files of LLaVA-NeXT, but no tensor {_NEWLINE!r}, "
            "which ends lines of features: this is not supported"
        )
    vision = {**p.transformer, "model_type": "clip_vision_model" if has_class else "siglip_vision_model"}
    if not has_class:  # the converter takes the function of SigLIP for CLIP's
        vision["hidden_act"] = "gelu_pytorch_tanh"
    elif vision["hidden_act"] == "gelu_pytorch_tanh":
        vision["hidden_act"] = "gelu"
    kind: dict[str, Any] = {}
    if is_next:
        kind = {"architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next"}
    return {
        "vision_config": vision,
        # Of the layers behind the features, converters write none, or do not count them.
        "vision_feature_layer": p.numbers("vision.feature_layer") or m.integer("vision.block_count"),
        "vision_feature_select_strategy": "default" if has_class else "full",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": m.holds("mm.0.bias"),
        "image_token_id": p.token("<image>", stand_in=r"<unk>|<\|?(unused|reserved_special_token_|extra_)\d+(\|>|>)"),
        **kind,
    }


#: Heights and widths of the tiled images of LLaVA-NeXT, in tiles.
_GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))


def _llava_settings(p: Projector) -> dict[str, Any]:
    """Images of LLaVA 1.5 are padded to a square unless the file says otherwise, as it was trained."""
    side = p.m.integer("vision.image_size")
    square = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}, "resample": 3}
    if not p.m.holds(_NEWLINE):
        ratio = p.m.file.metadata.get("clip.vision.image_aspect_ratio", "pad")
        return {"image_processor_type": "LlavaImageProcessor", "do_pad": ratio == "pad", **square}
    key = "vision.image_grid_pinpoints"
    sides = p.numbers(key) or [side * tiles for grid in _GRIDS for tiles in grid]
    if len(sides) % 2:
        raise WeightError(f"clip.{key} must be heights and widths in turn, not {sides}", file=p.m.file.path)
    sizes = [list(size) for size in zip(sides[::2], sides[1::2], strict=True)]
    return {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": sizes, **square}


def _internvl(p: Projector) -> dict[str, Any]:
    m, vision = p.m, p.transformer
    if vision["hidden_act"] == "gelu_pytorch_tanh":
        vision["hidden_act"] = "gelu"
    return {
        "vision_config": {
            **vision,
            "attention_bias": m.holds("v.blk.0.attn_q.bias"),
            "use_qk_norm": m.holds("v.blk.0.attn_q_norm.weight"),
            "norm_type": "layer_norm" if m.holds("v.blk.0.ln1.bias") else "rms_norm",
            "use_mean_pooling": not m.holds("v.post_ln.weight"),
        },
        "downsample_ratio": 1 / m.integer("vision.projector.scale_factor", default=2),
        "image_token_id": p.token("<IMG_CONTEXT>"),
    }


def _internvl_settings(p: Projector) -> dict[str, Any]:
    """Without bounds there are 1 to 12 tiles, as in the published models."""
    side = p.m.integer("vision.image_size")
    keys = {"min_patches": "vision.preproc_min_tiles", "max_patches": "vision.preproc_max_tiles"}
    return {
        **{name: p.m.integer(key) for name, key in keys.items() if p.m.has(key)},
        "size": {"height": side, "width": side},
        "resample": 3,
    }


def _lfm2_vl(p: Projector) -> dict[str, Any]:
    """``image_size`` of files is not that of the grid of learned positions."""
    m = p.m
    return {
        "vision_config": {
            **p.transformer,
            # Files may hold layers that make no features.
            "num_hidden_layers": m.integer("vision.block_count"),
            "num_patches": p.shape("v.position_embd.weight", 2)[0],
        },
        "downsample_factor": m.integer("vision.projector.scale_factor", default=2),
        "projector_hidden_size": p.shape("mm.1.weight", 2)[0],
        "projector_bias": m.holds("mm.1.bias"),
        "projector_use_layernorm": m.holds("mm.input_norm.weight"),
        "image_token_id": p.token("<image>"),
    }


def _lfm2_vl_settings(p: Projector) -> dict[str, Any]:
    """Tiles are those of the published models."""
    patch, merge = p.m.integer("vision.patch_size"), p.m.integer("vision.projector.scale_factor", default=2)
    return {
        **p.bounds(patch * merge, min_image_tokens=_MIN_PIXELS, max_image_tokens=_MAX_PIXELS),
        "encoder_patch_size": patch,
        "downsample_factor": merge,
        "resample": 2,
    }


def _idefics3(p: Projector) -> dict[str, Any]:
    return {
        "vision_config": p.transformer,
        "scale_factor": p.m.integer("vision.projector.scale_factor", default=2),
        "image_token_id": p.token("<image>"),
    }


def _idefics3_settings(p: Projector) -> dict[str, Any]:
    """Older files lack the length of the longer side: it is four tiles in most published models."""
    tile = p.m.integer("vision.image_size")
    return {
        "size": {"longest_edge": p.m.integer("vision.preproc_image_size", default=4 * tile)},
        "max_image_size": {"longest_edge": tile},
        "do_image_splitting": True,
        "resample": 1,
    }


def _gemma3(p: Projector) -> dict[str, Any]:
    vision, scale = p.transformer, p.m.integer("vision.projector.scale_factor", default=4)
    return {
        "vision_config": {**vision, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": (vision["image_size"] // vision["patch_size"] // scale) ** 2 or 1,
        # Some files end before the image's own token.
        "image_token_id": p.token("<image_soft_token>", stand_in=r"<unused\d+>"),
        "boi_token_index": p.token("<start_of_image>"),
        "eoi_token_index": p.token("<end_of_image>"),
    }


def _gemma3_settings(p: Projector) -> dict[str, Any]:
    size = p.m.integer("vision.image_size")
    return {"size": {"height": size, "width": size}, "resample": 2}


def _gemma4(p: Projector) -> dict[str, Any]:
    """In the models without per-layer embeddings, the tokens of an image see each other; files do not say so."""
    m, heads = p.m, p.m.integer("vision.attention.head_count")
    rows, kv_rows = (p.shape(f"v.blk.0.attn_{part}.weight", 2)[0] for part in "qk")
    head_dim = rows // heads or 1
    return {
        "vision_config": {
            **_gemma4_patches(p),
            "hidden_size": m.integer("vision.embedding_length"),
            "intermediate_size": m.integer("vision.feed_forward_length"),
            "num_hidden_layers": p.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_rows // head_dim or 1,
            "head_dim": head_dim,
            "position_embedding_size": p.shape("v.position_embd.weight", 3)[1],
            "use_clipped_linears": m.holds("v.blk.0.attn_q.input_max"),
            "standardize": m.holds("v.std_bias"),
        },
        "text_config": {
            **p.text,
            "use_bidirectional_attention": None if p.text["hidden_size_per_layer_input"] else "vision",
        },
        **_gemma4_tokens(p),
    }


def _gemma4_unified(p: Projector) -> dict[str, Any]:
    return {
        "vision_config": {
            **_gemma4_patches(p),
            "mm_embed_dim": p.m.integer("vision.embedding_length"),
            "mm_posemb_size": p.shape("v.position_embd.weight", 3)[1],
        },
        **_gemma4_tokens(p),
    }


def _gemma4_patches(p: Projector) -> dict[str, Any]:
    """The part of ``vision_config`` that both kinds of towers have."""
    return {
        "patch_size": p.m.integer("vision.patch_size"),
        "pooling_kernel_size": p.m.integer("vision.projector.scale_factor", default=3),
        "rms_norm_eps": p.m.real("vision.attention.layer_norm_epsilon"),
    }


def _gemma4_tokens(p: Projector) -> dict[str, int]:
    names = {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
    return {name: p.token(token) for name, token in names.items()}


def _gemma4_settings(p: Projector) -> dict[str, Any]:
    patch, pool = p.m.integer("vision.patch_size"), p.m.integer("vision.projector.scale_factor", default=3)
    bounds = p.bounds(patch * pool, max_soft_tokens=_MAX_PIXELS)
    return {**bounds, "patch_size": patch, "pooling_kernel_size": pool, "resample": 3}


def _qwen2_5_vl(p: Projector) -> dict[str, Any]:
    m, depth, period = p.m, p.layers, p.m.integer("vision.n_wa_pattern")
    sections = np.ravel(p.language.metadata.get("qwen2vl.rope.dimension_sections", ()))
    if sections.size < 3 or sections.dtype.kind not in "iu":
        raise WeightError("qwen2vl.rope.dimension_sections must have three numbers", file=p.language.path)
    gate = m.file.tensors.get("v.blk.0.ffn_gate.weight")
    return {
        "vision_config": {
            "depth": depth,
            "hidden_size": m.integer("vision.embedding_length"),
            "intermediate_size": m.integer("vision.feed_forward_length") if gate is None else gate.shape[0],
            "num_heads": m.integer("vision.attention.head_count"),
            "patch_size": m.integer("vision.patch_size"),
            "spatial_merge_size": m.integer("vision.spatial_merge_size", default=2),
            "window_size": m.integer("vision.window_size", default=112),
            "out_hidden_size": p.text["hidden_size"],
            "fullatt_block_indexes": list(range(period - 1, depth, period)),
            "hidden_act": "silu",
        },
        "text_config": {
            **p.text,
            "rope_parameters": {**p.text["rope_parameters"], "mrope_section": sections[:3].tolist()},
        },
        "image_token_id": p.token("<|image_pad|>"),
    }


def _qwen2_5_vl_settings(p: Projector) -> dict[str, Any]:
    """Bounds of sizes are those of the published models."""
    keys = {"min_pixels": (_MIN_PIXELS, 56 * 56), "max_pixels": (_MAX_PIXELS, 16384 * 784)}
    return {
        **{name: p.m.integer(key, default=default) for name, (key, default) in keys.items()},
        "patch_size": p.m.integer("vision.patch_size"),
        "merge_size": p.m.integer("vision.spatial_merge_size", default=2),
        "resample": 3,
    }


def _qwen3_vl(p: Projector) -> dict[str, Any]:
    """Qwen3-VL, and Qwen3.5 and 3.6, which take no features of early layers."""
    m, depth, arch = p.m, p.layers, Metadata(p.language).arch
    rope = dict(p.text["rope_parameters"])
    if (sections := np.ravel(p.language.metadata.get(f"{arch}.rope.dimension_sections", ()))).size >= 3:
        rope["mrope_section"] = [int(section) for section in sections[:3]]
    flags = np.ravel(m.file.metadata.get("clip.vision.is_deepstack_layers", ()))
    deep = [layer for layer, is_deep in enumerate(flags[:depth]) if is_deep]
    taken = 0 if arch.startswith("qwen35") else p.language.metadata.get(f"{arch}.n_deepstack_layers", len(deep))
    if taken != len(deep):
        raise UnsupportedModelError(
            f"{m.file.path} does not fit {p.language.path.name}: it has features of {len(deep)} early layers, and this "
            f"model takes those of {taken}. Give the projector that was published with it, or mmproj='none' for text "
            "alone"
        )
    side = m.integer("vision.image_size") // m.integer("vision.patch_size")
    return {
        "vision_config": {
            "depth": depth,
            "hidden_size": m.integer("vision.embedding_length"),
            "intermediate_size": m.integer("vision.feed_forward_length"),
            "num_heads": m.integer("vision.attention.head_count"),
            "patch_size": m.integer("vision.patch_size"),
            "spatial_merge_size": m.integer("vision.spatial_merge_size", default=2),
            "num_position_embeddings": side**2,
            "deepstack_visual_indexes": deep,
            "out_hidden_size": p.text["hidden_size"],
            "hidden_act": "gelu_pytorch_tanh",
        },
        "text_config": {**p.text, "rope_parameters": rope},
        "image_token_id": p.token("<|image_pad|>"),
    }


def _qwen3_vl_settings(p: Projector) -> dict[str, Any]:
    """Bounds of sizes are those of the published models."""
    keys = {"shortest_edge": (_MIN_PIXELS, 1 << 16), "longest_edge": (_MAX_PIXELS, 1 << 24)}
    return {
        "size": {name: p.m.integer(key, default=default) for name, (key, default) in keys.items()},
        "patch_size": p.m.integer("vision.patch_size"),
        "merge_size": p.m.integer("vision.spatial_merge_size", default=2),
        "resample": 3,
    }


def _pixtral(p: Projector) -> dict[str, Any]:
    """Mistral 3, whose squares of patches make features, or Pixtral 12B."""
    m, text = p.m, dict(p.text)
    vision = {**p.transformer, "model_type": "pixtral", "hidden_act": "gelu" if m.flag("use_gelu") else "silu"}
    kind: dict[str, Any] = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    if not m.holds("mm.patch_merger.weight"):
        kind |= {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    elif text["model_type"] == "llama":
        text["model_type"] = "mistral"
    return {
        "vision_config": vision,
        "text_config": text,
        "spatial_merge_size": m.integer("vision.spatial_merge_size", default=1),
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": m.holds("mm.1.bias"),
        "image_token_id": p.token("[IMG]"),
        **kind,
    }


def _pixtral_settings(p: Projector) -> dict[str, Any]:
    return {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": p.m.integer("vision.image_size")},
        "patch_size": p.m.integer("vision.patch_size"),
        "resample": 3,
    }


@dataclass(frozen=True)
class DeepLayers:
    """Numbers mergers of early features in their order, where files have the layers of the tower."""

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        held = list(pairs)
        layers = sorted({int(match[1]) for name, _ in held if (match := _DEEP.match(name))})
        for name, tensor in held:
            match = _DEEP.match(name)
            yield name if match is None else f"tower.deep_mergers.{layers.index(int(match[1]))}.{match[2]}", tensor


_DEEP = re.compile(r"tower\.deep\.(\d+)\.(.+)")


def _pixtral_layout(m: Metadata) -> list[CheckpointEntry]:
    """The rows of a head's two halves take turns in files."""
    heads = m.integer("vision.attention.head_count")
    head_dim = m.integer("vision.embedding_length") // heads
    return [Permute(r"^tower\.layers\.\d+\.attention\.[qk]_proj\.", halve_pairs(heads, head_dim))]


@dataclass(frozen=True)
class StackFrames:
    """The tensors ``NAME.0`` and ``NAME.1`` [outputs, colours, lines, columns] as one, frames as third dimension."""

    name: str

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        frames: dict[str, np.ndarray] = {}
        parts = [f"{self.name}.{number}" for number in (0, 1)]
        for name, tensor in pairs:
            if name not in parts or not isinstance(tensor, np.ndarray):
                yield name, tensor
                continue
            frames[name] = tensor
            if len(frames) < len(parts) or len({frame.shape for frame in frames.values()}) > 1:
                continue
            if has_values(tensor):
                yield self.name, np.stack([frames[part] for part in parts], axis=2)
            else:
                yield self.name, without_values((*tensor.shape[:2], len(parts), *tensor.shape[2:]), tensor.dtype)


@dataclass(frozen=True)
class Reshape:
    """Applies a function that changes shapes to tensors with names that match; it passes on shapes that do not fit."""

    pattern: str
    function: Callable[[np.ndarray], np.ndarray]

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            if isinstance(tensor, np.ndarray) and re.search(self.pattern, name):
                tensor = self.function(tensor)
            yield name, tensor


def _pixels(size: int) -> np.ndarray:
    """The order, for ``Permute``, of a patch's numbers by colour, line and column: by line, column and colour."""
    side = math.isqrt(size // 3)
    return np.arange(size).reshape(3, side, side).transpose(1, 2, 0).ravel()


def _pixel_rows(name: str) -> list[CheckpointEntry]:
    """A convolution [outputs, colours, lines, columns] as a matrix, in the order of transformers' linear layers."""
    pattern = rf"^{re.escape(name)}$"
    flat = Reshape(pattern, lambda kernel: kernel.reshape(len(kernel), -1))
    return [flat, Permute(pattern, _pixels, columns=True)]


#: Of vision transformers (``octavo.models.vision``).
_VIT = (
    (r"v\.patch_embd\.", "tower.vision.patches."),
    (r"v\.position_embd\.", "tower.vision.positions."),
    (r"v\.class_embd$", "tower.vision.positions.class"),
    (r"v\.pre_ln\.", "tower.vision.pre_norm."),
    (r"v\.post_ln\.", "tower.vision.post_norm."),
    (r"v\.blk\.(\d+)\.attn_([qkv])\.", r"tower.vision.layers.\1.self_attn.\2_proj."),
    (r"v\.blk\.(\d+)\.attn_out\.", r"tower.vision.layers.\1.self_attn.o_proj."),
    (r"v\.blk\.(\d+)\.ln1\.", r"tower.vision.layers.\1.attention_norm."),
    (r"v\.blk\.(\d+)\.ln2\.", r"tower.vision.layers.\1.mlp_norm."),
    (r"v\.blk\.(\d+)\.ffn_up\.", r"tower.vision.layers.\1.mlp.fc1."),
    (r"v\.blk\.(\d+)\.ffn_down\.", r"tower.vision.layers.\1.mlp.fc2."),
)
#: Matrices of layers that are those of decoders.
_GATED_LAYERS = (
    (r"v\.blk\.(\d+)\.attn_([qkv])\.", r"tower.layers.\1.self_attn.\2_proj."),
    (r"v\.blk\.(\d+)\.attn_out\.", r"tower.layers.\1.self_attn.o_proj."),
    (r"v\.blk\.(\d+)\.ffn_(gate|up|down)\.", r"tower.layers.\1.mlp.\2_proj."),
)
#: Of ``octavo.models.qwen2_5_vl``.
_GATED = (
    (r"v\.patch_embd\.weight\.1$", "tower.patches.weight.1"),
    (r"v\.patch_embd\.weight$", "tower.patches.weight.0"),
    *_GATED_LAYERS,
    (r"v\.blk\.(\d+)\.attn_qkv\.", r"tower.layers.\1.self_attn.qkv."),
    (r"v\.blk\.(\d+)\.ln1\.", r"tower.layers.\1.input_layernorm."),
    (r"v\.blk\.(\d+)\.ln2\.", r"tower.layers.\1.post_attention_layernorm."),
    (r"v\.post_ln\.", "tower.merger.norm."),
    (r"mm\.0\.", "tower.merger.fc1."),
    (r"mm\.2\.", "tower.merger.fc2."),
)
#: Of both towers of Gemma 4 (``octavo.models.gemma4_images``); the file may have a model's audio encoder, too.
_GEMMA4 = (
    (r"(mm\.)?a\.", "tower.audio."),
    (r"v\.patch_embd\.", "tower.patches."),
    (r"v\.position_embd\.", "tower.places."),
    (r"mm\.input_projection\.", "tower.projector."),
)

#: By ``clip.projector_type``.
FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        {"gemma3": "Gemma3ForConditionalGeneration"},
        ("mm.input_projection.weight", 1),
        (
            *_VIT,
            (r"mm\.soft_emb_norm\.", "tower.norm."),
            (r"mm\.input_projection\.", "tower.projector."),
        ),
        _gemma3,
        _gemma3_settings,
        layout=lambda m: [Transform(r"^tower\.norm\.weight$", lambda weight: weight - 1)],
    ),
    "gemma4uv": Family(
        {"gemma4": "Gemma4UnifiedForConditionalGeneration"},
        ("mm.input_projection.weight", 0),
        (
            *_GEMMA4,
            (r"v\.patch_norm\.1\.", "tower.pixel_norm."),
            (r"v\.patch_norm\.2\.", "tower.patch_norm."),
            (r"v\.patch_norm\.3\.", "tower.place_norm."),
        ),
        _gemma4_unified,
        _gemma4_settings,
        layout=lambda m: [
            *_pixel_rows("tower.patches.weight"),
            Permute(r"^tower\.pixel_norm\.", _pixels),
            Reshape(r"^tower\.places\.weight$", lambda tables: tables.swapaxes(0, 1) if tables.ndim > 1 else tables),
        ],
        unused=r"tower\.audio\.",
    ),
    "gemma4v": Family(
        {"gemma4": "Gemma4ForConditionalGeneration"},
        ("mm.input_projection.weight", 0),
        (
            *_GEMMA4,
            (r"v\.blk\.(\d+)\.attn_([qk])_norm\.", r"tower.layers.\1.self_attn.\2_norm."),
            (r"v\.blk\.(\d+)\.ln1\.", r"tower.layers.\1.input_layernorm."),
            (r"v\.blk\.(\d+)\.attn_post_norm\.", r"tower.layers.\1.post_attention_layernorm."),
            (r"v\.blk\.(\d+)\.ln2\.", r"tower.layers.\1.pre_feedforward_layernorm."),
            (r"v\.blk\.(\d+)\.ffn_post_norm\.", r"tower.layers.\1.post_feedforward_layernorm."),
            (r"v\.std_(bias|scale)$", r"tower.std_\1"),
            *_GATED_LAYERS,
            (r"(tower\.layers\.\d+\.\w+\.\w+_proj)\.weight$", r"\1.linear.weight"),  # beside its bounds
        ),
        _gemma4,
        _gemma4_settings,
        layout=lambda m: [
            *_pixel_rows("tower.patches.weight"),
            Reshape(r"_(min|max)$", lambda bound: bound.reshape(()) if bound.size == 1 else bound),
        ],
        unused=r"tower\.audio\.",
    ),
    "idefics3": Family(
        {"llama": "Idefics3ForConditionalGeneration"},
        ("mm.model.fc.weight", 0),
        (*_VIT, (r"mm\.model\.fc\.", "tower.projector.")),
        _idefics3,
        _idefics3_settings,
    ),
    "internvl": Family(
        dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss"), "InternVLForConditionalGeneration"),
        ("mm.model.mlp.3.weight", 0),
        (
            (r"v\.patch_embd\.bias$", "tower.vision.positions.bias"),
            *_VIT,
            (r"v\.blk\.(\d+)\.attn_([qk])_norm\.", r"tower.vision.layers.\1.self_attn.\2_norm."),
            (r"v\.blk\.(\d+)\.ls([12])\.weight$", r"tower.vision.layers.\1.lambda_\2"),
            (r"mm\.model\.mlp\.0\.", "tower.projector.layer_norm."),
            (r"mm\.model\.mlp\.1\.", "tower.projector.linear_1."),
            (r"mm\.model\.mlp\.3\.", "tower.projector.linear_2."),
        ),
        _internvl,
        _internvl_settings,
    ),
    "lfm2": Family(
        {"lfm2": "Lfm2VlForConditionalGeneration", "lfm2moe": "Lfm2VlForConditionalGeneration"},
        ("mm.2.weight", 0),
        (*_VIT, (r"mm\.input_norm\.", "tower.projector.layer_norm."), (r"mm\.([12])\.", r"tower.projector.linear_\1.")),
        _lfm2_vl,
        _lfm2_vl_settings,
        layout=lambda m: _pixel_rows("tower.vision.patches.weight"),
        unused=r"tower\.vision\.layers\.\d+\.",
    ),
    "mlp": Family(
        dict.fromkeys(("llama", "qwen2", "qwen3", "granite"), "LlavaForConditionalGeneration"),
        ("mm.2.weight", 0),
        (
            *_VIT,
            (r"mm\.0\.", "tower.projector.linear_1."),
            (r"mm\.2\.", "tower.projector.linear_2."),
            (rf"{re.escape(_NEWLINE)}$", "tower.newline"),
        ),
        _llava,
        _llava_settings,
        unused=r"tower\.vision\.(layers\.\d+|post_norm)\.",
    ),
    "pixtral": Family(
        {"llama": "Mistral3ForConditionalGeneration", "mistral3": "Mistral3ForConditionalGeneration"},
        ("mm.2.weight", 0),
        (
            (r"v\.patch_embd\.", "tower.patches."),
            (r"v\.pre_ln\.", "tower.ln_pre."),
            (r"v\.blk\.(\d+)\.attn_([qkv])\.", r"tower.layers.\1.attention.\2_proj."),
            (r"v\.blk\.(\d+)\.attn_out\.", r"tower.layers.\1.attention.o_proj."),
            (r"v\.blk\.(\d+)\.ln1\.", r"tower.layers.\1.attention_norm."),
            (r"v\.blk\.(\d+)\.ln2\.", r"tower.layers.\1.ffn_norm."),
            (r"v\.blk\.(\d+)\.ffn_(gate|up|down)\.", r"tower.layers.\1.mlp.\2_proj."),
            (r"v\.token_embd\.img_break", "tower.token_embd."),  # of the language model
            (r"mm\.input_norm\.", "tower.merge_norm."),
            (r"mm\.patch_merger\.", "tower.merge."),
            (r"mm\.([12])\.", r"tower.projector.linear_\1."),
        ),
        _pixtral,
        _pixtral_settings,
        layout=_pixtral_layout,
        unused=r"tower\.token_embd\.",
    ),
    "qwen2.5vl_merger": Family(
        {"qwen2vl": "Qwen2_5_VLForConditionalGeneration"},
        ("mm.2.weight", 0),
        _GATED,
        _qwen2_5_vl,
        _qwen2_5_vl_settings,
        layout=lambda m: [StackFrames("tower.patches.weight")],
    ),
    "qwen3vl_merger": Family(
        {
            "qwen3vl": "Qwen3VLForConditionalGeneration",
            "qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration",
            "qwen35": "Qwen3_5ForConditionalGeneration",
            "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
        },
        ("mm.2.weight", 0),
        (
            (r"v\.patch_embd\.bias$", "tower.patches.bias"),
            (r"v\.position_embd\.", "tower.positions."),
            (r"v\.blk\.(\d+)\.ln1\.", r"tower.layers.\1.attention_norm."),
            (r"v\.blk\.(\d+)\.ln2\.", r"tower.layers.\1.mlp_norm."),
            (r"v\.blk\.(\d+)\.ffn_up\.", r"tower.layers.\1.mlp.fc1."),
            (r"v\.blk\.(\d+)\.ffn_down\.", r"tower.layers.\1.mlp.fc2."),
            (r"v\.deepstack\.(\d+)\.", r"tower.deep.\1."),
            *_GATED,
        ),
        _qwen3_vl,
        _qwen3_vl_settings,
        layout=lambda m: [StackFrames("tower.patches.weight"), DeepLayers()],
    ),
}


def family_of(m: Metadata) -> Family:
    """Raises UnsupportedModelError if the file is no projector of a family here."""
    path = m.file.path
    if m.arch != "clip":
        raise UnsupportedModelError(
            f"{path} is no projector: its general.architecture is {m.arch!r}, not 'clip'; such files are called "
            "mmproj-*.gguf"
        )
    metadata = m.file.metadata
    default = "mlp" if metadata.get("clip.has_llava_projector") is True else None
    kind = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type") or default
    if metadata.get("clip.has_vision_encoder") is False or kind not in FAMILIES:
        what = f"projector type {kind!r}" if kind else "projector without a type"
        raise UnsupportedModelError(f"{path}: {what} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def check_fit(language: GGUFFile, projector: GGUFFile) -> Family:
    """The family of a projector; raises UnsupportedModelError if it is for other language models than this one."""
    m = Metadata(projector)
    family = family_of(m)
    name, dimension = family.output
    output = projector.tensors.get(name)
    if output is None or len(output.shape) != 2:
        raise WeightError(f"has no matrix {name!r}, which makes the features of images", file=projector.path)
    text, width = Metadata(language), output.shape[dimension]
    own = text.integer("embedding_length") if text.arch in family.languages else 0
    if own != width:
        is_what = f"{text.arch}, {own} wide" if own else f"of architecture {text.arch}"
        raise UnsupportedModelError(
            f"{projector.path} does not fit {language.path.name}: it is for {' or '.join(family.languages)} with "
            f"embeddings of {width} numbers; this model is {is_what}. Give the projector that was published with it, "
            "or mmproj='none' for text alone"
        )
    return family


def whole_config(
    text: dict[str, Any], language: GGUFFile, projector: GGUFFile
) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and preprocessor_config.json of a language model with its projector.

    ``text``: config.json of the language model alone.

    Raises:
        UnsupportedModelError: the projector does not fit the model, or is of no family here.
        WeightError: its metadata is damaged.
    """
    family = check_fit(language, projector)
    architecture = family.languages[Metadata(language).arch]
    p = Projector(Metadata(projector), language, text)
    special = {name: value for name, value in text.items() if name.endswith("_token_id")}
    config = {
        "architectures": [architecture],
        "model_type": model_type_of(architecture),
        **{name: text[name] for name in ("dtype", "tie_word_embeddings")},
        **special,
        "text_config": text,
        **family.config(p),
    }
    return config, {**family.settings(p), **p.normalisation}


def first_fit(language: Path, candidates: Iterable[Path]) -> Path | None:
    """The first projector that fits a language model; why others do not is logged once."""
    file: GGUFFile | None = None
    for path in candidates:
        try:
            file = file or GGUFFile(language)
            check_fit(file, GGUFFile(path))
        except OctavoError as e:
            _tell(f"the images' projector beside the model is not used: {e}")
            continue
        return path
    return None


@functools.cache
def _tell(message: str) -> None:
    logger.warning("%s", message)


# Tensors


class ProjectorCheckpoint:
    """The tensors of a network's tower in a projector file; all are located before one is read."""

    def __init__(self, path: Path, shapes: Shapes, entries: Sequence[CheckpointEntry], architecture: str) -> None:
        """``shapes``: of the tower; ``entries``: the network's ``checkpoint_map``; ``architecture``: its name.

        Raises:
            WeightError: the file is damaged, or a tensor is missing or of the wrong shape.
            UnsupportedModelError: the file has a tensor that the tower does not have.
        """
        self.file = GGUFFile(path)
        m, network = Metadata(self.file), f"the tower of {architecture}"
        self._family = family_of(m)
        self._layout = self._family.layout(m)
        self._shapes = shapes
        renames = [Rename(rf"^{pattern}", name) for pattern, name in self._family.names]
        is_swapped = self._has_swapped_mlp(m.integer("vision.embedding_length"))
        #: By the names that the family's table gives.
        self._tensors: dict[str, GGUFTensor] = {}
        for stored, tensor in self.file.tensors.items():
            name = stored
            if is_swapped:
                name = re.sub(r"\.ffn_(up|down)\.", lambda match: f".ffn_{_OTHER[match[1]]}.", name)
            for rename in renames:
                name = rename.renamed(name)
            if not name.startswith(_TOWER):
                raise UnsupportedModelError(f"{path} has the tensor {stored!r}, which {network} does not have")
            if not self._is_unused(name):
                self._tensors[name] = tensor
        self._check(entries, network)

    def read(self, names: Container[str]) -> Generator[tuple[str, Tensor]]:
        """float32 tensors in the layouts that the network's ``checkpoint_map`` expects, if one is in ``names``."""
        if not any(name in names for name in self._shapes):  # a later pipeline stage
            return
        pairs: Pairs = ((name, self._values(tensor)) for name, tensor in self._tensors.items())
        for entry in self._layout:
            pairs = entry.apply(pairs, self._shapes)
        yield from pairs

    def _values(self, tensor: GGUFTensor) -> np.ndarray:
        rows = self.file.read_rows(tensor)
        return dequantize(tensor.type.name, rows, DType.FLOAT32).reshape(tensor.shape)

    def _has_swapped_mlp(self, hidden: int) -> bool:
        """Whether "up" and "down" are each other's names, as in files of llama.cpp's first converter."""
        down = self.file.tensors.get("v.blk.0.ffn_down.weight")
        return down is not None and down.shape[-1] == hidden != down.shape[0]

    def _is_unused(self, name: str) -> bool:
        match = re.match(self._family.unused, name) if self._family.unused else None
        return match is not None and not any(expected.startswith(match[0]) for expected in self._shapes)

    def _check(self, entries: Sequence[CheckpointEntry], network: str) -> None:
        """Passes tensors without values through all entries, and compares the results with the tower."""
        pairs: Pairs = ((name, without_values(t.shape, np.float32)) for name, t in self._tensors.items())
        for entry in (*self._layout, *(entry for entry in entries if not isinstance(entry, Drop))):
            pairs = entry.apply(pairs, self._shapes)
        seen = set()
        for name, tensor in pairs:
            stored = self._tensors[name].name if name in self._tensors else name
            if (expected := self._shapes.get(name)) is None:
                raise UnsupportedModelError(f"{self.file.path}: {network} has no tensor {stored!r}")
            if tuple(tensor.shape) != expected:
                raise WeightError(
                    f"tensor {stored!r} has shape {list(tensor.shape)}, not {list(expected)}", file=self.file.path
                )
            seen.add(name)
        if missing := [name for name in self._shapes if name not in seen]:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise WeightError(f"lacks the tensors of {', '.join(missing[:3])}{more}", file=self.file.path)


_OTHER = {"up": "down", "down": "up"}


class GGUFWeights:
    """The tensors of a network in a GGUF file, and those of its tower in the projector that the folder links."""

    def __init__(
        self, gguf: Path, folder: Path, config: ModelConfig, shapes: Shapes, entries: Sequence[CheckpointEntry]
    ) -> None:
        """``shapes``: of the whole network; ``entries``: its ``checkpoint_map``. Raises what the two checkpoints do."""
        of_tower = {name: shape for name, shape in shapes.items() if name.startswith(_TOWER)}
        self.language = GGUFCheckpoint(gguf, config, {n: s for n, s in shapes.items() if n not in of_tower})
        self.projector = None
        if of_tower:
            link = folder / PROJECTOR_LINK
            path = Path(os.readlink(link)) if link.is_symlink() else link
            if not path.is_file():
                raise WeightError("is missing: it has the tower of the model's images", file=path)
            self.projector = ProjectorCheckpoint(path, of_tower, entries, config.architecture)

    def read(
        self,
        names: Container[str],
        entries: Sequence[CheckpointEntry],
        dtype: DType | None,
        mapped: Container[str] = (),
    ) -> Generator[tuple[str, Tensor]]:
        """The tensors ``names``; those of a tower are float32, the others as ``GGUFCheckpoint.read`` has them."""
        yield from self.language.read(names, entries, dtype, mapped)
        if self.projector is not None:
            yield from self.projector.read(names)

    @property
    def paths(self) -> list[Path]:
        """All files."""
        return [*split_paths(self.language.file.path), *([] if self.projector is None else [self.projector.file.path])]

    def values(self) -> Iterator[tuple[str, np.ndarray]]:
        """All tensors in the files, by their names there, float32 [rows, columns]."""
        files = [self.language.file, *([] if self.projector is None else [self.projector.file])]
        entries = chain.from_iterable(((file, entry) for entry in file.tensors.values()) for file in files)
        return ((entry.name, dequantize(entry.type.name, file.read_rows(entry))) for file, entry in entries)


def projector_of(folder: Path) -> Path | None:
    """The projector that a model's converted folder links; None: it has none, or the file is gone."""
    path = folder / PROJECTOR_LINK
    return Path(os.readlink(path)) if path.is_file() else None
