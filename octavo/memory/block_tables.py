"""Block tables over one pool, of the device or of the host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from octavo.core.untracked import untracked
from octavo.memory.block_pool import BlockPool

#: Entry of a table for a block that was freed because it is outside the window; so are all blocks before it.
NO_BLOCK = -1


def num_freed(table: list[int]) -> int:
    """How many ``NO_BLOCK`` entries the table begins with."""
    if not table or table[0] != NO_BLOCK:
        return 0
    return bisect_left(table, True, key=lambda block: block != NO_BLOCK)


def held_blocks(table: list[int]) -> list[int]:
    """The table without its leading ``NO_BLOCK`` entries; the table itself if there are none."""
    freed = num_freed(table)
    return table[freed:] if freed else table


class BlockTables:
    """Owns the tables over one pool, by sequence id, and a reference to each block of each table."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.by_id: dict[int, list[int]] = {}

    def free(self, seq_id: int) -> None:
        """Frees all blocks of a sequence; nothing happens if it has none."""
        blocks = self.by_id.pop(seq_id, None)
        if blocks is not None:
            self.pool.release(held_blocks(blocks))

    def present(self, seq_ids: Iterable[int]) -> list[int]:
        """The sequences that have a table here."""
        return [seq_id for seq_id in seq_ids if seq_id in self.by_id]

    def distinct_blocks(self, seq_ids: Iterable[int]) -> list[int]:
        """The blocks of these sequences, each once, in order."""
        tables = (self.by_id[seq_id] for seq_id in seq_ids if seq_id in self.by_id)
        return list(dict.fromkeys(block for table in tables for block in held_blocks(table)))

    def common_prefixes(self, seq_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
        """For each sequence: the position of the first that has its longest common beginning of blocks, and how many.

        That is one before it, or itself with 0 blocks where none has a block in common with it. The tables are those of
        forks, which are equal up to a block and have none in common from there on. A few look-ups for each sequence
        find that block, and each distinct block is visited once, however many share it.
        """
        owners: dict[int, int] = {NO_BLOCK: -1}
        for position, seq_id in enumerate(seq_ids):
            table = self.by_id.get(seq_id, [])
            count = bisect_left(table, True, key=lambda block: block not in owners)
            owner = owners[table[count - 1]] if count else -1
            yield (owner, count) if owner >= 0 else (position, 0)
            owners.update(dict.fromkeys(table[count:], position))

    def move_to(self, other: BlockTables, seq_ids: list[int], targets: dict[int, int]) -> None:
        """Moves the tables of these sequences to ``other``.

        ``targets`` maps each block to a newly allocated one of the other pool; the reference from that allocation is
        dropped here, as the tables have references of their own.
        """
        for seq_id in seq_ids:
            table = self.by_id.pop(seq_id)
            old = held_blocks(table)
            new = [targets[block] for block in old]
            other.by_id[seq_id] = untracked(table[: len(table) - len(old)] + new)
            other.pool.share(new)
            self.pool.release(old)
        other.pool.release(list(targets.values()))
