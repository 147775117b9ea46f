"""The block pool: used + free + cached = all at all times."""

from __future__ import annotations

import pytest

from octavo.memory.block_pool import BlockPool, OutOfBlocksError


def figures(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_used, pool.num_free, pool.num_cached


def test_allocation_takes_distinct_blocks_and_release_returns_them() -> None:
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert len(set(first)) == 3
    assert figures(pool) == (3, 1, 0)
    pool.release(first)
    assert figures(pool) == (0, 4, 0)


def test_a_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(OutOfBlocksError, match="3 blocks asked for, 2 free of 2"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.share(blocks)
    assert pool.references(blocks[0]) == 2
    pool.release(blocks)
    assert pool.num_free == 0
    pool.release(blocks)
    assert pool.num_free == 1


def test_releasing_sharing_or_keeping_a_free_block_is_an_error() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="free already"):
        pool.release([0])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([0])
    with pytest.raises(ValueError, match="no content to keep"):
        pool.keep(0)


def test_a_kept_block_without_references_is_cached_and_can_be_shared_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.keep(blocks[0])
    assert not pool.is_private(blocks[0])
    pool.release(blocks)
    assert figures(pool) == (0, 1, 1)
    assert pool.num_available == 2
    pool.share(blocks)
    assert figures(pool) == (1, 1, 0)


def test_forgotten_content_makes_a_cached_block_free_and_a_used_one_private() -> None:
    pool = BlockPool(2)
    one, other = pool.allocate(2)
    pool.keep(one)
    pool.keep(other)
    pool.release([one])
    pool.forget(one)
    pool.forget(other)
    assert figures(pool) == (1, 1, 0)
    assert pool.is_private(other)


def test_the_end_of_a_table_is_colder_than_its_beginning_and_a_use_warms() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block in table:
        pool.keep(block)
    pool.release(table)
    assert pool.least_recently_used() == table[2]
    pool.touch(table[2])
    assert pool.least_recently_used() == table[1]
