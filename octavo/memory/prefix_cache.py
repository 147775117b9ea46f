"""The prefix cache (automatic prefix caching): full blocks outlive their sequence and serve later ones."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import chain, islice
from struct import Struct
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from octavo.core.garbage import exclude_from_gc
from octavo.memory.block_pool import NO_BLOCK, BlockPool, OutOfBlocksError

if TYPE_CHECKING:
    from octavo.memory.checkpoints import Checkpoint, StateCache
    from octavo.memory.kv_group import KVGroup, PendingMoves
    from octavo.memory.stored import StoredBlocks


NO_REFERENCES: Mapping[int, int] = MappingProxyType({})

#: ``_Registration.count`` of a sequence whose blocks must not be registered.
_NEVER = sys.maxsize


class _Registration(msgspec.Struct, gc=False):
    """The digests of a sequence's full blocks, and the number of these blocks that were registered."""

    chain: PrefixChain
    count: int
    #: By number of a KV group with states: the last checkpoint of the sequence.
    checkpoints: dict[int, Checkpoint] = {}
    #: Whether the end of its prompt is registered: later checkpoints are those of its answer.
    in_answer: bool = False
    #: Registered blocks that are still to be queued for the KV stores: the tokens up to their ends, the number of their
    #: KV group, their digests, and the blocks.
    unstored: list[tuple[int, int, bytes, int]] = []

    def add_checkpoint(self, group: int, states: StateCache, block: int, token_ids: list[int], position: int) -> None:
        last = self.checkpoints.get(group)
        added = states.add_checkpoint(self.chain, token_ids, position, block, last, self.in_answer)
        if last is None or last.position <= position:
            self.checkpoints[group] = added


class SequencePrefixes:
    """The prefix cache as the scheduler sees it: matches new sequences, registers the full blocks of running ones.

    ``match`` (vLLM: ``get_computed_blocks``) looks up, ``adopt`` makes the hits the table of a new sequence, and
    ``register`` adds blocks once they are computed. Without prefix caching nothing is matched or registered.
    """

    def __init__(self, groups: Sequence[KVGroup], block_size: int, *, enabled: bool) -> None:
        self._groups, self._block_size = groups, block_size
        self.enabled = enabled and bool(groups)  # an encoder has no KV groups
        #: Gets the registered blocks, if there are KV stores.
        self.stored: StoredBlocks | None = None
        #: Whether ``register_end`` adds anything: the model has recurrent states.
        self.keeps_ends = self.enabled and any(group.checkpoints for group in groups)
        self._registrations: dict[int, _Registration] = {}
        #: Tokens of all sequences passed to ``adopt``, and the cached ones among them.
        self.cached_queries = self.cached_hits = 0

    def chain(self, token_ids: list[int], context: str | bytes, features: Sequence[FeatureSpan] = ()) -> PrefixChain:
        """The digests of the full blocks of these tokens, for ``match``; empty without prefix caching."""
        chain = PrefixChain(context, self._block_size, features)
        if self.enabled:
            chain.extend(token_ids, len(token_ids) // self._block_size)
        return chain

    def match(self, token_ids: list[int], chain: PrefixChain, shared: int | None = None) -> PrefixMatch:
        """The longest cached prefix of these tokens; with windows, no longer than the ``shared`` blocks.

        These are to be shared with other sequences, whose windows a longer match would lack.
        """
        if not self._groups:
            return PrefixMatch(0, len(token_ids), [], 0, chain)
        if shared is not None and any(group.window is not None for group in self._groups):
            token_ids = token_ids[: 1 + shared * self._block_size]
        return find_match([group.cache for group in self._groups], token_ids, chain)

    def branch(self, match: PrefixMatch) -> int:
        """Where a checkpoint would have made a match longer, and computing up to there again costs more than a step.

        0: nowhere. The last checkpoint before it is that of the match, or one that its sequence will leave.
        """
        sizes = [group.block_size for group in self._groups if group.checkpoints is not None]
        end = match.num_without_states
        if not sizes or not self.keeps_ends:
            return 0
        before = max(match.num_tokens, end - end % max(sizes))
        return end if end - before > max(sizes) // 8 else 0

    def cost(self, match: PrefixMatch, released: Mapping[int, int] = NO_REFERENCES) -> int:
        """Available blocks that ``adopt`` would use, in the group where it uses the most (``PrefixCache.cost``)."""
        costs = (group.cache.cost(hits, released) for group, hits in zip(self._groups, match.hits, strict=True))
        return max(costs, default=0)

    def adopt(self, seq_id: int, match: PrefixMatch) -> None:
        """Makes the matched blocks the tables of a new sequence. No block may be allocated since ``match``.

        Called for an empty match too: it counts the query and keeps the digests for ``register``.
        """
        if not self.enabled:
            return
        for group, hits in zip(self._groups, match.hits, strict=True):
            check_room(group.device, group.cache.cost(hits))
        registration = _Registration(match.chain.first(len(match.chain)), match.num_full)
        if match.num_tokens:
            for group, hits in zip(self._groups, match.hits, strict=True):
                if group.checkpoints is not None:
                    registration.checkpoints[group.number] = group.checkpoints.use(hits[-1])
                group.new_table(seq_id).extend(group.cache.take(hits, match.num_tokens // group.block_size))
                if (stored := self.stored) is not None:
                    for hit in hits:
                        if hit is not None:
                            stored.note_found(group.number, hit.digest)
        self.cached_queries += match.num_queried
        self.cached_hits += match.num_tokens
        self._registrations[seq_id] = registration

    def register(
        self,
        seq_id: int,
        token_ids: list[int],
        num_computed: int,
        context: str | bytes,
        features: Sequence[FeatureSpan] = (),
    ) -> None:
        """Adds the full blocks of the first ``num_computed`` tokens, if the sequence has a table on the device.

        Their KV entries must be computed by a step whose result is known, or moved by this one. The cost is one hash
        for each block that is new since the last call. Content that is cached already stays in its block.
        """
        num_full = num_computed // self._block_size
        if not (self.enabled and num_full and seq_id in self._groups[0].tables):
            return
        registration = self._registration(seq_id, context, features)
        self._add_full(registration, seq_id, token_ids, num_full)
        if self.stored is not None:
            self._store(self.stored, registration, num_computed)

    def _add_full(self, registration: _Registration, seq_id: int, token_ids: list[int], num_full: int) -> None:
        """Adds the first ``num_full`` blocks, which a submitted step may still compute."""
        chain, size = registration.chain, self._block_size
        for index in range(registration.count, num_full):
            content = chain.content(token_ids, index * size, index * size + size)
            if index + 1 == len(chain.digests):
                chain.add(token_ids, content)
            for group in self._groups:
                own, rest = divmod(index + 1, group.ratio)
                if rest:
                    continue  # within the tokens of a block of states
                block = group.tables[seq_id][own - 1]
                if block == NO_BLOCK:
                    continue  # it is freed already
                if group.checkpoints is not None:
                    registration.add_checkpoint(group.number, group.checkpoints, block, token_ids, index * size + size)
                else:
                    group.cache.add(chain, index, block, content)
                if self.stored is not None:
                    registration.unstored.append((index * size + size, group.number, chain.digests[index + 1], block))
            registration.count = index + 1

    def _store(self, stored: StoredBlocks, registration: _Registration, num_computed: int) -> None:
        """Queues the blocks of the first ``num_computed`` tokens that the cache has from this sequence."""
        later = []
        for one in registration.unstored:
            end, number, digest, block = one
            if end > num_computed:
                later.append(one)
                continue
            cached = self._groups[number].cache.on_device.find(digest)
            if cached is not None and cached.block == block:
                stored.add(number, digest)
        registration.unstored = later

    def register_end(
        self,
        seq_id: int,
        token_ids: list[int],
        num_computed: int,
        context: str | bytes,
        features: Sequence[FeatureSpan] = (),
        *,
        of_prompt: bool = False,
    ) -> bool:
        """``register``, and the last block of each group even if it is partly filled, if the model has states.

        So the whole prefix is found by a prompt that goes on from it: a state cannot be cut back to a full block. The
        sequence may have computed no more tokens than these; it writes its next one into copies, by ``grow``. Steps in
        flight may still compute them: if one fails, the cache must be reset.

        Args:
            of_prompt: Whether these tokens are the prompt, and all that follows is its answer.

        Returns:
            Whether anything was registered.
        """
        if not (self.keeps_ends and 0 < num_computed <= len(token_ids) and seq_id in self._groups[0].tables):
            return False
        if not self.may_register(seq_id):
            return False
        registration = self._registration(seq_id, context, features)
        self._add_full(registration, seq_id, token_ids, num_computed // self._block_size)
        chain, start = registration.chain, num_computed - num_computed % self._block_size
        for group in self._groups:
            block = group.tables[seq_id][(num_computed - 1) // group.block_size]
            if group.checkpoints is not None:
                registration.add_checkpoint(group.number, group.checkpoints, block, token_ids, num_computed)
            elif start < num_computed:
                names = chain.digest(token_ids, num_computed), chain.digest(token_ids, start)
                content = chain.content(token_ids, start, num_computed)
                group.cache.on_device.add(KnownBlock(group.device, block, *names, content))
        registration.in_answer = registration.in_answer or of_prompt
        return True

    def _registration(self, seq_id: int, context: str | bytes, features: Sequence[FeatureSpan]) -> _Registration:
        registration = self._registrations.get(seq_id)
        if registration is None:
            chain = PrefixChain(context, self._block_size, features)
            registration = self._registrations[seq_id] = _Registration(chain, 0)
        return registration

    def registered(self, seq_id: int) -> list[bytes]:
        """The digests of the full blocks that ``register`` has added or found."""
        registration = self._registrations.get(seq_id)
        return [] if registration is None else registration.chain.digests[1 : registration.count + 1]

    def num_registered(self, seq_id: int) -> int:
        registration = self._registrations.get(seq_id)
        return registration.count if registration is not None else 0

    def may_register(self, seq_id: int) -> bool:
        """False if the cache was reset while the sequence held blocks."""
        return self.num_registered(seq_id) != _NEVER

    def fork(self, parent_id: int, child_id: int, num_blocks: int) -> None:
        """The child shares the first ``num_blocks`` blocks, and may continue with other tokens."""
        registration = self._registrations.get(parent_id)
        if registration is not None and self.may_register(parent_id):
            count, end = min(registration.count, num_blocks), num_blocks * self._block_size
            checkpoints = {n: c for n, c in registration.checkpoints.items() if c.position <= end}
            registration = _Registration(registration.chain.first(count), count, checkpoints, registration.in_answer)
        if registration is not None:
            self._registrations[child_id] = registration

    def move(self, seq_ids: Iterable[int]) -> None:
        """The sequences have other blocks with the same content, which the next ``register`` adds."""
        for seq_id in seq_ids:
            if seq_id in self._registrations and self.may_register(seq_id):
                self._registrations[seq_id].count = 0

    def free(self, seq_id: int) -> None:
        self._registrations.pop(seq_id, None)

    def clear(self, seq_ids: Iterable[int]) -> None:
        """Drops all cached content that is not pinned; blocks that these sequences hold are never registered."""
        for group in self._groups:
            group.cache.clear()
        if self.enabled:
            for seq_id in seq_ids:
                self._registrations[seq_id] = _Registration(PrefixChain("", self._block_size), _NEVER)


@dataclass(slots=True, eq=False)
class PrefixMatch:
    #: Cached tokens of the sequence; fewer than its ``num_queried`` tokens, so that one is left to compute.
    num_tokens: int
    num_queried: int
    #: By group: the cached blocks, in order, on the device or the host; None for one that a window does not reach. The
    #: first ``num_full`` match as a whole; one more is a partial match.
    hits: list[list[KnownBlock | None]]
    num_full: int
    chain: PrefixChain
    #: Tokens cached in the groups without states, ``num_tokens`` or more; that number without such groups.
    num_without_states: int = 0

    @property
    def num_pinned(self) -> int:
        """Pinned blocks of the first group among the full matches."""
        hits = self.hits[0][: self.num_full] if self.hits else []  # an encoder has no KV groups
        return sum(hit is not None and hit.pool.is_pinned(hit.block) for hit in hits)


def find_match(caches: Sequence[PrefixCache], token_ids: list[int], chain: PrefixChain) -> PrefixMatch:
    """The longest prefix of ``token_ids``, without the last token, that is cached in all groups."""
    end = len(token_ids) - 1
    hits, count = _find_blocks(caches, token_ids, chain, end)
    num_without_states = count
    while True:  # a shorter prefix has other blocks in its windows, and may lack the block that has its last tokens
        end = count
        for group in caches:
            end = group.last_state(token_ids, chain, end)
        if end == count:
            break
        hits, count = _find_blocks(caches, token_ids, chain, end)
    for group_hits, group in zip(hits, caches, strict=True):
        group_hits += group.state_at(token_ids, chain, end)
    if all(cache.has_states for cache in caches):
        num_without_states = end
    return PrefixMatch(end, len(token_ids), hits, end // chain.block_size, chain, num_without_states)


def _find_blocks(
    caches: Sequence[PrefixCache], token_ids: list[int], chain: PrefixChain, usable: int
) -> tuple[list[list[KnownBlock | None]], int]:
    """The longest prefix of at most ``usable`` tokens in the groups without states: hits of all groups, its tokens."""
    size = chain.block_size
    hits: list[list[KnownBlock | None]] = [[] for _ in caches]
    numbers = [number for number, cache in enumerate(caches) if not cache.has_states]
    if not numbers:
        return hits, usable
    first = caches[numbers[0]]
    hits[numbers[0]] = first.find_prefix(chain, min(usable // size, len(chain)))
    end = len(hits[numbers[0]])
    while len(numbers) > 1:  # a shorter prefix has other blocks in its window
        for number in numbers:
            hits[number] = caches[number].find_prefix(chain, end)
        shortest = min(len(hits[number]) for number in numbers)
        if shortest == end:
            break
        end = shortest
    start = end * size
    content = positions(chain.content(token_ids, start, min(start + size, usable)))
    others = [caches[number] for number in numbers[1:]]
    partial, count = first.find_partial(chain, end, content, lambda d: all(cache.find(d) for cache in others))
    if partial is not None:
        for number in numbers:
            hits[number].append(caches[number].find(partial.digest))
    return hits, start + count


#: Evicted blocks in ``PrefixCache.last_evicted``.
_LAST_EVICTED = 64


def first_block_read(num_computed: int, window: int | None, block_size: int) -> int:
    """Index of the first block that tokens from position ``num_computed`` on attend to."""
    return 0 if window is None else max(0, num_computed - window + 1) // block_size


class PrefixCache:
    """Owns the cached content of one KV group's blocks, and allocates its blocks, evicting content where needed.

    Content evicted on the device may move to a spare host block, where it is still matched. Only full blocks and the
    ends of shared prefixes are cached; with recurrent states beside them, those of prompts and answers, too. A digest
    names the same tokens in all groups.
    """

    #: Whether blocks are recurrent states (``StateCache``).
    has_states = False

    def __init__(
        self, device: BlockPool, host: BlockPool, moves: PendingMoves, window: int | None, *, host_cache: bool
    ) -> None:
        self._device, self._host, self._moves = device, host, moves
        self._window, self._host_cache = window, host_cache
        #: Cached content on the device; a block that it forgets may be written.
        self.on_device = ContentIndex(device)
        self._on_host = ContentIndex(host)
        #: Device blocks that have lost their content; and the last of them, each with the reason (``Change.why``).
        self.num_evicted = 0
        #: Gets the blocks that are evicted from the device, with the number of this KV group.
        self.stored: tuple[StoredBlocks, int] | None = None
        self.last_evicted: deque[tuple[int, str]] = deque(maxlen=_LAST_EVICTED)
        #: Device blocks that were held until their time had come or they were released.
        self._ended: set[int] = set()

    def allocate(self, count: int) -> list[int]:
        """Allocates device blocks: free ones first, then the least recently used cached ones."""
        check_room(self._device, count)
        for _ in range(count - self._device.num_free):
            evicted = self._evict()
            self.num_evicted += 1
            self.last_evicted.append((evicted.block, self._why(evicted)))
            if self.stored is not None:
                self.stored[0].evict(self.stored[1], evicted)
            if not self._host_cache:
                continue
            on_host = self._on_host.find(evicted.digest)
            if on_host is not None:
                self._host.touch(on_host.block)
            elif self._host_has_room(evicted):
                taken = self.allocate_on_host(1)
                self._on_host.add(evicted.copy_in(self._host, taken[0]))
                self._moves.swap_out(evicted.block, taken[0])
                self._host.release(taken)
        return self._device.allocate(count)

    def _why(self, evicted: KnownBlock) -> str:
        if evicted.block in self._ended:
            self._ended.remove(evicted.block)
            return "ended"
        return "held" if evicted.digest in self.on_device.held else "room"

    def _host_has_room(self, evicted: KnownBlock) -> bool:
        """Whether evicted content may move to the host: never in the place of content that is held, unless it is."""
        host = self._host
        if host.num_free or not host.num_available:
            return host.num_available > 0
        return evicted.digest in self.on_device.held or not host.is_held(host.least_recently_used())

    def follow(self, held: Mapping[bytes, int]) -> None:
        """Holds the blocks with these digests, those that come later too; ``hold`` and ``unhold`` tell of changes."""
        self.on_device.held = self._on_host.held = held

    def hold(self, digest: bytes) -> None:
        for index in (self.on_device, self._on_host):
            if (entry := index.find(digest)) is not None:
                entry.pool.hold(entry.block)
                if index is self.on_device:
                    self._ended.discard(entry.block)

    def unhold(self, digest: bytes, *, evict_first: bool) -> None:
        for index in (self.on_device, self._on_host):
            if (entry := index.find(digest)) is not None:
                entry.pool.unhold(entry.block, evict_first=evict_first)
                if evict_first and index is self.on_device:
                    self._ended.add(entry.block)

    def _evict(self) -> KnownBlock:
        # A window reads the end of a chain, so there the descendants of a block are not evicted before it.
        windowed = self._window is not None
        return self.on_device.forget(self._device.least_recently_used()) if windowed else self.on_device.evict()

    def _evict_on_host(self) -> KnownBlock:
        return self._on_host.evict()

    def allocate_on_host(self, count: int) -> list[int]:
        """``allocate`` on the host; content evicted there is lost."""
        check_room(self._host, count)
        for _ in range(count - self._host.num_free):
            self._evict_on_host()
        return self._host.allocate(count)

    def add(self, chain: PrefixChain, index: int, block: int, content: Content) -> None:
        """Adds a computed block as block ``index`` of the chain, unless its content is cached already."""
        self.on_device.add(KnownBlock(self._device, block, *self._names(chain, index), content))

    def _names(self, chain: PrefixChain, index: int) -> tuple[bytes, bytes]:
        return chain.digests[index + 1], chain.digests[index]

    def can_pin(self, chain: PrefixChain, index: int, block: int) -> bool:
        """Whether a sequence still has this block, or the cache does."""
        return block != NO_BLOCK or self.on_device.find(chain.digests[index + 1]) is not None

    def pin(self, chain: PrefixChain, index: int, block: int, content: Content) -> int:
        """Adds a computed block, or ``NO_BLOCK``, as block ``index`` of the chain and pins it; see ``pin_block``."""
        return self.pin_block(KnownBlock(self._device, block, *self._names(chain, index), content))

    def pin_block(self, entry: KnownBlock) -> int:
        """Adds a computed block and pins it; returns the pinned block.

        That is another one with this content if it is pinned already, or if ``block`` is ``NO_BLOCK``; otherwise an
        unpinned one gives way, as a step in flight may still have to move its content there.
        """
        block, cached = entry.block, self.on_device.find(entry.digest)
        if cached is not None and (block == NO_BLOCK or self._device.is_pinned(cached.block)):
            block = cached.block
        elif cached is not None and cached.block != block:
            self.on_device.forget(cached.block)
        self.on_device.add(entry)
        self.on_device.pin(block)
        return block

    def last_state(self, token_ids: list[int], chain: PrefixChain, limit: int) -> int:
        """The longest prefix of at most ``limit`` tokens that has its state, if this group has states."""
        return limit

    def state_at(self, token_ids: list[int], chain: PrefixChain, end: int) -> list[KnownBlock | None]:
        """The hits of a group with states for a prefix that ``last_state`` has found."""
        return []

    def clear(self) -> None:
        self.on_device.clear()
        self._on_host.clear()

    def find(self, digest: bytes) -> KnownBlock | None:
        """The block with this digest, on the device or else on the host."""
        return self.on_device.find(digest) or self._on_host.find(digest)

    def find_prefix(self, chain: PrefixChain, max_blocks: int) -> list[KnownBlock | None]:
        """The longest cached prefix of the chain, of at most ``max_blocks`` blocks.

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
        size = chain.block_size
        hits: list[KnownBlock | None] = []  # last first
        while index > first_block_read(end * size, self._window, size):
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
        """The cached block that ``suits`` with the longest common prefix with the content after ``index`` blocks."""
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
        """Available device blocks that ``take`` uses, after the references of ``released`` (by block) are dropped."""
        device, dropped = self._device, released.get
        blocks = [hit for hit in hits if hit is not None]
        # Cached ones that get a reference, and targets of swaps in.
        return sum(hit.pool is not device or device.references(hit.block) == dropped(hit.block, 0) for hit in blocks)

    def take(self, hits: Sequence[KnownBlock | None], num_full: int) -> list[int]:
        """Device blocks with the content of the hits, each with a new reference; their cost must be available.

        Hits on the host are swapped in and cached on the device, except for a partial match: the caller writes into it.
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
    if count > pool.num_available:
        raise OutOfBlocksError(f"{count} blocks asked for, {pool.num_available} available of {pool.num_blocks}")


#: Most children of a block that are compared for a partial match.
_MAX_COMPARED_CHILDREN = 8


class KnownBlock(msgspec.Struct, eq=False, gc=False):
    """A block in the prefix cache, with the digests of its content and of the block before it (``parent``).

    It is full, or the last one of a shared prefix: then ``content`` is shorter, and it is no block's parent.
    """

    pool: BlockPool
    block: int
    digest: bytes
    parent: bytes
    content: Content
    #: The siblings added before and after it, in the ring of all blocks with the same parent.
    older: int = -1
    newer: int = -1

    def copy_in(self, pool: BlockPool, block: int) -> KnownBlock:
        return KnownBlock(pool, block, self.digest, self.parent, self.content)


def _by_digest() -> list[dict[bytes, KnownBlock]]:
    """256 dictionaries, by the first byte of the digest: one of 90,000 entries takes 6 ms whenever it grows."""
    return [{} for _ in range(256)]


class ContentIndex:
    """The cached blocks of one pool by digest, and the children of a digest: exactly the blocks that the pool keeps."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        #: By block id minus the pool's first one.
        self._by_block: list[KnownBlock | None] = exclude_from_gc([None] * pool.num_blocks)
        self._by_digest = _by_digest()
        #: By parent. A child may outlive its parent, and is matched again once the parent is added again.
        self._newest_child = _by_digest()
        #: By parent: pinned children, which are always compared.
        self._pinned: dict[bytes, list[KnownBlock]] = {}
        #: Digests whose blocks are held; owned by ``Retention``.
        self.held: Mapping[bytes, int] = {}

    def find(self, digest: bytes) -> KnownBlock | None:
        return self._by_digest[digest[0]].get(digest)

    def has_children(self, digest: bytes) -> bool:
        return digest in self._newest_child[digest[0]]

    def entries(self) -> Iterator[KnownBlock]:
        return (entry for entry in self._by_block if entry is not None)

    def at(self, block: int) -> KnownBlock:
        """The entry of a block that the pool keeps."""
        return self._entry(block)

    def add(self, entry: KnownBlock) -> None:
        """Adds a used block, unless its digest or the block itself is in the index already."""
        pool, block, digest, parent = self._pool, entry.block, entry.digest, entry.parent
        by_digest = self._by_digest[digest[0]]
        if digest in by_digest or not pool.keep(block):
            return
        self._by_block[block - pool.first] = by_digest[digest] = entry
        newest_child = self._newest_child[parent[0]]
        newest = newest_child.get(parent)
        entry.older = entry.newer = block
        if newest is not None:
            entry.older, entry.newer = newest.block, newest.newer
            self._entry(newest.newer).older = newest.newer = block
        newest_child[parent] = entry
        if digest in self.held:
            pool.hold(block)

    def forget(self, block: int) -> KnownBlock:
        """Removes a block; it becomes free if it has no references."""
        entry = self._entry(block)
        newest_child = self._newest_child[entry.parent[0]]
        if entry.older == block:
            del newest_child[entry.parent]
        else:
            older = self._entry(entry.older)
            older.newer, self._entry(entry.newer).older = entry.newer, entry.older
            if newest_child[entry.parent] is entry:
                newest_child[entry.parent] = older
        self._by_block[block - self._pool.first] = None
        del self._by_digest[entry.digest[0]][entry.digest]
        self._pool.forget(block)
        return entry

    def _entry(self, block: int) -> KnownBlock:
        entry = self._by_block[block - self._pool.first]
        assert entry is not None, f"block {block} is not in the index"
        return entry

    def _children(self, parent: bytes, *, oldest_first: bool = False) -> Iterator[KnownBlock]:
        newest = self._newest_child[parent[0]].get(parent)
        if newest is None:
            return
        child = first = self._entry(newest.newer) if oldest_first else newest
        while True:
            yield child
            child = self._entry(child.newer if oldest_first else child.older)
            if child is first:
                return

    def evict(self) -> KnownBlock:
        """Removes the least recently used block, or its last descendant: useless without its parents."""
        entry: KnownBlock | None = self._entry(self._pool.least_recently_used())
        while entry is not None:
            last = entry
            children = self._children(last.digest, oldest_first=True)
            entry = next((child for child in children if self._pool.references(child.block) == 0), None)
        return self.forget(last.block)

    def find_partial(
        self, parent: bytes, content: Sequence[object], suits: Callable[[bytes], bool]
    ) -> tuple[KnownBlock | None, int]:
        """The pinned or recent child that ``suits`` with the longest common prefix, and its length in tokens."""
        best, longest = None, 0
        recent = islice(self._children(parent), _MAX_COMPARED_CHILDREN)
        for child in chain(self._pinned.get(parent, ()), recent):
            count = common_prefix(positions(child.content), content)
            if count > longest and suits(child.digest):
                best, longest = child, count
        return best, longest

    def pin(self, block: int) -> None:
        if not self._pool.is_pinned(block):
            entry = self._entry(block)
            self._pinned.setdefault(entry.parent, []).append(entry)
        self._pool.pin((block,))

    def unpin(self, blocks: Sequence[int]) -> None:
        self._pool.unpin(blocks)
        for block in blocks:
            if not self._pool.is_pinned(block):
                entry = self._entry(block)
                self._pinned[entry.parent].remove(entry)
                if not self._pinned[entry.parent]:
                    del self._pinned[entry.parent]

    def clear(self) -> None:
        for entry in self._by_block:
            if entry is not None and not self._pool.is_pinned(entry.block):
                self.forget(entry.block)


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


# Digests of full blocks (vLLM's block hashes).

#: An empty hash of 16 bytes: copying it is faster than making another one.
_EMPTY = blake2b(digest_size=16)
#: Values for the positions of a block; ``positions`` splits them.
Content = bytes | tuple[object, ...]


class FeatureSpan(NamedTuple):
    """Placeholder tokens whose embeddings come from another input, such as an image."""

    offset: int
    length: int
    #: Identifies the input's content and all else that its embeddings depend on.
    key: bytes

    @property
    def end(self) -> int:
        return self.offset + self.length


class PrefixChain:
    """The digests of a token sequence's full blocks, chained: a block's digest covers all content before it.

    ``digests[0]`` is that of the context, which all KV entries depend on, such as a salt and an adapter. ``digests[i +
    1]`` is that of block ``i``, computed from its tokens, their features, and ``digests[i]``, that of its parent. The
    hash is cryptographic, so a prompt cannot be crafted to hit blocks of other content.
    """

    __slots__ = ("block_size", "digests", "features")

    def __init__(self, context: str | bytes, block_size: int, features: Sequence[FeatureSpan] = ()) -> None:
        """``features`` are sorted by offset and do not overlap."""
        self.block_size = block_size
        self.features = features
        name = context if isinstance(context, bytes) else context.encode("utf-8", "surrogatepass")
        self.digests = exclude_from_gc([_digest(name)])

    def __len__(self) -> int:
        return len(self.digests) - 1

    def extend(self, token_ids: list[int], num_blocks: int) -> None:
        """Computes the missing digests of the first ``num_blocks`` blocks; the last one may be partly filled."""
        size = self.block_size
        for start in range(len(self) * size, num_blocks * size, size):
            self.add(token_ids, self.content(token_ids, start, start + size))

    def add(self, token_ids: list[int], content: Content) -> None:
        """Computes the first missing digest; its block has this content."""
        digests = self.digests
        if not isinstance(content, bytes):
            start = (len(digests) - 1) * self.block_size
            content = self._named(token_ids, start, start + self.block_size)
        digests.append(_digest(digests[-1] + content))

    def digest(self, token_ids: list[int], end: int) -> bytes:
        """The digest of the first ``end`` tokens, all of whose full blocks have theirs."""
        full, rest = divmod(end, self.block_size)
        return _digest(self.digests[full] + self._named(token_ids, end - rest, end)) if rest else self.digests[full]

    def _named(self, token_ids: list[int], start: int, stop: int) -> bytes:
        content = _packed(token_ids[start:stop])
        for f in self._overlapping(start, stop):  # unambiguous: each with its lengths
            content += array("q", (f.offset - start, f.length, len(f.key))).tobytes() + f.key
        return content

    def first(self, num_blocks: int) -> PrefixChain:
        """A copy with at most the first ``num_blocks`` blocks."""
        chain = PrefixChain.__new__(PrefixChain)
        chain.block_size = self.block_size
        chain.features = self.features
        chain.digests = exclude_from_gc(self.digests[: num_blocks + 1])
        return chain

    def content(self, token_ids: list[int], start: int, stop: int) -> Content:
        """Values for positions ``start`` to ``stop`` (of one block) that are equal if and only if the content is.

        Without features these are the token ids, packed in bytes: they take no time of the garbage collector.
        """
        tokens = token_ids[start:stop]
        if not self.features:
            return _packed(tokens)
        content: list[object] = list(tokens)
        for feature in self._overlapping(start, stop):
            for position in range(max(start, feature.offset), min(stop, feature.end)):
                place = feature.key, feature.length, position - feature.offset
                content[position - start] = (token_ids[position], *place)
        return exclude_from_gc(tuple(content))

    def _overlapping(self, start: int, stop: int) -> Sequence[FeatureSpan]:
        first = bisect_right(self.features, start, key=lambda f: f.end)
        last = bisect_left(self.features, stop, lo=first, key=lambda f: f.offset)
        return self.features[first:last]


def _digest(content: bytes) -> bytes:
    blake = _EMPTY.copy()
    blake.update(content)
    return blake.digest()


@cache
def _packer(count: int) -> Callable[..., bytes]:
    return Struct(f"{count}i").pack


def _packed(token_ids: list[int]) -> bytes:
    return _packer(len(token_ids))(*token_ids)


def positions(content: Content) -> Sequence[object]:
    return memoryview(content).cast("i") if isinstance(content, bytes) else content
