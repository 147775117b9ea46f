"""The prefix cache: blocks that outlive their sequence because another one may begin with the same content."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from octavo.memory.block_pool import BlockPool, OutOfBlocksError
from octavo.memory.block_tables import NO_BLOCK
from octavo.memory.content_index import ContentIndex, KnownBlock
from octavo.memory.moves import PendingMoves
from octavo.memory.prefix_chain import PrefixChain


def first_block_read(num_computed: int, window: int | None, block_size: int) -> int:
    """Index of the first block that is read when the token at position ``num_computed`` or a later one is computed."""
    return 0 if window is None else max(0, num_computed - window + 1) // block_size


class PrefixCache:
    """Owns what is known about the content of one group's blocks, and gives out blocks, evicting content where it must.

    Two levels: what is evicted on the device may move to a host block that nothing else needs, and is found there. Only
    full blocks are known, and a known block is never written again. Each group has its own cache, so that a name, which
    is the same in all groups, leads to the group's own block.
    """

    def __init__(
        self, device: BlockPool, host: BlockPool, moves: PendingMoves, window: int | None, *, host_cache: bool
    ) -> None:
        self._device = device
        self._host = host
        self._moves = moves
        self._window = window
        self._host_cache = host_cache
        self._known = ContentIndex(device)
        self._known_on_host = ContentIndex(host)
        self.num_evictions = 0

    # --- blocks -----------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Takes device blocks: free ones first, then the coldest cached ones.

        Raises:
            OutOfBlocksError: fewer are available; nothing was taken.
        """
        check_room(self._device, count)
        for _ in range(count - self._device.num_free):
            # What a window reads is the end of a chain, which is not the first to go: its beginning is let go earlier.
            windowed = self._window is not None
            evicted = self._known.forget(self._device.coldest()) if windowed else self._known.evict()
            self.num_evictions += 1
            if self._host_cache:
                self._move_to_host(evicted)
        return self._device.allocate(count)

    def allocate_on_host(self, count: int) -> list[int]:
        """Takes host blocks in the same way; content evicted there is lost."""
        check_room(self._host, count)
        for _ in range(count - self._host.num_free):
            self._known_on_host.evict()
        return self._host.allocate(count)

    def _move_to_host(self, evicted: KnownBlock) -> None:
        there = self._known_on_host.find(evicted.digest)
        if there is not None:
            self._host.touch(there.block)
        elif self._host.num_available:
            taken = self.allocate_on_host(1)
            self._known_on_host.add(evicted.copy_in(self._host, taken[0]))
            self._moves.swap_out(evicted.block, taken[0])
            self._host.release(taken)

    # --- content ----------------------------------------------------------------------------------------------------

    def add(self, chain: PrefixChain, index: int, block: int, content: Sequence[object]) -> None:
        """Makes a full, computed block known as block ``index`` of the chain, unless its content is known already."""
        self._known.add(KnownBlock(self._device, block, chain.digests[index + 1], chain.digests[index], content))

    def forget(self, block: int) -> None:
        """Makes a known device block one that may be written."""
        self._known.forget(block)

    def clear(self) -> None:
        """Forgets all content, on the device and the host."""
        self._known.clear()
        self._known_on_host.clear()

    # --- look-up ----------------------------------------------------------------------------------------------------

    def find(self, digest: bytes) -> KnownBlock | None:
        """The block of this name, on the device or else on the host."""
        return self._known.find(digest) or self._known_on_host.find(digest)

    def find_prefix(self, chain: PrefixChain, most: int) -> list[KnownBlock | None]:
        """Blocks of the longest beginning of the chain, at most ``most`` blocks, that can be continued from.

        All of them are known; in a windowed group those that are read after them, and None stands for the others.
        """
        if self._window is not None:
            return self._find_window(chain, most)
        hits: list[KnownBlock | None] = []
        for digest in islice(chain.digests, 1, most + 1):
            hit = self.find(digest)
            if hit is None:
                break
            hits.append(hit)
        return hits

    def _find_window(self, chain: PrefixChain, most: int) -> list[KnownBlock | None]:
        end = index = most
        hits: list[KnownBlock | None] = []  # last first
        while index > first_block_read(end * chain.block_size, self._window, chain.block_size):
            index -= 1
            hit = self.find(chain.digests[index + 1])
            if hit is not None:
                hits.append(hit)
            else:  # any prefix that ends after this block, and not after ``end``, would read it
                end = index
                hits.clear()
        return [None] * index + hits[::-1]

    def find_partial(self, chain: PrefixChain, index: int, content: Sequence[object]) -> tuple[KnownBlock | None, int]:
        """The block that agrees with the first ``count`` tokens of the content, which follows ``index`` blocks."""
        if not content:
            return None, 0
        if index < len(chain):  # known as a whole, if it is the last block of the sequence
            whole = self.find(chain.digests[index + 1])
            if whole is not None:
                return whole, len(content)
        here, count = self._known.most_alike(chain.digests[index], content)
        on_host, more = self._known_on_host.most_alike(chain.digests[index], content)
        return (on_host, more) if more > count else (here, count)

    def cost(self, hits: Sequence[KnownBlock | None]) -> int:
        """Available device blocks that taking these uses up: cached ones held again, and room for host blocks."""
        device = self._device
        return sum(hit.pool is not device or device.references(hit.block) == 0 for hit in hits if hit is not None)

    def take(self, hits: Sequence[KnownBlock | None], num_full: int) -> list[int]:
        """Device blocks with the content of the hits, a reference taken to each; their cost must be available.

        What is on the host comes in by a move. It is known on the device then, except for a block that agrees in part,
        after the ``num_full`` that agree whole: that one is the caller's alone, to be written from where it differs.
        """
        # All hits are held before anything is allocated: that may evict on both levels.
        on_host = [hit.block for hit in hits if hit is not None and hit.pool is self._host]
        self._device.share([hit.block for hit in hits if hit is not None and hit.pool is self._device])
        self._host.share(on_host)
        fresh = iter(self.allocate(len(on_host)))
        blocks = []
        for index, hit in enumerate(hits):
            if hit is None:
                blocks.append(NO_BLOCK)
                continue
            if hit.pool is self._device:
                blocks.append(hit.block)
                continue
            block = next(fresh)
            blocks.append(block)
            self._moves.swap_in(hit.block, block)
            if index < num_full:
                self._known.add(hit.copy_in(self._device, block))
        self._host.release(on_host)
        return blocks


def check_room(pool: BlockPool, count: int) -> None:
    """Raises ``OutOfBlocksError`` if the pool has fewer blocks available."""
    if count > pool.num_available:
        raise OutOfBlocksError(f"{count} blocks asked for, {pool.num_available} available of {pool.num_blocks}")
