"""Operations of a step: run one by one, or recorded once and replayed for every step.

Why recording: a decode step of a small model is some 300 kernels of a few dozen microseconds each, and a Python call
costs a few. So the network's forward runs once with recording on: each kernel appends an operation with fixed buffers,
large enough for any step, to a tape; after that a step is one call that runs the tape for the rows it has. This is
similar to a captured CUDA graph, but one tape serves every number of rows.
"""

from __future__ import annotations

from typing import Any

from octavo.core.dtypes import DType
from octavo.kernels.arrays import ArrayMaker
from octavo.kernels.cpu.arena import Arena
from octavo.kernels.cpu.array import CpuArray
from octavo.kernels.cpu.compiled import cpu
from octavo.kernels.cpu.recording import PartedTape, Recording, step_of
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch, ForwardOutput


class OpRunner:
    """Runs or records operations, and makes the memory of their results; a backend and all its products share one."""

    def __init__(self) -> None:
        #: What operations are appended to; None: they run.
        self.recording: Recording | None = None
        self.arena = Arena()

    def capture(self, forward: Forward, largest: BatchSize, kernels: ArrayMaker) -> Forward:
        """Records ``forward`` for batches of at most this size, and returns a function that replays it.

        A replay overwrites the output of the one before.

        Raises:
            UnrecordableError: ``forward`` does something to arrays that is no operation of the kernels.
        """
        recording, output = self._record(forward, largest, kernels, self.arena)
        return recording.replay(output, forward)

    def capture_parts(self, forward: Forward, largest: BatchSize, kernels: ArrayMaker) -> PartedTape:
        """As ``capture``; its buffers are its own, as other steps run between its parts."""
        recording, output = self._record(forward, largest, kernels, Arena())
        return recording.parts(output, forward)

    def _record(
        self, forward: Forward, largest: BatchSize, kernels: ArrayMaker, arena: Arena
    ) -> tuple[Recording, ForwardOutput]:
        self.recording = recording = Recording(arena, largest, kernels)
        try:
            return recording, recording.record(forward)
        finally:
            self.recording = None

    def run(self, op: Any, x: CpuArray, **arrays: int) -> None:
        """Runs an operation over the rows of x, or records it; ``arrays``: the step's, addresses and strides."""
        if self.recording is None:
            op.run(cpu.Step(x.shape[0], **arrays))
        else:
            self.recording.append(op, x)

    def run_step(self, op: Any, x: CpuArray, batch: ForwardBatch) -> None:
        """As ``run``, with all arrays of the batch."""
        if self.recording is None:
            op.run(step_of(batch))
        else:
            self.recording.append(op, x)

    def new(self, like: CpuArray, shape: tuple[int, ...], dtype: DType) -> CpuArray:
        """Uninitialised memory for a result with the rows of ``like``."""
        if self.recording is None:
            return CpuArray.empty(shape, dtype)
        return self.recording.new(shape, dtype, self.recording.rows_of(like))

    def new_sampled(self, batch: ForwardBatch, width: int, dtype: DType) -> CpuArray:
        """Uninitialised memory with a row for each sampled row of the step."""
        if self.recording is None:
            return CpuArray.empty((len(batch.sampled_rows), width), dtype)
        return self.recording.new_sampled(width, dtype)

    def new_delta(self, like: CpuArray, columns: int) -> CpuArray:
        """Memory for what adapters add to a product, float32; products ignore it in steps without adapters.

        Its rows are no multiple of 4 KiB apart, as those of a tile would then share lines of the cache.
        """
        out = self.new(like, (like.shape[0], -(-columns // 16) * 16 + 16), DType.FLOAT32)
        if self.recording is not None:
            self.recording.mark_delta(out)
        return out[:, :columns]

    def takes_delta(self, x: CpuArray | None) -> bool:
        """Whether x is such memory of a recording; from now on it is memory like other."""
        return x is not None and self.recording is not None and self.recording.take_delta(x)
