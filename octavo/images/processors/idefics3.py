"""Idefics3 and SmolVLM (Laurençon et al. 2024, section 3.2): an image in tiles, and the whole of it as one more."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from octavo.core.errors import ConfigError
from octavo.core.image_input import ImageInput
from octavo.images.image_settings import MAX_SIDE, ImageSettings
from octavo.images.processor import ProcessedImage
from octavo.images.resizing import resize

_LANCZOS = 1
_TILE = 364
#: Whatever the settings say, the longer side becomes no longer.
_MAX_SIDE = 4096


class Idefics3Processor(msgspec.Struct, frozen=True, tag=True):
    """Tiles by row, then the whole image in the size of a tile; a text before each names its row and column."""

    placeholder: str
    #: What stands around images and before each tile, and what names the whole image.
    fake_token: str
    global_token: str
    #: What the longer side becomes, and the side of a tile.
    longest_edge: int
    tile: int
    is_split: bool
    resample: int
    #: Features of a tile.
    tile_features: int

    @property
    def max_features(self) -> int:
        """See ``ImageProcessor``."""
        if not self.is_split:
            return self.tile_features
        side = min(self.longest_edge, _MAX_SIDE)
        longer, shorter = (math.ceil(pixels / self.tile) for pixels in (side, side + side % 2))
        tiles = longer * shorter
        return (tiles + 1 if tiles > 1 else 1) * self.tile_features

    def process(self, image: np.ndarray) -> ProcessedImage:
        """See ``ImageProcessor``."""
        image = resize(image, *self._resized(*image.shape[:2]), self.resample)
        if self.is_split:
            image = resize(image, *self._whole_tiles(*image.shape[:2]), self.resample)
        whole = resize(image, self.tile, self.tile, self.resample)
        rows, columns = (side // self.tile if self.is_split else 1 for side in image.shape[:2])
        pieces = whole[None]
        if rows * columns > 1:
            tiles = image.reshape(rows, self.tile, columns, self.tile, 3).swapaxes(1, 2)
            pieces = np.concatenate([tiles.reshape(-1, self.tile, self.tile, 3), pieces])
        expansion = self._expansion(rows, columns)
        return ProcessedImage(ImageInput.of(pieces), expansion, len(pieces) * self.tile_features)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """The longer side as the settings have it, the other one even; both at least 1."""
        ratio = width / height
        if width >= height:
            width = self.longest_edge
            height = int(width / ratio)
            height += height % 2
        else:
            height = self.longest_edge
            width = int(height * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > _MAX_SIDE:
            height, width = int(_MAX_SIDE / ratio), _MAX_SIDE
        elif height > width and height > _MAX_SIDE:
            height, width = _MAX_SIDE, int(_MAX_SIDE * ratio)
        return max(height, 1), max(width, 1)

    def _whole_tiles(self, height: int, width: int) -> tuple[int, int]:
        """The next multiples of a tile; the shorter side's is that of the length it has once the longer one grew."""
        ratio = width / height
        if width >= height:
            width = self._up(width)
            return self._up(int(width / ratio)), width
        height = self._up(height)
        return height, self._up(int(height * ratio))

    def _up(self, side: int) -> int:
        return math.ceil(side / self.tile) * self.tile

    def _expansion(self, rows: int, columns: int) -> str:
        features = self.placeholder * self.tile_features
        whole = f"{self.fake_token}{self.global_token}{features}{self.fake_token}"
        if rows * columns == 1:
            return whole
        lines = (
            "".join(f"{self.fake_token}<row_{row}_col_{column}>{features}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return "".join(lines) + "\n" + whole


def read_idefics3(settings: ImageSettings) -> Idefics3Processor:
    """From preprocessor_config.json of either family.

    Raises:
        ConfigError: see ``read_image_processor``.
    """
    size = settings.sizes("size", {"longest_edge": 4 * _TILE}, for_integer="longest_edge")
    tiles = settings.sizes("max_image_size", {"longest_edge": _TILE}, for_integer="longest_edge")
    for name, sizes in (("size", size), ("max_image_size", tiles)):
        if sizes.raw.keys() != {"longest_edge"}:
            raise ConfigError(f"{settings.file}: {name} must have longest_edge, not {sizes.raw!r}")
    tile = tiles.positive("longest_edge", most=MAX_SIDE)
    patch = settings.vision.positive("patch_size", 32, MAX_SIDE)
    scale = settings.config.positive("scale_factor", 2, MAX_SIDE)
    if tile % (patch * scale):
        raise ConfigError(
            f"{settings.file}: max_image_size is {tile}, which {patch * scale} does not divide: patches of {patch} "
            f"pixels, {scale} x {scale} of which make a feature"
        )
    return Idefics3Processor(
        placeholder=settings.token("<image>", "image_token_id"),
        fake_token="<fake_token_around_image>",
        global_token="<global-img>",
        longest_edge=size.positive("longest_edge", most=MAX_SIDE),
        tile=tile,
        is_split=settings.flag("do_image_splitting", True),
        resample=settings.resample(_LANCZOS),
        tile_features=(tile // patch // scale) ** 2,
    )
