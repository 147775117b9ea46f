"""Small models that see images as two GGUF files, by the rules of llama.cpp's converters.

Names in the files come from the gguf package's own maps of transformers' names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import load_file, save_file

from tests import image_models
from tests.image_models import CHAT_TEMPLATE

#: Family -> how transformers saves it, and its placeholder.
FAMILIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gemma3": (image_models.save_gemma3, "<start_of_image>"),
    "idefics3": (image_models.save_smolvlm, "<image>"),
    "llava": (image_models.save_llava, "<image>"),
    "mistral3": (image_models.save_mistral3, "[IMG]"),
    "qwen2_5_vl": (image_models.save_qwen2_5_vl, "<|image_pad|>"),
    "qwen3_vl": (image_models.save_qwen3_vl, "<|image_pad|>"),
}
_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_SIGLIP = ([0.5] * 3, [0.5] * 3)
#: Means and standard deviations of the channels.
CHANNELS = {"gemma3": _SIGLIP, "idefics3": _SIGLIP, "llava": _CLIP, "mistral3": _CLIP, "qwen2_5_vl": _CLIP}
CHANNELS |= {"qwen3_vl": _CLIP}
_ARCHITECTURES = {
    "gemma3": "gemma3",
    "idefics3": "llama",
    "llava": "llama",
    "mistral3": "mistral3",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
}
Edit = Callable[[gguf.GGUFWriter], None]


def save_folder(folder: Path, family: str) -> Path:
    """A small model of a family: its weights are bfloat16's values in float32, its tokenizer has a merge."""
    folder.mkdir()
    FAMILIES[family][0](folder)
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        bits = value.astype(np.float32).view(np.uint32)
        tensors[name] = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
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
    text = {n: t for n, t in tensors.items() if not re.search(r"visual|vision|projector|connector", n)}
    template = template or CHAT_TEMPLATE.replace("IMAGE", FAMILIES[family][1])
    _write_language(language, family, config["text_config"], folder, text, template)
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
    _finish(writer)


def _write_language(
    path: Path, family: str, config: Any, folder: Path, tensors: Mapping[str, np.ndarray], template: str
) -> None:
    arch = _ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if family == "gemma3":
        writer.add_key_length(config["head_dim"])
        writer.add_sliding_window(config["sliding_window"])
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array("gemma3.attention.sliding_window_pattern", pattern)
    if family in ("qwen2_5_vl", "qwen3_vl"):
        writer.add_array(f"{arch}.rope.dimension_sections", [*rope["mrope_section"], 0])
    if family in ("mistral3", "qwen3_vl"):
        writer.add_key_length(config["head_dim"])
    if family == "mistral3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
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
    names = gguf.get_tensor_name_map(_kind(arch), config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, value in tensors.items():
        name = re.sub(r"^(model\.)?(language_model|text_model)\.(model\.)?", "model.", name)
        stored = names.get_name(re.sub(r"^model\.lm_head", "lm_head", name), (".weight", ".bias"))
        assert stored is not None, name
        part = stored.split(".")[-2]
        if arch in ("llama", "mistral3") and part in heads:  # the rows of a head's halves take turns
            shape = value.shape
            value = value.reshape(heads[part], 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            value = value + np.float32(1)
        writer.add_tensor(stored, np.ascontiguousarray(value))
    _finish(writer)


def _kind(arch: str) -> gguf.MODEL_ARCH:
    return next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)


def _projector_keys(family: str, config: Any, folder: Path) -> dict[str, Any]:
    vision, settings = config["vision_config"], json.loads((folder / "preprocessor_config.json").read_text())
    mean, std = CHANNELS[family]
    keys: dict[str, Any] = {
        "clip.vision.image_size": vision.get("image_size", 560),
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.block_count": vision.get("num_hidden_layers", vision.get("depth")),
        "clip.vision.attention.head_count": vision.get("num_attention_heads", vision.get("num_heads")),
        "clip.vision.attention.layer_norm_epsilon": float(vision.get("layer_norm_eps", 1e-6)),
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.image_mean": mean,
        "clip.vision.image_std": std,
        "clip.use_gelu": family in ("gemma3", "idefics3"),
    }
    if family == "gemma3":
        side = vision["image_size"] // vision["patch_size"]
        scale = side // int(config["mm_tokens_per_image"] ** 0.5)
        keys |= {"clip.projector_type": "gemma3", "clip.vision.projector.scale_factor": scale}
    elif family == "idefics3":
        keys |= {"clip.projector_type": "idefics3", "clip.vision.projector.scale_factor": config["scale_factor"]}
        keys["clip.vision.preproc_image_size"] = settings["size"]["longest_edge"]
    elif family == "llava":  # llama.cpp's first converter counts a layer less
        keys |= {"clip.projector_type": "mlp", "clip.has_llava_projector": True}
        keys |= {"clip.vision.block_count": vision["num_hidden_layers"] - 1, "clip.vision.projection_dim": 768}
        keys["clip.vision.image_aspect_ratio"] = "square"
    elif family == "qwen3_vl":
        side = int(vision["num_position_embeddings"] ** 0.5)
        keys |= {"clip.projector_type": "qwen3vl_merger", "clip.use_gelu": True}
        keys |= {"clip.vision.image_size": side * vision["patch_size"]}
        keys |= {
            "clip.vision.is_deepstack_layers": [i in vision["deepstack_visual_indexes"] for i in range(vision["depth"])]
        }
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
    first = {"linear_1": "mm.0", "linear_2": "mm.2"}
    for name, value in tensors.items():
        name = re.sub(r"^(model\.)?vision_tower\.(vision_model\.)?", "vision_tower.vision_model.", name)
        name = re.sub(r"^(model\.)?(multi_modal_projector|visual)\.", r"\2.", name)
        name = re.sub(r"^(model\.)?(vision_model|connector)\.", r"model.\2.", name)
        if (family == "llava" and "post_layernorm" in name) or ".head." in name:
            continue
        if family == "mistral3":
            name = re.sub(r"vision_tower\.vision_model\.(transformer\.)?", "vision_tower.", name)
            name = name.replace("vision_tower.layers", "vision_tower.transformer.layers")
            found = {"multi_modal_projector.norm.weight": "mm.input_norm.weight"}
            found["multi_modal_projector.patch_merger.merging_layer.weight"] = "mm.patch_merger.weight"
            if re.search(r"[qk]_proj", name):
                value = value.reshape(3, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
            yield found.get(name) or _stored(names, name), value
        elif family == "llava" and (match := re.search(r"\.(linear_[12])\.(\w+)$", name)):
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
        elif ".qkv." in name and family == "qwen3_vl":
            yield _stored(names, name), value
        elif ".qkv." in name:
            for part, rows in zip("qkv", np.split(value, 3), strict=True):
                yield _stored(names, name.replace("qkv", part)), rows
        else:
            stored = _stored(names, name.replace("projection_weight", "projection.weight"))
            if "soft_emb_norm" in stored:
                value = value + np.float32(1)
            if family == "llava":  # with the names that it had
                stored = re.sub(r"ffn_(up|down)", lambda m: {"up": "ffn_down", "down": "ffn_up"}[m[1]], stored)
            yield stored, value


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


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
