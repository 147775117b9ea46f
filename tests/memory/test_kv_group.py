"""Several groups of KV layers: windows that free blocks, admission, prefixes, and the split of memory."""

from __future__ import annotations

import pytest

from octavo.config.kv_spec import GroupBlocks, GroupShape, KVLayout, window_blocks
from octavo.core.errors import ConfigError
from octavo.core.plan import TableChange
from octavo.memory.block_manager import BlockManager
from octavo.memory.kv_group import AllocStatus


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
        manager.prefixes.register(seq_id, token_ids, stop, "")


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


# --- admission ------------------------------------------------------------------------------------------------------


def test_a_windowed_group_counts_windows_and_a_chunk_not_lengths() -> None:
    window = window_blocks(6, 4)
    manager = two_groups(100, 2 * window + 2)
    assert manager.can_allocate(manager.demand(50)) is AllocStatus.OK
    assert manager.can_allocate(manager.demand(101)) is AllocStatus.NEVER, "the other group keeps all"
    assert manager.can_allocate(manager.demand(2 * window + 2), num_seqs=3) is AllocStatus.OK, "so few are kept whole"
    assert manager.can_allocate(manager.demand(50, 2), num_seqs=2) is AllocStatus.OK
    assert manager.can_allocate(manager.demand(50, 3), num_seqs=3) is AllocStatus.NEVER
    assert manager.grow([(0, 0, 4)]) is not None
    # Beside what one sequence holds, there is room for a window and a chunk, however many short ones run.
    assert manager.can_allocate(manager.demand(50), num_seqs=9) is AllocStatus.OK
    held = manager.demand(50, 1, [0])
    assert manager.groups[1].needed(held) == window + 2 - 1, "less what it holds already"
    assert manager.can_allocate(manager.demand(40), held, num_seqs=2) is AllocStatus.OK
    assert manager.can_allocate(manager.demand(20), held + manager.demand(20), num_seqs=3) is AllocStatus.LATER


@pytest.mark.parametrize("blocks", [1, 2, 4, 6])
def test_few_blocks_make_chunks_short(blocks: int) -> None:
    """Blocks of 4 tokens, 8 tokens in flight; a window of 5 blocks at most."""
    manager = BlockManager([GroupBlocks(window_blocks(6, 4) + blocks, window=6)], 4, max_num_batched_tokens=8)
    assert manager.max_chunk == 4 * min(blocks, 2)
    assert manager.can_allocate(manager.demand(10_000)) is AllocStatus.OK


def test_without_short_chunks_all_tokens_in_flight_need_room() -> None:
    groups = [GroupBlocks(window_blocks(6, 4) + 1, window=6)]
    manager = BlockManager(groups, 4, max_num_batched_tokens=8, cuts_prompts=False)
    assert manager.can_allocate(manager.demand(7)) is AllocStatus.NEVER
    assert manager.can_allocate(manager.demand(6)) is AllocStatus.OK


def test_the_watermark_is_a_share_of_each_group() -> None:
    groups = [GroupBlocks(100), GroupBlocks(18, window=6)]
    manager = BlockManager(groups, 4, watermark=0.1, max_num_batched_tokens=8)
    assert [group.watermark_blocks for group in manager.groups] == [10, 2]
    assert manager.can_allocate(manager.demand(90, 2), num_seqs=9) is AllocStatus.OK
    assert manager.can_allocate(manager.demand(91, 2), num_seqs=9) is AllocStatus.LATER
    assert manager.can_allocate(manager.demand(40, 3), num_seqs=9) is AllocStatus.LATER


def test_sequences_whose_windows_all_fit_are_always_admitted() -> None:
    window = window_blocks(6, 4)
    groups = [GroupBlocks(3 * window + 2, window=6)]
    manager = BlockManager(groups, 4, watermark=0.9, max_num_batched_tokens=8)
    assert manager.can_allocate(manager.demand(1000), num_seqs=3) is AllocStatus.OK
    assert manager.can_allocate(manager.demand(1000), num_seqs=4) is AllocStatus.LATER


def test_bytes_are_those_of_each_groups_blocks() -> None:
    manager = BlockManager([GroupBlocks(10, 10, None, 7), GroupBlocks(10, 10, 6, 100)], 4)
    compute(manager, 0, list(range(20)))
    held = used(manager)
    assert held == [5, 3]
    assert manager.held_bytes(0) == 5 * 7 + 3 * 100
    assert manager.swap_out([0])
    assert manager.blocks_to_swap_in([0]) == (5, 3)
    assert manager.held_bytes(0) == 0


# --- prefixes -------------------------------------------------------------------------------------------------------


def test_a_prefix_is_found_if_the_window_before_its_end_is() -> None:
    manager = two_groups(caching=True)
    prompt = list(range(17))
    compute(manager, 0, prompt)
    manager.free(0)
    found = manager.prefixes.match([*prompt, 99], manager.prefixes.chain([*prompt, 99], ""))
    assert (found.num_tokens, found.num_full) == (16, 4)
    assert [hit is None for hit in found.hits[1]] == [True, True, False, False]
    assert manager.prefixes.cost(found) == 4
    manager.prefixes.adopt(1, found)
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
    assert manager.prefixes.match(prompt, manager.prefixes.chain(prompt, "")).num_tokens == 16
    assert manager.grow([(1, 8, 9)]) is not None
    found = manager.prefixes.match(prompt, manager.prefixes.chain(prompt, ""))
    assert found.num_tokens < 16
    assert manager.groups[0].cache.find(manager.prefixes.chain(prompt, "").digests[4]) is not None


def test_a_prefix_ends_where_there_is_a_state() -> None:
    """Blocks of 4 tokens, states after every 8."""
    sizes = [GroupBlocks(20), GroupBlocks(8, window=2, state_tokens=8)]
    blocks = BlockManager(sizes, 4, prefix_caching=True, max_num_batched_tokens=64)
    tokens = list(range(30))

    def match(count: int) -> int:
        return blocks.prefixes.match(tokens[:count], blocks.prefixes.chain(tokens[:count], "")).num_tokens

    assert blocks.grow([(0, 0, 21)]) is not None
    blocks.take_moves()
    blocks.prefixes.register(0, tokens, 21, "")
    assert [match(count) for count in (30, 21, 17, 16, 9, 8)] == [16, 16, 16, 8, 8, 0]
    assert [blocks.fork_prefix(0, child, child) for child in (1, 2, 3, 4, 5)] == [False, True, False, True, False]
    assert [len(group.tables[2]) for group in blocks.groups] == [2, 1]
    blocks.fork(0, 6)  # with the same tokens it shares the state in the middle of a block, until one of them goes on
    (own,) = [change for change in blocks.grow([(6, 21, 22)]) or () if change.group == 1]
    assert own.blocks != blocks.table(0, 1)[2:] and blocks.take_moves().copy


def test_blocks_of_states_are_as_long_as_some_of_the_others() -> None:
    with pytest.raises(ConfigError, match="6"):
        BlockManager([GroupBlocks(4), GroupBlocks(4, window=2, state_tokens=6)], 4)


# --- memory ---------------------------------------------------------------------------------------------------------


def layout(block_bytes: list[int], windows: list[int | None], seqs: int = 2, **options: bool) -> KVLayout:
    return KVLayout([*map(GroupShape, block_bytes, windows)], 4, seqs, 8, **options)


@pytest.mark.parametrize("num_bytes", [0, 99, 100, 12345])
@pytest.mark.parametrize("window", [None, 6])
def test_one_group_has_the_whole_budget(num_bytes: int, window: int | None) -> None:
    alone = layout([100], [window], seqs=100)
    assert alone.split(num_bytes, alone.longest(num_bytes, 1000)) == [num_bytes // 100]


def test_no_group_has_more_than_all_sequences_can_use() -> None:
    windows = 2 * window_blocks(6, 4) + 2
    assert layout([100], [None]).split(10**6, 40) == [20]
    assert layout([100], [6]).split(10**6, 1000) == [windows]
    assert layout([30, 70], [None, 6]).split(10**6, 1000) == [500, windows]
    small, large = windows, 2 * window_blocks(101, 4) + 2
    assert layout([30, 10, 70], [None, 101, 6]).split(10**6, 1000) == [500, large, small]
    assert layout([30, 0], [None, 6]).split(3000, 1000) == [100, windows], "of no bytes on this stage"


def test_groups_that_keep_all_have_equal_numbers_of_blocks() -> None:
    assert layout([30, 70], [None, None]).split(1000, 40) == [10, 10]
    assert layout([30, 70], [None, 6], seqs=100).split(1099, 20) == [10, 10], "no sequence is longer than the window"


def at_once(blocks: list[int], held: list[int]) -> float:
    return min(count / need for count, need in zip(blocks, held, strict=True))


@pytest.mark.parametrize("windowed_layers", [1, 5])
def test_short_and_long_sequences_lose_the_same_share_of_those_that_fit(windowed_layers: int) -> None:
    """One full layer and others with a window, in less memory than all windows take; blocks of 4 tokens."""
    sizes, windows, whole = [100, 100 * windowed_layers], [None, 6], 2500
    mix = KVLayout([*map(GroupShape, sizes, windows)], 4, max_num_seqs=10**6, max_num_batched_tokens=8)
    memory = 10**8
    blocks = mix.split(memory, 4 * whole)
    shares = []
    for held in ([1, 1], [whole, window_blocks(6, 4)]):
        best = memory / sum(size * need for size, need in zip(sizes, held, strict=True))
        shares.append(at_once(blocks, held) / best)
    assert shares[0] == pytest.approx(shares[1], rel=0.01)
    assert min(shares) > 0.5
    assert blocks[0] * sizes[0] > memory / 2, "the group that keeps all has most of it"


@pytest.mark.parametrize("memory", [10_000, 77_777, 10**6])
def test_one_sequence_of_the_longest_length_fits(memory: int) -> None:
    mixes: list[list[int | None]] = [[None], [6], [None, 6], [None, 6, 40], [40, 6], [None, None]]
    for windows in mixes:
        sizes = [30, 70, 11][: len(windows)]
        for cuts in (True, False):
            mix = layout(sizes, windows, cuts_prompts=cuts)
            longest = mix.longest(memory, 4000)
            blocks = mix.split(memory, longest)
            assert mix.size(blocks) <= memory
            groups = [GroupBlocks(count, window=window) for count, window in zip(blocks, windows, strict=True)]
            manager = BlockManager(groups, 4, max_num_batched_tokens=8, cuts_prompts=cuts)
            assert manager.can_allocate(manager.demand(manager.blocks_for(longest))) is AllocStatus.OK
            assert mix.full_length_seqs(blocks, longest) >= 1
            assert longest == 4000 or mix.size(mix.held(longest + 4)) > memory, "no longer one does"
            if None not in windows:
                assert longest == 4000


@pytest.mark.parametrize("memory", [10_000, 77_777, 10**6])
def test_one_sequence_of_the_longest_length_fits_with_its_states(memory: int) -> None:
    mix = KVLayout([GroupShape(30), GroupShape(900, 2, 32)], 4, max_num_seqs=2, max_num_batched_tokens=8)
    longest = mix.longest(memory, 4000)
    counts = mix.split(memory, longest)
    assert longest and mix.size(counts) <= memory
    sizes = [GroupBlocks(counts[0]), GroupBlocks(counts[1], window=2, state_tokens=32)]
    manager = BlockManager(sizes, 4, max_num_batched_tokens=8)
    assert manager.can_allocate(manager.demand(manager.blocks_for(longest))) is AllocStatus.OK
    assert counts[1] <= 2 * window_blocks(2, 32) + 1, "no more states than all sequences can use"


@pytest.mark.parametrize("length", [1, 31, 64, 130])
def test_states_of_one_sequence_are_counted_by_their_own_blocks(length: int) -> None:
    """However few states a pool has, a sequence fits whose states it holds."""
    layout = KVLayout([GroupShape(30), GroupShape(900, 2, 32)], 4, max_num_seqs=1, max_num_batched_tokens=200)
    tokens, states = layout.held(length)
    assert states == -(-length // 32)
    for short in (0, 1):
        sizes = [GroupBlocks(tokens), GroupBlocks(states - short, window=2, state_tokens=32)]
        manager = BlockManager(sizes, 4, max_num_batched_tokens=200)
        never = manager.can_allocate(manager.demand(manager.blocks_for(length))) is AllocStatus.NEVER
        assert never == bool(short)
    forks = manager.demand(manager.blocks_for(length) + 3, own_blocks=3)
    assert manager.groups[1].needed(forks) >= states - 1 + 3, "each fork has a state of its own"


@pytest.mark.parametrize("num_bytes", range(0, 6000, 77))
def test_the_split_is_within_the_budget_and_leaves_less_than_a_block(num_bytes: int) -> None:
    mix = layout([30, 70, 11], [None, 6, 40], seqs=100)
    left = num_bytes - mix.size(mix.split(num_bytes, mix.longest(num_bytes, 1000)))
    assert 0 <= left < sum(mix.block_bytes)
