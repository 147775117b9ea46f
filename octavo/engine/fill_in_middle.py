"""Prompts that ask for the text of a gap, in the order and with the tokens that a model was trained on.

Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle", section 3: prefix, suffix and
middle, each behind a token of its own (PSM).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import tokenizers

from octavo.core.errors import InvalidRequestError


class _Names(NamedTuple):
    """The tokens of a family of models by name. Without ``middle`` the suffix comes first, and the middle follows the
    prefix (SPM)."""

    prefix: str
    suffix: str
    middle: str | None


_FAMILIES = (
    _Names("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Stable Code, Yi-Coder
    _Names("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Names("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, Granite 4
    _Names("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM, CodeGeeX
    _Names("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (DeepSeek Coder)
    _Names("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    _Names("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
#: Tokens with which models of these families end a middle, beside the end-of-sequence token: the end of a middle or of
#: a file, and what only opens the next one.
_ENDS = (
    "▁<EOT>", "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<file_sep>", "<|file_separator|>",
    "<|repo_name|>", "<repo_name>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """The token ids of a model for this."""

    prefix: int
    suffix: int
    middle: int | None
    #: Tokens that end the middle.
    ends: tuple[int, ...]

    def arrange(self, prefix: list[int], suffix: list[int]) -> list[int]:
        """The prompt whose continuation is what stands between the texts of these token ids."""
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]


def find_fill_in_middle(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> FillInMiddle | None:
    """The tokens of a model that fills gaps: those that its files name, else those of a family that is known.

    Args:
        backend: the tokenizer.
        config: the content of tokenizer_config.json, where ``fim_tokens`` are those that a GGUF file names.
    """
    named = config.get("fim_tokens")
    families = [*_FAMILIES]
    if isinstance(named, dict) and all(isinstance(named.get(k), str) for k in _Names._fields):
        families.insert(0, _Names(**{k: named[k] for k in _Names._fields}))
    find = backend.token_to_id
    for names in families:
        prefix, suffix, middle = find(names.prefix), find(names.suffix), find(names.middle) if names.middle else None
        if prefix is not None and suffix is not None and (middle is None) == (names.middle is None):
            ends = [token for name in _ENDS if (token := find(name)) is not None]
            return FillInMiddle(prefix, suffix, middle, tuple(ends))
    return None


def no_fill_in_middle() -> InvalidRequestError:
    """The error for a model without such tokens."""
    return InvalidRequestError("suffix is not supported by this model: its vocabulary has no tokens to fill gaps with")
