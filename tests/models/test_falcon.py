"""Falcon."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.models.config_files import read_model_config
from tests.models.zoo import SMALL, Zoo, edit_config


def config(**values: Any) -> Any:
    from transformers import FalconConfig

    shape = {name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "intermediate_size")}
    return FalconConfig(**{**shape, **values})


def use_sdpa(model: Any) -> None:
    """Eager attention of transformers adds the biases of ALiBi twice: in the mask too, which sdpa takes them from."""
    model.config._attn_implementation = "sdpa"


GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}


def test_falcon_with_grouped_heads(zoo: Zoo) -> None:
    zoo(config(**GROUPED))
    edit_config(zoo.folder, parallel_attn=False)
    with pytest.raises(UnsupportedModelError, match="parallel_attn=false with new_decoder_architecture=true"):
        read_model_config(zoo.folder)
    edit_config(zoo.folder, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"num_attention_heads \(6\) must be a multiple of num_kv_heads \(4\)"):
        read_model_config(zoo.folder)


def test_falcon_with_linear_biases(zoo: Zoo) -> None:
    # Four heads have slopes, and their products with positions, that the bfloat16 of transformers holds.
    values = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
    zoo(config(**values, hidden_size=64, num_attention_heads=4), change=use_sdpa)


@pytest.mark.parametrize(
    "values", [{}, {**GROUPED, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 80, "tie_word_embeddings": False}]
)
def test_falcon_variants(values: dict[str, Any], zoo: Zoo) -> None:
    zoo.check_network(zoo.save(config(**values)))
