"""A recorded forward that is run in parts: other steps come between, and no bit changes."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from octavo.config.kv_spec import KVSpec, LayerGroup
from octavo.core.dtypes import DType
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput, make_batch
from octavo.kernels.interface import AttentionSpec

pytest.importorskip("octavo._cpu")
CpuKernels: Any = importlib.import_module("octavo.kernels.cpu.backend").CpuKernels

WIDTH, HEADS, SIZE, MOST = 32, 2, 16, 700
LARGEST = BatchSize(MOST, 3, MOST, MOST, SIZE)


class Small:
    """A layer of an encoder over ids, and what its sampled rows make."""

    def __init__(self, kernels: Any, dtype: DType) -> None:
        rng = np.random.default_rng(0)

        def weight(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[-1]))

        self.kernels, self.dtype = kernels, dtype
        self.table = kernels.array(weight(11, WIDTH), dtype)
        self.norm = kernels.array(np.ones(WIDTH, np.float32), dtype)
        self.qkv, self.out, self.inner, self.down, self.head = (
            kernels.pack([weight(*shape)], dtype=dtype)
            for shape in ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (5, 3 * WIDTH))
        )
        spec = KVSpec("full", HEADS, WIDTH // HEADS, dtype)
        self.cache = kernels.make_cache([LayerGroup(spec, (0,))], [MOST // SIZE + 4], SIZE)[0]

    def __call__(self, batch: ForwardBatch) -> ForwardOutput:
        k, tokens = self.kernels, len(batch.token_ids)
        stream = k.embedding(batch.token_ids, self.table)
        heads = self.qkv(k.rms_norm(stream, self.norm, 1e-6)).reshape(tokens, 3 * HEADS, WIDTH // HEADS)
        q, key, value = heads[:, :HEADS], heads[:, HEADS : 2 * HEADS], heads[:, 2 * HEADS :]
        k.reshape_and_cache(key, value, self.cache, batch.slot_mapping[0])
        attended = k.paged_attention(q, self.cache, batch, AttentionSpec(0.25, causal=False))
        stream = self.out(attended.reshape(tokens, WIDTH), DType.FLOAT32, stream)
        inner = self.inner(k.rms_norm(stream, self.norm, 1e-6), self.dtype, None, "gelu")
        stream = self.down(inner, DType.FLOAT32, stream)
        return ForwardOutput(stream, self.head(k.take_sampled(stream, batch, 3), DType.FLOAT32))


def batch_of(kernels: Any, lengths: list[int], seed: int) -> ForwardBatch:
    """Whole texts behind each other, of which every third row begins what is sampled."""
    counts = [-(-length // SIZE) for length in lengths]
    first = np.cumsum([0, *counts])
    tables = np.array([[(first[i] + j) % (MOST // SIZE + 4) for j in range(max(counts))] for i in range(len(lengths))])
    ids = np.random.default_rng(seed).integers(0, 11, sum(lengths))
    batch = make_batch(lengths, lengths, tables, SIZE, kernels, token_ids=ids)
    batch.sampled_rows, batch.all_sampled = kernels.wrap(np.arange(0, sum(lengths) - 2, 3)), False
    return batch


def values_of(kernels: Any, output: ForwardOutput) -> tuple[np.ndarray, np.ndarray]:
    return kernels.to_numpy(output.hidden).copy(), kernels.to_numpy(output.logits).copy()


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("lengths", [[650], [100, 301, 200], [5], [73]])
def test_parts_of_any_length_give_the_bits_of_the_whole(dtype: DType, lengths: list[int]) -> None:
    kernels = CpuKernels()
    small, other = Small(kernels, dtype), Small(kernels, dtype)
    whole, between = kernels.capture(small, LARGEST), kernels.capture(other, LARGEST)
    parted = kernels.capture_parts(small, LARGEST)
    batch, beside = batch_of(kernels, lengths, 1), batch_of(kernels, [40, 31], 2)
    expected = values_of(kernels, whole(batch))
    step = values_of(kernels, between(beside))
    for seconds in (0.0, 1e-4, 1.0):
        parted.begin(batch_of(kernels, lengths, 3))
        parted.advance(0.0)  # a batch that is not finished
        parted.begin(batch)
        output, parts = None, 0
        while output is None:
            output, parts = parted.advance(seconds), parts + 1
            found = values_of(kernels, between(beside))
            assert all(np.array_equal(*pair) for pair in zip(found, step, strict=True))
        assert all(np.array_equal(*pair) for pair in zip(values_of(kernels, output), expected, strict=True))
        if seconds == 0.0 and sum(lengths) > 600:
            assert parts > 40  # of 72 rows of an operation each
