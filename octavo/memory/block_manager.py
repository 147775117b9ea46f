"""Allocation of KV cache blocks to sequences: admission, growth, sharing, swapping and prefix caching."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.errors import ConfigError
from octavo.core.plan import TableChange
from octavo.memory.block_pool import BlockPool
from octavo.memory.kv_group import KVGroup, Write
from octavo.memory.kv_groups import GroupBlocks
from octavo.memory.moves import Moves
from octavo.memory.pinned_prefixes import PinnedPrefixes
from octavo.memory.prefix_cache import PrefixMatch, check_room, find_match
from octavo.memory.prefix_chain import FeatureSpan, PrefixChain


class AllocStatus(enum.Enum):
    """Whether a sequence can be allocated now, later, or never because all blocks together are too few."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


#: ``_Registration.count`` of a sequence whose blocks must never be registered.
_NEVER_REGISTER = sys.maxsize


@dataclass(slots=True)
class _Registration:
    """The digests of a sequence's full blocks, and how many of these blocks were offered to the prefix cache."""

    chain: PrefixChain
    count: int


class BlockManager:
    """Owns the blocks of all KV groups, and how many blocks of each sequence are registered in the prefix cache.

    Every operation is done in all groups or in none, so a sequence has a table in each group or in none, all of them
    on the device or all on the host. Block ids are unique across the groups, on the device and on the host: the ids of
    a group follow those of the group before it, so a block move does not name its group. ``KVGroup`` states the
    invariants of tables and blocks.

    Callers count in blocks of the first group, which keeps the most blocks per sequence; all statistics are those of
    the first group.
    """

    def __init__(
        self,
        num_blocks: int | Sequence[GroupBlocks],
        block_size: int,
        *,
        num_host_blocks: int = 0,
        watermark: float = 0.0,
        prefix_caching: bool = False,
        host_cache: bool = False,
        max_num_batched_tokens: int = 0,
    ) -> None:
        """Creates the pools.

        Args:
            num_blocks: Device blocks of the only group (without a window), or the blocks of each group; the group that
                keeps the most blocks per sequence comes first.
            block_size: Tokens per block, in every group.
            num_host_blocks: Host blocks, if ``num_blocks`` is an integer.
            watermark: Share of the first group's blocks that admission leaves free.
            prefix_caching: Whether full blocks are registered and found by their content.
            host_cache: Whether the prefix cache may use host blocks that no swapped sequence needs.
            max_num_batched_tokens: Tokens of all steps in flight, for which windowed groups keep room.

        Raises:
            ConfigError: ``host_cache`` with several groups.
        """
        sizes = [GroupBlocks(num_blocks, num_host_blocks)] if isinstance(num_blocks, int) else list(num_blocks)
        if host_cache and len(sizes) > 1:
            raise ConfigError(
                f"host_prefix_cache=True works with one group of KV layers, but the model has {len(sizes)}"
            )
        self.block_size = block_size
        self.groups: list[KVGroup] = []
        first = first_host = 0
        for number, size in enumerate(sizes):
            group = KVGroup(
                number,
                size,
                block_size,
                first_block=first,
                first_host_block=first_host,
                host_cache=host_cache,
                max_num_batched_tokens=max_num_batched_tokens,
            )
            self.groups.append(group)
            first, first_host = first + size.num_blocks, first_host + size.num_host_blocks
        self._first = self.groups[0]
        self._windowed = [group for group in self.groups if group.window is not None]
        self.watermark_blocks = math.ceil(watermark * self.num_blocks)
        self._prefix_caching = prefix_caching
        self._registrations: dict[int, _Registration] = {}
        self.pinned = PinnedPrefixes(self.groups)
        #: Tokens of all sequences passed to ``adopt``, and how many of them were found in the prefix cache.
        self.cached_queries = 0
        self.cached_hits = 0

    # --- statistics -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> BlockPool:
        """The first group's device blocks."""
        return self._first.device

    @property
    def host(self) -> BlockPool:
        """The first group's host blocks."""
        return self._first.host

    @property
    def num_blocks(self) -> int:
        """Device blocks in all."""
        return self.device.num_blocks

    @property
    def num_free(self) -> int:
        """Device blocks without references and without cached content."""
        return self.device.num_free

    @property
    def num_cached(self) -> int:
        """Device blocks without references that the prefix cache keeps."""
        return self.device.num_cached

    @property
    def num_pinned(self) -> int:
        """Device blocks of pinned prefixes."""
        return self.device.num_pinned

    @property
    def num_used(self) -> int:
        """Device blocks referenced by tables or by the block moves of this step that are not pinned."""
        return self.device.num_used

    @property
    def num_available(self) -> int:
        """Device blocks that can be allocated: free and cached."""
        return self.device.num_available

    @property
    def num_host_blocks(self) -> int:
        """Host blocks in all."""
        return self.host.num_blocks

    @property
    def host_used(self) -> int:
        """Host blocks referenced by swapped sequences or by the block moves of this step."""
        return self.host.num_used

    @property
    def num_tables(self) -> int:
        """Sequences that hold blocks, on the device or the host."""
        return len(self._first.tables) + len(self._first.on_host.by_id)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one sequence, the last one perhaps partly filled."""
        return -(-num_tokens // self.block_size)

    def table(self, seq_id: int, group: int = 0) -> list[int]:
        """A copy of the sequence's block table in a group; empty if it has no table on the device."""
        return self.groups[group].table(seq_id)

    def tables(self, seq_id: int) -> list[TableChange]:
        """The sequence's block tables in all groups as changes of empty tables, for a plan that adds the sequence."""
        return [TableChange(seq_id, 0, group.table(seq_id), group.number) for group in self.groups]

    # --- admission --------------------------------------------------------------------------------------------------

    def can_allocate(self, num_blocks: int, reserved_blocks: int = 0, num_seqs: int = 1) -> AllocStatus:
        """Whether sequences can be admitted in addition to reserved blocks and the watermark.

        Args:
            num_blocks: Blocks of each group that the sequences will need at most; a windowed group needs no more than
                its window for each sequence.
            reserved_blocks: Blocks that running sequences will still need.
            num_seqs: Sequences that will hold blocks on the device, the admitted ones included.
        """
        if not all(group.could_hold(num_blocks, num_seqs) for group in self.groups):
            return AllocStatus.NEVER
        fits = self.fits(num_blocks + self.watermark_blocks, reserved_blocks, num_seqs)
        return AllocStatus.OK if fits else AllocStatus.LATER

    def fits(self, num_blocks: int, reserved_blocks: int = 0, num_seqs: int = 1) -> bool:
        """Whether the blocks are available now; as ``can_allocate``, without the watermark."""
        return all(group.has_room(num_blocks + reserved_blocks, num_seqs) for group in self.groups)

    # --- growth -----------------------------------------------------------------------------------------------------

    def grow(self, writes: list[Write]) -> list[TableChange] | None:
        """Allocates blocks for the tokens of a step; each write is (sequence id, tokens computed, tokens to hold).

        Copy-on-write: the block that the first new token is written into is copied if another table has it too, or if
        the prefix cache keeps it. If several sequences write into a block that is shared but not cached, all but the
        last one get a copy. If no block is available for the copy of a cached block that one table has, the cache
        forgets the block and the sequence writes into it. A table must not be longer than up to the block that the
        first new token is written into. Blocks that are outside a window are freed, so ``tokens computed`` of a
        sequence must not decrease between calls.

        Returns:
            The changes of all tables in all groups (not to be modified); None, and no table has grown, if a group has
            too few blocks available.
        """
        if not self._windowed and len(self.groups) == 1:
            return self._first.grow(writes)
        if self._prefix_caching:
            self._free_outside_windows([(*write[:2], self._num_registered(write[0])) for write in writes])
        if not self._prefix_caching or not self._can_grow(writes):  # free blocks that are not cached yet, too
            self._free_outside_windows([(*write[:2], sys.maxsize) for write in writes])
        if not self._can_grow(writes):
            return None
        return [change for group in self.groups for change in group.grow(writes) or ()]

    def _can_grow(self, writes: list[Write]) -> bool:
        return all(group.can_grow(writes) for group in self.groups)

    def _free_outside_windows(self, sequences: list[tuple[int, int, int]]) -> None:
        """Each entry is (sequence id, tokens computed, number of first blocks that may be freed)."""
        for seq_id, num_computed, max_blocks in sequences:
            for group in self._windowed:
                group.free_outside_window(seq_id, num_computed, max_blocks)

    def _num_registered(self, seq_id: int) -> int:
        registration = self._registrations.get(seq_id)
        return registration.count if registration is not None else 0

    # --- sharing ----------------------------------------------------------------------------------------------------

    def fork(self, parent_id: int, child_id: int) -> None:
        """Shares all blocks of a sequence with a new one that has the same computed tokens."""
        self.fork_prefix(parent_id, child_id, len(self._first.tables.get(parent_id, ())))

    def fork_prefix(self, parent_id: int, child_id: int, num_blocks: int) -> bool:
        """Shares the first ``num_blocks`` blocks of a sequence with a new one that has the same tokens in them.

        Returns:
            False, and nothing is changed, if blocks that the child would read are freed: outside the parent's window.

        Raises:
            ValueError: the parent's table is shorter or on the host, or the child holds blocks.
        """
        if self.is_swapped(parent_id):
            raise ValueError(f"sequence {parent_id} is swapped out and cannot share blocks; swap it in first")
        held = len(self._first.tables.get(parent_id, ()))
        if num_blocks > held:
            raise ValueError(f"sequence {parent_id} holds {held} blocks and cannot share {num_blocks}")
        if num_blocks == 0:
            return True
        if not all(group.holds_window_at(parent_id, num_blocks) for group in self._windowed):
            return False
        for group in self.groups:
            group.share(parent_id, child_id, num_blocks)
        registration = self._registrations.get(parent_id)
        if registration is not None and registration.count == _NEVER_REGISTER:
            self._registrations[child_id] = registration
        elif registration is not None:  # the child may continue with other tokens
            count = min(registration.count, num_blocks)
            self._registrations[child_id] = _Registration(registration.chain.first(count), count)
        return True

    def free(self, seq_id: int) -> None:
        """Frees all blocks of a sequence, on the device or the host; nothing happens if it has none."""
        for group in self.groups:
            group.free(seq_id)
        self._registrations.pop(seq_id, None)

    # --- swapping ---------------------------------------------------------------------------------------------------

    def is_swapped(self, seq_id: int) -> bool:
        """Whether the sequence's blocks are on the host."""
        return seq_id in self._first.on_host.by_id

    def swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Moves all blocks of these sequences to the host, shared blocks once.

        Returns:
            False, and nothing is changed, if too few host blocks are available or a block is the target of a move of
            this step.
        """
        if not all(group.can_swap_out(seq_ids) for group in self.groups):
            return False
        for group in self.groups:
            group.swap_out(seq_ids)
        return True

    def swap_in(self, seq_ids: Sequence[int]) -> bool:
        """Moves all blocks of these sequences into new device blocks, shared blocks once.

        Returns:
            False, and nothing is changed, if too few device blocks are available.
        """
        if not all(group.can_swap_in(seq_ids) for group in self.groups):
            return False
        swapped = self._first.on_host.present(seq_ids)
        for group in self.groups:
            group.swap_in(swapped)
        for seq_id in swapped:  # the next ``register`` offers the new blocks to the prefix cache
            registration = self._registrations.get(seq_id)
            if registration is not None and registration.count != _NEVER_REGISTER:
                registration.count = 0
        return True

    def blocks_to_swap_in(self, seq_ids: Sequence[int]) -> int:
        """Device blocks that ``swap_in`` allocates in the first group; in every other group it needs no more."""
        return len(self._first.on_host.distinct_blocks(seq_ids))

    # --- prefix cache -----------------------------------------------------------------------------------------------

    def chain(self, token_ids: list[int], context: str | bytes, features: Sequence[FeatureSpan] = ()) -> PrefixChain:
        """The digests of the full blocks of these tokens, for ``match``; empty without prefix caching."""
        chain = PrefixChain(context, self.block_size, features)
        if self._prefix_caching:
            chain.extend(token_ids, len(token_ids) // self.block_size)
        return chain

    def match(self, token_ids: list[int], chain: PrefixChain) -> PrefixMatch:
        """Looks the longest cached prefix of these tokens up; ``chain`` is their chain. Nothing is changed."""
        return find_match([group.cache for group in self.groups], token_ids, chain)

    def cost(self, match: PrefixMatch) -> int:
        """Available blocks that ``adopt`` would use, in the group where it uses the most.

        The copy of a partly matching block is not included: ``grow`` makes it.
        """
        return max(group.cache.cost(hits) for group, hits in zip(self.groups, match.hits, strict=True))

    def adopt(self, seq_id: int, match: PrefixMatch) -> None:
        """Makes the matched blocks the tables of a new sequence. No block may be allocated since ``match``.

        Called for an empty match too: it counts the query and keeps the digests for ``register``.

        Raises:
            OutOfBlocksError: the cost exceeds the available blocks; nothing is changed.
            ValueError: the sequence holds blocks.
        """
        if not self._prefix_caching:
            return
        for group, hits in zip(self.groups, match.hits, strict=True):
            check_room(group.device, group.cache.cost(hits))
        if match.num_tokens:
            for group, hits in zip(self.groups, match.hits, strict=True):
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
        """Adds the full blocks of the first ``num_computed`` tokens to the prefix cache, if prefix caching is on.

        Their KV entries must be computed by a submitted step, or moved by this one. The cost is one hash for each block
        that is new since the last call. Content that is cached already stays in its block. Nothing happens if the
        sequence has no table on the device. ``context`` and ``features`` are those passed to ``chain``.
        """
        num_full = num_computed // self.block_size
        if not self._prefix_caching or not num_full:
            return
        registration = self._registrations.get(seq_id)
        if registration is not None and num_full <= registration.count:
            return
        if seq_id not in self._first.tables:
            return
        if registration is None:
            chain = PrefixChain(context, self.block_size, features)
            registration = self._registrations[seq_id] = _Registration(chain, 0)
        registration.chain.extend(token_ids, num_full)
        for group in self.groups:
            group.register(registration.chain, seq_id, registration.count, num_full, token_ids)
        registration.count = num_full

    def pin(self, name: str, seq_id: int, token_ids: list[int], context: str | bytes, max_tokens: int) -> AllocStatus:
        """Pins the full blocks of a sequence that has computed these tokens, until ``pinned.remove(name)``.

        Returns:
            LATER if the prefix cache was reset since the sequence began, NEVER if a sequence of ``max_tokens`` tokens
            would not fit beside the pinned blocks; nothing is pinned then.
        """
        if self._num_registered(seq_id) == _NEVER_REGISTER:
            return AllocStatus.LATER
        chain, beside = self.chain(token_ids, context), self.blocks_for(max_tokens)
        return AllocStatus.OK if self.pinned.add(name, chain, seq_id, token_ids, beside) else AllocStatus.NEVER

    def reset_prefix_cache(self) -> None:
        """Drops all cached content that is not pinned; cached blocks become free.

        Sequences that hold blocks now register none of them.
        """
        for group in self.groups:
            group.cache.clear()
        if self._prefix_caching:
            for seq_id in (*self._first.tables, *self._first.on_host.by_id):
                self._registrations[seq_id] = _Registration(PrefixChain("", self.block_size), _NEVER_REGISTER)

    # --- the step ---------------------------------------------------------------------------------------------------

    def take_moves(self) -> Moves:
        """The block moves of the step that is planned; their sources can be allocated from now on."""
        moves = self._first.moves.take()
        for group in self.groups[1:]:
            more = group.moves.take()
            moves = Moves(*(one + other for one, other in zip(moves, more, strict=True)))
        return moves
