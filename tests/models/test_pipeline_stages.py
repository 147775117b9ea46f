"""Networks of a few layers each: stages chained by hand compute the bits of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.config.kv_spec import KVSpec, group_layers
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, WeightError
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import LayerCache
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model, make_dummy_model
from octavo.models.config_files import read_model_config
from octavo.models.network import Network, build_rank_without_weights, caches_of_stage, weight_bytes

SMALL = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PROMPT = [3, 17, 42, 0, 8, 51, 5, 23, 14, 31, 2, 12, 37, 29, 4, 19]
WHOLE = LayerContext(ReferenceKernels(), DType.FLOAT32)


def llama(tied: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**SMALL, tie_word_embeddings=tied)


def windowed() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=1)


def two_caches_a_layer() -> Any:
    from tests.models.test_falcon_h1 import config

    return config(**SMALL)


def layers_without_a_cache() -> Any:
    from tests.models.test_nemotron_h import config

    return config(**SMALL)


class Chain:
    """Stages as one network, for the driver."""

    is_recordable = True

    def __init__(self, stages: list[Network]) -> None:
        self.stages = stages
        self.kv_specs = [spec for stage in stages for spec in stage.kv_specs]

    def forward(self, batch: ForwardBatch, kv_caches: list[LayerCache]) -> Tensor:
        hidden, first = self.stages[0].embed(batch.token_ids), 0
        for stage in self.stages:
            end = first + len(stage.kv_specs)
            hidden, first = stage.forward_layers(hidden, batch, kv_caches[first:end]), end
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.stages[-1].logits(hidden)


FAMILIES = [
    lambda: llama(tied=True),
    lambda: llama(tied=False),
    windowed,
    two_caches_a_layer,
    layers_without_a_cache,
]


@pytest.mark.parametrize("cuts", [[0, 2, 4], [0, 1, 2, 4]])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_together_are_the_whole_bit_for_bit(
    cuts: list[int], family: Callable[[], Any], save_model: Callable[..., Any], tmp_path: Path, driver: Any
) -> None:
    save_model(family())
    config = read_model_config(tmp_path)
    contexts = [replace(WHOLE, layers=range(first, end)) for first, end in pairwise(cuts)]
    stages = [load_model(tmp_path, config, context) for context in contexts]
    caches = [caches_of_stage(config, context) for context in contexts]
    assert [len(own) for own in caches] == [len(stage.kv_specs) for stage in stages]
    assert [index for own in caches for index in own] == list(range(len(Chain(stages).kv_specs)))
    expected = driver(load_model(tmp_path, config, WHOLE)).run("s", PROMPT, [7, 1])
    assert torch.equal(driver(Chain(stages)).run("s", PROMPT, [7, 1]), expected)
    names = [{weight.name for weight in stage.weights()} for stage in stages]
    layers = [{name.split(".")[2] for name in held if ".layers." in name} for held in names]
    assert [len(held) for held in layers] == [end - first for first, end in pairwise(cuts)]
    assert "lm_head.weight" in names[-1] and not any("lm_head.weight" in held for held in names[:-1])


def test_a_stage_refuses_tensors_that_no_stage_expects(save_model: Callable[..., Any], tmp_path: Path) -> None:
    save_model(llama(tied=False))
    config = replace(read_model_config(tmp_path), num_layers=3)
    with pytest.raises(WeightError, match=r"model.layers.3.* belongs to no layer"):
        load_model(tmp_path, config, replace(WHOLE, layers=range(1)))


@pytest.mark.parametrize("layers", [range(2, 5), range(0), range(3, 1), range(-1, 2), range(0, 4, 2)])
def test_impossible_stages_are_refused(layers: range, save_model: Callable[..., Any], tmp_path: Path) -> None:
    save_model(llama(tied=False))
    with pytest.raises(ConfigError, match="a run of the layers 0 to 3, not range"):
        make_dummy_model(read_model_config(tmp_path), replace(WHOLE, layers=layers), seed=0)


def test_layers_with_and_without_a_window_are_two_groups_of_caches(
    save_model: Callable[..., Any], tmp_path: Path
) -> None:
    save_model(windowed())
    context = replace(WHOLE, kv_cache_dtype="bfloat16")
    specs = build_rank_without_weights(read_model_config(tmp_path), context).kv_specs
    full, sliding = KVSpec("full", 2, 8, "bfloat16"), KVSpec("sliding", 2, 8, "bfloat16", 6)
    assert specs == [full, sliding, sliding, sliding]
    caches = ReferenceKernels().make_cache(group_layers(specs), [5, 3], 16)
    assert [cache.group for cache in caches] == [0, 1, 1, 1]
    assert [len(cache.key) for cache in caches] == [5, 3, 3, 3]


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 1), (4, 1)])
def test_a_rank_counts_its_own_share(ranks: int, kv_heads: int, save_model: Callable[..., Any], tmp_path: Path) -> None:
    save_model(llama(tied=False))
    config, context = read_model_config(tmp_path), replace(WHOLE, tp_rank=0, tp_size=ranks)
    network = build_rank_without_weights(config, context)
    assert {spec.num_kv_heads for spec in network.kv_specs} == {kv_heads}
    attention = 32 * 8 * (2 * 4 // ranks + 2 * kv_heads)
    layer = attention + 3 * 32 * 40 // ranks + 2 * 32
    assert weight_bytes(network) == 4 * (4 * layer + 32 + 2 * 32 * -(-53 // ranks))
