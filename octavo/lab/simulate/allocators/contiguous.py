"""A block manager that reserves the whole, contiguous memory of a request when it is admitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.plan import TableChange
from octavo.lab.simulate.allocators.buddy import BuddyAllocator, order_of
from octavo.memory.block_manager import BlockManager
from octavo.memory.kv_group import AllocStatus, BlocksNeeded, Write
from octavo.scheduler.state import SchedulingState

#: Token slots to reserve for the sequence with this id: its whole length or more.
Reserve = Callable[[int], int]

_NOTHING = BlocksNeeded()


@dataclass(frozen=True, slots=True)
class Extents(BlocksNeeded):
    """Extents that sequences need, in blocks, each in one piece."""

    lengths: tuple[int, ...] = ()

    def __add__(self, other: BlocksNeeded) -> Extents:
        lengths = self.lengths + _lengths(other)
        return Extents(sum(lengths), lengths=lengths)

    __radd__ = __add__


def _lengths(demand: BlocksNeeded) -> tuple[int, ...]:
    if isinstance(demand, Extents):
        return demand.lengths
    return (demand.blocks,) if demand.blocks else ()


class ContiguousBlocks(BlockManager):
    """Gives each sequence one extent at its admission and takes it back at its end, as Orca (Yu et al. 2022).

    Where extents lie is decided by the buddy algorithm, as in Kwon et al. 2023, section 6.1; its unit is a block here.
    So a sequence is admitted only if a free extent is long enough, however many blocks are free in all, and a request
    of several only if there is one for each. Nothing is preempted, as a running sequence needs no more blocks.

    A sequence that is forked gets an extent of its own, into which all that its parent has computed is copied: before
    the next step of both, so that extents of beams which ended are free again.

    Invariant: the pool's used blocks are those of the allocated extents, but for forked sequences before their next
    step. The pool counts blocks; their ids in the tables are its own, and say nothing about addresses, so that kernels
    for paged memory read contiguous one, too.
    """

    def __init__(self, num_blocks: int, block_size: int, *, reserve: Reserve, **options: Any) -> None:
        """``options`` as for ``BlockManager``; there is no use for the watermark and for host blocks.

        Raises:
            ConfigError: prefix caching is on: extents are not shared.
        """
        if options.get("prefix_caching"):
            raise ConfigError("contiguous allocators share no blocks: leave enable_prefix_caching off")
        super().__init__(num_blocks, block_size, **options)
        self.buddy = BuddyAllocator(num_blocks)
        self.reserve = reserve
        self._starts: dict[int, int] = {}
        #: Sequences whose table still has blocks of their parents.
        self._forked: set[int] = set()

    def demand(
        self, num_blocks: int, num_seqs: int = 1, seq_ids: Sequence[int] = (), own_blocks: int = 0
    ) -> BlocksNeeded:
        """The extents of those of these sequences that hold none, and of those that will be forked from the first.

        Of those each asks for one of ``own_blocks``. Of unknown sequences, ``num_blocks``.
        """
        if not seq_ids:
            return BlocksNeeded(num_blocks)
        asking = [seq_id for seq_id in seq_ids if seq_id not in self._starts] + own_blocks * [seq_ids[0]]
        lengths = tuple(self.blocks_for(self.reserve(seq_id)) for seq_id in asking)
        return Extents(sum(lengths), lengths=lengths)

    def can_allocate(self, demand: BlocksNeeded, reserved: BlocksNeeded = _NOTHING, num_seqs: int = 1) -> AllocStatus:
        """Whether free extents are as long as these and those that are reserved."""
        if not BuddyAllocator(self.buddy.size).can_allocate(*_lengths(demand)):
            return AllocStatus.NEVER
        return AllocStatus.OK if self.fits(demand, reserved, num_seqs) else AllocStatus.LATER

    def fits(self, demand: BlocksNeeded, reserved: BlocksNeeded = _NOTHING, num_seqs: int = 1) -> bool:
        """As ``can_allocate``."""
        return self.buddy.can_allocate(*_lengths(demand), *_lengths(reserved))

    def grow(
        self, writes: list[Write], behind_windows: Callable[[], Iterable[tuple[int, int]]] | None = None
    ) -> list[TableChange] | None:
        """Gives each sequence its extent, if it has none, and copies what a forked one shares into it.

        Raises:
            ValueError: one outgrows what was reserved.
        """
        lengths = {}
        for seq_id, _, num_tokens in writes:
            slots = self.reserve(seq_id)
            if num_tokens > slots:
                raise ValueError(f"sequence {seq_id} of {num_tokens} tokens outgrows its {slots} reserved slots")
            lengths[seq_id] = self.blocks_for(slots)
        new = [seq_id for seq_id in lengths if seq_id not in self._starts]
        if not self.buddy.can_allocate(*(lengths[seq_id] for seq_id in new)):
            return None
        for seq_id in sorted(new, key=lengths.__getitem__, reverse=True):  # as ``can_allocate`` tries them
            start = self.buddy.allocate(lengths[seq_id])
            assert start is not None
            self._starts[seq_id] = start
        changes = []
        # Forked ones first: then no block is shared any more, and the others write into their own.
        for seq_id, num_computed, _ in sorted(writes, key=lambda write: write[0] not in self._forked):
            copied = seq_id in self._forked
            if copied:
                self._copy_shared(seq_id)
            grown = super().grow([(seq_id, num_computed, self.block_size << order_of(lengths[seq_id]))])
            assert grown is not None, "an extent has its blocks"
            changes += [TableChange(seq_id, 0, self.table(seq_id), 0)] if copied else grown
        return changes

    def _copy_shared(self, seq_id: int) -> None:
        """The first survivor of beams continues in their extent; what others have in common with it is copied."""
        self._forked.discard(seq_id)
        group = self.groups[0]
        table = group.tables[seq_id]
        for index, block in enumerate(table):
            if group.device.references(block) - group.moves.pins(block) > 1:
                [target] = group.cache.allocate(1)
                group.moves.copy(block, target)
                group.device.release((block,))
                table[index] = target

    def fork(self, parent_id: int, child_id: int) -> None:
        """See ``BlockManager``; blocks are shared until the next step of the child."""
        super().fork(parent_id, child_id)
        self._forked.add(child_id)

    def free(self, seq_id: int) -> None:
        """See ``BlockManager``."""
        super().free(seq_id)
        self._forked.discard(seq_id)
        if seq_id in self._starts:
            self.buddy.free(self._starts.pop(seq_id))

    def swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Never: no sequence needs the extent of another."""
        return False


def whole_context(prompt: int, output: int, max_model_len: int) -> int:
    """Orca (Max) of Kwon et al. 2023, section 6.1: the longest sequence of the model."""
    return max_model_len


def power_of_two(prompt: int, output: int, max_model_len: int) -> int:
    """Orca (Pow2): at most twice the output, which is rounded up to a power of two, but never beyond the context.

    So the length is known within a factor of two before it is generated, and nothing outgrows its reservation.
    """
    return min(prompt + (1 << order_of(output)), max_model_len)


def oracle(prompt: int, output: int, max_model_len: int) -> int:
    """Orca (Oracle): the true length."""
    return prompt + output


#: By name, what is reserved for a prompt and an output of these lengths under a context length.
RESERVATIONS: dict[str, Callable[[int, int, int], int]] = {
    "oracle": oracle,
    "pow2": power_of_two,
    "max": whole_context,
}


def reserving(allocator: str, context: int, queues: Callable[[], SchedulingState]) -> Reserve:
    """What an allocator of ``RESERVATIONS`` reserves for sequences of these queues, whose requests state their length.

    ``queues`` is called when a sequence is asked for, as the queues are made after the blocks.
    """

    def reserve(seq_id: int) -> int:
        group = queues().sequences[seq_id].group
        prompt = len(group.request.prompt_token_ids)
        return RESERVATIONS[allocator](prompt, group.max_length - prompt, context)

    return reserve
