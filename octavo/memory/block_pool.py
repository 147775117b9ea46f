"""One pool of KV cache blocks, on the device or the host: reference counts, free list, LRU of cached blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from octavo.core.untracked import untracked
from octavo.memory.block_order import BlockOrder


class OutOfBlocksError(Exception):
    """More blocks were requested than are available; the caller must check first."""


class BlockPool:
    """Owns the ids ``first .. first + num_blocks - 1``.

    Invariant: a block is pinned (whoever else refers to it), or used (it has references), cached (no references, but
    the prefix cache keeps its content), or free (neither), so used + free + cached + pinned = all.
    """

    def __init__(self, num_blocks: int, first: int = 0) -> None:
        self.num_blocks = num_blocks
        self.first = first
        # A stack: the block freed last is likely in the processor's cache, and pages never written stay unmapped.
        self._free = untracked(list(range(first + num_blocks - 1, first - 1, -1)))
        #: Reference counts by id; the entries before ``first`` are not used. An array, as views of the pool copy it.
        self._references = array("i", bytes(array("i").itemsize * (first + num_blocks)))
        #: Whether the prefix cache keeps a block's content, by id.
        self._kept = bytearray(first + num_blocks)
        #: How often a block is pinned; each pin is a reference, too.
        self._pins: dict[int, int] = {}
        #: Kept blocks without references, least recently used first.
        self._cached = BlockOrder(num_blocks, first)

    @property
    def num_free(self) -> int:
        """Blocks without references whose content is not kept."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without references whose content is kept."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._cached)

    @property
    def num_pinned(self) -> int:
        """Blocks that are pinned, with or without other references."""
        return len(self._pins)

    @property
    def num_used(self) -> int:
        """Blocks with references that are not pinned."""
        return self.num_blocks - len(self._free) - len(self._cached) - len(self._pins)

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
                self._cached.remove(block)
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference from each; kept blocks without references are cached, evicted from the last one on."""
        references, kept = self._references, self._kept
        cached: list[int] = []
        for block in reversed(blocks):
            left = references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is free already")
            references[block] = left
            if left == 0:
                (cached if kept[block] else self._free).append(block)
        if cached:
            self._cached.extend(cached)

    def references(self, block: int) -> int:
        """References to this block."""
        return self._references[block]

    def references_and_kept(self) -> tuple[array[int], bytes]:
        """Of each block, in order: references to it (C ints), and whether its content is kept (0 or 1). Copies."""
        return self._references[self.first :], bytes(self._kept[self.first :])

    def is_private(self, block: int) -> bool:
        """Whether the block may be written: it has one reference and is not kept."""
        return self._references[block] == 1 and not self._kept[block]

    # --- kept content -----------------------------------------------------------------------------------------------

    def is_kept(self, block: int) -> bool:
        """Whether the prefix cache keeps its content, which must not change then."""
        return bool(self._kept[block])

    def keep(self, block: int) -> bool:
        """Marks a used block as kept; False if it is already."""
        if self._kept[block]:
            return False
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not used and has no content to keep")
        self._kept[block] = True
        return True

    def forget(self, block: int) -> None:
        """Ends ``keep``: a cached block becomes free now, a used one when its references are dropped."""
        self._kept[block] = False
        if block in self._cached:
            self._cached.remove(block)
            self._free.append(block)

    def pin(self, blocks: Iterable[int]) -> None:
        """Makes these kept blocks unavailable, whatever else refers to them, until they are unpinned as often."""
        for block in blocks:
            self.share((block,))
            self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, blocks: Sequence[int]) -> None:
        """Ends one ``pin`` of each."""
        for block in blocks:
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]
        self.release(blocks)

    def is_pinned(self, block: int) -> bool:
        """Whether the block is pinned."""
        return block in self._pins

    @property
    def pinned(self) -> list[int]:
        """The blocks that are pinned."""
        return list(self._pins)

    def least_recently_used(self) -> int:
        """The cached block that was used the longest time ago."""
        return self._cached.oldest

    def touch(self, block: int) -> None:
        """Marks a block as used now, if it is cached."""
        if block in self._cached:
            self._cached.remove(block)
            self._cached.extend((block,))
