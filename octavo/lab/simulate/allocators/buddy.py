"""The buddy algorithm: contiguous extents of a power of two (Knuth, The Art of Computer Programming, section 2.5)."""

from __future__ import annotations


class BuddyAllocator:
    """Owns the addresses ``0 .. size - 1``, divided into extents that are allocated or free.

    Invariants: an extent is a power of two long and begins at a multiple of its length; extents do not overlap and
    cover all addresses; of two halves of an extent, not both are free: they are merged. A ``size`` that is no power of
    two begins as one extent for each of its binary digits, the largest first, which are never merged.
    """

    def __init__(self, size: int) -> None:
        self.size = self.num_free = size
        #: By the logarithm of their length, the first addresses of free extents; and of allocated ones, that logarithm.
        self._free: list[set[int]] = [set() for _ in range(size.bit_length())]
        self._allocated: dict[int, int] = {}
        start = 0
        for order in reversed(range(size.bit_length())):
            if size >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def extents(self) -> tuple[dict[int, int], dict[int, int]]:
        """The lengths of the allocated and of the free extents, by first address."""
        free = {start: 1 << order for order, starts in enumerate(self._free) for start in starts}
        return {start: 1 << order for start, order in self._allocated.items()}, free

    def can_allocate(self, *lengths: int) -> bool:
        """Whether extents of at least these lengths are free, all of them together."""
        if len(lengths) == 1:
            return any(self._free[order_of(lengths[0]) :])
        taken = []
        for length in sorted(lengths, reverse=True):
            start = self.allocate(length)
            if start is None:
                break
            taken.append(start)
        for start in taken:
            self.free(start)
        return len(taken) == len(lengths)

    def allocate(self, length: int) -> int | None:
        """Takes the lowest of the shortest free extents that hold this length, halved while a half does.

        Returns:
            Its first address; it is ``1 << order_of(length)`` long. None: no free extent is that long.
        """
        wanted = order_of(length)
        order = next((n for n in range(wanted, len(self._free)) if self._free[n]), None)
        if order is None:
            return None
        start = min(self._free[order])
        self._free[order].remove(start)
        while order > wanted:
            order -= 1
            self._free[order].add(start + (1 << order))
        self._allocated[start] = wanted
        self.num_free -= 1 << wanted
        return start

    def free(self, start: int) -> None:
        """Frees the extent that begins here, and merges it with its other half while that is free.

        Raises:
            KeyError: none that is allocated begins here.
        """
        order = self._allocated.pop(start)
        self.num_free += 1 << order
        while start ^ (1 << order) in self._free[order]:
            self._free[order].remove(start ^ (1 << order))
            start &= ~(1 << order)
            order += 1
        self._free[order].add(start)


def order_of(length: int) -> int:
    """The logarithm of the shortest power of two that is at least ``length``, which is 1 or more."""
    return (length - 1).bit_length()
