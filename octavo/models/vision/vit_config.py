"""What a ``vision_config`` says of a vision transformer: CLIP's (Radford et al. 2021), SigLIP's (Zhai et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from octavo.core.errors import ConfigError
from octavo.images.normalise import Normalisation
from octavo.models.config_reader import ConfigReader, read_activation
from octavo.models.encoder import EncoderConfig

#: What config.json leaves out if it is the default of transformers, of both.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}
_CLIP = {**_DEFAULTS, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP = {**_DEFAULTS, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}


@dataclass(frozen=True)
class VitConfig(EncoderConfig):
    """What vision transformers have beyond ``EncoderConfig``."""

    #: Pixels of a side, of an image and of a patch.
    image_size: int = 224
    patch_size: int = 14
    normalisation: Normalisation = field(default_factory=Normalisation)
    #: Whether a token without pixels comes first, and patches have no bias.
    class_token: bool = False
    #: Whether there are norms before the first layer and after the last.
    pre_norm: bool = False
    post_norm: bool = False

    @property
    def side(self) -> int:
        """Patches of a side."""
        return self.image_size // self.patch_size

    @property
    def rows(self) -> int:
        """Rows of the largest piece."""
        return self.side**2 + self.class_token

    @property
    def row_width(self) -> int:
        """Numbers of a patch."""
        return 3 * self.patch_size**2


def read_clip(reader: ConfigReader) -> VitConfig:
    """A class token beside the patches, a norm before the first layer, none of the last: features are a layer's.

    Raises:
        ConfigError: a value of ``vision_config`` is of the wrong type or impossible.
    """
    return _read(reader.with_defaults(**_CLIP), class_token=True, pre_norm=True)


def read_siglip(reader: ConfigReader, **defaults: Any) -> VitConfig:
    """Patches alone, a norm after the last layer; ``defaults`` are those of the family, where they are not SigLIP's.

    Raises:
        ConfigError: as for ``read_clip``.
    """
    return _read(reader.with_defaults(**{**_SIGLIP, **defaults}), post_norm=True)


def _read(reader: ConfigReader, **values: Any) -> VitConfig:
    """The facts of a ``vision_config`` that has every value; ``values`` are fields that config.json does not have."""
    hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"{reader.file}: hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    image, patch = reader.positive("image_size"), reader.positive("patch_size")
    if patch > image:
        raise ConfigError(f"{reader.file}: patch_size ({patch}) must be at most image_size ({image})")
    if reader.positive("num_channels", 3) != 3:
        raise ConfigError(f"{reader.file}: num_channels must be 3, not {reader.raw['num_channels']}")
    config = VitConfig(
        architecture="vision tower",
        vocab_size=0,
        hidden_size=hidden,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=reader.positive("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position=(image // patch) ** 2,
        layer_norm_eps=reader.number("layer_norm_eps", 1e-6),
        activation=read_activation(reader, "hidden_act", "gelu_pytorch_tanh"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        image_size=image,
        patch_size=patch,
    )
    return replace(config, **values)
