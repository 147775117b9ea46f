"""The tokenizer of a folder with source.spm, target.spm and vocab.json: Marian (Junczys-Dowmunt et al. 2018).

Two SentencePiece models cut texts, one those of each language; what a piece's id is stands in vocab.json, for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, NormalizedString, PreTokenizedString, Tokenizer, decoders, models, pre_tokenizers

from octavo.core.errors import TokenizerError, UnsupportedModelError
from octavo.loader.sentencepiece_model import parse_sentencepiece
from octavo.loader.tokenizer_parts import read_bytes, read_ids, surround, token_text

_SPECIAL = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
_FILES = ("source.spm", "target.spm", "vocab.json")


def has_marian_files(folder: Path) -> bool:
    """Whether a folder has the files of such a tokenizer."""
    return all((folder / name).is_file() for name in _FILES)


def build_marian(
    folder: Path, config: Mapping[str, Any], side: Literal["source", "target"]
) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of what the encoder reads (source), which puts the end token behind a text, or of what the decoder
    reads and writes (target), which puts nothing around it; with it ``config``, completed with the special tokens.

    A piece that vocab.json lacks is unknown. Names of languages (``>>fra<<``) are tokens.

    Args:
        folder: has the files.
        config: the content of tokenizer_config.json and special_tokens_map.json.
        side: which.

    Raises:
        TokenizerError: a file is damaged, or vocab.json lacks a special token.
        UnsupportedModelError: encoder and decoder have vocabularies of their own.
    """
    if config.get("separate_vocabs"):
        raise UnsupportedModelError(f"{folder}: separate_vocabs=true is not supported: one vocab.json must serve both")
    ids = read_ids(folder / "vocab.json")
    named = {name: token_text(config.get(name)) or default for name, default in _SPECIAL.items()}
    if missing := [token for token in named.values() if token not in ids]:
        raise TokenizerError(f"{folder / 'vocab.json'} has no token {missing[0]!r}")
    tokenizer = _tokenizer(folder / f"{side}.spm", ids, named)
    surround(tokenizer, [], [named["eos_token"]] if side == "source" else [])
    return tokenizer, {**named, **{key: value for key, value in config.items() if value is not None}}


def _tokenizer(file: Path, ids: Mapping[str, int], named: Mapping[str, str]) -> Tokenizer:
    pieces = parse_sentencepiece(file, read_bytes(file)).build()
    tokenizer = Tokenizer(models.WordLevel(dict(ids), unk_token=named["unk_token"]))
    tokenizer.normalizer = pieces.normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(_Pieces(pieces.model))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named.values()])
    languages = [token for token in ids if token.startswith(">>") and token.endswith("<<")]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in languages])
    return tokenizer


class _Pieces:
    """Cuts a text where a model of pieces does, so that another model may say their ids."""

    def __init__(self, model: Any) -> None:
        self._tokenizer = Tokenizer(model)

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        """What the library calls."""
        text.split(self._split)

    def _split(self, _: int, text: NormalizedString) -> list[NormalizedString]:
        offsets = self._tokenizer.encode(text.normalized, add_special_tokens=False).offsets
        return [piece for start, end in offsets if (piece := text[start:end]) is not None]
