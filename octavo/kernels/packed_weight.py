"""The interface of packed weights of linear layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from octavo.core.dtypes import DType
from octavo.kernels.arrays import Array

#: Activation of a product: silu(x) = x * sigmoid(x), gelu by erf, gelu by tanh (Hendrycks & Gimpel 2016), gelu as
#: x * sigmoid(1.702 x) (same, section 2), or relu.
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]


class PackedWeight(ABC):
    """A weight [N, K] with its bias, made by ``Kernels.pack``; there is a class for each backend and format."""

    #: Whether the first half of the N rows is a gate projection and the second half the up projection.
    gated: bool
    #: Whether ``rows`` gives the values that the weight was packed of, so that a tied embedding needs no table.
    has_rows = False

    def rows(self, ids: Array, first: int, *, scale: float, dtype: DType) -> Array:
        """scale * the rows of the weight, rounded to ``dtype`` before, for ids int64 [T]: float32 [T, K].

        Ids are those of ``Kernels.embedding``: row 0 is that of id ``first``, ids outside have zeros.
        """
        raise NotImplementedError(f"{type(self).__name__} has no rows to look up")

    @abstractmethod
    def __call__(
        self,
        x: Array,
        out_dtype: DType | None = None,
        add: Array | None = None,
        activation: Activation | None = None,
    ) -> Array:
        """activation(x W^T + bias + add); of a gated weight activation(gate) * up, each a half of the columns.

        On backends with batch-invariant results, a row of zeros in ``add`` does not change the bits of the row.

        Args:
            x: [T, K], rows may be strided; of the weight's type, or float32, which is rounded to it.
            out_dtype: of the result; x's type if None. float32 for logits, as the best two often tie in bfloat16.
            add: float32 [T, N]: the residual stream, or an adapter's product. A float32 result of the same shape may
                reuse its memory.
            activation: required for a gated weight, optional for others.

        Returns:
            [T, N]; [T, N / 2] of a gated weight.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weight and its bias."""


class PackedHeads(ABC):
    """A matrix [N, K] for each of H heads, made by ``Kernels.pack_heads``."""

    @abstractmethod
    def __call__(self, x: Array) -> Array:
        """Each head times its own matrix: x [T, H, K], tokens and heads strided, to [T, H, N] of the same type."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the matrices."""
