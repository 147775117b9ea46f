"""What the files of a model say of its images: preprocessor_config.json, processor_config.json, tokenizer.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.json_values import MAX_TOKENIZER, JsonValues, read_object

#: Means and deviations of the channels that CLIP was trained with, and those of SigLIP.
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_SIGLIP = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
#: What a family's processor has where its file says nothing.
_CHANNELS = {"llava": _CLIP, "qwen2_5_vl": _CLIP, "idefics3": _SIGLIP, "smolvlm": _SIGLIP, "gemma3": _SIGLIP}
_FILTERS = 6
#: Largest numbers of pixels, along a side and in all.
MAX_SIDE = 1 << 14
MAX_PIXELS = 1 << 28


@dataclass(frozen=True)
class ImageSettings(JsonValues):
    """The settings of one model's processor of images."""

    #: Those of config.json, in the model's folder.
    config: JsonValues

    def channels(self, name: str) -> tuple[float, float, float]:
        """``image_mean`` or ``image_std``: one number for each of red, green and blue, or one for all."""
        value = self.raw.get(name)
        if value is None:
            value = _CHANNELS[self.family][name == "image_std"]
        values = [value] * 3 if isinstance(value, int | float) else value
        if (
            not isinstance(values, list | tuple)
            or len(values) != 3
            or not all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values)
            or (name == "image_std" and not all(v > 0 for v in values))
        ):
            raise ConfigError(f"{self.file}: {name} must be three numbers, for red, green and blue, not {value!r}")
        return (float(values[0]), float(values[1]), float(values[2]))

    def sizes(self, name: str, default: Mapping[str, int], for_integer: str = "") -> JsonValues:
        """An object of sizes such as ``{"height": 336, "width": 336}``.

        ``for_integer``: which size one integer is; by default height and width.
        """
        value = self.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool):
            value = {for_integer: value} if for_integer else {"height": value, "width": value}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.file}: {name} must be an object of sizes in pixels, not {value!r}")
        sizes = JsonValues({key: size for key, size in value.items() if size is not None}, self.file)
        for key in sizes.raw:
            sizes.positive(key, most=MAX_PIXELS)
        return sizes

    def square(self, name: str, default: Mapping[str, int]) -> tuple[int, int]:
        """Height and width of an object of sizes that must have both."""
        sizes = self.sizes(name, default)
        if not sizes.raw.keys() >= {"height", "width"}:
            raise ConfigError(f"{self.file}: {name} must have a height and a width, not {self.raw.get(name)!r}")
        return sizes.positive("height", most=MAX_SIDE), sizes.positive("width", most=MAX_SIDE)

    def resample(self, default: int) -> int:
        """The number of one of Pillow's filters; refuses what leaves images as they are."""
        if not self.flag("do_resize", True):
            raise ConfigError(f"{self.file}: do_resize is false, so any image would be as large as it comes: set it")
        value = self.get("resample", default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _FILTERS:
            raise ConfigError(f"{self.file}: resample must be a filter from 0 to {_FILTERS - 1}, not {value!r}")
        return value

    @property
    def family(self) -> str:
        """``model_type`` of config.json."""
        return str(self.config.get("model_type"))

    @property
    def vision(self) -> JsonValues:
        """``vision_config`` of config.json."""
        return JsonValues(self.config.table("vision_config"), self.config.file)

    def token(self, default: str, *names: str) -> str:
        """The text of the token whose id config.json has under one of these names.

        It is that of tokenizer.json; without one, ``default``, which the family's tokenizers have.
        """
        id = next((token for name in names if (token := self.config.get(name)) is not None), None)
        return self._added_tokens.get(id, default)

    @cached_property
    def _added_tokens(self) -> dict[Any, str]:
        file = self.config.file.parent / "tokenizer.json"
        tokens = read_object(file, most=MAX_TOKENIZER).get("added_tokens") if file.is_file() else None
        return {
            token["id"]: token["content"]
            for token in (tokens if isinstance(tokens, list) else [])
            if isinstance(token, dict) and isinstance(token.get("content"), str) and "id" in token
        }


def read_settings(folder: Path, config: Mapping[str, Any]) -> ImageSettings:
    """The settings of a model's folder; ``config``: the content of its config.json.

    Raises:
        ConfigError: a file is no JSON object, or there is none.
    """
    file = folder / "processor_config.json"
    # transformers 5 writes one file; before, images had a file of their own.
    raw = read_object(file).get("image_processor") if file.is_file() else None
    if not isinstance(raw, dict):
        file = folder / "preprocessor_config.json"
        if not file.exists():
            raise ConfigError(
                f"{folder} has neither preprocessor_config.json nor a processor_config.json with image_processor, "
                "which say how images become pixels: add the one that the model was published with"
            )
        raw = read_object(file)
    return ImageSettings(raw, file, JsonValues(config, folder / "config.json"))
