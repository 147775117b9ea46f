"""What follows the pooling of hidden states: matrices, class scores, lengths of vectors, probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.dtypes import DType
from octavo.core.pooler_config import DenseConfig, PoolerActivation
from octavo.core.request import Pool
from octavo.kernels.arrays import Array
from octavo.kernels.interface import Kernels
from octavo.kernels.packed_weight import PackedWeight
from octavo.runner.loaded_model import LoadedModel

#: Tokens whose class scores are computed at once.
_ROWS = 1024
#: Activations that products do themselves.
_FUSED = ("relu", "gelu")


class PoolingHead:
    """Makes results of pooled hidden states. Owns the matrices after the pooling; products are the backend's.

    What is done row by row is done for each alone, so that results do not depend on their company.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        """Reads the matrices.

        Raises:
            WeightError: their files are missing or wrong.
        """
        self._loaded, self._kernels, self._config = loaded, loaded.kernels, loaded.config.pooler
        self._dense = [(dense, self._read(dense)) for dense in self._config.dense]

    def _read(self, dense: DenseConfig) -> PackedWeight:
        from octavo.loader.pooling_weights import read_dense  # few models have such matrices

        weight, bias = read_dense(self._loaded.folder, dense)
        return self._kernels.pack([weight], bias, dtype=DType.FLOAT32)

    def finish(self, pooled: Sequence[tuple[Pool, NDArray[np.float32] | None]]) -> list[NDArray[np.float32]]:
        """The results of requests, each of its pooled row [E], or of its rows [n, E]: float32 [D] or [n, D]."""
        results: list[NDArray[np.float32] | None] = [None] * len(pooled)
        by_task: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for index, (task, _) in enumerate(pooled):
            by_task.setdefault((task.name, tuple(task.answer_ids)), []).append(index)
        for (name, answers), members in by_task.items():
            blocks = [np.atleast_2d(_rows_of(pooled[index][1])) for index in members]
            sizes = np.cumsum([0, *map(len, blocks)])
            values = self._project(np.concatenate(blocks), name, answers)
            for place, index in enumerate(members):
                task = pooled[index][0]
                rows = np.stack([self._activate(row, task) for row in values[sizes[place] : sizes[place + 1]]])
                results[index] = rows if task.is_by_token else rows[0]
        return [result for result in results if result is not None]

    def _project(self, rows: NDArray[np.float32], task: str, answers: tuple[int, ...]) -> NDArray[np.float32]:
        """Rows [n, E] to vectors or scores [n, D], before what makes vectors of length 1 or probabilities of them."""
        if task in ("embed", "token_embed"):
            for dense, weight in self._dense:
                fused: Any = dense.activation if dense.activation in _FUSED else None
                rows = self._to_numpy(weight(self._kernels.array(rows), DType.FLOAT32, activation=fused))
                rows = np.tanh(rows) if dense.activation == "tanh" else rows
            return rows
        network, parts = self._loaded.network, []
        self._kernels.adapters.use(None)
        for start in range(0, len(rows), _ROWS):
            x = self._kernels.array(rows[start : start + _ROWS])
            if answers:
                parts.append(self._to_numpy(network.logits(x))[:, list(answers)])
            else:
                parts.append(self._to_numpy(network.scores(x)))
        return np.concatenate(parts)

    def _to_numpy(self, x: Array) -> NDArray[np.float32]:
        return self._kernels.to_numpy(x).astype(np.float32, copy=True)

    def _activate(self, row: NDArray[np.float32], task: Pool) -> NDArray[np.float32]:
        """A row [D] as its request wants it: cut, of length 1, or probabilities."""
        params = task.params
        if task.name in ("embed", "token_embed"):
            row = row[: params.dimensions]
            wanted = self._config.normalize if params.use_activation is None else params.use_activation
            if not wanted:
                return row
            length = np.sqrt(np.sum(np.square(row, dtype=np.float64)))
            return (row / np.maximum(length, 1e-12)).astype(np.float32)
        if task.answer_ids:
            return activated(row, "softmax")[-1:] if params.use_activation is not False else row[-1:] - row[:1]
        return row if params.use_activation is False else activated(row, self._config.activation)


class FiniteReader:
    """Finds the first layer after which the residual stream is not finite in some rows, as a ``ResidualReader``."""

    def __init__(self, kernels: Kernels, rows: slice) -> None:
        self._kernels, self._rows = kernels, rows
        self.first: int | None = None

    def read(self, layer: int, residual: Array) -> None:
        """See ``ResidualReader``."""
        values = self._kernels.to_numpy(residual)[self._rows]
        if self.first is None and not np.isfinite(values.astype(np.float32)).all():
            self.first = layer

    def describe(self) -> str:
        """Where in words: the stream before layer 0 is the embedding."""
        if self.first is None:
            return "after the last layer"
        return "in the embedding" if self.first == 0 else f"in layer {self.first - 1}"


def activated(row: NDArray[np.float32], activation: PoolerActivation) -> NDArray[np.float32]:
    """Class scores [D] as probabilities, or as the activation makes them."""
    if activation == "softmax":
        weights = np.exp(row - row.max())
        return weights / weights.sum()
    if activation == "sigmoid":
        with np.errstate(over="ignore"):
            return (1 / (1 + np.exp(-row))).astype(np.float32)
    if activation == "tanh":
        return np.tanh(row)
    if activation == "relu":
        return np.maximum(row, 0)
    return row


def _rows_of(rows: NDArray[np.float32] | None) -> NDArray[np.float32]:
    assert rows is not None, "no token of the prompt is pooled"
    return rows
