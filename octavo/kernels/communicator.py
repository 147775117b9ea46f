"""Collectives of a tensor-parallel group, as kernels call them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

from octavo.kernels.arrays import Array


class Communicator(Protocol):
    """One rank of a group; all ranks make the same calls in the same order.

    Arrays are tensors of a GPU; on a CPU they are numpy's or torch's, and become each other over the same memory.
    """

    @property
    def rank(self) -> int:
        """This rank: 0 to ``size - 1``."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_reduce(self, x: Any) -> Any:
        """The sum over the ranks, on every rank; x, contiguous float32, is overwritten.

        The ranks are joined as a binary tree, as even as possible: (0 + 1) + (2 + 3), (0 + 1) + 2.
        """
        ...

    def all_gather(self, x: Any) -> Any:
        """The ranks' x [n, width], contiguous float32, concatenated in rank order: [n, size * width], on every rank."""
        ...


class Collectives:
    """What a backend does to join the ranks of its group; a single rank has none."""

    #: The tensor-parallel group, if there are several ranks.
    group: Communicator | None = None

    def join(self, group: Communicator) -> None:
        """Makes the backend a rank of a tensor-parallel group."""
        self.group = group

    @abstractmethod
    def all_reduce(self, x: Array, bias: Array | None = None, add: Array | None = None) -> Array:
        """The sum of x, contiguous float32 [T, width], over the ranks of ``group``, then + bias, then + add.

        On all ranks alike, in the order of a product's own bias and ``add``. The memory of x may be reused.

        Args:
            x: this rank's part.
            bias: float32 [width].
            add: float32 [T, width].
        """

    @abstractmethod
    def all_gather(self, x: Array) -> Array:
        """The ranks' x, contiguous float32 [T, width], concatenated in rank order: [T, size * width]."""
