"""The tokenizer of a folder with vocab.txt: WordPiece, as BERT and its relatives were published."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.core.errors import TokenizerError
from octavo.loader.tokenizer_parts import read_bytes, surround, token_text

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
    try:
        lines = read_bytes(file).decode("utf-8").split("\n")
    except UnicodeDecodeError as e:
        raise TokenizerError(f"{file} is not UTF-8: {e}") from e
    tokens = [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError(f"{file} has a token twice")
    named = {name: token_text(config.get(name)) or default for name, default in _SPECIAL.items()}
    needed = (named[name] for name in ("unk_token", "sep_token", "cls_token"))
    if missing := [token for token in needed if token not in vocab]:
        raise TokenizerError(f"{file} has no token {missing[0]!r}, which stands around texts or for unknown words")
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=named["unk_token"], max_input_chars_per_word=100))
    lowercase, accents = config.get("do_lower_case", True) is not False, config.get("strip_accents")
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase,
        strip_accents=accents if isinstance(accents, bool) else None,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True) is not False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    kept = [token for token in named.values() if token in vocab]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in kept])
    surround(tokenizer, [named["cls_token"]], [named["sep_token"]], between=[])
    return tokenizer, {**named, **{key: value for key, value in config.items() if value is not None}}
