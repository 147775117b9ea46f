"""Command R."""

from __future__ import annotations

import pytest

from octavo.core.errors import UnsupportedModelError
from octavo.models.config_files import read_model_config
from tests.models.zoo import SMALL, Zoo, edit_config


def test_command_r(zoo: Zoo) -> None:
    from transformers import CohereConfig

    zoo(CohereConfig(**SMALL, attention_bias=True, logit_scale=0.3))
    edit_config(zoo.folder, use_qk_norm=True)
    with pytest.raises(UnsupportedModelError, match="use_qk_norm=true"):
        read_model_config(zoo.folder)
