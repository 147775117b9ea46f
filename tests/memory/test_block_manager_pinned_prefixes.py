"""Pinned prefixes: never evicted, counted apart, released by name."""

from __future__ import annotations

import pytest

from octavo.config.kv_spec import GroupBlocks
from octavo.memory.block_manager import BlockManager
from octavo.memory.kv_group import AllocStatus, BlocksNeeded

SIZE = 4
PREFIX = list(range(8))


def compute(blocks: BlockManager, seq_id: int, token_ids: list[int]) -> int:
    """Computes tokens as a request does, up to its result; returns how many were found in the prefix cache."""
    match = blocks.prefixes.match(token_ids, blocks.prefixes.chain(token_ids, ""))
    blocks.prefixes.adopt(seq_id, match)
    assert blocks.grow([(seq_id, match.num_tokens, len(token_ids))]) is not None
    blocks.take_moves()
    blocks.prefixes.register(seq_id, token_ids, len(token_ids), "")
    return match.num_tokens


def pin(blocks: BlockManager, name: str, token_ids: list[int], max_tokens: int = 8) -> AllocStatus:
    compute(blocks, -1, token_ids)
    status = blocks.pinned.add(name, -1, token_ids, "", blocks.demand(blocks.blocks_for(max_tokens)))
    blocks.free(-1)
    return status


def make(num_blocks: int | list[GroupBlocks] = 6, max_num_batched_tokens: int = 0) -> BlockManager:
    return BlockManager(num_blocks, SIZE, prefix_caching=True, max_num_batched_tokens=max_num_batched_tokens)


def counts(blocks: BlockManager) -> tuple[int, int, int, int]:
    assert blocks.state.used + blocks.state.free + blocks.state.cached + blocks.state.pinned == blocks.num_blocks
    return blocks.state.used, blocks.state.free, blocks.state.cached, blocks.state.pinned


def test_a_pinned_prefix_survives_what_evicts_all_else() -> None:
    blocks = make()
    assert pin(blocks, "system", PREFIX) is AllocStatus.OK
    assert counts(blocks) == (0, 4, 0, 2)
    for seq_id in range(3):
        assert compute(blocks, seq_id, [50 + seq_id] * 16) == 0  # takes every other block
        blocks.free(seq_id)
    assert counts(blocks) == (0, 0, 4, 2)
    assert blocks.grow([(9, 0, 20)]) is None
    blocks.reset_prefix_cache()
    assert counts(blocks) == (0, 4, 0, 2)
    assert compute(blocks, 4, [*PREFIX, 90]) == 8
    assert counts(blocks) == (1, 3, 0, 2), "a shared pinned block is not counted twice"
    blocks.free(4)
    assert counts(blocks) == (0, 4, 0, 2)


def test_a_released_prefix_is_cached_as_any_other() -> None:
    blocks = make()
    pin(blocks, "system", PREFIX)
    compute(blocks, 0, [*PREFIX, 90])
    blocks.pinned.remove("system")
    assert counts(blocks) == (3, 3, 0, 0)
    blocks.free(0)
    assert counts(blocks) == (0, 4, 2, 0)
    blocks.pinned.remove("system")  # released already
    compute(blocks, 1, [70] * 24)
    blocks.free(1)
    assert compute(blocks, 2, [*PREFIX, 90]) == 0


def test_prefixes_that_begin_alike_share_blocks_until_the_last_is_released() -> None:
    blocks = make()
    pin(blocks, "a", PREFIX)
    pin(blocks, "b", [*PREFIX[:4], 60, 61, 62, 63])
    pin(blocks, "c", PREFIX)  # its last block is computed again, and what is pinned stays
    assert counts(blocks) == (0, 3, 0, 3)
    blocks.pinned.remove("a")
    assert counts(blocks) == (0, 3, 0, 3)
    blocks.pinned.remove("c")
    assert counts(blocks) == (0, 3, 1, 2)
    with pytest.raises(ValueError, match="'b' is pinned already"):
        pin(blocks, "b", PREFIX)


def test_the_partly_filled_end_of_a_prefix_is_pinned_and_copied_before_it_is_written() -> None:
    blocks = make(8)
    prefix = [*PREFIX, 20, 21]
    assert pin(blocks, "system", prefix, max_tokens=16) is AllocStatus.OK
    assert counts(blocks) == (0, 5, 0, 3)
    end = blocks.pinned._blocks["system"][0][-1]
    for seq_id, rest in enumerate(([30], [31, 32, 33])):
        tokens = [*prefix, *rest]
        match = blocks.prefixes.match(tokens, blocks.prefixes.chain(tokens, ""))
        assert match.num_tokens == len(prefix)
        blocks.prefixes.adopt(seq_id, match)
        assert blocks.grow([(seq_id, match.num_tokens, len(tokens))]) is not None
        assert blocks.take_moves().copy == [(end, blocks.table(seq_id)[2])]
    assert counts(blocks) == (3, 2, 0, 3), "two copies, and a block behind one of them"
    blocks.free(0)
    blocks.free(1)
    blocks.pinned.remove("system")
    assert counts(blocks) == (0, 5, 3, 0)
    assert compute(blocks, 2, [*prefix, 9]) == 10, "once released, it is cached as any other"


def test_a_short_prefix_is_found_whatever_other_prompts_began_with_since() -> None:
    blocks = make(50)
    assert pin(blocks, "short", [7, 8]) is AllocStatus.OK
    for seq_id in range(20):
        compute(blocks, seq_id, [7, 50 + seq_id, 1, 1, 1])
    assert compute(blocks, 20, [7, 8, 9]) == 2
    blocks.pinned.remove("short")
    for seq_id in range(21):
        blocks.free(seq_id)
    blocks.reset_prefix_cache()
    assert counts(blocks) == (0, 50, 0, 0)


def test_equal_ends_of_prefixes_are_pinned_once() -> None:
    blocks = make(8)
    prefix = [*PREFIX, 20, 21]
    pin(blocks, "a", prefix)
    pin(blocks, "b", prefix)
    pin(blocks, "c", [*prefix, 22])
    assert counts(blocks)[3] == 4
    blocks.pinned.remove("a")
    assert compute(blocks, 0, [*prefix, 9]) == 10
    blocks.pinned.remove("b")
    assert counts(blocks)[3] == 3
    assert compute(blocks, 1, [*prefix, 22, 23]) == 11


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("length", [17, 18, 19])
def test_of_windowed_layers_the_partly_filled_end_is_pinned_however_the_prompt_was_cut(chunk: int, length: int) -> None:
    blocks = make([GroupBlocks(12), GroupBlocks(12, window=3)], max_num_batched_tokens=16)
    prefix = list(range(length))
    blocks.prefixes.adopt(0, blocks.prefixes.match(prefix, blocks.prefixes.chain(prefix, "")))
    for computed in range(0, length, chunk):
        end = min(computed + chunk, length)
        assert blocks.grow([(0, computed, end)]) is not None
        blocks.prefixes.register(0, prefix, end, "")
    assert blocks.pinned.add("system", 0, prefix, "", blocks.demand(blocks.blocks_for(16))) is AllocStatus.OK
    blocks.free(0)
    assert [group.device.num_pinned for group in blocks.groups] == [5, 2]
    blocks.reset_prefix_cache()
    longer = [*prefix, 90]
    assert blocks.prefixes.match(longer, blocks.prefixes.chain(longer, "")).num_tokens == length


def test_a_prefix_must_leave_room_for_one_sequence() -> None:
    blocks = make()
    assert pin(blocks, "all but one", PREFIX, max_tokens=17) is AllocStatus.NEVER
    assert counts(blocks) == (0, 4, 2, 0)
    assert pin(blocks, "fits", PREFIX, max_tokens=16) is AllocStatus.OK
    assert blocks.can_allocate(BlocksNeeded(4)) is AllocStatus.OK
    assert blocks.can_allocate(BlocksNeeded(5)) is AllocStatus.NEVER


def test_a_prefix_that_was_computed_across_a_reset_is_not_pinned() -> None:
    blocks = make()
    compute(blocks, 0, PREFIX)
    blocks.reset_prefix_cache()
    assert blocks.pinned.add("system", 0, PREFIX, "", blocks.demand(blocks.blocks_for(8))) is AllocStatus.LATER
    blocks.free(0)
    assert counts(blocks) == (0, 6, 0, 0)


def test_a_pinned_block_is_copied_before_it_is_written_even_where_blocks_are_short() -> None:
    blocks = make(3)
    pin(blocks, "system", PREFIX, max_tokens=4)
    assert compute(blocks, 0, [0, 1, 9]) == 2  # the third block is a copy of the first
    assert counts(blocks) == (1, 0, 0, 2)
    match = blocks.prefixes.match([0, 1, 8], blocks.prefixes.chain([0, 1, 8], ""))
    blocks.prefixes.adopt(1, match)
    assert blocks.grow([(1, match.num_tokens, 3)]) is None, "a pinned block is written"


def test_of_windowed_layers_the_last_window_is_pinned() -> None:
    blocks = make([GroupBlocks(9), GroupBlocks(9, window=5)], max_num_batched_tokens=4)
    prefix = list(range(16))
    match = blocks.prefixes.match(prefix, blocks.prefixes.chain(prefix, ""))
    blocks.prefixes.adopt(0, match)
    for computed in range(0, 16, 4):
        assert blocks.grow([(0, computed, computed + 4)]) is not None
        blocks.prefixes.register(0, prefix, computed + 4, "")
    assert blocks.pinned.add("system", 0, prefix, "", blocks.demand(blocks.blocks_for(16))) is AllocStatus.OK
    blocks.free(0)
    assert [group.device.num_pinned for group in blocks.groups] == [4, 1]
    blocks.reset_prefix_cache()
    longer, shorter = [*prefix, 90], [*prefix[:9], 90]
    assert blocks.prefixes.match(longer, blocks.prefixes.chain(longer, "")).num_tokens == 16
    assert blocks.prefixes.match(shorter, blocks.prefixes.chain(shorter, "")).num_tokens == 0, "its window is not there"
