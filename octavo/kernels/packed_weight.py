"""The weight of a linear layer in the form that a backend multiplies by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

#: What may be done to each element of a product: silu(x) = x * sigmoid(x), gelu by erf, gelu by its tanh form
#: (Hendrycks & Gimpel 2016), and the positive part.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


class PackedWeight(ABC):
    """A weight [N, K] and its bias as ``Kernels.pack`` made them; there is a class for each backend and format."""

    #: Whether the first half of the N rows is a gate's and the second half what it gates.
    gated: bool

    @abstractmethod
    def __call__(
        self,
        x: Tensor,
        out_dtype: torch.dtype | None = None,
        add: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """activation(x W^T + bias + add); of a gated weight activation(gate) * up, each a half of the columns.

        A row of zeros in ``add`` leaves the row's bits as they are without ``add``, gated or not, on the backends that
        give a row the same bits in any batch.

        Args:
            x: [T, K], rows strided.
            out_dtype: of the result; x's type if None. float32 for logits, of which the best two often tie in bfloat16.
            add: float32 [T, N]: the residual stream, or what an adapter adds to the product. A float32 result of the
                same shape may take its memory.
            activation: of a gated weight always, of others as the network has it.

        Returns:
            [T, N]; [T, N / 2] of a gated weight.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that the weight and its bias take."""


def stack_rows(parts: Sequence[Tensor]) -> Tensor:
    """The parts [n_i, K] as one matrix; a view if their rows already follow each other in memory, else a copy."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return torch.cat(list(parts)) if len(parts) > 1 else first
        end += part.nbytes
    return first.as_strided((sum(len(part) for part in parts), first.shape[1]), first.stride())
