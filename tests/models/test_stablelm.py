"""StableLM."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import UnsupportedModelError
from octavo.models.config_files import read_model_config
from tests.models.zoo import SMALL, Zoo, edit_config


def config(**values: Any) -> Any:
    from transformers import StableLmConfig

    # A quarter of the 16 dimensions of a head is rotated.
    shape = {**SMALL, "num_attention_heads": 3, "num_key_value_heads": 1}
    return StableLmConfig(**shape, **values)


def test_stablelm(zoo: Zoo) -> None:
    zoo(config(use_qkv_bias=True))
    edit_config(zoo.folder, qk_layernorm=True)
    with pytest.raises(UnsupportedModelError, match="qk_layernorm=true"):
        read_model_config(zoo.folder)


def test_stablelm_with_parallel_parts(zoo: Zoo) -> None:
    zoo.check_network(zoo.save(config(use_parallel_residual=True)))
