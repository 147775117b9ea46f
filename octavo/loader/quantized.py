"""Readers of quantised Hugging Face checkpoints: GPTQ, AWQ, compressed-tensors, fp8 and MXFP4."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from octavo.core.dtypes import DType, Stored
from octavo.core.errors import WeightError
from octavo.core.model_config import CheckpointQuantization, QuantizationScheme
from octavo.kernels.weight_rows import GroupQuantizedRows, QuantizedRows, dequantize_groups, mxfp4_rows
from octavo.models.checkpoint import (
    CheckpointEntry,
    Pairs,
    Shapes,
    Tensor,
    has_values,
    is_transposed,
    transpose,
    without_values,
)

#: Types of scales, as safetensors names them.
FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Method(ABC):
    """How one quantised matrix is stored; tensors are named by what follows the matrix's name."""

    scheme: QuantizationScheme
    optional: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def required(self) -> tuple[str, ...]: ...

    @abstractmethod
    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        """(N, K); WeightError if the tensors fit neither each other nor the checkpoint's configuration."""

    @abstractmethod
    def unpack(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> GroupQuantizedRows | np.ndarray:
        """The matrix; dequantised to ``dtype`` if its groups are not consecutive values of a row."""


def expect(stored: Mapping[str, Stored], name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    tensor = stored[name]
    if tensor.dtype not in dtypes:
        raise WeightError(f"{name} is of type {tensor.dtype}; expected {' or '.join(dtypes)}")
    if tensor.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise WeightError(f"{name} has shape {list(tensor.shape)}; expected {expected}")


def two_dimensions(stored: Mapping[str, Stored], name: str) -> tuple[int, int]:
    shape = stored[name].shape
    if len(shape) != 2 or not all(shape):
        raise WeightError(f"{name} has shape {list(shape)}; expected a matrix")
    return shape[0], shape[1]


def bits_of(scheme: QuantizationScheme) -> int:
    return 4 if scheme.number == "int4" else 8


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [A, B] to uint8 [A, B, 32 / bits], the lowest bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    return octets if bits == 8 else np.stack((octets & 15, octets >> 4), axis=-1).reshape(*words.shape, 8)


def grouped(
    scheme: QuantizationScheme,
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    index: np.ndarray | None,
    dtype: DType,
) -> GroupQuantizedRows | np.ndarray:
    """Rows of 4 or 8 bits in groups; dequantised to ``dtype`` if the groups are not consecutive values of equal number.

    ``codes``, ``scales`` and ``zeros`` are as in ``GroupQuantizedRows``. ``index`` [K] is the group of each column;
    None: consecutive ones.
    """
    bits, columns, groups = bits_of(scheme), codes.shape[1], scales.shape[1]
    size = scheme.group or columns
    if zeros is not None and bool((zeros == 2 ** (bits - 1)).all()):
        zeros = None
    in_order = np.arange(columns) // size
    index = in_order if index is None else index.astype(np.int64)
    if bool(((index < 0) | (index >= groups)).any()):
        raise WeightError(f"g_idx names a group outside 0 to {groups - 1}")
    if columns % size or not np.array_equal(index, in_order):
        return dequantize_groups(codes, scales, zeros, bits, dtype, index)
    return GroupQuantizedRows(bits, codes, scales, zeros)


# compressed-tensors, and fp8, which is stored alike

#: Rows of fp8 that are dequantised at once.
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class PackedIntegers(Method):
    """pack-quantized: weight_packed int32 [N, K / 8], the first column in the lowest bits; K / 4 with 8 bits.

    weight_scale is [N, groups]; weight_zero_point the same in int8, or packed along N; weight_shape holds N and K.
    """

    required = ("weight_packed", "weight_scale", "weight_shape")
    optional = ("weight_zero_point", "weight_g_idx")

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        bits = bits_of(self.scheme)
        n, words = two_dimensions(stored, "weight_packed")
        expect(stored, "weight_packed", ("I32",), (n, words))
        expect(stored, "weight_shape", ("I32", "I64"), (2,))
        shape = stored["weight_scale"].shape
        groups = shape[1] if len(shape) == 2 else 1
        k = words * 32 // bits if self.scheme.group is None else groups * self.scheme.group
        if -(-k * bits // 32) != words:
            raise WeightError(
                f"weight_packed has {words} words a row and weight_scale {groups} groups, but config.json says "
                f"{self.scheme.number} in groups of {self.scheme.group}"
            )
        _expect_scales(stored, self.scheme, n, k)
        if "weight_zero_point" in stored:
            packed = -(-n * bits // 32)
            shapes = ((packed, groups),) if stored["weight_zero_point"].dtype == "I32" else ((n, groups),)
            expect(stored, "weight_zero_point", ("I32", "I8"), *shapes)
        if "weight_g_idx" in stored:
            expect(stored, "weight_g_idx", ("I32", "I64"), (k,))
        return n, k

    def unpack(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> GroupQuantizedRows | np.ndarray:
        """Codes and packed zeros are stored as the integer plus 2^(bits - 1)."""
        bits = bits_of(self.scheme)
        n, k = tensors["weight_shape"].tolist()
        codes = unpack_words(tensors["weight_packed"], bits)
        codes = codes.reshape(len(codes), -1)
        if n != codes.shape[0] or not codes.shape[1] - 32 // bits < k <= codes.shape[1]:
            raise WeightError(f"weight_shape says {[n, k]}, weight_packed holds {list(codes.shape)}")
        zeros = tensors.get("weight_zero_point")
        if zeros is not None and zeros.dtype == np.int32:
            zeros = unpack_words(zeros.T, bits).reshape(zeros.shape[1], -1)[:, :n].T
        elif zeros is not None:
            zeros = (zeros.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
        index = tensors.get("weight_g_idx")
        index = None if index is None or bool((index == -1).all()) else index  # -1: it was never set
        scales = _row_scales(tensors["weight_scale"], n)
        return grouped(self.scheme, np.ascontiguousarray(codes[:, :k]), scales, zeros, index, dtype)


@dataclass(frozen=True)
class PlainIntegers(Method):
    """int-quantized: weight int8 [N, K], weight_scale [N, groups] or of the whole matrix, optional int8 zeros."""

    required = ("weight", "weight_scale")
    optional = ("weight_zero_point",)

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        n, k = two_dimensions(stored, "weight")
        expect(stored, "weight", ("I8",), (n, k))
        _expect_scales(stored, self.scheme, n, k)
        if "weight_zero_point" in stored:
            expect(stored, "weight_zero_point", ("I8",), stored["weight_scale"].shape)
        return n, k

    def unpack(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> GroupQuantizedRows | np.ndarray:
        codes = tensors["weight"].view(np.uint8) ^ 128
        zeros = tensors.get("weight_zero_point")
        zeros = None if zeros is None else _row_scales(zeros.view(np.uint8) ^ 128, len(codes))
        scales = _row_scales(tensors["weight_scale"], len(codes))
        return grouped(replace(self.scheme, number="int8"), codes, scales, zeros, None, dtype)


@dataclass(frozen=True)
class Floats(Method):
    """weight float8_e4m3fn [N, K] with a scale of the matrix, a row, a group, or a block; always dequantised.

    The scale is a factor of the weight, although its name may be weight_scale_inv.
    """

    #: Name of the scale.
    scale: str

    @property
    def required(self) -> tuple[str, ...]:
        return "weight", self.scale

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        n, k = two_dimensions(stored, "weight")
        expect(stored, "weight", ("F8_E4M3",), (n, k))
        _expect_scales(stored, self.scheme, n, k, self.scale)
        return n, k

    def unpack(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> np.ndarray:
        weight, scales = tensors["weight"], tensors[self.scale].astype(np.float32)
        n, k = weight.shape
        block = self.scheme.block
        if block is None or scales.size == 1:
            scales = _row_scales(scales, n)
            rows, columns = 1, -(-k // scales.shape[1])
        else:
            rows, columns = block
        out = np.empty((n, k), dtype.numpy)
        step = -(-_ROWS_AT_ONCE // rows) * rows
        for start in range(0, n, step):
            part = weight[start : start + step].astype(np.float32)
            factors = scales[start // rows : (start + step) // rows]
            factors = np.repeat(np.repeat(factors, rows, 0)[: len(part)], columns, 1)[:, :k]
            out[start : start + step] = part * factors
        return out


def _expect_scales(
    stored: Mapping[str, Stored], scheme: QuantizationScheme, n: int, k: int, name: str = "weight_scale"
) -> None:
    """Checks the scales' shape: of groups or blocks if there are any, else of the rows or the whole matrix."""
    if scheme.block is not None:
        shapes: tuple[tuple[int, ...], ...] = ((-(-n // scheme.block[0]), -(-k // scheme.block[1])),)
    elif scheme.group is not None:
        shapes = ((n, -(-k // scheme.group)),)
    else:
        shapes = ((n, 1), (n,), (1,), (1, 1), ())
    expect(stored, name, FLOATS, *shapes)


def _row_scales(scales: np.ndarray, n: int) -> np.ndarray:
    """Scales or zeros as [N, groups]."""
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    return np.broadcast_to(scales, (n, scales.shape[1]))


# GPTQ (Frantar et al. 2022) of AutoGPTQ and GPTQModel, AWQ (Lin et al. 2023) of AutoAWQ


@dataclass(frozen=True)
class Gptq(Method):
    """qweight [K / 8, N], qzeros [groups, N / 8], scales [groups, N], optional g_idx [K]; K / 4 with 8 bits."""

    zeros_minus_one: bool
    required = ("qweight", "qzeros", "scales")
    optional = ("g_idx",)

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        words, n = two_dimensions(stored, "qweight")
        k = words * 32 // bits_of(self.scheme)
        expect(stored, "qweight", ("I32",), (words, n))
        _expect_groups(stored, self.scheme, n, k)
        if "g_idx" in stored:
            expect(stored, "g_idx", ("I32", "I64"), (k,))
        return n, k

    def unpack(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> GroupQuantizedRows | np.ndarray:
        """The zeros are the stored ones, plus one with ``zeros_minus_one``."""
        bits = bits_of(self.scheme)
        words = tensors["qweight"]
        codes = unpack_words(words, bits).transpose(1, 0, 2).reshape(words.shape[1], -1)
        zeros = tensors["qzeros"]
        if self.zeros_minus_one:
            # As GPTQModel does: whole words, so that a zero of 0, whose subtraction borrowed, is restored by the carry.
            zeros = zeros + np.int32(0x11111111 if bits == 4 else 0x01010101)
        zeros = unpack_words(zeros, bits).reshape(len(zeros), -1).T
        return grouped(self.scheme, codes, tensors["scales"].T, zeros, tensors.get("g_idx"), dtype)


@dataclass(frozen=True)
class Awq(Method):
    """qweight [K, N / 8], qzeros [groups, N / 8], scales [groups, N]; words hold columns 0, 2, 4, 6, 1, 3, 5, 7."""

    required = ("qweight", "qzeros", "scales")

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        k, words = two_dimensions(stored, "qweight")
        expect(stored, "qweight", ("I32",), (k, words))
        _expect_groups(stored, self.scheme, words * 8, k)
        return words * 8, k

    def unpack(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> GroupQuantizedRows | np.ndarray:
        codes = {}
        for name in ("qweight", "qzeros"):
            # Transposes the words, which are fewer than the codes.
            words = np.ascontiguousarray(tensors[name].T).view(np.uint32)
            columns = np.empty((len(words), 8, words.shape[1]), np.uint8)
            for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                columns[:, column] = (words >> np.uint32(4 * place)) & np.uint32(15)
            codes[name] = columns.reshape(-1, words.shape[1])
        return grouped(self.scheme, codes["qweight"], tensors["scales"].T, codes["qzeros"], None, dtype)


def _expect_groups(stored: Mapping[str, Stored], scheme: QuantizationScheme, n: int, k: int) -> None:
    groups = 1 if scheme.group is None else -(-k // scheme.group)
    in_a_word = 32 // bits_of(scheme)
    if n % in_a_word:
        raise WeightError(f"qweight has {n} outputs; qzeros hold a multiple of {in_a_word}")
    what = f"{scheme.number} in groups of {scheme.group or k}"
    try:
        expect(stored, "qzeros", ("I32",), (groups, n // in_a_word))
        expect(stored, "scales", FLOATS, (groups, n))
    except WeightError as e:
        raise WeightError(f"{e}, for {what} as config.json says and qweight of {n} outputs, {k} inputs") from None


#: Suffixes of a quantised matrix's tensors; "weight" is one if its type is not that of a plain matrix.
_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv"),
    *("weight_shape", "weight_zero_point", "weight_g_idx"),
)
_INTEGERS_AND_FP8 = ("I8", "F8_E4M3")
#: Scales of activations and of the KV cache, which are not used.
_UNUSED = re.compile(r"\.((input|output)_(scale|zero_point|global_scale)|[qkv]_(scale|zero_point))$")


@dataclass(frozen=True)
class _Matrix:
    shape: tuple[int, int]
    parts: tuple[str, ...]
    method: Method


class Unpack:
    """A checkpoint entry that passes each quantised matrix X as ``X.weight``, after its last tensor was read.

    Tensors may come in any order. Other tensors pass unchanged.
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
        """Checks the types and shapes of all tensors before any is read.

        Args:
            stored: all tensors of the checkpoint.
            shapes: of the tensors that the network expects.
            dtype: of dequantised matrices.
            keep: whether rows are passed in their own bits.
            transposed: whether ``checkpoint_map`` transposes the tensor of this name. Methods store matrices of GPT-2's
                Conv1D as those of other layers, so these are transposed here for the map.

        Raises:
            WeightError: a tensor of a matrix is missing, or has the wrong type or shape.
        """
        self._dtype = dtype
        self._keep = keep
        self._transposed = transposed
        by_matrix: dict[str, dict[str, Stored]] = {}
        for name, tensor in stored.items():
            prefix, _, part = name.rpartition(".")
            if part in _PARTS or (part == "weight" and tensor.dtype in _INTEGERS_AND_FP8):
                by_matrix.setdefault(prefix, {})[part] = tensor
        for prefix, parts in by_matrix.items():  # "weight" of any type
            if (weight := stored.get(f"{prefix}.weight")) is not None:
                parts["weight"] = weight
        self._matrices = {name: _matrix(quantization, name, parts, shapes) for name, parts in by_matrix.items()}

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
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
            if len(held) < len(matrix.parts):
                continue
            del waiting[prefix]
            values: np.ndarray | QuantizedRows
            if all(map(has_values, held.values())):
                try:
                    values = matrix.method.unpack(held, self._dtype)
                except WeightError as e:
                    raise WeightError(f"matrix {prefix!r}: {e}") from None
                if isinstance(values, QuantizedRows) and not self._keep(values):
                    values = values.dequantize(self._dtype)
            else:  # only headers are compared
                values = without_values(matrix.shape, self._dtype.numpy)
            name = f"{prefix}.weight"
            yield name, transpose(values) if self._transposed(name) else values
        for prefix, held in waiting.items():  # tensors after the matrix was complete
            raise WeightError(f"tensor {f'{prefix}.{next(iter(held))}'!r} occurs twice")


#: Codes and scales of a stack of matrices X, or of one, in the checkpoints of gpt-oss.
_MXFP4_PART = re.compile(r"(.+)_(blocks|scales)")
_STACK = re.compile(r"experts\.(?=[^.]+$)")


class UnpackMXFP4:
    """A checkpoint entry that passes X_blocks and X_scales as ``X.weight`` [N, K], after the second of them was read.

    X_blocks is uint8 [.., N, K / 32, 16], X_scales uint8 [.., N, K / 32] (see ``mxfp4_rows``). Of a stack
    ``experts.X`` [experts, N, K] each matrix is passed by itself, as ``experts.0.X.weight`` and so on.
    """

    def __init__(self, stored: Mapping[str, Stored], dtype: DType, keep: Callable[[QuantizedRows], bool]) -> None:
        """Checks the types and shapes of all tensors before any is read; arguments as for ``Unpack``.

        Raises:
            WeightError: codes or scales are missing, or have the wrong type or shape.
        """
        self._dtype, self._keep = dtype, keep
        for name in stored:
            if match := _MXFP4_PART.fullmatch(name):
                self._check(stored, match[1])

    def _check(self, stored: Mapping[str, Stored], matrix: str) -> None:
        blocks, scales = f"{matrix}_blocks", f"{matrix}_scales"
        if missing := [name for name in (blocks, scales) if name not in stored]:
            raise WeightError(f"the checkpoint lacks {missing[0]!r}; a matrix of mxfp4 is stored as blocks and scales")
        shape = stored[blocks].shape
        dimensions = 4 if _STACK.search(matrix) else 3
        if len(shape) != dimensions or not all(shape) or shape[-1] != 16:
            expected = f"{'[experts, ' if dimensions == 4 else '['}outputs, inputs / 32, 16]"
            raise WeightError(f"{blocks} has shape {list(shape)}; expected {expected}")
        expect(stored, blocks, ("U8",), shape)
        expect(stored, scales, ("U8",), shape[:-1])

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        waiting: dict[str, dict[str, np.ndarray]] = {}
        for name, tensor in pairs:
            match = _MXFP4_PART.fullmatch(name)
            if match is None or not isinstance(tensor, np.ndarray):
                yield name, tensor
                continue
            held = waiting.setdefault(match[1], {})
            if match[2] in held:
                raise WeightError(f"tensor {name!r} occurs twice")
            held[match[2]] = tensor
            if len(held) == 2:
                del waiting[match[1]]
                yield from self._matrices(match[1], held["blocks"], held["scales"])

    def _matrices(self, name: str, blocks: np.ndarray, scales: np.ndarray) -> Iterator[tuple[str, Tensor]]:
        if blocks.ndim == 3:
            yield f"{name}.weight", self._matrix(name, blocks, scales)
            return
        for index in range(len(blocks)):
            expert = _STACK.sub(f"experts.{index}.", name)
            yield f"{expert}.weight", self._matrix(expert, blocks[index], scales[index])

    def _matrix(self, name: str, blocks: np.ndarray, scales: np.ndarray) -> Tensor:
        if not has_values(blocks):  # only headers are compared
            return without_values((blocks.shape[0], blocks.shape[1] * 32), self._dtype.numpy)
        try:
            rows = mxfp4_rows(blocks, scales)
        except WeightError as e:
            raise WeightError(f"matrix {name!r}: {e}") from None
        return rows if self._keep(rows) else rows.dequantize()


@dataclass(frozen=True)
class DropZeroBiases:
    """Skips zero biases that the network does not expect: AutoGPTQ stores one for every matrix."""

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
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
    """A network's map with the entries that a quantised checkpoint needs; arguments as for ``Unpack``."""
    entries = tuple(checkpoint_map)
    if quantization.method == "mxfp4":
        return [UnpackMXFP4(stored, dtype, keep), *entries]
    unpack = Unpack(quantization, stored, shapes, dtype, keep, lambda name: is_transposed(name, entries))
    return [unpack, *entries, DropZeroBiases()]


def _matrix(quantization: CheckpointQuantization, name: str, parts: Mapping[str, Stored], shapes: Shapes) -> _Matrix:
    """The matrix, with the first storage method that its tensors fit."""
    errors: dict[str, None] = {}
    for scheme in quantization.schemes:
        method: Method
        if quantization.method == "gptq":
            method = Gptq(scheme, quantization.zeros_minus_one)
        elif quantization.method == "awq":
            method = Awq(scheme)
        elif scheme.number == "fp8":
            method = Floats(scheme, "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale")
        else:
            method = PlainIntegers(scheme) if "weight" in parts else PackedIntegers(scheme)
        try:
            missing = [part for part in method.required if part not in parts]
            extra = [part for part in parts if part not in (*method.required, *method.optional)]
            if missing or extra:
                wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(extra)}"
                raise WeightError(
                    f"the checkpoint {wrong}; a matrix of {quantization.name} is stored as {', '.join(method.required)}"
                )
            shape = method.shape(parts)
            if (expected := shapes.get(f"{name}.weight", shape)) != shape:
                raise WeightError(f"its shape is {list(shape)}, expected {list(expected)}")
        except WeightError as e:
            errors[str(e)] = None
        else:
            return _Matrix(shape, tuple(parts), method)
    raise WeightError(f"matrix {name!r}: {'; '.join(errors) or 'config.json says of no matrix that it is quantised'}")
