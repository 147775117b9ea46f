"""Files of bounded size."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.core.errors import ConfigError, OctavoError

# Bytes of one read: a read allocates what it asks for, and most files are far smaller than what they may be.
_PART = 1 << 16


def read_bounded(path: Path, most: int, error: type[OctavoError] = ConfigError) -> bytes:
    """The content of a file of at most ``most`` bytes.

    Raises:
        OctavoError: of type ``error``; it is missing, cannot be read, or has more bytes.
    """
    try:
        with path.open("rb") as file:
            data = bytearray()
            while len(data) <= most and (part := file.read(min(_PART, most + 1 - len(data)))):
                data += part
            size = max(len(data), os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise error(f"{path} is missing: there is no such file") from None
    except OSError as e:
        raise error(f"{path} cannot be read: {e.strerror}") from None
    if len(data) > most:
        raise error(f"{path} has {size} bytes; at most {most} are read")
    return bytes(data)
