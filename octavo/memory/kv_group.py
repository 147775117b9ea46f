"""The blocks of one group of layers: tables that grow, copy-on-write, and swapping."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.plan import TableChange
from octavo.memory.block_pool import BlockPool
from octavo.memory.block_tables import NO_BLOCK, BlockTables, held_blocks
from octavo.memory.kv_groups import GroupBlocks, max_window_seqs
from octavo.memory.moves import PendingMoves
from octavo.memory.prefix_cache import PrefixCache, first_block_read
from octavo.memory.prefix_chain import PrefixChain

_NO_BLOCKS: list[int] = []

#: Sequence id, tokens computed, tokens to hold.
Write = tuple[int, int, int]


class KVGroup:
    """Owns the pools of one group of layers, the block tables over them by sequence id, and what is known of blocks.

    A table has a block for every ``block_size`` positions. In a group with an attention window, blocks that no token
    still to be computed reads are given back, and ``NO_BLOCK`` stands in their place; so tables of all groups are
    indexed alike, and grow alike.

    Invariants: a sequence has its table on the device or on the host, not both. A block that the next token of a
    sequence is written into is in one table only and not known to the prefix cache. On both levels used + free + cached
    blocks = all; a block is used by tables and, until the moves of the step are taken, by these.
    """

    def __init__(
        self,
        number: int,
        blocks: GroupBlocks,
        block_size: int,
        *,
        first_block: int = 0,
        first_host_block: int = 0,
        host_cache: bool = False,
        max_num_batched_tokens: int = 0,
    ) -> None:
        """Takes sizes in blocks, ``block_size`` in tokens."""
        self.number = number
        self.block_size = block_size
        self.window = blocks.window
        self.device = BlockPool(blocks.num_blocks, first_block)
        self.host = BlockPool(blocks.num_host_blocks, first_host_block)
        self.moves = PendingMoves(self.device, self.host)
        self.cache = PrefixCache(self.device, self.host, self.moves, self.window, host_cache=host_cache)
        self.on_device = BlockTables(self.device)
        self.on_host = BlockTables(self.host)
        self.tables = self.on_device.by_id
        #: Sequences that have blocks enough whatever their lengths, because each needs no more than its window.
        self.max_window_seqs = (
            max_window_seqs(blocks.num_blocks, self.window, block_size, max_num_batched_tokens) if self.window else 0
        )

    def has_room(self, num_blocks: int, num_seqs: int) -> bool:
        """Whether this many blocks are available, or ``num_seqs`` sequences, all that hold any, never need more."""
        return num_blocks <= self.device.num_available or num_seqs <= self.max_window_seqs

    # --- growth -----------------------------------------------------------------------------------------------------

    def lacks(self, writes: list[Write]) -> bool:
        """Whether ``grow`` would find too few blocks."""
        demand, sparable = self.demand(writes)
        return demand - sparable > self.device.num_available

    def grow(self, writes: list[Write]) -> list[TableChange] | None:
        """Makes room for tokens to be computed, as ``BlockManager.grow`` says for all groups."""
        demand, sparable = self.demand(writes)
        if not demand:
            return []
        if demand - sparable > self.device.num_available:
            return None
        fresh = self.cache.allocate(min(demand, self.device.num_available))
        spared = demand - len(fresh)
        changes = []
        for seq_id, num_computed, num_tokens in writes:
            table = self.tables.get(seq_id)
            if table is None:
                table = self.new_table(seq_id)
            changed = len(table)
            index = num_computed // self.block_size
            if index < changed and not self._may_write(table[index]):
                if spared and self._holders(table[index]) == 1:
                    self.cache.forget(table[index])
                    spared -= 1
                else:
                    self._copy_block(table, index, fresh.pop())
                    changed = index
            for _ in range(-(-num_tokens // self.block_size) - len(table)):
                table.append(fresh.pop())
            if changed < len(table):
                changes.append(TableChange(seq_id, changed, table[changed:], self.number))
        return changes

    def demand(self, writes: list[Write]) -> tuple[int, int]:
        """Blocks that the writes take, and how many of them are copies that can be spared by forgetting content."""
        size, tables, is_private = self.block_size, self.tables, self.device.is_private
        demand = sparable = 0
        holders_left: dict[int, int] = {}
        for seq_id, num_computed, num_tokens in writes:
            table = tables.get(seq_id, _NO_BLOCKS)
            held = len(table)
            if num_tokens > held * size:
                demand += -(-num_tokens // size) - held
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

    def leave_window(self, seq_id: int, num_computed: int, most: int) -> None:
        """Gives back blocks that are read no more once ``num_computed`` tokens are computed, of the first ``most``."""
        table = self.tables.get(seq_id, _NO_BLOCKS)
        end = start = min(first_block_read(num_computed, self.window, self.block_size), most)
        while start > 0 and table[start - 1] != NO_BLOCK:
            start -= 1
        if start < end:
            self.device.release(table[start:end])
            table[start:end] = [NO_BLOCK] * (end - start)

    def _holders(self, block: int) -> int:
        """Tables that have this block."""
        return self.device.references(block) - self.moves.pins(block)

    def _may_write(self, block: int) -> bool:
        return not self.device.is_kept(block) and self._holders(block) == 1

    def _copy_block(self, table: list[int], index: int, target: int) -> None:
        source = table[index]
        self.moves.copy(source, target)
        self.device.release((source,))
        table[index] = target

    # --- tables -----------------------------------------------------------------------------------------------------

    def new_table(self, seq_id: int) -> list[int]:
        """The empty table of a sequence that holds nothing.

        Raises:
            ValueError: it holds blocks.
        """
        if seq_id in self.tables or seq_id in self.on_host.by_id:
            raise ValueError(f"sequence {seq_id} holds blocks already; free it first")
        table = self.tables[seq_id] = []
        return table

    def table(self, seq_id: int) -> list[int]:
        """A copy of a table on the device, for workers: some block of the group stands for each that was given back."""
        table = self.tables.get(seq_id, _NO_BLOCKS)
        held = held_blocks(table)
        return [self.device.first] * (len(table) - len(held)) + held

    def is_read_from(self, seq_id: int, num_blocks: int) -> bool:
        """Whether a sequence still holds all that is read after its first ``num_blocks`` blocks."""
        start = first_block_read(num_blocks * self.block_size, self.window, self.block_size)
        return start >= num_blocks or self.tables[seq_id][start] != NO_BLOCK

    def share(self, parent_id: int, child_id: int, num_blocks: int) -> None:
        """Gives a new sequence the first blocks of another one."""
        table = self.new_table(child_id)
        table.extend(self.tables[parent_id][:num_blocks])
        self.device.share(held_blocks(table))

    def free(self, seq_id: int) -> None:
        """Gives back all blocks of a sequence, on the device or the host."""
        self.on_device.free(seq_id)
        self.on_host.free(seq_id)

    def register(self, chain: PrefixChain, seq_id: int, start: int, stop: int, token_ids: list[int]) -> None:
        """Makes blocks ``start`` to ``stop`` of a sequence known, which the chain names, if it still holds them."""
        table, size = self.tables[seq_id], self.block_size
        for index in range(start, stop):
            if table[index] != NO_BLOCK:
                content = chain.content(token_ids, index * size, index * size + size)
                self.cache.add(chain, index, table[index], content)

    # --- swapping ---------------------------------------------------------------------------------------------------

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Whether the host has room, and none of the blocks only arrives with the moves of this step."""
        blocks = self.on_device.distinct_blocks(seq_ids)
        return len(blocks) <= self.host.num_available and not any(map(self.moves.is_arriving, blocks))

    def swap_out(self, seq_ids: Sequence[int]) -> None:
        """Moves all blocks of these sequences to the host, a shared one once."""
        leaving = self.on_device.present(seq_ids)
        blocks = self.on_device.distinct_blocks(leaving)
        targets = dict(zip(blocks, self.cache.allocate_on_host(len(blocks)), strict=True))
        for block, target in targets.items():
            self.moves.swap_out(block, target)
        self.on_device.hand_over(leaving, targets, self.on_host)

    def can_swap_in(self, seq_ids: Sequence[int]) -> bool:
        """Whether the device has room."""
        return len(self.on_host.distinct_blocks(seq_ids)) <= self.device.num_available

    def swap_in(self, coming: list[int]) -> None:
        """Moves all blocks of these swapped sequences back into new device blocks, a shared one once."""
        blocks = self.on_host.distinct_blocks(coming)
        targets = dict(zip(blocks, self.cache.allocate(len(blocks)), strict=True))
        for block, target in targets.items():
            self.moves.swap_in(block, target)
        self.on_host.hand_over(coming, targets, self.on_device)
