"""Prompts with a gap: the tokens of each family of models, found by name or named by the model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from octavo.core.errors import InvalidRequestError
from octavo.engine.tokenizer import Tokenizer
from octavo.loader.sentencepiece import BYTE, CONTROL, NORMAL, SentencePieceModel


def byte_level(*special: str, config: dict[str, Any] | None = None) -> Tokenizer:
    """Speaks bytes, and these tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return Tokenizer(backend, config or {}, {})


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    return [tokenizer.backend.id_to_token(i) for i in ids]


@pytest.mark.parametrize(
    "wanted",
    [
        "<fim_prefix> a <fim_suffix> b <fim_middle>",
        "<|fim_prefix|> a <|fim_suffix|> b <|fim_middle|>",
        "<｜fim▁begin｜> a <｜fim▁hole｜> b <｜fim▁end｜>",  # noqa: RUF001
        "[SUFFIX] b [PREFIX] a",
    ],
    ids=["StarCoder", "Qwen", "DeepSeek", "Codestral"],
)
def test_a_family_is_known_by_its_tokens(wanted: str) -> None:
    special = [token for token in wanted.split() if token not in ("a", "b")]
    tokenizer = byte_level(*reversed(special), "[MIDDLE]")
    assert names(tokenizer, tokenizer.encode_gap("a", "b")) == wanted.split()


def test_the_files_of_a_model_name_its_tokens() -> None:
    tokens = {"prefix": "<p>", "suffix": "<s>", "middle": "<m>"}
    known = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
    tokenizer = byte_level("<p>", "<s>", "<m>", *known, config={"fim_tokens": tokens})
    assert names(tokenizer, tokenizer.encode_gap("a", "b")) == ["<p>", "a", "<s>", "b", "<m>"]
    for broken in ({"prefix": "<p>"}, {**tokens, "middle": "<x>"}, "<p>", {**tokens, "middle": 5}):
        tokenizer = byte_level("<p>", "<s>", "<m>", *known, config={"fim_tokens": broken})
        assert names(tokenizer, tokenizer.encode_gap("a", "b"))[0] == "<fim_prefix>"


@pytest.mark.parametrize("special", [[], ["<fim_prefix>", "<fim_suffix>"], ["▁<PRE>", "▁<MID>"]], ids=str)
def test_a_model_without_such_tokens_refuses(special: list[str]) -> None:
    tokenizer = byte_level(*special)
    assert tokenizer.fill_in_middle is None
    with pytest.raises(InvalidRequestError, match="suffix is not supported by this model"):
        tokenizer.encode_gap("a", "b")


def test_the_beginning_token_comes_first_where_texts_have_one(tmp_path: Path) -> None:
    """As Meta's code for CodeLlama writes it (llama/generation.py, infilling_prompt_tokens): a space before the prefix
    as before every text, none before the suffix."""
    special = ["<unk>", "<s>", "</s>", "▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    pieces = ["▁", "a", "b", "▁a", "▁b", "☺", "\n"]
    tokens = [*special, *byte_tokens, *pieces[:-1]]
    types = [CONTROL] * len(special) + [BYTE] * 256 + [NORMAL] * (len(pieces) - 1)
    scores = [0.0] * (len(special) + 256) + [-5.0, -6.0, -7.0, -1.0, -2.0, -8.0]
    model = SentencePieceModel(
        tmp_path, tokens, scores, types, unigram=False, unk_id=0, byte_fallback=True, prefix_space=True,
        collapse_spaces=False,
    )  # fmt: skip
    backend = model.build()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, {})
    wanted = ["▁<PRE>", "▁a", "▁<SUF>", "b", "▁a", "▁<MID>"]
    assert names(tokenizer, tokenizer.encode_gap("a", "b a")) == ["<s>", *wanted]
    assert names(tokenizer, tokenizer.encode_gap("a", "b a", add_special_tokens=False)) == wanted
    assert tokenizer.fill_in_middle is not None
    assert names(tokenizer, list(tokenizer.fill_in_middle.ends)) == ["▁<EOT>"]
    assert names(tokenizer, tokenizer.encode_gap("", "")) == ["<s>", "▁<PRE>", "▁<SUF>", "▁<MID>"]
