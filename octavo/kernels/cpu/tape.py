"""Operations of a step: run one by one, or recorded once as a tape and replayed for every step. See ``OpRunner``."""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import UnrecordableError
from octavo.kernels.cpu.array import CpuArray, cpu
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch, ForwardOutput, padding_batch
from octavo.kernels.interface import ArrayMaker, PartedForward


class OpRunner:
    """Runs or records operations, and allocates their results; a backend and all its products share one."""

    def __init__(self) -> None:
        #: The recording that operations are appended to; None: they run.
        self.recording: Recording | None = None
        self.arena = Arena()

    def capture(self, forward: Forward, largest: BatchSize, kernels: ArrayMaker) -> Forward:
        """Records ``forward`` for batches of at most this size, and returns a function that replays it.

        A replay overwrites the output of the one before. Raises UnrecordableError if ``forward`` uses arrays other than
        by operations of the kernels.
        """
        tape, output = self._record(forward, largest, kernels, self.arena)
        last: tuple[ForwardBatch | None, Any, ForwardOutput] = None, None, output
        #: Of steps with ``sampled_only``, recorded with the first one.
        other: tuple[Any, ForwardOutput] | None = None

        # The default keeps ``forward`` alive, as the tape holds only the addresses of weights.
        def replay(batch: ForwardBatch, forward: Forward = forward) -> ForwardOutput:
            nonlocal last, other
            if (sampled_only := batch.sampled_only) is not None:
                if other is None:
                    with self.arena.shared(output.arrays()):
                        other = self._record(forward, largest, kernels, self.arena, sampled_only=True)
                other[0].run(step_of(batch), step_of(sampled_only))
                return other[1].first(len(batch.sampled_rows), len(batch.sampled_rows))
            if last[0] is not batch:  # a step that repeats the last one has the same batch, changed in place
                last = batch, step_of(batch), output.first(len(batch.token_ids), len(batch.sampled_rows))
            tape.run(last[1])
            return last[2]

        return replay

    def capture_parts(self, forward: Forward, largest: BatchSize, kernels: ArrayMaker) -> PartedTape:
        """Like ``capture``, with buffers of its own, as other steps run between its parts."""
        arena = Arena()
        return PartedTape(*self._record(forward, largest, kernels, arena), arena, forward)

    def _record(
        self, forward: Forward, largest: BatchSize, kernels: ArrayMaker, arena: Arena, *, sampled_only: bool = False
    ) -> tuple[Any, ForwardOutput]:
        self.recording = recording = Recording(cpu.Tape(), arena, padding_batch(largest, kernels))
        if sampled_only:
            recording.batch.sampled_only = replace(recording.batch)
        try:
            return recording.tape, forward(recording.batch)
        finally:
            self.recording = None

    def run(self, op: Any, x: CpuArray, **arrays: int) -> None:
        """Runs an operation over the rows of x, or records it.

        ``arrays``: addresses and strides of the step's arrays; a recorded operation gets those of each step.
        """
        if self.recording is None:
            op.run(cpu.Step(x.shape[0], **arrays))
        else:
            self.recording.append(op, x)

    def run_step(self, op: Any, x: CpuArray, batch: ForwardBatch) -> None:
        """Like ``run``, with all arrays of the batch."""
        if self.recording is None:
            op.run(step_of(batch))
        else:
            self.recording.append(op, x)

    def new(self, like: CpuArray, shape: tuple[int, ...], dtype: DType) -> CpuArray:
        """Uninitialised memory for a result with the rows of ``like``."""
        if self.recording is None:
            return CpuArray.empty(shape, dtype)
        return self.recording.arena.take(shape, dtype, _rows_of(like))

    def new_sampled(self, batch: ForwardBatch, width: int, dtype: DType) -> CpuArray:
        """Uninitialised memory with a row for each sampled row of the step."""
        if self.recording is None:
            return CpuArray.empty((len(batch.sampled_rows), width), dtype)
        sampled = len(self.recording.batch.sampled_rows)
        return self.recording.arena.take((sampled, width), dtype, cpu.Rows.sampled)

    def new_delta(self, like: CpuArray, columns: int) -> CpuArray:
        """Memory for an adapter's product, float32; the layer's product ignores it in steps without adapters.

        Its rows are no multiple of 4 KiB apart, as those of a tile would then share lines of the cache.
        """
        out = self.new(like, (like.shape[0], -(-columns // 16) * 16 + 16), DType.FLOAT32)
        if self.recording is not None:
            out.owner.is_delta = True
        return out[:, :columns]

    def takes_delta(self, x: CpuArray | None) -> bool:
        """Whether x is recorded memory of ``new_delta``; then it is from now on like other memory, to be reused."""
        if x is None or self.recording is None or not isinstance(x.owner, Lease) or not x.owner.is_delta:
            return False
        x.owner.is_delta = False
        return True


@dataclass(eq=False)
class Lease:
    """The owner of a buffer's arrays: while one of them lives, the buffer is not reused."""

    buffer: np.ndarray
    #: Meaning of the arrays' rows, a ``cpu.Rows``.
    rows: Any
    #: Whether it holds an adapter's product, and nothing in steps without adapters.
    is_delta: bool = False


class Arena:
    """Allocates arrays with memory that lives as long as the arena.

    A recorded operation holds addresses, so its buffers must never move. When the last array of a buffer is gone, no
    later operation of the recording can use it, and the buffer is reused: operations are replayed in the order in which
    they are recorded, so the reuse is correct in replays too.
    """

    def __init__(self) -> None:
        self._owned: list[np.ndarray] = []
        #: By size, each buffer that nothing uses.
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        #: By address of a buffer: its leases, which are several if it is shared.
        self._num_leases: Counter[int] = Counter()

    def take(self, shape: tuple[int, ...], dtype: DType, rows: Any) -> CpuArray:
        """An uninitialised array; it and its views have a ``Lease`` as their owner."""
        size = math.prod(shape) * dtype.itemsize
        if free := self._free[size]:
            buffer = free.pop()
        else:
            buffer = np.empty(size + 64, np.uint8)
            self._owned.append(buffer)
        lease, address = Lease(buffer, rows), buffer.ctypes.data
        self._num_leases[address] += 1
        weakref.finalize(lease, self._give_back, size, buffer)
        return CpuArray(lease, address + -address % 64, shape, dtype)

    def _give_back(self, size: int, buffer: np.ndarray) -> None:
        address = buffer.ctypes.data
        self._num_leases[address] -= 1
        if not self._num_leases[address]:
            self._free[size].append(buffer)

    @contextmanager
    def shared(self, arrays: Iterable[Any]) -> Iterator[None]:
        """Meanwhile arrays may be taken in the memory of these, which are not read after the others are written."""
        buffers = [array.owner.buffer for array in arrays if isinstance(array.owner, Lease)]
        for buffer in buffers:
            self._free[len(buffer) - 64].append(buffer)
        try:
            yield
        finally:
            for buffer in buffers:
                free = self._free[len(buffer) - 64]
                free[:] = [each for each in free if each is not buffer]


@dataclass
class Recording:
    """A tape, and a step of the largest size, which its buffers have.

    The tape holds this backend's operations only. Any other would run once, while recording, on uninitialised memory,
    and not in replays; so arrays have none.
    """

    tape: Any
    arena: Arena
    #: Only the shapes and identities of its arrays are used: each step has its own arrays.
    batch: ForwardBatch

    def ids_of(self, array: CpuArray) -> Any:
        """The ``cpu.Ids`` that names this array of the step, by which a replay finds it in the batch."""
        names = [name for name in ("token_ids", "positions", "token_types") if array is getattr(self.batch, name)]
        if not names:
            raise UnrecordableError("the ids of a recorded embedding must be the step's token ids, positions or types")
        return cpu.Ids[names[0]]

    def append(self, op: Any, x: CpuArray) -> None:
        self.tape.append(op, _rows_of(x))


def _rows_of(x: CpuArray) -> Any:
    """The ``cpu.Rows`` of x; the rows of arrays that are not the arena's are the step's tokens."""
    return x.owner.rows if isinstance(x.owner, Lease) else cpu.Rows.tokens


class PartedTape(PartedForward):
    """A tape with buffers of its own, which is run in parts between other steps."""

    def __init__(self, tape: Any, output: ForwardOutput, arena: Arena, forward: Forward) -> None:
        super().__init__(forward)
        self._tape, self._output, self._arena = tape, output, arena
        #: Number of the next operation, and its first row that is not computed.
        self._next = 0, 0

    def begin(self, batch: ForwardBatch) -> None:
        super().begin(batch)
        self._next = 0, 0

    def advance(self, seconds: float) -> ForwardOutput | None:
        """See ``PartedForward``; the next batch overwrites the output."""
        batch = self._batch
        assert batch is not None, "begin comes first"
        self._next = self._tape.run_for(step_of(batch), *self._next, seconds)
        if self._next[0] < len(self._tape):
            return None
        self._batch = None
        return self._output.first(len(batch.token_ids), len(batch.sampled_rows))


def step_of(batch: ForwardBatch) -> Any:
    """The batch as a ``cpu.Step``, the argument of operations."""
    tables, slots, cross, rotary = batch.block_tables, batch.slot_mapping, batch.cross_tables, batch.rotary_positions
    return cpu.Step(
        len(batch.token_ids), len(batch.seq_lens), batch.num_decodes, batch.token_ids.address, batch.positions.address,
        slots.address, batch.query_start_loc.address, batch.seq_lens.address, tables.address, tables.strides[1],
        tables.strides[0], slots.strides[0], len(batch.sampled_rows), batch.sampled_rows.address,
        adapters=batch.adapters.address if batch.has_adapters else 0, token_types=batch.token_types.address,
        cross_lens=batch.cross_lens.address, cross_tables=cross.address, cross_table_stride=cross.strides[0],
        sees_until=batch.sees_until.address if batch.has_spans else 0, rotary_positions=rotary.address,
        rotary_stride=rotary.strides[0], num_drafts=batch.num_drafts.address,
    )  # fmt: skip
