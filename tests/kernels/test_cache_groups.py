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


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_bytes_of_blocks_go_to_host_memory_and_back(kernels: Kernels, group: int) -> None:
    first, second = (kernels.make_cache(GROUPS, [6] * 3, 16) for _ in range(2))
    fill(kernels, first)
    ours, theirs = ([cache for cache in caches if cache.group == group] for caches in (first, second))
    row_bytes = sum(kernels.block_bytes(GROUPS[group].spec, 16) for _ in ours)
    rows = kernels.host_bytes(len(SOURCES) * row_bytes).reshape(len(SOURCES), -1)
    assert rows.shape == (3, row_bytes)
    kernels.read_blocks(ours, SOURCES, rows)()
    kernels.write_blocks(theirs, TARGETS, rows)()
    again = np.empty_like(rows)
    kernels.read_blocks(theirs, TARGETS, again)()
    assert np.array_equal(again, rows)
    for cache, other in zip(first, second, strict=True):
        for side in ("key", "value"):
            source, target = (kernels.to_numpy(getattr(each, side)) for each in (cache, other))
            if cache.group == group:
                assert np.array_equal(target[TARGETS], source[SOURCES])
                target[TARGETS] = 0
            assert not target.any(), "only these blocks were written"
    kernels.write_blocks(theirs, [2, 0], rows[1:])()
    kernels.read_blocks(theirs, [2], again[:1])()
    assert np.array_equal(again[0], rows[1])
    kernels.read_blocks(theirs, [], again[:0])()


def test_a_row_has_its_layers_in_order(kernels: Kernels) -> None:
    caches = [cache for cache in kernels.make_cache(GROUPS, [2] * 3, 16) if cache.group == 0]
    size = kernels.block_bytes(LARGE, 16)
    for layer, cache in enumerate(caches):
        for array in (cache.key, cache.value):
            kernels.write(array[1], np.full(array[1].shape, layer + 1))
    row = np.empty((1, 2 * size), np.uint8)
    kernels.read_blocks(caches, [1], row)()
    alone = np.empty((1, size), np.uint8)
    for layer, cache in enumerate(caches):
        if kernels.name != "triton":  # whose layers of a group are one piece
            kernels.read_blocks([cache], [1], alone)()
            assert np.array_equal(alone[0], row[0, layer * size :][:size])


@pytest.mark.parametrize("block", [-1, 6])
def test_blocks_outside_the_cache_and_other_rows_are_refused(kernels: Kernels, block: int) -> None:
    caches = kernels.make_cache(GROUPS[:1], [6], 16)[:2]
    rows = np.zeros((1, 2 * kernels.block_bytes(LARGE, 16)), np.uint8)
    for move in (kernels.read_blocks, kernels.write_blocks):
        with pytest.raises(IndexError, match=f"block {block} of 6"):
            move(caches, [block], rows)
        for wrong in (rows[:, 1:], rows.view(np.int8), np.repeat(rows, 2, axis=0), np.repeat(rows, 2, axis=1)[:, ::2]):
            with pytest.raises(ValueError, match="1 blocks need contiguous rows"):
                move(caches, [3], wrong)
