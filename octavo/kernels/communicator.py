"""Collectives of a tensor-parallel group, as kernels call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Communicator(Protocol):
    """One rank of a group; all ranks make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank: 0 to ``size - 1``."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, on every rank; x, contiguous float32, is overwritten.

        The ranks are joined as a binary tree, as even as possible: (0 + 1) + (2 + 3), (0 + 1) + 2.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' x [n, width], contiguous float32, concatenated in rank order: [n, size * width], on every rank."""
        ...


class Collectives:
    """What a backend does to join the ranks of its group; a single rank has none."""

    #: The tensor-parallel group, if there are several ranks.
    group: Communicator | None = None

    def join(self, group: Communicator) -> None:
        """Makes the backend a rank of a tensor-parallel group."""
        self.group = group

    def all_reduce(self, x: Tensor, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
        """The sum of x, contiguous float32 [T, width], over the ranks of ``group``, then + bias, then + add.

        On all ranks alike, in the order of a product's own bias and ``add``. The memory of x may be reused.

        Args:
            x: this rank's part.
            bias: float32 [width].
            add: float32 [T, width].
        """
        x = x if self.group is None else self.group.all_reduce(x)
        for term in (bias, add):
            if term is not None:
                x += term
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' x, contiguous float32 [T, width], concatenated in rank order: [T, size * width]."""
        return x if self.group is None else self.group.all_gather(x)


class TorchCommunicator:
    """A group of ``torch.distributed``: NCCL between GPUs, Gloo on CPUs."""

    def __init__(self, group: Any = None) -> None:
        """``group`` of ``torch.distributed``, which is initialised; None: all processes."""
        self._group = group
        self.rank: int = torch.distributed.get_rank(group)
        self.size: int = torch.distributed.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Communicator``. More than two ranks gather all parts, as the library's order of sums is not known."""
        if self.size > 2:
            return sum_as_tree(self._gather(x))
        torch.distributed.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        return torch.cat(self._gather(x), dim=-1)

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x, group=self._group)
        return parts


def sum_as_tree(parts: Sequence[Tensor]) -> Tensor:
    """The sum of equal shapes, joined as a binary tree whose left half has the odd part more."""
    if len(parts) == 1:
        return parts[0]
    middle = (len(parts) + 1) // 2
    return sum_as_tree(parts[:middle]) + sum_as_tree(parts[middle:])
