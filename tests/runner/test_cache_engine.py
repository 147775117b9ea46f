"""Block moves of a plan, over both kernel backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.config.kv_spec import GroupShape, KVSpec
from octavo.core.plan import StepPlan
from octavo.kernels import load_kernels
from octavo.kernels.interface import Kernels, LayerCache
from octavo.runner.cache_engine import CacheEngine

LAYERS, BLOCKS, HOST_BLOCKS = 3, 6, 4
SPEC = KVSpec("full", 1, 8, "float32")


@pytest.fixture(params=["cpu", "reference"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "cpu":
        pytest.importorskip("octavo._cpu")
    return load_kernels(request.param, "cpu")


def layers_of(kernels: Kernels, caches: Callable[[Sequence[int]], list[LayerCache]], block_bytes: int) -> Any:
    return SimpleNamespace(kernels=kernels, make=caches, make_host=caches, shapes=lambda: [GroupShape(block_bytes)])


def make(kernels: Kernels, num_host_blocks: int = HOST_BLOCKS) -> CacheEngine:
    """Every byte of block ``b`` of layer ``l`` is ``16 * l + b`` (keys), or 8 more (values)."""

    def caches(blocks: Sequence[int]) -> list[LayerCache]:
        return kernels.make_group_cache(SPEC, LAYERS, blocks[0], 4)

    engine = CacheEngine(layers_of(kernels, caches, LAYERS * kernels.block_bytes(SPEC, 4)), [BLOCKS], [num_host_blocks])
    for layer, cache in enumerate(engine.device):
        for block in range(BLOCKS):
            as_bytes(cache.key)[block] = 16 * layer + block
            as_bytes(cache.value)[block] = 16 * layer + block + 8
    return engine


def as_bytes(blocks: Any) -> np.ndarray:
    """The bytes of each block, over the cache's own memory."""
    values: np.ndarray = blocks.numpy()
    return values.reshape(len(values), -1).view(np.uint8)


def swap_seconds(engine: CacheEngine, plan: StepPlan) -> float | None:
    """What swapping took; None where nothing was swapped."""
    taken = engine.move(plan)
    return None if taken is None else taken()


def contents(engine: CacheEngine) -> list[int]:
    """Which of the blocks of the beginning each device block holds, in every layer alike."""
    expected: list[int] | None = None
    for layer, cache in enumerate(engine.device):
        for blocks, offset in ((cache.key, 0), (cache.value, 8)):
            held = as_bytes(blocks)
            assert (held == held[:, :1]).all()
            now = (held[:, 0] - 16 * layer - offset).tolist()
            assert expected is None or now == expected
            expected = now
    assert expected is not None
    return expected


def test_blocks_come_back_as_they_went(kernels: Kernels) -> None:
    engine = make(kernels)
    assert swap_seconds(engine, StepPlan(step=1, blocks_to_swap_out=[(0, 3), (5, 1)]))
    assert contents(engine) == [0, 1, 2, 3, 4, 5]
    assert swap_seconds(engine, StepPlan(step=2, blocks_to_copy=[(2, 0), (2, 5), (3, 1)])) is None
    assert contents(engine) == [2, 3, 2, 3, 4, 2]
    assert swap_seconds(engine, StepPlan(step=3, blocks_to_swap_in=[(3, 4), (1, 2)]))
    assert contents(engine) == [2, 3, 5, 3, 0, 2]


def test_what_swaps_took_is_told_once_with_their_bytes(kernels: Kernels) -> None:
    engine, block = make(kernels), LAYERS * kernels.block_bytes(SPEC, 4)
    engine.move(StepPlan(step=1, blocks_to_copy=[(2, 0)]))
    assert engine.take_swaps() == []
    engine.move(StepPlan(step=2, blocks_to_swap_out=[(0, 3), (5, 1)], blocks_to_swap_in=[(2, 4)]))
    ((num_bytes, seconds),) = engine.take_swaps()
    assert num_bytes == 3 * block and seconds > 0
    assert engine.take_swaps() == []


def test_a_swap_of_no_bytes_tells_nothing(kernels: Kernels) -> None:
    """A pipeline stage without a layer of the group whose blocks move."""
    engine = CacheEngine(layers_of(kernels, lambda blocks: [], 0), [BLOCKS], [HOST_BLOCKS])
    engine.move(StepPlan(step=1, blocks_to_swap_out=[(0, 3)]))
    assert engine.take_swaps() == []


def test_moves_are_done_in_order(kernels: Kernels) -> None:
    """What is swapped out makes room for what is swapped in, and that can be copied."""
    engine = make(kernels)
    engine.move(StepPlan(step=1, blocks_to_swap_out=[(1, 0)]))
    plan = StepPlan(
        step=2,
        blocks_to_swap_out=[(3, 2), (4, 3)],
        blocks_to_swap_in=[(0, 3)],
        blocks_to_copy=[(3, 4), (3, 0), (5, 2)],
    )
    engine.move(plan)
    assert contents(engine) == [1, 1, 5, 1, 1, 5]
    engine.move(StepPlan(step=3, blocks_to_swap_in=[(2, 1), (3, 5)]))
    assert contents(engine) == [1, 3, 5, 1, 1, 4]


def test_a_plan_without_moves_costs_nothing(kernels: Kernels) -> None:
    engine = make(kernels)
    assert swap_seconds(engine, StepPlan(step=1)) is None
    assert contents(engine) == [0, 1, 2, 3, 4, 5]


def test_measuring_moves_no_block_of_ours(kernels: Kernels) -> None:
    engine = make(kernels)
    engine.move(StepPlan(step=1, blocks_to_swap_out=[(2, 0)]))
    assert 0.0 < engine.measure_swap() < 1.0
    engine.move(StepPlan(step=2, blocks_to_swap_in=[(0, 1)]))
    assert contents(engine) == [0, 2, 2, 3, 4, 5]


def test_without_host_blocks_nothing_is_measured_and_a_swap_is_refused(kernels: Kernels) -> None:
    engine = make(kernels, num_host_blocks=0)
    assert engine.measure_swap() == 0.0
    with pytest.raises((IndexError, RuntimeError)):
        engine.move(StepPlan(step=1, blocks_to_swap_out=[(0, 0)]))
