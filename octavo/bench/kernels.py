"""Each kernel at the shapes of a model: time, bytes and operations a second, and the share of the machine's limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.bench.limits import Limits
from octavo.core.model_config import ModelConfig
from octavo.kernels.interface import AttentionBatch, Kernels

_BLOCK = 16


@dataclass(frozen=True)
class KernelFigures:
    """One kernel at one shape; the best of several runs."""

    kernel: str
    shape: str
    rows: int
    microseconds: float
    #: Bytes that have to be read (weights, or KV entries), and multiply-adds counted as two operations.
    gb_per_s: float
    gflop_per_s: float
    #: The larger of the two shares: of the read bandwidth and of the multiply-add peak.
    share_of_limit: float


@dataclass(frozen=True)
class _Case:
    kernel: str
    shape: str
    rows: int
    bytes: float
    flops: float
    #: One call a layer, as in a step, so that no weight is found in a cache that a step would not find it in.
    calls: int
    forward: Callable[[Tensor, AttentionBatch], Tensor]
    batch: AttentionBatch


def measure(
    kernels: Kernels, config: ModelConfig, dtype: torch.dtype, limits: Limits, rows: list[int]
) -> Iterator[KernelFigures]:
    """Measures linear layers at these numbers of rows, then decode attention, then prefill attention."""
    for case in (*_linear_cases(kernels, config, dtype, rows), *_attention_cases(kernels, config, dtype)):
        seconds = _best(kernels, case) / case.calls
        bandwidth, rate = case.bytes / seconds / 1e9, case.flops / seconds / 1e9
        yield KernelFigures(
            kernel=case.kernel,
            shape=case.shape,
            rows=case.rows,
            microseconds=seconds * 1e6,
            gb_per_s=bandwidth,
            gflop_per_s=rate,
            share_of_limit=max(bandwidth / limits.read_gb_s, rate / limits.fma_gflops),
        )


def _best(kernels: Kernels, case: _Case) -> float:
    """Seconds of the fastest of several runs: others on the machine can only slow one down."""
    replay = kernels.capture(case.forward, case.rows)
    ids = torch.zeros(case.rows, dtype=torch.int64)
    replay(ids, case.batch)
    best, deadline = float("inf"), time.perf_counter() + 0.4
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        replay(ids, case.batch)
        best = min(best, time.perf_counter() - start)
    return best


def _linear_cases(kernels: Kernels, c: ModelConfig, dtype: torch.dtype, rows: list[int]) -> Iterator[_Case]:
    shapes = {
        "qkv": ((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size, c.num_layers),
        "attention out": (c.hidden_size, c.num_heads * c.head_dim, c.num_layers),
        "gate and up": (2 * c.intermediate_size, c.hidden_size, c.num_layers),
        "down": (c.hidden_size, c.intermediate_size, c.num_layers),
        "head": (c.vocab_size, c.hidden_size, 1),
    }
    for name, (outputs, inputs, layers) in shapes.items():
        packed = [kernels.pack_linear(torch.randn(outputs, inputs).to(dtype), None) for _ in range(layers)]
        for count in rows:
            x = torch.randn(count, inputs).to(dtype)
            product = kernels.linear_float32 if name == "head" else kernels.linear
            yield _Case(
                f"linear {name}",
                f"{outputs} x {inputs}",
                count,
                outputs * inputs * dtype.itemsize,
                2.0 * outputs * inputs * count,
                layers,
                _repeated(product, x, packed),
                _decodes(count, 1),
            )


def _repeated(product: Callable[[Tensor, Any], Tensor], x: Tensor, packed: list[Any]) -> Callable[..., Tensor]:
    def forward(ids: Tensor, batch: AttentionBatch) -> Tensor:
        for weight in packed:
            out = product(x, weight)
        return out

    return forward


def _attention_cases(kernels: Kernels, c: ModelConfig, dtype: torch.dtype) -> Iterator[_Case]:
    token_bytes = 2 * c.num_kv_heads * c.head_dim * dtype.itemsize
    pair_flops = 4.0 * c.num_heads * c.head_dim
    for sequences, context in ((1, 128), (1, 1024), (1, 4096), (16, 128), (16, 1024), (16, 4096), (64, 1024)):
        batch = _decodes(sequences, context)
        yield _attention_case(
            kernels, c, dtype, f"{sequences} x {context}", batch, sequences * context, token_bytes, pair_flops
        )
    for length in (128, 512, 2048):
        batch = _one_prefill(length)
        pairs = length * (length + 1) // 2
        yield _attention_case(
            kernels, c, dtype, f"prefill {length}", batch, length, token_bytes, pair_flops * pairs / length
        )


def _attention_case(
    kernels: Kernels,
    c: ModelConfig,
    dtype: torch.dtype,
    shape: str,
    batch: AttentionBatch,
    tokens: int,
    token_bytes: int,
    token_flops: float,
) -> _Case:
    blocks = int(batch.block_tables.max()) + 1
    caches = kernels.make_cache(c.num_layers, blocks, _BLOCK, c.num_kv_heads, c.head_dim, dtype)
    for cache in caches:  # pages that were never written all are the same one
        for part in (cache.key, cache.value):
            part.copy_(torch.ones((), dtype=part.dtype).expand_as(part))
    rows = len(batch.positions)
    q = torch.randn(rows, c.num_heads, c.head_dim).to(dtype)

    def forward(ids: Tensor, step: AttentionBatch) -> Tensor:
        for cache in caches:
            out = kernels.paged_attention(q, cache, step, c.head_dim**-0.5, None)
        return out.view(rows, -1)

    return _Case("attention", shape, rows, tokens * token_bytes, tokens * token_flops, len(caches), forward, batch)


def _decodes(sequences: int, context: int) -> AttentionBatch:
    """Sequences with ``context`` tokens each, the last of which is computed; their blocks interleaved."""
    blocks = -(-context // _BLOCK)
    tables = torch.arange(blocks * sequences, dtype=torch.int32).view(blocks, sequences).t().contiguous()
    return AttentionBatch(
        query_start=torch.arange(sequences + 1, dtype=torch.int32),
        seq_lens=torch.full((sequences,), context, dtype=torch.int32),
        block_tables=tables,
        slots=tables[:, -1].long() * _BLOCK + (context - 1) % _BLOCK,
        positions=torch.full((sequences,), context - 1),
        num_decodes=sequences,
        max_query_len=1,
        max_seq_len=context,
        block_size=_BLOCK,
    )


def _one_prefill(length: int) -> AttentionBatch:
    return AttentionBatch(
        query_start=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(-(-length // _BLOCK), dtype=torch.int32).view(1, -1),
        slots=torch.arange(length),
        positions=torch.arange(length),
        num_decodes=0,
        max_query_len=length,
        max_seq_len=length,
        block_size=_BLOCK,
    )
