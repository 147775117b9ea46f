"""The blocks of one KV group: block tables that grow, copy-on-write, and swapping."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from octavo.config.kv_spec import GroupBlocks, max_window_seqs, window_blocks
from octavo.core.errors import ConfigError
from octavo.core.garbage import exclude_from_gc
from octavo.core.plan import TableChange
from octavo.core.stats import GroupState
from octavo.memory.block_pool import NO_BLOCK, BlockPool, BlockTables, held_blocks, num_freed
from octavo.memory.checkpoints import StateCache
from octavo.memory.prefix_cache import PrefixCache, first_block_read

if TYPE_CHECKING:
    from octavo.memory.prefix_cache import PrefixChain


_NO_BLOCKS: list[int] = []

#: Sequence id, tokens computed, tokens to hold.
Write = tuple[int, int, int]


class AllocStatus(enum.Enum):
    """Whether sequences can be admitted now, later, or never because all blocks together are too few."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BlocksNeeded:
    """Blocks that sequences will need until their tokens are computed."""

    #: In a group that keeps all tokens.
    blocks: int = 0
    #: By group, until the windows of these sequences are full, without a chunk, at most ``blocks``, as in a group
    #: without a window. Empty if no group has a window.
    windows: tuple[int, ...] = ()
    #: By group, blocks that are needed in any case.
    exact: tuple[int, ...] = ()
    #: Sequences that ``blocks`` are of, each of which may begin a block of states.
    num_seqs: int = 0

    def __add__(self, other: BlocksNeeded) -> BlocksNeeded:
        windows, exact = _sums(self.windows, other.windows), _sums(self.exact, other.exact)
        return BlocksNeeded(self.blocks + other.blocks, windows, exact, self.num_seqs + other.num_seqs)

    def __sub__(self, other: BlocksNeeded) -> BlocksNeeded:
        windows, exact = (tuple(-count for count in counts) for counts in (other.windows, other.exact))
        return self + BlocksNeeded(-other.blocks, windows, exact, -other.num_seqs)


def _sums(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(one, other, strict=True))) if one and other else one or other


class KVGroup:
    """Owns the pools of one group of layers with equal KV entries, the block tables over them and their prefix cache.

    In a group with an attention window, blocks that no later token reads are freed and their entries become
    ``NO_BLOCK``, so tables of all groups are indexed and grow alike.

    A group of recurrent states has larger blocks, a multiple of the others. A block is the state after its last token
    that is computed: the next token reads it and writes the next state there or, if the block is full, into a new one.
    So the group is one with a window of two tokens. It differs in that a state cannot be cut back to fewer tokens: the
    prefix cache keeps full blocks, and the last blocks of prompts and answers, as checkpoints (``StateCache``). Only
    draft tokens may be rejected, which a block has beside its state (``Kernels``): tokens of a block that were not
    drafts are computed for good.

    Invariants: a sequence has its table on the device or on the host, not both. The block that its next token is
    written into is in one table only and not in the prefix cache. Tables, pins and pending moves hold references.
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
        watermark: float = 0.0,
        max_num_batched_tokens: int = 0,
        cuts_prompts: bool = True,
    ) -> None:
        """``first_block`` and ``first_host_block`` are the first ids; the rest as in ``BlockManager``."""
        self.number, self.has_states = number, blocks.state_tokens is not None
        #: Tokens of a block of this group, and the others' blocks that are as long.
        self.block_size = blocks.state_tokens or block_size
        self.ratio, rest = divmod(self.block_size, block_size)
        if rest:
            raise ConfigError(f"checkpoints of states every {self.block_size} tokens are no multiple of {block_size}")
        self.block_bytes, self.window = blocks.block_bytes, blocks.window
        #: Blocks of one sequence's window.
        self.window_blocks = 0 if blocks.window is None else window_blocks(blocks.window, self.block_size)
        self.watermark_blocks = math.ceil(watermark * blocks.num_blocks)
        self.device = BlockPool(blocks.num_blocks, first_block)
        self.host = BlockPool(blocks.num_host_blocks, first_host_block)
        self.moves = PendingMoves(self.device, self.host)
        pools = self.device, self.host, self.moves
        #: The prefix cache of a group with states.
        self.checkpoints = StateCache(*pools, self.block_size, host_cache=host_cache) if self.has_states else None
        self.cache: PrefixCache = self.checkpoints or PrefixCache(*pools, self.window, host_cache=host_cache)
        self.on_device, self.on_host = BlockTables(self.device), BlockTables(self.host)
        self.tables = self.on_device.by_id
        self._max_num_batched_tokens, self._cuts_prompts = max_num_batched_tokens, cuts_prompts

    def state(self) -> GroupState:
        device = self.device
        counts = device.num_used, device.num_cached, device.num_free, device.num_pinned, self.host.num_used
        return GroupState(self.window, *counts, has_states=self.has_states)

    @property
    def max_window_seqs(self) -> int:
        """Sequences that always have enough blocks, whatever their lengths: each needs no more than its window."""
        if self.window is None:
            return 0
        return max_window_seqs(self.num_unpinned, self.window, self.block_size, self._max_num_batched_tokens)

    @property
    def num_unpinned(self) -> int:
        return self.device.num_blocks - self.device.num_pinned

    def chunk_blocks(self, windows: int) -> int:
        """Blocks that tokens in flight may take beside ``windows`` blocks of windows."""
        chunk = -(-self._max_num_batched_tokens // self.block_size)
        return max(1, min(chunk, self.num_unpinned - windows)) if self._cuts_prompts else chunk

    def until_full(self, num_seqs: int, seq_ids: Sequence[int]) -> int:
        """Blocks that ``num_seqs`` sequences may still need to fill their windows; ``seq_ids`` may hold blocks."""
        return num_seqs * self.window_blocks - sum(min(self.num_held(seq_id), self.window_blocks) for seq_id in seq_ids)

    def blocks_of(self, num_blocks: int, num_seqs: int) -> int:
        """At most so many blocks have the tokens of ``num_blocks`` blocks without states, of ``num_seqs`` sequences."""
        return min(num_blocks, (num_blocks + num_seqs * (self.ratio - 1)) // self.ratio)

    def needed(self, demand: BlocksNeeded) -> int:
        """Blocks of this group: those of all tokens, or if that is less, of windows and a chunk."""
        needed = self.blocks_of(demand.blocks, max(1, demand.num_seqs))
        if demand.windows and self.window is not None:
            windows = demand.windows[self.number]
            needed = min(needed, windows + self.chunk_blocks(windows))
        return needed + (demand.exact[self.number] if demand.exact else 0)

    def could_hold(self, demand: BlocksNeeded, num_seqs: int) -> bool:
        """``has_room`` if nothing else held a block."""
        return self.needed(demand) <= self.num_unpinned or num_seqs <= self.max_window_seqs

    def has_room(self, demand: BlocksNeeded, num_seqs: int, beside: int = 0) -> bool:
        """Whether these blocks and ``beside`` more are available, or the windows of ``num_seqs`` always are."""
        return self.needed(demand) + beside <= self.device.num_available or num_seqs <= self.max_window_seqs

    def can_grow(self, writes: list[Write]) -> bool:
        demand, avoidable_copies = self.demand(writes)
        return demand - avoidable_copies <= self.device.num_available

    def grow(self, writes: list[Write]) -> list[TableChange] | None:
        demand, avoidable_copies = self.demand(writes)
        if not demand:
            return []
        device = self.device
        if demand - avoidable_copies > device.num_available:
            return None
        new_blocks = self.cache.allocate(min(demand, device.num_available))
        copies_to_avoid = demand - len(new_blocks)
        size, tables, changes = self.block_size, self.tables, []
        for seq_id, num_computed, num_tokens in writes:
            table = tables.get(seq_id)
            if table is None:
                table = self.new_table(seq_id)
            changed = held = len(table)
            index = num_computed // size
            if index < held:
                block, num_tables = table[index], self._num_tables_with(table[index])
                if num_tables > 1 or device.is_kept(block):  # copy-on-write
                    if copies_to_avoid and num_tables == 1:
                        self.cache.on_device.forget(block)
                        copies_to_avoid -= 1
                    else:
                        table[index] = new_blocks.pop()
                        self.moves.copy(block, table[index])
                        device.release((block,))
                        changed = index
            for _ in range(held * size, num_tokens, size):
                table.append(new_blocks.pop())
            if changed < len(table):
                changes.append(TableChange(seq_id, changed, table[changed:], self.number))
        return changes

    def demand(self, writes: list[Write]) -> tuple[int, int]:
        """Blocks that the writes need, and the copies among them that dropping cached content avoids."""
        size, tables, is_private = self.block_size, self.tables, self.device.is_private
        demand = avoidable_copies = 0
        sharers_left: dict[int, int] = {}
        for seq_id, num_computed, num_tokens in writes:
            table = tables.get(seq_id, _NO_BLOCKS)
            held = len(table)
            if num_tokens > held * size:
                demand += -(-num_tokens // size) - held
            index = num_computed // size
            if index >= held or is_private(table[index]):
                continue
            block = table[index]
            sharers = sharers_left.get(block) or self._num_tables_with(block)
            sharers_left[block] = sharers - 1
            if self.device.is_kept(block):
                demand += 1
                avoidable_copies += sharers == 1
            elif sharers > 1:
                demand += 1
        return demand, avoidable_copies

    def free_outside_window(self, seq_id: int, num_computed: int, max_blocks: int) -> None:
        """Frees those of the first ``max_blocks`` blocks that no token from position ``num_computed`` on reads.

        ``max_blocks`` counts blocks of groups without states.
        """
        table = self.tables.get(seq_id, _NO_BLOCKS)
        end = start = min(first_block_read(num_computed, self.window, self.block_size), max_blocks // self.ratio)
        while start > 0 and table[start - 1] != NO_BLOCK:
            start -= 1
        if start < end:
            self.device.release(table[start:end])
            table[start:end] = [NO_BLOCK] * (end - start)

    def _num_tables_with(self, block: int) -> int:
        return self.device.references(block) - self.moves.pins(block)

    def new_table(self, seq_id: int) -> list[int]:
        if seq_id in self.tables or seq_id in self.on_host.by_id:
            raise ValueError(f"sequence {seq_id} holds blocks already; free it first")
        table: list[int] = exclude_from_gc([])
        self.tables[seq_id] = table
        return table

    def table(self, seq_id: int) -> list[int]:
        """A copy of a table on the device, for workers: ``NO_BLOCK`` is replaced by a valid id, which is not read."""
        table = self.tables.get(seq_id, _NO_BLOCKS)
        freed = num_freed(table)
        return [self.device.first] * freed + table[freed:]

    def num_held(self, seq_id: int) -> int:
        table = self.tables.get(seq_id, _NO_BLOCKS)
        return len(table) - num_freed(table)

    def holds_window_at(self, seq_id: int, num_blocks: int) -> bool:
        """Whether a sequence still has the blocks that the token after its first ``num_blocks`` blocks reads.

        The blocks are those of groups without states; all their tokens are computed, and perhaps more.
        """
        whole, rest = divmod(num_blocks, self.ratio)
        if rest:
            return False
        start = first_block_read(whole * self.block_size, self.window, self.block_size)
        return start >= whole or self.tables[seq_id][start] != NO_BLOCK

    def share(self, parent_id: int, child_id: int, num_blocks: int) -> None:
        """``num_blocks`` counts blocks of groups without states."""
        table = self.new_table(child_id)
        table.extend(self.tables[parent_id][: -(-num_blocks // self.ratio)])
        self.device.share(held_blocks(table))

    def shrink(self, seq_id: int, num_tokens: int) -> None:
        table, kept = self.tables[seq_id], -(-num_tokens // self.block_size)
        if len(table) > kept:
            self.device.release(table[kept:])
            del table[kept:]

    def can_pin(self, chain: PrefixChain, seq_id: int, full: int) -> bool:
        """Whether the sequence still has the blocks to pin, or the prefix cache has those outside its window."""
        table = self.tables[seq_id]
        return self.has_states or all(self.cache.can_pin(chain, i, table[i]) for i in self._pinned(chain, full))

    def pin(self, chain: PrefixChain, seq_id: int, token_ids: list[int], full: int) -> list[int]:
        """Pins in the prefix cache the blocks that a token after these reads; returns them.

        A look-up matches the first ``full`` tokens in full blocks of every group, and then the block after them.
        """
        table, size = self.tables[seq_id], self.block_size
        if self.checkpoints is not None:
            return [self.checkpoints.pin_state(chain, token_ids, table[-1])]
        return [
            self.cache.pin(chain, index, table[index], chain.content(token_ids, index * size, index * size + size))
            for index in self._pinned(chain, full)
        ]

    def _pinned(self, chain: PrefixChain, full: int) -> range:
        return range(first_block_read(full, self.window, self.block_size), len(chain))

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        blocks = self.on_device.distinct_blocks(seq_ids)
        return len(blocks) <= self.host.num_available and not any(map(self.moves.is_target, blocks))

    def swap_out(self, seq_ids: Sequence[int]) -> None:
        present = self.on_device.present(seq_ids)
        blocks = self.on_device.distinct_blocks(present)
        targets = dict(zip(blocks, self.cache.allocate_on_host(len(blocks)), strict=True))
        for block, target in targets.items():
            self.moves.swap_out(block, target)
        self.on_device.move_to(self.on_host, present, targets)

    def swap_in(self, seq_ids: list[int]) -> None:
        blocks = self.on_host.distinct_blocks(seq_ids)
        targets = dict(zip(blocks, self.cache.allocate(len(blocks)), strict=True))
        for block, target in targets.items():
            self.moves.swap_in(block, target)
        self.on_host.move_to(self.on_device, seq_ids, targets)


class Moves(NamedTuple):
    """Block moves of a step, which workers do before they compute, in this order."""

    swap_out: list[tuple[int, int]]  # (device block, host block)
    swap_in: list[tuple[int, int]]  # (host block, device block)
    copy: list[tuple[int, int]]  # (source, target), both on the device


class PendingMoves:
    """Collects the block moves of the step that is planned, and prevents conflicts between them.

    All swaps out are done before all swaps in, these before all copies, and these before the step writes KV entries. So
    a device block that is swapped out can be allocated again at once. Every other source or target has a reference (a
    *pin*) until ``take``: no block is the target of two moves, no source is overwritten before it is read.
    """

    def __init__(self, device: BlockPool, host: BlockPool) -> None:
        self._device, self._host = device, host
        self._moves = Moves([], [], [])
        #: Pins of device blocks.
        self._pins: dict[int, int] = {}
        #: By device block that is the target of a move: the source of a copy, None for content from elsewhere.
        self._targets: dict[int, int | None] = {}

    def pins(self, block: int) -> int:
        return self._pins.get(block, 0)

    def is_target(self, block: int) -> bool:
        """Whether a move of this step writes this device block: then it cannot be swapped out in this step."""
        return block in self._targets

    def swap_out(self, device_block: int, host_block: int) -> None:
        self._moves.swap_out.append((device_block, host_block))
        self._host.share((host_block,))

    def swap_in(self, host_block: int, device_block: int) -> None:
        self._moves.swap_in.append((host_block, device_block))
        self._host.share((host_block,))
        self._pin(device_block)
        self._targets[device_block] = None

    def copy(self, source: int, target: int) -> None:
        """A copy of a copy is made from the original, as all copies are done at once."""
        origin = self._targets.get(source)
        source = source if origin is None else origin
        self._moves.copy.append((source, target))
        self._pin(source)
        self._pin(target)
        self._targets[target] = source

    def receive(self, block: int) -> None:
        """The step writes this block, beside the swaps in, with content from elsewhere."""
        self._pin(block)
        self._targets[block] = None

    def _pin(self, block: int) -> None:
        self._device.share((block,))
        self._pins[block] = self._pins.get(block, 0) + 1

    def take(self) -> Moves:
        moves = self._moves
        if moves.swap_out or moves.swap_in or moves.copy or self._pins:
            self._moves = Moves([], [], [])
            self._host.release([host for _, host in moves.swap_out])
            self._host.release([host for host, _ in moves.swap_in])
            self._device.release([block for block, count in self._pins.items() for _ in range(count)])
            self._pins.clear()
            self._targets.clear()
        return moves
