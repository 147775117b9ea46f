"""Block tables: which blocks hold a sequence's KV entries, and whether there is room for more."""

from __future__ import annotations

import math

from octavo.memory.block_pool import BlockPool


class BlockManager:
    """Owns the block tables, by sequence id, and the pool under them.

    Invariant: a table has exactly the blocks that its tokens need, ``ceil(tokens / block_size)``, so that at most its
    last block is partly filled. Blocks come as tokens come.
    """

    def __init__(self, num_blocks: int, block_size: int, watermark: float = 0.0) -> None:
        """Takes the number of blocks, tokens a block, and the share of blocks to keep free at admission."""
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.watermark_blocks = math.ceil(watermark * num_blocks)
        self._tables: dict[int, list[int]] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens of one sequence fill, the last perhaps partly."""
        return -(-num_tokens // self.block_size)

    def table(self, seq_id: int) -> list[int]:
        """The block table of a sequence; empty if it holds nothing."""
        return self._tables.get(seq_id, [])

    @property
    def num_tables(self) -> int:
        """Sequences that hold blocks."""
        return len(self._tables)

    def missing(self, seq_id: int, num_tokens: int) -> int:
        """Blocks still to be taken before the sequence can hold ``num_tokens`` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(self.table(seq_id)))

    def can_admit(self, num_tokens: int, promised: int) -> bool:
        """Whether a sequence of ``num_tokens`` tokens fits beside ``promised`` blocks and the watermark."""
        return self.pool.num_free - promised - self.blocks_for(num_tokens) >= self.watermark_blocks

    def grow(self, seq_id: int, num_tokens: int) -> list[int] | None:
        """Lets the sequence hold ``num_tokens`` tokens: the blocks added, or None and no change if too few are free."""
        count = self.missing(seq_id, num_tokens)
        if count > self.pool.num_free:
            return None
        if not count:
            return []
        blocks = self.pool.allocate(count)
        self._tables.setdefault(seq_id, []).extend(blocks)
        return blocks

    def free(self, seq_id: int) -> None:
        """Gives back all blocks of a sequence; nothing happens if it has none."""
        blocks = self._tables.pop(seq_id, None)
        if blocks:
            self.pool.release(blocks)
