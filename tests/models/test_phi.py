"""Phi-1 to Phi-2."""

from __future__ import annotations

import pytest

from octavo.core.errors import UnsupportedModelError
from octavo.models.config_files import read_model_config
from tests.models.zoo import SMALL, Zoo, edit_config


def test_phi(zoo: Zoo) -> None:
    from transformers import PhiConfig

    zoo(PhiConfig(**SMALL))
    edit_config(zoo.folder, qk_layernorm=True)
    with pytest.raises(UnsupportedModelError, match="qk_layernorm=true is not supported"):
        read_model_config(zoo.folder)
