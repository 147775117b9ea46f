"""Recording of a forward: its tape, its buffers, and the check that all operations can be recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.core.errors import UnrecordableError
from octavo.kernels.cpu.arena import Arena
from octavo.kernels.cpu.compiled import cpu
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch, ForwardOutput, padding_batch


class Recording:
    """Owns the tape, and for each buffer what its rows are: tokens, sampled positions or encoder tokens.

    The tape holds this backend's operations only. A torch operation would run once, while recording, on uninitialised
    memory, and not in replays; so torch operations other than views raise an error.
    """

    def __init__(self, arena: Arena, largest: BatchSize) -> None:
        self.tape = cpu.Tape()
        self._arena = arena
        # Only the shapes and identities of its arrays are used: each step has its own arrays.
        self.batch = padding_batch(largest)
        self._sampled = largest.sampled
        #: By the address of a buffer; others (made by the caller) have a row for each token.
        self._rows: dict[int, Any] = {}
        #: Addresses of buffers that hold what adapters add to a product.
        self._deltas: set[int] = set()

    def record(self, forward: Forward) -> ForwardOutput:
        """Calls ``forward`` and records its operations.

        Raises:
            UnrecordableError: it calls a torch operation that is not a view.
        """
        with _OnlyViews():
            return forward(self.batch)

    def is_positions(self, ids: Tensor) -> bool:
        """Whether these are the step's positions, and not its token ids.

        Raises:
            UnrecordableError: they are neither, so a replay could not find them in the batch.
        """
        if ids is not self.batch.token_ids and ids is not self.batch.positions:
            raise UnrecordableError("the ids of a recorded embedding must be the step's token ids or positions")
        return ids is self.batch.positions

    def rows_of(self, x: Tensor) -> Any:
        """What the rows of x are, a ``cpu.Rows``."""
        return self._rows.get(x.untyped_storage().data_ptr(), cpu.Rows.tokens)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype, rows: Any) -> Tensor:
        """A buffer with these rows as its first dimension."""
        out = self._arena.take(shape, dtype)
        self._deltas.discard(out.untyped_storage().data_ptr())
        self._rows[out.untyped_storage().data_ptr()] = rows
        return out

    def mark_delta(self, x: Tensor) -> None:
        """Says that a buffer holds what adapters add, and nothing in steps without adapters."""
        self._deltas.add(x.untyped_storage().data_ptr())

    def take_delta(self, x: Tensor) -> bool:
        """Whether it is such a buffer; from now on it is one like others, which may get the product's result."""
        address = x.untyped_storage().data_ptr()
        found = address in self._deltas
        self._deltas.discard(address)
        return found

    def new_sampled(self, like: Tensor) -> Tensor:
        """A buffer for the sampled rows of ``like``."""
        return self.new((self._sampled, *like.shape[1:]), like.dtype, cpu.Rows.sampled)

    def append(self, op: Any, x: Tensor) -> None:
        """Records an operation over the rows of x."""
        self.tape.append(op, self.rows_of(x))

    def replay(self, output: ForwardOutput, forward: Forward) -> Forward:
        """A function that runs the tape for a step and returns its rows of ``output``, which the next step overwrites.

        It keeps a reference to ``forward``, as the tape holds only the addresses of weights.
        """
        tape = self.tape

        def run(batch: ForwardBatch, forward: Forward = forward) -> ForwardOutput:
            tape.run(step_of(batch))
            return output.first(len(batch.token_ids), len(batch.sampled_rows))

        return run


def step_of(batch: ForwardBatch) -> Any:
    """The batch as a ``cpu.Step``, the argument of operations."""
    tables, slots = batch.block_tables, batch.slot_mapping
    return cpu.Step(
        len(batch.token_ids),
        len(batch.seq_lens),
        batch.num_decodes,
        batch.token_ids.data_ptr(),
        batch.positions.data_ptr(),
        slots.data_ptr(),
        batch.query_start_loc.data_ptr(),
        batch.seq_lens.data_ptr(),
        tables.data_ptr(),
        tables.stride(1),
        tables.stride(0),
        slots.stride(0),
        len(batch.sampled_rows),
        batch.sampled_rows.data_ptr(),
        adapters=batch.adapters.data_ptr() if batch.has_adapters else 0,
    )


class _OnlyViews(TorchDispatchMode):
    """Allows views and raises an error for every other torch operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's hook: if true, the first operation imports torch's compiler, unused here, for over a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_view(func):
            raise UnrecordableError(
                f"{func} was called while a step is recorded: the tape of the CPU kernels cannot hold it, and would "
                "leave it out of every step; use an operation of Kernels, or Kernels.host_call"
            )
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    """Whether the operation returns a view of its argument and writes nothing."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
