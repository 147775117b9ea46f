"""Images for tests, and files of them."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def scene(height: int, width: int) -> np.ndarray:
    """Slopes, edges and a fine pattern, as photos and screens have them; uint8 [height, width, 3]."""
    y, x = np.mgrid[0:height, 0:width]
    red = 255 * x / max(width - 1, 1)
    green = np.where((y // 7 + x // 5) % 2 == 0, 255, 0)
    blue = 127.5 + 127.5 * np.sin(x * y / 50)
    return np.stack([red, green, blue], axis=2).round().astype(np.uint8)


def file_of(image: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, kind, **options)
    return stream.getvalue()


def bomb(side: int = 100_000) -> bytes:
    """A png that says that it has ``side`` squared pixels, in about 2 kB."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    lines = zlib.compress(bytes(2_000_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def webp_bomb(side: int = 1 << 24) -> bytes:
    """A webp whose canvas is said to have ``side`` squared pixels."""
    size = (side - 1).to_bytes(3, "little")
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + bytes(4) + size * 2 + bytes(32)
    return b"RIFF" + struct.pack("<I", len(body)) + body
