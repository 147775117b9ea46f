"""BART's network beside that of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.dtypes import DType
from octavo.core.request import EncoderInput
from tests.models.seq2seq import EncoderDecoderDriver, save_seq2seq
from tests.models.zoo import PROMPT, _backends, assert_same

SHAPE = {
    "vocab_size": 101,
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
DECODER = [2, 45, 7, 61, 12, 90, 33, 8, 77, 19, 54]


def bart(**values: Any) -> Any:
    from transformers import BartConfig

    return BartConfig(**{**SHAPE, **values})


@pytest.mark.parametrize("values", [{}, {"scale_embedding": True, "activation_function": "relu"}])
def test_logits_are_those_of_transformers(values: dict[str, Any], tmp_path: Path) -> None:
    model = save_seq2seq(tmp_path, bart(**values))
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([PROMPT]), decoder_input_ids=torch.tensor([DECODER]))
    expected = output.logits[0]
    assert expected.std() > 0.2
    for kernels in _backends():
        driver = EncoderDecoderDriver(tmp_path, kernels)
        states = driver.encode(EncoderInput.of_tokens(PROMPT))
        torch.testing.assert_close(states, output.encoder_last_hidden_state[0], atol=1e-4, rtol=1e-4)
        at_once = driver.run(DECODER, [len(DECODER)])
        assert_same(at_once, expected)
        for sizes in ([5, 1, 3], [3, 1], [1]):
            pieces = driver.run(DECODER, sizes)
            if kernels.name == "cpu":
                assert torch.equal(pieces, at_once)
            else:
                assert_same(pieces, expected)
        if kernels.name == "cpu":
            rounded = EncoderDecoderDriver(tmp_path, kernels, DType.BFLOAT16)
            rounded.encode(EncoderInput.of_tokens(PROMPT))
            assert (rounded.run(DECODER, [1]) - expected).square().mean().sqrt() < 0.12 * expected.std()
