"""Projector files of llama.cpp (``mmproj-*.gguf``): the image tower of a model whose language model is another file.

``clip.projector_type`` names a family, of which ``FAMILIES`` says all: the language models that it is for, config.json
and the settings of the image processor by the metadata, and the network's names of the file's tensors.
Format: llama.cpp's tools/mtmd; names of keys and tensors: ``gguf.constants`` (``Keys.Clip``, ``MODEL_ARCH.MMPROJ``).
"""

from __future__ import annotations

import functools
import logging
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


def _llava(p: Projector) -> dict[str, Any]:
    """The output of the last layer but one makes features, with CLIP's or SigLIP's tower."""
    m, has_class = p.m, p.m.holds("v.class_embd")
    for key in ("vision.image_grid_pinpoints", "vision.feature_layer"):
        if m.has(key):
            raise UnsupportedModelError(
                f"{m.file.path}: clip.{key} is not supported: such files are of LLaVA-NeXT or Granite; supported: "
                "LLaVA 1.5"
            )
    vision = {**p.transformer, "model_type": "clip_vision_model" if has_class else "siglip_vision_model"}
    if has_class and vision["hidden_act"] == "gelu_pytorch_tanh":
        vision["hidden_act"] = "gelu"
    return {
        "vision_config": vision,
        # Files count a layer less than they hold, or all.
        "vision_feature_layer": min(m.integer("vision.block_count"), max(1, p.layers - 1)),
        "vision_feature_select_strategy": "default" if has_class else "full",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": m.holds("mm.0.bias"),
        "image_token_id": p.token("<image>", stand_in=r"<unk>|<\|?(unused|reserved_special_token_|extra_)\d+(\|>|>)"),
    }


def _llava_settings(p: Projector) -> dict[str, Any]:
    """Images are padded to a square unless the file says otherwise, as LLaVA 1.5 was trained, and as llama.cpp does."""
    size, ratio = p.m.integer("vision.image_size"), p.m.file.metadata.get("clip.vision.image_aspect_ratio", "pad")
    return {
        "image_processor_type": "LlavaImageProcessor",
        "do_pad": ratio == "pad",
        "size": {"shortest_edge": size},
        "crop_size": {"height": size, "width": size},
        "resample": 3,
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
    keys = {"min_pixels": ("vision.image_min_pixels", 56 * 56), "max_pixels": ("vision.image_max_pixels", 16384 * 784)}
    return {
        **{name: p.m.integer(key, default=default) for name, (key, default) in keys.items()},
        "patch_size": p.m.integer("vision.patch_size"),
        "merge_size": p.m.integer("vision.spatial_merge_size", default=2),
        "resample": 3,
    }


def _qwen3_vl(p: Projector) -> dict[str, Any]:
    m, depth, arch = p.m, p.layers, Metadata(p.language).arch
    rope = dict(p.text["rope_parameters"])
    if (sections := np.ravel(p.language.metadata.get(f"{arch}.rope.dimension_sections", ()))).size >= 3:
        rope["mrope_section"] = [int(section) for section in sections[:3]]
    deep = np.ravel(m.file.metadata.get("clip.vision.is_deepstack_layers", ()))
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
            "deepstack_visual_indexes": [layer for layer, is_deep in enumerate(deep[:depth]) if is_deep],
            "out_hidden_size": p.text["hidden_size"],
            "hidden_act": "gelu_pytorch_tanh",
        },
        "text_config": {**p.text, "rope_parameters": rope},
        "image_token_id": p.token("<|image_pad|>"),
    }


def _qwen3_vl_settings(p: Projector) -> dict[str, Any]:
    """Bounds of sizes are those of the published models."""
    keys = {"shortest_edge": ("vision.image_min_pixels", 1 << 16), "longest_edge": ("vision.image_max_pixels", 1 << 24)}
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
#: Of towers whose layers are those of decoders (``octavo.models.qwen2_5_vl``).
_GATED = (
    (r"v\.patch_embd\.weight\.1$", "tower.patches.weight.1"),
    (r"v\.patch_embd\.weight$", "tower.patches.weight.0"),
    (r"v\.blk\.(\d+)\.attn_([qkv])\.", r"tower.layers.\1.self_attn.\2_proj."),
    (r"v\.blk\.(\d+)\.attn_qkv\.", r"tower.layers.\1.self_attn.qkv."),
    (r"v\.blk\.(\d+)\.attn_out\.", r"tower.layers.\1.self_attn.o_proj."),
    (r"v\.blk\.(\d+)\.ln1\.", r"tower.layers.\1.input_layernorm."),
    (r"v\.blk\.(\d+)\.ln2\.", r"tower.layers.\1.post_attention_layernorm."),
    (r"v\.blk\.(\d+)\.ffn_(gate|up|down)\.", r"tower.layers.\1.mlp.\2_proj."),
    (r"v\.post_ln\.", "tower.merger.norm."),
    (r"mm\.0\.", "tower.merger.fc1."),
    (r"mm\.2\.", "tower.merger.fc2."),
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
    "idefics3": Family(
        {"llama": "Idefics3ForConditionalGeneration"},
        ("mm.model.fc.weight", 0),
        (*_VIT, (r"mm\.model\.fc\.", "tower.projector.")),
        _idefics3,
        _idefics3_settings,
    ),
    "mlp": Family(
        dict.fromkeys(("llama", "qwen2", "qwen3"), "LlavaForConditionalGeneration"),
        ("mm.2.weight", 0),
        (*_VIT, (r"mm\.0\.", "tower.projector.linear_1."), (r"mm\.2\.", "tower.projector.linear_2.")),
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
