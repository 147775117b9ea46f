"""The tokenizer of a folder as the library ``tokenizers`` has it, with its special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from octavo.core.errors import TokenizerError
from octavo.loader.marian_tokenizer import build_marian, has_marian_files
from octavo.loader.tokenizer_files import build_tokenizer, tokenizer_files
from octavo.loader.tokenizer_parts import read_object, token_text
from octavo.loader.word_piece import build_word_piece, word_piece_file

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer of a folder: tokenizer.json, else what ``build_tokenizer`` makes of the files of its family.

    Returns:
        With it, the content of tokenizer_config.json and special_tokens_map.json.

    Raises:
        TokenizerError: there is none, or a file cannot be understood.
        UnsupportedModelError: there is no tokenizer.json, and the family of the other files is not known.
    """
    path, config = folder / "tokenizer.json", _read_config(folder)
    if path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises plain Exception
            raise TokenizerError(f"{path} cannot be read: {e}") from e
    elif has_marian_files(folder):
        backend, config = build_marian(folder, config, "target")
    elif (vocabulary := word_piece_file(folder)) is not None:
        backend, config = build_word_piece(vocabulary, config)
    elif tokenizer_files(folder):
        backend, config = build_tokenizer(folder, config)
    else:
        there = sorted(p.name for p in folder.glob("*token*")) if folder.is_dir() else []
        found = f"there is {', '.join(there)}" if there else "and no other tokenizer"
        raise TokenizerError(
            f"{folder} has no tokenizer.json ({found}), nor vocab.json with merges.txt, vocab.txt, "
            "tokenizer.model, spiece.model, *.tiktoken, or source.spm and target.spm with vocab.json; "
            "transformers writes one with AutoTokenizer.from_pretrained(...).save_pretrained(folder); "
            "measurements with load_format='dummy' need none"
        )
    complete_backend(backend, config)
    return backend, config


def load_source_backend(folder: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer of what an encoder reads, where that is not the one of what the decoder writes.

    Raises:
        TokenizerError, UnsupportedModelError: as for ``load_backend``.
    """
    if (folder / "tokenizer.json").is_file() or not has_marian_files(folder):
        return None
    backend, config = build_marian(folder, _read_config(folder), "source")
    complete_backend(backend, config)
    return backend


def has_tokenizer(folder: Path) -> bool:
    """Whether ``load_backend`` finds files to read in a folder."""
    files = has_marian_files(folder) or word_piece_file(folder) or tokenizer_files(folder)
    return (folder / "tokenizer.json").is_file() or bool(files)


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, and what special_tokens_map.json has beside it."""
    config = read_object(folder / "tokenizer_config.json")
    for name, value in read_object(folder / "special_tokens_map.json").items():
        config.setdefault(name, value)
    return config


def complete_backend(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Makes special what ``config`` names so and the tokenizer does not; ids stay as they are. Texts are not cut."""
    backend.no_truncation()
    backend.no_padding()
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    for text in dict.fromkeys([*named_tokens(config).values(), *_extra_tokens(config)]):
        if text not in special:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens under the names that templates use, such as ``bos_token``."""
    return {name: text for name in _NAMED if (text := token_text(config.get(name))) is not None}


def _extra_tokens(config: Mapping[str, Any]) -> list[str]:
    entries: list[Any] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        given = config.get(name)
        entries += given if isinstance(given, list) else list(given.values()) if isinstance(given, dict) else []
    return [text for entry in entries if (text := token_text(entry)) is not None]
