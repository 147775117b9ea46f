"""Tokenizers of folders without tokenizer.json."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, trainers

from octavo.core.errors import TokenizerError, UnsupportedModelError
from octavo.engine.tokenizer import TextStream, Tokenizer, bytes_of_level, load_tokenizer
from octavo.loader import sentencepiece as tokenizer_parts
from octavo.loader.resolve import resolve_model
from octavo.loader.sentencepiece import PRE_TOKENIZERS

TEXTS = [
    "Hello world, it's  a   test.\n\n\tIndented; don't panic! I'LL",
    "naïve café — Ελληνικά, 日本語テキスト, עברית, العربية, हिन्दी, 한국어",
    "👩‍👩‍👧‍👦 emoji 🇩🇪 e\u0301 12345 67.8 ٣²",
    "<|endoftext|>a <s> b</s>  c",
    "  lead and trail  ",
    "\nx",
    "",
]
SPECIAL = ["<|endoftext|>", "<s>", "</s>"]

Vocabulary = tuple[dict[str, int], list[str]]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Ids and merges of a small byte-level vocabulary, trained on the tests' text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    text = (Path(__file__).parent.parent / "data" / "perplexity.txt").read_text(encoding="utf-8")
    backend.train_from_iterator([text + " don't 12 123 é日本 # ## ###" * 20], trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]


def folder(path: Path, vocabulary: Vocabulary, model_type: str | None = None, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    ids, merges = vocabulary
    (path / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    if model_type:
        (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def check_streams(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, [], skip_special_tokens=False)
    assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("kind", "model_type", "config"),
    [
        ("GPT2Tokenizer", "gpt2", {}),
        ("GPT2Tokenizer", "llama", {"add_prefix_space": True, "add_bos_token": True}),
        (
            "GPT2Tokenizer",
            "opt",
            dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>") | {"add_bos_token": True},
        ),
        ("GPTNeoXTokenizerFast", "gpt_neox", {}),
        ("CodeGenTokenizer", "phi", {}),
        ("Qwen2TokenizerFast", "qwen2", {"add_eos_token": True}),
        ("CohereTokenizer", "cohere", {"bos_token": "<s>", "add_bos_token": True}),
    ],
)
def test_ids_are_those_of_transformers(
    tmp_path: Path, vocabulary: Vocabulary, kind: str, model_type: str, config: dict[str, Any]
) -> None:
    path = folder(tmp_path, vocabulary, model_type, tokenizer_class=kind, **config)
    ours, theirs = load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
        check_streams(ours, text)


def test_a_folder_of_bare_files_goes_by_its_model_type(tmp_path: Path, vocabulary: Vocabulary) -> None:
    gpt2 = load_tokenizer(folder(tmp_path / "a", vocabulary, "gpt2"))
    assert gpt2.decode(gpt2.encode("Hello world ## é")) == "Hello world ## é"
    assert (gpt2.bos_token, gpt2.eos_token) == ("<|endoftext|>", "<|endoftext|>")
    assert gpt2.encode("x<|endoftext|>")[-1] == gpt2.eos_token_id == 0
    opt = load_tokenizer(folder(tmp_path / "b", vocabulary, "opt"))
    assert opt.encode("Hello") == [opt.convert_tokens_to_ids("</s>"), *gpt2.encode("Hello")]
    digits = load_tokenizer(folder(tmp_path / "c", vocabulary, "starcoder2", tokenizer_class="GPT2Tokenizer"))
    assert len(digits.encode("123")) == 3 > len(gpt2.encode("123"))


def test_special_tokens_that_the_vocabulary_lacks_are_not_made_up(tmp_path: Path, vocabulary: Vocabulary) -> None:
    ids = {token: i for i, token in enumerate(t for t in vocabulary[0] if t not in SPECIAL)}
    tokenizer = load_tokenizer(folder(tmp_path, (ids, vocabulary[1]), "opt"))
    assert tokenizer.vocab_size == len(ids)
    assert tokenizer.named_tokens == {}
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"


def test_the_demo_model_s_own_files_give_its_ids(tmp_path: Path) -> None:
    source = resolve_model("smollm2-135m")
    own = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    merges = [m if isinstance(m, str) else " ".join(m) for m in own["model"]["merges"]]
    added = {str(token["id"]): token for token in own["added_tokens"]}
    path = folder(tmp_path, (own["model"]["vocab"], merges), "starcoder2", added_tokens_decoder=added)
    ours, theirs = load_tokenizer(path), load_tokenizer(source)
    rng = random.Random(0)
    pieces = [*"abc DEF .,!?'\n\t  019#", "é", "日", "😀", "<|im_end|>", "'ll", "  ", "the ", "ing ", "\u200b", "##"]
    for text in [*TEXTS, *("".join(rng.choices(pieces, k=40)) for _ in range(200))]:
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.special_ids == theirs.special_ids
    assert ours.vocab_size == theirs.vocab_size


def test_added_tokens_of_older_folders(tmp_path: Path, vocabulary: Vocabulary) -> None:
    count = len(vocabulary[0])
    folder(tmp_path, vocabulary, "phi", eos_token="<|end|>")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"   ": count, "<|end|>": count + 5}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<s>"}}))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a   b<|end|>")
    assert ids[1::2] == [count, count + 5]
    assert tokenizer.decode(ids) == "a   b"
    assert tokenizer.special_ids >= {count + 5, tokenizer.convert_tokens_to_ids("<s>")}
    assert tokenizer.vocab_size == count + 6


def rank_file(vocabulary: Vocabulary) -> tuple[dict[bytes, int], str]:
    tokens = [bytes_of_level(t) for t in vocabulary[0] if t not in SPECIAL]
    ranks = {token: i for i, token in enumerate(sorted(tokens, key=lambda t: (len(t) > 1, tokens.index(t))))}
    return ranks, "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())


def lowest_rank_first(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's algorithm, written plainly."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [(ranks.get(parts[i] + parts[i + 1], 1 << 30), i) for i in range(len(parts) - 1)]
        if not pairs or min(pairs)[0] == 1 << 30:
            return [ranks[part] for part in parts]
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize(
    ("name", "model_type", "pre"), [("tokenizer.model", "llama", "llama-bpe"), ("qwen.tiktoken", "qwen2", "qwen2")]
)
def test_files_of_ranks_merge_the_lowest_rank_first(
    tmp_path: Path, vocabulary: Vocabulary, name: str, model_type: str, pre: str
) -> None:
    ranks, lines = rank_file(vocabulary)
    (tmp_path / name).write_text(lines)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    added = {str(len(ranks) + 3): {"content": "<|begin|>", "special": True}}
    config = {"bos_token": "<|begin|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    cut = tokenizers.Tokenizer(models.BPE())
    PRE_TOKENIZERS[pre].attach(cut)
    for text in TEXTS:
        normal = cut.normalizer.normalize_str(text) if cut.normalizer else text
        pieces = [bytes_of_level(piece) for piece, _ in cut.pre_tokenizer.pre_tokenize_str(normal)]
        wanted = [i for piece in pieces for i in lowest_rank_first(piece, ranks)]
        assert tokenizer.encode(text) == [len(ranks) + 3] * (model_type == "llama") + wanted
        check_streams(tokenizer, text)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("YQ== 0\nb?== 1\n", "at byte 7"),
        ("YQ== 0\nYg== 0\n", "rank occurs twice"),
        ("YQ== 0\nYg== 99999999\n", "larger than"),
        ("YQ== 0\nYg== 1\n", "254 of the 256 bytes"),
        ("YQ= 0\n", "not base64"),
    ],
)
def test_damaged_ranks_are_named(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "x.tiktoken").write_text(lines)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(TokenizerError, match=rf"x\.tiktoken.*{message}"):
        load_tokenizer(tmp_path)


def test_an_unknown_family_is_refused_with_the_known_ones(tmp_path: Path, vocabulary: Vocabulary) -> None:
    path = folder(tmp_path, vocabulary, "klingon", tokenizer_class="KlingonTokenizer")
    with pytest.raises(UnsupportedModelError, match=r"vocab\.json.*'KlingonTokenizer'.*'klingon'.*GPT2Token.*opt"):
        load_tokenizer(path)


def test_a_family_in_files_of_another_is_refused(tmp_path: Path, vocabulary: Vocabulary) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"model_type llama is not published as vocab\.json.*tokenizer_class"
    ):
        load_tokenizer(folder(tmp_path / "a", vocabulary, "llama"))
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x05\n\x01a")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UnsupportedModelError, match="gpt2 has no SentencePiece model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("merges.txt", "#version: 0.2\na\n", "'a' is not two tokens"),
        ("merges.txt", "a b c\n", "'a b c' is not two tokens"),
        ("merges.txt", "never seen\n", "do not fit"),
        ("vocab.json", "[]", "JSON object"),
        ("vocab.json", "{}", "no tokens"),
        ("vocab.json", '{"a": 1, "b": 1}', "one id"),
        ("vocab.json", '{"a": -1}', "whole number"),
        ("vocab.json", '{"a": 1e30}', "whole number"),
        ("added_tokens.json", '{"<x>": "one"}', "must be a number"),
        ("added_tokens.json", '{"<s>": 0}', "has the id 1, not 0"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', "must be an object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": {}}}', "no text for the id 5"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, vocabulary: Vocabulary, name: str, content: str, message: str) -> None:
    path = folder(tmp_path, vocabulary, "gpt2")
    (path / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(path)


def test_files_larger_than_any_tokenizer_s_are_not_read(
    tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_parts, "MAX_TOKENIZER", 1 << 10)
    with pytest.raises(TokenizerError, match=r"vocab\.json has .* bytes; at most 1024 are read"):
        load_tokenizer(folder(tmp_path, vocabulary, "gpt2"))


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
WORD_PIECE_TEXTS = ["the rivers", "The Rhine!", "naïve, 日本", "", "a [SEP] b", "unknownword a"]


def write(folder: Path, words: list[str] = WORDS, **config: Any) -> Path:
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **config}))
    return folder


@pytest.mark.parametrize("config", [{}, {"do_lower_case": False}, {"strip_accents": False}, {"do_lower_case": True}])
def test_words_of_bert(config: dict[str, Any], tmp_path: Path) -> None:
    ours = load_tokenizer(write(tmp_path, **config))
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), **config)
    for text in WORD_PIECE_TEXTS:
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
