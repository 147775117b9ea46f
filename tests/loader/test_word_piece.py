"""Tokenizers of encoders' folders without tokenizer.json, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from octavo.core.errors import TokenizerError
from octavo.engine.tokenizer import load_tokenizer

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "b",
    "river",
    "##s",
    "the",
    "Rhine",
    "naive",
    "日",
    "!",
    ",",
]
TEXTS = ["the rivers", "The Rhine!", "naïve, 日本", "", "a [SEP] b", "unknownword a"]


def write(folder: Path, words: list[str] = WORDS, **config: Any) -> Path:
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **config}))
    return folder


@pytest.mark.parametrize("config", [{}, {"do_lower_case": False}, {"strip_accents": False}, {"do_lower_case": True}])
def test_words_of_bert(config: dict[str, Any], tmp_path: Path) -> None:
    ours = load_tokenizer(write(tmp_path, **config))
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), **config)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        pair = theirs(text, "a b", return_token_type_ids=True)
        ids, second = ours.encode_pair(text, "a b")
        assert (ids, [int(i >= second) for i in range(len(ids))]) == (pair["input_ids"], pair["token_type_ids"])


def test_a_damaged_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="has a token twice"):
        load_tokenizer(write(tmp_path, [*WORDS, "a"]))
    with pytest.raises(TokenizerError, match=r"has no token '\[SEP\]'"):
        load_tokenizer(write(tmp_path, [word for word in WORDS if word != "[SEP]"]))
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="is not UTF-8"):
        load_tokenizer(tmp_path)


def test_pairs_of_roberta(tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *letters, "<mask>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RobertaTokenizer"}))
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("ab c", " x", "naïve"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode_pair(text, "b") == (theirs(text, "b")["input_ids"], 0)
        cut = theirs(text * 9, "b" * 30, truncation="longest_first", max_length=20)["input_ids"]
        assert ours.encode_pair(text * 9, "b" * 30, 20) == (cut, 0)
