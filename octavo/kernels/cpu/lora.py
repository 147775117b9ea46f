"""Low-rank products of the CPU backend; see csrc/cpu/bind_lora.cpp.

The rows of an adapter are multiplied together, in tasks of a few rows that compute both products; a row's bits do not
depend on the others. Matrices have the adapter's own rank, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.kernels.cpu.array import CpuArray
from octavo.kernels.cpu.compiled import DTYPES, address, cpu, strided, typed
from octavo.kernels.cpu.op_runner import OpRunner
from octavo.kernels.lora import Adapters, LowRank, LowRankEmbedding, LowRankPart, LowRankShape, check_part, rounded_part


class CpuAdapters(Adapters):
    """Each adapter has its own rank."""

    def __init__(self, runner: OpRunner) -> None:
        super().__init__()
        self.runner = runner

    def _take(self, slots: CpuArray, rows: CpuArray) -> CpuArray:
        return CpuArray.over(slots.numpy()[rows.numpy()])

    def make_low_rank(self, shape: LowRankShape, *, sampled: bool = False) -> CpuLowRank:
        """See ``Adapters``."""
        return CpuLowRank(self, shape, sampled=sampled)

    def make_low_rank_embedding(self, shape: LowRankShape) -> CpuLowRankEmbedding:
        """See ``Adapters``."""
        return CpuLowRankEmbedding(self, shape)

    def run(self, op: Any, x: CpuArray, slots: CpuArray | None, **arrays: int) -> None:
        """Runs an operation whose rows have these slots; a recorded one gets those of each step."""
        self.runner.run(op, x, adapters=address(slots), **arrays)

    def is_idle(self, slots: CpuArray | None) -> bool:
        """Whether there is nothing to run, nor to record."""
        return slots is None and self.runner.recording is None


class CpuLowRank(LowRank):
    """An operation that does nothing in steps without adapters."""

    def __init__(self, adapters: CpuAdapters, shape: LowRankShape, *, sampled: bool = False) -> None:
        """See ``Adapters.make_low_rank``."""
        super().__init__(shape)
        self._adapters, self._sampled = adapters, sampled
        self._held = cpu.LowRankSlots(shape.slots)

    def pack(self, parts: Sequence[LowRankPart | None]) -> Any:
        """For vectors of 16 outputs, and of 64 bytes of inputs, in the order in which they are read."""
        self.check(parts)
        rounded = [None if part is None else rounded_part(part, self.dtype) for part in parts]
        return cpu.low_rank_adapter(
            [0 if part is None else address(part.down) for part in rounded],
            [0 if part is None else address(part.up) for part in rounded],
            [0 if part is None else len(part.down) for part in rounded],
            self.outputs,
            self.inputs,
            DTYPES[self.dtype],
        )

    def place(self, slot: int, packed: Any | None) -> None:
        """Keeps a reference: nothing is copied."""
        self._held.place(slot, packed)

    def __call__(self, x: CpuArray, add: CpuArray | None = None) -> CpuArray | None:
        """One loop of the pool of threads."""
        adapters = self._adapters
        slots = adapters.slots(sampled=self._sampled)
        if adapters.is_idle(slots):
            return add
        out = adapters.runner.new_delta(x, sum(self.outputs)) if add is None else add
        dtype = DTYPES[self.dtype]
        op = cpu.low_rank(self._held, self.inputs, self.outputs, dtype, *typed(x), *strided(add), *strided(out))
        adapters.run(op, x, slots)
        return out


class CpuLowRankEmbedding(LowRankEmbedding):
    """An operation over the tokens, in the loop of the embedding's own."""

    def __init__(self, adapters: CpuAdapters, shape: LowRankShape) -> None:
        """See ``Adapters.make_low_rank_embedding``."""
        super().__init__(shape)
        self._adapters = adapters
        self._held = cpu.LowRankTableSlots(shape.slots)

    def pack(self, part: LowRankPart) -> Any:
        """Transposes ``down``."""
        check_part(part, self.rows, self.outputs, self.max_rank)
        down, up = rounded_part(part, self.dtype)
        table = np.ascontiguousarray(down.T)
        return cpu.low_rank_table(address(table), address(up), len(down), self.rows, self.outputs, DTYPES[self.dtype])

    def place(self, slot: int, packed: Any | None) -> None:
        """Keeps a reference: nothing is copied."""
        self._held.place(slot, packed)

    def __call__(self, ids: CpuArray, add: CpuArray, first: int = 0) -> CpuArray:
        """While recording, ids must be the batch's token ids."""
        slots = self._adapters.slots()
        if not self._adapters.is_idle(slots):
            op = cpu.low_rank_lookup(self._held, self.outputs, first, add.address)
            self._adapters.run(op, ids, slots, token_ids=ids.address)
        return add
