"""Connects a worker with the others of its network: through memory of one machine, or through torch.distributed."""

from __future__ import annotations

import mmap
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from octavo.core.parallel import ParallelLayout
from octavo.executor.local_connections import LocalConnections
from octavo.kernels import resolve_device
from octavo.kernels.communicator import TorchCommunicator
from octavo.runner.ranks import Ranks, SharedMemoryLink, TorchLink

#: Seconds that a rank waits for the others to connect, and in a collective: long enough for one that loads weights.
_TIMEOUT = timedelta(seconds=600)


def connect_local(layout: ParallelLayout, connections: LocalConnections) -> Ranks:
    """Connections within one machine."""
    group = None
    if connections.group is not None:
        from octavo.kernels.cpu.collectives import SharedMemoryCommunicator

        memory = mmap.mmap(connections.group, os.fstat(connections.group).st_size)
        size = layout.tensor_parallel_size
        group = SharedMemoryCommunicator(memory, layout.tp_rank, size, timeout=_TIMEOUT.total_seconds())
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


def connect_torch(layout: ParallelLayout, device: str, address: tuple[str, int] | None, store: Any = None) -> Ranks:
    """Connections through torch.distributed: NCCL between GPUs, Gloo on CPUs.

    ``address`` is that of the store; ``store`` itself on the worker that has opened it. Without both, what a launcher
    has put into the environment (``MASTER_ADDR`` and so on) is used.
    """
    if layout.world_size == 1:
        return Ranks(layout)
    backend = "nccl" if resolve_device(device) == "cuda" else "gloo"
    if address is None:  # processes that plan for themselves compare their plans, without waiting for their devices
        dist.init_process_group("gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl", timeout=_TIMEOUT)
    else:
        store = store or dist.TCPStore(address[0], address[1], is_master=False, timeout=_TIMEOUT)
        dist.init_process_group(backend, store=store, rank=layout.rank, world_size=layout.world_size, timeout=_TIMEOUT)
    size = layout.tensor_parallel_size
    group = None
    for stage in range(layout.pipeline_parallel_size):  # every rank takes part in making every group
        made = dist.new_group(list(range(stage * size, (stage + 1) * size)), timeout=_TIMEOUT)
        if stage == layout.stage and size > 1:
            group = TorchCommunicator(made)
    incoming = TorchLink(layout.rank - size) if layout.stage else None
    outgoing = None if layout.is_last_stage else TorchLink(layout.rank + size)
    if backend == "nccl":  # the first collective makes the communicator: it may not be made within a captured graph
        dist.all_reduce(torch.zeros(1, device="cuda"))
    return Ranks(layout, group, incoming, outgoing)
