"""Rotary tables against those of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ROPE_TYPES, ModelConfig, RopeConfig
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.rope import RotaryTable

HEAD_DIM = 16
MAX_POSITION = 256
FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("linear", {"factor": 2.5}),
    ("dynamic", {"factor": 4.0}),
    ("proportional", {"partial_rotary_factor": 0.5}),
    ("proportional", {"partial_rotary_factor": 0.25, "factor": 2.0}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 64}),
    ("yarn", {"factor": 4.0}),
    ("yarn", {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 20.0, "beta_slow": 2.0}),
    ("yarn", {"factor": 8.0, "original_max_position_embeddings": 32, "truncate": False}),
    ("yarn", {"factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.5}),
    ("yarn", {"factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.25}),
    ("longrope", {**FACTORS, "original_max_position_embeddings": 64}),
    ("longrope", {**FACTORS, "original_max_position_embeddings": 64, "factor": 8.0}),
    ("longrope", {**FACTORS, "original_max_position_embeddings": 64, "attention_factor": 1.5}),
    ("llama3", {**LLAMA3, "original_max_position_embeddings": 64}),
    ("llama3", {**LLAMA3, "original_max_position_embeddings": 8192}),
]


def table_of(config: ModelConfig, positions: int | None = None) -> Tensor:
    table: Tensor = RotaryTable(config, ReferenceKernels(), positions).array
    return table


def ours(rope_type: str, parameters: dict[str, Any], max_position: int, configured: int = MAX_POSITION) -> Tensor:
    scaling = {k: v for k, v in parameters.items() if k != "partial_rotary_factor"}
    rope = RopeConfig(
        theta=500.0,
        rope_type=rope_type,
        partial_rotary_factor=parameters.get("partial_rotary_factor", 1.0),
        scaling={**scaling, "max_position_embeddings": configured},
    )
    config = ModelConfig("LlamaForCausalLM", 10, 64, 64, 1, 4, 4, HEAD_DIM, max_position, rope=rope)
    return table_of(config)


def theirs(rope_type: str, parameters: dict[str, Any], length: int) -> Tensor:
    """The table that transformers uses for a text of ``length`` tokens."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": rope_type, "rope_theta": 500.0, **parameters},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1, dtype=torch.float32), torch.arange(length)[None])
    return torch.cat((cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]), dim=-1)


def test_every_type_is_compared() -> None:
    assert {name for name, _ in CASES} == set(ROPE_TYPES)


@pytest.mark.parametrize(("rope_type", "parameters"), CASES)
def test_tables_are_those_of_transformers(rope_type: str, parameters: dict[str, Any]) -> None:
    table = ours(rope_type, parameters, MAX_POSITION)
    assert table.dtype == torch.float32 and table.shape == (MAX_POSITION, HEAD_DIM)
    # Angles reach 256 radians: a unit in the last place of the angle is 3e-5.
    torch.testing.assert_close(table, theirs(rope_type, parameters, MAX_POSITION), atol=4e-5, rtol=0)


@pytest.mark.parametrize("length", [200, 256, 257, 700])
def test_dynamic_table_is_that_of_the_longest_text(length: int) -> None:
    parameters = {"factor": 4.0}
    torch.testing.assert_close(
        ours("dynamic", parameters, length), theirs("dynamic", parameters, length), atol=1e-4, rtol=0
    )
    if length <= MAX_POSITION:
        assert torch.equal(ours("dynamic", parameters, length), ours("default", {}, length))


@pytest.mark.parametrize("length", [64, 65])
def test_longrope_changes_factors_at_the_original_length(length: int) -> None:
    parameters = {**FACTORS, "original_max_position_embeddings": 64}
    table = ours("longrope", parameters, length)
    torch.testing.assert_close(table, theirs("longrope", parameters, length), atol=4e-5, rtol=0)
    other = ours("longrope", parameters, 129 - length)
    assert not torch.allclose(table[:64], other[:64], atol=0.1)


def test_partial_rotation_has_a_narrower_table() -> None:
    table = ours("default", {"partial_rotary_factor": 0.5}, 8)
    assert table.shape == (8, 8)
    exact = torch.arange(8.0, dtype=torch.float64)[:, None] * 500.0 ** (-torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(table.double(), torch.cat((exact.cos(), exact.sin()), 1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("rope_type", "parameters", "says"),
    [
        ("linear", {}, "'linear' needs the parameter 'factor'"),
        ("linear", {"factor": 0}, "factor must be a positive number, not 0"),
        ("yarn", {"factor": "four"}, "'yarn' with parameters"),
        ("llama3", {"factor": 8.0}, "'llama3' needs the parameter 'low_freq_factor'"),
        ("longrope", {"short_factor": [1.0, 2.0, 3.0], "long_factor": [1.0]}, "'longrope' with parameters"),
    ],
)
def test_bad_parameters_are_refused_by_name(rope_type: str, parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ours(rope_type, parameters, 64)


@pytest.mark.parametrize(("rope_type", "parameters"), CASES)
def test_a_shorter_table_is_the_beginning_of_the_whole(rope_type: str, parameters: dict[str, Any]) -> None:
    """Bit for bit, although scalings depend on the longest text."""
    rope = RopeConfig(500.0, rope_type, scaling={**parameters, "max_position_embeddings": MAX_POSITION})
    config = ModelConfig("LlamaForCausalLM", 10, 64, 64, 1, 4, 4, HEAD_DIM, MAX_POSITION, rope=rope)
    whole = table_of(config)
    assert table_of(config, 100).equal(whole[:100])
    assert table_of(config, 10**6).equal(whole)
    grown = RotaryTable(config, ReferenceKernels(), 10)
    for positions in (5, 100, 10**6):
        grown.extend(positions)
    assert grown.array.equal(whole)


def test_a_long_table_is_computed_in_pieces_and_rounded_once() -> None:
    """Of angles in float32; the last bit of cosines and sines is that of exact ones."""
    config = ModelConfig("LlamaForCausalLM", 10, 64, 64, 1, 4, 4, HEAD_DIM, (1 << 16) + 3)
    wave = (10000.0 ** (torch.arange(0, 16, 2) / 16).double()).float()
    angles = torch.outer(torch.arange(config.max_position).float(), 1.0 / wave).double()
    assert table_of(config).equal(torch.cat((angles.cos(), angles.sin()), dim=1).float())


def test_unknown_type_is_refused() -> None:
    config = ModelConfig("LlamaForCausalLM", 10, 64, 64, 1, 4, 4, HEAD_DIM, 8)
    with pytest.raises(UnsupportedModelError, match="mrope"):
        table_of(replace(config, rope=RopeConfig(rope_type="mrope")))
