"""OLMo 2 against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.models.config_files import read_model_config
from octavo.models.registry import make_network
from tests.models.zoo import SMALL, Zoo


def config(**values: Any) -> Any:
    from transformers import Olmo2Config

    return Olmo2Config(**SMALL, **values)


def test_olmo2(zoo: Zoo) -> None:
    zoo(config())


def test_olmo2_with_biases_and_a_tied_head(zoo: Zoo) -> None:
    zoo.check_network(zoo.save(config(attention_bias=True, tie_word_embeddings=True)))


def test_ranks_that_share_the_heads_of_a_norm_are_refused(zoo: Zoo) -> None:
    zoo.save(config())
    context = LayerContext(ReferenceKernels("meta"), DType.FLOAT32, tp_size=2)
    with pytest.raises(ConfigError, match=r"Olmo2ForCausalLM normalises q and k over all.*tensor_parallel_size=1"):
        make_network(read_model_config(zoo.folder), context)
