"""Mamba, Falcon-Mamba and Mamba 2: networks without attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.models.config_files import read_model_config
from tests.models.hybrid import check_continues_from_checkpoints
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import (
    PROMPTS,
    SMALL,
    Zoo,
    edit_config,
    rename_tensors,
)

MAMBA = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")}
MAMBA |= {"num_hidden_layers": 2, "time_step_rank": 6, "pad_token_id": 0}
#: Two heads of each group; heads that are no multiple of a vector.
MAMBA2 = {**MAMBA, "num_heads": 4, "head_dim": 24, "n_groups": 2, "state_size": 20, "chunk_size": 8}
TIGHT = {"num_gpu_blocks_override": 9, "state_checkpoint_tokens": 8}
DTYPES = [DType.FLOAT32, DType.BFLOAT16]


def mamba2(**values: Any) -> Any:
    from transformers import Mamba2Config

    return Mamba2Config(**{**MAMBA2, **values})


def mamba(**values: Any) -> Any:
    from transformers import MambaConfig

    return MambaConfig(**{**MAMBA, **values})


def falcon_mamba(**values: Any) -> Any:
    from transformers import FalconMambaConfig

    return FalconMambaConfig(**{**MAMBA, "state_size": 12, "use_bias": True, "tie_word_embeddings": False, **values})


def test_mamba2(zoo: Zoo) -> None:
    zoo(mamba2(), tight=TIGHT, preempts=False)


def test_mamba2_with_biases_and_bounds_of_its_time_steps(zoo: Zoo) -> None:
    model = zoo.save(mamba2(use_bias=True, time_step_limit=(0.5, 0.9), n_groups=1))
    rename_tensors(zoo.folder, lambda name: name.replace("backbone.", ""))
    zoo.check_network(model)


def test_mamba(zoo: Zoo) -> None:
    zoo(mamba(), tight=TIGHT, preempts=False)


def test_falcon_mamba(zoo: Zoo) -> None:
    zoo.check_network(zoo.save(falcon_mamba(expand=16, intermediate_size=72)))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"n_groups": 3}, r"num_heads \(4\) must be a multiple of n_groups \(3\)"),
        ({"head_dim": "auto", "num_heads": 7, "n_groups": 7}, r"num_heads \(7\) must divide the 96 channels"),
        ({"state_size": 1024}, "state_size must be an integer from 1 to 512, not 1024"),
        ({"conv_kernel": 1}, "conv_kernel must be 2 to 16, not 1"),
        ({"time_step_limit": [0.0]}, r"time_step_limit must be two numbers, not \[0.0\]"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported'),
    ],
)
def test_values_that_cannot_be_are_named(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    mamba2(architectures=["Mamba2ForCausalLM"]).save_pretrained(tmp_path)
    edit_config(tmp_path, **values)
    with pytest.raises((ConfigError, UnsupportedModelError), match=says):
        read_model_config(tmp_path)


def test_mamba2_from_a_checkpoint_of_its_state(zoo: Zoo) -> None:
    zoo.save(mamba2())
    check_continues_from_checkpoints(zoo, TIGHT, [PROMPTS[0], PROMPTS[1]] * 4, recomputes=True)


def test_checkpoints_of_a_model_of_states_are_its_blocks(zoo: Zoo) -> None:
    zoo.save(mamba())
    for given, size in (({}, 512), ({"block_size": 32}, 32), ({"state_checkpoint_tokens": 64}, 64)):
        core = zoo.engine(**given).llm_engine.core
        assert core.options.block_size == core.options.state_checkpoint_tokens == core.blocks.block_size == size
    with pytest.raises(ConfigError, match=r"block_size \(16\) and state_checkpoint_tokens \(512\) must be equal"):
        zoo.engine(block_size=16, state_checkpoint_tokens=512)
    with pytest.raises(ConfigError, match="state_checkpoint_tokens must be at most 1024, not 2048"):
        zoo.engine(state_checkpoint_tokens=2048)


@pytest.mark.parametrize("dtype", DTYPES)
def test_1_and_2_tensor_parallel_workers_give_the_same_bits(zoo: Zoo, driver: Any, dtype: DType) -> None:
    for config in (falcon_mamba(hidden_size=64), mamba2(hidden_size=64, head_dim=32)):
        zoo.save(config)
        one, two = (tensor_parallel_logits(zoo.folder, driver, size, dtype) for size in (1, 2))
        assert torch.equal(one, two)
