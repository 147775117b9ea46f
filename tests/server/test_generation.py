"""Where the tokens of an echoed prompt stand in its text, for each way in which tokenizers write spaces."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from octavo.engine.tokenizer import Tokenizer
from octavo.server.generation import prompt_tokens

WORDS = ["▁Hello", "▁you", "▁", "H", "e", "l", "o", "y", "u", "x", "é"]


def sentencepiece(*, strips: bool) -> Tokenizer:
    """Words with their space before them, a beginning token, and a mark that may strip the spaces around it."""
    vocab = {token: i for i, token in enumerate(["<s>", "<mark>", *WORDS])}
    backend = tokenizers.Tokenizer(models.WordLevel({**vocab, "<unk>": len(vocab)}, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    mark = AddedToken("<mark>", special=True, lstrip=strips, rstrip=strips, normalized=False)
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False), mark])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend, {}, {})


@pytest.mark.parametrize(
    ("text", "strips", "offsets"),
    [
        ("Hello you", False, [0, 0, 5]),
        ("Hello<mark>", False, [0, 0, 5]),
        ("<mark>Hello you", False, [0, 0, 6, 11]),
        ("Hello <mark> you", True, [0, 0, 6, 12]),
    ],
)
def test_tokens_stand_where_their_text_does(text: str, strips: bool, offsets: list[int]) -> None:
    tokenizer = sentencepiece(strips=strips)
    ids = tokenizer.encode(text)
    found = prompt_tokens(tokenizer, ids, [None] * len(ids), text)
    assert [token.offset for token in found] == offsets, [tokenizer.token_text(i) for i in ids]
