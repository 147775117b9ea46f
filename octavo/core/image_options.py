"""The options of images in prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field

from octavo.core.image_input import DEFAULT_IMAGE_CACHE
from octavo.core.option_part import OptionPart, read_mapping


def _limits(value: Any) -> Any:
    return read_mapping(value, '{"image": 4}') or None


class ImageOptions(OptionPart):
    """Images in prompts, of models that see them."""

    limit_mm_per_prompt: Annotated[
        dict[Literal["image", "video", "audio"], Annotated[int, Field(ge=0)]] | None, BeforeValidator(_limits)
    ] = Field(
        None,
        description='Most images of a prompt, as JSON: {"image": 4}; 0: none is taken. Default: as many as fit into '
        "the context and image_cache_bytes. Of video and audio, which vLLM's scripts name here, none is taken anyway.",
    )
    image_cache_bytes: ByteSize = Field(
        ByteSize(DEFAULT_IMAGE_CACHE),
        ge=1 << 20,
        description="Host memory of each worker for features of images, in bytes or with a unit (512MiB): those of "
        "prompts that run or come next, and of the latest others, so that an image which comes again is not computed "
        "again.",
    )
    image_step_ms: float = Field(
        50.0,
        gt=0,
        allow_inf_nan=False,
        description="Most milliseconds of a step that are spent on the features of images, beside its tokens, so that "
        "images do not stall decodes; at least one operation is computed. On a GPU a piece of an image is computed at "
        "once.",
    )
