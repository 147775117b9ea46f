"""Images in all forms in which they come, as pixels: files that clients send, PIL images, numpy arrays."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.plugins import how_to_install

if TYPE_CHECKING:
    from octavo.images.processors import ImageSettings


# Pillow, which reads and resizes images: an extra, imported where an image comes.


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


# Resizing, cropping and padding, as the processors of transformers do it with Pillow.

#: Pixels, [height, width, 3].
Pixels = NDArray[np.uint8]
#: Beyond it, to bring the short side to a network's size makes of a few pixels an image that fills the memory.
MAX_RATIO = 200


def resize(image: Pixels, height: int, width: int, resample: int) -> Pixels:
    """An image [h, w, 3] with another size; ``resample``: one of Pillow's filters, which widen as an image shrinks."""
    resized = pillow().fromarray(image).resize((width, height), resample)
    return np.asarray(resized)


def shortest_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """Height and width that keep the ratio, the shorter one being ``edge``."""
    if width <= height:
        return int(edge * height / width), edge
    return edge, int(edge * width / height)


def center_crop(image: Pixels, height: int, width: int) -> Pixels:
    """The middle of an image; what it lacks is black, one row more of it before than after."""
    cropped = np.zeros((height, width, 3), np.uint8)
    (to_row, from_row, rows), (to_column, from_column, columns) = (
        _overlap(size, wanted) for size, wanted in zip(image.shape, (height, width), strict=False)
    )
    cropped[to_row : to_row + rows, to_column : to_column + columns] = image[
        from_row : from_row + rows, from_column : from_column + columns
    ]
    return cropped


def _overlap(size: int, wanted: int) -> tuple[int, int, int]:
    """Along a side: where the image begins in its crop, where the crop in the image, and how much they share."""
    start = (size - wanted) // 2
    if start >= 0:
        return 0, start, wanted
    return -start, 0, size


def pad_to_square(image: Pixels, color: tuple[int, int, int]) -> Pixels:
    """The image in the middle of a square of this colour."""
    height, width, _ = image.shape
    side = max(height, width)
    padded = np.empty((side, side, 3), np.uint8)
    padded[:] = color
    top, left = (side - height) // 2, (side - width) // 2
    padded[top : top + height, left : left + width] = image
    return padded


def check_ratio(image: Pixels) -> None:
    """Refuses images that are too long for this.

    Raises:
        InvalidRequestError: one side is more than ``MAX_RATIO`` times the other.
    """
    height, width, _ = image.shape
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidRequestError(
            f"an image of {width} x {height} pixels is too long: one side may be at most {MAX_RATIO} times the other"
        )


ACCEPTED = "png, jpeg, webp, bmp and gif are read"
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
#: Of modes that a file or a PIL image may have, and that Pillow turns into RGB.
_MODES = {"1", "L", "P", "LA", "La", "PA", "RGB", "RGBX", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV"}
#: 16 bits a pixel, whatever the order of their bytes. Files of 16 bits a channel with colours come with 8.
_DEEP = {"I", "I;16", "I;16L", "I;16B", "I;16N"}
_WHITE = 255
#: Pixels that are converted at once, so that a large image is in memory twice and no more.
_AT_ONCE = 1 << 20


class ImageLimits(msgspec.Struct, frozen=True):
    """What an image may have at most."""

    #: Of the file.
    max_bytes: int = 20 << 20
    #: Width times height: 8192 x 8192. Phones make up to 50 million, and other APIs take 64 million. With the seven
    #: bytes that each has while it is converted they fit the memory of the sandbox.
    max_pixels: int = 1 << 26


DEFAULT_LIMITS = ImageLimits()


def decode_image(content: bytes, limits: ImageLimits = DEFAULT_LIMITS, name: str = "the image") -> Pixels:
    """The pixels of a file, uint8 [height, width, 3], upright; ``name``: what errors call it.

    Limits hold before pixels are decoded. For files of strangers this runs in the sandbox (``image_reader.py``).

    Raises:
        InvalidRequestError: it is no image of a known format, is damaged, cut off, animated or beyond a limit.
        ConfigError: Pillow is not installed.
    """
    check_size(len(content), limits, name)
    image_module = pillow()
    if (size := _webp_size(content)) is not None:
        _check_pixels(size, limits, name)  # before Pillow allocates it, which it does as it opens such a file
    try:
        image = image_module.open(io.BytesIO(content), formats=_FORMATS)
    except (MemoryError, RecursionError):
        raise
    except Exception as e:  # readers of formats raise many kinds
        if isinstance(e, image_module.DecompressionBombError):  # Pillow's own limit, far beyond the usual one here
            raise InvalidRequestError(f"{name} has too many pixels: {_reason(e)}") from None
        reason = "" if isinstance(e, image_module.UnidentifiedImageError) else f"{_reason(e)}; "
        raise InvalidRequestError(
            f"{name} is no image that can be decoded ({reason}its {len(content)} bytes begin with {content[:8]!r}); "
            f"{ACCEPTED}"
        ) from None
    _check_pixels(image.size, limits, name)
    if image.format != "MPO" and getattr(image, "is_animated", False):  # MPO: a photo with a preview or a second view
        raise InvalidRequestError(f"{name} is animated; send the frame that is meant, or several as several images")
    try:
        image.load()
    except (MemoryError, RecursionError):
        raise
    except Exception as e:
        raise InvalidRequestError(f"{name} is damaged or cut off: {_reason(e)}") from None
    _check_pixels(image.size, limits, name)
    return _rgb(_upright(image), name)


def image_array(image: Any, limits: ImageLimits = DEFAULT_LIMITS, name: str = "the image") -> Pixels:
    """The pixels of a PIL image or a numpy array, uint8 [height, width, 3].

    Arrays are uint8 [height, width] (grey), [height, width, 3] or [height, width, 4] (with alpha).

    Raises:
        InvalidRequestError: it is something else, has no pixels, or more than the limit.
        ConfigError: it needs Pillow, which is not installed.
    """
    if isinstance(image, np.ndarray):
        return _array_pixels(image, limits, name)
    image_module = pillow()
    if not isinstance(image, image_module.Image):
        raise InvalidRequestError(
            f"{name} must be a PIL image, a numpy array or the bytes of a file, not {type(image).__name__}"
        )
    if 0 in image.size:
        raise InvalidRequestError(f"{name} has {image.size[0]} x {image.size[1]} pixels; it needs at least one")
    _check_pixels(image.size, limits, name)
    return _rgb(_upright(image), name)


def check_size(num_bytes: int, limits: ImageLimits, name: str) -> None:
    """Refuses what is too large to be read.

    Raises:
        InvalidRequestError: it has no bytes, or more than the limit.
    """
    if not num_bytes:
        raise InvalidRequestError(f"{name} is empty: 0 bytes; {ACCEPTED}")
    if num_bytes > limits.max_bytes:
        raise InvalidRequestError(f"{name} has {num_bytes} bytes; at most {limits.max_bytes} are taken")


def _check_pixels(size: tuple[int, int], limits: ImageLimits, name: str) -> None:
    width, height = size
    if width * height > limits.max_pixels:
        raise InvalidRequestError(
            f"{name} has {width} x {height} pixels; at most {limits.max_pixels} in all are taken: send it smaller"
        )


def _array_pixels(array: np.ndarray, limits: ImageLimits, name: str) -> Pixels:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise InvalidRequestError(
            f"{name} must be an array uint8 [height, width], [height, width, 3] or [height, width, 4], not "
            f"{array.dtype} {[*array.shape]}"
        )
    height, width = array.shape[:2]
    if not height * width:
        raise InvalidRequestError(f"{name} has {width} x {height} pixels; it needs at least one")
    _check_pixels((width, height), limits, name)
    if array.ndim == 2:
        return np.repeat(array[:, :, None], 3, axis=2)
    if array.shape[2] == 3:
        return np.ascontiguousarray(array)
    return _rgb(pillow().fromarray(array), name)


def _upright(image: Any) -> Any:
    """The image as its EXIF orientation says that it is looked at; as it is if that cannot be read."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # damaged EXIF data, which viewers ignore
        return image


def _rgb(image: Any, name: str) -> Pixels:
    if image.mode not in _MODES | _DEEP:
        raise InvalidRequestError(f"{name} has pixels of mode {image.mode!r}, which have no colours; make it RGB")
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    is_transparent, rows = image.has_transparency_data, max(1, _AT_ONCE // width)
    for start in range(0, height, rows):
        part = image.crop((0, start, width, min(start + rows, height)))
        pixels[start : start + rows] = _part_rgb(part, is_transparent)
    return pixels


def _part_rgb(image: Any, is_transparent: bool) -> Pixels:
    if image.mode in _DEEP:
        # Pillow's own conversion takes all above 255 for white.
        grey = np.clip(np.asarray(image), 0, 65535).astype(np.uint32)
        return np.repeat(((grey + 128) // 257).astype(np.uint8)[:, :, None], 3, axis=2)
    if is_transparent:
        return _over_white(np.asarray(image.convert("RGBA")))
    return np.asarray(image.convert("RGB"))


def _over_white(pixels: np.ndarray) -> Pixels:
    """RGBA as it looks on white: what is transparent may have any colour."""
    numbers = pixels.astype(np.uint32)
    alpha = numbers[:, :, 3:]
    mixed = (numbers[:, :, :3] * alpha + _WHITE * (255 - alpha) + 127) // 255
    return mixed.astype(np.uint8)


def _webp_size(content: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP file (RFC 9649, sections 2.5 to 2.7); None: it is none."""
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(content) < 30:
        return None
    kind = content[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(content[24:27], "little"), 1 + int.from_bytes(content[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(content[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = (int.from_bytes(content[at : at + 2], "little") & 0x3FFF for at in (26, 28))
    return width, height


def _reason(error: Exception) -> str:
    return (str(error).strip().rstrip(".") or type(error).__name__)[:200]


# From levels of colour to the numbers that a tower sees.


@dataclass(frozen=True)
class Normalisation:
    """``(level * rescale - mean) / std`` in float32, by channel.

    The order of operations, and where they are rounded, is that of transformers' processors on Pillow.
    """

    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    rescale: float = 1.0

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """What each level becomes, float32 [256, 3]."""
        levels = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)[:, None]
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return np.asarray((levels - mean) / std, np.float32)

    def rows(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """uint8 [..., 3] to float32 [..., 3]."""
        return self.table[pixels, np.arange(3)]


def normalisation_of(settings: ImageSettings) -> Normalisation:
    """That of a processor's settings.

    Raises:
        ConfigError: a value is of the wrong type or impossible.
    """
    rescale = settings.number("rescale_factor", 1 / 255) if settings.flag("do_rescale", True) else 1.0
    if not settings.flag("do_normalize", True):
        return Normalisation(rescale=rescale)
    return Normalisation(settings.channels("image_mean"), settings.channels("image_std"), rescale)
