"""Block tables: growth, sharing, copy-on-write, swapping, and the resulting moves."""

from __future__ import annotations

import pytest

from octavo.core.plan import TableChange
from octavo.memory.block_manager import BlockManager
from octavo.memory.kv_group import AllocStatus, BlocksNeeded


def grown(manager: BlockManager, *writes: tuple[int, int, int]) -> list[TableChange]:
    changes = manager.grow(list(writes))
    assert changes is not None
    return changes


def needed(manager: BlockManager, *writes: tuple[int, int, int]) -> int:
    """Blocks that growing takes if they are available."""
    return manager.groups[0].demand(list(writes))[0]


def figures(manager: BlockManager) -> tuple[int, int, int]:
    return manager.state.used, manager.state.free, manager.state.cached


# --- growth and admission -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_table_holds_exactly_the_blocks_its_tokens_need(tokens: int, blocks: int) -> None:
    manager = BlockManager(8, 16)
    assert needed(manager, (7, 0, tokens)) == manager.blocks_for(tokens) == blocks
    (growth,) = grown(manager, (7, 0, tokens))
    assert growth == TableChange(7, 0, manager.table(7))
    assert len(growth.blocks) == len(set(growth.blocks)) == blocks


def test_growing_inside_the_last_block_adds_none() -> None:
    manager = BlockManager(2, 4)
    assert len(grown(manager, (0, 0, 3))[0].blocks) == 1
    assert grown(manager, (0, 3, 4)) == []
    growth = grown(manager, (0, 4, 5))[0]
    assert growth == TableChange(0, 1, manager.table(0)[1:])


def test_growth_without_enough_blocks_changes_nothing() -> None:
    manager = BlockManager(3, 4)
    grown(manager, (0, 0, 4))
    assert manager.grow([(0, 4, 5), (1, 0, 8)]) is None
    assert len(manager.table(0)) == 1
    assert manager.table(1) == []
    assert figures(manager) == (1, 2, 0)


def test_the_watermark_holds_blocks_back_from_admission_only() -> None:
    manager = BlockManager(10, 4, watermark=0.15)
    assert manager.groups[0].watermark_blocks == 2
    assert manager.can_allocate(BlocksNeeded(8)) is AllocStatus.OK
    assert manager.can_allocate(BlocksNeeded(9)) is AllocStatus.LATER
    assert manager.can_allocate(BlocksNeeded(8), reserved=BlocksNeeded(1)) is AllocStatus.LATER
    assert manager.can_allocate(BlocksNeeded(10)) is AllocStatus.LATER
    assert manager.can_allocate(BlocksNeeded(11)) is AllocStatus.NEVER
    assert manager.fits(BlocksNeeded(10))
    assert manager.fits(BlocksNeeded(8), reserved=BlocksNeeded(2))
    assert not manager.fits(BlocksNeeded(8), reserved=BlocksNeeded(3))
    assert manager.grow([(0, 0, 40)]) is not None


def test_free_returns_everything_and_is_harmless_twice() -> None:
    manager = BlockManager(4, 4)
    grown(manager, (0, 0, 9))
    assert manager.num_tables == 1
    manager.free(0)
    manager.free(0)
    assert (manager.num_tables, manager.state.free) == (0, 4)


# --- sharing and copy-on-write --------------------------------------------------------------------------------------


def test_a_fork_shares_every_block_until_one_of_them_writes() -> None:
    manager = BlockManager(6, 4)
    grown(manager, (0, 0, 6))
    manager.fork(0, 1)
    first, second = manager.table(0)
    assert manager.table(1) == [first, second]
    assert manager.state.used == 2
    (growth,) = grown(manager, (1, 6, 7))
    assert growth.index == 1
    assert manager.table(1) == [first, *growth.blocks]
    assert manager.table(0) == [first, second]
    assert manager.take_moves().copy == [(second, growth.blocks[0])]


def test_the_last_writer_of_a_shared_block_writes_in_place() -> None:
    manager = BlockManager(3, 4)
    grown(manager, (0, 0, 2))
    shared = manager.table(0)[0]
    manager.fork(0, 1)
    manager.fork(0, 2)
    writes = [(0, 2, 3), (1, 2, 3), (2, 2, 3)]
    assert needed(manager, *writes) == 2
    growths = grown(manager, *writes)
    assert [(g.seq_id, len(g.blocks)) for g in growths] == [(0, 1), (1, 1)]
    assert manager.table(2) == [shared]
    assert {source for source, _ in manager.take_moves().copy} == {shared}
    assert figures(manager) == (3, 0, 0)


def test_the_last_writer_writes_in_place_also_in_a_call_of_its_own() -> None:
    manager = BlockManager(2, 4)
    grown(manager, (0, 0, 2))
    manager.fork(0, 1)
    grown(manager, (0, 2, 3))
    assert needed(manager, (1, 2, 3)) == 0
    assert grown(manager, (1, 2, 3)) == []


def test_a_full_shared_block_is_not_copied_for_the_token_after_it() -> None:
    manager = BlockManager(4, 4)
    grown(manager, (0, 0, 4))
    manager.fork(0, 1)
    growths = grown(manager, (0, 4, 5), (1, 4, 5))
    assert [g.index for g in growths] == [1, 1]
    assert manager.take_moves().copy == []


def test_a_fork_of_the_first_blocks_shares_only_those() -> None:
    manager = BlockManager(4, 4)
    grown(manager, (0, 0, 10))
    manager.fork_prefix(0, 1, 2)
    manager.fork_prefix(0, 2, 0)
    assert manager.table(1) == manager.table(0)[:2]
    assert manager.num_tables == 2
    with pytest.raises(ValueError, match="holds 3 blocks and cannot share 4"):
        manager.fork_prefix(0, 3, 4)


def test_forking_into_a_sequence_that_holds_blocks_is_an_error() -> None:
    manager = BlockManager(4, 4)
    grown(manager, (0, 0, 4), (1, 0, 4))
    with pytest.raises(ValueError, match="sequence 1 holds blocks already"):
        manager.fork(0, 1)


def test_a_copy_of_a_copy_is_taken_from_the_original() -> None:
    manager = BlockManager(4, 4)
    grown(manager, (0, 0, 2))
    original = manager.table(0)[0]
    manager.fork(0, 1)
    (copied,) = grown(manager, (1, 2, 3))[0].blocks
    manager.fork(1, 2)
    (again,) = grown(manager, (2, 2, 3))[0].blocks
    assert manager.take_moves().copy == [(original, copied), (original, again)]


def test_a_copied_block_is_not_allocated_before_the_plan_is_complete() -> None:
    manager = BlockManager(3, 4)
    grown(manager, (0, 0, 2))
    manager.fork(0, 1)
    grown(manager, (1, 2, 3))
    manager.free(0)
    manager.free(1)
    assert figures(manager) == (2, 1, 0)
    assert manager.grow([(2, 0, 8)]) is None
    manager.take_moves()
    assert figures(manager) == (0, 3, 0)


def test_moves_are_handed_out_once() -> None:
    manager = BlockManager(2, 4, num_host_blocks=2)
    grown(manager, (0, 0, 2))
    assert manager.swap_out([0])
    assert len(manager.take_moves().swap_out) == 1
    assert manager.take_moves() == ([], [], [])


# --- swapping -------------------------------------------------------------------------------------------------------


def test_a_group_is_swapped_with_each_shared_block_once() -> None:
    manager = BlockManager(4, 4, num_host_blocks=3)
    grown(manager, (0, 0, 6))
    manager.fork(0, 1)
    grown(manager, (1, 6, 7))
    manager.take_moves()
    before = {0: manager.table(0), 1: manager.table(1)}
    assert manager.swap_out([0, 1])
    assert manager.is_swapped(0)
    assert manager.is_swapped(1)
    assert manager.table(0) == []
    assert manager.num_tables == 2
    assert (manager.state.free, manager.state.host_used, manager.groups[0].host.num_available) == (4, 3, 0)
    out = dict(manager.take_moves().swap_out)
    assert len(out) == 3
    assert manager.blocks_to_swap_in([0, 1]) == (3,)
    assert manager.swap_in([0, 1])
    back = dict(manager.take_moves().swap_in)
    for seq_id, blocks in before.items():
        assert manager.table(seq_id) == [back[out[block]] for block in blocks]
    assert manager.table(0)[0] == manager.table(1)[0]
    assert (manager.state.host_used, manager.is_swapped(0)) == (0, False)


def test_swapping_out_without_host_room_changes_nothing() -> None:
    manager = BlockManager(4, 4, num_host_blocks=1)
    grown(manager, (0, 0, 8))
    table = manager.table(0)
    assert not manager.swap_out([0])
    assert manager.table(0) == table
    assert manager.groups[0].host.num_available == 1
    assert manager.take_moves() == ([], [], [])


def test_swapping_in_without_device_room_changes_nothing() -> None:
    manager = BlockManager(2, 4, num_host_blocks=2)
    grown(manager, (0, 0, 8))
    assert manager.swap_out([0])
    grown(manager, (1, 0, 1))
    manager.take_moves()
    assert not manager.swap_in([0])
    assert manager.is_swapped(0)
    assert manager.take_moves() == ([], [], [])


def test_a_block_swapped_out_is_available_in_the_same_step() -> None:
    manager = BlockManager(2, 4, num_host_blocks=2)
    grown(manager, (0, 0, 8))
    manager.take_moves()
    assert manager.swap_out([0])
    assert manager.grow([(1, 0, 8)]) is not None


def test_host_blocks_in_a_plan_are_not_reused_before_it_is_complete() -> None:
    manager = BlockManager(4, 4, num_host_blocks=2)
    grown(manager, (0, 0, 8), (1, 0, 8))
    assert manager.swap_out([0])
    manager.take_moves()
    assert manager.swap_in([0])
    assert not manager.swap_out([1])
    manager.take_moves()
    assert manager.swap_out([1])
    manager.free(1)
    assert manager.groups[0].host.num_available == 0
    manager.take_moves()
    assert manager.groups[0].host.num_available == 2


def test_a_sequence_is_not_swapped_out_in_the_step_that_brings_its_blocks() -> None:
    manager = BlockManager(2, 4, num_host_blocks=4)
    grown(manager, (0, 0, 4))
    assert manager.swap_out([0])
    manager.take_moves()
    assert manager.swap_in([0])
    assert not manager.swap_out([0])
    manager.take_moves()
    assert manager.swap_out([0])


def test_a_block_swapped_in_and_freed_is_not_the_target_of_a_second_move() -> None:
    manager = BlockManager(2, 4, num_host_blocks=2)
    grown(manager, (0, 0, 4), (1, 0, 4))
    assert manager.swap_out([0, 1])
    manager.take_moves()
    assert manager.swap_in([0])
    manager.free(0)
    assert manager.swap_in([1])
    targets = [target for _, target in manager.take_moves().swap_in]
    assert len(set(targets)) == 2
    assert figures(manager) == (1, 1, 0)


def test_swapped_sequences_are_freed_like_others() -> None:
    manager = BlockManager(2, 4, num_host_blocks=2)
    grown(manager, (0, 0, 8))
    assert manager.swap_out([0])
    manager.take_moves()
    manager.free(0)
    assert (manager.state.host_used, manager.num_tables) == (0, 0)


def test_what_is_swapped_out_cannot_grow_or_fork() -> None:
    manager = BlockManager(4, 4, num_host_blocks=2)
    grown(manager, (0, 0, 4))
    assert manager.swap_out([0])
    with pytest.raises(ValueError, match="holds blocks already"):
        manager.grow([(0, 4, 5)])
    with pytest.raises(ValueError, match="swap it in first"):
        manager.fork(0, 1)


def test_swapping_nothing_succeeds() -> None:
    manager = BlockManager(2, 4)
    assert manager.swap_out([5])
    assert manager.swap_in([5])
    assert manager.blocks_to_swap_in([5]) == (0,)


def test_to_clear_frees_what_sequences_and_moves_hold() -> None:
    blocks = BlockManager(8, 4, num_host_blocks=4, prefix_caching=True)
    assert blocks.grow([(1, 0, 8), (2, 0, 8)]) is not None
    blocks.fork(1, 3)
    assert blocks.grow([(3, 7, 8)]) is not None  # a copy that no plan has
    assert blocks.swap_out([2])
    blocks.clear()
    assert (blocks.state.used, blocks.state.host_used, blocks.num_tables) == (0, 0, 0)
    assert blocks.take_moves() == ([], [], [])
    blocks.groups[0].device.allocate(1)  # in no table
    with pytest.raises(RuntimeError):
        blocks.clear()
