"""Compares a checkpoint with the network it is for, and looks for weights that are not finite.

Headers alone say which tensors are missing, unexpected or of the wrong shape: no weight is read for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.loader.quantized.reader import with_unpacking
from octavo.loader.stored import DTYPES, Stored
from octavo.loader.stored_head import with_stored_head
from octavo.loader.weights import missing_tensors, read_headers, read_safetensors, tensor_problem
from octavo.models.checkpoint import CheckpointEntry, Pairs, Shapes, without_values
from octavo.models.sizes import build_without_weights

#: Rows that are looked at once take about so many bytes.
_PIECE = 8 << 20


@dataclass(frozen=True)
class Problem:
    """What is wrong with a tensor, or with the checkpoint if ``tensor`` is None."""

    tensor: str | None
    problem: str


@dataclass(frozen=True)
class CheckReport:
    """What a check of a whole checkpoint has found."""

    tensors: int
    size_bytes: int
    problems: list[Problem]


def refuse_misfits(folder: Path, config: ModelConfig, entries: Sequence[CheckpointEntry], shapes: Shapes) -> None:
    """Compares the headers of a checkpoint with the network that ``config`` describes.

    Args:
        folder: holds the safetensors.
        config: for hints in messages.
        entries: the network's checkpoint map.
        shapes: of the tensors that the whole network expects.

    Raises:
        WeightError: a tensor is missing, unexpected, duplicate, or of the wrong shape or type; the message names it.
    """
    missing = []
    for problem in _header_problems(read_headers(folder), config, entries, shapes):
        if problem.tensor is not None and problem.problem == _MISSING:
            missing.append(problem.tensor)
        else:
            raise WeightError(
                problem.problem if problem.tensor is None else f"tensor {problem.tensor!r} {problem.problem}"
            )
    if missing:
        raise missing_tensors(missing)


def check_model(folder: Path, config: ModelConfig, gguf: Path | None = None) -> CheckReport:
    """What is wrong with the weights in ``folder``, or in ``gguf``; all of them are read, a few MB at a time.

    Of a quantised checkpoint the tensors of matrices are compared, and scales and plain weights must be finite.
    """
    problems: list[Problem] = []
    tensors = size = 0
    try:
        before: list[CheckpointEntry] = []
        if gguf is None:
            config, before = with_stored_head(config, folder)
        network = build_without_weights(config, "float32")
        shapes = network.tensor_shapes()
        if gguf is None:
            stored = read_headers(folder)
            entries: Sequence[CheckpointEntry] = [*before, *network.entries()]
            if config.quantization is not None:
                entries = with_unpacking(entries, config.quantization, stored, shapes, DType.FLOAT32)
            problems += _header_problems(stored, config, entries, shapes)
            pairs: Iterator[tuple[str, np.ndarray]] = read_safetensors(folder)
        else:
            from octavo.loader.gguf_weights import GGUFCheckpoint

            pairs = GGUFCheckpoint(gguf, config, shapes).read_all()
        for name, tensor in pairs:
            tensors, size = tensors + 1, size + tensor.nbytes
            if bad := _count_not_finite(tensor):
                problems.append(Problem(name, f"{bad} of {tensor.size} values are infinite or not a number"))
    except (WeightError, UnsupportedModelError) as e:
        problems.append(Problem(None, str(e)))
    return CheckReport(tensors, size, problems)


_MISSING = "is missing"


def _header_problems(
    stored: Mapping[str, Stored], config: ModelConfig, entries: Sequence[CheckpointEntry], shapes: Shapes
) -> Iterator[Problem]:
    """Passes tensors without values through the checkpoint map and compares what comes out with the network."""
    pairs: Pairs = (
        (name, without_values(entry.shape, DTYPES.get(entry.dtype, np.bool_))) for name, entry in stored.items()
    )
    for entry in entries:
        pairs = entry.apply(pairs, shapes)
    seen: set[str] = set()
    try:
        for name, tensor in pairs:
            if problem := tensor_problem(name, tensor, shapes, seen):
                yield Problem(name, problem + _hint(tuple(tensor.shape), shapes.get(name), config))
            seen.add(name)
    except WeightError as e:  # an entry cannot split or join what it was given
        yield Problem(None, str(e))
        return
    for name in shapes:
        if name not in seen:
            yield Problem(name, _MISSING)


def _hint(shape: tuple[int, ...], expected: tuple[int, ...] | None, config: ModelConfig) -> str:
    """Which value of config.json a tensor of another shape contradicts, if only one can be meant."""
    if expected is None or len(shape) != len(expected):
        return ""
    meanings = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads * head_dim": config.num_heads * config.head_dim,
        "num_key_value_heads * head_dim": config.num_kv_heads * config.head_dim,
    }
    wrong = [ours for ours, theirs in zip(expected, shape, strict=True) if ours != theirs]
    names = [name for name, value in meanings.items() if wrong and value == wrong[0]]
    return f": config.json has {names[0]} = {wrong[0]}" if len(names) == 1 else ""


def _count_not_finite(tensor: np.ndarray) -> int:
    """How many values are infinite or not a number."""
    if tensor.dtype.kind in "iub" or not tensor.size:
        return 0
    flat, step = tensor.reshape(-1), max(1, _PIECE // tensor.itemsize)
    pieces = (flat[start : start + step] for start in range(0, len(flat), step))
    return sum(piece.size - int(np.isfinite(piece).sum()) for piece in pieces)
