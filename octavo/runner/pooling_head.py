"""What follows the pooling of hidden states: matrices, class scores, lengths of vectors, probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class _Dense(NamedTuple):
    """A matrix after the pooling, and what its input is multiplied with before it is added."""

    config: DenseConfig
    matrix: PackedWeight
    residual: PackedWeight | None


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
        self._dense = [self._read(dense) for dense in self._config.dense]

    def _read(self, dense: DenseConfig) -> _Dense:
        from octavo.loader.pooling_weights import read_dense  # few models have such matrices

        matrix, bias, residual = read_dense(self._loaded.folder, dense)
        added = None if residual is None else self._kernels.pack([residual], None, dtype=DType.FLOAT32)
        return _Dense(dense, self._kernels.pack([matrix], bias, dtype=DType.FLOAT32), added)

    def finish(self, pooled: Sequence[tuple[Pool, NDArray[np.float32] | None]]) -> list[NDArray[np.float32]]:
        """The results of requests, each of its pooled row [E], or of its rows [n, E]: float32 [D] or [n, D]."""
        results: list[NDArray[np.float32] | None] = [None] * len(pooled)
        by_task: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for index, (task, _) in enumerate(pooled):
            by_task.setdefault((task.name, tuple(task.answer_ids)), []).append(index)
        for (name, answers), members in by_task.items():
            blocks = [self._rows_of(pooled[index][1]) for index in members]
            sizes = np.cumsum([0, *map(len, blocks)])
            values = self._project(np.concatenate(blocks), name, answers)
            for place, index in enumerate(members):
                task = pooled[index][0]
                rows = np.stack([self._activate(row, task) for row in values[sizes[place] : sizes[place + 1]]])
                results[index] = rows if task.is_by_token else rows[0]
        return [result for result in results if result is not None]

    def _rows_of(self, rows: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Rows [n, E]; zero where no token of the prompt is pooled."""
        return np.zeros((1, self._loaded.config.hidden_size), np.float32) if rows is None else np.atleast_2d(rows)

    def _project(self, rows: NDArray[np.float32], task: str, answers: tuple[int, ...]) -> NDArray[np.float32]:
        """Rows [n, E] to vectors or scores [n, D], before what makes vectors of length 1 or probabilities of them."""
        if task in ("embed", "token_embed"):
            for dense in self._dense:
                rows = self._apply(dense, rows)
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

    def _apply(self, dense: _Dense, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows [n, inputs] to [n, outputs]."""
        config = dense.config
        fused: Any = config.activation if config.activation in _FUSED else None
        if config.normalizes:
            rows = np.stack([_normalized(row) for row in rows])
        x = self._kernels.array(rows)
        result = self._to_numpy(dense.matrix(x, DType.FLOAT32, activation=fused))
        if fused is None:
            result = activated(result, config.activation)
        if config.residual:
            result += rows if dense.residual is None else self._to_numpy(dense.residual(x, DType.FLOAT32))
        return result

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
            return _normalized(row)
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


def _normalized(row: NDArray[np.float32]) -> NDArray[np.float32]:
    length = np.sqrt(np.sum(np.square(row, dtype=np.float64)))
    return (row / np.maximum(length, 1e-12)).astype(np.float32)


def _softmax(x: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def _gelu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))) / 2)


#: As torch.nn has them, with the default values of their parameters; softmax and softmin along the last axis.
_FUNCTIONS: dict[PoolerActivation, Callable[[NDArray[np.float32]], Any]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    "softmin": lambda x: _softmax(-x),
    "silu": lambda x: x * _sigmoid(x),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "celu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "selu": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0))),
    "relu6": lambda x: np.clip(x, 0, 6),
    "hardtanh": lambda x: np.clip(x, -1, 1),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "hardsigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "softplus": lambda x: np.logaddexp(0, x),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "log_sigmoid": lambda x: -np.logaddexp(0, -x),
    "tanhshrink": lambda x: x - np.tanh(x),
    "softshrink": lambda x: np.sign(x) * np.maximum(np.abs(x) - 0.5, 0),
    "hardshrink": lambda x: np.where(np.abs(x) > 0.5, x, 0),
}


def activated(values: NDArray[np.float32], activation: PoolerActivation) -> NDArray[np.float32]:
    """Numbers [..., D] after an activation: class scores as probabilities, for example."""
    return np.asarray(_FUNCTIONS[activation](values), np.float32)
