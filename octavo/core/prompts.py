"""The forms of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from octavo.core.encoder_input import EncoderInput


class TextPrompt(TypedDict):
    """A prompt given as text."""

    prompt: str
    #: Requests with different salts share no cached prefix.
    cache_salt: NotRequired[str]
    #: ``{"image": image}``, or a list of images, of models that see them: each in the place of a placeholder. An image
    #: is one of PIL, an array uint8 [height, width, 3], or the bytes of a file.
    multi_modal_data: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt given as token ids. A ``prompt`` beside them is the text that outputs show; the ids are what counts."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """A prompt of an encoder-decoder model: what its encoder reads, and what its decoder begins with.

    Each is a text, token ids, or one of these as a dictionary; of a model that reads sound the first is
    ``{"multi_modal_data": {"audio": (samples, rate)}}``. Without the second the decoder begins as the model's do.
    """

    encoder_prompt: Any
    decoder_prompt: NotRequired[Any]
    cache_salt: NotRequired[str]


class SplitPrompt(TypedDict):
    """A prompt of an encoder-decoder model as it is checked and made of ``ExplicitEncoderDecoderPrompt`` or others."""

    #: The decoder's, with the start token; and its text, if it was given as text.
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    encoder_input: NotRequired[EncoderInput]
    encoder_prompt: NotRequired[str | None]
    cache_salt: NotRequired[str]
    #: Tokens at the end of ``prompt_token_ids`` that the model's answers begin with in any case.
    num_forced: int


def num_prompt_tokens(prompt: Mapping[str, Any]) -> int:
    """Tokens of a tokenized prompt; with those of the encoder's input, if it has one."""
    given = prompt.get("encoder_input")
    return len(prompt["prompt_token_ids"]) + (0 if given is None else given.num_tokens)


#: One prompt: text, token ids, or one of these as a dictionary (see ``TextPrompt``, ``TokensPrompt``); of an
#: encoder-decoder model both parts of it, too.
Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | ExplicitEncoderDecoderPrompt | Mapping[str, Any]

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

_TEXT_ALONE = "the model takes text alone"
#: Keys of other engines, which may be None, and why they may not be anything else.
FOREIGN_KEYS = {
    "multi_modal_data": _TEXT_ALONE,
    "multi_modal_uuids": "images are named by their content",
    "mm_processor_kwargs": "the model's own files say how images are processed",
    "token_type_ids": _TEXT_ALONE,
    "prompt_embeds": "prompts are text or token ids",
    "encoder_prompt": "the model has a decoder alone",
    "decoder_prompt": "the model has a decoder alone",
}
