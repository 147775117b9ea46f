"""Contiguous KV caches under the real scheduler: who is admitted, and where every slot is counted."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.core.plan import StepPlan
from octavo.lab.simulate.allocators.census import Slots, count_slots
from octavo.lab.simulate.allocators.comparison import ALLOCATORS, Setting, make_engine, make_setting
from octavo.lab.simulate.allocators.contiguous import RESERVATIONS, ContiguousBlocks
from octavo.lab.simulate.engine import SimulatedEngine
from octavo.lab.workloads.lengths import Constant, Uniform
from octavo.lab.workloads.traces import Trace
from octavo.lab.workloads.workload import Workload
from octavo.memory.kv_group import AllocStatus, BlocksNeeded
from tests.lab.simulate.test_profile import profile


def setting(lengths: list[tuple[int, int]], context: int, slots: int) -> Setting:
    made = make_setting(profile(max_model_len=context, kv_cache_tokens=slots), Constant(1), Constant(1), 1, 0)
    ins, outs = zip(*lengths, strict=True)
    return Setting(
        made.profile, made.options, Trace("", array("d", [0.0] * len(ins)), array("q", ins), array("q", outs)), 0
    )


def started(allocator: str, given: Setting, **options: Any) -> SimulatedEngine:
    """An engine with all requests waiting."""
    load = Workload(requests=len(given.lengths), trace=given.lengths)
    engine = make_engine(given, allocator, **options)
    for number, item in enumerate(load):
        engine.add(number, item)
    return engine


@pytest.mark.parametrize(("allocator", "admitted"), [("paged", 7), ("oracle", 4), ("pow2", 2), ("max", 1)])
def test_as_many_are_admitted_as_have_an_extent(allocator: str, admitted: int) -> None:
    # 16 blocks of 16 slots; prompts of 20 and outputs of 36. Paged: 2 blocks each, and one is left free (watermark).
    # Oracle: 56 slots, 4 blocks. Pow2: 20 + 64 slots, 6 blocks, an extent of 8. Max: 256 slots.
    batches: list[int] = []
    engine = started(
        allocator, setting([(20, 36)] * 12, 256, 256), on_plan=lambda plan, _: batches.append(len(plan.seq_ids))
    )
    engine.step()
    assert batches == [admitted]
    if allocator != "paged":
        while engine.has_work:
            engine.step()
        assert max(batches) == admitted and engine.scheduler.counts().preemptions_by_recompute == 0
        assert engine.blocks.state.used == 0 and isinstance(engine.blocks, ContiguousBlocks)
        assert engine.blocks.buddy.extents() == ({}, {0: 16})


def slots_in_the_first_step(allocator: str, given: Setting) -> Slots:
    engine, found = started(allocator, given), []
    engine.on_plan = lambda plan, seconds: found.append(count_slots(engine))
    engine.step()
    return found[0]


def test_slots_are_counted_by_what_becomes_of_them() -> None:
    given = setting([(20, 36), (20, 36)], 256, 256)
    found = {allocator: slots_in_the_first_step(allocator, given) for allocator in ALLOCATORS}
    assert found["paged"] == Slots(tokens=40, reserved=24, internal=0, rounding=0, free=192)
    assert found["oracle"] == Slots(tokens=40, reserved=72, internal=0, rounding=16, free=128)
    assert found["pow2"] == Slots(tokens=40, reserved=72, internal=56, rounding=88, free=0)
    assert found["max"] == Slots(tokens=20, reserved=36, internal=200, rounding=0, free=0)


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_at_every_step_the_states_are_all_memory(allocator: str) -> None:
    made = make_setting(profile(max_model_len=256, kv_cache_tokens=983), Uniform(1, 120), Uniform(1, 120), 60, 1)
    engine = started(allocator, made)
    steps = 0

    def check(plan: StepPlan, seconds: float) -> None:
        nonlocal steps
        steps += 1
        slots, size = count_slots(engine), engine.blocks.block_size
        assert slots.tokens + slots.reserved + slots.internal + slots.external == engine.blocks.num_blocks * size
        assert min(slots.tokens, slots.reserved, slots.internal, slots.rounding, slots.free) >= 0
        if isinstance(engine.blocks, ContiguousBlocks):
            allocated, free = engine.blocks.buddy.extents()
            assert (
                sum(allocated.values()) == engine.blocks.state.used and sum(free.values()) == engine.blocks.state.free
            )
            assert len(allocated) == len(engine.scheduler.queues.running)
            assert allocator == "oracle" or slots.internal > 0
            assert allocator != "oracle" or slots.internal == 0

    engine.on_plan = check
    while engine.has_work:
        engine.step()
    assert steps > 100 and engine.blocks.state.used == 0


@pytest.mark.parametrize(
    ("output", "slots"), [(1, 11), (2, 12), (25, 42), (32, 42), (33, 74), (900, 1024 + 10), (2000, 2048)]
)
def test_pow2_reserves_at_most_twice_the_output_and_never_beyond_the_context(output: int, slots: int) -> None:
    # 25 become 32, as in Kwon et al. 2023, section 6.1.
    assert RESERVATIONS["pow2"](10, output, 2048) == slots
    assert RESERVATIONS["oracle"](10, output, 2048) <= slots <= RESERVATIONS["max"](10, output, 2048)


def test_room_is_a_free_extent_not_a_number_of_free_blocks() -> None:
    blocks = ContiguousBlocks(4, 16, reserve=[16, 16, 16, 16, 32].__getitem__)
    for seq_id in range(4):
        assert blocks.grow([(seq_id, 0, 5)])
    blocks.free(1)
    blocks.free(2)
    demand = blocks.demand(1, seq_ids=[4])
    assert blocks.state.free == demand.blocks == 2
    assert blocks.can_allocate(demand) is AllocStatus.LATER and blocks.grow([(4, 0, 5)]) is None
    blocks.free(0)
    assert blocks.can_allocate(demand) is AllocStatus.OK and blocks.grow([(4, 0, 5)])
    assert blocks.demand(1, seq_ids=[4]).blocks == 0
    assert blocks.can_allocate(blocks.demand(5)) is AllocStatus.NEVER


def test_what_contiguous_memory_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="share no blocks"):
        ContiguousBlocks(4, 16, reserve=[16].__getitem__, prefix_caching=True)
    with pytest.raises(ValueError, match="outgrows its 16 reserved slots"):
        ContiguousBlocks(4, 16, reserve=[16].__getitem__).grow([(0, 0, 17)])


def test_a_request_of_several_sequences_needs_an_extent_for_each() -> None:
    blocks = ContiguousBlocks(8, 16, reserve=dict.fromkeys(range(10), 32).__getitem__)
    three = blocks.demand(3, seq_ids=[0], own_blocks=2)
    assert three.blocks == 6 and blocks.can_allocate(three) is AllocStatus.OK
    assert blocks.can_allocate(three, three) is AllocStatus.LATER, "what is reserved is not free"
    assert blocks.can_allocate(BlocksNeeded() + three, BlocksNeeded()) is AllocStatus.OK
    assert blocks.can_allocate(blocks.demand(3, seq_ids=[0], own_blocks=4)) is AllocStatus.NEVER
    assert blocks.grow([(9, 0, 5)]) and blocks.can_allocate(three) is AllocStatus.OK
    assert blocks.grow([(8, 0, 5)]) and blocks.can_allocate(three) is AllocStatus.LATER


def test_a_fork_copies_what_its_parent_has_into_an_extent_of_its_own() -> None:
    blocks = ContiguousBlocks(8, 16, reserve={0: 48, 1: 48}.__getitem__)
    blocks.grow([(0, 0, 20)])
    blocks.fork(0, 1)
    changes = blocks.grow([(0, 20, 21), (1, 20, 21)])
    assert changes is not None and [(c.seq_id, c.index, len(c.blocks)) for c in changes] == [(1, 0, 4)]
    copies = blocks.take_moves().copy
    assert [source for source, _ in copies] == blocks.table(0) and [t for _, t in copies] == blocks.table(1)
    assert blocks.state.used == 8 and not set(blocks.table(0)) & set(blocks.table(1))
    blocks.free(0)
    assert blocks.state.used == blocks.buddy.num_free == 4


def test_a_fork_continues_in_the_extent_of_a_parent_that_has_ended() -> None:
    blocks = ContiguousBlocks(4, 16, reserve={0: 48, 1: 48}.__getitem__)
    blocks.grow([(0, 0, 20)])
    blocks.fork(0, 1)
    blocks.free(0)
    assert blocks.grow([(1, 20, 21)]) and not blocks.take_moves().copy and blocks.state.used == 4
