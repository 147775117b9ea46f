"""The Llama family against transformers, and its bits however requests are scheduled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_networks import llama3, llama_tied_with_biases, qwen2, qwen3
from tests.models.zoo import PROMPTS, SMALL, Zoo, answers


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
