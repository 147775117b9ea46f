"""What prompts have of images, for models that see and for those that do not: without what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.core.config import EngineConfig
from octavo.core.errors import InvalidRequestError
from octavo.core.image_input import PromptImage
from octavo.core.model_config import ModelConfig
from octavo.core.request import Feature


@dataclass
class PromptFeatures:
    """A prompt's images, each once, and the tokens that stand for their features, in the order of their offsets."""

    images: list[PromptImage] = field(default_factory=list)
    features: list[Feature] = field(default_factory=list)

    def moved(self, tokens: int) -> list[Feature]:
        """The features where so many tokens come before the prompt."""
        if not tokens:
            return self.features
        return [
            Feature(f.offset + tokens, f.length, f.key, f.image, f.first, f.is_whole, f.grid) for f in self.features
        ]


#: Of a prompt without images.
NO_FEATURES = PromptFeatures()


def take_images(prompt: Any) -> tuple[Any, list[Any] | PromptFeatures]:
    """A prompt without its images, and these; or what ``ImagePrompts.expand`` has made of them already.

    Raises:
        InvalidRequestError: ``multi_modal_data`` has something else.
    """
    if not isinstance(prompt, Mapping) or prompt.get("multi_modal_data") is None:
        return prompt, []
    data = prompt["multi_modal_data"]
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        kinds = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise InvalidRequestError(f"multi_modal_data must be a dictionary with 'image' alone, not {kinds}")
    given = data.get("image")
    if isinstance(given, PromptFeatures):
        return {key: value for key, value in prompt.items() if key != "multi_modal_data"}, given
    images = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    return {key: value for key, value in prompt.items() if key != "multi_modal_data"}, images


def takes_images(config: ModelConfig, options: EngineConfig) -> bool:
    """Whether prompts may have images."""
    limit = (options.limit_mm_per_prompt or {}).get("image")
    return config.image_facts is not None and limit != 0
