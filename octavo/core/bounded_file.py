"""Files of bounded size."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.core.errors import ConfigError, OctavoError


def read_bounded(path: Path, most: int, error: type[OctavoError] = ConfigError) -> bytes:
    """The content of a file of at most ``most`` bytes.

    Raises:
        OctavoError: of type ``error``; it is missing, cannot be read, or has more bytes.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
            size = max(len(data), os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise error(f"{path} is missing") from None
    except OSError as e:
        raise error(f"{path} cannot be read: {e.strerror}") from None
    if len(data) > most:
        raise error(f"{path} has {size} bytes; at most {most} are read")
    return data
