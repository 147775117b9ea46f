"""Which blocks hold a sequence's KV entries, who may write into them, and whether there is room for more."""

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
from octavo.memory.prefix_cache import check_room
from octavo.memory.prefix_chain import FeatureSpan, PrefixChain
from octavo.memory.prefix_match import PrefixMatch, find_match


class Admission(enum.Enum):
    """Whether a sequence may begin: now, later, or never because all blocks together are too few."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


#: Blocks registered of a sequence whose blocks must not become known.
_CLOSED = sys.maxsize


@dataclass(slots=True)
class _Registration:
    """How far a sequence's blocks are named, and how many of them were offered to the prefix cache."""

    chain: PrefixChain
    count: int


class BlockManager:
    """Owns the blocks of all groups of layers, and how far each sequence's blocks are known to the prefix cache.

    Every operation is done in all groups or in none, so a sequence has a table in each group or in none, all of them
    on the device or all on the host. Block numbers are unique over the groups: those of a group follow those of the one
    before it, on the device and on the host, so a move needs no mention of its group. ``KVGroup`` has the invariants of
    tables and blocks.

    Callers count in blocks of the first group, which is the one that keeps most; the figures are those of the first
    group, too.
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
        """Takes sizes in blocks, ``block_size`` in tokens, and the share of blocks to keep free at admission.

        Args:
            num_blocks: Of the device, if there is one group that keeps all positions; or the blocks of each group, the
                group that keeps most first.
            block_size: Tokens of a block, in every group.
            num_host_blocks: Of the only group.
            watermark: Share of the first group's blocks.
            prefix_caching: Whether blocks become known by their content.
            host_cache: Lets the prefix cache use host blocks that no swapped sequence needs.
            max_num_batched_tokens: Tokens of the steps in flight at once, for which windowed groups keep room.

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
        #: Tokens of all sequences that were adopted, and those of them whose KV entries were found.
        self.cached_queries = 0
        self.cached_hits = 0

    # --- figures ----------------------------------------------------------------------------------------------------

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
    def num_tables(self) -> int:
        """Sequences that hold blocks, on the device or the host."""
        return len(self._first.tables) + len(self._first.on_host.by_id)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens of one sequence fill, the last perhaps partly."""
        return -(-num_tokens // self.block_size)

    def table(self, seq_id: int, group: int = 0) -> list[int]:
        """A copy of the sequence's block table in a group; empty if it holds nothing on the device."""
        return self.groups[group].table(seq_id)

    def tables(self, seq_id: int) -> list[TableChange]:
        """The sequence's block tables in all groups, for workers that have none of them."""
        return [TableChange(seq_id, 0, group.table(seq_id), group.number) for group in self.groups]

    # --- admission --------------------------------------------------------------------------------------------------

    def admission(self, num_blocks: int, promised: int = 0, num_seqs: int = 1) -> Admission:
        """Whether sequences that will need ``num_blocks`` fit beside ``promised`` blocks and the watermark.

        They take as many blocks of every group at most, and no more than a window's where there is one: ``num_seqs`` is
        the number of sequences that hold blocks on the device then, these included.
        """
        if any(num_blocks > group.device.num_blocks and num_seqs > group.max_window_seqs for group in self.groups):
            return Admission.NEVER
        fits = self.fits(num_blocks + self.watermark_blocks, promised, num_seqs)
        return Admission.OK if fits else Admission.LATER

    def fits(self, num_blocks: int, promised: int = 0, num_seqs: int = 1) -> bool:
        """The same without the watermark."""
        return all(group.has_room(num_blocks + promised, num_seqs) for group in self.groups)

    # --- growth -----------------------------------------------------------------------------------------------------

    def grow(self, writes: list[Write]) -> list[TableChange] | None:
        """Makes room for tokens to be computed; each write is (sequence id, tokens computed, tokens to hold).

        The block that the first new token falls into is copied if another table has it too, or if it is known to the
        prefix cache. Of several writers of a block that is only shared the last one writes in place; so does the only
        holder of a known block if nothing is left to copy it to, and the cache forgets it. A table must end with the
        block that the first new token falls into, or before. Blocks that have left a window are given back: the
        number of a sequence's computed tokens must not go below what it is here.

        Returns:
            What changed, in each table of each group (do not change it); None, and no table has grown, if too few
            blocks are available in some group.
        """
        if not self._windowed and len(self.groups) == 1:
            return self._first.grow(writes)
        if self._prefix_caching:
            self._leave_windows([(*write[:2], self._num_registered(write[0])) for write in writes])
        if not self._prefix_caching or self._lack(writes):  # rather lose content than room
            self._leave_windows([(*write[:2], _CLOSED) for write in writes])
        if self._lack(writes):
            return None
        return [change for group in self.groups for change in group.grow(writes) or ()]

    def _lack(self, writes: list[Write]) -> bool:
        return any(group.lacks(writes) for group in self.groups)

    def _leave_windows(self, leaving: list[tuple[int, int, int]]) -> None:
        """For each (sequence id, tokens computed, blocks that may be given back)."""
        for seq_id, num_computed, most in leaving:
            for group in self._windowed:
                group.leave_window(seq_id, num_computed, most)

    def _num_registered(self, seq_id: int) -> int:
        registration = self._registrations.get(seq_id)
        return registration.count if registration is not None else 0

    # --- sharing ----------------------------------------------------------------------------------------------------

    def fork(self, parent_id: int, child_id: int) -> None:
        """Gives a new sequence all blocks of another one, which has the same tokens computed."""
        self.fork_prefix(parent_id, child_id, len(self._first.tables.get(parent_id, ())))

    def fork_prefix(self, parent_id: int, child_id: int, num_blocks: int) -> bool:
        """Gives a new sequence the first ``num_blocks`` blocks of another one, whose tokens in them are the same.

        Returns:
            False, and no change, if the parent has given back blocks that the child would still read.

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
        if not all(group.is_read_from(parent_id, num_blocks) for group in self._windowed):
            return False
        for group in self.groups:
            group.share(parent_id, child_id, num_blocks)
        registration = self._registrations.get(parent_id)
        if registration is not None and registration.count == _CLOSED:
            self._registrations[child_id] = registration
        elif registration is not None:  # names of tokens not computed yet are the parent's alone
            count = min(registration.count, num_blocks)
            self._registrations[child_id] = _Registration(registration.chain.first(count), count)
        return True

    def free(self, seq_id: int) -> None:
        """Gives back all blocks of a sequence, on the device or the host; nothing happens if it has none."""
        for group in self.groups:
            group.free(seq_id)
        self._registrations.pop(seq_id, None)

    # --- swapping ---------------------------------------------------------------------------------------------------

    def is_swapped(self, seq_id: int) -> bool:
        """Whether the sequence's blocks are on the host."""
        return seq_id in self._first.on_host.by_id

    def swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Moves all blocks of these sequences to the host, a shared one once.

        Returns:
            False, and no change, if the host has no room or one of the blocks only arrives with the moves of this step.
        """
        if not all(group.can_swap_out(seq_ids) for group in self.groups):
            return False
        for group in self.groups:
            group.swap_out(seq_ids)
        return True

    def swap_in(self, seq_ids: Sequence[int]) -> bool:
        """Moves all blocks of these sequences back into new device blocks, a shared one once.

        Returns:
            False, and no change, if too few device blocks are available.
        """
        if not all(group.can_swap_in(seq_ids) for group in self.groups):
            return False
        coming = self._first.on_host.present(seq_ids)
        for group in self.groups:
            group.swap_in(coming)
        for seq_id in coming:  # known again when they are registered next
            registration = self._registrations.get(seq_id)
            if registration is not None and registration.count != _CLOSED:
                registration.count = 0
        return True

    def blocks_to_swap_in(self, seq_ids: Sequence[int]) -> int:
        """Device blocks of the first group that ``swap_in`` would take; of the others it takes no more."""
        return len(self._first.on_host.distinct_blocks(seq_ids))

    # --- prefix cache -----------------------------------------------------------------------------------------------

    def chain(self, token_ids: list[int], context: str | bytes, features: Sequence[FeatureSpan] = ()) -> PrefixChain:
        """The names of the full blocks of these tokens, to be kept for ``match``; empty without prefix caching."""
        chain = PrefixChain(context, self.block_size, features)
        if self._prefix_caching:
            chain.extend(token_ids, len(token_ids) // self.block_size)
        return chain

    def match(self, token_ids: list[int], chain: PrefixChain) -> PrefixMatch:
        """Finds KV entries for the beginning of these tokens, whose chain it is; changes nothing."""
        return find_match([group.cache for group in self.groups], token_ids, chain)

    def cost(self, match: PrefixMatch) -> int:
        """Available blocks that adopting the match uses up in the group where it uses most.

        A copy of a block that agrees in part is ``grow``'s.
        """
        return max(group.cache.cost(hits) for group, hits in zip(self.groups, match.hits, strict=True))

    def adopt(self, seq_id: int, match: PrefixMatch) -> None:
        """Makes the matched blocks the tables of a new sequence. Nothing may be taken between ``match`` and this.

        To be called for an empty match too: it counts the query and spares ``register`` the hashing.

        Raises:
            OutOfBlocksError: the cost is more than what is available; nothing was changed.
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
        """Makes the full blocks of the first ``num_computed`` tokens known, if prefix caching is on.

        Their KV entries must be there: computed by a step that the workers were given, or moved by this one. Costs one
        hash for each block that is new since the last call. Content that is known already stays where it is. Nothing
        happens if the sequence has no table on the device. Context and features are those of ``chain``.
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

    def reset_prefix_cache(self) -> None:
        """Forgets all content; cached blocks become free. Who holds blocks now registers none until it is freed."""
        for group in self.groups:
            group.cache.clear()
        if self._prefix_caching:
            for seq_id in (*self._first.tables, *self._first.on_host.by_id):
                self._registrations[seq_id] = _Registration(PrefixChain("", self.block_size), _CLOSED)

    # --- the step ---------------------------------------------------------------------------------------------------

    def take_moves(self) -> Moves:
        """Ends the planning of a step: its block moves, whose sources others may have from now on."""
        moves = self._first.moves.take()
        for group in self.groups[1:]:
            more = group.moves.take()
            moves = Moves(*(one + other for one, other in zip(moves, more, strict=True)))
        return moves
