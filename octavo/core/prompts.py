"""The forms of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt given as text."""

    prompt: str
    #: Requests with different salts share no cached prefix.
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt given as token ids. A ``prompt`` beside them is the text that outputs show; the ids are what counts."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


#: One prompt: text, token ids, or one of these as a dictionary (see ``TextPrompt``, ``TokensPrompt``).
Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

_TEXT_ALONE = "the model takes text alone"
#: Keys of other engines, which may be None, and why they may not be anything else.
FOREIGN_KEYS = {
    "multi_modal_data": _TEXT_ALONE,
    "multi_modal_uuids": _TEXT_ALONE,
    "mm_processor_kwargs": _TEXT_ALONE,
    "token_type_ids": _TEXT_ALONE,
    "prompt_embeds": "prompts are text or token ids",
    "encoder_prompt": "models have a decoder alone",
    "decoder_prompt": "models have a decoder alone",
}
