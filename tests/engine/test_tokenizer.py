from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from octavo import LLM, SamplingParams
from octavo.config.engine_config import EngineConfig
from octavo.core.errors import InvalidRequestError, TokenizerError, UnsupportedModelError
from octavo.engine.tokenizer import NoTokenizer, Tokenizer, find_tokenizer, load_tokenizer
from octavo.loader.resolve import resolve_model

TEXTS = [
    "Hello, world!",
    "",
    "  two  spaces\n\n",
    "日本語 é 😀👩‍👩‍👧",
    "x = [1, 2]  # <|im_end|> ok",
    "\u00a0\u200b\r\n\t",
]


def sentencepiece(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A small tokenizer of Llama 2's kind."""
    pieces = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld"]
    pieces += ["▁world", "a", "b", "▁a"]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *byte_tokens, *pieces])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "w"), ("o", "r")]
    merges += [("▁w", "or"), ("l", "d"), ("▁wor", "ld"), ("▁", "a")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | (config or {})
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def demo_folder() -> Path:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def demo(demo_folder: Path) -> Tokenizer:
    return load_tokenizer(demo_folder)


@pytest.fixture(scope="module")
def reference(demo_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(demo_folder)


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_and_decoding_are_those_of_transformers(demo: Tokenizer, reference: Any, text: str) -> None:
    ids = demo.encode(text)
    assert ids == reference(text)["input_ids"]
    for skip in (True, False):
        assert demo.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    assert demo.encode_batch([text, "other"]) == [ids, demo.encode("other")]


def test_special_tokens_of_the_demo_model(demo: Tokenizer, reference: Any) -> None:
    assert demo.special_ids == frozenset(range(17)) >= set(reference.all_special_ids)
    assert demo.vocab_size == 49152 == len(reference)
    assert demo.named_tokens["pad_token"] == "<|im_end|>"


def test_transformers_is_not_imported(demo_folder: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from octavo.engine.tokenizer import load_tokenizer\n"
        f"load_tokenizer(Path({str(demo_folder)!r}))\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
def test_beginning_and_end_tokens_come_as_in_transformers(tmp_path: Path, bos: bool | None, eos: bool | None) -> None:
    given = {"add_bos_token": bos, "add_eos_token": eos}
    folder = sentencepiece(tmp_path, {k: v for k, v in given.items() if v is not None})
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.encode("hello") == theirs("hello")["input_ids"]
    without = theirs("hello", add_special_tokens=False)["input_ids"]
    assert ours.encode("hello", add_special_tokens=False) == without != []


def test_tokens_named_special_only_in_the_configuration_are_special(tmp_path: Path) -> None:
    config = {
        "eos_token": {"__type": "AddedToken", "content": "ll", "special": True},
        "additional_special_tokens": ["or"],
    }
    ours = load_tokenizer(sentencepiece(tmp_path, config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.decode(ours.encode("hello world")) == theirs.decode(theirs("hello world")["input_ids"], True)
    assert theirs.eos_token_id in ours.special_ids


@pytest.mark.parametrize("word", ["a\ud800", "\udfff"])
def test_half_a_surrogate_pair_is_refused(demo: Tokenizer, word: str) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        demo.encode(word)
    with pytest.raises(InvalidRequestError, match="surrogate"):
        demo.encode_batch(["fine", word])


def test_a_prompt_that_is_no_text_is_refused(demo: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="must be a text, not list"):
        demo.encode([1, 2])  # type: ignore[arg-type]


def test_a_token_has_its_leading_space(demo: Tokenizer, tmp_path: Path) -> None:
    for tokenizer in (demo, load_tokenizer(sentencepiece(tmp_path))):
        ids = tokenizer.encode("hello world", add_special_tokens=False)
        assert tokenizer.token_text(ids[-1]) == " world"
        eos = tokenizer.named_tokens["eos_token"]
        eos_id = tokenizer.backend.token_to_id(eos)
        assert eos_id is not None and tokenizer.token_text(eos_id) == eos


def test_a_token_of_part_of_a_character_is_a_replacement_character(demo: Tokenizer) -> None:
    ids = demo.encode("🦩", add_special_tokens=False)
    assert len(ids) > 1
    assert "\ufffd" in demo.token_text(ids[0])
    assert b"".join(demo.token_bytes(i) or b"" for i in ids) == "🦩".encode()


def test_ids_that_are_no_token_decode_to_nothing(demo: Tokenizer) -> None:
    assert demo.decode([10**6, *demo.encode("hi"), 60000]) == "hi"
    assert demo.token_text(60000) == ""
    assert demo.token_bytes(60000) == b""


def test_a_bad_byte_does_not_take_whole_characters_with_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece(tmp_path))
    run = [3 + b for b in "é".encode() + b"\xff"]
    assert tokenizer.decode(run) == "é\ufffd"


def test_bad_words_are_found_with_and_without_a_space(demo: Tokenizer) -> None:
    for word in ("hello", " hello"):
        variants = demo.bad_word_ids(word)
        assert demo.encode("hello") in variants or word.startswith(" ")
        assert demo.encode(" hello") in variants
        assert len({tuple(v) for v in variants}) == len(variants)


def test_bad_words_of_sentencepiece_are_found_inside_a_line_too(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece(tmp_path))
    texts = [[tokenizer.token_text(i) for i in ids] for ids in tokenizer.bad_word_ids("hello")]
    assert [" hello"] in texts
    assert ["hello"] in texts


def test_a_bad_word_without_tokens_is_refused(demo: Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(demo.backend.to_str())
    backend.normalizer = normalizers.Replace(tokenizers.Regex("[^a]"), "")
    with pytest.raises(InvalidRequestError, match="no tokens"):
        Tokenizer(backend, {}, {}).bad_word_ids("xyz")


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    folder = sentencepiece(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("hello world hello")) == 4


def test_a_missing_tokenizer_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "old_tokenizer.bin").write_text("")
    (tmp_path / "vocab.json").write_text("{}")  # without merges.txt it is nothing
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*old_tokenizer\.bin.*merges\.txt.*save_pretrained"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_model_generates_with_the_files_that_its_family_was_published_with(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    shutil.copytree(tiny_model, folder)
    own = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(own["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    texts = []
    for path in (tiny_model, folder):
        llm = LLM(str(path), dtype="float32", num_gpu_blocks_override=16)
        texts.append(llm.generate("Hi é", SamplingParams(max_tokens=8, temperature=0.0))[0].outputs[0].text)
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize("given", ["vocab.json", "tokenizer.model"])
def test_random_weights_come_with_the_tokenizer_that_there_is(tiny_model: Path, tmp_path: Path, given: str) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    options = EngineConfig(model=str(tmp_path), load_format="dummy")
    assert isinstance(find_tokenizer(options, tmp_path), NoTokenizer)
    (tmp_path / given).write_text("?")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises((TokenizerError, UnsupportedModelError), match=given):
        find_tokenizer(options, tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_broken_configuration_is_named(tmp_path: Path, content: str) -> None:
    (sentencepiece(tmp_path) / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_an_unsupported_decoder_is_refused(tmp_path: Path) -> None:
    folder = sentencepiece(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.decoder = decoders.CTC()
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="CTC"):
        load_tokenizer(folder)


def test_a_chat_becomes_the_tokens_of_transformers(demo: Tokenizer, reference: Any) -> None:
    messages = [{"role": "user", "content": "Hi! <|im_end|>"}, {"role": "assistant", "content": "Hello."}]
    for prompt in (True, False):
        text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert demo.apply_chat_template(messages, add_generation_prompt=prompt) == text
        ids = reference.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert demo.encode_chat(messages, add_generation_prompt=prompt) == ids


def test_a_chat_has_one_beginning_token(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(sentencepiece(tmp_path, {"chat_template": template, "add_bos_token": True}))
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]).count(1) == 1


@functools.cache
def pair() -> tuple[Tokenizer, Any]:
    folder = resolve_model("smollm2-135m")
    return load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=40))
def test_any_text_gives_the_ids_and_the_text_of_transformers(text: str) -> None:
    ours, theirs = pair()
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_metaspace_tokenizers_keep_inner_spaces(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "▁hello": 1, "▁world": 2, "hello": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([1, 2]) == "hello world"
    assert tokenizer.token_text(2) == " world"


def test_a_tokenizer_in_use_is_shared_until_its_files_change(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    options = EngineConfig(model=str(folder))
    first = find_tokenizer(options, folder)
    assert find_tokenizer(options, folder) is first
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    other = find_tokenizer(options.model_copy(update={"chat_template": str(template)}), folder)
    assert other is not first and other.chat_templates != first.chat_templates
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "<other>"}))
    assert find_tokenizer(options, folder).eos_token == "<other>" != first.eos_token
