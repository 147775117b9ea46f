"""Low-rank products of the CPU backend; see csrc/cpu/bind_lora.cpp.

The rows of an adapter are multiplied together, in tasks of a few rows that compute both products; a row's bits do not
depend on the others. Matrices have the adapter's own rank, without padding.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.kernels.lora import LowRank, LowRankEmbedding, LowRankPart, LowRankShape, check_part, rounded_part

if TYPE_CHECKING:
    from octavo.kernels.cpu.backend import CpuKernels

_cpu: Any = importlib.import_module("octavo._cpu")  # compiled: nothing for a type checker to read
_DTYPES = {torch.float32: _cpu.Dtype.f32, torch.bfloat16: _cpu.Dtype.bf16}


class CpuLowRank(LowRank):
    """An operation that does nothing in steps without adapters."""

    def __init__(self, kernels: CpuKernels, shape: LowRankShape, *, sampled: bool = False) -> None:
        """See ``Kernels.make_low_rank``."""
        super().__init__(shape)
        self._kernels, self._sampled = kernels, sampled
        self._held = _cpu.LowRankSlots(shape.slots)

    def pack(self, parts: Sequence[LowRankPart | None]) -> Any:
        """For vectors of 16 outputs, and of 64 bytes of inputs, in the order in which they are read."""
        self.check(parts)
        rounded = [None if part is None else rounded_part(part, self.dtype) for part in parts]
        return _cpu.low_rank_adapter(
            [0 if part is None else part.down.data_ptr() for part in rounded],
            [0 if part is None else part.up.data_ptr() for part in rounded],
            [0 if part is None else len(part.down) for part in rounded],
            self.outputs,
            self.inputs,
            _DTYPES[self.dtype],
        )

    def place(self, slot: int, packed: Any | None) -> None:
        """Keeps a reference: nothing is copied."""
        self._held.place(slot, packed)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor | None:
        """One loop of the pool of threads."""
        kernels = self._kernels
        step = kernels._adapters_step(x.shape[0], sampled=self._sampled)
        if step is None:
            return add
        columns = sum(self.outputs)
        out = kernels._new_delta(x, columns) if add is None else add
        op = _cpu.low_rank(
            self._held,
            self.inputs,
            self.outputs,
            _DTYPES[self.dtype],
            x.data_ptr(),
            x.stride(0),
            _DTYPES[x.dtype],
            0 if add is None else add.data_ptr(),
            0 if add is None else add.stride(0),
            out.data_ptr(),
            out.stride(0),
        )
        kernels._do(op, step, x)
        return out


class CpuLowRankEmbedding(LowRankEmbedding):
    """An operation over the tokens, in the loop of the embedding's own."""

    def __init__(self, kernels: CpuKernels, shape: LowRankShape) -> None:
        """See ``Kernels.make_low_rank_embedding``."""
        super().__init__(shape)
        self._kernels = kernels
        self._held = _cpu.LowRankTableSlots(shape.slots)

    def pack(self, part: LowRankPart) -> Any:
        """Transposes ``down``."""
        check_part(part, self.rows, self.outputs, self.max_rank)
        down, up = rounded_part(part, self.dtype)
        table = down.T.contiguous()
        return _cpu.low_rank_table(
            table.data_ptr(), up.data_ptr(), len(down), self.rows, self.outputs, _DTYPES[self.dtype]
        )

    def place(self, slot: int, packed: Any | None) -> None:
        """Keeps a reference: nothing is copied."""
        self._held.place(slot, packed)

    def __call__(self, ids: Tensor, add: Tensor, first: int = 0) -> Tensor:
        """While recording, ids must be the batch's token ids."""
        step = self._kernels._adapters_step(ids.shape[0], token_ids=ids.data_ptr())
        if step is not None:
            op = _cpu.low_rank_lookup(self._held, self.outputs, first, add.data_ptr())
            self._kernels._do(op, step, ids)
        return add
