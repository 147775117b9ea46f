"""Whisper models in CTranslate2's format."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from octavo.core.errors import ModelNotFoundError, OctavoError, UnsupportedModelError, WeightError
from octavo.loader.ctranslate2 import read_ctranslate2
from octavo.loader.resolve import resolve_model
from octavo.loader.weights import read_headers, read_safetensors
from tests.loader.ctranslate2_files import END, HIDDEN, model_bytes, whisper_arrays, write_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return write_folder(tmp_path / "whisper-nano.en")


def test_the_names_are_those_of_transformers(folder: Path) -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    resolved = resolve_model(str(folder))
    model = WhisperForConditionalGeneration(WhisperConfig.from_pretrained(resolved))
    expected = {name: tuple(values.shape) for name, values in model.state_dict().items() if name != "proj_out.weight"}
    assert {name: stored.shape for name, stored in read_headers(resolved).items()} == expected


def test_the_values_are_those_of_the_file(folder: Path) -> None:
    arrays = whisper_arrays()
    tensors = dict(read_safetensors(resolve_model(str(folder))))
    joined = arrays["decoder/layer_1/self_attention/linear_0/weight"]
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        part = joined[index * HIDDEN : (index + 1) * HIDDEN]
        assert np.array_equal(tensors[f"model.decoder.layers.1.self_attn.{name}.weight"], part)
    biases = arrays["decoder/layer_0/attention/linear_1/bias"]
    assert np.array_equal(tensors["model.decoder.layers.0.encoder_attn.v_proj.bias"], biases[HIDDEN:])
    assert np.array_equal(tensors["model.encoder.conv2.weight"], arrays["encoder/conv2/weight"])
    assert np.array_equal(tensors["model.decoder.embed_tokens.weight"], arrays["decoder/embeddings/weight"])
    assert all(tensor.dtype == np.float16 for tensor in tensors.values())


def test_what_generation_needs_is_said(folder: Path) -> None:
    generation = json.loads((resolve_model(str(folder)) / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == [1, 2]
    assert generation["begin_suppress_tokens"] == [220, END]
    assert generation["alignment_heads"] == [[1, 0]]
    assert generation["decoder_start_token_id"] == END + 1
    assert generation["is_multilingual"] is False
    assert "lang_to_id" not in generation


def test_languages_of_a_multilingual_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    source = write_folder(tmp_path / "nano", whisper_arrays(vocab=51865), end=50257)
    generation = json.loads((resolve_model(str(source)) / "generation_config.json").read_text())
    assert generation["is_multilingual"] is True
    assert generation["lang_to_id"] == {"<|en|>": 50259, "<|de|>": 50260}
    assert generation["task_to_id"] == {"translate": 50261, "transcribe": 50262}


def test_a_resolved_folder_is_resolved_again_to_itself(folder: Path) -> None:
    resolved = resolve_model(str(folder))
    assert resolve_model(str(resolved)) == resolved


def test_weights_behind_a_link_are_found(folder: Path, tmp_path: Path) -> None:
    """As in a folder of the hub's cache."""
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for name in ("model.bin", "config.json", "tokenizer.json"):
        os.symlink(folder / name, linked / name)
    assert len(read_headers(resolve_model(str(linked)))) > 50


def test_a_pickle_of_that_name_is_none_of_these(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04" + bytes(1000))
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    with pytest.raises(WeightError, match="pickles"):
        read_headers(resolve_model(str(tmp_path)))


SMALL: dict[str, np.ndarray] = {
    "decoder/layer_norm/beta": np.arange(4, dtype=np.float32),
    "decoder/num_heads": np.array(2, np.int16),
}


def test_a_file_that_ends_anywhere_is_truncated(tmp_path: Path) -> None:
    whole = model_bytes(SMALL, {"a": "decoder/num_heads"})
    path = tmp_path / "model.bin"
    path.write_bytes(whole)
    assert read_ctranslate2(path).integer("a") == 2
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightError, match="truncated"):
            read_ctranslate2(path)


def test_no_change_of_a_byte_does_harm(tmp_path: Path) -> None:
    """It is refused, or read as another file that is whole."""
    whole = model_bytes(SMALL, {"a": "decoder/num_heads"})
    path = tmp_path / "model.bin"
    for at in range(len(whole)):
        for bits in (0x01, 0x80, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :])
            try:
                file = read_ctranslate2(path)
            except OctavoError:
                continue
            assert all(t.offset + t.nbytes <= len(whole) for t in file.tensors.values())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"decoder/projection/weight_scale": np.ones(4, np.float32)}, UnsupportedModelError, "is quantized"),
        ({"decoder/layer_0/ffn/linear_0/weight": np.ones((4, 4), np.int8)}, UnsupportedModelError, "is quantized"),
        ({"decoder/pre_norm": np.array(0, np.int8)}, UnsupportedModelError, "pre_norm = 0"),
        (
            {"decoder/layer_0/gate/weight": np.ones(3, np.float32)},
            WeightError,
            r"layer_0/gate/weight' in .* is none",
        ),
        ({"decoder/layer_0/self_attention/linear_0/weight": np.ones((4, 4), np.float32)}, WeightError, "3 projections"),
    ],
)
def test_what_is_no_whisper_model_is_refused(
    tmp_path: Path, change: dict[str, np.ndarray], error: type[OctavoError], message: str
) -> None:
    (tmp_path / "model.bin").write_bytes(model_bytes(whisper_arrays() | change))
    with pytest.raises(error, match=message):
        read_headers(tmp_path)


def test_other_kinds_and_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(model_bytes(SMALL, spec="TransformerSpec"))
    with pytest.raises(UnsupportedModelError, match="'TransformerSpec'; 'WhisperSpec' is read"):
        read_headers(tmp_path)
    path.write_bytes(model_bytes(SMALL, version=3))
    with pytest.raises(UnsupportedModelError, match="binary version 3; versions 4 to 6 are read"):
        read_headers(tmp_path)


def test_a_size_that_contradicts_the_shape_is_refused(tmp_path: Path) -> None:
    whole = model_bytes(SMALL)
    at = whole.index(struct.pack("<I", 16), 40)
    (tmp_path / "model.bin").write_bytes(whole[:at] + struct.pack("<I", 12) + whole[at + 4 :])
    with pytest.raises(WeightError, match=r"'decoder/layer_norm/beta' in .* is F32 \[4\] in 12 bytes"):
        read_ctranslate2(tmp_path / "model.bin")


def test_a_folder_without_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(WeightError, match=r"tokenizer\.json is missing"):
        resolve_model(str(folder))


def test_a_folder_without_config_is_no_model(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError):
        resolve_model(str(folder))
