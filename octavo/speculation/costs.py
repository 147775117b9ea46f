"""What steps cost, as they are measured, and how many draft tokens pay."""

from __future__ import annotations

import bisect
from collections import deque
from typing import NamedTuple

#: Measurements of one number of rows of which the median counts: other processes may have the processor in some.
_LATEST = 5
#: Steps after which a number of rows that has not occurred since is forgotten: contexts grow, and it may be an outlier.
_FORGET = 256
#: What the time of a token that a drafter catches up with counts for after a later one.
_DECAY = 0.999
#: Levels of acceptance that are told apart.
LEVELS = 16


class StepCosts:
    """Seconds of steps without prompts by their number of rows: medians of the latest ones.

    Between measured numbers the seconds are interpolated, and beyond the largest they go on as between the last two.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._latest: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}
        #: Steps so far, and the number of the last one of so many rows.
        self._steps = 0
        self._seen: dict[int, int] = {}

    @property
    def smallest(self) -> int:
        """Fewest rows of which the time is known; 0 if none is."""
        return self._rows[0] if self._rows else 0

    @property
    def largest(self) -> int:
        """Most rows of which the time is known."""
        return self._rows[-1] if self._rows else 0

    def observe(self, rows: int, seconds: float) -> None:
        """Adds a step."""
        rows = _rounded(rows)
        latest = self._latest.get(rows)
        if latest is None:
            latest = self._latest[rows] = deque(maxlen=_LATEST)
            bisect.insort(self._rows, rows)
        latest.append(seconds)
        self._seconds[rows] = sorted(latest)[(len(latest) - 1) // 2]
        self._seen[rows] = self._steps
        self._steps += 1
        if self._steps % 32 == 0:
            self._forget()

    def _forget(self) -> None:
        for rows in [rows for rows in self._rows if self._seen[rows] < self._steps - _FORGET]:
            self._rows.remove(rows)
            del self._latest[rows], self._seconds[rows], self._seen[rows]

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


class DraftingCosts:
    """Seconds that proposing takes where the workers' own network does it; 0 before and elsewhere.

    A *pass* of that network proposes a token for each sequence that drafts. Before its first, it has to catch up with
    the tokens of a sequence that it has not computed.
    """

    def __init__(self) -> None:
        self._passes = StepCosts()
        self._seconds = self._tokens = 0.0

    def observe(self, num_drafting: int, passes: int, seconds: float) -> None:
        """So many sequences had a draft of up to ``passes`` tokens; ``seconds`` without those of catching up."""
        self._passes.observe(num_drafting, seconds / passes)

    def observe_catch_up(self, tokens: int, seconds: float) -> None:
        """So many tokens were caught up with."""
        kept = _DECAY**tokens
        self._seconds, self._tokens = self._seconds * kept + seconds, self._tokens * kept + tokens

    def pass_seconds(self, num_drafting: float) -> float:
        """Of a pass for so many sequences."""
        return self._passes.seconds(max(1, round(num_drafting)))

    def catch_up_seconds(self, tokens: int) -> float:
        """Of catching up with so many tokens."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


def _rounded(rows: int) -> int:
    """Numbers of rows that are told apart: all up to 16, and from there 16 up to each double."""
    shift = max(0, rows.bit_length() - 5)
    return rows >> shift << shift


class BestLength(NamedTuple):
    """How many draft tokens of a sequence pay, and the share of its time that they save; 0 if none do."""

    length: int
    saved: float


def best_lengths(
    costs: StepCosts, num_seqs: int, num_drafting: float, most: int, pass_seconds: float = 0.0
) -> list[BestLength]:
    """How many draft tokens of each sequence pay, for each of ``LEVELS`` of acceptance.

    ``pass_seconds``: of proposing one more token for each sequence that drafts.

    Steps give most tokens a second if a draft token is computed exactly when its chance of being accepted is more than
    what it costs, in units of what a token costs without drafts. Which rows a token adds depends on how many sequences
    have drafts at once: ``num_drafting`` of the ``num_seqs``.
    """
    plain = costs.seconds(num_seqs)
    price = [0.0] * (most + 1)  # of so many draft tokens of one sequence, in tokens
    if plain > 0:
        for length in range(1, most + 1):
            rows = max(1.0, num_drafting * length)
            # Few rows more cost too little to be measured, or just fill a tile: their share of more rows counts.
            span = max(round(rows), num_seqs // 4)
            extra = (costs.seconds(num_seqs + span) - plain) * rows / span + length * pass_seconds
            price[length] = extra * num_seqs / plain / num_drafting
    return best_of(price)


def best_of(price: list[float]) -> list[BestLength]:
    """The best length for each of ``LEVELS`` of acceptance; ``price``: of 0, 1, 2, ... draft tokens, in tokens."""
    found = []
    for level in range(LEVELS):
        chance, expected, best, gain, saved = (level + 0.5) / LEVELS, 0.0, 0, 0.0, 0.0
        power = 1.0
        for length in range(1, len(price)):
            power *= chance
            expected += power
            if expected - price[length] > gain + 1e-3:
                best, gain = length, expected - price[length]
                saved = gain / (1 + expected)
        found.append(BestLength(best, saved))
    return found
