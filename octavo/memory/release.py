"""What would be available if some sequences gave up their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.memory.block_tables import held_blocks
from octavo.memory.kv_group import KVGroup


class Release:
    """Counts the references that some sequences hold, as if they were dropped; nothing is changed.

    Invariant: ``counts`` are the device blocks, by KV group, to which nothing else refers: neither tables of other
    sequences nor pins.
    """

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._groups = groups
        #: By block, whose ids are unique across the groups.
        self.references: dict[int, int] = {}
        self.counts = [0] * len(groups)

    def add(self, seq_ids: Iterable[int]) -> None:
        """Drops the references of these sequences."""
        self._count(seq_ids, 1)

    def discard(self, seq_ids: Iterable[int]) -> None:
        """Takes ``add`` back."""
        self._count(seq_ids, -1)

    def _count(self, seq_ids: Iterable[int], sign: int) -> None:
        references = self.references
        for seq_id in seq_ids:
            for number, group in enumerate(self._groups):
                for block in held_blocks(group.tables.get(seq_id, [])):
                    before = references.get(block, 0)
                    references[block] = before + sign
                    self.counts[number] += sign * (max(before, before + sign) == group.device.references(block))
