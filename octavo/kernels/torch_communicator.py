"""Collectives of ``torch.distributed``, and links between pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class TorchCommunicator:
    """A group of ``torch.distributed``: NCCL between GPUs, Gloo on CPUs."""

    def __init__(self, group: Any = None) -> None:
        """``group`` of ``torch.distributed``, which is initialised; None: all processes."""
        self._group = group
        self.rank: int = torch.distributed.get_rank(group)
        self.size: int = torch.distributed.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Communicator``. More than two ranks gather all parts, as the library's order of sums is not known."""
        x = torch.as_tensor(x)
        if self.size > 2:
            return sum_as_tree(self._gather(x))
        torch.distributed.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        return torch.cat(self._gather(torch.as_tensor(x)), dim=-1)

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x, group=self._group)
        return parts


class TorchLink:
    """A link of ``torch.distributed``, between any two processes."""

    def __init__(self, peer: int) -> None:
        """``peer`` is the global rank at the other end."""
        self._peer = peer

    def send(self, x: Any) -> None:
        """See ``StageLink``."""
        torch.distributed.send(torch.as_tensor(x).contiguous(), self._peer)

    def receive(self, x: Any) -> None:
        """See ``StageLink``."""
        torch.distributed.recv(torch.as_tensor(x), self._peer)


def sum_as_tree(parts: Sequence[Tensor]) -> Tensor:
    """The sum of equal shapes, joined as a binary tree whose left half has the odd part more."""
    if len(parts) == 1:
        return parts[0]
    middle = (len(parts) + 1) // 2
    return sum_as_tree(parts[:middle]) + sum_as_tree(parts[middle:])
