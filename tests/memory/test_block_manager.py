"""Block accounting: exact after every operation, under any order of operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.memory.block_manager import BlockManager
from octavo.memory.block_pool import BlockPool, OutOfBlocksError


def test_allocation_takes_distinct_blocks_and_release_returns_them() -> None:
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert len(set(first)) == 3
    assert (pool.num_used, pool.num_free) == (3, 1)
    pool.release(first)
    assert (pool.num_used, pool.num_free) == (0, 4)


def test_too_large_an_allocation_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(OutOfBlocksError, match="3 blocks asked for, 2 free of 2"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_shared_block_is_free_only_after_its_last_user() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.share(blocks)
    assert pool.references(blocks[0]) == 2
    pool.release(blocks)
    assert pool.num_free == 0
    pool.release(blocks)
    assert pool.num_free == 1


def test_releasing_or_sharing_a_free_block_is_an_error() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="free already"):
        pool.release([0])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([0])


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_table_holds_exactly_the_blocks_its_tokens_need(tokens: int, blocks: int) -> None:
    manager = BlockManager(8, 16)
    added = manager.grow(7, tokens)
    assert added is not None
    assert len(added) == blocks
    assert manager.table(7) == added


def test_growing_inside_the_last_block_adds_none() -> None:
    manager = BlockManager(2, 4)
    assert len(manager.grow(0, 3) or []) == 1
    assert manager.grow(0, 4) == []
    assert len(manager.grow(0, 5) or []) == 1


def test_growth_without_room_changes_nothing() -> None:
    manager = BlockManager(2, 4)
    manager.grow(0, 4)
    assert manager.grow(1, 8) is None
    assert manager.table(1) == []
    assert manager.pool.num_free == 1


def test_the_watermark_holds_blocks_back_from_admission_only() -> None:
    manager = BlockManager(10, 4, watermark=0.2)
    assert manager.can_admit(32, promised=0)
    assert not manager.can_admit(33, promised=0)
    assert not manager.can_admit(32, promised=1)
    assert manager.grow(0, 40) is not None


class BlockMachine(RuleBasedStateMachine):
    """Random growth and release, against a model that only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(12, 4)
        self.tokens: dict[int, int] = {}

    @rule(seq_id=st.integers(0, 5), more=st.integers(1, 20))
    def grow(self, seq_id: int, more: int) -> None:
        wanted = self.tokens.get(seq_id, 0) + more
        missing = -(-wanted // 4) - -(-self.tokens.get(seq_id, 0) // 4)
        fits = missing <= self.manager.pool.num_free
        added = self.manager.grow(seq_id, wanted)
        assert (added is not None) == fits
        if added is not None:
            assert len(added) == missing
            self.tokens[seq_id] = wanted

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.manager.free(seq_id)
        del self.tokens[seq_id]

    @invariant()
    def accounting_is_exact(self) -> None:
        held = [b for s in self.tokens for b in self.manager.table(s)]
        assert len(held) == len(set(held)) == self.manager.pool.num_used
        assert self.manager.pool.num_used + self.manager.pool.num_free == 12
        assert self.manager.num_tables == len(self.tokens)
        for seq_id, tokens in self.tokens.items():
            assert len(self.manager.table(seq_id)) == -(-tokens // 4)


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
