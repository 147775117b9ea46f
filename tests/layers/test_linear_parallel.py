"""Shares of tensor-parallel layers: the parts of all ranks, combined by hand, give the whole result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, WeightError
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import Layer, LayerContext, RMSNorm
from octavo.layers.linear import GateUpParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding


class Apart:
    """One rank of a group, without collectives: tests combine the parts, unless ``others`` are those of other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.gathered: list[Tensor] = []
        self.others: list[Tensor] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        return x + sum(self.others)

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered.append(x)
        return x.repeat(1, self.size)


def context(rank: int = 0, size: int = 1) -> LayerContext:
    kernels = ReferenceKernels()
    kernels.group = Apart(rank, size) if size > 1 else None
    return LayerContext(kernels, DType.FLOAT32, tp_rank=rank, tp_size=size)


def ranks(size: int, make: Callable[[LayerContext], Any], tensors: dict[str, Tensor]) -> list[Any]:
    """One layer a rank, each given every whole tensor."""
    layers = []
    for rank in range(size):
        layer = make(context(rank, size))
        for name, tensor in tensors.items():
            layer.load(name, tensor.numpy())
        layers.append(layer)
    return layers


def close(ours: Tensor, whole: Tensor) -> None:
    torch.testing.assert_close(ours, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parallel_parts_joined(size: int) -> None:
    x, weight, bias = torch.randn(3, 6), torch.randn(8, 6), torch.randn(8)
    layers = ranks(
        size, lambda c: MergedColumnParallelLinear(c, [("", 8)], 6, bias=True), {"weight": weight, "bias": bias}
    )
    close(torch.cat([layer(x) for layer in layers], dim=1), x @ weight.T + bias)


@pytest.mark.parametrize(("size", "inner"), [(1, 7), (2, 8), (4, 8), (2, 33), (3, 80), (4, 200)])
def test_row_parallel_parts_are_summed_and_bias_and_residual_added_once(size: int, inner: int) -> None:
    x, weight, bias, residual = torch.randn(3, inner), torch.randn(5, inner), torch.randn(5), torch.randn(3, 5)
    layers = ranks(size, lambda c: RowParallelLinear(c, inner, 5, bias=True), {"weight": weight, "bias": bias})
    shares = [x[:, context(rank, size).share(inner, "inputs", 32)] for rank in range(size)]
    assert torch.equal(torch.cat(shares, dim=1), x)
    parts = [layer.packed(share) for layer, share in zip(layers, shares, strict=True)]
    for rank, (layer, share) in enumerate(zip(layers, shares, strict=True)):
        if size > 1:
            layer.kernels.group.others = parts[:rank] + parts[rank + 1 :]
        close(layer(share), x @ weight.T + bias)
        close(layer.add_to(residual.clone(), share), residual + x @ weight.T + bias)


def test_shares_that_are_not_equal_are_whole_units() -> None:
    def shares(size: int, inner: int) -> list[tuple[int, int]]:
        found = [context(rank, size).share(inner, "outputs", 32) for rank in range(size)]
        return [(part.start, part.stop) for part in found]

    assert shares(2, 96) == [(0, 48), (48, 96)]
    assert shares(2, 97) == [(0, 64), (64, 97)]
    assert shares(3, 160) == [(0, 64), (64, 128), (128, 160)]


@pytest.mark.parametrize("size", [1, 2])
def test_merged_columns_keep_each_part_together(size: int) -> None:
    x, gate, up = torch.randn(3, 6), torch.randn(8, 6), torch.randn(4, 6)
    tensors = {"up_proj.weight": up, "gate_proj.weight": gate}
    layers = ranks(size, lambda c: MergedColumnParallelLinear(c, [("gate_proj", 8), ("up_proj", 4)], 6, False), tensors)
    outs = [layer(x).split([8 // size, 4 // size], dim=1) for layer in layers]
    close(torch.cat([gate_out for gate_out, _ in outs], dim=1), x @ gate.T)
    close(torch.cat([up_out for _, up_out in outs], dim=1), x @ up.T)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"])
def test_gates_stay_with_what_they_gate(size: int, activation: Any) -> None:
    x, gate, up = torch.randn(3, 6), torch.randn(8, 6), torch.randn(8, 6)
    tensors = {"gate_proj.weight": gate, "up_proj.weight": up}
    layers = ranks(size, lambda c: GateUpParallelLinear(c, 6, 8, False, activation), tensors)
    function: dict[str, Callable[..., Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": F.relu,
    }
    close(torch.cat([layer(x) for layer in layers], dim=1), function[activation](x @ gate.T) * (x @ up.T))


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads"), [(1, 8, 2), (2, 8, 2), (4, 8, 2), (8, 8, 2), (2, 9, 3), (3, 9, 3), (3, 4, 4)]
)
def test_query_heads_stay_with_their_kv_head(size: int, heads: int, kv_heads: int) -> None:
    head_dim = 3
    x = torch.randn(4, 10)
    whole = {f"{n}_proj.weight": torch.randn((heads if n == "q" else kv_heads) * head_dim, 10) for n in "qkv"}
    whole |= {f"{n}_proj.bias": torch.randn((heads if n == "q" else kv_heads) * head_dim) for n in "qkv"}
    q, k, v = (
        (x @ whole[f"{n}_proj.weight"].T + whole[f"{n}_proj.bias"]).view(4, -1, head_dim).unbind(1) for n in "qkv"
    )
    layers = ranks(size, lambda c: QKVParallelLinear(c, 10, heads, kv_heads, head_dim, True), whole)
    seen: list[int] = []
    for layer in layers:
        parts = layer(x).view(4, -1, head_dim).split([layer.heads, layer.kv_heads, layer.kv_heads], dim=1)
        own_q, own_k, own_v = (part.unbind(1) for part in parts)
        assert layer.query_columns == slice(len(seen) * head_dim, (len(seen) + layer.heads) * head_dim)
        for i, head in enumerate(own_q):
            number = len(seen)
            close(head, q[number])
            # The KV head that this rank would use for it is the one that the whole network uses.
            close(own_k[i * layer.kv_heads // layer.heads], k[number * kv_heads // heads])
            close(own_v[i * layer.kv_heads // layer.heads], v[number * kv_heads // heads])
            seen.append(number)
    assert seen == list(range(heads))


@pytest.mark.parametrize(("size", "vocab"), [(1, 11), (2, 12), (2, 11), (3, 4), (4, 5)])
def test_vocabulary_shares(size: int, vocab: int) -> None:
    table, ids = torch.randn(vocab, 6), torch.arange(vocab).flip(0)
    embeddings = ranks(size, lambda c: VocabParallelEmbedding(c, vocab, 6), {"weight": table})
    assert torch.equal(torch.stack([layer(ids) for layer in embeddings]).sum(0), table[ids])
    hidden = torch.randn(3, 6)
    parts = []
    for rank in range(size):
        head = ParallelLMHead(context(rank, size), vocab, 6, None)
        head.load("weight", table.numpy())
        logits = head(hidden)
        assert logits.shape == (3, vocab) and logits.dtype == torch.float32
        group = head.kernels.group
        parts.append(group.gathered[0] if isinstance(group, Apart) else logits)
    close(torch.cat(parts, dim=1)[:, :vocab], hidden @ table.T)


def test_tied_head_uses_the_table_of_the_embedding() -> None:
    table, hidden = torch.randn(11, 6), torch.randn(3, 6)
    embedding = VocabParallelEmbedding(context(), 11, 6)
    head: Any = ParallelLMHead(context(), 11, 6, embedding)
    assert not head.expected
    embedding.load("weight", table.numpy())
    close(head(hidden), hidden @ table.T)
    assert embedding.table is None
    assert torch.equal(embedding(torch.arange(11)), table)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda c: MergedColumnParallelLinear(c, [("", 7)], 6, False), r"\(7\) cannot be shared by 2"),
        (lambda c: RowParallelLinear(c, 7, 6, False), r"\(7\) cannot be shared by 2"),
        (lambda c: GateUpParallelLinear(c, 6, 31, False), r"\(31\) cannot be shared by 2 .* at least 32"),
        (lambda c: QKVParallelLinear(c, 6, 3, 1, 2, False), "3 query heads and 1 KV heads cannot be shared by 2"),
    ],
)
def test_sizes_that_cannot_be_shared_are_refused(make: Callable[[LayerContext], Layer], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(context(0, 2))


def test_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp_rank"):
        context(2, 2)


def test_a_layer_packs_after_its_last_tensor_and_drops_what_it_was_given() -> None:
    class Packing(ReferenceKernels):
        packs = 0

        def pack(self, parts: Any, *arguments: Any, **options: Any) -> Any:
            self.packs += 1
            return super().pack(parts, *arguments, **options)

    kernels = Packing()
    layer: Any = MergedColumnParallelLinear(LayerContext(kernels, DType.BFLOAT16), [("a", 2), ("b", 2)], 3, bias=True)
    for name in ("b.weight", "a.bias", "a.weight"):
        layer.load(name, np.ones(layer.expected[name], np.float32))
        assert kernels.packs == 0
    layer.load("b.bias", np.zeros(2, np.float32))
    assert kernels.packs == 1
    assert layer.packed.weight.dtype == torch.bfloat16
    assert not layer._weights and not layer._biases


def test_tree_names_tensors_as_the_checkpoint_does() -> None:
    root, middle = Layer(), Layer()
    root.attach("model.layers.0", middle)
    merged = middle.attach("", MergedColumnParallelLinear(context(), [("gate_proj", 2), ("up_proj", 2)], 3, False))
    norm = middle.attach("norm", RMSNorm(context(), 3, 1e-6))
    assert list(root.tensors()) == [
        ("model.layers.0.gate_proj.weight", merged, "gate_proj.weight"),
        ("model.layers.0.up_proj.weight", merged, "up_proj.weight"),
        ("model.layers.0.norm.weight", norm, "weight"),
    ]
    norm.load("weight", np.ones(3, np.float32))
    assert len(list(root.tensors())) == 2


def test_wrong_shape_is_refused_with_both_shapes() -> None:
    layer = RMSNorm(context(), 3, 1e-6)
    with pytest.raises(WeightError, match=r"\[4\].*\[3\]"):
        layer.load("weight", np.ones(4, np.float32))
