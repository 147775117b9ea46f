"""Several groups of KV layers: windows that free blocks, admission, prefixes, and the split of memory."""

from __future__ import annotations

import pytest

from octavo.core.errors import ConfigError
from octavo.core.plan import TableChange
from octavo.memory.block_manager import AllocStatus, BlockManager
from octavo.memory.kv_groups import GroupBlocks, split_memory, window_blocks


def two_groups(
    blocks: int = 10, windowed: int = 10, *, window: int = 6, host: int = 0, **options: bool
) -> BlockManager:
    """A group that keeps all positions, and one with a window; blocks of four tokens, steps of eight."""
    groups = [GroupBlocks(blocks, host), GroupBlocks(windowed, host, window)]
    return BlockManager(groups, 4, max_num_batched_tokens=8, prefix_caching=options.get("caching", False))


def used(manager: BlockManager) -> list[int]:
    return [group.device.num_used for group in manager.groups]


def compute(manager: BlockManager, seq_id: int, token_ids: list[int], start: int = 0) -> None:
    """Computes a sequence in steps of four tokens."""
    for begin in range(start, len(token_ids), 4):
        stop = min(begin + 4, len(token_ids))
        assert manager.grow([(seq_id, begin, stop)]) is not None
        manager.take_moves()
        manager.register(seq_id, token_ids, stop, "")


# --- tables ---------------------------------------------------------------------------------------------------------


def test_block_ids_of_groups_are_disjoint() -> None:
    manager = two_groups(3, 2)
    changes = manager.grow([(7, 0, 5)])
    assert changes is not None
    assert changes == manager.tables(7) == [TableChange(7, 0, [1, 0], 0), TableChange(7, 0, [4, 3], 1)]


@pytest.mark.parametrize("window", [1, 4, 5, 6, 12])
def test_a_sequence_holds_no_more_than_its_window(window: int) -> None:
    manager = two_groups(16, 16, window=window)
    for computed in range(64):
        assert manager.grow([(0, computed, computed + 1)]) is not None
        in_window = {p // 4 for p in range(max(0, computed - window + 1), computed + 1)}
        # Asked at every token, as here, exactly the blocks in the window are held.
        assert used(manager) == [computed // 4 + 1, len(in_window)]
        assert len(in_window) <= -(-window // 4) + 1
        assert len(manager.table(0, 1)) == computed // 4 + 1


def test_without_room_in_one_group_no_group_grows() -> None:
    manager = two_groups(10, 3)
    assert manager.grow([(0, 0, 12)]) is not None
    assert manager.grow([(1, 0, 4)]) is None
    assert used(manager) == [3, 3]
    assert manager.num_tables == 1
    assert manager.grow([(0, 12, 13)]) is not None  # in the block that has left the window
    assert used(manager) == [4, 3]


def test_a_swap_moves_what_the_window_holds_and_keeps_its_place() -> None:
    manager = two_groups(host=4)
    compute(manager, 0, list(range(16)))
    before = manager.groups[1].tables[0]
    held = [block for block in before if block >= 0]
    assert manager.swap_out([0])
    out = dict(manager.take_moves().swap_out)
    assert len(out) == 4 + len(held)
    assert sorted(out.values()) == [0, 1, 2, 3, *sorted(out[block] for block in held)]
    assert manager.swap_in([0])
    back = dict(manager.take_moves().swap_in)
    assert manager.groups[1].tables[0] == [block if block < 0 else back[out[block]] for block in before]


def test_swapping_out_wants_room_in_every_group() -> None:
    manager = BlockManager([GroupBlocks(4, 4), GroupBlocks(4, 1)], 4)
    assert manager.grow([(0, 0, 8)]) is not None
    manager.take_moves()
    assert not manager.swap_out([0])
    assert manager.take_moves() == ([], [], [])


def test_a_fork_of_a_beginning_that_has_left_the_window_is_refused() -> None:
    manager = two_groups()
    compute(manager, 0, list(range(20)))
    assert not manager.fork_prefix(0, 1, 2)
    assert manager.num_tables == 1
    assert manager.fork_prefix(0, 1, 5)
    assert used(manager) == [5, 3]
    changes = manager.grow([(1, 20, 21)])
    assert changes is not None
    assert [(c.group, c.index) for c in changes] == [(0, 5), (1, 5)]


def test_a_host_cache_wants_one_group() -> None:
    with pytest.raises(ConfigError, match="works with one group of KV layers, but the model has 2"):
        BlockManager([GroupBlocks(2), GroupBlocks(2)], 4, prefix_caching=True, host_cache=True)


# --- admission ------------------------------------------------------------------------------------------------------


def test_a_windowed_group_admits_as_many_sequences_as_have_their_windows() -> None:
    window = window_blocks(6, 4)
    manager = two_groups(100, 2 * window + 2)
    assert manager.can_allocate(50, num_seqs=2) is AllocStatus.OK
    assert manager.can_allocate(50, num_seqs=3) is AllocStatus.NEVER
    assert manager.can_allocate(101, num_seqs=1) is AllocStatus.NEVER
    assert manager.can_allocate(2 * window + 2, num_seqs=3) is AllocStatus.OK  # so few blocks cannot be too many
    assert manager.grow([(0, 0, 4)]) is not None
    assert manager.can_allocate(2 * window + 2, num_seqs=3) is AllocStatus.LATER
    assert manager.can_allocate(2 * window, reserved_blocks=2, num_seqs=3) is AllocStatus.LATER
    assert manager.fits(50, reserved_blocks=10, num_seqs=2)


# --- prefixes -------------------------------------------------------------------------------------------------------


def test_a_prefix_is_found_if_the_window_before_its_end_is() -> None:
    manager = two_groups(caching=True)
    prompt = list(range(17))
    compute(manager, 0, prompt)
    manager.free(0)
    found = manager.match([*prompt, 99], manager.chain([*prompt, 99], ""))
    assert (found.num_tokens, found.num_full) == (16, 4)
    assert [hit is None for hit in found.hits[1]] == [True, True, False, False]
    assert manager.cost(found) == 4
    manager.adopt(1, found)
    assert used(manager) == [4, 2]
    assert manager.grow([(1, 16, 18)]) is not None
    assert used(manager) == [5, 3]


def test_a_prefix_ends_where_a_group_has_lost_what_is_read_next() -> None:
    manager = two_groups(10, 4, caching=True)
    prompt = list(range(17))
    compute(manager, 0, prompt)
    manager.free(0)
    assert manager.groups[1].device.num_cached == 4 - 1
    assert manager.grow([(1, 0, 8)]) is not None  # takes a free block, and the one that left the window first
    assert manager.match(prompt, manager.chain(prompt, "")).num_tokens == 16
    assert manager.grow([(1, 8, 9)]) is not None
    found = manager.match(prompt, manager.chain(prompt, ""))
    assert found.num_tokens < 16
    assert manager.groups[0].cache.find(manager.chain(prompt, "").digests[4]) is not None


# --- memory ---------------------------------------------------------------------------------------------------------


def split(num_bytes: int, block_bytes: list[int], windows: list[int | None], seqs: int = 2) -> list[int]:
    return split_memory(
        num_bytes, block_bytes, windows, block_size=4, max_num_seqs=seqs, max_num_batched_tokens=8, max_model_len=1000
    )


@pytest.mark.parametrize("num_bytes", [0, 99, 100, 12345])
@pytest.mark.parametrize("window", [None, 6])
def test_one_group_has_the_whole_budget(num_bytes: int, window: int | None) -> None:
    assert split(num_bytes, [100], [window]) == [num_bytes // 100]


def test_groups_that_keep_all_have_equal_numbers_of_blocks() -> None:
    assert split(1000, [30, 70], [None, None]) == [10, 10]
    assert split(1099, [30, 70], [None, 6], seqs=100) == [10, 10]


def test_a_windowed_group_has_the_blocks_that_all_sequences_can_use_and_the_others_share_the_rest() -> None:
    enough = 2 * window_blocks(6, 4) + 2
    assert split(100_000, [30, 70], [None, 6]) == [(100_000 - 70 * enough) // 30, enough]
    small, large = enough, 2 * window_blocks(101, 4) + 2
    assert split(100_000, [30, 10, 70], [None, 101, 6]) == [(100_000 - 10 * large - 70 * small) // 30, large, small]


@pytest.mark.parametrize("num_bytes", range(0, 6000, 77))
def test_the_split_is_within_the_budget_and_leaves_less_than_a_block(num_bytes: int) -> None:
    block_bytes, windows = [30, 70, 11], [None, 6, 40]
    counts = split(num_bytes, block_bytes, windows)
    left = num_bytes - sum(count * size for count, size in zip(counts, block_bytes, strict=True))
    assert 0 <= left < sum(block_bytes)
    groups = [GroupBlocks(count, window=window) for count, window in zip(counts, windows, strict=True)]
    manager = BlockManager(groups, 4, max_num_batched_tokens=8)
    if counts[0]:  # what the first group admits, the others do
        assert manager.can_allocate(counts[0], num_seqs=2) is AllocStatus.OK
