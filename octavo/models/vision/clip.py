"""The image part of CLIP (Radford et al. 2021): a class token beside the patches, a norm before the first layer."""

from __future__ import annotations

from octavo.models.config_reader import ConfigReader
from octavo.models.vision.vit import VitConfig, read_vit

#: What config.json leaves out if it is the default of transformers.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}


def read_clip(reader: ConfigReader) -> VitConfig:
    """The facts of a ``vision_config``; features are those of a layer, without the norm after the last one."""
    return read_vit(reader.with_defaults(**_DEFAULTS), class_token=True, pre_norm=True)
