"""The block tables of one level: all on the device, or all on the host."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.memory.block_pool import BlockPool

#: Stands in a table for a block that is out of the window and was given back. Only blocks of that kind are before it.
NO_BLOCK = -1


def held_blocks(table: list[int]) -> list[int]:
    """The table without the blocks given back at its beginning; the table itself if there are none."""
    return table[table.count(NO_BLOCK) :] if table and table[0] == NO_BLOCK else table


class BlockTables:
    """Owns the tables whose blocks are from one pool, by sequence id, with a reference for each block of each table."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.by_id: dict[int, list[int]] = {}

    def free(self, seq_id: int) -> None:
        """Gives back all blocks of a sequence; nothing happens if it has none."""
        blocks = self.by_id.pop(seq_id, None)
        if blocks is not None:
            self.pool.release(held_blocks(blocks))

    def present(self, seq_ids: Iterable[int]) -> list[int]:
        """Those of the sequences that have a table here."""
        return [seq_id for seq_id in seq_ids if seq_id in self.by_id]

    def distinct_blocks(self, seq_ids: Iterable[int]) -> list[int]:
        """The blocks of these sequences, each once, in order."""
        tables = (self.by_id[seq_id] for seq_id in seq_ids if seq_id in self.by_id)
        return list(dict.fromkeys(block for table in tables for block in held_blocks(table)))

    def hand_over(self, seq_ids: list[int], targets: dict[int, int], other: BlockTables) -> None:
        """Makes the tables of these sequences ones of the other level.

        ``targets`` gives the new block for each old one; the reference that it was allocated with is taken over.
        """
        for seq_id in seq_ids:
            table = self.by_id.pop(seq_id)
            old = held_blocks(table)
            new = [targets[block] for block in old]
            other.by_id[seq_id] = table[: len(table) - len(old)] + new
            other.pool.share(new)
            self.pool.release(old)
        other.pool.release(list(targets.values()))
