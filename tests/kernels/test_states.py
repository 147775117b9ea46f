"""Recurrent states: against float64, and the same bits however sequences are cut into steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

_cpu: Any = pytest.importorskip("octavo._cpu")
from octavo.config.kv_spec import KVSpec  # noqa: E402
from octavo.core.dtypes import DType  # noqa: E402
from octavo.kernels.cpu.backend import CpuKernels  # noqa: E402
from octavo.kernels.forward_batch import make_batch  # noqa: E402
from octavo.kernels.interface import Kernels, LayerCache  # noqa: E402
from octavo.kernels.reference import ReferenceKernels  # noqa: E402
from tests.kernels.backends import cpu_settings  # noqa: E402

LENGTHS, BLOCK, STATE_TOKENS, OFFSET = [13, 1, 22], 4, 8, 6
#: Tokens of each sequence in each step, those with one token first.
CUTS = [[[13, 1, 22]], [[5, 1, 9], [1, 0, 1], [7, 0, 12]], [[1, 1, 1]] + [[1, 0, 1]] * 12 + [[0, 0, 1]] * 9]


@pytest.fixture(params=["reference", *_cpu.available_isas().floats])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    if request.param == "reference":
        yield ReferenceKernels()
        return
    with cpu_settings(isa=request.param):
        yield CpuKernels()


def run(
    kernels: Kernels, cuts: list[list[int]], x: np.ndarray, gates: list[np.ndarray], weight: np.ndarray, dtype: DType,
    bias: np.ndarray | None, silu: bool,
) -> tuple[np.ndarray, list[np.ndarray]]:  # fmt: skip
    """Results [T, C], sequence by sequence, and the convolution's numbers of each block that sequences have."""
    taps, channels = weight.shape
    (cache,) = kernels.make_group_cache(KVSpec.state(OFFSET + (taps - 1) * channels + 2), 1, 16, 1)
    cache.state_tokens, cache.group = STATE_TOKENS, 1
    fill(kernels, cache)
    states = np.random.default_rng(1).permutation(16)[:9].reshape(3, 3).astype(np.int32)
    tables = np.zeros((2, 3, 6), np.int32)  # group 0 is attention's, and must not be read
    tables[1, :, :3] = states
    out, starts = np.zeros((sum(LENGTHS), channels)), [0, 0, 0]
    first = np.cumsum([0, *LENGTHS])
    for cut in cuts:
        order = sorted((s for s in range(3) if cut[s]), key=lambda s: cut[s] > 1)
        counts, ends = [cut[s] for s in order], [starts[s] + cut[s] for s in order]
        batch = make_batch(counts, ends, tables[:, order], BLOCK, kernels)
        rows = np.concatenate([np.arange(first[s] + starts[s], first[s] + starts[s] + cut[s]) for s in order])
        # Strided rows, as those of a part of a larger product.
        whole = kernels.array(np.concatenate([part[rows] for part in (x, *gates)], axis=1), dtype)
        parts = [whole[:, i * channels : (i + 1) * channels] for i in range(3)]
        result = kernels.causal_conv(
            parts[0],
            kernels.array(weight),
            None if bias is None else kernels.array(bias),
            cache,
            batch,
            offset=OFFSET,
            activation="silu" if silu else None,
            in_gate=parts[1],
            out_gate=parts[2] if not silu else None,
        )
        out[rows] = kernels.to_numpy(result).astype(np.float64)
        starts = [start + count for start, count in zip(starts, cut, strict=True)]
    assert starts == LENGTHS
    held = [states[s, : -(-length // STATE_TOKENS)] for s, length in enumerate(LENGTHS)]
    numbers = memory(kernels, cache)
    assert (numbers[:, :OFFSET] == 7).all(), "numbers beside the convolution's were written"
    assert (np.delete(numbers, np.concatenate(held), axis=0) == 7).all(), "another block was written"
    return out, [numbers[blocks, OFFSET : OFFSET + (taps - 1) * channels] for blocks in held]


def memory(kernels: Kernels, cache: LayerCache) -> np.ndarray:
    key = kernels.to_numpy(cache.key)
    return (key.view(np.float32) if key.dtype == np.uint8 else key).reshape(len(key), -1)


def fill(kernels: Kernels, cache: LayerCache) -> None:
    """A block that is new to a sequence has numbers of another one."""
    memory(kernels, cache)[:] = 7


@pytest.mark.parametrize(
    ("dtype", "taps", "silu"), [("float32", 3, False), ("bfloat16", 4, True), ("float32", 6, True)]
)
def test_causal_conv(kernels: Kernels, dtype: str, taps: int, silu: bool) -> None:
    rng, kind = np.random.default_rng(0), DType(dtype)
    channels = 70
    x, *gates = (rng.standard_normal((sum(LENGTHS), channels)).astype(kind.numpy).astype(np.float32) for _ in range(3))
    weight = rng.standard_normal((taps, channels)).astype(np.float32)
    bias = rng.standard_normal(channels).astype(np.float32) if silu else None
    out, states = run(kernels, CUTS[0], x, gates, weight, kind, bias, silu)
    first = 0
    for length, blocks in zip(LENGTHS, states, strict=True):
        rows = slice(first, first + length)
        inputs = np.zeros((taps - 1 + length, channels))
        inputs[taps - 1 :] = x[rows].astype(np.float64) * gates[0][rows]
        expected = sum(inputs[tap : tap + length] * weight[tap] for tap in range(taps))
        expected = expected + (0 if bias is None else bias)
        expected = expected / (1 + np.exp(-expected)) if silu else expected * gates[1][rows]
        np.testing.assert_allclose(out[rows], expected, rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=1e-5)
        for i, state in enumerate(blocks):
            end = min(length, (i + 1) * STATE_TOKENS)
            np.testing.assert_allclose(state.reshape(taps - 1, channels), inputs[end : end + taps - 1], rtol=1e-6)
        first += length
    for cuts in CUTS[1:]:
        again, same = run(kernels, cuts, x, gates, weight, kind, bias, silu)
        if kernels.name == "cpu":
            assert np.array_equal(again, out)
        np.testing.assert_allclose(again, out, rtol=1e-2 if dtype == "bfloat16" else 1e-6, atol=1e-6)
        assert all(np.array_equal(a, b) for a, b in zip(same, states, strict=True))
