"""Blocks that the KV stores get of the prefix cache, and blocks that it gets of them."""

from __future__ import annotations

from typing import Any

from octavo.core.plan import StepPlan
from octavo.core.stats import StoreTierStats
from octavo.memory.block_manager import BlockManager
from octavo.memory.prefix_cache import PrefixChain
from octavo.memory.stored import StoreLimits

TOKENS = list(range(20))


def make(num_blocks: int = 8, **limits: Any) -> BlockManager:
    return BlockManager(
        num_blocks, 4, num_host_blocks=8, prefix_caching=True, host_cache=True, stores=StoreLimits(**limits)
    )


def compute(manager: BlockManager, tokens: list[int] = TOKENS, seq_id: int = 0) -> None:
    assert manager.grow([(seq_id, 0, len(tokens))])
    take(manager)
    manager.prefixes.register(seq_id, tokens, len(tokens), "")
    manager.free(seq_id)


def chain_of(manager: BlockManager, tokens: list[int] = TOKENS) -> PrefixChain:
    return manager.prefixes.chain(tokens, "")


def take(manager: BlockManager, now: float = 0.0) -> StepPlan:
    assert manager.stored is not None
    plan = StepPlan(0)
    manager.stored.add_to(plan, now)
    moves = manager.take_moves()
    plan.blocks_to_swap_out, plan.blocks_to_swap_in = moves.swap_out, moves.swap_in
    return plan


def test_registered_blocks_are_named_once_in_their_order() -> None:
    manager = make(step_bytes=2)
    compute(manager)
    cached, digests = manager.groups[0].cache.on_device, chain_of(manager).digests[1:]
    named = [*take(manager).blocks_to_store, *take(manager).blocks_to_store, *take(manager).blocks_to_store]
    assert [digest for _, digest in named] == digests
    assert all(cached.at(block).digest == digest for block, digest in named)
    compute(manager, seq_id=1)
    assert take(manager).blocks_to_store == []


def test_evicted_blocks_are_named_before_their_place_is_taken_or_are_lost() -> None:
    manager = make(step_bytes=2)
    compute(manager)
    assert manager.stored is not None
    # The last blocks of the chain go first, and to the host too.
    last = [manager.groups[0].cache.on_device.find(digest) for digest in chain_of(manager).digests[:2:-1]]
    assert manager.grow([(1, 0, 24)])
    plan = take(manager)
    assert plan.blocks_to_store == [(entry.block, entry.digest) for entry in last[:2] if entry is not None]
    assert [block for block, _ in plan.blocks_to_swap_out] == [entry.block for entry in last if entry is not None]
    assert manager.stored.num_lost == 1 and manager.stored.num_queued == 2


def test_a_block_that_this_step_brings_from_the_host_is_named_by_the_next() -> None:
    manager = make(step_bytes=0)
    compute(manager)
    assert manager.grow([(1, 0, 32)])
    take(manager)
    manager.free(1)
    manager.prefixes.adopt(2, manager.prefixes.match([*TOKENS, 0], chain_of(manager)))
    assert manager.stored is not None
    manager.stored.add(0, chain_of(manager).digests[2])  # as if it had been forgotten
    manager.stored._room = 9
    assert take(manager).blocks_to_swap_in and manager.stored.num_queued == 1
    manager.stored._room = 9
    ((block, _),) = take(manager).blocks_to_store
    assert block == manager.table(2)[1]


def test_placed_blocks_are_matched_and_not_written_again() -> None:
    manager = make()
    chain, stored = chain_of(manager), manager.stored
    assert stored is not None
    assert all(stored.place(0, chain, index, TOKENS, (5, index)) for index in range(5))
    assert manager.groups[0].device.num_available == 3, "until the plan is made"
    match = manager.prefixes.match([*TOKENS, 0], chain)
    assert match.num_tokens == 20 and manager.prefixes.cost(match) == 0
    plan = take(manager)
    hits = [hit.block for hit in match.hits[0] if hit is not None]
    assert plan.blocks_fetched == [(5, index, block) for index, block in enumerate(hits)]
    assert plan.blocks_to_store == [] and manager.state.cached == 5 and manager.state.used == 0
    assert stored.place(0, chain, 0, TOKENS, (6, 0)) and not take(manager).blocks_fetched, "cached already"


def test_nothing_is_placed_without_a_block() -> None:
    manager = make()
    assert manager.grow([(1, 0, 28)]) and manager.stored is not None
    chain = chain_of(manager)
    assert [manager.stored.place(0, chain, index, TOKENS, (5, index)) for index in range(2)] == [True, False]


def test_a_reset_drops_what_was_queued() -> None:
    manager = make()
    compute(manager)
    manager.reset_prefix_cache()
    assert manager.stored is not None and manager.stored.num_queued == 0 and take(manager).blocks_to_store == []


def test_the_speed_of_the_stores_bounds_what_is_named() -> None:
    manager = make(num_blocks=64, second_bytes=1.0, burst_bytes=2)
    compute(manager, list(range(200)))
    assert manager.stored is not None
    assert len(take(manager).blocks_to_store) == 2
    assert [len(take(manager, now).blocks_to_store) for now in (1.0, 1.1, 2.1, 3.1)] == [0, 1, 0, 1]
    manager.stored.observe_writes([StoreTierStats("disk", bytes_written=10**7, write_seconds=1.0)])
    take(manager, 4.1)
    assert len(take(manager, 5.0).blocks_to_store) == 2


def test_digests_are_forgotten_in_the_end() -> None:
    manager = make(num_blocks=64, max_known=8)
    compute(manager, list(range(200)))
    assert len(take(manager).blocks_to_store) == 50 and manager.stored is not None
    known = [manager.stored.knows(0, digest) for digest in chain_of(manager, list(range(200))).digests[1:]]
    assert not any(known[:42]) and all(known[-4:])


def test_while_sequences_run_found_blocks_take_a_share_of_processor_time() -> None:
    manager = make(num_blocks=64, second_bytes=100.0, burst_bytes=8, busy_share=0.25)
    assert manager.stored is not None
    manager.stored.observe_writes([StoreTierStats("disk", bytes_written=80, write_seconds=0.01, processor_seconds=10)])
    take(manager)
    tokens = list(range(100))
    compute(manager, tokens)
    compute(manager, list(range(200, 260)), seq_id=1)

    def named(now: float, is_busy: bool) -> int:
        plan = StepPlan(0)
        assert manager.stored is not None
        manager.stored.add_to(plan, now, is_busy=is_busy)
        manager.take_moves()
        return len(plan.blocks_to_store)

    assert [named(second, True) for second in (0.5, 1.0)] == [0, 0]
    manager.prefixes.adopt(2, manager.prefixes.match([*tokens, 0], chain_of(manager, tokens)))
    named(1.5, True)
    # A byte costs an eighth of a second, and a block has one: a quarter of the time pays for two a second.
    assert [named(second, True) for second in (2.0, 2.5, 3.0, 3.5)] == [1, 1, 1, 1]
    assert [named(second, False) for second in (4.0, 4.5)][1] == 8


def test_blocks_that_a_prompt_has_found_are_named_first() -> None:
    manager = make(num_blocks=64, step_bytes=3)
    once, again = list(range(40)), list(range(100, 120))
    compute(manager, once)
    compute(manager, again, seq_id=1)
    manager.prefixes.adopt(2, manager.prefixes.match([*again, 0], chain_of(manager, again)))
    manager.free(2)
    named = [[digest for _, digest in take(manager).blocks_to_store] for _ in range(6)]
    first, second = chain_of(manager, again).digests[1:], chain_of(manager, once).digests[4:]  # three are named before
    assert named == [first[:3], [*first[3:], second[0]], second[1:4], second[4:], [], []]


def test_a_block_that_a_worker_had_no_room_for_is_named_again_first() -> None:
    manager = make(step_bytes=2)
    compute(manager)
    digests = chain_of(manager).digests[1:]
    assert manager.stored is not None
    assert [digest for _, digest in take(manager).blocks_to_store] == digests[:2]
    for _ in range(2):  # by two workers
        manager.stored.take_back(0, digests[1])
    assert [digest for _, digest in take(manager).blocks_to_store] == digests[1:3]
    assert manager.stored.num_written == 3
