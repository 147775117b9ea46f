"""Files of images that commands are given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.core.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor
    from octavo.images.processor import ProcessedImage


def check_image_files(paths: Sequence[str]) -> None:
    """Refuses files that are not there, and images where Pillow is not installed, before a model is fetched.

    Raises:
        ConfigError: see above.
    """
    if not paths:
        return
    for path in paths:
        try:
            Path(path).expanduser().open("rb").close()
        except OSError as e:
            raise ConfigError(f"the image {path} cannot be read: {e.strerror}") from None
    from octavo.images.pillow import pillow

    pillow()


def read_images(inputs: InputProcessor, paths: Sequence[str]) -> list[ProcessedImage]:
    """What a model makes of files.

    Raises:
        ConfigError: the model sees no images, or a file cannot be read, or is no image that the model can take.
    """
    prompts = inputs.image_prompts
    if prompts is None and paths:
        raise ConfigError(f"the model reads text alone: leave out the image {paths[0]}")
    contents = []
    for path in paths:
        try:
            contents.append(Path(path).expanduser().read_bytes())
        except OSError as e:
            raise ConfigError(f"the image {path} cannot be read: {e.strerror}") from None
    if prompts is None or not contents:
        return []
    try:
        return prompts.read(contents, paths)
    except InvalidRequestError as e:
        raise ConfigError(str(e)) from None
