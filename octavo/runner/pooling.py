"""``Pooling``: embeddings and scores from the hidden states of prompts (vLLM's Pooler)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.core.failures import NOT_FINITE, SequenceFailure
from octavo.core.outputs import DenseConfig, PoolerActivation
from octavo.core.plan import NewSequence
from octavo.core.request import Pool
from octavo.kernels.forward_batch import ForwardBatch, ForwardOutput
from octavo.kernels.interface import Array, Kernels, PackedWeight
from octavo.runner.input_batch import FlatInputs, Int64Array, StepInputs
from octavo.runner.row_feature import RowFeature

if TYPE_CHECKING:
    from octavo.runner.loaded_model import LoadedModel
    from octavo.runner.model_runner import QueuedStep


#: Tokens whose class scores are computed at once.
_ROWS = 1024
#: Activations that kernels fuse with the product.
_FUSED = ("relu", "gelu")


@dataclass(slots=True)
class _Pooled:
    task: Pool
    num_tokens: int
    #: A row, or the sum or maximum of the rows so far; for tasks by token, all rows so far.
    rows: NDArray[np.float32] | None = None


class Pooling(RowFeature):
    """Pools the prompts of the worker's sequences, step by step.

    A vector depends neither on the rest of a step nor on how its prompt is cut into steps: the rows of a prompt are
    added one by one, in order, and all later reductions run row by row. Owns the matrices after the pooling.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._kernels, self._config = loaded, loaded.kernels, loaded.config.pooler
        self._held: dict[int, _Pooled] = {}
        self._dense: list[_Dense] = []
        for dense in self._config.dense:
            from octavo.loader.weights import read_dense  # few models have such matrices

            matrix, bias, residual = read_dense(loaded.folder, dense)
            packed = self._kernels.pack([matrix], bias, dtype=DType.FLOAT32)
            added = None if residual is None else self._kernels.pack([residual], None, dtype=DType.FLOAT32)
            self._dense.append(_Dense(dense, packed, added))

    def add(self, sequence: NewSequence, row: int) -> None:
        if not isinstance(sequence.task, Pool):
            return
        if sequence.num_computed and sequence.task.needs_all_tokens:
            raise ConfigError(f"a vector needs all tokens, but {sequence.num_computed} are computed already")
        self._held[sequence.seq_id] = _Pooled(sequence.task, sequence.num_prompt_tokens)

    def forget(self, seq_id: int, row: int) -> None:
        self._held.pop(seq_id, None)

    def reads_hidden(self) -> bool:
        return bool(self._held)

    def after_step(self, inputs: StepInputs, batch: ForwardBatch, output: ForwardOutput, step: QueuedStep) -> None:
        """Pools the step's hidden states; adds the results of complete prompts to ``step``."""
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
                values = self._kernels.to_numpy(output.hidden)
            self._take(pooled, values[offsets[i] : offsets[i + 1]], int(inputs.starts[i]))
            if inputs.ends[i] >= pooled.num_tokens:
                ended.append((seq_id, pooled))
        if ended:
            results = self._finish([(pooled.task, pooled.rows) for _, pooled in ended])
            for (seq_id, _), result in zip(ended, results, strict=True):
                if np.isfinite(result).all():
                    step.extra(seq_id).pooled = result.tobytes()
                else:
                    step.extra(seq_id).error = self._explain(inputs, batch, seq_id)

    def _take(self, pooled: _Pooled, rows: NDArray[np.float32], start: int) -> None:
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

    def _explain(self, inputs: StepInputs, batch: ForwardBatch, seq_id: int) -> SequenceFailure:
        index = inputs.seq_ids.index(seq_id)
        first, last = inputs.arrays["query_start_loc"][index : index + 2].tolist()
        reader = FiniteReader(self._kernels, slice(first, last))
        network = self._loaded.network
        if self._loaded.ranks.incoming is None:
            network.forward_layers(network.embed(batch.token_ids), batch, self.worker.cache.network_caches, reader)
        place = "after the last layer"
        if reader.first is not None:  # the residual stream before layer 0 is the embedding
            place = f"in layer {reader.first - 1}" if reader.first else "in the embedding"
        return SequenceFailure(f"the result is not finite (NaN or infinite), first {place}", NOT_FINITE)

    def _finish(self, pooled: Sequence[tuple[Pool, NDArray[np.float32] | None]]) -> list[NDArray[np.float32]]:
        """The result of each request from its pooled row [E], or from its rows [n, E]: float32 [D] or [n, D]."""
        results: list[NDArray[np.float32] | None] = [None] * len(pooled)
        by_task: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for index, (task, _) in enumerate(pooled):
            by_task.setdefault((task.name, tuple(task.answer_ids)), []).append(index)
        for (name, answers), members in by_task.items():
            # Zeros where no token of the prompt is pooled.
            nothing = np.zeros((1, self._loaded.config.hidden_size), np.float32)
            blocks = [nothing if (r := pooled[index][1]) is None else np.atleast_2d(r) for index in members]
            sizes = np.cumsum([0, *map(len, blocks)])
            values = self._project(np.concatenate(blocks), name, answers)
            for place, index in enumerate(members):
                task = pooled[index][0]
                rows = np.stack([self._activate(row, task) for row in values[sizes[place] : sizes[place + 1]]])
                results[index] = rows if task.is_by_token else rows[0]
        return [result for result in results if result is not None]

    def _project(self, rows: NDArray[np.float32], task: str, answers: tuple[int, ...]) -> NDArray[np.float32]:
        """Rows [n, E] to vectors or scores [n, D], before normalization and activation."""
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
        """Truncates, normalizes or activates a row [D] as its request asks."""
        params = task.params
        if task.name in ("embed", "token_embed"):
            row = row[: params.dimensions]
            normalize = self._config.normalize if params.use_activation is None else params.use_activation
            return _normalized(row) if normalize else row
        if task.answer_ids:
            return activated(row, "softmax")[-1:] if params.use_activation is not False else row[-1:] - row[:1]
        return row if params.use_activation is False else activated(row, self._config.activation)


def _appended(before: NDArray[np.float32] | None, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows if before is None else np.concatenate([np.atleast_2d(before), rows])


def _divisor(kind: str, first: int, last: int) -> np.float32:
    count = last - first
    if kind == "weighted_mean":  # SGPT (Muennighoff 2022): weights 1, 2, ... of the positions
        return np.float32((first + 1 + last) * count / 2)
    return np.float32(np.sqrt(count) if kind == "sqrt_mean" else count)


class _Dense(NamedTuple):
    """A matrix after the pooling; ``residual`` projects its input, which is added to the product."""

    config: DenseConfig
    matrix: PackedWeight
    residual: PackedWeight | None


class TextPairs(RowFeature):
    """Token types of pairs of texts that an encoder reads together: 1 from the second text on."""

    def __init__(self, num_rows: int) -> None:
        #: Position of the second text of the row's pair, 0 without one; and the number of rows with a pair.
        self._second = np.zeros(num_rows, np.int64)
        self._num_pairs = 0

    def add(self, sequence: NewSequence, row: int) -> None:
        if isinstance(sequence.task, Pool) and sequence.task.second_text:
            self._second[row] = sequence.task.second_text
            self._num_pairs += 1

    def forget(self, seq_id: int, row: int) -> None:
        self._num_pairs -= bool(self._second[row])
        self._second[row] = 0

    def add_arrays(self, inputs: FlatInputs, rows: Int64Array, starts: Int64Array) -> None:
        if self._num_pairs:
            second = np.repeat(self._second[rows], np.diff(inputs.arrays["query_start_loc"]))
            types = (second > 0) & (inputs.arrays["positions"] >= second)
            inputs.arrays["token_types"] = types.astype(np.int64)


class FiniteReader:
    """Finds the first layer after which some rows of the residual stream are not finite. A ``ResidualReader``."""

    def __init__(self, kernels: Kernels, rows: slice) -> None:
        self._kernels, self._rows = kernels, rows
        self.first: int | None = None

    def read(self, layer: int, residual: Array) -> None:
        values = self._kernels.to_numpy(residual)[self._rows]
        if self.first is None and not np.isfinite(values.astype(np.float32)).all():
            self.first = layer


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


#: Those of torch.nn, with its default parameters; softmax and softmin along the last axis.
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
    return np.asarray(_FUNCTIONS[activation](values), np.float32)
