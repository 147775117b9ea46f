"""Makes matrices of the tensors that a quantised checkpoint stores for each of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import WeightError
from octavo.core.model_config import CheckpointQuantization
from octavo.kernels.quantized_rows import QuantizedRows
from octavo.loader.quantized.compressed import Floats, PackedIntegers, PlainIntegers
from octavo.loader.quantized.integers import Awq, Gptq
from octavo.loader.quantized.packed import Method
from octavo.loader.stored import Stored
from octavo.models.checkpoint import (
    CheckpointEntry,
    Pairs,
    Shapes,
    has_values,
    is_transposed,
    transposed,
    without_values,
)

#: Parts of a quantised matrix, by what follows its name; "weight" is one if its type is not that of a plain matrix.
_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv"),
    *("weight_shape", "weight_zero_point", "weight_g_idx"),
)
_INTEGERS_AND_FP8 = ("I8", "F8_E4M3")
#: Scales of activations and of the KV cache, which weights alone do not need.
_UNUSED = re.compile(r"\.((input|output)_(scale|zero_point|global_scale)|[qkv]_(scale|zero_point))$")


@dataclass(frozen=True)
class _Matrix:
    shape: tuple[int, int]
    #: What the names of its tensors end with.
    parts: tuple[str, ...]
    method: Method


class Unpack:
    """An entry of a checkpoint map that passes each quantised matrix X as ``X.weight``, once its last tensor is read.

    Tensors may come in any order. Everything that is not quantised passes unchanged.
    """

    def __init__(
        self,
        quantization: CheckpointQuantization,
        stored: Mapping[str, Stored],
        shapes: Shapes,
        dtype: DType,
        keep: Callable[[QuantizedRows], bool],
        transposed: Callable[[str], bool],
    ) -> None:
        """Checks the tensors' types and shapes before any of them is read.

        Args:
            quantization: of the checkpoint.
            stored: all its tensors, by name.
            shapes: of the tensors that the network expects.
            dtype: of what is dequantised.
            keep: whether rows are passed in their own bits.
            transposed: whether ``checkpoint_map`` transposes the tensor of this name. Methods store matrices of GPT-2's
                Conv1D as those of other layers, so these are transposed here to be what the map expects.

        Raises:
            WeightError: a part of a matrix is missing, or has another type or shape than it should; it is named.
        """
        self._dtype = dtype
        self._keep = keep
        self._transposed = transposed
        self._matrices = {
            name: _matrix(quantization, name, parts, shapes) for name, parts in _parts_by_matrix(stored).items()
        }

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, np.ndarray | QuantizedRows]]:
        """The matrices, and the tensors that belong to none."""
        waiting: dict[str, dict[str, np.ndarray]] = {}
        for name, tensor in pairs:
            prefix, _, part = name.rpartition(".")
            matrix = self._matrices.get(prefix)
            if matrix is None or part not in matrix.parts or not isinstance(tensor, np.ndarray):
                if not _UNUSED.search(name):
                    yield name, tensor
                continue
            held = waiting.setdefault(prefix, {})
            if part in held:
                raise WeightError(f"tensor {name!r} occurs twice")
            held[part] = tensor
            if len(held) == len(matrix.parts):
                values = self._values(prefix, matrix, waiting.pop(prefix))
                name = f"{prefix}.weight"
                yield name, transposed(values) if self._transposed(name) else values
        for prefix, held in waiting.items():  # all parts exist, so these came after the matrix was complete
            raise WeightError(f"tensor {f'{prefix}.{next(iter(held))}'!r} occurs twice")

    def _values(self, name: str, matrix: _Matrix, parts: Mapping[str, np.ndarray]) -> np.ndarray | QuantizedRows:
        if not all(map(has_values, parts.values())):  # only headers are compared
            return without_values(matrix.shape, self._dtype.numpy)
        try:
            values = matrix.method.unpack(parts, self._dtype)
        except WeightError as e:
            raise WeightError(f"matrix {name!r}: {e}") from None
        return values if isinstance(values, np.ndarray) or self._keep(values) else values.dequantize(self._dtype)


@dataclass(frozen=True)
class DropZeroBiases:
    """Skips biases that the network does not expect if they are zero: AutoGPTQ stores one for every matrix."""

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, np.ndarray | QuantizedRows]]:
        """The remaining tensors."""
        for name, tensor in pairs:
            is_extra = name.endswith(".bias") and name not in shapes
            # The values of a tensor without memory are seen when it is loaded.
            if not (is_extra and isinstance(tensor, np.ndarray) and (not has_values(tensor) or not bool(tensor.any()))):
                yield name, tensor


def with_unpacking(
    checkpoint_map: Iterable[CheckpointEntry],
    quantization: CheckpointQuantization,
    stored: Mapping[str, Stored],
    shapes: Shapes,
    dtype: DType,
    keep: Callable[[QuantizedRows], bool] = lambda rows: False,
) -> list[CheckpointEntry]:
    """A network's map with what a quantised checkpoint needs around it; arguments and errors as of ``Unpack``."""
    entries = tuple(checkpoint_map)

    def transposed(name: str) -> bool:
        return is_transposed(name, entries)

    return [Unpack(quantization, stored, shapes, dtype, keep, transposed), *entries, DropZeroBiases()]


def _parts_by_matrix(stored: Mapping[str, Stored]) -> dict[str, dict[str, Stored]]:
    found: dict[str, dict[str, Stored]] = {}
    for name, tensor in stored.items():
        prefix, _, part = name.rpartition(".")
        if part in _PARTS or (part == "weight" and tensor.dtype in _INTEGERS_AND_FP8):
            found.setdefault(prefix, {})[part] = tensor
    for prefix, parts in found.items():  # whatever its type
        if (weight := stored.get(f"{prefix}.weight")) is not None:
            parts["weight"] = weight
    return found


def _matrix(quantization: CheckpointQuantization, name: str, parts: Mapping[str, Stored], shapes: Shapes) -> _Matrix:
    """The matrix, with the first method of the checkpoint that its tensors fit."""
    errors: dict[str, None] = {}
    for method in _methods(quantization, parts):
        try:
            _expect_parts(quantization, method, parts)
            shape = method.shape(parts)
            if (expected := shapes.get(f"{name}.weight", shape)) != shape:
                raise WeightError(f"its shape is {list(shape)}, expected {list(expected)}")
        except WeightError as e:
            errors[str(e)] = None
        else:
            return _Matrix(shape, tuple(parts), method)
    raise WeightError(f"matrix {name!r}: {'; '.join(errors) or 'config.json says of no matrix that it is quantised'}")


def _methods(quantization: CheckpointQuantization, parts: Mapping[str, Stored]) -> Sequence[Method]:
    """How the checkpoint may store a matrix that has these tensors."""
    methods: list[Method] = []
    for scheme in quantization.schemes:
        if quantization.method == "gptq":
            methods.append(Gptq(scheme, quantization.zeros_minus_one))
        elif quantization.method == "awq":
            methods.append(Awq(scheme))
        elif scheme.number == "fp8":
            methods.append(Floats(scheme, "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"))
        elif "weight" in parts:
            methods.append(PlainIntegers(scheme))
        else:
            methods.append(PackedIntegers(scheme))
    return methods


def _expect_parts(quantization: CheckpointQuantization, method: Method, parts: Mapping[str, Stored]) -> None:
    missing = [part for part in method.required if part not in parts]
    extra = [part for part in parts if part not in (*method.required, *method.optional)]
    if missing or extra:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(extra)}"
        raise WeightError(
            f"the checkpoint {wrong}; a matrix of {quantization.name} is stored as {', '.join(method.required)}"
        )
