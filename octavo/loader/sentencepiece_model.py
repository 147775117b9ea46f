"""SentencePiece models (Kudo & Richardson 2018) as tokenizers of the ``tokenizers`` library.

A ``tokenizer.model`` is a protobuf message, ModelProto of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto; the few fields needed are read here.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from octavo.core.errors import TokenizerError, UnsupportedModelError
from octavo.loader.tokenizer_parts import bpe, merges_by_rank

#: Types of pieces.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"


@dataclass
class SentencePieceModel:
    """The pieces of a model and how a text is prepared for them."""

    source: Path
    pieces: list[str] = field(default_factory=list)
    #: Log probabilities of a unigram model; for BPE the merge that makes the best piece comes first.
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    unigram: bool = True
    #: Ids of the special pieces; negative if there is none.
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    #: Whether characters without a piece become a piece for each byte.
    byte_fallback: bool = False
    #: Whether a text begins with a space.
    prefix_space: bool = True
    #: Whether runs of spaces become one, and those around a text none.
    collapse_spaces: bool = True
    #: The compiled rules that normalize characters, empty if there are none.
    charsmap: bytes = b""

    @property
    def named(self) -> dict[str, str]:
        """The special pieces under the names that tokenizer_config.json has for them."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "unk_token": self.unk_id, "pad_token": self.pad_id}
        return {name: self.pieces[i] for name, i in ids.items() if 0 <= i < len(self.pieces)}

    def place(self, token_id: int, token: str, *, special: bool) -> None:
        """Gives a token this id, also where the model has another piece there.

        Raises:
            TokenizerError: it would leave ids without a piece.
        """
        if token_id > len(self.pieces):
            raise TokenizerError(
                f"{self.source} has {len(self.pieces)} pieces, so the token {token!r} cannot have the id {token_id}"
            )
        kind = CONTROL if special else USER_DEFINED
        if token_id == len(self.pieces):
            self.pieces.append(token)
            self.scores.append(0.0)
            self.types.append(kind)
        elif self.pieces[token_id].replace(" ", _SPACE) != token.replace(" ", _SPACE):
            self.pieces[token_id], self.types[token_id] = token, kind

    def build(self) -> Tokenizer:
        """The tokenizer, with its special and user-defined tokens, but without those around a text.

        Raises:
            TokenizerError: the model contradicts itself.
        """
        if twice := next((p for p, count in Counter(self.pieces).items() if count > 1), None):
            raise TokenizerError(f"{self.source}: the token {twice!r} occurs twice")
        tokenizer = Tokenizer(self._unigram() if self.unigram else self._bpe())
        tokenizer.normalizer = normalizers.Sequence(list(self._normalizers()))
        tokenizer.decoder = decoders.Sequence(list(self._decoders()))
        pairs = list(zip(self.pieces, self.types, strict=True))
        special = [AddedToken(p, special=True, normalized=False) for p, t in pairs if t in (CONTROL, UNKNOWN)]
        plain = [AddedToken(p, special=False, normalized=False) for p, t in pairs if t == USER_DEFINED]
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(plain)
        return tokenizer

    def _unigram(self) -> models.Unigram:
        try:
            entries = list(zip(self.pieces, self.scores, strict=True))
            return models.Unigram(entries, unk_id=self.unk_id, byte_fallback=self.byte_fallback)
        except Exception as e:  # the library raises plain Exception
            raise TokenizerError(f"{self.source} is no usable unigram model: {e}") from e

    def _bpe(self) -> models.BPE:
        ids = {piece: i for i, piece in enumerate(self.pieces)}
        # Bytes, control and unknown pieces are never made by merging.
        ranks = {p: -self.scores[i] for p, i in ids.items() if self.types[i] in (NORMAL, USER_DEFINED)}
        merges = merges_by_rank(self.source, ranks, ids)
        unknown = self.named.get("unk_token")
        return bpe(self.source, ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=self.byte_fallback)

    def _normalizers(self) -> Iterator[Any]:
        if self.charsmap:
            try:
                _check_charsmap(self.charsmap)
                yield normalizers.Precompiled(self.charsmap)
            except Exception as e:  # the library raises plain Exception
                raise TokenizerError(f"{self.source}: the rules that normalize characters are damaged: {e}") from e
        if self.collapse_spaces:
            yield normalizers.Replace(Regex(" {2,}"), " ")
            yield normalizers.Strip()
        if self.prefix_space:
            yield normalizers.Prepend(_SPACE)
        yield normalizers.Replace(" ", _SPACE)

    def _decoders(self) -> Iterator[Any]:
        yield decoders.Replace(_SPACE, " ")
        if self.byte_fallback:
            yield decoders.ByteFallback()
        yield decoders.Fuse()
        if self.prefix_space:
            yield decoders.Strip(content=" ", left=1, right=0)


def parse_sentencepiece(source: Path, data: bytes) -> SentencePieceModel:
    """The model in the bytes of a ``tokenizer.model``.

    User-defined pieces of spaces, which SentencePiece writes as ``▁▁``, are named by the spaces that they match.

    Raises:
        TokenizerError: it is damaged, or another kind of file.
        UnsupportedModelError: its algorithm is neither BPE nor unigram.
    """
    model = SentencePieceModel(source)
    kind = _UNIGRAM
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = dict(_fields(_bytes(value)))
                kind_of_piece = int(piece.get(3, NORMAL))
                text = _bytes(piece.get(1, b"")).decode("utf-8")
                model.pieces.append(text.replace(_SPACE, " ") if kind_of_piece == USER_DEFINED else text)
                model.scores.append(struct.unpack("<f", _bytes(piece.get(2, b"\0\0\0\0")))[0])
                model.types.append(kind_of_piece)
            elif number == 2:
                trainer = dict(_fields(_bytes(value)))
                kind = trainer.get(3, _UNIGRAM)
                model.byte_fallback = bool(trainer.get(35, False))
                for name, at in (("unk_id", 40), ("bos_id", 41), ("eos_id", 42), ("pad_id", 43)):
                    setattr(model, name, _signed(trainer.get(at, getattr(model, name))))
            elif number == 3:
                rules = dict(_fields(_bytes(value)))
                model.charsmap = _bytes(rules.get(2, b""))
                model.prefix_space = bool(rules.get(3, True))
                model.collapse_spaces = bool(rules.get(4, True))
    except (ValueError, TypeError, IndexError, struct.error) as e:
        raise TokenizerError(f"{source} is no SentencePiece model, or a damaged one: {e}") from e
    if kind not in (_UNIGRAM, _BPE):
        raise UnsupportedModelError(
            f"{source}: SentencePiece models are read if they are BPE or unigram, not type {kind}"
        )
    if not all(model.pieces) or not model.pieces:
        raise TokenizerError(f"{source} is no SentencePiece model: it has no pieces, or an empty one")
    model.unigram = kind == _UNIGRAM
    return model


def _check_charsmap(data: bytes) -> None:
    """Whether no text leads out of the arrays of compiled rules, where the library would panic in a request.

    The rules are the length of a double-array trie (Aoe 1989; units as in darts-clone), the trie, whose leaves are
    positions among texts, and these texts.

    Raises:
        ValueError: some text would.
    """
    import numpy as np

    size = int.from_bytes(data[:4], "little")
    if size < 4 or size % 4 or size > len(data) - 4:
        raise ValueError(f"a trie of {size} bytes in {len(data)}")
    units = np.frombuffer(data, "<u4", size // 4, offset=4).astype(np.int64)
    texts = np.frombuffer(data, np.uint8, offset=4 + size)
    texts.tobytes().decode("utf-8")
    starts = np.append((texts & 0xC0) != 0x80, True)  # of characters, and the end
    offsets = (units >> 10) << ((units & 0x200) >> 6)
    letters = np.arange(1, 256)
    seen = np.zeros(units.size, bool)
    nodes = np.zeros(1, np.int64)
    while nodes.size:
        bases = nodes ^ offsets[nodes]
        children = bases[:, None] ^ letters
        if max(bases.max(), children.max()) >= units.size:
            raise ValueError("the trie leads out of itself")
        values = units[bases[(units[nodes] >> 8 & 1) == 1]] & 0x7FFFFFFF
        if values.size and (values.max() >= starts.size or not starts[values].all()):
            raise ValueError("a rule leads to no text")
        nodes = np.unique(children[units[children] & 0x800000FF == letters])
        nodes = nodes[~seen[nodes]]
        seen[nodes] = True


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of the fields of a protobuf message: int, or bytes for anything longer or of fixed size."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"field {key >> 3} has the unknown wire type {wire}")
        if at + length > len(data):
            raise ValueError(f"field {key >> 3} goes past the end")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is longer than 64 bits")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number stands where a text or message was expected")
    return value
