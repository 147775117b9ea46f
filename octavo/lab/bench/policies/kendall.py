"""How well predictions rank what they predict."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence


def kendall_tau(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Kendall's tau-b of two lists of equally many numbers; 0 if all of a list are equal."""
    pairs = sorted(zip(xs, ys, strict=True))
    total = len(pairs) * (len(pairs) - 1) // 2
    tied_x, tied_y, tied_both = _ties([x for x, _ in pairs]), _ties(sorted(ys)), _ties(pairs)
    before: list[float] = []
    swaps = 0  # pairs whose order differs; sorted by x and then y, ties in x are in order of y
    for _, y in pairs:
        place = bisect.bisect_right(before, y)
        swaps += len(before) - place
        before.insert(place, y)
    spread = math.sqrt((total - tied_x) * (total - tied_y))
    return (total - tied_x - tied_y + tied_both - 2 * swaps) / spread if spread else 0.0


def _ties(ordered: Sequence[object]) -> int:
    """Pairs of equal elements."""
    pairs = run = 0
    for before, this in itertools.pairwise(ordered):
        run = run + 1 if this == before else 0
        pairs += run
    return pairs
