"""What sequences attend to beside their own tokens: where it lies, and which sequence sees which."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import NewContext, TableChange

#: The arrays of a network that has no cross attention.
NO_CONTEXTS: dict[str, NDArray[Any]] = {
    "cross_lens": np.zeros(0, np.int32),
    "cross_tables": np.zeros((0, 0), np.int32),
}


class Contexts:
    """Owns a place for each context that the worker holds, with its block table, and the context of each row.

    Invariant: a context keeps its place from the plan that introduces it to the plan that forgets it.
    """

    def __init__(self, max_num_seqs: int, max_tokens: int, block_size: int) -> None:
        """There are at most as many contexts as rows of sequences, of at most ``max_tokens`` tokens each."""
        self.block_size = block_size
        self._tables = np.zeros((max_num_seqs, -(-max_tokens // block_size)), np.int32)
        self._lens = np.zeros(max_num_seqs, np.int32)
        self._places: dict[int, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        #: By row: the place of its context.
        self._of_row = np.zeros(max_num_seqs, np.int64)

    def add(self, context: NewContext) -> None:
        """Gives a new context its place."""
        place = self._places[context.context_id] = self._free.pop()
        self._lens[place] = context.num_tokens

    def forget(self, context_id: int) -> None:
        """Frees the place; nothing happens for the id of a sequence."""
        place = self._places.pop(context_id, None)
        if place is not None:
            self._free.append(place)

    def change_table(self, change: TableChange) -> bool:
        """Writes blocks into a context's block table; False if the change is that of a sequence."""
        place = self._places.get(change.seq_id)
        if place is None:
            return False
        self._tables[place, change.index : change.index + len(change.blocks)] = change.blocks
        return True

    def attach(self, row: int, context_id: int | None) -> None:
        """The row's sequence attends to a context, which is held."""
        if context_id is None:
            raise RuntimeError("the network attends to an encoder's output, but a sequence names none")
        self._of_row[row] = self._places[context_id]

    def copy(self, source: int, row: int) -> None:
        """A row's sequence attends to the context of another's."""
        self._of_row[row] = self._of_row[source]

    def table(self, context_id: int) -> NDArray[np.int32]:
        """The blocks of a context."""
        place = self._places[context_id]
        return self._tables[place, : -(-int(self._lens[place]) // self.block_size)]

    def arrays(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The arrays of ``ForwardBatch`` for these rows."""
        places = self._of_row[rows]
        lens = self._lens[places]
        longest = -(-int(lens.max(initial=0)) // self.block_size)
        return {"cross_lens": lens, "cross_tables": np.ascontiguousarray(self._tables[places, :longest])}
