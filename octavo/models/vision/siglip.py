"""The image part of SigLIP (Zhai et al. 2023): patches alone, a norm after the last layer."""

from __future__ import annotations

from typing import Any

from octavo.models.config_reader import ConfigReader
from octavo.models.vision.vit import VitConfig, read_vit

#: What config.json leaves out if it is the default of transformers.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}


def read_siglip(reader: ConfigReader, **defaults: Any) -> VitConfig:
    """The facts of a ``vision_config``; ``defaults`` are those of the family, where they are not SigLIP's."""
    return read_vit(reader.with_defaults(**{**_DEFAULTS, **defaults}), post_norm=True)
