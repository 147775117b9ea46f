"""A block manager that reserves the whole, contiguous memory of a request when it is admitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.plan import TableChange
from octavo.memory.block_manager import AllocStatus, BlockManager
from octavo.memory.kv_group import Demand, Write
from octavo.simulate.allocators.buddy import BuddyAllocator, order_of

#: Token slots to reserve for the sequence with this id: its whole length or more.
Reserve = Callable[[int], int]

_NOTHING = Demand()


class ContiguousBlocks(BlockManager):
    """Gives each sequence one extent at its admission and takes it back at its end, as Orca (Yu et al. 2022).

    Where extents lie is decided by the buddy algorithm, as in Kwon et al. 2023, section 6.1; its unit is a block here.
    So a sequence is admitted only if a free extent is long enough, however many blocks are free in all. Nothing is
    preempted, as a running sequence needs no more blocks.

    Invariant: the pool's used blocks are those of the allocated extents. The pool counts blocks; their ids in the
    tables are its own, and say nothing about addresses. Requests have one sequence each.
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

    def demand(self, num_blocks: int, num_seqs: int = 1, seq_ids: Sequence[int] = (), own_blocks: int = 0) -> Demand:
        """The extents of those of these sequences that hold none; of unknown ones, ``num_blocks``."""
        if not seq_ids:
            return Demand(num_blocks)
        return Demand(sum(self.blocks_for(self.reserve(seq_id)) for seq_id in seq_ids if seq_id not in self._starts))

    def can_allocate(self, demand: Demand, reserved: Demand = _NOTHING, num_seqs: int = 1) -> AllocStatus:
        """Whether an extent of so many blocks is free; what is reserved is held already."""
        if demand.blocks > self.buddy.largest:
            return AllocStatus.NEVER
        return AllocStatus.OK if self.fits(demand, reserved, num_seqs) else AllocStatus.LATER

    def fits(self, demand: Demand, reserved: Demand = _NOTHING, num_seqs: int = 1) -> bool:
        """As ``can_allocate``."""
        return not demand.blocks or self.buddy.can_allocate(demand.blocks)

    def grow(self, writes: list[Write]) -> list[TableChange] | None:
        """Gives the sequence its extent, if it has none.

        Raises:
            ValueError: it outgrows what was reserved, or there are several sequences.
        """
        [(seq_id, num_computed, num_tokens)] = writes
        slots = self.reserve(seq_id)
        if num_tokens > slots:
            raise ValueError(f"sequence {seq_id} of {num_tokens} tokens outgrows its {slots} reserved slots")
        length = self.blocks_for(slots)
        if seq_id not in self._starts:
            start = self.buddy.allocate(length)
            if start is None:
                return None
            self._starts[seq_id] = start
        return super().grow([(seq_id, num_computed, self.block_size << order_of(length))])

    def free(self, seq_id: int) -> None:
        """See ``BlockManager``."""
        super().free(seq_id)
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
