"""What connects a worker with the others of its network: collectives of its stage, links to the stages beside it."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.parallel import ParallelLayout
from octavo.kernels.communicator import Communicator


class StageLink(Protocol):
    """One way from a worker to the one at its place in the next stage; what is sent is received in order."""

    def send(self, x: Any) -> None:
        """Sends x, float32 [T, E] as host calls get it; its memory may be reused afterwards."""
        ...

    def receive(self, x: Any) -> None:
        """Waits for what was sent, of the same shape, and writes it to x."""
        ...


@dataclass(frozen=True)
class Ranks:
    """A worker's place, and its connections."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    #: The tensor-parallel group of its stage; None: it is alone.
    group: Communicator | None = None
    #: From the stage before and to the one after; None: there is none.
    incoming: StageLink | None = None
    outgoing: StageLink | None = None


class SharedMemoryLink:
    """A link between two processes of one machine: a ring of slots, and a pipe that wakes the receiver.

    A slot is written again ``slots`` sends later. The sender need not ask whether it has been read: fewer steps than
    that are in flight.
    """

    def __init__(self, memory: mmap.mmap, slots: int, pipe: int) -> None:
        """``memory`` is shared by both ends; ``pipe`` is the descriptor to write to, or to read from."""
        self._slots = np.frombuffer(memory, dtype=np.float32).reshape(slots, -1)
        self._pipe = pipe
        self._count = 0

    def send(self, x: Any) -> None:
        """See ``StageLink``."""
        self._next(x)[:] = np.asarray(x).reshape(-1)
        os.write(self._pipe, b"\0")

    def receive(self, x: Any) -> None:
        """See ``StageLink``.

        Raises:
            ConnectionError: the sender has ended.
        """
        if not os.read(self._pipe, 1):
            raise ConnectionError("the worker of the pipeline stage before this one has ended")
        np.asarray(x).reshape(-1)[:] = self._next(x)

    def _next(self, x: Any) -> NDArray[np.float32]:
        slot = self._slots[self._count % len(self._slots), : math.prod(x.shape)]
        self._count += 1
        return slot
