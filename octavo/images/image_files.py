"""Images as pixels: files of clients, PIL images and numpy arrays; resizing and normalisation."""

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


def pillow() -> Any:
    """The module ``PIL.Image``, an extra; raises ConfigError if it is missing or fails to load."""
    try:
        from PIL import Image
    except (ImportError, OSError) as e:  # OSError: a library that it wraps is missing
        raise ConfigError(
            f"images need the package Pillow, which fails to import ({e}): {how_to_install('images')}"
        ) from None
    return Image


# Resizing, cropping and padding, as the image processors of transformers do them with Pillow.

#: Pixels, [height, width, 3].
Pixels = NDArray[np.uint8]
#: Beyond this aspect ratio, scaling the short side to a network's size would make an image that fills the memory.
MAX_RATIO = 200


def resize(image: Pixels, height: int, width: int, resample: int) -> Pixels:
    """An image [h, w, 3] in another size; ``resample`` is one of Pillow's filters, with antialiasing."""
    return np.asarray(pillow().fromarray(image).resize((width, height), resample))


def shortest_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """Height and width with the shorter side ``edge`` and the same ratio."""
    if width <= height:
        return int(edge * height / width), edge
    return edge, int(edge * width / height)


def center_crop(image: Pixels, height: int, width: int) -> Pixels:
    """The centre of an image, padded with black; an odd row of padding comes first."""
    cropped = np.zeros((height, width, 3), np.uint8)
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    image = image[max(top, 0) :, max(left, 0) :][:height, :width]
    row, column = max(-top, 0), max(-left, 0)
    cropped[row : row + image.shape[0], column : column + image.shape[1]] = image
    return cropped


def pad_to_square(image: Pixels, color: tuple[int, int, int]) -> Pixels:
    height, width, _ = image.shape
    side = max(height, width)
    padded = np.empty((side, side, 3), np.uint8)
    padded[:] = color
    top, left = (side - height) // 2, (side - width) // 2
    padded[top : top + height, left : left + width] = image
    return padded


def check_ratio(image: Pixels) -> None:
    """Raises InvalidRequestError if one side is more than ``MAX_RATIO`` times the other."""
    height, width, _ = image.shape
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidRequestError(
            f"an image of {width} x {height} pixels is too long: one side may be at most {MAX_RATIO} times the other"
        )


# Decoding.

ACCEPTED = "png, jpeg, webp, bmp and gif are read"
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
#: Modes that Pillow converts to RGB.
_MODES = {"1", "L", "P", "LA", "La", "PA", "RGB", "RGBX", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV"}
#: 16-bit grey in any byte order. Pillow opens 16-bit colour files with 8 bits.
_DEEP = {"I", "I;16", "I;16L", "I;16B", "I;16N"}
_WHITE = 255
#: Pixels converted at once, so that a large image is in memory no more than twice.
_AT_ONCE = 1 << 20


class ImageLimits(msgspec.Struct, frozen=True):
    max_bytes: int = 20 << 20
    #: Width times height: 8192 x 8192. Phones make up to 50 million pixels, other APIs take 64 million. At seven bytes
    #: each during conversion they fit the memory of the sandbox.
    max_pixels: int = 1 << 26


DEFAULT_LIMITS = ImageLimits()


def decode_image(content: bytes, limits: ImageLimits = DEFAULT_LIMITS, name: str = "the image") -> Pixels:
    """The upright pixels of a file, uint8 [height, width, 3]; limits hold before pixels are decoded.

    Clients' files are decoded in the sandbox (``image_reader.py``). Raises InvalidRequestError if the format is
    unknown, or the file is damaged, truncated, animated or beyond a limit, and ConfigError without Pillow.
    """
    check_size(len(content), limits, name)
    image_module = pillow()
    if (size := _webp_size(content)) is not None:
        _check_pixels(size, limits, name)  # Pillow allocates the pixels of such a file when it opens it
    try:
        image = image_module.open(io.BytesIO(content), formats=_FORMATS)
    except (MemoryError, RecursionError):
        raise
    except Exception as e:  # decoders raise anything
        if isinstance(e, image_module.DecompressionBombError):  # Pillow's own limit, far beyond ours
            raise InvalidRequestError(f"has too many pixels: {_reason(e)}", path=name) from None
        reason = "" if isinstance(e, image_module.UnidentifiedImageError) else f"{_reason(e)}; "
        raise InvalidRequestError(
            f"is no image that can be decoded ({reason}its {len(content)} bytes begin with {content[:8]!r}); "
            f"{ACCEPTED}",
            path=name,
        ) from None
    _check_pixels(image.size, limits, name)
    if image.format != "MPO" and getattr(image, "is_animated", False):  # MPO: photos with a preview or second view
        raise InvalidRequestError("is animated; send the frame that is meant, or several as several images", path=name)
    try:
        image.load()
    except (MemoryError, RecursionError):
        raise
    except Exception as e:
        raise InvalidRequestError(f"is damaged or cut off: {_reason(e)}", path=name) from None
    _check_pixels(image.size, limits, name)
    return _rgb(_upright(image), name)


def image_array(image: Any, limits: ImageLimits = DEFAULT_LIMITS, name: str = "the image") -> Pixels:
    """The pixels, uint8 [height, width, 3], of a PIL image or a numpy array.

    Arrays are uint8 [height, width] (grey), [height, width, 3], or [height, width, 4] (with alpha). Raises
    InvalidRequestError for others, also empty ones and those beyond the limit, and ConfigError without Pillow.
    """
    is_array = isinstance(image, np.ndarray)
    if is_array:
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (3, 4)):
            raise InvalidRequestError(
                "must be an array uint8 [height, width], [height, width, 3] or [height, width, 4], not "
                f"{image.dtype} {[*image.shape]}",
                path=name,
            )
    elif not isinstance(image, pillow().Image):
        raise InvalidRequestError(
            f"must be a PIL image, a numpy array or the bytes of a file, not {type(image).__name__}", path=name
        )
    width, height = image.shape[1::-1] if is_array else image.size
    if not width * height:
        raise InvalidRequestError(f"has {width} x {height} pixels; it needs at least one", path=name)
    _check_pixels((width, height), limits, name)
    if not is_array:
        return _rgb(_upright(image), name)
    if image.ndim == 2:
        return np.repeat(image[:, :, None], 3, axis=2)
    return np.ascontiguousarray(image) if image.shape[2] == 3 else _rgb(pillow().fromarray(image), name)


def check_size(num_bytes: int, limits: ImageLimits, name: str) -> None:
    """Raises InvalidRequestError if a file is empty or beyond the limit."""
    if not num_bytes:
        raise InvalidRequestError(f"is empty: 0 bytes; {ACCEPTED}", path=name)
    if num_bytes > limits.max_bytes:
        raise InvalidRequestError(f"has {num_bytes} bytes; at most {limits.max_bytes} are taken", path=name)


def _check_pixels(size: tuple[int, int], limits: ImageLimits, name: str) -> None:
    width, height = size
    if width * height > limits.max_pixels:
        raise InvalidRequestError(
            f"has {width} x {height} pixels; at most {limits.max_pixels} in all are taken: send it smaller", path=name
        )


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # damaged EXIF data, ignored by viewers, too
        return image


def _rgb(image: Any, name: str) -> Pixels:
    if image.mode not in _MODES | _DEEP:
        raise InvalidRequestError(f"has pixels of mode {image.mode!r}, which have no colours; make it RGB", path=name)
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    is_transparent, rows = image.has_transparency_data, max(1, _AT_ONCE // width)
    for start in range(0, height, rows):
        part = image.crop((0, start, width, min(start + rows, height)))
        if image.mode in _DEEP:
            # Pillow's own conversion clips values above 255 to white.
            grey = np.clip(np.asarray(part), 0, 65535).astype(np.uint32)
            pixels[start : start + rows] = ((grey + 128) // 257).astype(np.uint8)[:, :, None]
        elif is_transparent:
            rgba = np.asarray(part.convert("RGBA")).astype(np.uint32)
            alpha = rgba[:, :, 3:]
            pixels[start : start + rows] = (rgba[:, :, :3] * alpha + _WHITE * (255 - alpha) + 127) // 255
        else:
            pixels[start : start + rows] = np.asarray(part.convert("RGB"))
    return pixels


def _webp_size(content: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP file (RFC 9649, sections 2.5 to 2.7); None for other files."""
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(content) < 30:
        return None
    if content[12:16] == b"VP8X":
        return 1 + int.from_bytes(content[24:27], "little"), 1 + int.from_bytes(content[27:30], "little")
    if content[12:16] == b"VP8L":
        bits = int.from_bytes(content[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(content[26:28], "little") & 0x3FFF, int.from_bytes(content[28:30], "little") & 0x3FFF


def _reason(error: Exception) -> str:
    return (str(error).strip().rstrip(".") or type(error).__name__)[:200]


# Normalisation.


@dataclass(frozen=True)
class Normalisation:
    """``(level * rescale - mean) / std`` in float32, by channel; rounded as transformers' processors with Pillow do."""

    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    rescale: float = 1.0

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """The value of each level, float32 [256, 3]."""
        levels = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)[:, None]
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return np.asarray((levels - mean) / std, np.float32)

    def rows(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """uint8 [..., 3] to float32 [..., 3]."""
        return self.table[pixels, np.arange(3)]


def normalisation_of(settings: ImageSettings) -> Normalisation:
    """Raises ConfigError if a value has the wrong type or is out of range."""
    rescale = settings.number("rescale_factor", 1 / 255) if settings.flag("do_rescale", True) else 1.0
    if not settings.flag("do_normalize", True):
        return Normalisation(rescale=rescale)
    return Normalisation(settings.channels("image_mean"), settings.channels("image_std"), rescale)
