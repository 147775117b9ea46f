"""Connects a worker with the others of its network through the memory of one machine."""

from __future__ import annotations

import mmap
import os

from octavo.core.parallel import ParallelLayout
from octavo.executor.local_connections import LocalConnections
from octavo.runner.ranks import Ranks, SharedMemoryLink

#: Seconds that a rank waits for the others to connect, and in a collective: long enough for one that loads weights.
TIMEOUT = 600.0


def connect_local(layout: ParallelLayout, connections: LocalConnections) -> Ranks:
    """Connections within one machine."""
    group = None
    if connections.group is not None:
        from octavo.kernels.cpu.collectives import SharedMemoryCommunicator

        memory = mmap.mmap(connections.group, os.fstat(connections.group).st_size)
        size = layout.tensor_parallel_size
        group = SharedMemoryCommunicator(memory, layout.tp_rank, size, timeout=TIMEOUT)
    links = (_link(layout, ends) for ends in (connections.incoming, connections.outgoing))
    return Ranks(layout, group, *links)


def link_slots(layout: ParallelLayout) -> int:
    """Slots of a ``SharedMemoryLink``: a step for each stage may be in flight."""
    return layout.pipeline_parallel_size + 1


def _link(layout: ParallelLayout, ends: tuple[int, int] | None) -> SharedMemoryLink | None:
    if ends is None:
        return None
    memory, pipe = ends
    return SharedMemoryLink(mmap.mmap(memory, os.fstat(memory).st_size), link_slots(layout), pipe)
