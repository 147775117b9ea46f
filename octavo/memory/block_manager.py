"""Which blocks hold a sequence's KV entries, who may write into them, and whether there is room for more."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.memory.block_pool import BlockPool
from octavo.memory.block_tables import BlockTables
from octavo.memory.moves import Moves, PendingMoves
from octavo.memory.prefix_cache import PrefixCache, PrefixMatch
from octavo.memory.prefix_chain import PrefixChain


class Admission(enum.Enum):
    """Whether a sequence may begin: now, later, or never because all blocks together are too few."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(slots=True)
class Growth:
    """What growing did to a block table: from ``index`` on it is ``blocks``; nothing changed if these are none."""

    index: int
    blocks: list[int]


_UNCHANGED = Growth(0, [])
_NO_BLOCKS: list[int] = []

#: Blocks registered of a sequence whose blocks must not become known.
_CLOSED = sys.maxsize


@dataclass(slots=True)
class _Registration:
    """How far a sequence's blocks are named, and how many of them were offered to the prefix cache."""

    chain: PrefixChain
    count: int


class BlockManager:
    """Owns the block tables, by sequence id, and the pools of device and host blocks under them.

    Invariants: a sequence has its table on the device or on the host, not both. A block that the next token of a
    sequence is written into is in one table only and not known to the prefix cache. On both levels used + free + cached
    blocks = all; a block is used by tables and, until ``take_moves``, by the moves of the step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        watermark: float = 0.0,
        prefix_caching: bool = False,
        host_cache: bool = False,
    ) -> None:
        """Takes sizes in blocks, ``block_size`` in tokens, and the share of blocks to keep free at admission.

        ``host_cache`` lets the prefix cache use host blocks that no swapped sequence needs.
        """
        self.block_size = block_size
        self.device = BlockPool(num_blocks)
        self.host = BlockPool(num_host_blocks)
        self.watermark_blocks = math.ceil(watermark * num_blocks)
        self._prefix_caching = prefix_caching
        self._moves = PendingMoves(self.device, self.host)
        self._cache = PrefixCache(self.device, self.host, self._moves, host_cache=host_cache)
        self._on_device = BlockTables(self.device)
        self._on_host = BlockTables(self.host)
        self._tables = self._on_device.by_id
        self._registrations: dict[int, _Registration] = {}

    # --- figures ----------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Device blocks in all."""
        return self.device.num_blocks

    @property
    def num_free(self) -> int:
        """Device blocks that nobody holds and whose content is of no interest."""
        return self.device.num_free

    @property
    def num_cached(self) -> int:
        """Device blocks that only the prefix cache knows."""
        return self.device.num_cached

    @property
    def num_used(self) -> int:
        """Device blocks in tables, or needed by the moves of this step."""
        return self.device.num_used

    @property
    def num_available(self) -> int:
        """Device blocks that can be had: free and cached."""
        return self.device.num_available

    @property
    def num_host_blocks(self) -> int:
        """Host blocks in all."""
        return self.host.num_blocks

    @property
    def host_used(self) -> int:
        """Host blocks of swapped sequences, or needed by the moves of this step."""
        return self.host.num_used

    @property
    def host_free(self) -> int:
        """Host blocks that a swap can have; the prefix cache may be using them meanwhile."""
        return self.host.num_available

    @property
    def num_tables(self) -> int:
        """Sequences that hold blocks, on the device or the host."""
        return len(self._tables) + len(self._on_host.by_id)

    @property
    def cached_queries(self) -> int:
        """Tokens of all sequences that were adopted."""
        return self._cache.queried_tokens

    @property
    def cached_hits(self) -> int:
        """Of ``cached_queries`` those whose KV entries were found."""
        return self._cache.hit_tokens

    @property
    def num_evictions(self) -> int:
        """Cached device blocks given to somebody else, their content lost or moved to the host."""
        return self._cache.num_evictions

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens of one sequence fill, the last perhaps partly."""
        return -(-num_tokens // self.block_size)

    def table(self, seq_id: int) -> list[int]:
        """A copy of the sequence's block table; empty if it holds nothing on the device."""
        return list(self._tables.get(seq_id, ()))

    # --- admission --------------------------------------------------------------------------------------------------

    def admission(self, num_blocks: int, promised: int = 0) -> Admission:
        """Whether a sequence that will need ``num_blocks`` fits beside ``promised`` blocks and the watermark."""
        if num_blocks > self.num_blocks:
            return Admission.NEVER
        room = self.num_available - promised - num_blocks >= self.watermark_blocks
        return Admission.OK if room else Admission.LATER

    def fits(self, num_blocks: int, promised: int = 0) -> bool:
        """The same without the watermark."""
        return num_blocks + promised <= self.num_available

    # --- growth -----------------------------------------------------------------------------------------------------

    def needed(self, writes: list[tuple[int, int, int]]) -> int:
        """Blocks that ``grow`` would take if they are available."""
        return self._demand(writes)[0]

    def grow(self, writes: list[tuple[int, int, int]]) -> list[Growth] | None:
        """Makes room for tokens to be computed; each write is (sequence id, tokens computed, tokens to hold).

        The block that the first new token falls into is copied if another table has it too, or if it is known to the
        prefix cache. Of several writers of a block that is only shared the last one writes in place; so does the only
        holder of a known block if nothing is left to copy it to, and the cache forgets it. A table must end with the
        block that the first new token falls into, or before.

        Returns:
            One growth for each write (do not change it); None, and no change at all, if too few blocks are available.
        """
        demand, sparable = self._demand(writes)
        if not demand:
            return [_UNCHANGED] * len(writes)
        if demand - sparable > self.device.num_available:
            return None
        fresh = self._cache.allocate(min(demand, self.device.num_available))
        spared = demand - len(fresh)
        growths = []
        for seq_id, num_computed, num_tokens in writes:
            table = self._tables.get(seq_id)
            if table is None:
                table = self._new_table(seq_id)
            changed = len(table)
            index = num_computed // self.block_size
            if index < changed and not self._may_write(table[index]):
                if spared and self._holders(table[index]) == 1:
                    self._cache.forget(table[index])
                    spared -= 1
                else:
                    self._copy_block(table, index, fresh.pop())
                    changed = index
            for _ in range(self.blocks_for(num_tokens) - len(table)):
                table.append(fresh.pop())
            growths.append(Growth(changed, table[changed:]))
        return growths

    def _demand(self, writes: list[tuple[int, int, int]]) -> tuple[int, int]:
        """Blocks that the writes take, and how many of them are copies that can be spared by forgetting content."""
        size, tables, is_private = self.block_size, self._tables, self.device.is_private
        demand = sparable = 0
        holders_left: dict[int, int] = {}
        for seq_id, num_computed, num_tokens in writes:
            table = tables.get(seq_id, _NO_BLOCKS)
            held = len(table)
            if num_tokens > held * size:
                demand += self.blocks_for(num_tokens) - held
            index = num_computed // size
            if index >= held or is_private(table[index]):
                continue
            block = table[index]
            holders = holders_left.get(block) or self._holders(block)
            holders_left[block] = holders - 1
            if self.device.is_kept(block):
                demand += 1
                sparable += holders == 1
            elif holders > 1:
                demand += 1
        return demand, sparable

    def _holders(self, block: int) -> int:
        """Tables that have this block."""
        return self.device.references(block) - self._moves.pins(block)

    def _may_write(self, block: int) -> bool:
        return not self.device.is_kept(block) and self._holders(block) == 1

    def _copy_block(self, table: list[int], index: int, target: int) -> None:
        source = table[index]
        self._moves.copy(source, target)
        self.device.release((source,))
        table[index] = target

    def _new_table(self, seq_id: int) -> list[int]:
        if seq_id in self._tables or self.is_swapped(seq_id):
            raise ValueError(f"sequence {seq_id} holds blocks already; free it first")
        table = self._tables[seq_id] = []
        return table

    # --- sharing ----------------------------------------------------------------------------------------------------

    def fork(self, parent_id: int, child_id: int) -> None:
        """Gives a new sequence all blocks of another one, which has the same tokens."""
        self.fork_prefix(parent_id, child_id, len(self._tables.get(parent_id, ())))

    def fork_prefix(self, parent_id: int, child_id: int, num_blocks: int) -> None:
        """Gives a new sequence the first ``num_blocks`` blocks of another one, whose tokens in them are the same.

        Raises:
            ValueError: the parent's table is shorter or on the host, or the child holds blocks.
        """
        if self.is_swapped(parent_id):
            raise ValueError(f"sequence {parent_id} is swapped out and cannot share blocks; swap it in first")
        parent = self._tables.get(parent_id, ())
        if num_blocks > len(parent):
            raise ValueError(f"sequence {parent_id} holds {len(parent)} blocks and cannot share {num_blocks}")
        if num_blocks == 0:
            return
        table = self._new_table(child_id)
        table.extend(parent[:num_blocks])
        self.device.share(table)
        registration = self._registrations.get(parent_id)
        if registration is not None and registration.count == _CLOSED:
            self._registrations[child_id] = registration
        elif registration is not None:  # names of tokens not computed yet are the parent's alone
            count = min(registration.count, num_blocks)
            self._registrations[child_id] = _Registration(registration.chain.first(count), count)

    def free(self, seq_id: int) -> None:
        """Gives back all blocks of a sequence, on the device or the host; nothing happens if it has none."""
        self._on_device.free(seq_id)
        self._on_host.free(seq_id)
        self._registrations.pop(seq_id, None)

    # --- swapping ---------------------------------------------------------------------------------------------------

    def is_swapped(self, seq_id: int) -> bool:
        """Whether the sequence's blocks are on the host."""
        return seq_id in self._on_host.by_id

    def swap_out(self, seq_ids: Iterable[int]) -> bool:
        """Moves all blocks of these sequences to the host, a shared one once.

        Returns:
            False, and no change, if the host has no room or one of the blocks only arrives with the moves of this step.
        """
        leaving = self._on_device.present(seq_ids)
        blocks = self._on_device.distinct_blocks(leaving)
        if len(blocks) > self.host.num_available or any(map(self._moves.is_arriving, blocks)):
            return False
        targets = dict(zip(blocks, self._cache.allocate_on_host(len(blocks)), strict=True))
        for block, target in targets.items():
            self._moves.swap_out(block, target)
        self._on_device.hand_over(leaving, targets, self._on_host)
        return True

    def swap_in(self, seq_ids: Iterable[int]) -> bool:
        """Moves all blocks of these sequences back into new device blocks, a shared one once.

        Returns:
            False, and no change, if too few device blocks are available.
        """
        coming = self._on_host.present(seq_ids)
        blocks = self._on_host.distinct_blocks(coming)
        if len(blocks) > self.num_available:
            return False
        targets = dict(zip(blocks, self._cache.allocate(len(blocks)), strict=True))
        for block, target in targets.items():
            self._moves.swap_in(block, target)
        self._on_host.hand_over(coming, targets, self._on_device)
        for seq_id in coming:  # known again when they are registered next
            registration = self._registrations.get(seq_id)
            if registration is not None and registration.count != _CLOSED:
                registration.count = 0
        return True

    def blocks_to_swap_in(self, seq_ids: Iterable[int]) -> int:
        """Device blocks that ``swap_in`` would take."""
        return len(self._on_host.distinct_blocks(seq_ids))

    # --- prefix cache -----------------------------------------------------------------------------------------------

    def chain(self, token_ids: list[int], salt: str) -> PrefixChain:
        """The names of the full blocks of these tokens, to be kept for ``match``; empty without prefix caching."""
        chain = PrefixChain(salt, self.block_size)
        if self._prefix_caching:
            chain.extend(token_ids, len(token_ids) // self.block_size)
        return chain

    def match(self, token_ids: list[int], chain: PrefixChain) -> PrefixMatch:
        """Finds KV entries for the beginning of these tokens, whose chain it is; changes nothing."""
        return self._cache.match(token_ids, chain)

    def cost(self, match: PrefixMatch) -> int:
        """Available blocks that adopting the match uses up; a copy of a block that agrees in part is ``grow``'s."""
        return self._cache.cost(match)

    def adopt(self, seq_id: int, match: PrefixMatch) -> None:
        """Makes the matched blocks the table of a new sequence. Nothing may be taken between ``match`` and this.

        To be called for an empty match too: it counts the query and spares ``register`` the hashing.

        Raises:
            OutOfBlocksError: the cost is more than what is available.
            ValueError: the sequence holds blocks.
        """
        if not self._prefix_caching:
            return
        table = self._new_table(seq_id)
        try:
            table.extend(self._cache.take(match))
        finally:
            if not table:
                del self._tables[seq_id]
        self._registrations[seq_id] = _Registration(match.chain.first(len(match.chain)), match.num_full)

    def register(self, seq_id: int, token_ids: list[int], num_computed: int, salt: str) -> None:
        """Makes the full blocks of the first ``num_computed`` tokens known, if prefix caching is on.

        Their KV entries must be there: computed by a step that the workers were given, or moved by this one. Costs one
        hash for each block that is new since the last call. Content that is known already stays where it is. Nothing
        happens if the sequence has no table on the device.
        """
        num_full = num_computed // self.block_size
        if not self._prefix_caching or not num_full:
            return
        registration = self._registrations.get(seq_id)
        if registration is not None and num_full <= registration.count:
            return
        table = self._tables.get(seq_id)
        if table is None:
            return
        if registration is None:
            registration = self._registrations[seq_id] = _Registration(PrefixChain(salt, self.block_size), 0)
        registration.chain.extend(token_ids, num_full)
        for index in range(registration.count, num_full):
            self._cache.add(registration.chain, index, table[index], token_ids)
        registration.count = num_full

    def reset_prefix_cache(self) -> None:
        """Forgets all content; cached blocks become free. Who holds blocks now registers none until it is freed."""
        self._cache.clear()
        if self._prefix_caching:
            for seq_id in (*self._tables, *self._on_host.by_id):
                self._registrations[seq_id] = _Registration(PrefixChain("", self.block_size), _CLOSED)

    # --- the step ---------------------------------------------------------------------------------------------------

    def take_moves(self) -> Moves:
        """Ends the planning of a step: its block moves, whose sources others may have from now on."""
        return self._moves.take()
