"""A language-model head with a copy in 8 bits, which finds the tokens that can be the most likely.

Why that is exact, and the steps: csrc/cpu/bind_screening.cpp.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.kernels.cpu.linear import DenseWeight, QuantizedWeight
from octavo.kernels.cpu.quantize import Codes, quantize_weight
from octavo.kernels.packed_weight import PackedWeight, ScreenedHead

if TYPE_CHECKING:
    from octavo.kernels.cpu.backend import CpuKernels

_cpu: Any = importlib.import_module("octavo._cpu")  # compiled: nothing for a type checker to read
_DTYPES = {torch.float32: _cpu.Dtype.f32, torch.bfloat16: _cpu.Dtype.bf16}

#: Half the distance between 1 and the next float32: the greatest relative error of a rounding.
_UNIT = 2.0**-24
#: Values of a row that share an activation scale.
_GROUP = 32
#: More than what rounding to float32 takes off a bound, here and where it is used.
_UP = 1 + 1e-6


def pack_screened(kernels: CpuKernels, weight: Tensor) -> PackedWeight:
    """Packs [N, K]; as a plain weight if it is not finite, as there is no bound then."""
    return CpuScreenedHead(kernels, weight) if weight.isfinite().all() else DenseWeight(kernels, weight)


class CpuScreenedHead(DenseWeight, ScreenedHead):
    """A ``DenseWeight`` with a copy that has a scale for each row."""

    def __init__(self, kernels: CpuKernels, weight: Tensor) -> None:
        """Copies the finite weight [N, K].

        Raises:
            ConfigError: it is neither float32 nor bfloat16.
        """
        super().__init__(kernels, weight)
        codes = quantize_weight(weight, "int8", None)
        self._screen = QuantizedWeight(kernels, [codes])
        #: Factors of the errors of each token's logit, float32 [N], and the greatest norm of a row.
        self._of_inputs, self._of_rest, self._greatest = _error_factors(weight, codes)

    def most_likely(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See ``ScreenedHead``; x has the weight's type."""
        logits = self._kernels._new(x, (x.shape[0], self.width), torch.float32)
        tokens = self._kernels._new(x, (x.shape[0],), torch.int64)
        op = _cpu.screened_head(
            self.operation(x, logits),
            self._screen.operation(x, logits),
            self.packed,
            x.data_ptr(),
            x.stride(0),
            _DTYPES[x.dtype],
            logits.data_ptr(),
            logits.stride(0),
            tokens.data_ptr(),
            self._of_inputs.data_ptr(),
            self._of_rest.data_ptr(),
            self._greatest,
        )
        self._kernels._do(op, _cpu.Step(x.shape[0], only_most_likely=True), x)
        return logits, tokens

    @property
    def nbytes(self) -> int:
        """The copy included."""
        return super().nbytes + self._screen.nbytes + self._of_inputs.nbytes + self._of_rest.nbytes


def _error_factors(weight: Tensor, codes: Codes) -> tuple[Tensor, Tensor, float]:
    """``of_inputs`` and ``of_rest`` of csrc/cpu/bind_screening.cpp, and the greatest norm of a row."""
    k = weight.shape[1]
    exact, screen = _accumulated(2 * k), _accumulated(2 * (k // _GROUP + 4))
    of_inputs, of_rest, greatest = [], [], 0.0
    for first in range(0, len(weight), 4096):  # in float64 the whole might not fit
        rows = slice(first, first + 4096)
        values = weight[rows].double()
        copies = codes.codes[rows].double() * codes.scales[rows, None].double()
        norms, copied = values.norm(dim=1), copies.norm(dim=1)
        of_inputs.append(((values - copies).norm(dim=1) + exact * norms + screen * copied) * _UP)
        of_rest.append((1 + screen) * copied * _UP)
        greatest = max(greatest, float(norms.max()))
    return torch.cat(of_inputs).float(), torch.cat(of_rest).float(), greatest * _UP


def _accumulated(roundings: int) -> float:
    """The greatest relative error of so many roundings (Higham 2002, lemma 3.1)."""
    return roundings * _UNIT / (1 - roundings * _UNIT)
