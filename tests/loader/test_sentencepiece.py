"""Models of SentencePiece, against ids that its own library (0.2.3) gave for the very same bytes."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import TokenizerError, UnsupportedModelError
from octavo.engine.tokenizer import TextStream, load_tokenizer
from octavo.loader.sentencepiece import parse_sentencepiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

#: Compiled rules: the ligature fi becomes f and i, a circled one 1, a no-break space a space.
CHARSMAP = zlib.decompress(
    base64.b64decode(
        "eNoV02WQ1lUUB+D/vMIXZCnpBkFy6FhSBClBurtDuiXEXaRZUkG6m6W7u8Olu0MBCQEVE573zjxzzpxz76c7vyBeEAQJPwgOxISC+fGD8I"
        "maPFwfEQQhfWxkKIg2dy3qQ8sERISfkJhEJCUJH5GMFCQnFSlJQ2rSkZYMpCcTGcnCvbhQ8LGalexkIwefkIuc5CE3L9KHgrxqfvJRkAIU"
        "phBFKUJxilGCSEpRkjKU5lPK8hnlqEB5KvI5lalEVapQjS/4kurUpAa1qUVd6lCfejSkAY1pRFOa0JxmtKQFrWlFW9rQnnZ0pAOd6UQXvq"
        "IbXelBd3rRkz70ph99GUB/BvI1gxnENwzhW4YSHf50vmMYIxjOKEYyhtGMYyzjiWEiE5jMJL5nClP5gR+ZxgymM4uZzGE285jLAuaziIUs"
        "YTHLWMoKlrOKlawmlrWsYT3r2MgGNrOJrWxhO9vYyQ52s4u97GE/+zjIAQ5ziKMc4TjHOMkJTnOKnzjDWeI4zzkucoHLXOIqV7jONW5yg9"
        "vc4i53uB/OAQ95wM884jG/8JQnPOPXcA54zm+85DWv+J03/Mkf/MVb/uFv/uNf3vE/mSWoQ+fgPareiaY="
    )
)

LETTERS = list("▁helowrdtif1éng")
MERGED = ["in", "ing", "th", "▁t", "▁th", "▁the", "▁w", "or", "▁wor", "ld", "▁world", "he", "ll", "hell", "▁hello"]
PIECES = [*LETTERS, *MERGED, "hello", "lo", "on", "▁f", "fi", "▁fi"]

#: Of each kind: whether it is unigram, the fields of its trainer and normalizer specs, and its user-defined pieces.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": 2, "byte_fallback": 1, "collapse": 0},
    "gemma": {"model_type": 2, "byte_fallback": 1, "collapse": 0, "prefix": 0, "user": ["▁▁", "▁▁▁", "\n", "<tool>"]},
    "normalized": {"model_type": 2, "charsmap": CHARSMAP},
    "unigram": {"model_type": 1, "charsmap": CHARSMAP},
    "unigram with bytes": {"model_type": 1, "byte_fallback": 1, "collapse": 0},
}

TEXTS = [
    "hello world, the thing",
    "  the   world\n\nhello    on  ",
    "élo 日本 😀\u00a0ﬁrst ① 1",
    "",
    " ",
    "hellohello<tool>or\u200b    <tool>  lo",
    "theworldinghellfifi w h l" * 3,
]


def message(*fields: tuple[int, int | float | str | bytes]) -> bytes:
    """A protobuf message."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value % (1 << 64))
        elif isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


def varint(value: int) -> bytes:
    out = []
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def model_bytes(kind: str) -> bytes:
    facts = KINDS[kind]
    pieces: list[tuple[str, float, int]] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(piece, 0.0, USER_DEFINED) for piece in facts.get("user", [])]
    if "byte_fallback" in facts:
        pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    # Longer pieces of a unigram model are likelier than what they are made of.
    pieces += [(p, -2.0 - 0.01 * i if facts["model_type"] == 1 else -float(i), NORMAL) for i, p in enumerate(PIECES)]
    trainer = message((3, facts["model_type"]), (35, facts.get("byte_fallback", 0)), (43, -1))
    rules = [(2, facts.get("charsmap", b"")), (3, facts.get("prefix", 1)), (4, facts.get("collapse", 1))]
    parts = [(1, message((1, piece), (2, score), (3, type_))) for piece, score, type_ in pieces]
    return message(*parts, (2, trainer), (3, message(*rules)))


def folder(path: Path, data: bytes, model_type: str = "llama", **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(data)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


TRUTH = Path(__file__).parent.parent / "data" / "sentencepiece_ids.json"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_those_of_the_library(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, model_bytes(kind)))
    for text, truth in zip(TEXTS, json.loads(TRUTH.read_text())[kind], strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == truth["ids"], text
        if 0 not in ids:  # for what it does not know the library writes a sign of its own
            assert tokenizer.decode(ids) == truth["text"]
        stream = TextStream(tokenizer, [])
        assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids)


def test_special_tokens_stand_in_the_model(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, model_bytes("llama")))
    assert tokenizer.named_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("hello")[:2] == [1, tokenizer.convert_tokens_to_ids("▁hello")]
    assert tokenizer.encode("hello</s>")[-1] == 2


def test_the_configuration_decides_over_the_family(tmp_path: Path) -> None:
    config = {
        "add_bos_token": False,
        "add_eos_token": True,
        "add_prefix_space": False,
        "tokenizer_class": "LlamaTokenizer",
    }
    tokenizer = load_tokenizer(folder(tmp_path, model_bytes("llama"), "unknown", **config))
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("hello")] == ["hello", "</s>"]


def test_added_tokens_have_the_ids_and_flags_of_the_configuration(tmp_path: Path) -> None:
    count = 259 + len(PIECES)
    added = {
        "2": {"content": "<|end|>", "special": True},  # another name for a piece
        str(count): {"content": "<|user|>", "special": True, "rstrip": True},
        str(count + 1): {"content": "<think>", "special": False},
    }
    tokenizer = load_tokenizer(folder(tmp_path, model_bytes("llama"), added_tokens_decoder=added, eos_token="<|end|>"))
    ids = tokenizer.encode("<|user|>   hello<think><|end|>", add_special_tokens=False)
    assert ids == [count, tokenizer.convert_tokens_to_ids("▁hello"), count + 1, 2]
    assert tokenizer.decode(ids) == "hello<think>"
    assert tokenizer.eos_token_id == 2
    with pytest.raises(TokenizerError, match="cannot have the id"):
        load_tokenizer(folder(tmp_path, model_bytes("llama"), added_tokens_decoder={"999": {"content": "<x>"}}))


@pytest.mark.parametrize("kind", ["llama", "unigram"])
def test_a_name_that_two_ids_have_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(TokenizerError, match="'</s>' occurs twice"):
        load_tokenizer(folder(tmp_path, model_bytes(kind), added_tokens_decoder={"1": {"content": "</s>"}}))


def test_t5_ends_texts_and_has_sentinels(tmp_path: Path) -> None:
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 3}
    tokenizer = load_tokenizer(folder(tmp_path, model_bytes("unigram"), "t5", **config))
    ids = tokenizer.encode("the <extra_id_0> world")
    names = [tokenizer.backend.id_to_token(i) for i in ids]
    assert names == ["▁the", "<extra_id_0>", "▁world", "</s>"]
    assert ids[1] == 3 + len(PIECES) + 2


def test_pegasus_has_its_masks_before_the_pieces(tmp_path: Path) -> None:
    """The ids that SentencePiece's own library gave for the text, and 103."""
    pieces = [("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)]
    pieces += [(piece, -2.0 - 0.01 * index, NORMAL) for index, piece in enumerate(PIECES)]
    parts = [(1, message((1, piece), (2, score), (3, kind))) for piece, score, kind in pieces]
    spec = (2, message((3, 1), (40, 2), (41, -1), (42, 1), (43, 0))), (3, message((2, CHARSMAP), (3, 1), (4, 1)))
    folder(tmp_path, message(*parts, *spec), "pegasus")
    (tmp_path / "tokenizer.model").rename(tmp_path / "spiece.model")
    tokenizer = load_tokenizer(tmp_path)
    ids = [3, 15, 34, 3, 2, 3, 2, 38, 9, 2, 11, 3, 14, 3, 14]
    assert tokenizer.encode("élo 日本 😀\u00a0ﬁrst ① 1") == [*(i + 103 for i in ids), 1]
    assert tokenizer.encode("<mask_1> the")[:1] == [2] and tokenizer.convert_tokens_to_ids("<unk_102>") == 104
    folder(tmp_path, model_bytes("unigram"), "pegasus")
    with pytest.raises(TokenizerError, match="pieces 0, 1 and 2 of Pegasus"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 9, b"\x0a\x05ab", b"{}", message((1, message((1, 5)))), b"\x0a\x00" * 3]
)
def test_what_is_no_model_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
        load_tokenizer(folder(tmp_path, data))


def test_word_models_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="not type 3"):
        parse_sentencepiece(tmp_path, model_bytes("llama") + message((2, message((3, 3)))))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_model_is_refused_or_serves(data: st.DataObject) -> None:
    content = bytearray(model_bytes("normalized"))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        tokenizer = parse_sentencepiece(Path("m"), bytes(content)).build()
    except (TokenizerError, UnsupportedModelError):
        return
    for text in TEXTS:
        tokenizer.encode(text)


def test_rules_that_lead_out_of_their_tables_are_refused(tmp_path: Path) -> None:
    outside = struct.pack("<IIIII", 16, 0x7FFFFC00, 0, 0, 0) + b"x\0"
    for rules in (outside, CHARSMAP[:700], b"\xff" * 8, CHARSMAP[:-3] + b"\xff\xff\0"):
        facts = message((1, message((1, "a"))), (3, message((2, rules))))
        with pytest.raises(TokenizerError, match="rules that normalize"):
            parse_sentencepiece(tmp_path, facts).build()


def test_a_token_longer_than_any_real_one_is_refused(tmp_path: Path) -> None:
    facts = message((1, message((1, "a" * 5000))), (2, message((3, 2))))
    with pytest.raises(TokenizerError, match="5000 characters"):
        parse_sentencepiece(tmp_path, facts).build()
