"""The block manager: gives KV cache blocks to sequences, shares them copy-on-write, swaps and frees them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from octavo.config.kv_spec import GroupBlocks
from octavo.core.plan import TableChange
from octavo.core.stats import GroupState, sum_groups
from octavo.memory.block_pool import NO_BLOCK, held_blocks
from octavo.memory.kv_group import AllocStatus, BlocksNeeded, KVGroup, Moves, Write
from octavo.memory.prefix_cache import SequencePrefixes
from octavo.memory.retention import Retention
from octavo.memory.stored import StoredBlocks, StoreLimits

_NOTHING = BlocksNeeded()


class BlockManager:
    """Owns the block tables of all sequences; vLLM's ``BlockSpaceManager``, and ``KVCacheManager`` since V1.

    A table maps the logical blocks of a sequence (its index; vLLM's ``LogicalTokenBlock``) to physical blocks, the ids
    of a ``BlockPool``. Every table and every pin holds a reference to each of its blocks.

    Sharing and copy-on-write: ``fork`` puts the blocks of a parent into the table of a child, and ``prefixes.adopt``
    puts cached blocks into the table of a new sequence. Before a sequence writes into a block that another table has
    too, or that the prefix cache keeps, ``grow`` replaces it in that sequence's table by a new block and adds the copy
    to the moves of the step (``take_moves``). Only the last block of a table is ever written.

    Layers with equal KV specs form a ``KVGroup`` with pools and tables of its own. Every operation is done in all
    groups or in none, so a sequence has a table in each group or in none, all on the device or all on the host. Block
    ids are unique across the groups, on the device and on the host. Callers count in blocks that keep all tokens
    (``BlocksNeeded`` converts them for windows); statistics are sums over the groups.
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
        cuts_prompts: bool = True,
        hold_share: float = 0.5,
        stores: StoreLimits | None = None,
    ) -> None:
        """Creates the pools.

        Args:
            num_blocks: Device blocks of the only group (without a window), or the blocks of each group; the group that
                keeps the most blocks per sequence comes first. Without any group sequences hold no blocks.
            block_size: Tokens per block, in every group.
            num_host_blocks: Host blocks, if ``num_blocks`` is an integer.
            watermark: Share of each group's blocks that admission leaves free.
            prefix_caching: Whether full blocks are kept and matched by their content.
            host_cache: Whether the prefix cache may use host blocks that no swapped sequence needs.
            max_num_batched_tokens: Tokens of all steps in flight, for which windowed groups keep room.
            cuts_prompts: Whether prompts may be computed in chunks of any length (see ``max_chunk``).
            hold_share: Share of the device blocks that callers may hold (see ``Retention``).
            stores: Limits of the KV stores behind the prefix cache, if there are any.
        """
        sizes = [GroupBlocks(num_blocks, num_host_blocks)] if isinstance(num_blocks, int) else list(num_blocks)
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
                watermark=watermark,
                max_num_batched_tokens=max_num_batched_tokens,
                cuts_prompts=cuts_prompts,
            )
            self.groups.append(group)
            first, first_host = first + size.num_blocks, first_host + size.num_host_blocks
        self._first = self.groups[0] if self.groups else KVGroup(0, GroupBlocks(0), block_size)
        self._windowed = [group for group in self.groups if group.window is not None]
        #: Blocks between two checkpoints of states; 1 without states.
        self.checkpoint_blocks = max((group.ratio for group in self.groups), default=1)
        self._cuts_prompts = cuts_prompts
        self.prefixes = SequencePrefixes(self.groups, block_size, enabled=prefix_caching)
        self.pinned = PinnedPrefixes(self.groups, self.prefixes)
        #: None without KV stores.
        self.stored: StoredBlocks | None = None
        if stores is not None and self.prefixes.enabled:
            self.stored = self.prefixes.stored = StoredBlocks(self.groups, stores)
        self.retention = Retention(self.groups, block_size, hold_share, enabled=prefix_caching)

    def demand(
        self, num_blocks: int, num_seqs: int = 1, seq_ids: Sequence[int] = (), own_blocks: int = 0
    ) -> BlocksNeeded:
        """The demand of sequences that need ``num_blocks`` more blocks in groups without a window, fewer in others.

        ``num_seqs`` fill windows; those of ``seq_ids`` may hold blocks; ``own_blocks`` are for their future forks.
        """
        if not self._windowed:
            return BlocksNeeded(num_blocks)
        # A fork begins blocks of its own, too.
        most = [group.blocks_of(num_blocks, num_seqs + own_blocks) for group in self.groups]
        windows = (
            whole if group.window is None else min(whole, group.until_full(num_seqs, seq_ids) + own_blocks)
            for group, whole in zip(self.groups, most, strict=True)
        )
        return BlocksNeeded(num_blocks, tuple(windows), num_seqs=num_seqs + own_blocks)

    def can_allocate(self, demand: BlocksNeeded, reserved: BlocksNeeded = _NOTHING, num_seqs: int = 1) -> AllocStatus:
        """Whether sequences can be admitted beside ``reserved`` blocks and the watermark.

        ``num_seqs``: sequences that will hold blocks on the device, the admitted ones included.
        """
        if not all(group.could_hold(demand, num_seqs) for group in self.groups):
            return AllocStatus.NEVER
        fit = all(group.has_room(demand + reserved, num_seqs, group.watermark_blocks) for group in self.groups)
        return AllocStatus.OK if fit else AllocStatus.LATER

    def shortage(self, demand: BlocksNeeded, num_seqs: int) -> str:
        """What sequences that can never be admitted need, and what there is of it, in words."""
        short = next((group for group in self.groups if not group.could_hold(demand, num_seqs)), self._first)
        if not short.has_states:
            return f"{demand.blocks} KV cache blocks, but there are {self.pinned.capacity}"
        return f"{short.needed(demand)} recurrent states at once, but the KV cache has {short.num_unpinned}"

    def fits(self, demand: BlocksNeeded, reserved: BlocksNeeded = _NOTHING, num_seqs: int = 1) -> bool:
        """``can_allocate`` without the watermark."""
        return all(group.has_room(demand + reserved, num_seqs) for group in self.groups)

    @property
    def max_chunk(self) -> int:
        """Tokens of the longest prompt chunk for which there are blocks beside its window."""
        if not self._windowed or not self._cuts_prompts:
            return sys.maxsize
        return min(group.chunk_blocks(group.window_blocks) * group.block_size for group in self._windowed)

    def grow(
        self, writes: list[Write], behind_windows: Callable[[], Iterable[tuple[int, int]]] | None = None
    ) -> list[TableChange] | None:
        """Allocates blocks for the tokens of a step (vLLM: ``append_slots``, ``allocate_slots``; lookahead slots, too).

        A table must not be longer than up to the block that the first new token is written into. If several sequences
        write into a shared block that is not cached, all but the last one get a copy. If no block is available for the
        copy of a cached block that one table has, the cache forgets the block and the sequence writes into it. Blocks
        outside a window are freed, so ``tokens computed`` must not decrease between calls. If blocks are short,
        ``behind_windows`` names other sequences that may hold more than their windows, with their tokens computed.

        Returns the changes of all tables (not to be modified); None, and no table has grown, if blocks are too few.
        """
        if not self._windowed and len(self.groups) == 1:
            return self._first.grow(writes)
        caching = self.prefixes.enabled
        if caching:
            registered = self.prefixes.num_registered
            self.free_outside_windows((*write[:2], registered(write[0])) for write in writes)
        if not caching or not self._can_grow(writes):  # free blocks that are not cached yet, too
            self.free_outside_windows((*write[:2], sys.maxsize) for write in writes)
        if self._windowed and behind_windows is not None and not self._can_grow(writes):
            self.free_outside_windows((*sequence, sys.maxsize) for sequence in behind_windows())
        if not self._can_grow(writes):
            return None
        return [change for group in self.groups for change in group.grow(writes) or ()]

    def _can_grow(self, writes: list[Write]) -> bool:
        return all(group.can_grow(writes) for group in self.groups)

    def slots_end(self, num_tokens: int, num_new: int) -> int:
        """The tokens that a sequence of ``num_tokens`` may hold before the next ``grow``."""
        # With windows, the blocks behind the window are to be freed first after several new tokens.
        return num_tokens if num_new > 1 and self._windowed else num_tokens + -num_tokens % self.block_size

    def free_outside_windows(self, sequences: Iterable[tuple[int, int, int]]) -> None:
        """Frees blocks that no later token reads: of each (sequence id, tokens computed, blocks that may be freed)."""
        for seq_id, num_computed, max_blocks in sequences:
            for group in self._windowed:
                group.free_outside_window(seq_id, num_computed, max_blocks)

    def shrink(self, seq_id: int, num_tokens: int) -> None:
        """Frees the blocks of a sequence behind those of its first ``num_tokens`` tokens; none of them is shared."""
        for group in self.groups:
            group.shrink(seq_id, num_tokens)

    def free(self, seq_id: int) -> None:
        """Frees all blocks of a sequence, on the device or the host; no effect if it has none."""
        for group in self.groups:
            group.on_device.free(seq_id)
            group.on_host.free(seq_id)
        self.prefixes.free(seq_id)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Shares all blocks of a sequence with a new one that has the same computed tokens."""
        num_blocks = self.num_entries(parent_id)
        self._check_shareable(parent_id, num_blocks)
        self._share(parent_id, child_id, num_blocks)

    def fork_prefix(self, parent_id: int, child_id: int, num_blocks: int) -> bool:
        """Shares the first ``num_blocks`` blocks of a sequence with a new one that has the same tokens in them.

        False, and nothing is changed, if blocks that the child would read are freed: outside the parent's window.
        """
        self._check_shareable(parent_id, num_blocks)
        if not all(num_blocks == 0 or group.holds_window_at(parent_id, num_blocks) for group in self._windowed):
            return False
        self._share(parent_id, child_id, num_blocks)
        return True

    def _check_shareable(self, parent_id: int, num_blocks: int) -> None:
        if self.is_swapped(parent_id):
            raise ValueError(f"sequence {parent_id} is swapped out and cannot share blocks; swap it in first")
        if num_blocks > (held := self.num_entries(parent_id)):
            raise ValueError(f"sequence {parent_id} holds {held} blocks and cannot share {num_blocks}")

    def _share(self, parent_id: int, child_id: int, num_blocks: int) -> None:
        if num_blocks:
            for group in self.groups:
                group.share(parent_id, child_id, num_blocks)
            self.prefixes.fork(parent_id, child_id, num_blocks)

    def is_swapped(self, seq_id: int) -> bool:
        return seq_id in self._first.on_host.by_id

    def swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Moves all blocks of these sequences to the host, shared blocks once.

        False, and nothing is changed, if host blocks are too few or a block is the target of a move of this step.
        """
        if not all(group.can_swap_out(seq_ids) for group in self.groups):
            return False
        for group in self.groups:
            group.swap_out(seq_ids)
        return True

    def swap_in(self, seq_ids: Sequence[int]) -> bool:
        """Moves all blocks of these sequences to the device; False, and nothing is changed, if blocks are too few."""
        needed = self.blocks_to_swap_in(seq_ids)
        if any(count > group.device.num_available for count, group in zip(needed, self.groups, strict=True)):
            return False
        swapped = self._first.on_host.present(seq_ids)
        for group in self.groups:
            group.swap_in(swapped)
        self.prefixes.move(swapped)
        return True

    def blocks_to_swap_in(self, seq_ids: Sequence[int]) -> tuple[int, ...]:
        """Device blocks that ``swap_in`` allocates, by group."""
        return tuple(len(group.on_host.distinct_blocks(seq_ids)) for group in self.groups)

    def take_moves(self) -> Moves:
        """The block moves of the step that is planned; their sources can be allocated from now on."""
        moves = self._first.moves.take()
        for group in self.groups[1:]:
            more = group.moves.take()
            moves = Moves(*(one + other for one, other in zip(moves, more, strict=True)))
        return moves

    def reset_prefix_cache(self) -> None:
        """Drops all cached content that is not pinned. Sequences that hold blocks now will register none of them."""
        self.prefixes.clear((*self._first.tables, *self._first.on_host.by_id))
        if self.stored is not None:
            self.stored.clear()

    def clear(self) -> None:
        """Frees the blocks of all sequences, drops moves that no plan has and cached content that is not pinned."""
        for seq_id in {i for group in self.groups for tables in (group.tables, group.on_host.by_id) for i in tables}:
            self.free(seq_id)
        self.take_moves()
        self.reset_prefix_cache()
        if (state := self.state).used or state.host_used:  # lost before
            raise RuntimeError(f"{state.used} blocks and {state.host_used} on the host belong to no sequence")

    def release_prefix(self, name: str) -> None:
        """Unpins a shared prefix, or ends its holding."""
        self.pinned.remove(name)
        self.retention.release(name)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def table(self, seq_id: int, group: int = 0) -> list[int]:
        """A copy of the sequence's block table in a group; empty if it has no table on the device."""
        return self.groups[group].table(seq_id)

    def tables(self, seq_id: int) -> list[TableChange]:
        """The sequence's block tables in all groups as changes of empty tables, for a plan that adds the sequence."""
        return [TableChange(seq_id, 0, group.table(seq_id), group.number) for group in self.groups]

    def num_entries(self, seq_id: int) -> int:
        """Length of each of the sequence's tables on the device, blocks freed outside a window included."""
        return len(self._first.tables.get(seq_id, ()))

    def held(self, seq_id: int) -> Iterator[tuple[int, int]]:
        """The device blocks of a sequence in all groups, as (index in the table, block)."""
        tables = (enumerate(group.tables.get(seq_id, ())) for group in self.groups)
        return ((index, block) for table in tables for index, block in table if block != NO_BLOCK)

    def held_bytes(self, seq_id: int) -> int:
        """Bytes of the device blocks of a sequence, in all groups, in the unit of ``GroupBlocks.block_bytes``."""
        return sum(group.num_held(seq_id) * group.block_bytes for group in self.groups)

    @property
    def num_blocks(self) -> int:
        return sum(group.device.num_blocks for group in self.groups)

    @property
    def num_available(self) -> int:
        """Device blocks that can be allocated in each group: this number of sequences may write one token each."""
        if len(self.groups) == 1:
            return self._first.device.num_available
        return min((group.device.num_available for group in self.groups), default=sys.maxsize)

    @property
    def num_tables(self) -> int:
        """Sequences that hold blocks, on the device or the host."""
        return len(self._first.tables) + len(self._first.on_host.by_id)

    @property
    def state(self) -> GroupState:
        return sum_groups([group.state() for group in self.groups])


class PinnedPrefixes:
    """Owns the pins of shared prefixes (Kwon et al. 2023, section 4.4): by name, their blocks in each KV group.

    A pinned block is looked up like any block of the prefix cache, the last one even if it is partly filled. It is
    never evicted or written, survives a reset of the cache, and counts as pinned alone. In a group with an attention
    window, these are the blocks in the window at the end of the full ones, and the last: only a prompt with the whole
    prefix matches them.
    """

    def __init__(self, groups: Sequence[KVGroup], prefixes: SequencePrefixes) -> None:
        self._groups, self._prefixes = groups, prefixes
        self._blocks: dict[str, list[list[int]]] = {}

    @property
    def capacity(self) -> str:
        """The blocks for sequences, in words."""
        if not self._groups:
            return "none"
        first = self._groups[0]
        beside = f" beside the {first.device.num_pinned} of shared prefixes" if self._blocks else ""
        return f"{first.num_unpinned} blocks{beside}"

    def add(
        self, name: str, seq_id: int, token_ids: list[int], context: str | bytes, beside: BlocksNeeded
    ) -> AllocStatus:
        """Pins the blocks of a sequence that has computed these tokens and no others, until ``remove``.

        LATER if the prefix cache was reset or blocks were lost since the sequence began, NEVER if a sequence with the
        demand ``beside`` would not fit beside the pinned blocks; nothing is pinned then.
        """
        chain = self._prefixes.chain(token_ids, context)
        chain.extend(token_ids, -(-len(token_ids) // chain.block_size))  # with the last block, even if partly filled
        may_register = self._prefixes.may_register(seq_id)
        full = len(token_ids) // chain.block_size * chain.block_size
        if not (may_register and all(group.can_pin(chain, seq_id, full) for group in self._groups)):
            return AllocStatus.LATER
        if name in self._blocks:
            raise ValueError(f"a prefix {name!r} is pinned already")
        self._blocks[name] = [group.pin(chain, seq_id, token_ids, full) for group in self._groups]
        if all(group.could_hold(beside, num_seqs=1) for group in self._groups):
            return AllocStatus.OK
        self.remove(name)
        return AllocStatus.NEVER

    def remove(self, name: str) -> None:
        for group, blocks in zip(self._groups, self._blocks.pop(name, ()), strict=False):
            group.cache.on_device.unpin(blocks)

    def clear(self) -> None:
        for name in list(self._blocks):
            self.remove(name)


class Release:
    """Counts blocks that would be available if some sequences gave up their references; nothing is changed."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self._groups = groups
        #: By block, whose ids are unique across the groups.
        self.references: dict[int, int] = {}
        #: By KV group: device blocks without any other reference, of tables or of pins.
        self.counts = [0] * len(groups)

    def add(self, seq_ids: Iterable[int], sign: int = 1) -> None:
        """Drops the references of these sequences; takes that back if ``sign`` is -1."""
        references = self.references
        for seq_id in seq_ids:
            for number, group in enumerate(self._groups):
                for block in held_blocks(group.tables.get(seq_id, [])):
                    before = references.get(block, 0)
                    references[block] = before + sign
                    self.counts[number] += sign * (max(before, before + sign) == group.device.references(block))
