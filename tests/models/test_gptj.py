"""GPT-J."""

from __future__ import annotations

import pytest

from octavo.core.errors import ConfigError
from octavo.models.config_files import read_model_config
from tests.models.zoo import Zoo, edit_config


def test_gptj(zoo: Zoo) -> None:
    from transformers import GPTJConfig

    shape = {"vocab_size": 101, "n_embd": 48, "n_head": 3, "n_layer": 3, "n_positions": 96}
    zoo(GPTJConfig(**shape, rotary_dim=6, bos_token_id=0, eos_token_id=1))
    edit_config(zoo.folder, rotary_dim=18)
    with pytest.raises(ConfigError, match="rotary_dim must be even and at most 16, not 18"):
        read_model_config(zoo.folder)
