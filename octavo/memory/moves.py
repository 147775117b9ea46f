"""The block moves of the step that is being planned."""

from __future__ import annotations

from typing import NamedTuple

from octavo.memory.block_pool import BlockPool


class Moves(NamedTuple):
    """Block moves that workers do before they compute, in this order; pairs as in ``StepPlan``."""

    #: (device block, host block).
    swap_out: list[tuple[int, int]]
    #: (host block, device block).
    swap_in: list[tuple[int, int]]
    #: (source, target), both on the device.
    copy: list[tuple[int, int]]


class PendingMoves:
    """Collects the block moves of one step and prevents conflicts between them.

    All swaps out are done before all swaps in, these before all copies, and these before the step writes KV entries.
    So a device block that is swapped out can be allocated again at once. Every other source or target has a reference
    (a *pin*) until ``take`` and cannot be allocated before. Hence no block is the target of two moves, and no source
    is overwritten before it is read.
    """

    def __init__(self, device: BlockPool, host: BlockPool) -> None:
        self._device = device
        self._host = host
        self._moves = Moves([], [], [])
        #: Pins of device blocks.
        self._pins: dict[int, int] = {}
        #: Device blocks that are the target of a move; the source, if it is a copy.
        self._targets: dict[int, int | None] = {}

    def pins(self, block: int) -> int:
        """References to a device block that moves hold."""
        return self._pins.get(block, 0)

    def is_target(self, block: int) -> bool:
        """Whether a move of this step writes this device block, which therefore cannot be swapped out in this step."""
        return block in self._targets

    def swap_out(self, device_block: int, host_block: int) -> None:
        """Device to host."""
        self._moves.swap_out.append((device_block, host_block))
        self._host.share((host_block,))

    def swap_in(self, host_block: int, device_block: int) -> None:
        """Host to device."""
        self._moves.swap_in.append((host_block, device_block))
        self._host.share((host_block,))
        self._pin(device_block)
        self._targets[device_block] = None

    def copy(self, source: int, target: int) -> None:
        """Device to device. A copy of a copy is made from the original, as all copies are done at once."""
        origin = self._targets.get(source)
        source = source if origin is None else origin
        self._moves.copy.append((source, target))
        self._pin(source)
        self._pin(target)
        self._targets[target] = source

    def _pin(self, block: int) -> None:
        self._device.share((block,))
        self._pins[block] = self._pins.get(block, 0) + 1

    def take(self) -> Moves:
        """Returns the moves of this step and drops all pins."""
        moves = self._moves
        if moves.swap_out or moves.swap_in or moves.copy:
            self._moves = Moves([], [], [])
            self._host.release([host for _, host in moves.swap_out])
            self._host.release([host for host, _ in moves.swap_in])
            self._device.release([block for block, count in self._pins.items() for _ in range(count)])
            self._pins.clear()
            self._targets.clear()
        return moves
