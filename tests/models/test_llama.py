"""The Llama family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_network import llama3, llama_tied_with_biases, qwen2, qwen3
from tests.models.zoo import PROMPTS, SMALL, Zoo, answers, edit_config


@pytest.mark.parametrize(
    ("family", "blocks"),
    [(llama3, 24), (llama_tied_with_biases, 24), (qwen2, 20), (qwen3, 24)],  # some layers of qwen2 have a window
)
def test_llama_and_qwen(zoo: Zoo, family: Callable[[], Any], blocks: int) -> None:
    zoo(family(), tight={"num_gpu_blocks_override": blocks, "block_size": 4})


def test_mistral(zoo: Zoo) -> None:
    from transformers import MistralConfig

    zoo(
        MistralConfig(**{**SMALL, "head_dim": 16}, sliding_window=7),
        preempts=False,
    )


def test_weights_in_several_files(zoo: Zoo, save_model: Callable[..., Any], tmp_path: Path) -> None:
    model = save_model(llama3())
    wanted = answers(zoo.engine(), PROMPTS)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert answers(zoo.engine(), PROMPTS) == wanted


def config(**values: Any) -> Any:
    from transformers import Olmo2Config

    return Olmo2Config(**SMALL, **values)


def test_olmo2(zoo: Zoo) -> None:
    zoo(config())


def test_olmo2_with_biases_and_a_tied_head(zoo: Zoo) -> None:
    zoo.check_network(zoo.save(config(attention_bias=True, tie_word_embeddings=True)))


def phi3_config(**values: Any) -> Any:
    from transformers import Phi3Config

    return Phi3Config(**SMALL, pad_token_id=0, **values)


def test_phi3(zoo: Zoo) -> None:
    zoo(phi3_config(sliding_window=30), tight={"num_gpu_blocks_override": 16, "block_size": 4})


def test_phi3_with_longrope_in_an_older_file(zoo: Zoo) -> None:
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5, **factors}
    model = zoo.save(phi3_config(rope_parameters=rope, original_max_position_embeddings=8, tie_word_embeddings=True))
    old = {"rope_theta": 100.0, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "su", **factors}}
    edit_config(zoo.folder, rope_parameters=None, **old)
    zoo.check_network(model)
