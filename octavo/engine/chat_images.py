"""Conversations with images as prompts, for ``LLM.chat`` and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.errors import InvalidRequestError
from octavo.core.prompts import TokensPrompt
from octavo.engine.input_processor import InputProcessor

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
