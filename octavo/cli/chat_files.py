"""Conversations as files: JSON with ``messages`` as the OpenAI API has them; images are named by their address."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

import msgspec

from octavo.core.bounded_file import read_bounded
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor

MAX_BYTES, MAX_MESSAGES = 16 << 20, 10_000


class _Address(msgspec.Struct):
    url: str


class _Image(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: _Address


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _Message(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    content: str | list[_Text | _Image]


class _Saved(msgspec.Struct):
    messages: list[_Message]
    #: For the reader; any model may go on.
    model: str = ""


def save(path: Path, model: str, messages: list[dict[str, Any]]) -> None:
    """Writes a conversation, which its user alone may read; one that was saved there before is replaced.

    Raises:
        ConfigError: the file is something else, or cannot be written.
    """
    if path.exists():
        try:
            _read(path)
        except ConfigError:
            raise ConfigError(f"{path} is there and is no saved conversation; choose another name") from None
    data = msgspec.json.format(msgspec.json.encode(_Saved([_saved(message) for message in messages], model)))
    if len(data) > MAX_BYTES:
        raise ConfigError(f"the conversation has {len(data)} bytes as a file; at most {MAX_BYTES} can be loaded")
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data + b"\n")
        partial.replace(path)
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}") from None


def load(path: Path, inputs: InputProcessor) -> list[dict[str, Any]]:
    """The messages of a conversation, with its images as the model takes them: a system message may come first, then
    questions and answers alternate, and an answer is last.

    Raises:
        ConfigError: the file cannot be read, is too large or no such conversation, or has an image that is missing.
    """
    messages = _read(path).messages
    if len(messages) > MAX_MESSAGES:
        raise ConfigError(f"{path} has {len(messages)} messages; at most {MAX_MESSAGES} are loaded")
    first = int(bool(messages) and messages[0].role == "system")
    for i, message in enumerate(messages[first:]):
        wanted = ("user", "assistant")[i % 2]
        if message.role != wanted:
            raise ConfigError(f"{path}: message {first + i + 1} must be of the {wanted}, not of the {message.role}")
    if (len(messages) - first) % 2:
        raise ConfigError(f"{path}: the last question has no answer")
    return [_loaded(message, f"{path}: message {i}", inputs) for i, message in enumerate(messages, 1)]


def _read(path: Path) -> _Saved:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ConfigError(f"{path} is no file")
    data = read_bounded(path, MAX_BYTES)
    try:
        return msgspec.json.decode(data, type=_Saved)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ConfigError(f"{path} is no saved conversation: {e}") from None


def _saved(message: dict[str, Any]) -> _Message:
    content = message["content"]
    if not isinstance(content, str):
        content = [
            _Text(part["text"]) if part["type"] == "text" else _Image(_Address(Path(part["path"]).as_uri()))
            for part in content
        ]
    return _Message(message["role"], content)


def _loaded(message: _Message, where: str, inputs: InputProcessor) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    if message.role != "user":
        raise ConfigError(f"{where}: only a question has parts")
    parts = [part for image in message.content if isinstance(image, _Image) for part in _image(image, where, inputs)]
    texts = [part.text for part in message.content if isinstance(part, _Text)]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "\n".join(texts)}]}


def _image(image: _Image, where: str, inputs: InputProcessor) -> list[dict[str, Any]]:
    url = urlsplit(image.image_url.url)
    if url.scheme != "file" or url.netloc:
        raise ConfigError(f"{where}: the address of an image must begin with file:///, not {image.image_url.url!r:.80}")
    return image_parts(unquote(url.path), inputs)


def image_parts(name: str, inputs: InputProcessor) -> list[dict[str, Any]]:
    """The part of a message that is the image in this file, as a list.

    Raises:
        ConfigError: it cannot be read, or the model sees no images.
    """
    from octavo.cli.image_files import read_images

    path = Path(name).expanduser().absolute()
    if path.exists() and not path.is_file():
        raise ConfigError(f"the image {name} is no file")
    return [{"type": "image", "image": image, "path": str(path)} for image in read_images(inputs, [name])]
