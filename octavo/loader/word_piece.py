"""The tokenizer of a folder with vocab.txt: WordPiece, as BERT and its relatives were published."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from octavo.core.errors import TokenizerError
from octavo.loader.tokenizer_parts import read_lines, surround, token_text, word_piece

_SPECIAL = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def word_piece_file(folder: Path) -> Path | None:
    """The vocabulary, if the folder has one."""
    file = folder / "vocab.txt"
    return file if file.is_file() else None


def build_word_piece(file: Path, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a vocabulary with a token a line, and ``config`` with the special tokens that it does not name.

    Args:
        file: vocab.txt.
        config: the content of tokenizer_config.json and special_tokens_map.json.

    Raises:
        TokenizerError: it is damaged, or lacks a special token.
    """
    tokens = read_lines(file)
    named = {name: token_text(config.get(name)) or default for name, default in _SPECIAL.items()}
    needed = (named[name] for name in ("unk_token", "sep_token", "cls_token"))
    if missing := [token for token in needed if token not in tokens]:
        raise TokenizerError(f"{file} has no token {missing[0]!r}, which stands around texts or for unknown words")
    accents = config.get("strip_accents")
    tokenizer = word_piece(
        file,
        tokens,
        unknown=named["unk_token"],
        lowercase=config.get("do_lower_case", True) is not False,
        strip_accents=accents if isinstance(accents, bool) else None,
        splits_chinese=config.get("tokenize_chinese_chars", True) is not False,
    )
    kept = [token for token in named.values() if token in tokens]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in kept])
    surround(tokenizer, [named["cls_token"]], [named["sep_token"]], between=[])
    return tokenizer, {**named, **{key: value for key, value in config.items() if value is not None}}
