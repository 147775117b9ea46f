"""The block moves of the step that is being planned."""

from __future__ import annotations

from typing import NamedTuple

from octavo.memory.block_pool import BlockPool


class Moves(NamedTuple):
    """What the workers move before they compute, in this order; pairs as in ``StepPlan``."""

    #: (device block, host block).
    swap_out: list[tuple[int, int]]
    #: (host block, device block).
    swap_in: list[tuple[int, int]]
    #: (source, target), both on the device.
    copy: list[tuple[int, int]]


class PendingMoves:
    """Collects the moves of one step and keeps them from disturbing each other.

    All swaps out are done before all swaps in, these before all copies, and these before anything is written. So a
    block swapped out may be given to anybody at once. Every other source or target holds a reference (a *pin*) until
    the plan is complete: nobody else gets it in the same step, whoever lets go of it. Hence no block is the target of
    two moves, and no source is overwritten before it is read.
    """

    def __init__(self, device: BlockPool, host: BlockPool) -> None:
        self._device = device
        self._host = host
        self._moves = Moves([], [], [])
        #: Pins of device blocks.
        self._pins: dict[int, int] = {}
        #: Device blocks whose content arrives with these moves; the source, if it is a copy.
        self._arriving: dict[int, int | None] = {}

    def pins(self, block: int) -> int:
        """References to a device block that are held here and not by a table."""
        return self._pins.get(block, 0)

    def is_arriving(self, block: int) -> bool:
        """Whether this device block gets its content by a move of this step; it cannot be swapped out in the same."""
        return block in self._arriving

    def swap_out(self, device_block: int, host_block: int) -> None:
        """Device to host."""
        self._moves.swap_out.append((device_block, host_block))
        self._host.share((host_block,))

    def swap_in(self, host_block: int, device_block: int) -> None:
        """Host to device."""
        self._moves.swap_in.append((host_block, device_block))
        self._host.share((host_block,))
        self._pin(device_block)
        self._arriving[device_block] = None

    def copy(self, source: int, target: int) -> None:
        """Device to device. The copy of a copy is taken from the original: copies are done all at once."""
        origin = self._arriving.get(source)
        source = source if origin is None else origin
        self._moves.copy.append((source, target))
        self._pin(source)
        self._pin(target)
        self._arriving[target] = source

    def _pin(self, block: int) -> None:
        self._device.share((block,))
        self._pins[block] = self._pins.get(block, 0) + 1

    def take(self) -> Moves:
        """Hands out the moves of this step and drops all pins."""
        moves = self._moves
        if moves.swap_out or moves.swap_in or moves.copy:
            self._moves = Moves([], [], [])
            self._host.release([host for _, host in moves.swap_out])
            self._host.release([host for host, _ in moves.swap_in])
            self._device.release([block for block, count in self._pins.items() for _ in range(count)])
            self._pins.clear()
            self._arriving.clear()
        return moves
