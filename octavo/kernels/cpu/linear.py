"""Packed weights of the CPU backend, and their products.

For quantised weights, activations are quantised row by row to 8 bits, with a float32 scale for each 32 consecutive
values: one scale per row would lose accuracy where a few channels are far greater than the others, as before
``down_proj``. Within 32 values the products are exact integers; see csrc/cpu/quant.hpp.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.core.dtypes import DType, rounded
from octavo.core.errors import ConfigError, WeightError
from octavo.kernels.cpu.array import DTYPES, CpuArray, address, cpu, strided, typed
from octavo.kernels.cpu.tape import OpRunner
from octavo.kernels.interface import (
    Activation,
    Adapters,
    LowRank,
    LowRankEmbedding,
    LowRankPart,
    LowRankShape,
    PackedExperts,
    PackedHeads,
    PackedWeight,
    StoredForm,
    check_part,
    round_part,
)
from octavo.kernels.weight_rows import GGUFRows, GroupQuantizedRows, QuantizedRows, dequantize


class CpuWeight(PackedWeight):
    """A weight of the CPU kernels; subclasses create the operation of its product."""

    #: The compiled matrix, if it ``has_rows``.
    _matrix: Any

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
        rows, columns = sum(len(part) for part in parts), parts[0].shape[1]
        super().__init__(runner, rows, gated)
        self.has_rows = not gated
        if dtype not in (DType.FLOAT32, DType.BFLOAT16):
            raise ConfigError(f"the CPU kernels compute in float32 or bfloat16, not in {dtype}")
        held = [_with_contiguous_rows(rounded(part, dtype)) for part in parts]
        floats = None if bias is None else np.ascontiguousarray(bias, np.float32)
        # The stride of a single row is undefined.
        places = [(address(m), len(m), m.strides[0] // m.itemsize if len(m) > 1 else columns) for m in held]
        self.packed = self._matrix = cpu.pack_linear(places, columns, DTYPES[dtype], address(floats), gated, pieces)

    def _operation(self, *arguments: Any) -> Any:
        return cpu.linear(self.packed, *arguments)


class CpuQuantizedWeight(CpuWeight):
    """Quantised matrices with the same input; each may have another format."""

    def __init__(
        self, runner: OpRunner, parts: list[Codes], bias: np.ndarray | None = None, gated: bool = False
    ) -> None:
        inputs = {part.codes.shape[1] for part in parts}
        if len(inputs) != 1:
            raise ConfigError(f"the matrices of a quantised layer must have the same inputs, not {sorted(inputs)}")
        outputs = sum(part.codes.shape[0] for part in parts)
        if bias is not None and bias.shape != (outputs,):
            raise ConfigError(f"the bias of a quantised layer has shape {list(bias.shape)}, expected [{outputs}]")
        super().__init__(runner, outputs, gated)
        self.parts = [_pack_codes(part) for part in parts]
        self._matrix = self.parts[0]
        self.bias = None if bias is None else np.ascontiguousarray(bias, np.float32)

    def _operation(self, *arguments: Any) -> Any:
        return cpu.linear_quant(self.parts, *arguments, address(self.bias), self.gated)


def _with_contiguous_rows(matrix: np.ndarray) -> np.ndarray:
    """The matrix, copied unless each of its rows is contiguous and rows do not overlap."""
    rows, columns = matrix.strides
    if columns == matrix.itemsize and rows % columns == 0 and rows >= columns * matrix.shape[1]:
        return matrix
    return np.ascontiguousarray(matrix)


def _pack_codes(weight: Codes) -> Any:
    n, k = weight.codes.shape
    tensors = (weight.codes, weight.scales, weight.minima, weight.group_scales, weight.group_minima)
    # Keeps the arrays alive until the packing is done.
    held = [None if tensor is None else np.ascontiguousarray(tensor) for tensor in tensors]
    try:
        return cpu.PackedQuant(weight.format, n, k, *map(address, held))
    except ValueError as e:
        raise ConfigError(str(e)) from None


class CpuHeads(PackedHeads):
    """Float32 or bfloat16 matrices of heads, each packed as a ``CpuDenseWeight``; one operation multiplies all."""

    def __init__(self, runner: OpRunner, weight: np.ndarray, dtype: DType) -> None:
        self._runner = runner
        self._heads = [CpuDenseWeight(runner, [head], dtype).packed for head in weight]
        self._outputs = weight.shape[1]

    def __call__(self, x: CpuArray) -> CpuArray:
        out = self._runner.new(x, (*x.shape[:2], self._outputs), x.dtype)
        self._runner.run(self.operation(x, out), x)
        return out

    def operation(self, x: CpuArray, out: CpuArray) -> Any:
        """The operation from x [T, H, K] to out [T, H, N], tokens and heads strided; it holds addresses."""
        matrices = ((array.address, *array.strides[:2], DTYPES[array.dtype]) for array in (x, out))
        return cpu.head_products(self._heads, *itertools.chain(*matrices))


class CpuExperts(PackedExperts):
    def __init__(
        self,
        runner: OpRunner,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        activation: Activation = "silu",
        *,
        weighs_input: bool = False,
    ) -> None:
        self._runner, self._weighs_input = runner, weighs_input
        matrices = ([_expert_matrix(weight) for weight in weights] for weights in (gate_up, down))
        self._group = cpu.ExpertGroup(*matrices, getattr(cpu.Activation, activation))
        #: The compiled matrices hold their addresses.
        self._biases = [weight.bias for weight in gate_up if isinstance(weight, CpuQuantizedWeight)]

    def __call__(self, x: CpuArray, experts: CpuArray, weights: CpuArray, add: CpuArray | None = None) -> CpuArray:
        """The rows of an expert in one product; a row's bits do not depend on the others."""
        out = self._runner.new(x, tuple(x.shape), DType.FLOAT32) if add is None else add
        op = cpu.experts(
            self._group, *typed(x), experts.address, weights.address, experts.shape[1], *strided(out), *strided(add),
            weighs_input=self._weighs_input,
        )  # fmt: skip
        self._runner.run(op, x)
        return out


def _expert_matrix(weight: PackedWeight) -> Any:
    if isinstance(weight, CpuQuantizedWeight):
        return cpu.quantized_expert(weight.parts, address(weight.bias))
    assert isinstance(weight, CpuDenseWeight)
    return cpu.dense_expert(weight.packed)


# Low-rank products; see csrc/cpu/bind_lora.cpp.


class CpuLowRank(LowRank):
    """An operation that does nothing in steps without adapters."""

    def __init__(self, adapters: CpuAdapters, shape: LowRankShape, *, sampled: bool = False) -> None:
        super().__init__(adapters, shape, sampled=sampled)
        self._held = cpu.LowRankSlots(shape.slots)

    def pack(self, parts: Sequence[LowRankPart | None]) -> Any:
        """For vectors of 16 outputs, and of 64 bytes of inputs, in the order in which they are read."""
        self.check(parts)
        rounded = [None if part is None else round_part(part, self.dtype) for part in parts]
        return cpu.low_rank_adapter(
            [0 if part is None else address(part.down) for part in rounded],
            [0 if part is None else address(part.up) for part in rounded],
            [0 if part is None else len(part.down) for part in rounded], self.outputs, self.inputs, DTYPES[self.dtype],
        )  # fmt: skip

    def place(self, slot: int, packed: Any | None) -> None:
        self._held.place(slot, packed)

    def __call__(self, x: CpuArray, add: CpuArray | None = None) -> CpuArray | None:
        adapters = self._adapters
        slots = adapters.slots(sampled=self._sampled)
        if slots is None and adapters.runner.recording is None:
            return add
        out = adapters.runner.new_delta(x, sum(self.outputs)) if add is None else add
        dtype = DTYPES[self.dtype]
        op = cpu.low_rank(self._held, self.inputs, self.outputs, dtype, *typed(x), *strided(add), *strided(out))
        adapters.runner.run(op, x, adapters=address(slots))
        return out


class CpuLowRankEmbedding(LowRankEmbedding):
    """An operation over the tokens, in the loop of the embedding's own."""

    def __init__(self, adapters: CpuAdapters, shape: LowRankShape) -> None:
        super().__init__(adapters, shape)
        self._held = cpu.LowRankTableSlots(shape.slots)

    def pack(self, part: LowRankPart) -> Any:
        check_part(part, self.rows, self.outputs, self.max_rank)
        down, up = round_part(part, self.dtype)
        table = np.ascontiguousarray(down.T)
        return cpu.low_rank_table(address(table), address(up), len(down), self.rows, self.outputs, DTYPES[self.dtype])

    def place(self, slot: int, packed: Any | None) -> None:
        self._held.place(slot, packed)

    def __call__(self, ids: CpuArray, add: CpuArray, first: int = 0) -> CpuArray:
        """While recording, ids must be the batch's token ids."""
        slots, runner = self._adapters.slots(), self._adapters.runner
        if slots is not None or runner.recording is not None:
            op = cpu.low_rank_lookup(self._held, self.outputs, first, add.address)
            runner.run(op, ids, adapters=address(slots), token_ids=ids.address)
        return add


class CpuAdapters(Adapters):
    low_rank = CpuLowRank
    low_rank_embedding = CpuLowRankEmbedding

    def __init__(self, runner: OpRunner) -> None:
        super().__init__()
        self.runner = runner

    def _take(self, slots: CpuArray, rows: CpuArray) -> CpuArray:
        return CpuArray.over(slots.numpy()[rows.numpy()])


# Codes of quantised weights, packed by ``CpuQuantizedWeight``.


@dataclass(frozen=True)
class Codes:
    """A quantised matrix [N, K]; fields that its format does not have are None."""

    format: str
    #: [N, K]; 8 bits: int8; 4 bits: uint8, one per byte.
    codes: np.ndarray
    #: float16 [N, K / group]; q8_channel: float32 [N]; mxfp4: uint8 [N, K / 32], e8m0.
    scales: np.ndarray
    #: float16 [N, K / group].
    minima: np.ndarray | None = None
    #: q4_k: uint8 [N, K / 32], 6 bits, of the scales; and of the minima.
    group_scales: np.ndarray | None = None
    group_minima: np.ndarray | None = None


def quantize_weight(weight: np.ndarray, kind: str, group: int | None) -> Codes:
    """Quantises a floating-point weight [N, K].

    8 bits: the scale is the greatest magnitude of the group / 127. 4 bits: the one of ten scales with the least squared
    error.

    Args:
        weight: float32, bfloat16 or float16.
        kind: "int8" or "int4".
        group: weights of a row that share a scale, 32 or 128; None (int8 only): the whole row.

    Raises:
        WeightError: a weight is infinite or not a number, or too great for a float16 scale.
    """
    if (kind, group) not in {("int8", None), ("int8", 32), ("int8", 128), ("int4", 32), ("int4", 128)}:
        raise ConfigError(
            f"quantization {kind!r} with group {group!r}: expected int8 (None, 32, 128) or int4 (32, 128)"
        )
    n, k = weight.shape
    if group is not None and k % group:
        raise ConfigError(f"{kind} in groups of {group} needs inputs in multiples of {group}, not {k}")
    bits = int(kind[-1])
    dtype = DType.of(weight) if DType.of(weight) in (DType.FLOAT32, DType.BFLOAT16) else DType.FLOAT32
    weight = np.ascontiguousarray(weight, dtype.numpy)
    codes = np.empty((n, k), np.int8 if bits == 8 else np.uint8)
    scales = np.empty(n, np.float32) if group is None else np.empty((n, k // group), np.float16)
    cpu.quantize_rows(address(weight), n, k, k, DTYPES[dtype], bits, group or 0, address(codes), address(scales))
    if not np.isfinite(scales).all():
        raise WeightError("a weight is infinite, not a number, or too great to be quantised")
    return Codes("q8_channel" if group is None else f"q{bits}_{group}", codes, scales)


def codes_of_matrix(weight: np.ndarray, kind: str) -> Codes:
    """The codes of a floating-point matrix [n, k].

    "int8" has a scale per row; "int4" one for 32 values, or is "int8" if k is no multiple of 32.
    """
    if kind not in ("int8", "int4"):
        raise ConfigError(f"the CPU kernels have quantization int8 and int4, not {kind!r}; fp8 is for GPUs")
    group = 32 if kind == "int4" and weight.shape[1] % 32 == 0 else None
    return quantize_weight(weight, kind if group else "int8", group)


def keeps_bits(part: QuantizedRows) -> bool:
    """Whether ``codes_of_rows`` gives the very values of a GGUF matrix."""
    return isinstance(part, GGUFRows) and part.kind in KEPT_TYPES and part.factors is None


#: Values that ``codes_of_rows`` dequantises at once.
_VALUES_AT_ONCE = 1 << 22


def codes_of_rows(part: QuantizedRows) -> Codes:
    """The codes of a matrix in a checkpoint's own bits; GGUF blocks of other types than ``KEPT_TYPES`` get 8 bits.

    Those types have 1 to 6 bits: with a scale for each 32 values, the second rounding error is far below the first.
    """
    if isinstance(part, GroupQuantizedRows):
        return group_codes(part)
    assert isinstance(part, GGUFRows)
    if keeps_bits(part):
        return gguf_weight(part.kind, part.rows, part.columns)
    step = max(1, _VALUES_AT_ONCE // part.columns)
    pieces = [
        quantize_weight(part.take(slice(start, start + step), slice(None)).dequantize(), "int8", 32)
        for start in range(0, len(part.rows), step)
    ]
    codes, scales = (np.concatenate(arrays) for arrays in zip(*((p.codes, p.scales) for p in pieces), strict=True))
    return Codes("q8_32", codes, scales)


def gguf_weight(kind: str, rows: np.ndarray, columns: int) -> Codes:
    """The exact codes of a GGUF tensor: uint8 rows [N, bytes of a row] of K ``columns``, of one of ``KEPT_TYPES``."""
    if kind not in _READERS:
        raise ConfigError(f"GGUF type {kind} is not kept in its bits; kept: {', '.join(_READERS)}")
    _, values, size, read = _READERS[kind]
    if columns % values or rows.shape[1] != columns // values * size:
        raise ConfigError(
            f"rows of {columns} values of GGUF type {kind} have {columns / values * size:g} bytes, not {rows.shape[1]}"
        )
    return read(rows.reshape(rows.shape[0], -1, size))


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte ``start`` of each block [N, B, size]: [N, B]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Codes of runs of bytes [N, B, run]: first the low nibbles of a run, then the high ones; uint8 [N, K]."""
    n, blocks, run = packed.shape
    codes = np.empty((n, blocks, 2, run), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    return codes.reshape(n, -1)


def _q8_0(blocks: np.ndarray) -> Codes:
    """A block: scale, 32 int8."""
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(len(blocks), -1)
    return Codes("q8_32", codes, _halves(blocks, 0))


def _q4_0(blocks: np.ndarray) -> Codes:
    """A block: scale, 16 bytes."""
    return Codes("q4_32", _nibbles(blocks[..., 2:]), _halves(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Codes:
    """A block: scale, minimum, 16 bytes."""
    return Codes("q4_1", _nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: np.ndarray) -> Codes:
    """A block: scale, 32 fifth bits, 16 bytes of low bits; a code is 16 less than its 5 bits say."""
    low = _nibbles(blocks[..., 6:])
    fifth = np.unpackbits(np.ascontiguousarray(blocks[..., 2:6]), axis=-1, bitorder="little").reshape(low.shape)
    return Codes("q8_32", (low | fifth << 4).view(np.int8) - np.int8(16), _halves(blocks, 0))


#: The values that the codes of IQ4_NL mean.
_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)


def _iq4_nl(blocks: np.ndarray) -> Codes:
    """A block: scale, 16 bytes of indices into a table."""
    return Codes("q8_32", _IQ4_VALUES[_nibbles(blocks[..., 2:])], _halves(blocks, 0))


def _mxfp4(blocks: np.ndarray) -> Codes:
    """A block: scale, 16 bytes."""
    return Codes("mxfp4", _nibbles(blocks[..., 1:]), blocks[..., 0])


def _q4_k(blocks: np.ndarray) -> Codes:
    """A block: d, dmin, 12 bytes of 8 scales and 8 minima, 4 runs of 32 bytes.

    The first 4 scales and minima are the low 6 bits of bytes 0 to 3 and 4 to 7; the others have their low 4 bits in
    bytes 8 to 11 (the scale's are the low half) and their high 2 bits atop the first ones'.
    """
    n = len(blocks)
    first, second, third = np.split(blocks[..., 4:16], 3, axis=-1)
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    return Codes(
        "q4_k",
        _nibbles(blocks[..., 16:].reshape(n, -1, 32)),
        _halves(blocks, 0),
        _halves(blocks, 2),
        scales.reshape(n, -1),
        minima.reshape(n, -1),
    )


def _signs(kind: str, scale_at: int) -> Callable[[np.ndarray], Codes]:
    """A reader of a type whose values are -1, 0 or 1 times a scale, which is at byte ``scale_at`` of a block."""

    def read(blocks: np.ndarray) -> Codes:
        scales, units = _halves(blocks, scale_at), blocks.copy()
        units[..., scale_at : scale_at + 2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
        codes = (dequantize(kind, units.reshape(len(units), -1)) + 8).astype(np.uint8)
        return Codes("q4_128", codes, np.repeat(scales, codes.shape[1] // scales.shape[1] // 128, axis=1))

    return read


#: The format, values and bytes of a block, and its reader.
_READERS: dict[str, tuple[str, int, int, Callable[[np.ndarray], Codes]]] = {
    "Q8_0": ("q8_32", 32, 34, _q8_0),
    "Q4_0": ("q4_32", 32, 18, _q4_0),
    "Q4_1": ("q4_1", 32, 20, _q4_1),
    "Q5_0": ("q8_32", 32, 22, _q5_0),
    "IQ4_NL": ("q8_32", 32, 18, _iq4_nl),
    "MXFP4": ("mxfp4", 32, 17, _mxfp4),
    "Q4_K": ("q4_k", 256, 144, _q4_k),
    "TQ1_0": ("q4_128", 256, 54, _signs("TQ1_0", 52)),
    "TQ2_0": ("q4_128", 256, 66, _signs("TQ2_0", 64)),
    "Q1_0": ("q4_128", 128, 18, _signs("Q1_0", 0)),
}
#: Types that products compute without requantisation.
KEPT_TYPES = frozenset(_READERS)
#: Bits of a weight, with its share of scales and minima.
_BITS = {"q8_32": 8.5, "q4_32": 4.5, "q4_128": 4.125, "q4_1": 5.0, "q4_k": 4.625, "mxfp4": 4.25}


def form_of(kind: str) -> StoredForm:
    """How a matrix of a GGUF type is kept by ``codes_of_rows``."""
    format = _READERS[kind][0] if kind in _READERS else "q8_32"
    return StoredForm(_BITS[format], kind in _READERS)


#: Greatest relative error of a scale or minimum as float16.
_HALF_ROUNDING = 2.0**-11


def group_format(rows: GroupQuantizedRows) -> str | None:
    """The kernels' format of GPTQ, AWQ or compressed-tensors rows.

    None for groups that are no multiple of 32, 8 bits with zeros, or scales out of float16's range.
    """
    if rows.bits == 8 and rows.zeros is None and rows.scales.shape[1] == 1:
        return "q8_channel"
    size = 128 if rows.group % 128 == 0 else 32
    if rows.group % size or not _fits_half(rows.scales):
        return None
    if rows.zeros is None:
        return f"q{rows.bits}_{size}"
    return "q4_1" if rows.bits == 4 and _fits_half(_minima(rows)) else None


def group_codes(rows: GroupQuantizedRows) -> Codes:
    format = group_format(rows)
    if format is None:
        raise ConfigError(
            f"the CPU kernels have no products with {rows.bits}-bit weights in groups of {rows.group}"
            f"{'' if rows.zeros is None else ' with zeros'}: use fewer tensor-parallel workers or quantization='none'"
        )
    codes = rows.codes if rows.bits == 4 else (rows.codes ^ 128).view(np.int8)
    if format == "q8_channel":
        return Codes(format, codes, rows.scales[:, 0].astype(np.float32))
    repeats = rows.group // (128 if format.endswith("128") else 32)

    def per_unit(values: np.ndarray) -> np.ndarray:
        return np.repeat(_code_halves(values), repeats, 1)

    return Codes(format, codes, per_unit(rows.scales), None if rows.zeros is None else per_unit(_minima(rows)))


def _minima(rows: GroupQuantizedRows) -> np.ndarray:
    """The values of code 0, float32 [N, groups]."""
    assert rows.zeros is not None
    return -(rows.zeros.astype(np.float32) * rows.scales.astype(np.float32))


def _fits_half(values: np.ndarray) -> bool:
    """Whether float16 holds the values with its usual precision: none is infinite or a coarse subnormal there."""
    values = values.astype(np.float32)
    return bool((np.abs(_code_halves(values).astype(np.float32) - values) <= _HALF_ROUNDING * np.abs(values)).all())


def _code_halves(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # _fits_half finds infinite values
        return values.astype(np.float32).astype(np.float16)
