"""One pool of KV cache blocks, on the device or the host: reference counts, free list, LRU of cached blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


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
        self._free = list(range(first + num_blocks - 1, first - 1, -1))
        #: Reference counts by id; the entries before ``first`` are not used.
        self._references = [0] * (first + num_blocks)
        self._kept: set[int] = set()
        #: How often a block is pinned; each pin is a reference, too.
        self._pins: dict[int, int] = {}
        #: Kept blocks without references, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()

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
                del self._cached[block]
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference from each; kept blocks without references are cached, evicted from the last one on."""
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
        """References to this block."""
        return self._references[block]

    def is_private(self, block: int) -> bool:
        """Whether the block may be written: it has one reference and is not kept."""
        return self._references[block] == 1 and block not in self._kept

    # --- kept content -----------------------------------------------------------------------------------------------

    def is_kept(self, block: int) -> bool:
        """Whether the prefix cache keeps its content, which must not change then."""
        return block in self._kept

    def keep(self, block: int) -> None:
        """Marks a used block as kept."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not used and has no content to keep")
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """Ends ``keep``: a cached block becomes free now, a used one when its references are dropped."""
        self._kept.discard(block)
        if block in self._cached:
            del self._cached[block]
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

    def least_recently_used(self) -> int:
        """The cached block that was used the longest time ago."""
        return next(iter(self._cached))

    def touch(self, block: int) -> None:
        """Marks a block as used now, if it is cached."""
        if block in self._cached:
            self._cached.move_to_end(block)
