"""One pool of KV cache blocks, of the device or of the host: who is used, free or cached, and the reference counts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class OutOfBlocksError(Exception):
    """More blocks were asked for than are to be had; the caller should have looked first."""


class BlockPool:
    """Owns the ids ``first .. first + num_blocks - 1``.

    Invariant: a block is used (it has references), free, or cached (nobody holds it, but its content is known and may
    be wanted again), so used + free + cached = all.
    """

    def __init__(self, num_blocks: int, first: int = 0) -> None:
        self.num_blocks = num_blocks
        self.first = first
        # A stack: the block freed last is still warm in the processor's cache, and pages never touched stay untouched.
        self._free = list(range(first + num_blocks - 1, first - 1, -1))
        #: By id; the entries before ``first`` are not used.
        self._references = [0] * (first + num_blocks)
        self._kept: set[int] = set()
        #: Kept blocks without references, coldest first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and whose content nobody knows."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but whose content is known."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks to be had, free or by evicting a cached one."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free) - len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free blocks, each with one reference.

        Raises:
            OutOfBlocksError: fewer are free; nothing was taken.
        """
        free = self._free
        if count > len(free):
            raise OutOfBlocksError(f"{count} blocks asked for, {len(free)} free of {self.num_blocks}")
        taken = [free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of these used or cached blocks."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free and cannot be shared")
                del self._cached[block]
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference from each; without references a kept block is cached, the last of a table coldest."""
        references = self._references
        for block in reversed(blocks):
            left = references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is free already")
            references[block] = left
            if left == 0:
                if block in self._kept:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def references(self, block: int) -> int:
        """How often this block is held."""
        return self._references[block]

    def is_private(self, block: int) -> bool:
        """Whether its one holder may write into it: it is neither shared nor kept."""
        return self._references[block] == 1 and block not in self._kept

    # --- known content ----------------------------------------------------------------------------------------------

    def is_kept(self, block: int) -> bool:
        """Whether its content is known, and so must not change."""
        return block in self._kept

    def keep(self, block: int) -> None:
        """Makes a used block one whose content is known."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not used and has no content to keep")
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """The content is of no more interest: a cached block becomes free, a used one will."""
        self._kept.discard(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def coldest(self) -> int:
        """The cached block whose last use is longest ago."""
        return next(iter(self._cached))

    def touch(self, block: int) -> None:
        """Counts as a use of a block that may be cached."""
        if block in self._cached:
            self._cached.move_to_end(block)
