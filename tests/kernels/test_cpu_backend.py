"""What the CPU backend does in one pass, against the kernels that it consists of, run at once and from a recording."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput, make_batch

_cpu: Any = pytest.importorskip("octavo._cpu")
CpuKernels: Any = importlib.import_module("octavo.kernels.cpu.backend").CpuKernels
from octavo.kernels.cpu.quant import pack_quantized  # noqa: E402
from octavo.kernels.cpu.quantize import quantize_weight  # noqa: E402


@pytest.fixture
def kernels() -> Iterator[Any]:
    threads = _cpu.num_threads()
    kernels = CpuKernels()
    kernels.set_threads(2)
    yield kernels
    _cpu.set_threads(threads)


def one_sequence(tokens: int, slots: Tensor | None = None) -> ForwardBatch:
    batch = make_batch([tokens], [tokens], torch.arange(-(-tokens // 16)).view(1, -1), 16)
    if slots is not None:
        batch.slot_mapping = slots[None]
    return batch


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
@pytest.mark.parametrize("outputs", [16, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_added_to_the_residual(kernels: Any, kind: str | None, outputs: int, dtype: torch.dtype) -> None:
    for rows in (1, 70):
        weight, bias, x = torch.randn(outputs, 64).to(dtype), torch.randn(outputs), torch.randn(rows, 64).to(dtype)
        packed = kernels.quantize_linear(weight, bias, kind) if kind else kernels.pack_linear(weight, bias)
        residual = torch.randn(rows, outputs)
        expected = residual + kernels.linear_float32(x, packed)
        assert torch.equal(kernels.linear_add(x, packed, residual), expected)


@pytest.mark.parametrize("kind", ["int8", "int4", "two matrices"])
@pytest.mark.parametrize("inner", [16, 80, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_gate_is_not_rounded_before_its_activation(
    kernels: Any, kind: str, inner: int, dtype: torch.dtype
) -> None:
    """But where gate and up are no whole panels."""
    for rows in (1, 70):
        weight, bias, x = torch.randn(2 * inner, 64), torch.randn(2 * inner), torch.randn(rows, 64).to(dtype)
        if kind == "two matrices":
            packed = pack_quantized([quantize_weight(half, "int8", 32) for half in weight.chunk(2)], bias)
        else:
            packed = kernels.quantize_linear(weight, bias, kind)
        product = kernels.linear_float32(x, packed)
        expected = kernels.silu_and_mul(product if inner % 16 == 0 else product.to(dtype)).to(dtype)
        assert torch.equal(kernels.linear_silu_and_mul(x, packed), expected)


def test_embedding_begins_the_residual_stream_in_float32(kernels: Any) -> None:
    table = torch.randn(11, 24).bfloat16()
    assert torch.equal(kernels.embedding(torch.tensor([3, 10]), table), table[[3, 10]].float())


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_rotary_and_cache_at_once_and_recorded(kernels: Any, tokens: int) -> None:
    """One loop over the tokens: on its own, and recorded with a norm of heads before it, as some networks have."""
    heads, kv_heads, head_dim = 6, 2, 64
    table, weight = torch.rand(512, head_dim), torch.rand(head_dim).bfloat16()
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).bfloat16()
    batch = one_sequence(tokens)
    [expected], [cache], [recorded] = (
        kernels.make_cache(1, 32, 16, kv_heads, head_dim, torch.bfloat16) for _ in range(3)
    )

    def split(rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split([heads, kv_heads, kv_heads], dim=1)

    q, k, v = split(qkv.clone())
    q, k = kernels.rotary(kernels.rms_norm(q, weight, 1e-6), kernels.rms_norm(k, weight, 1e-6), batch.positions, table)
    kernels.reshape_and_cache(k, v, expected, batch.slot_mapping[0])

    def forward(rows: Tensor, step: ForwardBatch, cache: Any) -> Tensor:
        q, k, v = split(rows)
        q, k = kernels.rms_norm(q, weight, 1e-6), kernels.rms_norm(k, weight, 1e-6)
        rotated: Tensor = kernels.rotary_and_cache(q, k, v, step, table, cache)
        return rotated

    assert torch.equal(forward(qkv.clone(), batch, cache), q)
    static = torch.zeros(400, heads + 2 * kv_heads, head_dim).bfloat16()
    largest = BatchSize(400, 1, 1, 400, 16)
    replay = kernels.capture(lambda step: ForwardOutput(forward(static[: len(static)], step, recorded)), largest)
    static[:tokens] = qkv
    assert torch.equal(replay(batch).hidden, q)
    for written in (cache, recorded):
        assert torch.equal(written.key, expected.key) and torch.equal(written.value, expected.value)
    assert expected.key.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_negative_slots_are_written_nowhere(kernels: Any, dtype: torch.dtype) -> None:
    [cache] = kernels.make_cache(1, 2, 16, 1, 8, dtype)
    k, v = torch.randn(2, 3, 1, 8).bfloat16()
    kernels.reshape_and_cache(k, v, cache, torch.full((3,), -1))
    assert not cache.key.any() and not cache.value.any()
    kernels.reshape_and_cache(k, v, cache, torch.tensor([-1, 17, -5]))
    assert cache.key[1].any() and not cache.key[0].any()
