"""Sleep mode: memory is freed, and the same tensors come back with the same content."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.config.kv_spec import group_layers
from octavo.core.dtypes import DType
from octavo.kernels import load_kernels
from octavo.kernels.forward_batch import make_batch
from octavo.kernels.interface import LayerCache
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.triton import interpreted
from octavo.layers.layer import Layer, LayerContext
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from octavo.models.llama import LlamaForCausalLM
from octavo.runner.cuda import SleepState, _tensors, put_to_sleep


@pytest.fixture
def model(network: Path) -> LlamaForCausalLM:
    model = load_model(network, read_model_config(network), LayerContext(ReferenceKernels(), DType.FLOAT32))
    assert isinstance(model, LlamaForCausalLM)
    return model


def caches_of(model: LlamaForCausalLM, blocks: int = 8) -> list[LayerCache]:
    return ReferenceKernels().make_cache(group_layers(model.kv_specs), [blocks], 16)


@torch.inference_mode()
def logits(model: LlamaForCausalLM, caches: list[LayerCache]) -> Tensor:
    batch = make_batch([20], [20], np.array([[3, 5]]), 16, ReferenceKernels(), token_ids=np.arange(20))
    return model.logits(model.forward(batch, caches))


def bytes_on_host(state: SleepState) -> int:
    return sum(p.copy.nbytes for p in state.emptied)


def test_a_network_computes_the_same_after_sleep(model: Any) -> None:
    caches = caches_of(model)
    before = logits(model, caches)

    def some() -> list[Tensor]:
        return [model.head.packed.weight, model.layers[0].attention_norm.weight, model.layers[1].mlp.down.packed.weight]

    tensors, table = some(), model.head.packed.weight
    weights = table.nbytes + model.layers[0].attention.rotary.array.nbytes
    state = put_to_sleep(model)
    assert bytes_on_host(state) == state.bytes_freed > weights
    assert table.untyped_storage().nbytes() == 0
    state.wake_up()
    assert all(a is b for a, b in zip(tensors, some(), strict=True))
    assert logits(model, caches).equal(before)


def test_it_can_sleep_again_and_again(model: LlamaForCausalLM) -> None:
    caches = caches_of(model)
    before = logits(model, caches)
    freed = set()
    for _ in range(3):
        state = put_to_sleep(model)
        freed.add(state.bytes_freed)
        state.wake_up()
    assert len(freed) == 1
    assert logits(model, caches).equal(before)


class Quantized(NamedTuple):
    codes: Tensor
    scales: Tensor | None


@dataclass(slots=True)
class Slotted:
    weight: Tensor
    bias: Tensor | None = None


def test_every_way_of_holding_a_tensor_is_found() -> None:
    """One storage seen through several tensors is moved once; views and pools stay views."""
    pool = torch.arange(64, dtype=torch.int32)
    half = torch.arange(6, dtype=torch.float32)

    class Odd(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.kernels = ReferenceKernels()
            self.packed: Any = Quantized(pool[8:24].view(4, 4), None)
            self.other = {"a": [Slotted(half), (torch.ones(3, dtype=torch.bfloat16),)]}
            self.function = lambda x: x

    root = Layer()
    odd = root.attach("odd", Odd())
    expected = odd.packed.codes.clone(), half.clone()
    state = put_to_sleep(root)
    assert bytes_on_host(state) == 64 * 4 + 6 * 4 + 3 * 2
    assert pool.untyped_storage().nbytes() == half.untyped_storage().nbytes() == 0
    state.wake_up()
    assert odd.packed.codes.equal(expected[0])
    assert half.equal(expected[1])
    assert odd.packed.codes.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
    assert pool.tolist() == list(range(64))


@pytest.mark.skipif(not interpreted(), reason="Triton's interpreter is off")
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_what_the_gpu_backend_holds_comes_back(network: Path, quantization: str | None) -> None:
    pytest.importorskip("triton")
    config, kernels = read_model_config(network), load_kernels("triton", "cpu")
    context = LayerContext(kernels, DType.BFLOAT16, quantization=quantization)
    model = load_model(network, config, context)
    held = list(_tensors(model))
    before = [tensor.clone() for tensor in held]
    state = put_to_sleep(model)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
    state.wake_up()
    for tensor, expected in zip(held, before, strict=True):
        assert tensor.shape == expected.shape
        assert tensor.view(torch.uint8).equal(expected.view(torch.uint8))


def test_without_host_memory_it_stays_awake(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo.runner.cuda as module

    caches = caches_of(model)
    before, calls, real = logits(model, caches), 0, module._empty

    def scarce(tensors: list[Tensor]) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("no memory")
        return real(tensors)

    monkeypatch.setattr(module, "_empty", scarce)
    with pytest.raises(RuntimeError, match="no memory"):
        put_to_sleep(model)
    assert logits(model, caches).equal(before)


@pytest.mark.gpu
def test_a_gpu_gets_its_memory_back(network: Path) -> None:
    config = read_model_config(network)
    kernels = ReferenceKernels("cuda")
    model: Any = load_model(network, config, LayerContext(kernels, DType.FLOAT32))
    table = model.head.packed.weight
    gc.collect()  # of other tests in this process
    torch.cuda.empty_cache()
    before, used = table.cpu(), torch.cuda.memory_reserved()
    state = put_to_sleep(model)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < used
    state.wake_up()
    assert table.cpu().equal(before)
