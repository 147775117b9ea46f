"""Checkpoints: recurrent states in the prefix cache, found by the exact tokens before them, and their eviction."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from octavo.config.kv_spec import STATE_WINDOW
from octavo.memory.block_pool import BlockPool
from octavo.memory.prefix_cache import ContentIndex, KnownBlock, PrefixCache, PrefixChain

if TYPE_CHECKING:
    from octavo.memory.kv_group import PendingMoves


#: Blocks that are compared for an eviction, the least recently used ones.
_CANDIDATES = 256


class Checkpoint(KnownBlock, gc=False, eq=False):
    """The state after the first ``position`` tokens of a chain. ``parent``: the digest of the full blocks before it."""

    position: int = 0
    #: The checkpoint before it in its chain, which may have been evicted since.
    before: Checkpoint | None = None
    #: Whether it is part of an answer, whose prompt's end is a checkpoint.
    in_answer: bool = False
    #: Whether later checkpoints of its chain make it dispensable: 1, of its own answer; 2, of a later turn.
    passed: int = 0
    #: ``StateCache._clock`` at its last use, and the sequences that went on from it.
    used: int = 0
    hits: int = 0

    def copy_in(self, pool: BlockPool, block: int) -> Checkpoint:
        copy = Checkpoint(pool, block, self.digest, self.parent, self.content)
        copy.position, copy.before, copy.in_answer = self.position, self.before, self.in_answer
        copy.passed, copy.used, copy.hits = self.passed, self.used, self.hits
        return copy


class StateCache(PrefixCache):
    """The prefix cache of a KV group with recurrent states.

    A sequence leaves a checkpoint at the end of each block (every ``state_checkpoint_tokens``), of its prompt and of
    its answer, and where its prompt leaves the tokens that others have cached. A prompt goes on from the last one.

    Eviction: all states of a group have one size, so a state is worth the tokens that a prompt would compute again
    without it: those since the checkpoint before it that is still cached. A prompt mostly continues the last turn of
    its chain, after the answer or instead of it. So the first to go are checkpoints that a later turn, or later ones of
    the same answer, have passed, unless several sequences went on from there, as from a system prompt; then the others.
    Among either, the one of least worth goes, which thins out a chain evenly; of equal ones the least recently used. So
    that old chains go, too, the worth counts from a clock, which is set to the worth of each evicted one that was not
    passed (GreedyDual: Cao and Irani 1997). The ``_CANDIDATES`` least recently used ones are compared.
    """

    has_states = True

    def __init__(
        self, device: BlockPool, host: BlockPool, moves: PendingMoves, state_tokens: int, *, host_cache: bool
    ) -> None:
        super().__init__(device, host, moves, STATE_WINDOW, host_cache=host_cache)
        self._state_tokens, self._clock = state_tokens, 0

    def add_checkpoint(
        self,
        chain: PrefixChain,
        token_ids: list[int],
        position: int,
        block: int,
        last: Checkpoint | None,
        in_answer: bool,
    ) -> Checkpoint:
        """Adds a block as the state after these tokens, unless it is cached already; returns what is cached.

        ``last``: the last checkpoint of the sequence.
        """
        while last is not None and last.position >= position:
            last = last.before
        entry = self._checkpoint(chain, token_ids, position, block)
        entry.before, entry.in_answer = last, in_answer
        self.on_device.add(entry)
        self._pass(last, in_answer)
        cached = self.on_device.find(entry.digest)
        if not isinstance(cached, Checkpoint) or cached is entry:
            return entry
        cached.before, cached.in_answer = last or cached.before, in_answer and cached.in_answer
        return cached

    def pin_state(self, chain: PrefixChain, token_ids: list[int], block: int) -> int:
        """Pins a block as the state after these tokens."""
        return self.pin_block(self._checkpoint(chain, token_ids, len(token_ids), block))

    def _checkpoint(self, chain: PrefixChain, token_ids: list[int], position: int, block: int) -> Checkpoint:
        names = chain.digest(token_ids, position), chain.digests[(position - 1) // chain.block_size]
        return Checkpoint(self._device, block, *names, b"", position=position, used=self._clock)

    def use(self, hit: KnownBlock | None) -> Checkpoint:
        """The checkpoint of a hit, marked as used now."""
        assert isinstance(hit, Checkpoint)
        hit.used, hit.hits = self._clock, hit.hits + 1
        return hit

    def last_state(self, token_ids: list[int], chain: PrefixChain, limit: int) -> int:
        size = chain.block_size
        for index in range(min((limit - 1) // size, len(chain)), -1, -1):
            name = chain.digests[index]
            if not (self.on_device.has_children(name) or self._on_host.has_children(name)):
                continue
            for end in range(min(limit, index * size + size), index * size, -1):
                if self.find(chain.digest(token_ids, end)) is not None:
                    return end
        return 0

    def state_at(self, token_ids: list[int], chain: PrefixChain, end: int) -> list[KnownBlock | None]:
        if not end:
            return []
        return [None] * ((end - 1) // self._state_tokens) + [self.find(chain.digest(token_ids, end))]

    def _evict(self) -> KnownBlock:
        return self._evict_from(self.on_device, self._device)

    def _evict_on_host(self) -> KnownBlock:
        return self._evict_from(self._on_host, self._host)

    def _evict_from(self, index: ContentIndex, pool: BlockPool) -> KnownBlock:
        least: tuple[tuple[bool, bool, int], Checkpoint] | None = None
        for block in islice(pool.cached(), _CANDIDATES):
            entry = index.at(block)
            assert isinstance(entry, Checkpoint)
            last = not entry.passed or entry.hits > 1
            worth = pool.is_held(block), last, entry.used + entry.position - self._position_before(entry)
            if least is None or worth < least[0]:
                least = worth, entry
        assert least is not None, "no cached block is left"
        (_, last, worth_now), entry = least
        index.forget(entry.block)
        if last:
            self._clock = max(self._clock, worth_now)
            if entry.before is not None and isinstance(before := self.find(entry.before.digest), Checkpoint):
                before.passed = 0  # it is the last of its chain now
        return entry

    def _position_before(self, entry: Checkpoint) -> int:
        """The position of the checkpoint before this one that is still cached."""
        while entry.before is not None and self.find(entry.before.digest) is None:
            entry.before = entry.before.before
        return 0 if entry.before is None else entry.before.position

    def _pass(self, before: Checkpoint | None, in_answer: bool) -> None:
        """Marks what a new checkpoint behind ``before`` makes dispensable: not the prompt's end, by its answer."""
        if in_answer:
            if before is not None and before.in_answer:
                self._mark(before, 1)
            return
        while before is not None and before.passed < 2:
            self._mark(before, 2)
            before = before.before

    def _mark(self, entry: Checkpoint, passed: int) -> None:
        cached = self.find(entry.digest)
        for one in (entry, cached):  # a copy of it may be cached instead
            if isinstance(one, Checkpoint):
                one.passed = max(one.passed, passed)
