"""What the files of a model say of its images: preprocessor_config.json, processor_config.json, tokenizer.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError

#: Means and deviations of the channels that CLIP was trained with, and those of SigLIP.
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_SIGLIP = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
#: What a family's processor has where its file says nothing.
_CHANNELS = {"llava": _CLIP, "qwen2_5_vl": _CLIP, "idefics3": _SIGLIP, "smolvlm": _SIGLIP, "gemma3": _SIGLIP}
_FILTERS = 6
_MAX_SIDE = 1 << 14


@dataclass(frozen=True)
class ImageSettings:
    """Typed access to the settings of one model's processor; null counts as absent."""

    folder: Path
    #: Of config.json.
    config: Mapping[str, Any]
    #: Of the processor of images, and where it stands.
    raw: Mapping[str, Any]
    file: Path
    #: Of processor_config.json.
    processor: Mapping[str, Any]

    def integer(self, name: str, default: int, raw: Mapping[str, Any] | None = None) -> int:
        """A number of pixels or the like, from 1 to 16384."""
        value = (self.raw if raw is None else raw).get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIDE:
            raise ConfigError(f"{self.file}: {name} must be an integer from 1 to {_MAX_SIDE}, not {value!r}")
        return value

    def pixels(self, name: str, default: int, raw: Mapping[str, Any] | None = None) -> int:
        """A number of pixels in all."""
        value = (self.raw if raw is None else raw).get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 28:
            raise ConfigError(f"{self.file}: {name} must be an integer from 1 to {1 << 28}, not {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"{self.file}: {name} must be true or false, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number above zero."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"{self.file}: {name} must be a number above 0, not {value!r}")
        return float(value)

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

    def sizes(self, name: str, default: Mapping[str, int], for_integer: str = "") -> dict[str, int]:
        """An object of sizes such as ``{"height": 336, "width": 336}``.

        ``for_integer``: which size one integer is; by default height and width.
        """
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool):
            value = {for_integer: value} if for_integer else {"height": value, "width": value}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.file}: {name} must be an object of sizes in pixels, not {value!r}")
        return {key: self.pixels(key, 0, value) for key in value if value[key] is not None}

    def square(self, name: str, default: Mapping[str, int]) -> tuple[int, int]:
        """Height and width of an object of sizes that must have both."""
        sizes = self.sizes(name, default)
        if not sizes.keys() >= {"height", "width"}:
            raise ConfigError(f"{self.file}: {name} must have a height and a width, not {self.raw.get(name)!r}")
        return self.integer("height", 0, sizes), self.integer("width", 0, sizes)

    def resample(self, default: int) -> int:
        """The number of one of Pillow's filters; refuses what leaves images as they are."""
        if not self.flag("do_resize", True):
            raise ConfigError(f"{self.file}: do_resize is false, so any image would be as large as it comes: set it")
        value = self.raw.get("resample")
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _FILTERS:
            raise ConfigError(f"{self.file}: resample must be a filter from 0 to {_FILTERS - 1}, not {value!r}")
        return value

    @property
    def family(self) -> str:
        """``model_type`` of config.json."""
        return str(self.config.get("model_type"))

    @property
    def vision(self) -> Mapping[str, Any]:
        """``vision_config`` of config.json."""
        value = self.config.get("vision_config")
        return value if isinstance(value, Mapping) else {}

    def token(self, default: str, *names: str) -> str:
        """The text of the token whose id config.json has under one of these names.

        It is that of tokenizer.json; without one, ``default``, which the family's tokenizers have.
        """
        id = next((self.config[name] for name in names if self.config.get(name) is not None), None)
        return self._added_tokens.get(id, default)

    @cached_property
    def _added_tokens(self) -> dict[Any, str]:
        tokens = _read(self.folder / "tokenizer.json").get("added_tokens")
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
    processor = _read(file)
    # transformers 5 writes one file; before, images had a file of their own.
    raw = processor.get("image_processor")
    if not isinstance(raw, dict):
        file = folder / "preprocessor_config.json"
        if not file.exists():
            raise ConfigError(
                f"{folder} has neither preprocessor_config.json nor a processor_config.json with image_processor, "
                "which say how images become pixels: add the one that the model was published with"
            )
        raw = _read(file)
    return ImageSettings(folder, config, raw, file, processor)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read: {e}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content
