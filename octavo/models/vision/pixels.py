"""Pixels of an image as rows of patches, normalised as a checkpoint's files say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError

#: Files of a model folder that say how images are processed, the newest form first.
_FILES = ("processor_config.json", "preprocessor_config.json")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Normalisation:
    """Pixels become (pixel * scale - mean) / std, by colour."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Of uint8 [.., 3], float32."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return (pixels.astype(np.float32) * np.float32(self.scale) - mean) / std


#: Radford et al. 2021, as published with the network.
CLIP_PIXELS = Normalisation((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
#: Zhai et al. 2023: -1 to 1.
SIGLIP_PIXELS = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def read_normalisation(folder: Path, default: Normalisation) -> Normalisation:
    """What the files beside config.json say; ``default`` where they say nothing.

    Raises:
        ConfigError: a value is of the wrong type or impossible.
    """
    for name in _FILES:
        file = folder / name
        if not file.is_file() or file.stat().st_size > _MAX_BYTES:
            continue
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"{file} is not readable JSON: {e}") from None
        values = raw.get("image_processor", raw) if isinstance(raw, dict) else None
        if isinstance(values, dict) and ("image_mean" in values or "do_normalize" in values):
            return _of(values, default, file)
    return default


def _of(values: dict[str, Any], default: Normalisation, file: Path) -> Normalisation:
    scale = values.get("rescale_factor", default.scale) if values.get("do_rescale", True) else 1.0
    if not isinstance(scale, int | float) or not 0 < scale < 2:
        raise ConfigError(f"{file}: rescale_factor must be a number above 0, not {scale!r}")
    if not values.get("do_normalize", True):
        return Normalisation((0.0,) * 3, (1.0,) * 3, float(scale))
    mean = _colours(values.get("image_mean") or default.mean, "image_mean", file)
    std = _colours(values.get("image_std") or default.std, "image_std", file)
    if min(std) <= 0:
        raise ConfigError(f"{file}: image_std must be above 0, not {list(std)}")
    return Normalisation(mean, std, float(scale))


def _colours(given: Any, name: str, file: Path) -> tuple[float, ...]:
    values = [given] * 3 if isinstance(given, int | float) else given
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(isinstance(v, int | float) for v in values):
        raise ConfigError(f"{file}: {name} must be three numbers, one a colour, not {given!r}")
    return tuple(float(value) for value in values)


def patch_rows(pixels: np.ndarray, patch: int, merge: int = 1) -> np.ndarray:
    """The patches of a piece [height, width, 3], as rows [patches, 3 * patch * patch] by colour, line and column.

    They follow each other from left to right, line by line; with ``merge``, so do squares of ``merge * merge`` patches,
    and the patches within each. Height and width are multiples of ``merge * patch``.
    """
    height, width, colours = pixels.shape
    side = merge * patch
    cut = pixels.reshape(height // side, merge, patch, width // side, merge, patch, colours)
    return cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, colours * patch * patch)


def patch_places(rows: int, columns: int, merge: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Line and column of each patch of a grid, int64 [patches] both, in the order of ``patch_rows``."""
    lines, places = np.divmod(np.arange(rows * columns, dtype=np.int64).reshape(rows, columns), columns)
    shape = (rows // merge, merge, columns // merge, merge)
    return tuple(x.reshape(shape).transpose(0, 2, 1, 3).reshape(-1) for x in (lines, places))  # type: ignore[return-value]
