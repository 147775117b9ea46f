"""The pool of KV cache blocks and their reference counts."""

from __future__ import annotations


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free; the caller should have looked first."""


class BlockPool:
    """Owns the ids ``0 .. num_blocks - 1``.

    Invariant: a block is on the free list exactly when its reference count is 0, so used + free = all.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A stack: the block freed last is still warm in the processor's cache, and pages never touched stay untouched.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one block table holds."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free blocks, each with one reference.

        Raises:
            OutOfBlocksError: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks asked for, {len(self._free)} free of {self.num_blocks}")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """Adds a reference to each of these used blocks."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drops a reference from each; a block without references is free again."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def references(self, block: int) -> int:
        """How many block tables hold this block."""
        return self._references[block]
