"""Connects a worker with the other ranks by torch.distributed: on several machines, or on GPUs. Imports torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from octavo.config.options import ParallelLayout
from octavo.executor.channels import TIMEOUT
from octavo.kernels import resolve_device
from octavo.kernels.torch_backend import TorchCommunicator, TorchLink
from octavo.runner.loaded_model import Ranks

_TIMEOUT = timedelta(seconds=TIMEOUT)


def open_store(host: str) -> dist.TCPStore:
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def connect_torch(layout: ParallelLayout, device: str, address: tuple[str, int] | None, store: Any = None) -> Ranks:
    """Connects by NCCL between GPUs, by Gloo on CPUs.

    ``address``: of the store; ``store``: the store itself, on the worker that has opened it. Without both, a launcher
    has set ``MASTER_ADDR`` and so on.
    """
    if layout.world_size == 1:
        return Ranks(layout)
    backend = "nccl" if resolve_device(device) == "cuda" else "gloo"
    if address is None:  # processes of a launcher compare their plans on the CPU, without waiting for their GPUs
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
