"""Products with quantised weights: packed matrices, and the operations that multiply by them.

Activations are quantised row by row as they come, to 8 bits with a float32 scale for each 32 neighbouring values. One
scale a row is no faster to speak of and costs accuracy wherever a few channels are far greater than the rest, as they
are before ``down_proj``. Within 32 values the products are exact integers; see csrc/cpu/quant.hpp.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.kernels.cpu.gguf_blocks import gguf_weight
from octavo.kernels.cpu.quantize import QuantizedWeight

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

    def linear_op(self, x: Tensor, out: Tensor) -> Any:
        """The operation out = x W^T + bias; x [T, k] and out [T, n], float32 or bfloat16, adjacent along a row.

        As many rows are computed as the step has tokens. The operation holds addresses: whoever makes it keeps x and
        out alive, and this layer.
        """
        return _cpu.linear_quant(
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
        ConfigError: they differ in k, or k is no multiple of what a format needs.
    """
    inputs = {weight.codes.shape[1] for weight in weights}
    if len(inputs) != 1:
        raise ConfigError(f"the matrices of a quantised layer must have the same inputs, not {sorted(inputs)}")
    parts = tuple(_pack(weight) for weight in weights)
    bias = None if bias is None else bias.float().contiguous()
    return QuantizedLinear(parts, bias, sum(part.n for part in parts), inputs.pop())


def pack_gguf(kind: str, rows: np.ndarray, columns: int, bias: Tensor | None = None) -> QuantizedLinear:
    """Packs a tensor of a GGUF file, uint8 [n, bytes of a row], in its own bits; see ``gguf_weight``."""
    return pack_quantized([gguf_weight(kind, rows, columns)], bias)


def _pack(weight: QuantizedWeight) -> Any:
    n, k = weight.codes.shape
    tensors = (weight.codes, weight.scales, weight.minima, weight.group_scales, weight.group_minima)
    # Held until the packing is done.
    held = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    try:
        return _cpu.PackedQuant(weight.format, n, k, *(0 if tensor is None else tensor.data_ptr() for tensor in held))
    except ValueError as e:
        raise ConfigError(str(e)) from None
