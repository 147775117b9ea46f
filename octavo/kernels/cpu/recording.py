"""Recording of a forward: its tape and its buffers."""

from __future__ import annotations

from typing import Any

from octavo.core.dtypes import DType
from octavo.core.errors import UnrecordableError
from octavo.kernels.arrays import ArrayMaker
from octavo.kernels.cpu.arena import Arena, Lease
from octavo.kernels.cpu.array import CpuArray
from octavo.kernels.cpu.compiled import cpu
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch, ForwardOutput, padding_batch
from octavo.kernels.interface import PartedForward


class Recording:
    """Owns the tape, and the step whose sizes its buffers have.

    The tape holds this backend's operations only. Any other would run once, while recording, on uninitialised memory,
    and not in replays; so arrays have none.
    """

    def __init__(self, arena: Arena, largest: BatchSize, kernels: ArrayMaker) -> None:
        self.tape = cpu.Tape()
        self._arena = arena
        # Only the shapes and identities of its arrays are used: each step has its own arrays.
        self.batch = padding_batch(largest, kernels)
        self._sampled = largest.sampled

    def record(self, forward: Forward) -> ForwardOutput:
        """Calls ``forward`` and records its operations."""
        return forward(self.batch)

    def ids_of(self, array: CpuArray) -> Any:
        """Which of the step's arrays this is, a ``cpu.Ids``.

        Raises:
            UnrecordableError: it is none of them, so a replay could not find it in the batch.
        """
        names = [name for name in ("token_ids", "positions", "token_types") if array is getattr(self.batch, name)]
        if not names:
            raise UnrecordableError("the ids of a recorded embedding must be the step's token ids, positions or types")
        return cpu.Ids[names[0]]

    def rows_of(self, x: CpuArray) -> Any:
        """What the rows of x are, a ``cpu.Rows``: of arrays that the caller made, the step's tokens."""
        return x.owner.rows if isinstance(x.owner, Lease) else cpu.Rows.tokens

    def new(self, shape: tuple[int, ...], dtype: DType, rows: Any) -> CpuArray:
        """A buffer with these rows as its first dimension."""
        return self._arena.take(shape, dtype, rows)

    def mark_delta(self, x: CpuArray) -> None:
        """Says that a buffer holds what adapters add, and nothing in steps without adapters."""
        x.owner.is_delta = True

    def take_delta(self, x: CpuArray) -> bool:
        """Whether it is such a buffer; from now on it is one like others, which may get the product's result."""
        if not isinstance(x.owner, Lease) or not x.owner.is_delta:
            return False
        x.owner.is_delta = False
        return True

    def new_sampled(self, width: int, dtype: DType) -> CpuArray:
        """A buffer with a row for each sampled row."""
        return self.new((self._sampled, width), dtype, cpu.Rows.sampled)

    def append(self, op: Any, x: CpuArray) -> None:
        """Records an operation over the rows of x."""
        self.tape.append(op, self.rows_of(x))

    def replay(self, output: ForwardOutput, forward: Forward) -> Forward:
        """A function that runs the tape for a step and returns its rows of ``output``, which the next step overwrites.

        It keeps a reference to ``forward``, as the tape holds only the addresses of weights.
        """
        tape = self.tape
        last: tuple[ForwardBatch | None, Any, ForwardOutput] = None, None, output

        def run(batch: ForwardBatch, forward: Forward = forward) -> ForwardOutput:
            nonlocal last
            if last[0] is not batch:  # a step that repeats the last one has the same batch, changed in place
                last = batch, step_of(batch), output.first(len(batch.token_ids), len(batch.sampled_rows))
            tape.run(last[1])
            return last[2]

        return run

    def parts(self, output: ForwardOutput, forward: Forward) -> PartedTape:
        """The tape, to be run in parts."""
        return PartedTape(self.tape, self._arena, output, forward)


class PartedTape(PartedForward):
    """A tape with buffers of its own, which is run in parts between other steps."""

    def __init__(self, tape: Any, arena: Arena, output: ForwardOutput, forward: Forward) -> None:
        super().__init__(forward)
        self._tape, self._arena, self._output = tape, arena, output
        #: Number of the next operation, and its first row that is not computed.
        self._next = 0, 0

    def begin(self, batch: ForwardBatch) -> None:
        """See ``PartedForward``."""
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
        len(batch.token_ids),
        len(batch.seq_lens),
        batch.num_decodes,
        batch.token_ids.address,
        batch.positions.address,
        slots.address,
        batch.query_start_loc.address,
        batch.seq_lens.address,
        tables.address,
        tables.strides[1],
        tables.strides[0],
        slots.strides[0],
        len(batch.sampled_rows),
        batch.sampled_rows.address,
        adapters=batch.adapters.address if batch.has_adapters else 0,
        token_types=batch.token_types.address,
        cross_lens=batch.cross_lens.address,
        cross_tables=cross.address,
        cross_table_stride=cross.strides[0],
        sees_until=batch.sees_until.address if batch.has_spans else 0,
        rotary_positions=rotary.address,
        rotary_stride=rotary.strides[0],
    )
