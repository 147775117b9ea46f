"""Packed weights of the CPU backend, and their products.

For quantised weights, activations are quantised row by row to 8 bits, with a float32 scale for each 32 consecutive
values: one scale per row would lose accuracy where a few channels are far greater than the others, as before
``down_proj``. Within 32 values the products are exact integers; see csrc/cpu/quant.hpp.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.core.dtypes import DType, rounded
from octavo.core.errors import ConfigError
from octavo.kernels.cpu.array import CpuArray
from octavo.kernels.cpu.compiled import DTYPES, address, cpu, strided, typed
from octavo.kernels.cpu.gguf_blocks import KEPT_TYPES, gguf_weight
from octavo.kernels.cpu.group_codes import group_codes
from octavo.kernels.cpu.op_runner import OpRunner
from octavo.kernels.cpu.quantize import Codes, quantize_weight
from octavo.kernels.gguf_rows import GGUFRows
from octavo.kernels.group_rows import GroupQuantizedRows
from octavo.kernels.packed_weight import Activation, PackedHeads, PackedWeight
from octavo.kernels.quantized_rows import QuantizedRows


class CpuWeight(PackedWeight):
    """A weight of the CPU kernels; subclasses create the operation of its product."""

    def __init__(self, runner: OpRunner, outputs: int, gated: bool) -> None:
        self.gated = gated
        #: Columns of a result.
        self.width = outputs // 2 if gated else outputs
        self._runner = runner

    def __call__(
        self,
        x: CpuArray,
        out_dtype: DType | None = None,
        add: CpuArray | None = None,
        activation: Activation | None = None,
    ) -> CpuArray:
        """Adds, activates and rounds the float32 sums while they are in registers."""
        out_dtype = out_dtype or x.dtype
        if add is not None and out_dtype == DType.FLOAT32 and not self.gated and add.is_contiguous:
            out = add
        else:
            out = self._runner.new(x, (x.shape[0], self.width), out_dtype)
        op = self.operation(x, out, add, activation)
        if self._runner.takes_delta(add):
            op = cpu.if_adapters(op, self.operation(x, out, None, activation))
        self._runner.run(op, x)
        return out

    def rows(self, ids: CpuArray, first: int, *, scale: float, dtype: DType) -> CpuArray:
        """While recording, ids must be the batch's token ids."""
        out = self._runner.new(ids, (ids.shape[0], self._matrix.k), DType.FLOAT32)
        op = cpu.lookup(self._matrix, out.address, first, dtype == DType.BFLOAT16, scale)
        self._runner.run(op, ids, token_ids=ids.address)
        return out

    @property
    @abstractmethod
    def _matrix(self) -> Any:
        """The compiled matrix, if it ``has_rows``."""

    def operation(
        self, x: CpuArray, out: CpuArray, add: CpuArray | None = None, activation: Activation | None = None
    ) -> Any:
        """The operation that computes a row of out for each token of the step.

        It holds addresses: the caller keeps x, out, add and this weight alive.
        """
        return self._operation(*typed(x), *typed(out), *strided(add), getattr(cpu.Activation, activation or "none"))

    @abstractmethod
    def _operation(self, *arguments: Any) -> Any:
        """The compiled operation; the arguments are the same for all formats."""


class CpuDenseWeight(CpuWeight):
    """Float32 or bfloat16, in groups of 16 outputs; for a gated weight 8 of the gate and 8 of up."""

    def __init__(
        self,
        runner: OpRunner,
        parts: Sequence[np.ndarray],
        dtype: DType,
        bias: np.ndarray | None = None,
        gated: bool = False,
        pieces: int = 1,
    ) -> None:
        """Copies parts [n_i, K], rounded to ``dtype``, and bias [sum of n_i], all of any float type.

        ``pieces``: see ``Kernels.pack``.

        Raises:
            ConfigError: the weight has another type.
        """
        rows, columns = sum(len(part) for part in parts), parts[0].shape[1]
        super().__init__(runner, rows, gated)
        self.has_rows = not gated
        if dtype not in (DType.FLOAT32, DType.BFLOAT16):
            raise ConfigError(f"the CPU kernels compute in float32 or bfloat16, not in {dtype}")
        held = [_by_rows(rounded(part, dtype)) for part in parts]
        floats = None if bias is None else np.ascontiguousarray(bias, np.float32)
        # The stride of a single row is undefined.
        places = [(address(m), len(m), m.strides[0] // m.itemsize if len(m) > 1 else columns) for m in held]
        self.packed = cpu.pack_linear(places, columns, DTYPES[dtype], address(floats), gated, pieces)

    @property
    def _matrix(self) -> Any:
        return self.packed

    def _operation(self, *arguments: Any) -> Any:
        return cpu.linear(self.packed, *arguments)

    @property
    def nbytes(self) -> int:
        """Padding included."""
        return int(self.packed.nbytes)


class CpuHeads(PackedHeads):
    """Float32 or bfloat16 matrices of heads, each packed as a ``CpuDenseWeight``; one operation multiplies all."""

    def __init__(self, runner: OpRunner, weight: np.ndarray, dtype: DType) -> None:
        """Copies weight [H, N, K]."""
        self._runner = runner
        self._heads = [CpuDenseWeight(runner, [head], dtype).packed for head in weight]
        self._outputs = weight.shape[1]

    def __call__(self, x: CpuArray) -> CpuArray:
        """To a new tensor."""
        out = self._runner.new(x, (*x.shape[:2], self._outputs), x.dtype)
        self._runner.run(self.operation(x, out), x)
        return out

    def operation(self, x: CpuArray, out: CpuArray) -> Any:
        """The operation from x [T, H, K] to out [T, H, N], tokens and heads strided; it holds addresses."""
        return cpu.head_products(
            self._heads,
            x.address,
            x.strides[0],
            x.strides[1],
            DTYPES[x.dtype],
            out.address,
            out.strides[0],
            out.strides[1],
            DTYPES[out.dtype],
        )

    @property
    def nbytes(self) -> int:
        """Padding included."""
        return sum(int(head.nbytes) for head in self._heads)


class CpuQuantizedWeight(CpuWeight):
    """Quantised matrices with the same input; each may have another format."""

    def __init__(
        self, runner: OpRunner, parts: list[Codes], bias: np.ndarray | None = None, gated: bool = False
    ) -> None:
        """Packs the codes [n_i, K] and the bias [sum of n_i].

        Raises:
            ConfigError: they differ in K, a format does not support K, or the bias has another size.
        """
        inputs = {part.codes.shape[1] for part in parts}
        if len(inputs) != 1:
            raise ConfigError(f"the matrices of a quantised layer must have the same inputs, not {sorted(inputs)}")
        outputs = sum(part.codes.shape[0] for part in parts)
        if bias is not None and bias.shape != (outputs,):
            raise ConfigError(f"the bias of a quantised layer has shape {list(bias.shape)}, expected [{outputs}]")
        super().__init__(runner, outputs, gated)
        self.parts = [_pack_codes(part) for part in parts]
        self.bias = None if bias is None else np.ascontiguousarray(bias, np.float32)

    @property
    def _matrix(self) -> Any:
        return self.parts[0]

    def _operation(self, *arguments: Any) -> Any:
        return cpu.linear_quant(self.parts, *arguments, address(self.bias), self.gated)

    @property
    def nbytes(self) -> int:
        """Scales and padding included."""
        return sum(part.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)


def _by_rows(matrix: np.ndarray) -> np.ndarray:
    """The matrix with columns that follow each other, and rows that are some numbers apart; copied if it is not so."""
    rows, columns = matrix.strides
    if columns == matrix.itemsize and rows % columns == 0 and rows >= columns * matrix.shape[1]:
        return matrix
    return np.ascontiguousarray(matrix)


def codes_of_matrix(weight: np.ndarray, kind: str) -> Codes:
    """The codes of a floating-point matrix [n, k].

    "int8" has a scale per row; "int4" one for 32 values, or is "int8" if k is no multiple of 32.

    Raises:
        ConfigError: any other kind.
    """
    if kind not in ("int8", "int4"):
        raise ConfigError(f"the CPU kernels have quantization int8 and int4, not {kind!r}; fp8 is for GPUs")
    group = 32 if kind == "int4" and weight.shape[1] % 32 == 0 else None
    return quantize_weight(weight, kind if group else "int8", group)


def keeps_bits(part: QuantizedRows) -> bool:
    """Whether ``codes_of_rows`` gives the very values of a GGUF matrix."""
    return isinstance(part, GGUFRows) and part.kind in KEPT_TYPES


def codes_of_rows(part: QuantizedRows) -> Codes:
    """The codes of a matrix in a checkpoint's own bits; GGUF blocks of other types than ``KEPT_TYPES`` get 8 bits.

    Those types have 2 to 6 bits: with a scale for each 32 values, the second rounding error is far below the first.

    Raises:
        ConfigError: groups of a size, or scales, that the kernels do not have.
    """
    if isinstance(part, GroupQuantizedRows):
        return group_codes(part)
    if isinstance(part, GGUFRows) and keeps_bits(part):
        return gguf_weight(part.kind, part.rows, part.columns)
    return quantize_weight(part.dequantize(), "int8", 32)


def _pack_codes(weight: Codes) -> Any:
    n, k = weight.codes.shape
    tensors = (weight.codes, weight.scales, weight.minima, weight.group_scales, weight.group_minima)
    # Keeps the arrays alive until the packing is done.
    held = [None if tensor is None else np.ascontiguousarray(tensor) for tensor in tensors]
    try:
        return cpu.PackedQuant(weight.format, n, k, *map(address, held))
    except ValueError as e:
        raise ConfigError(str(e)) from None
