"""The values of quantised codes."""

from __future__ import annotations

import numpy as np

from octavo.kernels.cpu.linear import Codes

#: Twice the values of e2m1, by code.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def dequantize_codes(weight: Codes) -> np.ndarray:
    """Float32 [N, K], computed in float32."""
    n, k = weight.codes.shape
    if weight.format == "mxfp4":
        scales = np.ldexp(np.float32(0.5), weight.scales.astype(np.int32) - 127)
        return (E2M1_DOUBLED[weight.codes].reshape(n, -1, 32) * scales[..., None]).reshape(n, k).astype(np.float32)
    scales = weight.scales.astype(np.float32).reshape(n, -1)
    minima = None if weight.minima is None else weight.minima.astype(np.float32)
    if weight.group_scales is not None and weight.group_minima is not None and minima is not None:
        scales = np.repeat(scales, 8, 1) * weight.group_scales
        minima = -(np.repeat(minima, 8, 1) * weight.group_minima)
    codes = weight.codes.astype(np.float32).reshape(n, scales.shape[1], -1)
    if minima is None:
        codes = codes if weight.codes.dtype == np.int8 else codes - 8
        return (codes * scales[..., None]).reshape(n, k)
    return (codes * scales[..., None] + minima[..., None]).reshape(n, k)
