"""Packed weights of the GPU backend, and their products: batch-invariant, or by cuBLAS.

The input of an activation is rounded to the type of x first, whether or not one launch does both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.packed_weight import Activation, PackedWeight
from octavo.kernels.torch_arrays import torch_dtype
from octavo.kernels.torch_kernels import TorchWeight
from octavo.kernels.triton.activation import activate
from octavo.kernels.triton.embedding import embedding
from octavo.kernels.triton.matmul import matmul
from octavo.kernels.triton.quant import quantized_gated, quantized_matmul
from octavo.kernels.triton.quantize import COLUMNS, TritonQuantizedLinear


@dataclass(frozen=True, slots=True)
class TritonDenseWeight(TorchWeight):
    """A weight that is not quantised."""

    #: A row's bits are the same in any batch.
    deterministic: bool

    def __call__(
        self,
        x: Tensor,
        out_dtype: DType | None = None,
        add: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """The product, and the activation in another launch."""
        dtype = x.dtype if out_dtype is None else torch_dtype(out_dtype)
        x = x.to(self.weight.dtype)
        if activation is None:
            return self._product(x, dtype, add)
        product = self._product(x, x.dtype, add)
        return activate(product, activation, gated=self.gated).to(dtype)

    def rows(self, ids: Tensor, first: int, *, scale: float, dtype: DType) -> Tensor:
        """One launch."""
        return embedding(ids, self.weight, first, scale, None)

    def _product(self, x: Tensor, dtype: torch.dtype, add: Tensor | None) -> Tensor:
        if self.deterministic:
            return matmul(x, self.weight, self.bias, dtype, add)
        product = _torch_product(x, self.weight, dtype if add is None else torch.float32, add)
        return (product if self.bias is None else product.add_(self.bias)).to(dtype)


@dataclass(frozen=True, slots=True)
class TritonQuantizedWeight(PackedWeight):
    """A quantised weight, which products dequantise in registers."""

    codes: TritonQuantizedLinear
    gated: bool
    #: A row's bits are the same in any batch.
    deterministic: bool

    def __call__(
        self,
        x: Tensor,
        out_dtype: DType | None = None,
        add: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """One launch for a gated product if nothing is added and the outputs fill whole tiles."""
        dtype = x.dtype if out_dtype is None else torch_dtype(out_dtype)
        if activation is None:
            return quantized_matmul(x, self.codes, dtype, add, deterministic=self.deterministic)
        if self.gated and add is None and self.codes.outputs % COLUMNS == 0:
            return quantized_gated(x, self.codes, activation, deterministic=self.deterministic).to(dtype)
        product = quantized_matmul(x, self.codes, x.dtype, add, deterministic=self.deterministic)
        return activate(product, activation, gated=self.gated).to(dtype)

    @property
    def nbytes(self) -> int:
        """Scales and padding included."""
        tensors = (self.codes.codes, self.codes.scales, self.codes.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _torch_product(x: Tensor, weight: Tensor, dtype: torch.dtype, residual: Tensor | None) -> Tensor:
    """x W^T accumulated in float32; with a residual (then ``dtype`` is float32) added in place."""
    transposed = weight.t()
    if dtype == x.dtype:
        return x @ transposed if residual is None else residual.addmm_(x, transposed)
    if not x.is_cuda:  # torch has products with results of another type on GPUs only
        product = x.float() @ transposed.float()
        return product if residual is None else residual.add_(product)
    if residual is None:
        return torch.mm(x, transposed, out_dtype=dtype)
    return torch.addmm(residual, x, transposed, out_dtype=dtype, out=residual)
