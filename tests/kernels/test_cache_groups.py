"""Caches of layers that differ in what they keep: each backend's layout, bytes and moves."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.config.kv_spec import KVSpec, group_layers
from octavo.kernels import load_kernels
from octavo.kernels.interface import Kernels, LayerCache
from octavo.kernels.triton import interpreted

LARGE, SMALL, WINDOWED = (
    KVSpec("full", 2, 16, "float32"),
    KVSpec("full", 1, 8, "float32"),
    KVSpec("sliding", 1, 8, "float32", 4),
)
GROUPS = group_layers([LARGE, SMALL, WINDOWED, LARGE, SMALL])
SOURCES, TARGETS = [0, 2, 5], [4, 1, 3]


@pytest.fixture(params=["reference", "cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "cpu":
        pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
    if request.param == "triton":
        pytest.importorskip("triton")
        if not interpreted():
            pytest.skip("Triton's interpreter is off")
    return load_kernels(request.param, "cpu")


def fill(kernels: Kernels, caches: list[LayerCache]) -> None:
    """Each block of each layer gets numbers of its own."""
    for layer, cache in enumerate(caches):
        for array in (cache.key, cache.value):
            for block in range(len(array)):
                kernels.write(array[block], np.full(array[block].shape, 10 * layer + block + 1))


def values_of(kernels: Kernels, cache: LayerCache) -> np.ndarray:
    """A copy of the values."""
    return kernels.to_numpy(cache.value).copy()


def test_layers_keep_their_order_and_know_their_group(kernels: Kernels) -> None:
    caches = kernels.make_cache(GROUPS, [6, 5, 4], 16)
    assert [cache.group for cache in caches] == [0, 1, 2, 0, 1]
    assert [len(cache.key) for cache in caches] == [6, 5, 4, 6, 5]
    held = [cache.key[0].nbytes + cache.value[0].nbytes for cache in caches]
    for index, group in enumerate(GROUPS):
        for layer in group.layers:
            assert 16 * group.spec.bytes_per_token <= held[layer] <= kernels.block_bytes(group.spec, 16), index


def test_blocks_of_different_sizes_are_copied_and_swapped(kernels: Kernels) -> None:
    device, host = (kernels.make_cache(GROUPS, [6] * 3, 16) for _ in range(2))
    fill(kernels, device)
    pairs = list(zip(SOURCES, TARGETS, strict=True))
    before = [values_of(kernels, cache) for cache in device]
    kernels.swap_blocks(device, host, pairs)
    kernels.copy_blocks(device, pairs)
    for values, ours, theirs in zip(
        before, *([values_of(kernels, cache) for cache in caches] for caches in (device, host)), strict=True
    ):
        for source, target in pairs:
            assert np.array_equal(theirs[target], values[source])
            assert np.array_equal(ours[target], values[source])
            assert np.array_equal(ours[source], values[source])
        assert all(not theirs[block].any() for block in SOURCES)
