"""What tokenizers of several sources are put together from: merges, models and what stands around a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.core import json_values
from octavo.core.bounded_file import read_bounded
from octavo.core.errors import TokenizerError
from octavo.core.json_values import MAX_TOKENIZER
from octavo.loader.pre_tokenizers import PreTokenizer

#: Longest token in characters or bytes; finding the merges of a token takes time that grows with its square.
_LONGEST = 1024

#: Largest id of a token: several times those of the largest vocabularies published.
MAX_ID = 2_000_000

_Token = TypeVar("_Token", str, bytes)


def read_bytes(path: Path) -> bytes:
    """The content of a tokenizer's file.

    Raises:
        TokenizerError: it cannot be read or is too large.
    """
    return read_bounded(path, MAX_TOKENIZER, TokenizerError)


def read_lines(path: Path) -> list[str]:
    """The lines of a tokenizer's file, which end with a line feed, or a carriage return before it.

    Raises:
        TokenizerError: it cannot be read, is too large or not UTF-8.
    """
    try:
        lines = read_bytes(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as e:
        raise TokenizerError(f"{path} is not UTF-8: {e}") from e
    return [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file.

    Raises:
        TokenizerError: it cannot be read, is too large, or holds something else.
    """
    return json_values.read_object(path, TokenizerError, MAX_TOKENIZER) if path.is_file() else {}


def read_ids(path: Path) -> dict[str, int]:
    """The ids of tokens in a vocab.json.

    Raises:
        TokenizerError: as for ``read_object``; or there are none, or some that are none.
    """
    ids = read_object(path)
    bad = next((t for t, i in ids.items() if not isinstance(i, int) or not 0 <= i <= MAX_ID), None)
    if bad is not None:
        raise TokenizerError(f"{path}: the id of {bad!r} must be a whole number up to {MAX_ID}, not {ids[bad]!r}")
    if not ids or len(set(ids.values())) != len(ids):
        raise TokenizerError(f"{path} has no tokens, or gives two of them one id")
    return ids


def token_text(entry: object) -> str | None:
    """The text of a token in a configuration: a text itself, or an object with ``content``."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def merges_by_rank(
    source: Path, ranks: Mapping[_Token, float], ids: Mapping[_Token, int]
) -> list[tuple[_Token, _Token]]:
    """All merges of two tokens into a third, in the order of the third's rank.

    Encoders that merge the adjacent pair whose union ranks first (SentencePiece by score, tiktoken by id) do
    the same as BPE with these merges, which takes the pair whose merge stands first.

    Args:
        source: the file, for errors.
        ranks: the tokens that take part; the lowest merges first.
        ids: the id of each of them, which decides between equals.

    Raises:
        TokenizerError: a token is longer than any real one.
    """
    ranked = []
    for token, rank in ranks.items():
        if len(token) > _LONGEST:
            raise TokenizerError(f"{source} has a token of {len(token)} characters; at most {_LONGEST} are read")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                ranked.append((rank, ids[token], ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def bpe(source: Path, ids: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> models.BPE:
    """The library's model of byte pair encoding.

    Raises:
        TokenizerError: a merge is of tokens that there are not.
    """
    try:
        return models.BPE(vocab=dict(ids), merges=list(merges), **options)
    except Exception as e:  # the library raises plain Exception
        raise TokenizerError(f"{source}: the tokenizer's merges do not fit its tokens: {e}") from e


def byte_level_bpe(
    source: Path,
    ids: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    family: PreTokenizer,
    *,
    prefix_space: bool = False,
) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019) of a family; ``prefix_space`` as for ``PreTokenizer.attach``."""
    tokenizer = Tokenizer(bpe(source, ids, merges, ignore_merges=family.ignore_merges))
    family.attach(tokenizer, prefix_space=prefix_space)
    return tokenizer


def word_piece(
    source: Path,
    tokens: Sequence[str],
    *,
    unknown: str,
    lowercase: bool,
    strip_accents: bool | None,
    splits_chinese: bool = True,
) -> Tokenizer:
    """WordPiece (Devlin et al. 2019) of tokens with their ids in order.

    ``strip_accents``: None for as ``lowercase`` is. ``splits_chinese``: whether each of their characters is a word.

    Raises:
        TokenizerError: a token occurs twice.
    """
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError(f"{source} has a token twice")
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=splits_chinese
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def surround(
    tokenizer: Tokenizer,
    before: Sequence[str],
    after: Sequence[str],
    *,
    between: Sequence[str] | None = None,
    second: int = 1,
) -> None:
    """Sets the post-processor that puts these tokens around a text.

    ``between``: those before the second text of a pair, by default as before the first. ``second``: its segment.
    """
    single = [*before, "$A", *after]
    between = before if between is None else between
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(f"{token}:{second}" for token in (*between, "$B", *after))],
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in {*before, *between, *after}],
    )
