"""Tokens and logits that are tensors of torch, on their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.arrays import Array
from octavo.kernels.numpy_sampling import NumpySampling
from octavo.kernels.torch_pinned import host_empty


class TorchLogits(NumpySampling):
    """The numpy backend for logits of torch."""

    def prepare(self, logits: Array) -> Array:
        """On the host, over the same memory if they are there."""
        return as_rows(logits.cpu()).numpy()


class HostCopy:
    """An asynchronous copy of a tensor to the host."""

    __slots__ = ("_copy", "_done")

    def __init__(self, values: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._copy = values
        if values.is_cuda:
            # Torch's pool reuses pinned memory only after copies into it are done.
            self._copy = host_empty(values.shape, values.dtype)
            self._copy.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(values.device))

    def wait(self) -> Tensor:
        """The tensor on the host; the same tensor if it was there already."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy


def as_rows(logits: Tensor) -> Tensor:
    """The logits as float32, contiguous in the last dimension, in the same memory if possible."""
    values = logits.detach().float()
    return values if values.stride(-1) == 1 else values.contiguous()
