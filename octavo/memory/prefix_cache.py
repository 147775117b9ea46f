"""The prefix cache: blocks that outlive their sequence because another one may begin with the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from octavo.memory.block_pool import BlockPool, OutOfBlocksError
from octavo.memory.content_index import ContentIndex, KnownBlock
from octavo.memory.moves import PendingMoves
from octavo.memory.prefix_chain import PrefixChain


@dataclass(slots=True, eq=False)
class PrefixMatch:
    """The KV entries that are there already for the beginning of a token sequence."""

    #: KV entries found; always fewer than the tokens asked about, so that one is left to compute.
    num_tokens: int
    #: Tokens asked about.
    num_queried: int
    #: The blocks found, in order, on the device or the host. ``num_full`` of them agree whole; if there is one more,
    #: only its first tokens do.
    hits: list[KnownBlock]
    num_full: int
    chain: PrefixChain

    @property
    def num_blocks(self) -> int:
        """Blocks found, one that agrees in part included."""
        return len(self.hits)


class PrefixCache:
    """Owns what is known about the content of blocks, and gives out blocks, evicting content where it must.

    Two levels: what is evicted on the device may move to a host block that nothing else needs, and is found there. Only
    full blocks are known, and a known block is never written again.
    """

    def __init__(self, device: BlockPool, host: BlockPool, moves: PendingMoves, *, host_cache: bool) -> None:
        self._device = device
        self._host = host
        self._moves = moves
        self._host_cache = host_cache
        self._known = ContentIndex(device)
        self._known_on_host = ContentIndex(host)
        self.hit_tokens = 0
        self.queried_tokens = 0
        self.num_evictions = 0

    # --- blocks -----------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Takes device blocks: free ones first, then the coldest cached ones.

        Raises:
            OutOfBlocksError: fewer are available; nothing was taken.
        """
        _check_room(self._device, count)
        for _ in range(count - self._device.num_free):
            evicted = self._known.evict()
            self.num_evictions += 1
            if self._host_cache:
                self._move_to_host(evicted)
        return self._device.allocate(count)

    def allocate_on_host(self, count: int) -> list[int]:
        """Takes host blocks in the same way; content evicted there is lost."""
        _check_room(self._host, count)
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

    def add(self, chain: PrefixChain, index: int, block: int, token_ids: list[int]) -> None:
        """Makes a full, computed block known as block ``index`` of the chain, unless its content is known already."""
        start = index * chain.block_size
        tokens = token_ids[start : start + chain.block_size]
        self._known.add(KnownBlock(self._device, block, chain.digests[index + 1], chain.digests[index], tokens))

    def forget(self, block: int) -> None:
        """Makes a known device block one that may be written."""
        self._known.forget(block)

    def clear(self) -> None:
        """Forgets all content, on the device and the host."""
        self._known.clear()
        self._known_on_host.clear()

    # --- look-up ----------------------------------------------------------------------------------------------------

    def match(self, token_ids: list[int], chain: PrefixChain) -> PrefixMatch:
        """Finds the longest known beginning of ``token_ids``, without its last token; changes nothing."""
        usable = len(token_ids) - 1
        hits: list[KnownBlock] = []
        for digest in islice(chain.digests, 1, usable // chain.block_size + 1):
            hit = self._find(digest)
            if hit is None:
                break
            hits.append(hit)
        num_full = len(hits)
        start = num_full * chain.block_size
        partial, count = self._partial(token_ids[start : min(start + chain.block_size, usable)], chain, num_full)
        if partial is not None:
            hits.append(partial)
        return PrefixMatch(start + count, len(token_ids), hits, num_full, chain)

    def _find(self, digest: bytes) -> KnownBlock | None:
        return self._known.find(digest) or self._known_on_host.find(digest)

    def _partial(self, wanted: list[int], chain: PrefixChain, index: int) -> tuple[KnownBlock | None, int]:
        """The block that agrees with the first ``count`` of the wanted tokens, which follow ``index`` blocks."""
        if not wanted:
            return None, 0
        if index < len(chain):  # known as a whole, if it is the last block of the sequence
            whole = self._find(chain.digests[index + 1])
            if whole is not None:
                return whole, len(wanted)
        here, count = self._known.most_alike(chain.digests[index], wanted)
        on_host, more = self._known_on_host.most_alike(chain.digests[index], wanted)
        return (on_host, more) if more > count else (here, count)

    def cost(self, match: PrefixMatch) -> int:
        """Available device blocks that taking the match uses up: cached ones held again, and room for host blocks."""
        device = self._device
        return sum(hit.pool is not device or device.references(hit.block) == 0 for hit in match.hits)

    def take(self, match: PrefixMatch) -> list[int]:
        """Device blocks with the content of the match, a reference taken to each.

        What is on the host comes in by a move. It is known on the device then, except for a block that agrees in part:
        that one is the caller's alone, to be written from where it differs.

        Raises:
            OutOfBlocksError: the cost of the match is not available; nothing was changed.
        """
        _check_room(self._device, self.cost(match))
        self.queried_tokens += match.num_queried
        self.hit_tokens += match.num_tokens
        # All hits are held before anything is allocated: that may evict on both levels.
        on_host = [hit.block for hit in match.hits if hit.pool is self._host]
        self._device.share([hit.block for hit in match.hits if hit.pool is self._device])
        self._host.share(on_host)
        fresh = iter(self.allocate(len(on_host)))
        blocks = []
        for index, hit in enumerate(match.hits):
            if hit.pool is self._device:
                blocks.append(hit.block)
                continue
            block = next(fresh)
            blocks.append(block)
            self._moves.swap_in(hit.block, block)
            if index < match.num_full:
                self._known.add(hit.copy_in(self._device, block))
        self._host.release(on_host)
        return blocks


def _check_room(pool: BlockPool, count: int) -> None:
    if count > pool.num_available:
        raise OutOfBlocksError(f"{count} blocks asked for, {pool.num_available} available of {pool.num_blocks}")
