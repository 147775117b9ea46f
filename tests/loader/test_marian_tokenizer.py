"""Tokenizers of Marian's files, against ids that transformers (5.24) with SentencePiece (0.2.3) gave for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import TokenizerError, UnsupportedModelError
from octavo.engine.tokenizer import TextStream, load_tokenizer
from tests.loader.test_sentencepiece import CHARSMAP, CONTROL, NORMAL, PIECES, UNKNOWN, message, model_bytes

TARGET = [*"▁abcdefghijklmnopqrstuvwz", "▁die", "▁welt", "hallo", "▁hallo", "ein", "▁ein"]
#: Without two pieces of the source, and with one that neither model has.
TOKENS = ["</s>", "<unk>", ">>fra<<", *TARGET[::-1], *(p for p in PIECES if p not in ("▁wor", "fi")), "日", "<pad>"]
VOCABULARY = {token: index for index, token in enumerate(dict.fromkeys(TOKENS))}

#: Ids of the source, with the end token, and of the target, without.
TRUTH: dict[str, tuple[list[int], list[int]]] = {
    ">>fra<< hello the world": (
        [2, 49, 41, 45, 0],
        [2, 33, 25, 28, 21, 21, 18, 33, 13, 25, 28, 33, 10, 18, 15, 21, 29],
    ),
    ">>fra<<hello": ([2, 49, 0], [2, 33, 25, 28, 21, 21, 18]),
    "日 hello 日本 wor fi": (
        [33, 55, 49, 33, 1, 1, 54, 0],
        [33, 55, 33, 25, 28, 21, 21, 18, 33, 1, 33, 10, 18, 15, 33, 27, 24],
    ),
    "  the   world\n\nhello    on  ": (
        [41, 45, 1, 50, 33, 52, 0],
        [33, 13, 25, 28, 33, 10, 18, 15, 21, 29, 1, 25, 28, 21, 21, 18, 33, 18, 19],
    ),
    "élo 日本 😀\xa0ﬁrst ① 1": (
        [33, 35, 51, 33, 1, 33, 1, 54, 15, 14, 13, 33, 34, 33, 34, 0],
        [33, 35, 21, 18, 33, 1, 33, 1, 33, 27, 24, 15, 14, 13, 33, 34, 33, 34],
    ),
    "": ([0], []),
}


def target_bytes() -> bytes:
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(piece, -2.0 - 0.01 * index, NORMAL) for index, piece in enumerate(TARGET)]
    parts = [(1, message((1, piece), (2, score), (3, kind))) for piece, score, kind in pieces]
    return message(*parts, (2, message((3, 1), (43, -1))), (3, message((2, CHARSMAP), (3, 1), (4, 1))))


def folder(path: Path, vocabulary: Any = VOCABULARY, **config: Any) -> Path:
    (path / "source.spm").write_bytes(model_bytes("unigram"))
    (path / "target.spm").write_bytes(target_bytes())
    (path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (path / "config.json").write_text(json.dumps({"model_type": "marian"}))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_ids_of_both_sides_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, source_lang="en", target_lang="de"))
    for text, (source, target) in TRUTH.items():
        assert tokenizer.source.encode(text) == source, text
        assert tokenizer.encode(text) == target, text
        stream = TextStream(tokenizer, [])
        assert "".join([*map(stream.push, source), stream.flush()]) == tokenizer.decode(source)
    assert tokenizer.source.encode_batch(list(TRUTH)) == [source for source, _ in TRUTH.values()]
    assert tokenizer.source.encode_cut("hello world, the thing", 3)[-1] == tokenizer.eos_token_id == 0


def test_text_is_made_of_the_pieces_of_both_sides(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path))
    names = ["▁hallo", "▁world", "ein", "</s>"]
    assert tokenizer.decode([VOCABULARY[name] for name in names]) == "hallo worldein"
    assert tokenizer.special_texts == {"</s>", "<unk>", "<pad>"}


def test_another_tokenizer_has_no_other_source(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "spiece.model").write_bytes(model_bytes("unigram"))
    (tmp_path / "source.spm").unlink()
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.source is tokenizer
    assert tokenizer.encode("hello")[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("token", ["</s>", "<unk>", "<pad>"])
def test_a_vocabulary_without_a_special_token_is_refused(tmp_path: Path, token: str) -> None:
    rest = {name: index for name, index in VOCABULARY.items() if name != token}
    with pytest.raises(TokenizerError, match=f"vocab.json has no token '{token}'"):
        load_tokenizer(folder(tmp_path, rest))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="separate_vocabs"):
        load_tokenizer(folder(tmp_path, separate_vocabs=True))
    folder(tmp_path)
    (tmp_path / "source.spm").write_bytes(b"\xff" * 9)
    with pytest.raises(TokenizerError, match=r"source\.spm is no SentencePiece model"):
        load_tokenizer(tmp_path)
