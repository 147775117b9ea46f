"""Pillow, which reads and resizes images: an extra, imported where an image comes."""

from __future__ import annotations

from typing import Any

from octavo.core.errors import ConfigError


def pillow() -> Any:
    """The module ``PIL.Image``.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        from PIL import Image
    except ImportError as e:
        raise ConfigError(
            f"images need the package Pillow, which fails to import ({e}): pip install 'octavo[images]'"
        ) from None
    return Image
