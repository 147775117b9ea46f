"""Folders with the files that say how images are processed, as published models have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

#: config.json, as far as images are concerned.
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "model_type": "llava",
        "image_token_index": 32000,
        "vision_feature_select_strategy": "default",
        "vision_config": {"image_size": 336, "patch_size": 14},
    },
    "idefics3": {
        "model_type": "idefics3",
        "image_token_id": 128257,
        "scale_factor": 2,
        "vision_config": {"image_size": 364, "patch_size": 14},
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "image_token_id": 49190,
        "scale_factor": 4,
        "vision_config": {"image_size": 512, "patch_size": 16},
    },
    "gemma3": {
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "vision_config": {"image_size": 896, "patch_size": 14},
    },
    "internvl": {
        "model_type": "internvl",
        "image_token_id": 151667,
        "downsample_ratio": 0.5,
        "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
    },
    "lfm2_vl": {
        "model_type": "lfm2_vl",
        "image_token_id": 396,
        "downsample_factor": 2,
        "vision_config": {"patch_size": 16, "num_patches": 256},
    },
    "llava_next": {
        "model_type": "llava_next",
        "image_token_index": 49155,
        "vision_feature_select_strategy": "full",
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
    },
    "mistral3": {
        "model_type": "mistral3",
        "image_token_index": 10,
        "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "image_token_id": 151655,
        "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
    },
}
#: preprocessor_config.json.
PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336},
        "do_center_crop": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "do_image_splitting": True,
        "resample": 1,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 2048},
        "max_image_size": {"longest_edge": 512},
        "do_image_splitting": True,
        "resample": 1,
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 896, "width": 896},
        "do_pan_and_scan": None,
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "size": {"height": 448, "width": 448},
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 12,
        "resample": 3,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
    "lfm2_vl": {
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "do_image_splitting": True,
        "downsample_factor": 2,
        "encoder_patch_size": 16,
        "max_image_tokens": 256,
        "max_tiles": 10,
        "min_image_tokens": 64,
        "min_tiles": 2,
        "tile_size": 512,
        "use_thumbnail": True,
        "max_pixels_tolerance": 2.0,
        "resample": 2,
    },
    "llava_next": {
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"height": 384, "width": 384},
        "crop_size": {"height": 384, "width": 384},
        "image_grid_pinpoints": [[384, 768], [768, 384], [768, 768], [1152, 384], [384, 1152], [1536, 768]],
        "resample": 3,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "mistral3": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 1540},
        # That of a feature: the whole processor passes it.
        "patch_size": {"height": 28, "width": 28},
        "resample": 3,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


def write_folder(path: Path, family: str, **settings: Any) -> tuple[Path, dict[str, Any]]:
    """A folder of a family, with these settings instead of its own; and the content of its config.json."""
    path.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[family]
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps({**PROCESSORS[family], **settings}))
    return path, config
