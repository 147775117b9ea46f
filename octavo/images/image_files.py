"""Images in all forms in which they come, as pixels: files that clients send, PIL images, numpy arrays."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np

from octavo.core.errors import InvalidRequestError
from octavo.images.pillow import pillow
from octavo.images.resizing import Pixels

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
