"""StarCoder and StarCoder2."""

from __future__ import annotations

from typing import Any

from tests.models import test_gpt2
from tests.models.zoo import SMALL, Zoo


def bigcode(**values: Any) -> Any:
    from transformers import GPTBigCodeConfig

    return GPTBigCodeConfig(**test_gpt2.SHAPE, **values)


def test_starcoder(zoo: Zoo) -> None:
    zoo(bigcode())


def test_starcoder_with_a_kv_head_for_each_query_head(zoo: Zoo) -> None:
    zoo.check_network(zoo.save(bigcode(multi_query=False)))


def test_starcoder2(zoo: Zoo) -> None:
    from transformers import Starcoder2Config

    zoo(Starcoder2Config(**SMALL, sliding_window=30), tight={"num_gpu_blocks_override": 16, "block_size": 4})
