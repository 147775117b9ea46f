"""Weights of linear layers in the form that the C++ products read."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.core.errors import ConfigError

_cpu: Any = importlib.import_module("octavo._cpu")  # compiled: nothing for a type checker to read
_DTYPES = {torch.float32: _cpu.Dtype.f32, torch.bfloat16: _cpu.Dtype.bf16}


def pack(weight: Tensor, bias: Tensor | None) -> Any:
    """A packed copy of weight [out, in] (float32 or bfloat16) and bias [out] (any float type): ``_cpu.PackedLinear``.

    Raises:
        ConfigError: the weight has another type.
    """
    return _pack(_cpu.pack_linear, weight, bias)


def pack_gate_up(weight: Tensor, bias: Tensor | None) -> Any:
    """As ``pack``, for ``_cpu.linear_silu_mul``: weight [2 * I, in], the gate's rows before up's."""
    return _pack(_cpu.pack_gate_up, weight, bias)


def _pack(pack_rows: Callable[..., Any], weight: Tensor, bias: Tensor | None) -> Any:
    if weight.dtype not in _DTYPES:
        raise ConfigError(f"the CPU kernels compute in float32 or bfloat16, not in {weight.dtype}")
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    floats = None if bias is None else bias.float().contiguous()
    address = 0 if floats is None else floats.data_ptr()
    rows, columns = weight.shape
    # The stride of a single row says nothing.
    row_stride = weight.stride(0) if rows > 1 else columns
    return pack_rows(weight.data_ptr(), rows, columns, row_stride, _DTYPES[weight.dtype], address)
