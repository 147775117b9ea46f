"""Pillow, which reads and resizes images: an extra, imported where an image comes."""

from __future__ import annotations

from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.extras import how_to_install


def pillow() -> Any:
    """The module ``PIL.Image``.

    Raises:
        ConfigError: the package is not installed, or a library that it needs cannot be loaded.
    """
    try:
        from PIL import Image
    except (ImportError, OSError) as e:  # OSError: a library that it wraps is missing
        raise ConfigError(
            f"images need the package Pillow, which fails to import ({e}): {how_to_install('images')}"
        ) from None
    return Image
