"""Vectors and scores, made of the hidden states of prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ConfigError
from octavo.core.plan import NewSequence
from octavo.core.request import Pool
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.runner.loaded_model import LoadedModel
from octavo.runner.pending import QueuedStep
from octavo.runner.pooling_head import FiniteReader, PoolingHead
from octavo.runner.step_inputs import StepInputs

Caches = list[LayerCache]


@dataclass(slots=True)
class _Pooled:
    """A sequence whose prompt is pooled."""

    task: Pool
    num_tokens: int
    #: What is known of its vector: a row, or a sum or the largest of rows so far; of tasks by token, all rows so far.
    rows: NDArray[np.float32] | None = None


class Pooling:
    """Owns what is known of the vectors of held sequences.

    A vector does not depend on what else is in a step, nor on how its prompt is cut into steps: the rows of a prompt
    are added in their order, each to the sum of those before it.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        """Reads the matrices that follow the pooling, if the model has any."""
        self._loaded, self._kernels = loaded, loaded.kernels
        self._head = PoolingHead(loaded)
        self._held: dict[int, _Pooled] = {}

    def add(self, sequence: NewSequence) -> None:
        """A sequence is held from now on; nothing is done for one that is not pooled.

        Raises:
            ConfigError: a part of its prompt is computed, and its hidden states are lost.
        """
        if not isinstance(sequence.task, Pool):
            return
        if sequence.num_computed and sequence.task.needs_all_tokens:
            raise ConfigError(f"a vector needs all tokens, but {sequence.num_computed} are computed already")
        self._held[sequence.seq_id] = _Pooled(sequence.task, sequence.num_prompt_tokens)

    def forget(self, seq_id: int) -> None:
        """A sequence is held no more."""
        self._held.pop(seq_id, None)

    def compute(
        self, inputs: StepInputs, batch: ForwardBatch, hidden: Array, step: QueuedStep, caches: Callable[[], Caches]
    ) -> None:
        """Takes what the step has computed of pooled prompts, hidden [T, E], and makes vectors of those that end.

        ``caches``: those of the network's layers.
        """
        if not self._held:
            return
        values: NDArray[np.float32] | None = None
        offsets = inputs.arrays["query_start_loc"].tolist()
        ended: list[tuple[int, _Pooled]] = []
        for i, seq_id in enumerate(inputs.seq_ids):
            pooled = self._held.get(seq_id)
            if pooled is None:
                continue
            if values is None:
                values = self._kernels.to_numpy(hidden)
            self._take(pooled, values[offsets[i] : offsets[i + 1]], int(inputs.starts[i]))
            if inputs.ends[i] >= pooled.num_tokens:
                ended.append((seq_id, pooled))
        if ended:
            results = self._head.finish([(pooled.task, pooled.rows) for _, pooled in ended])
            for (seq_id, _), result in zip(ended, results, strict=True):
                if np.isfinite(result).all():
                    step.pooled[seq_id] = result
                else:
                    step.failed[seq_id] = self._explain(inputs, batch, seq_id, caches())

    def _take(self, pooled: _Pooled, rows: NDArray[np.float32], start: int) -> None:
        """Adds the hidden states of the positions from ``start`` on."""
        task = pooled.task
        skipped = max(0, task.first - start)
        rows = rows[skipped:]
        if not len(rows):
            return
        first, last = start + skipped, start + skipped + len(rows)
        if task.is_by_token:
            pooled.rows = _appended(pooled.rows, rows.astype(np.float32))
            return
        kind = task.kind
        if kind == "cls":
            if first == task.first:
                pooled.rows = rows[0].astype(np.float32)
        elif kind == "last":
            if last == pooled.num_tokens:
                pooled.rows = rows[-1].astype(np.float32)
        elif kind == "max":
            pooled.rows = np.maximum.reduce(_appended(pooled.rows, rows.astype(np.float32)), axis=0)
        else:
            rows = rows.astype(np.float32, copy=False)
            if kind == "weighted_mean":
                rows = rows * np.arange(first + 1, last + 1, dtype=np.float32)[:, None]
            total = np.add.reduce(rows if pooled.rows is None else _appended(pooled.rows, rows), axis=0)
            pooled.rows = total if last < pooled.num_tokens else total / _divisor(kind, task.first, last)

    def _explain(self, inputs: StepInputs, batch: ForwardBatch, seq_id: int, caches: Caches) -> str:
        """Why a result is not finite: the first layer whose output is not, found by computing the step again."""
        place = inputs.seq_ids.index(seq_id)
        offsets = inputs.arrays["query_start_loc"]
        reader = FiniteReader(self._kernels, slice(int(offsets[place]), int(offsets[place + 1])))
        network = self._loaded.network
        if self._loaded.ranks.incoming is None:
            network.forward_layers(network.embed(batch.token_ids), batch, caches, reader)
        return f"the result is not finite (NaN or infinite), first {reader.describe()}"


def _appended(before: NDArray[np.float32] | None, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows if before is None else np.concatenate([np.atleast_2d(before), rows])


def _divisor(kind: str, first: int, last: int) -> np.float32:
    """What the sum over the positions from ``first`` to ``last`` is divided by."""
    count = last - first
    if kind == "weighted_mean":  # SGPT (Muennighoff 2022): weights 1, 2, ... of the positions
        return np.float32((first + 1 + last) * count / 2)
    return np.float32(np.sqrt(count) if kind == "sqrt_mean" else count)
