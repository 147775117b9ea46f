from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import Regex, models, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from octavo.loader.sentencepiece import PRE_TOKENIZERS


def pieces(name: str, text: str) -> list[str]:
    backend = tokenizers.Tokenizer(models.BPE())
    PRE_TOKENIZERS[name].attach(backend)
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(GGUF_PRE_TOKENIZER_SPLITS.keys() & PRE_TOKENIZERS.keys()))
def test_expressions_are_those_of_transformers(name: str) -> None:
    assert PRE_TOKENIZERS[name].cuts == (GGUF_PRE_TOKENIZER_SPLITS[name],)


def split(expression: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(expression), "isolated")


def byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


DIGITS = pre_tokenizers.Digits(individual_digits=True)
HAN = split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
#: The steps of published tokenizer.json files: GPT-2, StarCoder, Falcon 7B, DeepSeek Coder, Bloom.
PUBLISHED = {
    "gpt-2": [byte_level(True)],
    "starcoder": [DIGITS, byte_level(True)],
    "falcon": [
        pre_tokenizers.Punctuation("contiguous"),
        byte_level(True),
        pre_tokenizers.Digits(individual_digits=False),
        split("[0-9][0-9][0-9]"),
    ],
    "deepseek-coder": [split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), HAN, DIGITS, byte_level(False)],
    "bloom": [split(" ?[^(\\s|[.,!?…。\uff0c、।\u06d4،])]+"), byte_level(False)],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_pieces_are_those_of_the_published_steps(name: str) -> None:
    published = pre_tokenizers.Sequence(PUBLISHED[name])
    rng = random.Random(1)
    letters = [
        *"abcXYZ 0123456789.,!?'\n\r\t  $+<=>^`|~-_\"",
        "é",
        "日",
        "😀",
        "'ll",
        "\u0301",
        "²",
        "½",
        "٣",
        "。",
        "가",
    ]
    for _ in range(500):
        text = "".join(rng.choices(letters, k=rng.randrange(1, 30)))
        assert pieces(name, text) == [piece for piece, _ in published.pre_tokenize_str(text)], text


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("deepseek-llm", "Hi \u03a9x 12日本!! \n y", "Hi|ĠÎ©|x|Ġ|1|2|æĹ¥æľ¬|!!|Ġ|Ċ|Ġy"),
        ("deepseek-v3", "ab 12345日本x !!\n  y", "ab|Ġ|123|45|æĹ¥æľ¬|x|Ġ!!Ċ|Ġ|Ġy"),
        ("tekken", "HelloWorld's 12", "Hello|World|'s|Ġ|1|2"),
        ("gpt-4o", "HelloWorld's 12345", "Hello|World's|Ġ|123|45"),
        ("kimi-k2", "HelloWorld's日本語abc 12345/\n", "Hello|World's|æĹ¥æľ¬èªŀ|abc|Ġ|123|45|/Ċ"),
        ("kimi-k2", "x日かな", "x|æĹ¥|ãģĭãģª"),
        ("falcon-h1", "I'LL 12345", "I|'LL|Ġ|123|45"),
        ("viking", "ab, 12!", "ab|,|Ġ|1|2|!"),
        ("seed-coder", "I'LL; 12", "I|'LL|;|Ġ|1|2"),
        ("command-r", "v2 12", "v|2|Ġ|1|2"),
    ],
)
def test_pieces_of_families_with_expressions_of_their_own(name: str, text: str, wanted: str) -> None:
    assert pieces(name, text) == wanted.split("|")
