"""Slopes of attention with linear biases."""

from __future__ import annotations

import math


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """A slope for each query head (Press et al. 2021, section 3).

    For n heads, n a power of two, the slopes are 2^(-8 i / n), i = 1 to n. Otherwise they are those of the greatest
    power of two below n, and then every other one of twice as many heads, as in the authors' code.
    """
    known = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / known) for i in range(1, known + 1)]
    slopes += [2.0 ** (-4.0 * i / known) for i in range(1, 2 * (heads - known), 2)]
    return tuple(slopes)
