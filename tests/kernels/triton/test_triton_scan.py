"""The GPU kernels of selective scans: against float64, and the same bits however sequences are cut into steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.kernels.forward_batch import ForwardBatch, make_batch
from octavo.kernels.interface import Kernels, LayerCache, ScanChannels, ScanHeads
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.triton.backend import TritonKernels
from tests.kernels import test_selective_scan as scan
from tests.kernels.test_states import CUTS

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: The interpreter is slow.
ON_GPU = pytest.mark.slow if DEVICE == "cpu" else ()


def check(case: scan.Mamba1 | scan.Mamba2, rounding: float) -> None:
    kernels = TritonKernels(DEVICE)
    (out, states), (again, same) = (scan.run(kernels, cuts, case) for cuts in CUTS[:2])
    expected, after = case.expected()
    np.testing.assert_allclose(out, expected, rtol=rounding, atol=5e-5)
    for sequence, length in enumerate(scan.LENGTHS):
        for i, state in enumerate(states[sequence]):
            wanted = after[sequence][min(length, (i + 1) * scan.STATE_TOKENS) - 1]
            np.testing.assert_allclose(state, wanted.ravel(), rtol=1e-4, atol=2e-5)
    assert np.array_equal(again, out)
    assert all(np.array_equal(a, b) for a, b in zip(same, states, strict=True))


@pytest.mark.parametrize(
    ("state_size", "dtype"),
    [(16, "bfloat16"), *(pytest.param(size, "float32", marks=ON_GPU) for size in (5, 16))],
)
def test_selective_scan(state_size: int, dtype: str) -> None:
    check(scan.Mamba1(state_size, DType(dtype)), 1e-2 if dtype == "bfloat16" else 1e-4)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "gated"),
    [
        (12, "bfloat16", True),
        pytest.param(6, "float32", True, marks=ON_GPU),
        pytest.param(72, "bfloat16", False, marks=ON_GPU),
        pytest.param(136, "bfloat16", True, marks=ON_GPU),
    ],
)
def test_ssd_scan(head_dim: int, dtype: str, gated: bool) -> None:
    check(scan.Mamba2(head_dim, DType(dtype), gated=gated), 1e-2 if gated and dtype == "bfloat16" else 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_silu_gate(dtype: str) -> None:
    scan.test_silu_gate(TritonKernels(DEVICE), dtype)


# At the shapes of Falcon-Mamba 7B and Granite 4, on a GPU.

SCANS = {"channels": 16 * 8192, "heads": 48 * 64 * 128}
LENGTHS = [1, 1, 1, 600, 70, 2, 33]
ENDS = [1, 512, 513, 600, 545, 514, 1060]
#: Kernels, the scan's cache, rows and batch.
Scan = Callable[[Kernels, LayerCache, slice, ForwardBatch], Tensor]


def make_scan(name: str) -> Scan:
    tokens, generator = sum(LENGTHS), torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    if name == "channels":
        x, z = random(2, tokens, 8192).bfloat16()
        dt, bc = random(tokens, 8192), random(tokens, 32)
        channels = ScanChannels(-random(16, 8192).exp(), random(8192), random(8192))
        return lambda kernels, cache, rows, batch: kernels.selective_scan(
            x[rows], dt[rows], bc[rows, :16], bc[rows, 16:], z[rows], channels, cache, batch
        )
    heads = ScanHeads(48, 1, 64, 128, -random(48).exp(), random(48), random(48))
    xbc, gate, steps = random(tokens, 3328).bfloat16(), random(tokens, 3072).bfloat16(), random(tokens, 48).bfloat16()
    return lambda kernels, cache, rows, batch: kernels.ssd_scan(
        xbc[rows], steps[rows], heads, cache, batch, z=gate[rows]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCANS)
def test_the_shapes_of_models(name: str) -> None:
    """Against the reference on the same device; a second run has the same bits, and so have other cuts."""
    scanned, tables = make_scan(name), np.random.default_rng(0).permutation(21).reshape(7, 3).astype(np.int32)

    def caches(kernels: Kernels) -> LayerCache:
        (cache,) = kernels.make_group_cache(KVSpec.state(SCANS[name]), 1, 21, 1)
        cache.key.copy_(torch.randn(cache.key.shape, generator=torch.Generator().manual_seed(1)))
        cache.state_tokens = 512
        return cache

    triton, reference = TritonKernels(DEVICE), ReferenceKernels(DEVICE)
    first, again, alone, truth = (caches(kernels) for kernels in (triton, triton, triton, reference))
    batch, rows = make_batch(LENGTHS, ENDS, tables, 512, triton), slice(sum(LENGTHS))
    out = scanned(triton, first, rows, batch)
    assert torch.equal(out, scanned(triton, again, rows, batch))
    torch.testing.assert_close(out, scanned(reference, truth, rows, batch), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(first.key.flatten(1), truth.key.flatten(1), rtol=1e-3, atol=1e-3)
    start = 0
    for s, (length, end) in enumerate(zip(LENGTHS, ENDS, strict=True)):
        cuts = [length // 3, length - length // 3] if length > 2 else [length]
        for count, last in zip(cuts, (end - length + cuts[0], end)[-len(cuts) :], strict=True):
            part = slice(start, start + count)
            assert torch.equal(
                out[part], scanned(triton, alone, part, make_batch([count], [last], tables[s:][:1], 512, triton))
            )
            start += count
    assert torch.equal(first.key, again.key) and torch.equal(first.key, alone.key)
