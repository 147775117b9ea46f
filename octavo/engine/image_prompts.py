"""Images of prompts: replaces their placeholders by tokens, and notes which tokens stand for features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.model_config import ModelConfig
from octavo.core.request import Feature, PromptImage, TokensPrompt
from octavo.engine.model_files import ModelFiles
from octavo.models.config_files import read_json
from octavo.process.sandbox import Sandbox

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor
    from octavo.images.processors import AnyProcessor, ProcessedImage

# Modules of ``octavo.images`` need numpy and are imported in functions: models without images do without them.


#: Texts before and after an image, by family; a template that writes images writes them too.
_AROUND = dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), ("<|vision_start|>", "<|vision_end|>"))


class ImagePrompts:
    """Replaces the image placeholders in prompts of one model."""

    def __init__(self, files: ModelFiles, sandbox: Sandbox) -> None:
        from octavo.images.image_reader import ImageReader

        self._reader = ImageReader(sandbox)
        self._files, self._options, self._config = files, files.options, files.model_config
        self._tokenizer = files.tokenizer
        self._newline_tokens: dict[int, str] = {}

    @cached_property
    def processor(self) -> AnyProcessor:
        from octavo.images.processors import read_image_processor

        return read_image_processor(self._files.folder, read_json(self._files.folder / "config.json"))

    @cached_property
    def text_placeholder(self) -> str:
        """What stands for an image in a conversation whose template writes texts only, as in llama.cpp."""
        facts = self._config.image_facts
        around = _AROUND.get("" if facts is None else facts.family, ("", ""))
        are_tokens = all(self._tokenizer.convert_tokens_to_ids(text) is not None for text in around if text)
        return self.processor.placeholder.join(around if are_tokens else ("", ""))

    @cached_property
    def placeholder_id(self) -> int:
        token = self._tokenizer.convert_tokens_to_ids(self.processor.placeholder)
        if token is None:
            raise ConfigError(
                f"{self._files.folder}: the tokenizer has no token {self.processor.placeholder!r}, which stands for an "
                "image"
            )
        return token

    def check_number(self, number: int) -> None:
        limit = (self._options.limit_mm_per_prompt or {}).get("image")
        if limit is not None and number > limit:
            problem = f"has {number} images, but may have at most {limit}: the option limit_mm_per_prompt"
            raise InvalidRequestError(problem, path="prompt")

    def read(self, images: Sequence[Any], names: Sequence[str] = ()) -> list[ProcessedImage]:
        """Processes images, in any form that ``expand`` takes; from any thread.

        Files are decoded in the sandbox, in parallel. ``names``: of the images, for errors.
        """
        from octavo.images.image_files import image_array
        from octavo.images.processors import ProcessedImage

        self.check_number(len(images))
        if not names:
            names = ["the image"] if len(images) == 1 else [f"image {i}" for i in range(1, len(images) + 1)]
        results: list[Future[ProcessedImage] | ProcessedImage] = []
        try:
            for image, name in zip(images, names, strict=True):
                if isinstance(image, ProcessedImage):
                    results.append(image)
                elif isinstance(image, bytes):
                    results.append(self._reader.process(image, self.processor, name=name))
                else:
                    results.append(self.processor.process(image_array(image, name=name)))
            return [result.result() if isinstance(result, Future) else result for result in results]
        finally:
            for result in results:
                if isinstance(result, Future):
                    result.cancel()

    def expand(self, token_ids: Sequence[int], images: Sequence[Any]) -> tuple[list[int], PromptFeatures]:
        """Replaces the placeholders of a prompt by the tokens of its images.

        ``images``: PIL images, arrays uint8 [height, width, 3], bytes of files, or processed images.

        Raises:
            InvalidRequestError: there are more or fewer placeholders, too many images, or one cannot be read.
        """
        facts, text = self._config.image_facts, self.processor.placeholder
        assert facts is not None
        places = sum(token == self.placeholder_id for token in token_ids)
        if places != len(images):
            raise InvalidRequestError(
                f"has {places} places for images ({text!r}), but {len(images)} images come with it", path="prompt"
            )
        if not images:
            return list(token_ids), NO_FEATURES
        processed = self.read(images)
        ids: list[int] = []
        prompt_features = PromptFeatures()
        waiting = iter(processed)
        after = ""
        for token in token_ids:
            if token != self.placeholder_id:
                if after and (spaces := self._newlines(token)):
                    after += spaces
                    continue
                ids += self._encoded(after)
                after = ""
                ids.append(token)
                continue
            image = next(waiting)
            inner = image.expansion.strip("\n")
            start = image.expansion.index(inner)
            before = after + image.expansion[:start]
            while before and ids and (spaces := self._newlines(ids[-1])):
                before = spaces + before
                ids.pop()
            ids += self._encoded(before)
            self._add(prompt_features, image, ids, self._encoded(inner))
            after = image.expansion[start + len(inner) :]
        ids += self._encoded(after)
        count, size = len(prompt_features.images), sum(image.size for image in prompt_features.images)
        if size > self._options.image_cache_bytes:
            raise InvalidRequestError(
                f"the features of the prompt's {count} images take {size} bytes, but there is room for "
                f"{self._options.image_cache_bytes}: the option image_cache_bytes",
                path="prompt",
            )
        return ids, prompt_features

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _newlines(self, token: int) -> str:
        """The text of a token that is made of line breaks only, else "". Beside an image such tokens are merged."""
        text = self._newline_tokens.get(token)
        if text is None:
            decoded = self._tokenizer.decode([token], skip_special_tokens=False)
            text = self._newline_tokens[token] = decoded if decoded and not decoded.strip("\n") else ""
        return text

    def _add(self, features: PromptFeatures, image: ProcessedImage, ids: list[int], expansion: list[int]) -> None:
        """Appends an image's tokens, and a ``Feature`` for each run of tokens that stand for features."""
        import numpy as np

        facts = self._config.image_facts
        assert facts is not None
        prompt_image = image.image.for_prompt(image.num_features, facts.vectors * self._config.hidden_size)
        if all(other.key != prompt_image.key for other in features.images):
            features.images.append(prompt_image)
        is_feature = np.array(expansion) == facts.token_id
        count = int(is_feature.sum())
        if count != image.num_features:
            raise ConfigError(
                f"{self._files.folder}: an image has {image.num_features} features, but its text has {count} tokens "
                f"{facts.token_id}, which stand for them"
            )
        edges = np.flatnonzero(np.diff(np.concatenate(([0], is_feature.view(np.int8), [0]))))
        first = 0
        for begin, end in edges.reshape(-1, 2).tolist():
            key = f"{prompt_image.key}/{first}".encode()
            length = end - begin
            features.features.append(
                Feature(len(ids) + begin, length, key, prompt_image.key, first, facts.is_whole, image.grid)
            )
            first += length
        ids += expansion


@dataclass
class PromptFeatures:
    """A prompt's distinct images, and the token runs that stand for their features, by offset."""

    images: list[PromptImage] = field(default_factory=list)
    features: list[Feature] = field(default_factory=list)

    def shifted(self, tokens: int) -> list[Feature]:
        """The features, shifted by ``tokens`` virtual tokens before the prompt."""
        if not tokens:
            return self.features
        return [
            Feature(f.offset + tokens, f.length, f.key, f.image, f.first, f.is_whole, f.grid) for f in self.features
        ]


NO_FEATURES = PromptFeatures()


def take_images(prompt: Any) -> tuple[Any, list[Any] | PromptFeatures]:
    """Separates images from a prompt; they may be expanded already."""
    if not isinstance(prompt, Mapping) or prompt.get("multi_modal_data") is None:
        return prompt, []
    data = prompt["multi_modal_data"]
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        kinds = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise InvalidRequestError(f"must be a dictionary with 'image' alone, not {kinds}", path="multi_modal_data")
    rest = {key: value for key, value in prompt.items() if key != "multi_modal_data"}
    images = data.get("image")
    if isinstance(images, PromptFeatures):
        return rest, images
    return rest, list(images) if isinstance(images, list | tuple) else [] if images is None else [images]


def takes_images(config: ModelConfig, options: EngineConfig) -> bool:
    limit = (options.limit_mm_per_prompt or {}).get("image")
    return config.image_facts is not None and limit != 0


# Conversations with images, for ``LLM.chat`` and the command line

#: Types of image parts; the image has the same key.
_IMAGE_PARTS = ("image", "image_pil", "image_url")


def chat_prompt(inputs: InputProcessor, messages: Sequence[Mapping[str, Any]], **options: Any) -> TokensPrompt:
    """Renders a conversation with images to a prompt.

    Args:
        messages: as for ``render_chat``. An image part is ``{"type": "image", "image": ...}`` (a PIL image, an array
        uint8
            [height, width, 3], or bytes of a file), vLLM's ``{"type": "image_pil", "image_pil": ...}``, or
            ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}``.
        options: keywords of ``Tokenizer.apply_chat_template``.

    Raises:
        InvalidRequestError: the template refuses the conversation, or an image cannot be read.
    """
    prompts = inputs.image_prompts
    if prompts is None:
        text = inputs.tokenizer.apply_chat_template(messages, **options)
        return TokensPrompt(prompt=text, prompt_token_ids=inputs.tokenizer.encode(text, add_special_tokens=False))
    plain, parts = split_images(messages)
    images = [_image(part, path) for path, part in parts.items()]
    placeholder = prompts.text_placeholder
    text = inputs.tokenizer.apply_chat_template(plain, image_placeholder=placeholder, **options)
    ids, features = prompts.expand(inputs.tokenizer.encode(text, add_special_tokens=False), images)
    return TokensPrompt(prompt=text, prompt_token_ids=ids, multi_modal_data={"image": features})


def split_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], dict[str, Mapping[str, Any]]]:
    """The messages with marks in place of their image parts, and these parts by their paths."""
    plain: list[Any] = []
    images: dict[str, Mapping[str, Any]] = {}
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            plain.append(message)
            continue
        parts: list[Any] = []
        for k, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _IMAGE_PARTS:
                images[f"messages[{i}].content[{k}]"] = part
            parts.append({"type": "image"} if kind in _IMAGE_PARTS else part)
        plain.append({**message, "content": parts})
    return plain, images


def _image(part: Mapping[str, Any], where: str) -> Any:
    key = part["type"]
    value = part.get(key)
    if value is None:
        raise InvalidRequestError(f"a part of type {part['type']!r} must have its image as {key!r}", path=where)
    if key != "image_url":
        return value
    from octavo.images.image_sources import read_data_url

    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise InvalidRequestError("must have a url, which is a text", path=f"{where}.image_url", got=url)
    return read_data_url(url, name=f"{where}.image_url")
