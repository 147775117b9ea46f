"""Host memory that a GPU copies from and to: pinned where that is possible."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

logger = logging.getLogger("octavo")


def host_empty(shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised host memory, pinned if the system allows it; else plain, with a warning once.

    A copy of plain memory is as right, but several times as slow, and does not run beside kernels.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as e:  # such as a limit on locked memory, or a driver that cannot (WSL)
        _warn(str(e).partition("\n")[0])
        return torch.empty(shape, dtype=dtype)


def host_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor of the host in such memory."""
    return host_empty(tensor.shape, tensor.dtype).copy_(tensor)


@functools.cache
def _warn(reason: str) -> None:
    logger.warning(
        "host memory cannot be pinned (%s): plain memory is used, copies to and from the GPU are slower", reason
    )
