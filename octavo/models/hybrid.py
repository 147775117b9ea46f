"""What decoders with layers of several kinds share: which layer has attention, and which a recurrent state."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.layers.gated_delta import DeltaShape
from octavo.models.config_files import ConfigReader
from octavo.models.decoder import PreNormLayer


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ModelConfig):
    #: For each layer, whether it has attention; others have a recurrent state.
    attends: tuple[bool, ...]

    @property
    def has_only_states(self) -> bool:
        return not any(self.attends)


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(HybridConfig):
    #: Of the layers without attention.
    delta: DeltaShape

    @property
    def attention_width(self) -> int:
        return max(super().attention_width, self.delta.width)


class LinearAttentionLayer(PreNormLayer):
    mixer_name = "linear_attn"


def read_layer_types(reader: ConfigReader, layers: int, *known: str) -> list[str] | None:
    """The kind of each layer by layer_types; None: config.json does not say.

    Raises:
        ConfigError: it is no list of ``layers`` names that are ``known``.
    """
    kinds = reader.raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {*known}:
        names = " or ".join(map(repr, known))
        raise ConfigError(f"{reader.file}: layer_types must be a list of {layers} {names}, not {kinds!r}")
    return [str(kind) for kind in kinds]


def read_attends(reader: ConfigReader, layers: int, interval: int) -> tuple[bool, ...]:
    """The layers with attention, by layer_types, else the last of every ``interval``."""
    kinds = read_layer_types(reader, layers, "linear_attention", "full_attention")
    if kinds is None:
        return tuple((index + 1) % interval == 0 for index in range(layers))
    return tuple(kind == "full_attention" for kind in kinds)


def read_delta_shape(reader: ConfigReader, *, beta_scale: float = 1.0) -> DeltaShape:
    """The heads of gated delta networks; ``beta_scale`` as in ``DeltaShape``."""
    shape = DeltaShape(
        key_heads=reader.positive("linear_num_key_heads"),
        value_heads=reader.positive("linear_num_value_heads"),
        key_dim=reader.positive("linear_key_head_dim"),
        value_dim=reader.positive("linear_value_head_dim"),
        taps=reader.positive("linear_conv_kernel_dim"),
        beta_scale=beta_scale,
    )
    if shape.value_heads % shape.key_heads:
        raise ConfigError(
            f"{reader.file}: linear_num_value_heads ({shape.value_heads}) must be a multiple of linear_num_key_heads "
            f"({shape.key_heads})"
        )
    if not 2 <= shape.taps <= 16:
        raise ConfigError(f"{reader.file}: linear_conv_kernel_dim must be 2 to 16, not {shape.taps}")
    for name in ("key", "value"):
        if (dim := getattr(shape, f"{name}_dim")) > 512:
            raise ConfigError(f"{reader.file}: linear_{name}_head_dim must be at most 512, not {dim}")
    return shape
