"""What the prefix cache knows of each sequence that holds blocks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from octavo.memory.block_tables import NO_BLOCK
from octavo.memory.kv_group import KVGroup
from octavo.memory.prefix_cache import NO_REFERENCES, PrefixMatch, check_room, find_match
from octavo.memory.prefix_chain import FeatureSpan, PrefixChain

#: ``_Registration.count`` of a sequence whose blocks must never be registered.
_NEVER = sys.maxsize


class _Registration(msgspec.Struct, gc=False):
    """The digests of a sequence's full blocks, and how many of these blocks were offered to the prefix cache."""

    chain: PrefixChain
    count: int


class SequencePrefixes:
    """Finds the beginnings of sequences in the prefix caches of all groups, and offers their full blocks to these.

    Owns the digests of the sequences' blocks, and how many of them were offered. Without prefix caching nothing is
    found and nothing is offered.
    """

    def __init__(self, groups: Sequence[KVGroup], block_size: int, *, enabled: bool) -> None:
        self._groups, self._block_size = groups, block_size
        #: Never without KV groups: an encoder keeps no KV entries that another sequence could share.
        self.enabled = enabled and bool(groups)
        self._registrations: dict[int, _Registration] = {}
        #: Tokens of all sequences passed to ``adopt``, and how many of them were found in the prefix cache.
        self.cached_queries = 0
        self.cached_hits = 0

    def chain(self, token_ids: list[int], context: str | bytes, features: Sequence[FeatureSpan] = ()) -> PrefixChain:
        """The digests of the full blocks of these tokens, for ``match``; empty without prefix caching."""
        chain = PrefixChain(context, self._block_size, features)
        if self.enabled:
            chain.extend(token_ids, len(token_ids) // self._block_size)
        return chain

    def match(self, token_ids: list[int], chain: PrefixChain, shared: int | None = None) -> PrefixMatch:
        """Looks the longest cached prefix of these tokens up; ``chain`` is their chain. Nothing is changed.

        ``shared``: blocks at its beginning that other sequences are to share. Of a longer match, the blocks in the
        window at its end are taken, and not those that the others would read; so with windows it is no longer.
        """
        if not self._groups:
            return PrefixMatch(0, len(token_ids), [], 0, chain)
        if shared is not None and any(group.window is not None for group in self._groups):
            token_ids = token_ids[: 1 + shared * self._block_size]
        return find_match([group.cache for group in self._groups], token_ids, chain)

    def cost(self, match: PrefixMatch, released: Mapping[int, int] = NO_REFERENCES) -> int:
        """Available blocks that ``adopt`` would use, in the group where it uses the most (``PrefixCache.cost``).

        The copy of a partly matching block is not included: ``BlockManager.grow`` makes it.
        """
        costs = (group.cache.cost(hits, released) for group, hits in zip(self._groups, match.hits, strict=True))
        return max(costs, default=0)

    def adopt(self, seq_id: int, match: PrefixMatch) -> None:
        """Makes the matched blocks the tables of a new sequence. No block may be allocated since ``match``.

        Called for an empty match too: it counts the query and keeps the digests for ``register``.

        Raises:
            OutOfBlocksError: the cost exceeds the available blocks; nothing is changed.
            ValueError: the sequence holds blocks.
        """
        if not self.enabled:
            return
        for group, hits in zip(self._groups, match.hits, strict=True):
            check_room(group.device, group.cache.cost(hits))
        if match.num_tokens:
            for group, hits in zip(self._groups, match.hits, strict=True):
                group.new_table(seq_id).extend(group.cache.take(hits, match.num_full))
        self.cached_queries += match.num_queried
        self.cached_hits += match.num_tokens
        self._registrations[seq_id] = _Registration(match.chain.first(len(match.chain)), match.num_full)

    def register(
        self,
        seq_id: int,
        token_ids: list[int],
        num_computed: int,
        context: str | bytes,
        features: Sequence[FeatureSpan] = (),
    ) -> None:
        """Adds the full blocks of the first ``num_computed`` tokens to the prefix cache.

        Their KV entries must be computed by a submitted step, or moved by this one. The cost is one hash for each block
        that is new since the last call. Content that is cached already stays in its block. Nothing happens if the
        sequence has no table on the device. ``context`` and ``features`` are those passed to ``chain``.
        """
        num_full = num_computed // self._block_size
        if not (self.enabled and num_full and seq_id in self._groups[0].tables):
            return
        registration = self._registrations.get(seq_id)
        if registration is None:
            chain = PrefixChain(context, self._block_size, features)
            registration = self._registrations[seq_id] = _Registration(chain, 0)
        chain, size = registration.chain, self._block_size
        for index in range(registration.count, num_full):
            content = chain.content(token_ids, index * size, index * size + size)
            if index + 1 == len(chain.digests):
                chain.add(token_ids, content)
            for group in self._groups:
                block = group.tables[seq_id][index]
                if block != NO_BLOCK:  # else it is freed already
                    group.cache.add(chain, index, block, content)
            registration.count = index + 1

    def num_registered(self, seq_id: int) -> int:
        """How many blocks of a sequence were offered; more than any has if none may be."""
        registration = self._registrations.get(seq_id)
        return registration.count if registration is not None else 0

    def may_register(self, seq_id: int) -> bool:
        """Whether its blocks may be offered: the cache was not reset while it held them."""
        return self.num_registered(seq_id) != _NEVER

    # --- what becomes of the sequence -------------------------------------------------------------------------------

    def fork(self, parent_id: int, child_id: int, num_blocks: int) -> None:
        """The child shares the first ``num_blocks`` blocks, and may continue with other tokens."""
        registration = self._registrations.get(parent_id)
        if registration is not None and self.may_register(parent_id):
            count = min(registration.count, num_blocks)
            registration = _Registration(registration.chain.first(count), count)
        if registration is not None:
            self._registrations[child_id] = registration

    def move(self, seq_ids: Iterable[int]) -> None:
        """The sequences have other blocks with the same content, which the next ``register`` offers."""
        for seq_id in seq_ids:
            if seq_id in self._registrations and self.may_register(seq_id):
                self._registrations[seq_id].count = 0

    def free(self, seq_id: int) -> None:
        """The sequence holds no blocks any more."""
        self._registrations.pop(seq_id, None)

    def clear(self, seq_ids: Iterable[int]) -> None:
        """Drops all cached content that is not pinned; of these sequences, which hold blocks, none is registered."""
        for group in self._groups:
            group.cache.clear()
        if self.enabled:
            for seq_id in seq_ids:
                self._registrations[seq_id] = _Registration(PrefixChain("", self._block_size), _NEVER)
