"""Products with quantised weights: packed matrices, and the operations that multiply by them.

Activations are quantised row by row as they come, to 8 bits with a float32 scale for each 32 neighbouring values: one
scale a row would lose accuracy wherever a few channels are far greater than the rest, as they are before ``down_proj``.
Within 32 values the products are exact integers; see csrc/cpu/quant.hpp.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.kernels.cpu.gguf_blocks import KEPT_TYPES, gguf_weight
from octavo.kernels.cpu.quantize import QuantizedWeight, quantize_weight
from octavo.kernels.gguf_rows import GGUFRows

_cpu: Any = importlib.import_module("octavo._cpu")
_DTYPES = {torch.float32: _cpu.Dtype.f32, torch.bfloat16: _cpu.Dtype.bf16}


@dataclass(frozen=True)
class QuantizedLinear:
    """A packed linear layer: matrices with the same input whose outputs stand one after the other."""

    parts: tuple[Any, ...]
    #: float32 [n]
    bias: Tensor | None
    #: Outputs and inputs.
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        """Memory that the packed matrices take."""
        return sum(part.nbytes for part in self.parts)

    def linear_op(self, x: Tensor, out: Tensor, *, add: bool = False) -> Any:
        """The operation out = x W^T + bias; x [T, k] and out [T, n], float32 or bfloat16, adjacent along a row.

        With ``add`` it is out += x W^T + bias, and out is float32.
        As many rows are computed as the step has tokens. The operation holds addresses: whoever makes it keeps x and
        out alive, and this layer.
        """
        return _cpu.linear_quant(*self._arguments(x, out), add)

    @property
    def has_whole_halves(self) -> bool:
        """Whether ``linear_silu_mul_op`` is possible: the kernels compute 16 outputs of a matrix at a time."""
        sizes = {part.n for part in self.parts}
        return self.n % 32 == 0 and len(sizes) == 1 and len(self.parts) <= 2

    def linear_silu_mul_op(self, x: Tensor, out: Tensor) -> Any:
        """The operation out = silu(gate) * up; gate and up are the halves of x W^T + bias, out is [T, n / 2]."""
        return _cpu.linear_quant_silu_mul(*self._arguments(x, out))

    def _arguments(self, x: Tensor, out: Tensor) -> tuple[Any, ...]:
        return (
            list(self.parts),
            x.data_ptr(),
            x.stride(0),
            _DTYPES[x.dtype],
            out.data_ptr(),
            out.stride(0),
            _DTYPES[out.dtype],
            0 if self.bias is None else self.bias.data_ptr(),
        )


def pack_quantized(weights: list[QuantizedWeight], bias: Tensor | None = None) -> QuantizedLinear:
    """Packs matrices [n_i, k], each in its own format, into one layer with sum(n_i) outputs and a bias of as many.

    Raises:
        ConfigError: they differ in k, k is no multiple of what a format needs, or the bias has another size.
    """
    inputs = {weight.codes.shape[1] for weight in weights}
    if len(inputs) != 1:
        raise ConfigError(f"the matrices of a quantised layer must have the same inputs, not {sorted(inputs)}")
    outputs = sum(weight.codes.shape[0] for weight in weights)
    if bias is not None and bias.shape != (outputs,):
        raise ConfigError(f"the bias of a quantised layer has shape {list(bias.shape)}, expected [{outputs}]")
    parts = tuple(_pack(weight) for weight in weights)
    return QuantizedLinear(parts, None if bias is None else bias.float().contiguous(), outputs, inputs.pop())


def quantize_linear(weight: Tensor, bias: Tensor | None, kind: str) -> QuantizedLinear:
    """Quantises and packs a floating weight [n, k].

    "int8": one scale a row. "int4": one for 32 neighbours; where k is no multiple of 32, "int8" instead.

    Raises:
        ConfigError: another kind.
    """
    if kind not in ("int8", "int4"):
        raise ConfigError(f"the CPU kernels have quantization int8 and int4, not {kind!r}; fp8 is for GPUs")
    group = 32 if kind == "int4" and weight.shape[1] % 32 == 0 else None
    return pack_quantized([quantize_weight(weight, kind if group else "int8", group)], bias)


def pack_gguf(parts: list[GGUFRows], bias: Tensor | None) -> QuantizedLinear:
    """Packs tensors of a GGUF file with the same inputs: in their own bits, or of other types in 8 bits.

    The other types have 2 to 6 bits, so that with a scale for each 32 neighbours the second rounding is far below the
    first.
    """
    return pack_quantized([_gguf_part(part) for part in parts], bias)


def _gguf_part(part: GGUFRows) -> QuantizedWeight:
    if part.kind in KEPT_TYPES:
        return gguf_weight(part.kind, part.rows, part.columns)
    return quantize_weight(part.dequantize(), "int8", 32)


def _pack(weight: QuantizedWeight) -> Any:
    n, k = weight.codes.shape
    tensors = (weight.codes, weight.scales, weight.minima, weight.group_scales, weight.group_minima)
    # Held until the packing is done.
    held = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    try:
        return _cpu.PackedQuant(weight.format, n, k, *(0 if tensor is None else tensor.data_ptr() for tensor in held))
    except ValueError as e:
        raise ConfigError(str(e)) from None
