"""How a file of CTranslate2 is recognised; imports nothing that would slow down a start."""

from __future__ import annotations

import struct
from pathlib import Path

#: Of the weights in a folder.
MODEL_NAME = "model.bin"
#: A longer text at the file's beginning is no name of a kind of model, and a larger number no version.
_MAX_SPEC = 64
_MAX_VERSION = 255


def is_ctranslate2(path: Path) -> bool:
    """Whether a file begins as one of CTranslate2's does."""
    try:
        with path.open("rb") as file:
            start = file.read(6)
            if len(start) < 6:
                return False
            version, length = struct.unpack("<IH", start)
            spec = file.read(length) if length <= _MAX_SPEC else b""
    except OSError:
        return False
    return version <= _MAX_VERSION and len(spec) == length > 4 and spec.endswith(b"Spec\0")
