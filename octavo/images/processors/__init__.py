"""The processors of the families that see images, one file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from octavo.core.errors import UnsupportedModelError
from octavo.images.image_settings import ImageSettings, read_settings
from octavo.images.processors.gemma3 import Gemma3Processor, read_gemma3
from octavo.images.processors.idefics3 import Idefics3Processor, read_idefics3
from octavo.images.processors.llava import LlavaProcessor, read_llava
from octavo.images.processors.qwen2_5_vl import Qwen2_5_VLProcessor, read_qwen2_5_vl

#: All that there are; which one it is stands in what msgspec writes of it.
AnyProcessor: TypeAlias = LlavaProcessor | Idefics3Processor | Gemma3Processor | Qwen2_5_VLProcessor

#: By ``model_type`` of config.json.
_READERS: dict[str, Callable[[ImageSettings], AnyProcessor]] = {
    "llava": read_llava,
    "idefics3": read_idefics3,
    "smolvlm": read_idefics3,
    "gemma3": read_gemma3,
    "qwen2_5_vl": read_qwen2_5_vl,
}


def read_image_processor(folder: Path, config: Mapping[str, Any]) -> AnyProcessor:
    """The processor of the model in a folder; ``config``: the content of its config.json.

    Raises:
        ConfigError: a file is missing, or has a value that is of the wrong type, impossible or not supported.
        UnsupportedModelError: no family that sees images.
    """
    family = config.get("model_type")
    read = _READERS.get(str(family))
    if read is None:
        raise UnsupportedModelError(f"images are processed for {', '.join(_READERS)}, not for model_type {family!r}")
    return read(read_settings(folder, config))
