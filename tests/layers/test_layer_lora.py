"""Layers with adapters: what their parts are called, each rank's share, and that the shares make the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import AdapterError
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.layers.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.mlp import GatedMLP
from octavo.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding
from tests.lora_cases import random

SLOTS = torch.tensor([0, -1, 0], dtype=torch.int32)


class Apart:
    """One rank of a group, whose results tests combine."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.size)


def context(rank: int, size: int) -> LayerContext:
    kernels = ReferenceKernels()
    kernels.group = Apart(rank, size) if size > 1 else None
    kernels.adapters.use(SLOTS)
    return LayerContext(kernels, DType.FLOAT32, tp_rank=rank, tp_size=size, max_loras=2, max_lora_rank=8)


def matrices(inputs: int, outputs: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    return random(rank, inputs, seed=seed), random(outputs, rank, seed=seed + 100)


def load(layer: Any, adapter: dict[str, tuple[Tensor, Tensor]], **weights: Tensor) -> Any:
    for name, tensor in weights.items():
        layer.load(name.replace("__", "."), tensor.numpy())
    layer.place_lora(0, layer.pack_lora({name: (down.numpy(), up.numpy()) for name, (down, up) in adapter.items()}))
    return layer


def with_delta(base: Tensor, adapter: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    down, up = adapter
    rows = (SLOTS >= 0).unsqueeze(1)
    return base + rows * (x @ down.T @ up.T)


def close(ours: Tensor, whole: Tensor) -> None:
    torch.testing.assert_close(ours, whole, atol=1e-4, rtol=1e-4)


def test_names_of_layers_and_parts() -> None:
    mlp = GatedMLP(context(0, 1), 8, 16, bias=False)
    parts = {name: layer.lora_parts for name, layer in mlp.lora_layers("model.layers.3.mlp.")}
    assert parts == {
        "model.layers.3.mlp": {"gate_proj": (16, 8), "up_proj": (16, 8)},
        "model.layers.3.mlp.down_proj": {"": (8, 16)},
    }
    plain = GatedMLP(LayerContext(ReferenceKernels(), DType.FLOAT32), 8, 16, bias=False)
    assert not list(plain.lora_layers())


@pytest.mark.parametrize("size", [1, 2])
def test_shares_of_query_key_and_value(size: int) -> None:
    x, heads, kv_heads, dim = random(3, 12), 4, 2, 3
    whole = {
        name: random(n * dim, 12, seed=i) for i, (name, n) in enumerate([("q_proj", 4), ("k_proj", 2), ("v_proj", 2)])
    }
    adapter = {"q_proj": matrices(12, heads * dim, 3, 7), "v_proj": matrices(12, kv_heads * dim, 8, 8)}
    weights = {f"{name}__weight": weight for name, weight in whole.items()}
    layers = [
        load(QKVParallelLinear(context(rank, size), 12, heads, kv_heads, dim, False), adapter, **weights)
        for rank in range(size)
    ]
    split = [layer(x).split([n // size * dim for n in (heads, kv_heads, kv_heads)], dim=1) for layer in layers]
    q, k, v = (torch.cat(parts, dim=1) for parts in zip(*split, strict=True))
    close(q, with_delta(x @ whole["q_proj"].T, adapter["q_proj"], x))
    close(v, with_delta(x @ whole["v_proj"].T, adapter["v_proj"], x))
    close(k, x @ whole["k_proj"].T)


@pytest.mark.parametrize("size", [1, 2])
def test_the_sum_of_row_parallel_shares(size: int) -> None:
    x, weight, residual, adapter = random(3, 64), random(10, 64, seed=1), random(3, 10, seed=2), matrices(64, 10, 5, 3)
    total = torch.zeros(3, 10)
    for rank in range(size):
        layer = load(RowParallelLinear(context(rank, size), 64, 10, False), {"": adapter}, weight=weight)
        close(layer(x[:, layer.columns]), layer.add_to(residual.clone(), x[:, layer.columns]) - residual)
        total += layer(x[:, layer.columns])
    close(total, with_delta(x @ weight.T, adapter, x))


def test_gate_and_up() -> None:
    x, gate, up = random(3, 8), random(16, 8, seed=1), random(16, 8, seed=2)
    adapter = {"gate_proj": matrices(8, 16, 2, 3), "up_proj": matrices(8, 16, 4, 4)}
    layer = load(GateUpParallelLinear(context(0, 1), 8, 16, False), adapter, gate_proj__weight=gate, up_proj__weight=up)
    gates, ups = (with_delta(x @ w.T, adapter[name], x) for name, w in (("gate_proj", gate), ("up_proj", up)))
    close(layer(x), F.silu(gates) * ups)


@pytest.mark.parametrize("size", [1, 2])
def test_embedding_and_head(size: int) -> None:
    table, ids, hidden = random(9, 6), torch.tensor([8, 2, 3]), random(3, 6, seed=1)
    adapter, of_head = (random(2, 9, seed=2), random(6, 2, seed=3)), matrices(6, 9, 8, 4)
    rows, logits = torch.zeros(3, 6), []
    for rank in range(size):
        embedding = VocabParallelEmbedding(context(rank, size), 9, 6)
        embedding.scale = 2.0
        rows += load(embedding, {"": adapter}, weight=table)(ids)
        head = load(ParallelLMHead(context(rank, size), 9, 6, None), {"": of_head}, weight=table)
        logits.append(head(hidden)[:, : head.rows])
    down, up = adapter
    close(rows, 2 * (table[ids] + (SLOTS >= 0).unsqueeze(1) * (down[:, ids].T @ up.T)))
    close(torch.cat(logits, dim=1)[:, :9], with_delta(hidden @ table.T, of_head, hidden))


def test_refused_matrices() -> None:
    def empty(inputs: int, outputs: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((rank, inputs), np.float32), np.zeros((outputs, rank), np.float32)

    layer = RowParallelLinear(context(0, 2), 64, 10, False)
    with pytest.raises(AdapterError, match=r"\[4, 32\].*64 inputs"):
        layer.pack_lora({"": empty(32, 10, 4)})
    with pytest.raises(AdapterError, match="rank 9"):
        layer.pack_lora({"": empty(64, 10, 9)})
    with pytest.raises(AdapterError, match="q_proj"):
        layer.pack_lora({"q_proj": empty(64, 10, 9)})
