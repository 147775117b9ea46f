"""Least squares with non-negative coefficients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Least gain of the objective, relative to the largest at the start, for which a coefficient becomes positive.
_TOLERANCE = 1e-10
_MOST_ROUNDS = 10


def non_negative(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 for which \\|a x - b\\| is smallest: Lawson and Hanson 1974, "Solving Least Squares Problems", ch. 23.

    Args:
        a: [rows, columns]; columns without a positive number get 0.
        b: [rows].
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], bool)
    gradient = a.T @ b
    least = _TOLERANCE * max(float(np.abs(gradient).max(initial=0.0)), 1e-300)
    for _ in range(_MOST_ROUNDS * a.shape[1]):
        candidates = np.where(free, -np.inf, gradient)
        best = int(candidates.argmax())
        if candidates[best] <= least:
            break
        free[best] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                break
            step = float((x[below] / np.maximum(x[below] - wanted[below], 1e-300)).min())
            x += step * (wanted - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = wanted
        gradient = a.T @ (b - a @ x)
    return x / scale


def robust_relative(
    a: NDArray[np.float64], b: NDArray[np.float64], *, rounds: int = 8, tail: float = 3.0
) -> NDArray[np.float64]:
    """The x >= 0 for which the relative errors (a x - b) / b are small; b > 0.

    Squares, but for errors above ``tail`` times the median one, which count by their size (Huber 1964), so that a few
    rows disturbed by something else decide nothing.
    """
    rows = a / b[:, None]
    ones = np.ones_like(b)
    weights = ones
    for _ in range(rounds):
        root = np.sqrt(weights)
        x = non_negative(rows * root[:, None], ones * root)
        errors = np.abs(rows @ x - 1)
        limit = max(tail * float(np.median(errors)), 1e-9)
        weights = np.minimum(1.0, limit / np.maximum(errors, 1e-12))
    return x
