"""Phi-3 and Phi-4."""

from __future__ import annotations

from typing import Any

from tests.models.zoo import SMALL, Zoo, edit_config


def config(**values: Any) -> Any:
    from transformers import Phi3Config

    return Phi3Config(**SMALL, pad_token_id=0, **values)


def test_phi3(zoo: Zoo) -> None:
    zoo(config(sliding_window=30), tight={"num_gpu_blocks_override": 16, "block_size": 4})


def test_phi3_with_longrope_in_an_older_file(zoo: Zoo) -> None:
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5, **factors}
    model = zoo.save(config(rope_parameters=rope, original_max_position_embeddings=8, tie_word_embeddings=True))
    old = {"rope_theta": 100.0, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "su", **factors}}
    edit_config(zoo.folder, rope_parameters=None, **old)
    zoo.check_network(model)
