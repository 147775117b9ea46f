"""Sampled rows with those that follow them: behind each other, and their mean; and logits of clusters alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.core.dtypes import DType
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput, make_batch
from octavo.kernels.interface import Kernels
from tests.kernels.backends import host_backends

ROWS, WIDTH = 23, 37


def batch_of(kernels: Kernels, rows: int, sampled: list[int]) -> ForwardBatch:
    batch = make_batch([rows], [rows], np.array([[0, 1]], np.int32), 16, kernels)
    return replace(batch, sampled_rows=kernels.wrap(np.array(sampled, np.int64)), all_sampled=False)


@pytest.mark.parametrize("kernels", host_backends(), ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_runs_of_rows_are_taken_whole_at_once_and_recorded(kernels: Kernels, dtype: DType) -> None:
    values = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    x = kernels.array(values, dtype)
    held = kernels.to_numpy(x).astype(np.float32)

    def forward(batch: ForwardBatch) -> ForwardOutput:
        taken = kernels.take_sampled(x, batch, 4)
        return ForwardOutput(taken, kernels.rms_norm(taken, weight, 1e-6))

    weight = kernels.array(np.ones(4 * WIDTH, np.float32))
    replay = kernels.capture(forward, BatchSize(ROWS, 1, 9, 32, 16))
    for sampled in ([0, 4, 8, 12], [19], [3, 3, 0], [1, 2, 3, 4, 5]):
        expected = np.stack([held[row : row + 4].reshape(-1) for row in sampled])
        batch = batch_of(kernels, ROWS, sampled)
        for run in (forward, replay):
            with kernels.mode():
                output = run(batch)
            taken = kernels.to_numpy(output.hidden)[: len(sampled)].astype(np.float32)
            assert np.array_equal(taken, expected)
            scale = np.sqrt((expected**2).mean(1, keepdims=True) + 1e-6)
            np.testing.assert_allclose(kernels.to_numpy(output.logits), expected / scale, rtol=1e-5)


@pytest.mark.parametrize("kernels", host_backends(), ids=lambda kernels: kernels.name)
def test_means_of_runs_are_the_same_bits_in_any_company(kernels: Kernels) -> None:
    values = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)
    x = kernels.array(values)
    replay = kernels.capture(
        lambda batch: ForwardOutput(x, kernels.mean_sampled(x, batch, 9)), BatchSize(ROWS, 1, 9, 32, 16)
    )

    def means(sampled: list[int]) -> np.ndarray:
        with kernels.mode():
            return kernels.to_numpy(replay(batch_of(kernels, ROWS, sampled)).logits).copy()

    together = means([0, 9, 14, 2])
    for row, found in zip([0, 9, 14, 2], together, strict=True):
        np.testing.assert_allclose(found, values[row : row + 9].astype(np.float64).mean(0), atol=1e-6)
        assert np.array_equal(means([row])[0], found)


@pytest.mark.parametrize("kernels", host_backends(), ids=lambda kernels: kernels.name)
def test_logits_outside_of_the_best_clusters_are_masked(kernels: Kernels) -> None:
    rng = np.random.default_rng(0)
    logits, scores = (rng.standard_normal((3, size)).astype(np.float32) for size in (12, 4))
    clusters = rng.permutation(12).reshape(4, 3)
    for count in (1, 2, 4):
        masked = kernels.array(logits)
        with kernels.mode():
            kernels.mask_clusters(masked, kernels.array(scores), kernels.array(clusters), count)
        for row, values in enumerate(kernels.to_numpy(masked)):
            kept = np.isin(np.arange(12), clusters[np.argsort(scores[row])[-count:]])
            assert np.array_equal(values, np.where(kept, logits[row], -np.inf))
