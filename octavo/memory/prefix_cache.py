"""The prefix cache: blocks are kept after their sequence ends, and reused by sequences with the same prefix."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from octavo.memory.block_pool import BlockPool, OutOfBlocksError
from octavo.memory.block_tables import NO_BLOCK
from octavo.memory.content_index import ContentIndex, KnownBlock
from octavo.memory.moves import PendingMoves
from octavo.memory.prefix_chain import Content, PrefixChain, positions

#: Evicted blocks that are remembered.
_LAST_EVICTED = 64
NO_REFERENCES: Mapping[int, int] = MappingProxyType({})


def first_block_read(num_computed: int, window: int | None, block_size: int) -> int:
    """Index of the first block that tokens from position ``num_computed`` on attend to."""
    return 0 if window is None else max(0, num_computed - window + 1) // block_size


class PrefixCache:
    """Owns the cached content of one KV group's blocks, and allocates its blocks, evicting content where needed.

    There are two levels: content evicted on the device may move to a spare host block, where it is still found. Only
    full blocks and the ends of shared prefixes are cached, and a cached block is never written. A digest names the same
    tokens in all groups; each group's cache maps it to that group's block.
    """

    def __init__(
        self, device: BlockPool, host: BlockPool, moves: PendingMoves, window: int | None, *, host_cache: bool
    ) -> None:
        self._device = device
        self._host = host
        self._moves = moves
        self._window = window
        self._host_cache = host_cache
        #: What is cached on the device; to forget it there allows a block to be written.
        self.on_device = ContentIndex(device)
        self._on_host = ContentIndex(host)
        #: Device blocks that have lost their content to others, and the last of them.
        self.num_evicted = 0
        self.last_evicted: deque[int] = deque(maxlen=_LAST_EVICTED)

    # --- blocks -----------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Allocates device blocks: free ones first, then the least recently used cached ones.

        Raises:
            OutOfBlocksError: fewer are available; nothing is allocated.
        """
        check_room(self._device, count)
        for _ in range(count - self._device.num_free):
            # A window reads the end of a chain, so there the descendants of a block are not evicted before it.
            windowed = self._window is not None
            evicted = self.on_device.forget(self._device.least_recently_used()) if windowed else self.on_device.evict()
            self.num_evicted += 1
            self.last_evicted.append(evicted.block)
            if self._host_cache:
                self._move_to_host(evicted)
        return self._device.allocate(count)

    def allocate_on_host(self, count: int) -> list[int]:
        """As ``allocate``, on the host; content evicted there is lost."""
        check_room(self._host, count)
        for _ in range(count - self._host.num_free):
            self._on_host.evict()
        return self._host.allocate(count)

    def _move_to_host(self, evicted: KnownBlock) -> None:
        on_host = self._on_host.find(evicted.digest)
        if on_host is not None:
            self._host.touch(on_host.block)
        elif self._host.num_available:
            taken = self.allocate_on_host(1)
            self._on_host.add(evicted.copy_in(self._host, taken[0]))
            self._moves.swap_out(evicted.block, taken[0])
            self._host.release(taken)

    # --- content ----------------------------------------------------------------------------------------------------

    def add(self, chain: PrefixChain, index: int, block: int, content: Content) -> None:
        """Adds a computed block as block ``index`` of the chain, unless its content is cached already."""
        self.on_device.add(KnownBlock(self._device, block, chain.digests[index + 1], chain.digests[index], content))

    def pin(self, chain: PrefixChain, index: int, block: int, content: Content) -> int:
        """Adds a computed block as ``add`` does, and pins it; returns the block that is pinned.

        That is another one with this content if it is pinned already, or if ``block`` is ``NO_BLOCK``. One that is not
        pinned gives way otherwise: a step in flight may still have to move its content there.
        """
        cached = self.on_device.find(chain.digests[index + 1])
        if cached is not None and (block == NO_BLOCK or self._device.is_pinned(cached.block)):
            block = cached.block
        elif cached is not None and cached.block != block:
            self.on_device.forget(cached.block)
        self.add(chain, index, block, content)
        self.on_device.pin(block)
        return block

    def clear(self) -> None:
        """Removes all content, on the device and the host, but that of pinned blocks."""
        self.on_device.clear()
        self._on_host.clear()

    # --- look-up ----------------------------------------------------------------------------------------------------

    def find(self, digest: bytes) -> KnownBlock | None:
        """The block with this digest, on the device or else on the host."""
        return self.on_device.find(digest) or self._on_host.find(digest)

    def find_prefix(self, chain: PrefixChain, max_blocks: int) -> list[KnownBlock | None]:
        """Blocks of the longest cached prefix of the chain, of at most ``max_blocks`` blocks.

        In a windowed group a prefix is cached if the blocks in the window of the next token are; the others are None.
        """
        if self._window is not None:
            return self._find_window(chain, max_blocks)
        hits: list[KnownBlock | None] = []
        for digest in islice(chain.digests, 1, max_blocks + 1):
            hit = self.find(digest)
            if hit is None:
                break
            hits.append(hit)
        return hits

    def _find_window(self, chain: PrefixChain, max_blocks: int) -> list[KnownBlock | None]:
        end = index = max_blocks
        hits: list[KnownBlock | None] = []  # last first
        while index > first_block_read(end * chain.block_size, self._window, chain.block_size):
            index -= 1
            hit = self.find(chain.digests[index + 1])
            if hit is not None:
                hits.append(hit)
            else:  # every prefix that ends after this block, up to ``end``, would read it
                end = index
                hits.clear()
        return [None] * index + hits[::-1]

    def find_partial(
        self, chain: PrefixChain, index: int, content: Sequence[object], suits: Callable[[bytes], bool]
    ) -> tuple[KnownBlock | None, int]:
        """The cached block with the longest common prefix with the content after ``index`` blocks, and its length.

        ``suits`` says of a digest whether it does.
        """
        if not content:
            return None, 0
        if index < len(chain):  # the last block of the sequence may be cached as a whole
            whole = self.find(chain.digests[index + 1])
            if whole is not None and suits(whole.digest):
                return whole, len(content)
        on_device, device_count = self.on_device.find_partial(chain.digests[index], content, suits)
        on_host, host_count = self._on_host.find_partial(chain.digests[index], content, suits)
        return (on_host, host_count) if host_count > device_count else (on_device, device_count)

    def cost(self, hits: Sequence[KnownBlock | None], released: Mapping[int, int] = NO_REFERENCES) -> int:
        """Available device blocks that ``take`` uses: cached ones that get a reference, and targets of swaps in.

        ``released``: how many references to a block do not count, as they will be dropped before.
        """
        device, dropped = self._device, released.get
        blocks = [hit for hit in hits if hit is not None]
        return sum(hit.pool is not device or device.references(hit.block) == dropped(hit.block, 0) for hit in blocks)

    def take(self, hits: Sequence[KnownBlock | None], num_full: int) -> list[int]:
        """Device blocks with the content of the hits, each with a new reference; their cost must be available.

        Hits on the host are swapped in, and cached on the device too, except for the partial match after the first
        ``num_full`` hits: the caller writes into its copy.
        """
        # References to all hits are taken before the allocation, which may evict on both levels.
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
                self.on_device.add(hit.copy_in(self._device, block))
        self._host.release(on_host)
        return blocks


def check_room(pool: BlockPool, count: int) -> None:
    """Raises ``OutOfBlocksError`` if the pool has fewer blocks available."""
    if count > pool.num_available:
        raise OutOfBlocksError(f"{count} blocks asked for, {pool.num_available} available of {pool.num_blocks}")


@dataclass(slots=True, eq=False)
class PrefixMatch:
    """The cached prefix of a token sequence."""

    #: Tokens whose KV entries are cached; always fewer than ``num_queried``, so at least one is left to compute.
    num_tokens: int
    #: Tokens of the sequence.
    num_queried: int
    #: For each group the blocks found, in order, on the device or the host; None for one that a window does not reach.
    #: The first ``num_full`` match as a whole; if there is one more, it is a partial match.
    hits: list[list[KnownBlock | None]]
    num_full: int
    chain: PrefixChain

    @property
    def num_pinned(self) -> int:
        """Pinned blocks of the first group among those that match as a whole."""
        if not self.hits:  # without KV groups there is nothing to pin
            return 0
        return sum(hit is not None and hit.pool.is_pinned(hit.block) for hit in self.hits[0][: self.num_full])


def find_match(caches: Sequence[PrefixCache], token_ids: list[int], chain: PrefixChain) -> PrefixMatch:
    """The longest prefix of ``token_ids``, without the last token, that is cached in all groups."""
    size, usable = chain.block_size, len(token_ids) - 1
    hits = [caches[0].find_prefix(chain, min(usable // size, len(chain)))]
    end = len(hits[0])
    if len(caches) > 1:
        hits, end = _find_common_prefix(caches, chain, end)
    start = end * size
    content = positions(chain.content(token_ids, start, min(start + size, usable)))
    others = caches[1:]
    partial, count = caches[0].find_partial(chain, end, content, lambda d: all(cache.find(d) for cache in others))
    if partial is not None:
        for group_hits, cache in zip(hits, caches, strict=True):
            group_hits.append(cache.find(partial.digest))
    return PrefixMatch(start + count, len(token_ids), hits, end, chain)


def _find_common_prefix(
    caches: Sequence[PrefixCache], chain: PrefixChain, end: int
) -> tuple[list[list[KnownBlock | None]], int]:
    """The longest prefix of at most ``end`` blocks in all caches; a shorter prefix has other blocks in its window."""
    while True:
        hits = [cache.find_prefix(chain, end) for cache in caches]
        shortest = min(map(len, hits))
        if shortest == end:
            return hits, end
        end = shortest
