"""Small models that see images as two GGUF files, by the rules of llama.cpp's converters.

Names in the files come from the gguf package's own maps of transformers' names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from tests import image_models
from tests.image_models import CHAT_TEMPLATE
from tests.loader.conftest import finish
from tests.loader.test_gguf_architectures import add_settings, converted, hub_tensors

#: Family -> how transformers saves it, and its placeholder.
FAMILIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gemma3": (image_models.save_gemma3, "<start_of_image>"),
    "gemma4": (image_models.save_gemma4, "<|image|>"),
    "gemma4_large": (partial(image_models.save_gemma4, kind="large"), "<|image|>"),
    "gemma4_unified": (partial(image_models.save_gemma4, kind="unified"), "<|image|>"),
    "idefics3": (image_models.save_smolvlm, "<image>"),
    "internvl": (image_models.save_internvl, "<IMG_CONTEXT>"),
    "lfm2_vl": (image_models.save_lfm2_vl, "<image>"),
    "llava": (image_models.save_llava, "<image>"),
    "llava_next": (image_models.save_llava_next, "<image>"),
    "mistral3": (image_models.save_mistral3, "[IMG]"),
    "qwen2_5_vl": (image_models.save_qwen2_5_vl, "<|image_pad|>"),
    "qwen3_5": (image_models.save_qwen3_5, "<|image_pad|>"),
    "qwen3_vl": (image_models.save_qwen3_vl, "<|image_pad|>"),
}
_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_SIGLIP = ([0.5] * 3, [0.5] * 3)
_UNCHANGED = ([0.0] * 3, [1.0] * 3)
#: Means and standard deviations of the channels.
CHANNELS = {
    **dict.fromkeys(("internvl", "llava", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl"), _CLIP),
    **dict.fromkeys(("gemma3", "idefics3", "lfm2_vl", "llava_next"), _SIGLIP),
    **dict.fromkeys(("gemma4", "gemma4_large", "gemma4_unified"), _UNCHANGED),
}
_ARCHITECTURES = {
    "gemma3": "gemma3",
    **dict.fromkeys(("gemma4", "gemma4_large", "gemma4_unified"), "gemma4"),
    "idefics3": "llama",
    "internvl": "qwen3",
    "lfm2_vl": "lfm2",
    "llava": "llama",
    "llava_next": "granite",
    "mistral3": "mistral3",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_5": "qwen35",
    "qwen3_vl": "qwen3vl",
}


def save_folder(folder: Path, family: str) -> Path:
    """A small model of a family: its weights are bfloat16's values in float32, its tokenizer has a merge."""
    folder.mkdir()
    FAMILIES[family][0](folder)
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        bits = value.astype(np.float32).view(np.uint32)
        tensors[name] = np.asarray((bits & np.uint32(0xFFFF0000)).view(np.float32))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if family == "lfm2_vl":  # what files do not say is as in published models
        file = folder / "preprocessor_config.json"
        said = {"encoder_patch_size", "image_processor_type", "max_image_tokens", "min_image_tokens"}
        settings = json.loads(file.read_text())
        file.write_text(json.dumps({name: value for name, value in settings.items() if name in said}))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["qz"] = vocab.pop("ÿ")  # no file is without merges
    tokenizer["model"]["merges"] = [["q", "z"]]
    file.write_text(json.dumps(tokenizer))
    return folder


def write_files(
    folder: Path,
    family: str,
    language: Path,
    projector: Path,
    *,
    kind: Q = Q.F32,
    edit: dict[str, Any] | None = None,
    drop: str = "$^",
    template: str = "",
) -> None:
    """Writes a saved model as a language file and a projector.

    ``kind``: the type of the projector's matrices. ``edit``: keys of the projector with other values, None for none;
    ``drop``: pattern of its tensors that are left out. ``template``: the chat template instead of one for images.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    text = {n: t for n, t in tensors.items() if not re.search(r"visual|vision|projector|connector|newline", n)}
    template = template or CHAT_TEMPLATE.replace("IMAGE", FAMILIES[family][1])
    _write_language(language, family, folder, text, template)
    writer = gguf.GGUFWriter(projector, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    for key, value in (_projector_keys(family, config, folder) | (edit or {})).items():
        _add(writer, key, value)
    for name, value in _projector_tensors(family, {n: t for n, t in tensors.items() if n not in text}):
        if re.search(drop, name):
            continue
        if value.ndim == 1 or kind is Q.F32:
            writer.add_tensor(name, np.ascontiguousarray(value))
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    finish(writer)


def _write_language(path: Path, family: str, folder: Path, tensors: Mapping[str, np.ndarray], template: str) -> None:
    arch, config = _ARCHITECTURES[family], AutoConfig.from_pretrained(folder).get_text_config()
    writer = gguf.GGUFWriter(path, arch)
    add_settings(writer, arch, config)
    if sections := (config.rope_parameters or {}).get("mrope_section"):
        writer.add_array(f"{arch}.rope.dimension_sections", [*sections, 0])
    if arch == "gemma3":
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_array("gemma3.attention.sliding_window_pattern", pattern)
    if arch == "qwen3vl":
        writer.add_num_deepstack_layers(2)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if re.fullmatch(r"<.+>|\[.+\]", token) else 1 for token in tokens])
    writer.add_token_merges(["q z"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(_kind(arch), config.num_hidden_layers)
    state = {}
    for name, value in tensors.items():
        name = re.sub(r"^(model\.)?(language_model|text_model)\.(model\.)?", "model.", name)
        state[re.sub(r"^model\.lm_head", "lm_head", name)] = torch.from_numpy(value)
    for name, value in hub_tensors(SimpleNamespace(config=config, state_dict=lambda: state)):
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(converted(arch, config, name, value)))
    finish(writer)


def _kind(arch: str) -> gguf.MODEL_ARCH:
    return next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)


def _projector_keys(family: str, config: Any, folder: Path) -> dict[str, Any]:
    vision, settings = config["vision_config"], json.loads((folder / "preprocessor_config.json").read_text())
    mean, std = CHANNELS[family]
    image, patch = vision.get("image_size", 560), vision["patch_size"]
    keys: dict[str, Any] = {
        "clip.vision.image_size": image[0] if isinstance(image, list) else image,
        "clip.vision.patch_size": patch[0] if isinstance(patch, list) else patch,
        "clip.vision.embedding_length": vision.get("hidden_size", vision.get("mm_embed_dim")),
        "clip.vision.feed_forward_length": vision.get("intermediate_size", 0),
        "clip.vision.block_count": vision.get("num_hidden_layers", vision.get("depth", 0)),
        "clip.vision.attention.head_count": vision.get("num_attention_heads", vision.get("num_heads", 0)),
        "clip.vision.attention.layer_norm_epsilon": float(vision.get("layer_norm_eps", 1e-6)),
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.image_mean": mean,
        "clip.vision.image_std": std,
        "clip.use_gelu": family in ("gemma3", "idefics3", "internvl", "lfm2_vl", "qwen3_5", "qwen3_vl"),
    }
    if family == "gemma3":
        side = vision["image_size"] // vision["patch_size"]
        scale = side // int(config["mm_tokens_per_image"] ** 0.5)
        keys |= {"clip.projector_type": "gemma3", "clip.vision.projector.scale_factor": scale}
    elif family.startswith("gemma4"):
        keys["clip.vision.projector_type"] = "gemma4uv" if family == "gemma4_unified" else "gemma4v"
        keys |= {"clip.has_audio_encoder": True, "clip.audio.projector_type": "gemma4a"}
        keys |= {"clip.vision.image_size": 224, "clip.vision.image_max_pixels": 70 * 12 * 12}
    elif family == "idefics3":
        keys |= {"clip.projector_type": "idefics3", "clip.vision.projector.scale_factor": config["scale_factor"]}
        keys["clip.vision.preproc_image_size"] = settings["size"]["longest_edge"]
    elif family == "internvl":
        scale = int(1 / config["downsample_ratio"])
        keys |= {"clip.projector_type": "internvl", "clip.vision.projector.scale_factor": scale}
        keys |= {"clip.vision.preproc_min_tiles": 1, "clip.vision.preproc_max_tiles": settings["max_patches"]}
    elif family == "lfm2_vl":
        pixels = (config["downsample_factor"] * vision["patch_size"]) ** 2
        keys |= {"clip.projector_type": "lfm2", "clip.vision.projector.scale_factor": config["downsample_factor"]}
        keys |= {"clip.vision.image_size": 256}
        keys |= {f"clip.vision.image_{end}_pixels": settings[f"{end}_image_tokens"] * pixels for end in ("min", "max")}
    elif family in ("llava", "llava_next"):
        keys |= {"clip.projector_type": "mlp", "clip.has_llava_projector": True, "clip.vision.projection_dim": 768}
        if family == "llava":  # llama.cpp's first converter counts a layer less
            keys["clip.vision.block_count"] -= 1
            keys["clip.vision.image_aspect_ratio"] = "square"
        else:
            count = vision["num_hidden_layers"] + 1
            layers = [layer % count for layer in config["vision_feature_layer"]]
            keys |= {"clip.vision.feature_layer": layers, "clip.vision.block_count": max(layers)}
            keys["clip.vision.image_grid_pinpoints"] = [
                side for size in settings["image_grid_pinpoints"] for side in size
            ]
            keys["clip.vision.mm_patch_merge_type"] = "spatial_unpad"
    elif family in ("qwen3_vl", "qwen3_5"):
        side = int(vision["num_position_embeddings"] ** 0.5)
        keys |= {"clip.projector_type": "qwen3vl_merger"}
        keys |= {"clip.vision.image_size": side * vision["patch_size"]}
        deep = vision.get("deepstack_visual_indexes", [])
        keys |= {"clip.vision.is_deepstack_layers": [i in deep for i in range(vision["depth"])]}
        bounds = settings["size"]
        keys |= {f"clip.vision.image_{name}_pixels": bounds[f"{edge}_edge"] for name, edge in _EDGES.items()}
    elif family == "mistral3":
        keys |= {"clip.projector_type": "pixtral", "clip.use_silu": vision.get("hidden_act") == "silu"}
        keys |= {
            "clip.use_gelu": vision.get("hidden_act", "gelu") == "gelu",
            "clip.vision.spatial_merge_size": config["spatial_merge_size"],
        }
        keys |= {"clip.vision.image_size": settings["size"]["longest_edge"]}
    else:
        keys |= {"clip.projector_type": "qwen2.5vl_merger", "clip.use_silu": True}
        keys |= {"clip.vision.n_wa_pattern": vision["fullatt_block_indexes"][0] + 1}
        keys |= {"clip.vision.window_size": vision["window_size"]}
        bounds = settings["size"]
        keys |= {f"clip.vision.image_{name}_pixels": bounds[f"{edge}_edge"] for name, edge in _EDGES.items()}
    return keys


_EDGES = {"min": "shortest", "max": "longest"}


def _projector_tensors(family: str, tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    if family == "gemma4_unified":
        return (yield from _unified_tensors(tensors))
    if family in _NAMED:
        return (yield from _NAMED[family](names, tensors))
    first = {"linear_1": "mm.0", "linear_2": "mm.2"}
    for name, value in tensors.items():
        name = re.sub(r"^(model\.)?vision_tower\.(vision_model\.)?", "vision_tower.vision_model.", name)
        name = re.sub(r"^(model\.)?(multi_modal_projector|visual)\.", r"\2.", name)
        name = re.sub(r"^(model\.)?(vision_model|connector)\.", r"model.\2.", name)
        if (family.startswith("llava") and "post_layernorm" in name) or ".head." in name:
            continue
        if family == "mistral3":
            name = re.sub(r"vision_tower\.vision_model\.(transformer\.)?", "vision_tower.", name)
            name = name.replace("vision_tower.layers", "vision_tower.transformer.layers")
            found = {"multi_modal_projector.norm.weight": "mm.input_norm.weight"}
            found["multi_modal_projector.patch_merger.merging_layer.weight"] = "mm.patch_merger.weight"
            if re.search(r"[qk]_proj", name):
                value = value.reshape(3, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
            yield found.get(name) or _stored(names, name), value
        elif name.endswith("image_newline"):
            yield "model.image_newline", value
        elif family.startswith("llava") and (match := re.search(r"\.(linear_[12])\.(\w+)$", name)):
            yield f"{first[match[1]]}.{match[2]}", value
        elif name.endswith("patch_embed.proj.weight"):
            yield "v.patch_embd.weight", value[:, :, 0]
            yield "v.patch_embd.weight.1", value[:, :, 1]
        elif match := re.search(r"deepstack_merger_list\.(\d+)\.(linear_)?(.*)$", name):
            yield f"v.deepstack.{match[1]}.{match[3]}", value  # of the first layers
        elif match := re.search(r"merger\.linear_fc([12])\.(.*)$", name):
            yield f"mm.{2 * int(match[1]) - 2}.{match[2]}", value
        elif "merger.norm" in name:
            yield name.replace("visual.merger.norm", "v.post_ln"), value
        elif ".qkv." in name and family != "qwen2_5_vl":
            yield _stored(names, name), value
        elif ".qkv." in name:
            for part, rows in zip("qkv", np.split(value, 3), strict=True):
                yield _stored(names, name.replace("qkv", part)), rows
        else:
            stored = _stored(names, name.replace("projection_weight", "projection.weight"))
            if "soft_emb_norm" in stored:
                value = value + np.float32(1)
            if family == "lfm2_vl" and name.endswith("patch_embedding.weight"):
                value = _as_kernel(value)
            if family.startswith("llava"):  # with the names that it had
                stored = re.sub(r"ffn_(up|down)", lambda m: {"up": "ffn_down", "down": "ffn_up"}[m[1]], stored)
            yield stored, value


def _as_kernel(rows: np.ndarray) -> np.ndarray:
    """A matrix of patches by line, column and colour, as a convolution."""
    side = int((rows.shape[1] // 3) ** 0.5)
    return rows.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)


def _internvl_tensors(names: gguf.TensorNameMap, tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    parts = {"layer_norm": 0, "linear_1": 1, "linear_2": 3}
    for name, value in tensors.items():
        name = f"model.{name.removeprefix('model.')}"
        if match := re.search(r"multi_modal_projector\.(\w+)\.(\w+)$", name):
            name = f"mlp1.{parts[match[1]]}.{match[2]}"
        elif name.endswith(("position_embeddings", "lambda_1", "lambda_2")):
            name += ".weight"
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        yield stored, value


def _gemma4_tensors(names: gguf.TensorNameMap, tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """With those of an audio encoder, which are not read."""
    for name in ("a.blk.0.ffn_up.weight", "mm.a.input_projection.weight"):
        yield name, np.zeros((4, 4), np.float32)
    suffixes = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
    for name, value in tensors.items():
        name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        name += ".weight" if name.endswith("position_embedding_table") else ""
        if name.endswith("patch_embedder.input_proj.weight"):
            value = _as_kernel(value)
        stored = names.get_name(name, suffixes)
        assert stored is not None, name
        yield stored, np.atleast_1d(value)


#: Families whose names the package's map has as they are.
_NAMED = {"gemma4": _gemma4_tensors, "gemma4_large": _gemma4_tensors, "internvl": _internvl_tensors}


def _unified_tensors(tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The package does not know them yet; pixels are by colour, line and column."""
    parts = {"patch_ln1": "v.patch_norm.1", "patch_ln2": "v.patch_norm.2", "pos_norm": "v.patch_norm.3"}
    parts |= {"patch_dense": "v.patch_embd", "embedding_projection": "mm.input_projection"}
    for name, value in tensors.items():
        *_, part, kind = name.split(".")
        if kind == "pos_embedding":
            yield "v.position_embd.weight", value.swapaxes(0, 1)
        elif part == "patch_ln1":
            yield f"{parts[part]}.{kind}", _as_kernel(value[None]).reshape(-1)
        elif name.endswith("patch_dense.weight"):
            yield "v.patch_embd.weight", _as_kernel(value).reshape(value.shape)
        else:
            yield f"{parts[part]}.{kind}", value


def _stored(names: gguf.TensorNameMap, name: str) -> str:
    if name.endswith("class_embedding"):
        return "v.class_embd"
    stored = names.get_name(name, (".weight", ".bias"))
    assert stored is not None, name
    return stored


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        writer.add_uint32(key, value)
