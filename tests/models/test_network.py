"""The Llama family with scaled rotary positions, in bfloat16 and on tensor-parallel ranks, against transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from octavo.models.network import Network
from tests.busy_machine import PATIENCE

_cpu: Any = pytest.importorskip("octavo._cpu")
CpuKernels: Any = importlib.import_module("octavo.kernels.cpu.backend").CpuKernels
thread_group: Any = importlib.import_module("tests.thread_groups").thread_group

SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PROMPT = [3, 17, 99, 42, 0, 8, 8, 61, 100, 5, 23, 77, 14, 90, 31, 2, 66, 51, 12, 37, 71, 29, 4, 88, 19]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False, rms_norm_eps=1e-5)


def llama_tied_with_biases() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)


def qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=1)


def qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)


def gemma3() -> Any:
    """Norms after attention and MLP: the sum of ranks is not added to the residual stream as it is."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=6, sliding_window_pattern=2, final_logit_softcapping=3.0
    )


def expected_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def load(folder: Path, dtype: DType = DType.FLOAT32, **changes: Any) -> Network:
    config = replace(read_model_config(folder), **changes)
    return load_model(folder, config, LayerContext(ReferenceKernels(), dtype))


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_networks_with_scaled_rotary_positions(
    rope: dict[str, Any], save_model: Callable[..., Any], tmp_path: Path, driver: Any
) -> None:
    from transformers import LlamaConfig

    model = save_model(LlamaConfig(**SMALL, rope_parameters={"rope_theta": 100.0, **rope}))
    # The two length-dependent types are compared at the length for which their table is made.
    length = {"dynamic": 64, "longrope": len(PROMPT)}.get(rope["rope_type"])
    network = load(tmp_path) if length is None else load(tmp_path, max_position=length)
    assert_same(driver(network).run("s", PROMPT, [13, 1]), expected_logits(model, PROMPT))


def test_bfloat16_is_near_float32(save_model: Callable[..., Any], tmp_path: Path, driver: Any) -> None:
    expected = expected_logits(save_model(llama3()), PROMPT)
    ours = driver(load(tmp_path, DType.BFLOAT16)).run("s", PROMPT, [13, 1])
    assert (ours - expected).square().mean().sqrt() < 0.05 * expected.std()


def tensor_parallel_logits(
    folder: Path, driver: Any, size: int, dtype: DType, quantization: str | None = None
) -> Tensor:
    """Those of ranks that are threads, in recorded steps of 13 tokens and then 1 each; of all ranks the same bits."""
    groups = thread_group(size, timeout=PATIENCE) if size > 1 else [None]
    kernels = [CpuKernels() for _ in range(size)]
    _cpu.set_threads(1)  # ranks that are threads of one process cannot share the pool of threads

    def work(rank: int) -> Tensor:
        kernels[rank].group = groups[rank]
        context = LayerContext(kernels[rank], dtype, quantization, tp_rank=rank, tp_size=size)
        network = load_model(folder, read_model_config(folder), context)
        logits: Tensor = driver(network, kernels=kernels[rank]).run("s", PROMPT, [13, 1])
        return logits

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(work, range(size)))
    assert all(torch.equal(logits, results[0]) for logits in results)
    return results[0]


@pytest.mark.parametrize(
    ("family", "size"), [(llama_tied_with_biases, 2), (llama3, 6), (qwen3, 2), (qwen2, 2), (gemma3, 2)]
)
def test_tensor_parallel_workers_together_compute_the_network_in_a_recorded_step(
    family: Callable[[], Any], size: int, save_model: Callable[..., Any], tmp_path: Path, driver: Any
) -> None:
    config = family()
    config.intermediate_size = 96
    expected = expected_logits(save_model(config), PROMPT)
    assert_same(tensor_parallel_logits(tmp_path, driver, size, DType.FLOAT32), expected)


@pytest.mark.parametrize("size", [2, 3])
def test_tensor_parallel_workers_with_unequal_shares(
    size: int, save_model: Callable[..., Any], tmp_path: Path, driver: Any
) -> None:
    config = llama_tied_with_biases()
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 6}
    config.update({"hidden_size": 54, "intermediate_size": 81, **heads})
    expected = expected_logits(save_model(config), PROMPT)
    assert_same(tensor_parallel_logits(tmp_path, driver, size, DType.FLOAT32), expected)


@pytest.mark.parametrize("dtype", [pytest.param(DType.FLOAT32, marks=pytest.mark.slow), DType.BFLOAT16])
@pytest.mark.parametrize("family", [llama_tied_with_biases, qwen3, gemma3])
def test_1_2_and_4_tensor_parallel_workers_give_the_same_bits(
    family: Callable[[], Any], dtype: DType, save_model: Callable[..., Any], tmp_path: Path, driver: Any
) -> None:
    config = family()
    # Wide enough that another order of sums shows through roundings to bfloat16.
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    config.update({"hidden_size": 256, "intermediate_size": 1000, **heads})
    save_model(config)
    alone = tensor_parallel_logits(tmp_path, driver, 1, dtype)
    for size in (2, 4):
        assert torch.equal(tensor_parallel_logits(tmp_path, driver, size, dtype), alone)
