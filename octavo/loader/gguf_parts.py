"""Names of the files of a GGUF model that is split; imports nothing that would slow down a start."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
#: Most files of a split model.
_MAX_PARTS = 1024


def split_paths(path: Path) -> list[Path]:
    """All files of the model that the name of one of them, ``NAME-00001-of-00003.gguf``, belongs to, in order."""
    match = _NAME.fullmatch(path.name)
    if match is None or not 0 < int(match[2]) <= int(match[3]) <= _MAX_PARTS:
        return [path]
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]
