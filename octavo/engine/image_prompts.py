"""Images of prompts: what takes the place of their placeholders, and which tokens stand for features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.request import Feature, PromptImage, TokensPrompt
from octavo.engine.encoder_prompts import NO_FEATURES, PromptFeatures
from octavo.engine.model_files import ModelFiles
from octavo.images.image_files import image_array
from octavo.images.image_reader import ImageReader
from octavo.images.processors import AnyProcessor, ProcessedImage, read_image_processor
from octavo.models.config_files import read_json
from octavo.process.sandbox import Sandbox

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor


class ImagePrompts:
    """Puts the images of one model's prompts in the place of their placeholders."""

    def __init__(self, files: ModelFiles, sandbox: Sandbox) -> None:
        self._reader = ImageReader(sandbox)
        self._files, self._options, self._config = files, files.options, files.model_config
        self._tokenizer = files.tokenizer

    @cached_property
    def processor(self) -> AnyProcessor:
        """What makes pixels and placeholders of an image, by the model's files.

        Raises:
            ConfigError: the files lack something, or ask for what is not supported.
        """
        return read_image_processor(self._files.folder, read_json(self._files.folder / "config.json"))

    @cached_property
    def placeholder_id(self) -> int:
        """The token that a prompt has in place of each image."""
        token = self._tokenizer.convert_tokens_to_ids(self.processor.placeholder)
        if token is None:
            raise ConfigError(
                f"{self._files.folder}: the tokenizer has no token {self.processor.placeholder!r}, which stands for an "
                "image"
            )
        return token

    def read(self, images: Sequence[Any], names: Sequence[str] = ()) -> list[ProcessedImage]:
        """What the model makes of images, in any form that ``expand`` takes; from any thread.

        Bytes of files are decoded in the sandbox, all of them at once as far as it has processes; pixels stay here.
        ``names``: what errors call them.

        Raises:
            InvalidRequestError: there are more than may be, or one is no image.
        """
        self._check_limit(len(images))
        if not names:
            names = ["the image"] if len(images) == 1 else [f"image {i}" for i in range(1, len(images) + 1)]
        begun: list[Future[ProcessedImage] | ProcessedImage] = []
        try:
            for image, name in zip(images, names, strict=True):
                begun.append(self._begin(image, name))
            return [one if isinstance(one, ProcessedImage) else one.result() for one in begun]
        finally:
            for one in begun:
                if not isinstance(one, ProcessedImage):
                    one.cancel()

    def _begin(self, image: Any, name: str) -> Future[ProcessedImage] | ProcessedImage:
        if isinstance(image, ProcessedImage):
            return image
        if isinstance(image, bytes):
            return self._reader.process(image, self.processor, name=name)
        return self.processor.process(image_array(image, name=name))

    def expand(self, token_ids: Sequence[int], images: Sequence[Any]) -> tuple[list[int], PromptFeatures]:
        """The prompt's token ids with each image in the place of its placeholder.

        ``images``: PIL images, arrays uint8 [height, width, 3], the bytes of files, or processed ones.

        Raises:
            InvalidRequestError: there are not as many placeholders as images, or more than may be, or one is no image.
        """
        facts, text = self._config.image_facts, self.processor.placeholder
        assert facts is not None
        self._check_number(token_ids, len(images), text)
        if not images:
            return list(token_ids), NO_FEATURES
        processed = self.read(images)
        ids: list[int] = []
        found = PromptFeatures()
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
            self._add(found, image, ids, self._encoded(inner))
            after = image.expansion[start + len(inner) :]
        ids += self._encoded(after)
        self._check_size(found.images)
        return ids, found

    def _check_number(self, token_ids: Sequence[int], images: int, text: str) -> None:
        places = sum(token == self.placeholder_id for token in token_ids)
        if places != images:
            raise InvalidRequestError(
                f"the prompt has {places} places for images ({text!r}), but {images} images come with it"
            )

    def _check_limit(self, images: int) -> None:
        limit = (self._options.limit_mm_per_prompt or {}).get("image")
        if limit is not None and images > limit:
            raise InvalidRequestError(
                f"the prompt has {images} images, but may have at most {limit}: the option limit_mm_per_prompt"
            )

    def _check_size(self, images: Sequence[PromptImage]) -> None:
        size, limit = sum(image.size for image in images), self._options.image_cache_bytes
        if size > limit:
            raise InvalidRequestError(
                f"the features of the prompt's {len(images)} images take {size} bytes, but there is room for {limit}: "
                "the option image_cache_bytes"
            )

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _newlines(self, token: int) -> str:
        """The text of a token that is made of ends of lines only: those beside an image may be one token with its own;
        else "".
        """
        text = self._newline_tokens.get(token)
        if text is None:
            decoded = self._tokenizer.decode([token], skip_special_tokens=False)
            text = self._newline_tokens[token] = decoded if decoded and not decoded.strip("\n") else ""
        return text

    @cached_property
    def _newline_tokens(self) -> dict[int, str]:
        return {}

    def _add(self, found: PromptFeatures, image: ProcessedImage, ids: list[int], expansion: list[int]) -> None:
        """Appends an image's tokens, and a feature for each run of those that stand for one."""
        facts = self._config.image_facts
        assert facts is not None
        prompt_image = image.image.for_prompt(image.num_features, self._config.hidden_size)
        if all(other.key != prompt_image.key for other in found.images):
            found.images.append(prompt_image)
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
            found.features.append(
                Feature(len(ids) + begin, length, key, prompt_image.key, first, facts.is_whole, image.grid)
            )
            first += length
        ids += expansion


# Conversations with images as prompts, for ``LLM.chat`` and the command line.

#: Types of parts that are images -> the key that has the image.
_KEYS = {"image": "image", "image_pil": "image_pil", "image_url": "image_url"}


def chat_prompt(inputs: InputProcessor, messages: Sequence[Mapping[str, Any]], **options: Any) -> TokensPrompt:
    """The prompt of a conversation, with the tokens of its images.

    Args:
        inputs: the model's.
        messages: as for ``render_chat``. A part with an image is ``{"type": "image", "image": ...}`` (one of PIL, an
            array uint8 [height, width, 3], or the bytes of a file), vLLM's ``{"type": "image_pil", "image_pil": ...}``,
            or ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}``.
        options: keywords of ``Tokenizer.apply_chat_template``.

    Raises:
        InvalidRequestError: the template refuses the conversation, or an image cannot be read.
    """
    prompts = inputs.image_prompts
    if prompts is None:
        text = inputs.tokenizer.apply_chat_template(messages, **options)
        return TokensPrompt(prompt=text, prompt_token_ids=inputs.tokenizer.encode(text, add_special_tokens=False))
    plain, images = _take_images(messages)
    placeholder = prompts.processor.placeholder
    text = inputs.tokenizer.apply_chat_template(plain, image_placeholder=placeholder, **options)
    ids, features = prompts.expand(inputs.tokenizer.encode(text, add_special_tokens=False), images)
    return TokensPrompt(prompt=text, prompt_token_ids=ids, multi_modal_data={"image": features})


def _take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Messages whose images are parts ``{"type": "image"}``, and the images."""
    plain: list[Any] = []
    images: list[Any] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            plain.append(message)
            continue
        parts: list[Any] = []
        for k, part in enumerate(content):
            key = _KEYS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
            if key is not None:
                images.append(_image(part, key, f"messages[{i}].content[{k}]"))
            parts.append(part if key is None else {"type": "image"})
        plain.append({**message, "content": parts})
    return plain, images


def _image(part: Mapping[str, Any], key: str, where: str) -> Any:
    value = part.get(key)
    if value is None:
        raise InvalidRequestError(f"{where}: a part of type {part['type']!r} must have its image as {key!r}")
    if key != "image_url":
        return value
    from octavo.images.image_sources import read_data_url

    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise InvalidRequestError(f"{where}.image_url must have a url, which is a text, not {url!r:.100}")
    return read_data_url(url, name=f"{where}.image_url")
