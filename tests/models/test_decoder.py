"""Decoders of plain layers, divided among tensor-parallel ranks and among pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.loader.weights import load_model
from octavo.models.config_files import ConfigReader, decoder_fields, read_activation, read_model_config, rotary_fields
from tests.models.test_gpt import bloom_config, falcon_config, gpt2_config, opt_config
from tests.models.test_network import PROMPT, tensor_parallel_logits
from tests.models.test_pipeline_stages import WHOLE, Chain
from tests.models.zoo import Zoo, assert_same, logits_of


def gptj() -> Any:
    from transformers import GPTJConfig

    return GPTJConfig(vocab_size=101, n_embd=48, n_head=6, n_layer=2, n_positions=96, rotary_dim=4)


def opt_350m() -> Any:
    return opt_config(do_layer_norm_before=False, word_embed_proj_dim=32)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (gpt2_config, 2),
        (opt_350m, 2),
        (gptj, 2),  # 101 rows of a head with a bias
        (bloom_config, 3),  # two slopes each
        (falcon_config, 2),  # a KV head that both ranks hold
    ],
)
def test_tensor_parallel_workers_together_compute_the_network(
    config: Callable[[], Any], size: int, zoo: Zoo, driver: Any
) -> None:
    expected = logits_of(zoo.save(config()), PROMPT)
    assert_same(tensor_parallel_logits(zoo.folder, driver, size, DType.FLOAT32), expected)


@pytest.mark.parametrize("config", [gpt2_config, opt_350m, bloom_config])
def test_stages_together_are_the_whole_bit_for_bit(config: Callable[[], Any], zoo: Zoo, driver: Any) -> None:
    zoo.save(config())
    read = read_model_config(zoo.folder)
    stages = [load_model(zoo.folder, read, replace(WHOLE, layers=range(*cut))) for cut in pairwise([0, 1, 3])]
    expected = driver(load_model(zoo.folder, read, WHOLE)).run("s", PROMPT, [7, 1])
    assert torch.equal(driver(Chain(stages)).run("s", PROMPT, [7, 1]), expected)


def test_impossible_settings_are_named() -> None:
    shape = {"hidden_size": 48, "num_attention_heads": 7, "num_hidden_layers": 1, "vocab_size": 5}
    reader = ConfigReader({**shape, "max_position_embeddings": 8, "act": "mish"}, Path("config.json"))
    with pytest.raises(ConfigError, match=r"hidden_size \(48\) must be a multiple of num_attention_heads \(7\)"):
        decoder_fields(reader)
    with pytest.raises(ConfigError, match=r"partial_rotary_factor \(0.25\) rotates 5 of 20"):
        rotary_fields(reader.with_defaults(partial_rotary_factor=0.25), 20)
    with pytest.raises(UnsupportedModelError, match="act='mish' is not supported; supported: gelu, gelu_new"):
        read_activation(reader, "act", "gelu")
