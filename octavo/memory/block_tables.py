"""The block tables of one level: all on the device, or all on the host."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.memory.block_pool import BlockPool


class BlockTables:
    """Owns the tables whose blocks are from one pool, by sequence id, with a reference for each entry of each table."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.by_id: dict[int, list[int]] = {}

    def free(self, seq_id: int) -> None:
        """Gives back all blocks of a sequence; nothing happens if it has none."""
        blocks = self.by_id.pop(seq_id, None)
        if blocks is not None:
            self.pool.release(blocks)

    def present(self, seq_ids: Iterable[int]) -> list[int]:
        """Those of the sequences that have a table here."""
        return [seq_id for seq_id in seq_ids if seq_id in self.by_id]

    def distinct_blocks(self, seq_ids: Iterable[int]) -> list[int]:
        """The blocks of these sequences, each once, in order."""
        return list(dict.fromkeys(block for seq_id in seq_ids for block in self.by_id.get(seq_id, ())))

    def hand_over(self, seq_ids: list[int], targets: dict[int, int], other: BlockTables) -> None:
        """Makes the tables of these sequences ones of the other level.

        ``targets`` gives the new block for each old one; the reference that it was allocated with is taken over.
        """
        for seq_id in seq_ids:
            old = self.by_id.pop(seq_id)
            new = other.by_id[seq_id] = [targets[block] for block in old]
            other.pool.share(new)
            self.pool.release(old)
        other.pool.release(list(targets.values()))
