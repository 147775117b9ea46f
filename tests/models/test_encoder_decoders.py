"""Networks of encoder and decoder beside those of transformers: T5, Marian, Pegasus, mBART and Whisper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from octavo.core.request import EncoderInput
from octavo.models.config_files import read_model_config
from octavo.models.whisper import FEATURES, WhisperForConditionalGeneration
from tests.models.seq2seq import EncoderDecoderDriver, save_seq2seq
from tests.models.test_bart import DECODER, SHAPE
from tests.models.zoo import PROMPT, _backends, assert_same, edit_config, rename_tensors

T5_SHAPE = {
    "vocab_size": 101,
    "d_model": 40,
    "d_kv": 8,
    "d_ff": 80,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 6,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
WHISPER_SHAPE = {
    **{name: value for name, value in SHAPE.items() if name != "max_position_embeddings"},
    "num_mel_bins": 20,
    "max_source_positions": 30,
    "max_target_positions": 64,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
#: By what is special of it: the beginning of the names of transformers' classes, and values of the configuration.
FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "T5": ("T5", T5_SHAPE),
    "T5 1.1": ("T5", {**T5_SHAPE, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "T5 with gated silu": ("T5", {**T5_SHAPE, "feed_forward_proj": "gated-silu"}),
    "mT5": ("MT5", T5_SHAPE),
    "UMT5": ("UMT5", T5_SHAPE),
    "Marian": ("Marian", {**SHAPE, "scale_embedding": True, "activation_function": "swish"}),
    "Pegasus": ("Pegasus", {**SHAPE, "activation_function": "relu"}),
    "mBART": ("MBart", {**SHAPE, "scale_embedding": True}),
}
ENDINGS = {"Marian": "MTModel"}


def save(folder: Path, family: str, **values: Any) -> Any:
    """Saves a random model of transformers, and returns it as it is loaded again."""
    name, shape = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**shape, **values})
    model_class = getattr(transformers, name + ENDINGS.get(name, "ForConditionalGeneration"))
    model = save_seq2seq(folder, config, model_class)
    if name in ("Marian", "Pegasus"):  # a buffer, which is no parameter
        model.final_logits_bias.normal_(0, 0.3)
        for part in (model.model.encoder, model.model.decoder):
            part.embed_positions.weight.data = part.embed_positions.create_weight()
    if name == "T5":  # whose logits are scaled
        model.shared.weight.data *= 4
    model.save_pretrained(folder)
    return model


def expected_of(model: Any, decoder: list[int] = DECODER, **inputs: Any) -> tuple[Tensor, Tensor]:
    """The output of transformers' encoder, and the logits."""
    given = inputs or {"input_ids": torch.tensor([PROMPT])}
    with torch.inference_mode():
        output = model(decoder_input_ids=torch.tensor([decoder]), **given)
    return output.encoder_last_hidden_state[0], output.logits[0]


def check(folder: Path, given: EncoderInput, states: Tensor, expected: Tensor, decoder: list[int] = DECODER) -> None:
    """Compares all backends with what transformers gave, at once and in chunks."""
    assert expected.std() > 0.2
    for kernels in _backends():
        driver = EncoderDecoderDriver(folder, kernels)
        torch.testing.assert_close(driver.encode(given), states, atol=2e-4, rtol=2e-4)
        at_once = driver.run(decoder, [len(decoder)])
        assert_same(at_once, expected)
        for sizes in ([5, 1, 3], [1]):
            pieces = driver.run(decoder, sizes)
            if kernels.name == "cpu":
                assert torch.equal(pieces, at_once)
            else:
                assert_same(pieces, expected)
        if kernels.name == "cpu":
            rounded = EncoderDecoderDriver(folder, kernels, DType.BFLOAT16)
            rounded.encode(given)
            assert (rounded.run(decoder, [1]) - expected).square().mean().sqrt() < 0.15 * expected.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save(tmp_path, family)
    check(tmp_path, EncoderInput.of_tokens(PROMPT), *expected_of(model))


def test_t5_has_no_longest_text(tmp_path: Path) -> None:
    model = save(tmp_path, "T5")
    prompt, decoder = [i * 37 % 101 for i in range(90)], [0, *(i * 23 % 101 for i in range(50))]
    expected = expected_of(model, decoder, input_ids=torch.tensor([prompt]))
    check(tmp_path, EncoderInput.of_tokens(prompt), *expected, decoder)


def test_a_head_of_its_own(tmp_path: Path) -> None:
    """As Flan-T5 has it, whose config.json is older, and as transformers writes it today."""
    from safetensors.torch import load_file, save_file

    save(tmp_path, "T5 1.1")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(101, 40, generator=torch.Generator().manual_seed(1)) * 0.2
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert not torch.equal(model.lm_head.weight, model.shared.weight)
    expected = expected_of(model)
    check(tmp_path, EncoderInput.of_tokens(PROMPT), *expected)
    edit_config(tmp_path, tie_word_embeddings=False, scale_decoder_outputs=None, num_decoder_layers=2)
    check(tmp_path, EncoderInput.of_tokens(PROMPT), *expected)


def test_old_checkpoints_of_t5(tmp_path: Path) -> None:
    """They hold the embedding three times, and a bias that is not used."""
    from safetensors.torch import load_file, save_file

    model = save(tmp_path, "T5")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(8, 6)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check(tmp_path, EncoderInput.of_tokens(PROMPT), *expected_of(model))


def test_old_checkpoints_of_marian(tmp_path: Path) -> None:
    """They hold the positions, and may have no bias of the logits."""
    model = save(tmp_path, "Marian")
    model.final_logits_bias.zero_()
    rename_tensors(tmp_path, lambda name: None if name == "final_logits_bias" else name)
    check(tmp_path, EncoderInput.of_tokens(PROMPT), *expected_of(model))


def whisper(folder: Path, **values: Any) -> tuple[Any, Tensor]:
    """A random model, and features [channels, frames] for it."""
    config = transformers.WhisperConfig(**{**WHISPER_SHAPE, **values})
    model = save_seq2seq(folder, config, transformers.WhisperForConditionalGeneration)
    generator = torch.Generator().manual_seed(1)
    return model, torch.randn(config.num_mel_bins, 2 * config.max_source_positions, generator=generator)


def features(values: Tensor, positions: int) -> EncoderInput:
    return EncoderInput.of(FEATURES, values.numpy().tobytes(), positions)


@pytest.mark.parametrize("channels", [20, 32])
def test_whisper_s_logits_are_those_of_transformers(channels: int, tmp_path: Path) -> None:
    model, sound = whisper(tmp_path, num_mel_bins=channels)
    expected = expected_of(model, input_features=sound[None])
    check(tmp_path, features(sound, 30), *expected)
    facts = read_model_config(tmp_path).encoder_facts
    assert facts is not None and facts.audio_tokens == 30 and facts.audio_samples == 30 * 320


def test_features_of_another_shape_are_refused(tmp_path: Path) -> None:
    _, sound = whisper(tmp_path)
    config, prepare = read_model_config(tmp_path), WhisperForConditionalGeneration.prepare_input
    with pytest.raises(InvalidRequestError, match=r"20 x 60 numbers, not 1180"):
        prepare(config, FEATURES, sound[:, :59].numpy().tobytes())
    with pytest.raises(InvalidRequestError, match="reads sound, not tokens"):
        prepare(config, "tokens", np.arange(4, dtype="<i4").tobytes())


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("T5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj='mish'"),
        ("T5", {"is_encoder_decoder": False}, "is_encoder_decoder=false"),
        ("Marian", {"normalize_before": True}, "normalize_before=true"),
        ("Marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings=false"),
        ("Marian", {"decoder_vocab_size": 50}, "decoder_vocab_size=50"),
        ("Pegasus", {"static_position_embeddings": False}, "static_position_embeddings=false"),
        ("Pegasus", {"normalize_before": False}, "normalize_before=false"),
        ("mBART", {"add_final_layer_norm": False}, "add_final_layer_norm=false"),
        ("mBART", {"static_position_embeddings": True}, "static_position_embeddings=true"),
    ],
)
def test_what_is_not_computed_is_refused(family: str, values: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path, family)
    edit_config(tmp_path, **values)
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_config(tmp_path)


def test_settings_of_old_files_that_say_what_is_computed(tmp_path: Path) -> None:
    save(tmp_path, "Pegasus")
    edit_config(tmp_path, normalize_before=True, normalize_embedding=False, add_final_layer_norm=True)
    assert read_model_config(tmp_path).architecture == "PegasusForConditionalGeneration"


def test_impossible_values_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "T5")
    edit_config(tmp_path, d_kv=0)
    with pytest.raises(ConfigError, match="d_kv must be a positive integer, not 0"):
        read_model_config(tmp_path)
