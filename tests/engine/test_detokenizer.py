from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from octavo.core.sampling_params import SamplingParams
from octavo.engine.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from octavo.loader.resolve import resolve_model
from tests.busy_machine import once_in_three

# Ids in the SentencePiece tokenizer: byte 0, "▁hello".
BYTE, HELLO = 3, 260


@functools.cache
def byte_level() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


@functools.cache
def sentencepiece(prefix: bool = True) -> Tokenizer:
    pieces = ["▁", "▁hello", "▁world", "hello", "日", "本", "😀", "é", "\ufffd", "ab", "b", "▁▁", "."]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *byte_tokens, *pieces, "a"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space] if prefix else [space])
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, {})


def detokenizing(
    tokenizer: Tokenizer, prompt: list[int], *, visible_tokens: frozenset[int] = frozenset(), **params: Any
) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **params), visible_tokens)


def run(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, **options: Any) -> str:
    """The text in pieces, checking that it is the one that is taken at once."""
    detokenizer = detokenizing(tokenizer, prompt or [], **options)
    shown = ""
    for token_id in ids:
        match = detokenizer.append([token_id])
        shown += detokenizer.take_text()
        if match:
            break
    detokenizer.finish()
    shown += detokenizer.take_text()
    at_once = detokenizing(tokenizer, prompt or [], **options)
    at_once.append(ids)
    at_once.finish()
    assert shown == at_once.take_text()
    assert at_once.take_text() == ""
    return shown


def interesting_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    texts = ["hello world", "日本語", "😀👩‍👩‍👧", "é\n", "<|im_end|>", "\ufffd", " "]
    whole = st.sampled_from([tokenizer.encode(t, add_special_tokens=False) for t in texts])
    single = st.integers(0, tokenizer.vocab_size + 3).map(lambda i: [i])
    if tokenizer.decoder_kind == "byte_level":
        bytewise = [tokenizer.encode(c, add_special_tokens=False) for c in "🦩𓀀ﷺ"]
        single |= st.sampled_from([[i] for ids in bytewise for i in ids])
    else:
        single |= st.integers(BYTE, BYTE + 255).map(lambda i: [i])
        single |= st.sampled_from(list("é日😀".encode())).map(lambda b: [BYTE + b])
    return st.lists(whole | single, max_size=12).map(lambda parts: list(itertools.chain(*parts)))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "no_prefix": lambda: sentencepiece(False),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_final_text_is_that_of_decoding_at_once(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    ids = data.draw(interesting_ids(tokenizer))
    skip = data.draw(st.booleans())
    assert run(tokenizer, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=12), st.lists(st.integers(0, 49151), max_size=4))
def test_byte_level_text_does_not_depend_on_the_prompt(ids: list[int], prompt: list[int]) -> None:
    tokenizer = byte_level()
    wanted = tokenizer.backend.decode(ids, skip_special_tokens=True)  # the library's own, not ours
    assert run(tokenizer, ids, prompt, skip_special_tokens=True) == wanted


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_sentencepiece_continues_the_prompts_text(data: st.DataObject) -> None:
    tokenizer = sentencepiece()
    ids = data.draw(interesting_ids(tokenizer))
    prompt = [1, *tokenizer.encode("hello", add_special_tokens=False)]
    text = run(tokenizer, ids, prompt, skip_special_tokens=True)
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids)


def plain_decode(tokenizer: Tokenizer, ids: list[int], prefix: bool) -> str:
    """Runs of byte tokens as UTF-8, other tokens as they are written, one leading space off."""
    known = [i for i in ids if i not in (0, 1, 2) and i < tokenizer.vocab_size]
    text = ""
    for is_byte, run_ids in itertools.groupby(known, key=lambda i: BYTE <= i < BYTE + 256):
        if is_byte:
            text += bytes(i - BYTE for i in run_ids).decode("utf-8", errors="replace")
        else:
            text += "".join(str(tokenizer.backend.id_to_token(i)) for i in run_ids).replace("▁", " ")
    return text[1:] if prefix and text.startswith(" ") else text


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_sentencepiece_text_is_what_its_tokens_say(prefix: bool, data: st.DataObject) -> None:
    tokenizer = sentencepiece(prefix)
    ids = data.draw(interesting_ids(tokenizer))
    assert run(tokenizer, ids) == plain_decode(tokenizer, ids, prefix)
    assert tokenizer.decode(ids) == plain_decode(tokenizer, ids, prefix)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from("hello world日本😀é\n.ab  "), max_size=30))
def test_text_streams_back(text: str) -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        assert run(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == text


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        ids = tokenizer.encode("🦩", add_special_tokens=False)
        assert len(ids) > 1
        detokenizer = detokenizing(tokenizer, [])
        for token_id in ids[:-1]:
            detokenizer.append([token_id])
            assert detokenizer.take_text() == ""
        detokenizer.append(ids[-1:])
        assert detokenizer.take_text() == "🦩"


def test_half_a_character_at_the_end_is_a_replacement_character() -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        ids = tokenizer.encode("hello🦩", add_special_tokens=False)
        detokenizer = detokenizing(tokenizer, [])
        detokenizer.append(ids[:-1])
        assert detokenizer.take_text() == "hello"
        detokenizer.finish()
        assert detokenizer.take_text() == "\ufffd"


def test_a_line_break_made_of_a_byte_token_comes_at_once() -> None:
    detokenizer = detokenizing(sentencepiece(), [1], stop=["\n"])
    assert detokenizer.append([HELLO, BYTE + 10]) == "\n"
    assert detokenizer.take_text() == "hello"


def characters(text: str) -> list[int]:
    """One token a character."""
    tokenizer = byte_level()
    return [tokenizer.encode(c, add_special_tokens=False)[0] for c in text]


def stopped(text: str, stop: list[str], step: int = 1, **options: Any) -> tuple[tuple[str, int] | None, str]:
    detokenizer = detokenizing(byte_level(), [], stop=stop, **options)
    ids, match = characters(text), None
    for i in range(0, len(ids), step):
        match = match or detokenizer.append(ids[i : i + step])
    match = match or detokenizer.finish()
    return (match, detokenizer.num_tokens) if match else None, detokenizer.take_text()


@pytest.mark.parametrize("step", [1, 2, 7, 100])
def test_a_stop_string_is_cut_off_wherever_tokens_end(step: int) -> None:
    assert stopped("one two three", ["two"], step) == (("two", 7), "one ")
    kept = stopped("one two three", ["two"], step, include_stop_str_in_output=True)
    assert kept == (("two", 7), "one two")


def test_a_stop_string_inside_one_token_is_found() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("say hello there", add_special_tokens=False)
    assert tokenizer.token_text(ids[1]) == " hello"
    detokenizer = detokenizing(tokenizer, [], stop=["ll"])
    assert (detokenizer.append(ids), detokenizer.num_tokens) == ("ll", 2)
    assert detokenizer.append(ids) is None
    assert detokenizer.take_text() == "say he"


def test_the_stop_string_that_ends_first_wins_and_of_these_the_longest() -> None:
    for step in (1, 5):
        assert stopped("xabcd", ["abcd", "bc"], step) == (("bc", 4), "xa")
        assert stopped("xabcd", ["c", "abc", "bc"], step) == (("abc", 4), "x")


@pytest.mark.parametrize("minimum", [0, 1, 3, 4, 5, 6, 7])
def test_a_stop_string_before_min_tokens_is_ordinary_text(minimum: int) -> None:
    match, text = stopped("ab ab ab", ["ab"], min_tokens=minimum)
    end = next(n for n in (2, 5, 8) if n >= minimum)
    assert match == ("ab", end)
    assert text == "ab ab ab"[: end - 2]


def test_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    detokenizer = detokenizing(byte_level(), [], stop=["END."])
    seen = []
    for token_id in characters("x ENENDS E"):
        detokenizer.append([token_id])
        seen.append(detokenizer.take_text())
    assert seen == ["x", " ", "", "", "EN", "", "", "ENDS", " ", ""]
    assert detokenizer.finish() is None
    assert detokenizer.take_text() == "E"


def test_nothing_is_held_back_if_the_stop_string_is_kept() -> None:
    detokenizer = detokenizing(byte_level(), [], stop=["END"], include_stop_str_in_output=True)
    detokenizer.append(characters("x EN"))
    assert detokenizer.take_text() == "x EN"


def naive(text: str, stops: list[str], minimum: int) -> tuple[str, int] | None:
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s) and end >= minimum]
        if found:
            return max(found, key=len), end
    return None


@settings(max_examples=100, deadline=None)
@given(
    st.text("ab", max_size=25),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(0, 12),
    st.integers(1, 4),
)
def test_stop_strings_are_found_as_by_looking_at_every_end(
    text: str, stops: list[str], minimum: int, step: int
) -> None:
    wanted = naive(text, stops, minimum)
    match, left = stopped(text, stops, step, min_tokens=minimum)
    if wanted is None:
        assert (match, left) == (None, text)
    else:
        stop, end = wanted
        assert match == (stop, end)
        assert left == text[: end - len(stop)]


@settings(max_examples=100, deadline=None)
@given(st.text("ab", max_size=25), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_streamed_text_is_never_taken_back(text: str, stops: list[str]) -> None:
    run(byte_level(), characters(text), stop=stops)


def test_a_stop_string_may_end_with_a_broken_character() -> None:
    ids = byte_level().encode("x🦩", add_special_tokens=False)
    detokenizer = detokenizing(byte_level(), [], stop=["x\ufffd"])
    assert detokenizer.append(ids[:-1]) is None
    assert (detokenizer.finish(), detokenizer.num_tokens) == ("x\ufffd", len(ids) - 1)
    assert detokenizer.take_text() == ""


def test_special_tokens_are_left_out_or_kept() -> None:
    ids = [*characters("ab"), 2, *characters("c")]
    assert run(byte_level(), ids) == "abc"
    assert run(byte_level(), ids, skip_special_tokens=False) == "ab<|im_end|>c"


def seconds(ids: list[int], tokenizer: Tokenizer, stop: list[str]) -> float:
    detokenizer = detokenizing(tokenizer, [], stop=stop)
    start = time.process_time()
    for token_id in ids:
        detokenizer.append([token_id])
        detokenizer.take_text()
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["plain", "bytes", "broken", "stop", "sentencepiece bytes"])
def test_time_grows_with_the_length_and_not_faster(pattern: str) -> None:
    tokenizer = sentencepiece() if pattern.startswith("sentencepiece") else byte_level()
    rng = random.Random(0)
    unit = {
        "plain": lambda n: [rng.randrange(100, 40000) for _ in range(n)],
        "bytes": lambda n: [byte_level().encode("🦩", add_special_tokens=False)[-1]] * n,
        "broken": lambda n: characters("\ufffd") * n,
        "stop": lambda n: characters("a") * n,
        "sentencepiece bytes": lambda n: [BYTE + 0x80] * n,
    }[pattern]

    def cost(n: int) -> float:
        stop = ["a" * (n // 2) + "b", "a" * n + "b"] if pattern == "stop" else ["xyz"]
        return min(seconds(unit(n), tokenizer, stop) for _ in range(3))

    def measure() -> dict[str, bool]:
        small, large = cost(4000), cost(32000)
        return {f"{small} s for 4000 tokens, {large} s for 32000": large < 8 * small * 3 + 0.02}

    cost(1000)
    once_in_three(measure)


def test_folder_tokenizers_load(tmp_path: Path) -> None:
    sentencepiece().backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decoder_kind == "byte_fallback"
    assert byte_level().decoder_kind == "byte_level"
