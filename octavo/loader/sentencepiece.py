"""Builds tokenizers of the ``tokenizers`` library: pre-tokenizers of BPE families, WordPiece, SentencePiece, Marian.

SentencePiece (Kudo & Richardson 2018): a ``tokenizer.model`` is a protobuf message, ModelProto of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto; only the fields needed are read.
"""

from __future__ import annotations

import functools
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from tokenizers import (
    AddedToken,
    NormalizedString,
    PreTokenizedString,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from octavo.core import files as json_values
from octavo.core.errors import TokenizerError, UnsupportedModelError
from octavo.core.files import MAX_TOKENIZER, read_bounded

# Pre-tokenizers of byte-level BPE (Radford et al. 2019): the pieces of a text within which tokens are merged

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_SEED = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"


def _by_case(digits: str, ending: str = "", *, without: str = "", after: str = r"\r\n/") -> str:
    """Words that also end where a capital follows a small letter; ``ending`` may follow each word.

    ``without``: characters that are no letters of words; ``after``: characters that may follow punctuation.
    """
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]",
    )
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{after}]*|{_SPACES}"


def _characters(ranges: str) -> str:
    """The inside of a character class, from hexadecimal code points and ranges."""
    return "".join("-".join(rf"\x{{{end}}}" for end in entry.split("-")) for entry in ranges.split())


_HAN = f"[{_characters('4e00-9fa5 800-4e00 ac00-d7ff')}]+"
_CASED = _characters(
    "b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 3a3-3f5 "
    "3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a "
    "1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 "
    "212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d "
    "a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_DEEPSEEK_LETTERS = rf"\s?[A-Za-z{_CASED}]+"
_DEEPSEEK_MARKS = rf"\s?[!-/:-~{_characters('ff01-ff0f ff1a-ff5e 2018-201f 3000-3002')}]+"


@dataclass(frozen=True)
class PreTokenizer:
    """The pre-tokenisation of a family: what happens to a text before its merges."""

    #: Regular expressions; matches and the text between them are pieces, which the next expression cuts further.
    cuts: tuple[str, ...] = (_GPT2,)
    #: Whether texts are normalised first (Unicode's NFC).
    composed: bool = False
    #: Whether a piece that is a token stays whole even if merges do not lead to it.
    ignore_merges: bool = False
    adds_bos: bool = False
    #: As ``cuts``, for the characters that stand for bytes.
    byte_cuts: tuple[str, ...] = ()

    def attach(self, tokenizer: Tokenizer, *, prefix_space: bool = False) -> None:
        """Sets normalizer, pre-tokenizer and decoder; ``prefix_space``: a text without leading space gets one."""
        steps, within = (
            [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in cuts]
            for cuts in (self.cuts, self.byte_cuts)
        )
        normal: list[Any] = [normalizers.NFC()] if self.composed else []
        if prefix_space:
            normal += [normalizers.Prepend(" "), normalizers.Replace(Regex(r"\A  "), " ")]
        if normal:
            tokenizer.normalizer = normalizers.Sequence(normal)
        bytes_of_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_of_pieces, *within])
        tokenizer.decoder = decoders.ByteLevel()


_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_O200K = PreTokenizer((_by_case(r"\p{N}{1,3}", _CONTRACTION + "?"),))
_QWEN = PreTokenizer((_QWEN2,), composed=True)
#: Chinese characters are words of their own.
_KIMI = r"\p{Han}+|" + _by_case(r"\p{N}{1,3}", _CONTRACTION + "?", without=r"&&[^\p{Han}]", after=r"\r\n")

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jais", "exaone4"), PreTokenizer()),
    **dict.fromkeys(("gpt-neox", "olmo", "mpt"), PreTokenizer(composed=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _BY_DIGIT),
    "command-r": PreTokenizer(_BY_DIGIT.cuts, composed=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "qwen35": PreTokenizer((_QWEN35,), composed=True),
    "seed-coder": PreTokenizer((_SEED,)),
    "tekken": PreTokenizer((_by_case(r"\p{N}"),), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _O200K),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^`|~]+", _GPT2), byte_cuts=(r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "deepseek-llm": PreTokenizer((r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_MARKS, r"\s+$", _HAN, r"\p{N}")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", f"[{_characters('4e00-9fa5 3040-309f 30a0-30ff')}]+", _DEEPSEEK_V3)),
}


# Vocabularies, merges and models

#: Characters or bytes of the longest token; the search for its merges is quadratic.
_LONGEST = 1024
#: Several times the ids of the largest published vocabularies.
MAX_ID = 2_000_000

_Token = TypeVar("_Token", str, bytes)


def read_bytes(path: Path) -> bytes:
    return read_bounded(path, MAX_TOKENIZER, TokenizerError)


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, which end with a line feed, or a carriage return before it."""
    try:
        lines = read_bytes(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as e:
        raise TokenizerError(f"{path} is not UTF-8: {e}") from e
    return [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    return json_values.read_object(path, TokenizerError, MAX_TOKENIZER) if path.is_file() else {}


def read_ids(path: Path) -> dict[str, int]:
    """The token ids in a vocab.json."""
    ids = read_object(path)
    bad = next((t for t, i in ids.items() if not isinstance(i, int) or not 0 <= i <= MAX_ID), None)
    if bad is not None:
        raise TokenizerError(f"{path}: the id of {bad!r} must be a whole number up to {MAX_ID}, not {ids[bad]!r}")
    if not ids or len(set(ids.values())) != len(ids):
        raise TokenizerError(f"{path} has no tokens, or gives two of them one id")
    return ids


def token_text(entry: object) -> str | None:
    """The text of a token in a configuration: a string, or an object with ``content``."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def merges_by_rank(
    source: Path, ranks: Mapping[_Token, float], ids: Mapping[_Token, int]
) -> list[tuple[_Token, _Token]]:
    """All merges of two tokens into a third, in the order of the third's rank; ``ids`` decide between equals.

    Encoders that merge the adjacent pair whose union ranks first (SentencePiece by score, tiktoken by id) are
    equivalent to BPE with these merges.
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
    try:
        return models.BPE(vocab=dict(ids), merges=list(merges), **options)
    except Exception as e:  # the library raises plain Exception
        raise TokenizerError(f"{source}: the tokenizer's merges do not fit its tokens: {e}") from e


def gemma_bpe(source: Path, ids: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """BPE over characters with bytes for unknown ones, as Gemma's; spaces are ``▁``, and none is added."""
    unknown = "<unk>" if "<unk>" in ids else None
    tokenizer = Tokenizer(bpe(source, ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def parse_merges(source: Path, lines: Iterable[object]) -> list[tuple[str, str]]:
    """Merges in the order of their rank, each a line of two tokens with a space between them."""
    merges = []
    for line in lines:
        left, _, right = line.partition(" ") if isinstance(line, str) else ("", "", "")
        if not left or not right or " " in right:
            raise TokenizerError(f"{source}: the merge {line!r:.80} is not two tokens with a space between them")
        merges.append((left, right))
    return merges


@dataclass
class ByteLevelVocabulary:
    """Ids and merges of byte-level BPE."""

    source: Path
    ids: dict[str, int]
    merges: Sequence[tuple[str, str]]
    family: PreTokenizer
    #: Whether a text without leading space gets one.
    prefix_space: bool = False
    named: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def _tokens(self) -> dict[int, str]:
        return {token_id: token for token, token_id in self.ids.items()}

    def place(self, token_id: int, token: str, *, special: bool) -> None:
        """Gives a token this id, in place of the vocabulary's token if necessary."""
        if self.ids.get(token, token_id) != token_id:
            raise TokenizerError(f"{self.source}: the token {token!r} has the id {self.ids[token]}, not {token_id}")
        taken = self._tokens.get(token_id, token)
        if taken != token:
            del self.ids[taken]
        self.ids[token] = token_id
        self._tokens[token_id] = token

    def build(self) -> Tokenizer:
        tokenizer = Tokenizer(bpe(self.source, self.ids, self.merges, ignore_merges=self.family.ignore_merges))
        self.family.attach(tokenizer, prefix_space=self.prefix_space)
        return tokenizer


def add_by_type(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int], *special: int) -> None:
    """Adds the tokens of the ``special`` types, and those that users defined; their ids stay."""
    kinds = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in kinds if k == USER_DEFINED])


def word_piece(
    source: Path,
    tokens: Sequence[str],
    *,
    unknown: str,
    lowercase: bool,
    strip_accents: bool | None,
    splits_chinese: bool = True,
) -> Tokenizer:
    """WordPiece (Devlin et al. 2019) of tokens in the order of their ids.

    ``strip_accents`` None: as ``lowercase``. ``splits_chinese``: each Chinese character is a word.
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

    ``between``: the tokens before the second text of a pair, by default ``before``. ``second``: its segment.
    """
    single = [*before, "$A", *after]
    between = before if between is None else between
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(f"{token}:{second}" for token in (*between, "$B", *after))],
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in {*before, *between, *after}],
    )


# SentencePiece

#: Types of pieces.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"


@dataclass
class SentencePieceModel:
    """The pieces of a model and the normalisation of texts."""

    source: Path
    pieces: list[str] = field(default_factory=list)
    #: Log probabilities (unigram), or ranks of merges, the highest first (BPE).
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    unigram: bool = True
    #: Negative: none.
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    byte_fallback: bool = False
    #: Whether a text begins with a space.
    prefix_space: bool = True
    #: Whether runs of spaces become one, and those around a text none.
    collapse_spaces: bool = True
    #: Compiled rules of character normalisation.
    charsmap: bytes = b""

    @property
    def named(self) -> dict[str, str]:
        """The special pieces by their names in tokenizer_config.json."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "unk_token": self.unk_id, "pad_token": self.pad_id}
        return {name: self.pieces[i] for name, i in ids.items() if 0 <= i < len(self.pieces)}

    def place(self, token_id: int, token: str, *, special: bool) -> None:
        """Gives a token this id, in place of the model's piece if necessary."""
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
        """The tokenizer with special and user-defined tokens, but without those around a text."""
        if twice := next((p for p, count in Counter(self.pieces).items() if count > 1), None):
            raise TokenizerError(f"{self.source}: the token {twice!r} occurs twice")
        model: models.Unigram | models.BPE
        if self.unigram:
            entries = list(zip(self.pieces, self.scores, strict=True))
            try:
                model = models.Unigram(entries, unk_id=self.unk_id, byte_fallback=self.byte_fallback)
            except Exception as e:  # the library raises plain Exception
                raise TokenizerError(f"{self.source} is no usable unigram model: {e}") from e
        else:
            ids = {piece: i for i, piece in enumerate(self.pieces)}
            # Bytes, control and unknown pieces are never made by merging.
            ranks = {p: -self.scores[i] for p, i in ids.items() if self.types[i] in (NORMAL, USER_DEFINED)}
            options = {"unk_token": self.named.get("unk_token"), "byte_fallback": self.byte_fallback}
            model = bpe(self.source, ids, merges_by_rank(self.source, ranks, ids), fuse_unk=True, **options)
        tokenizer = Tokenizer(model)
        normal: list[Any] = []
        if self.charsmap:
            try:
                _check_charsmap(self.charsmap)
                normal.append(normalizers.Precompiled(self.charsmap))
            except Exception as e:  # the library raises plain Exception
                raise TokenizerError(f"{self.source}: the rules that normalize characters are damaged: {e}") from e
        if self.collapse_spaces:
            normal += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
        if self.prefix_space:
            normal.append(normalizers.Prepend(_SPACE))
        tokenizer.normalizer = normalizers.Sequence([*normal, normalizers.Replace(" ", _SPACE)])
        decoding: list[Any] = [decoders.Replace(_SPACE, " ")]
        if self.byte_fallback:
            decoding.append(decoders.ByteFallback())
        decoding.append(decoders.Fuse())
        if self.prefix_space:
            decoding.append(decoders.Strip(content=" ", left=1, right=0))
        tokenizer.decoder = decoders.Sequence(decoding)
        add_by_type(tokenizer, self.pieces, self.types, CONTROL, UNKNOWN)
        return tokenizer


def parse_sentencepiece(source: Path, data: bytes) -> SentencePieceModel:
    """Parses a ``tokenizer.model``.

    User-defined pieces of spaces, which SentencePiece writes as ``▁▁``, are named by the spaces that they match.
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
                    value = trainer.get(at, getattr(model, name))
                    setattr(model, name, value - (1 << 64) if value >> 63 == 1 else value)
            elif number == 3:
                rules = dict(_fields(_bytes(value)))
                model.charsmap = _bytes(rules.get(2, b""))
                model.prefix_space = bool(rules.get(3, True))
                model.collapse_spaces = bool(rules.get(4, True))
    except (ValueError, TypeError, IndexError, struct.error) as e:
        raise TokenizerError(f"{source} is no SentencePiece model, or a damaged one: {e}") from e
    if kind not in (_UNIGRAM, _BPE):
        raise UnsupportedModelError(f"{source}: SentencePiece models must be BPE or unigram, not type {kind}")
    if not all(model.pieces) or not model.pieces:
        raise TokenizerError(f"{source} is no SentencePiece model: it has no pieces, or an empty one")
    model.unigram = kind == _UNIGRAM
    return model


def _check_charsmap(data: bytes) -> None:
    """Refuses (ValueError) rules in which some text leads out of the arrays: the library would panic in a request.

    The rules are the length of a double-array trie (Aoe 1989; units as in darts-clone), the trie, whose leaves are
    positions among texts, and these texts.
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
    """(number, value) of the fields of a protobuf message; values are int or bytes."""
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


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number stands where a text or message was expected")
    return value


# Marian (Junczys-Dowmunt et al. 2018): source.spm, target.spm and vocab.json

_SPECIAL = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
_FILES = ("source.spm", "target.spm", "vocab.json")


def has_marian_files(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def build_marian(
    folder: Path, config: Mapping[str, Any], side: Literal["source", "target"]
) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of the encoder's input (source), which appends the end token, or of the decoder (target), which
    adds no tokens; and ``config`` completed with the special tokens.

    A piece that vocab.json lacks is unknown. Names of languages (``>>fra<<``) are tokens.
    """
    if config.get("separate_vocabs"):
        raise UnsupportedModelError(f"{folder}: separate_vocabs=true is not supported: one vocab.json must serve both")
    ids = read_ids(folder / "vocab.json")
    named = {name: token_text(config.get(name)) or default for name, default in _SPECIAL.items()}
    if missing := [token for token in named.values() if token not in ids]:
        raise TokenizerError(f"{folder / 'vocab.json'} has no token {missing[0]!r}")
    file = folder / f"{side}.spm"
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
    surround(tokenizer, [], [named["eos_token"]] if side == "source" else [])
    return tokenizer, {**named, **{key: value for key, value in config.items() if value is not None}}


class _Pieces:
    """Cuts a text into the pieces of one model, for the ids of another."""

    def __init__(self, model: Any) -> None:
        self._tokenizer = Tokenizer(model)

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.split(self._split)

    def _split(self, _: int, text: NormalizedString) -> list[NormalizedString]:
        offsets = self._tokenizer.encode(text.normalized, add_special_tokens=False).offsets
        return [piece for start, end in offsets if (piece := text[start:end]) is not None]


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The character for each byte in byte-level BPE (Radford et al. 2019): itself, or 256 + n if invisible."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}
