"""What steps cost, as they are measured, and how many draft tokens pay."""

from __future__ import annotations

import bisect

#: Weight of the newest measurement.
_WEIGHT = 0.2
#: A step that took so many times what was expected counts as so many times that: other processes had the processor.
_OUTLIER = 1.5
#: A measurement below this share of what was expected takes its place: that was a first call, or a shorter context.
_TOO_LONG = 0.6
#: Levels of acceptance that are told apart.
LEVELS = 16


class StepCosts:
    """Seconds of steps without prompts by their number of rows, as moving averages.

    Between measured numbers the seconds are interpolated, and beyond the largest they go on as between the last two.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: dict[int, float] = {}

    @property
    def largest(self) -> int:
        """Most rows of which the time is known."""
        return self._rows[-1] if self._rows else 0

    def observe(self, rows: int, seconds: float) -> None:
        """Adds a step. Too much may be other processes or a compilation; too little is never measured."""
        rows = _rounded(rows)
        known = self._seconds.get(rows)
        if known is None:
            bisect.insort(self._rows, rows)
        if known is None or seconds < _TOO_LONG * known:
            self._seconds[rows] = seconds
        else:
            self._seconds[rows] = known + _WEIGHT * (min(seconds, _OUTLIER * known) - known)

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step of so many rows; 0 if nothing was measured."""
        rows, known = _rounded(rows), self._rows
        if rows in self._seconds or not known:
            return self._seconds.get(rows, 0.0)
        if len(known) == 1 or rows < known[0]:
            return self._seconds[known[0]]
        at = min(bisect.bisect(known, rows), len(known) - 1)
        low, high = known[at - 1], known[at]
        share = (rows - low) / (high - low)
        return self._seconds[low] + max(0.0, share * (self._seconds[high] - self._seconds[low]))


def _rounded(rows: int) -> int:
    """Numbers of rows that are told apart: all up to 16, and from there 16 up to each double."""
    shift = max(0, rows.bit_length() - 5)
    return rows >> shift << shift


def best_lengths(costs: StepCosts, num_seqs: int, num_drafting: float, most: int) -> list[int]:
    """How many draft tokens of each sequence pay, for each of ``LEVELS`` of acceptance.

    Steps give most tokens a second if a draft token is computed exactly when its chance of being accepted is more than
    what it costs, in units of what a token costs without drafts. Which rows a token adds depends on how many sequences
    have drafts at once: ``num_drafting`` of the ``num_seqs``.
    """
    plain = costs.seconds(num_seqs)
    price = [0.0] * (most + 1)  # of so many draft tokens of one sequence, in tokens
    if plain > 0:
        for length in range(1, most + 1):
            rows = max(1, round(num_drafting * length))
            extra = costs.seconds(num_seqs + rows) - plain
            price[length] = extra * num_seqs / plain / num_drafting
    found = []
    for level in range(LEVELS):
        chance, expected, best, gain = (level + 0.5) / LEVELS, 0.0, 0, 0.0
        power = 1.0
        for length in range(1, most + 1):
            power *= chance
            expected += power
            if expected - price[length] > gain + 1e-3:
                best, gain = length, expected - price[length]
        found.append(best)
    return found
