"""How many sequences are worth running at once: ``ConcurrencyLimit``, for ``max_num_seqs=auto``."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

#: No limit is below this number: so few rows cost hardly more than one on any device, as weights are read once for all.
FLOOR = 8
#: A number of sequences is known after this many steps, the first of which may be an exception (a kernel's first call).
_SAMPLES = 2
#: Weight of a step in the cost of its number of sequences; a step counts as at most twice, at least half as long as
#: expected.
_SMOOTHING, _MOST_CHANGE = 0.2, 2.0
#: Fewer sequences are preferred if a token then takes at most this much longer: others wait less for each step.
_MARGIN = 0.05
#: Steps after which a number above the limit is forgotten if it does not occur, and over which lost time is averaged.
_MEMORY, _LOSS_MEMORY = 512, 256
#: Steps of which lost time is averaged at least, so that one preemption says little about a number that just began.
_LEAST_STEPS = 8
#: Steps with prompts, and without one of decodes alone, after which a waiting request may exceed the limit's step.
_UNMEASURED = 16


@dataclass(slots=True)
class _Level:
    """What is known of steps with more sequences than the level below, and at most ``size``."""

    size: int
    #: Seconds of a step for each of its sequences; and their number in the last such step.
    cost: float = 0.0
    num_seqs: int = 0
    samples: int = 0
    #: Number of the last such step.
    seen: int = 0
    #: Decayed sums: tokens generated, and seconds lost to preemption.
    tokens: float = 0.0
    lost: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.samples >= _SAMPLES


class ConcurrencyLimit:
    """Learns the number of concurrent sequences at which a generated token takes the least time.

    The time of a token is the step's, divided by its sequences, plus the time lost to preemption for each token. The
    first part falls with more sequences while a step takes hardly longer for them; the second grows with them when the
    KV cache is short of blocks. The limit begins at ``FLOOR`` and rises by a factor of the square root of two, as long
    as the next number, if its step took no longer, would be better than the best one so far; then it is the best one.

    If steps become slower or faster while their number of sequences stays, the machine has changed, not the knee: the
    costs of all numbers change by that factor. So a busy machine does not push the limit down. Numbers above the limit
    are forgotten when they no longer occur, and lost time fades, so that they are tried again.

    The same calls give the same limits: nothing here reads a clock.
    """

    def __init__(self, most: int) -> None:
        """``most``: upper bound of the limit."""
        sizes = {most, *(round(FLOOR * 2 ** (i / 2)) for i in range(64))}
        self._levels = [_Level(size) for size in sorted(sizes) if size <= most]
        self._sizes = [level.size for level in self._levels]
        #: Index of the highest level that may be tried, and of the level of the last step of decodes alone.
        self._reach, self._last = 0, -1
        self._step = self._unmeasured = 0
        #: Tokens of a sequence at its end, prompt included: decayed mean; None before the first has ended.
        self.expected_length: float | None = None
        #: When a request was refused since the last step: sequences without it, and with it; else 0.
        self._running = self._wanted = 0
        self._current = 0

    @property
    def limit(self) -> int:
        """Concurrent sequences, between ``FLOOR`` (or ``most``, if that is less) and ``most``."""
        return self._sizes[self._current]

    def allows(self, num_running: int, num_more: int, memory_is_short: bool) -> bool:
        """Whether a request of this many sequences may join; alone it always may, up to the caller's maximum.

        ``memory_is_short``: whether so many sequences of ``expected_length`` exceed the KV cache, so that preemption
        follows. Otherwise the request is refused only if steps with so many sequences have cost more than they brought.
        """
        if num_running == 0 or num_running + num_more <= self.limit:
            return True
        if not memory_is_short:
            level = self._level_of(num_running + num_more)
            if not level.is_known or level.cost <= (1 + _MARGIN) * min(o.cost for o in self._levels if o.is_known):
                return True
        self._running, self._wanted = num_running, num_running + num_more
        return False

    def observe(self, num_seqs: int, seconds: float | None) -> None:
        """Takes a step in which this many sequences decoded; ``seconds`` is None if it did anything else too."""
        self._step += 1
        for i, level in enumerate(self._levels):
            level.tokens *= 1 - 1 / _LOSS_MEMORY
            level.lost *= 1 - 1 / _LOSS_MEMORY
            if i > self._current and self._step - level.seen > _MEMORY:
                level.samples = 0
        if not num_seqs:
            return
        if not seconds:
            self._unmeasured += self._wanted > 0
            if self._unmeasured >= _UNMEASURED:
                self._reach = min(self._reach + 1, len(self._levels) - 1)
                self._unmeasured = 0
        else:
            self._unmeasured = 0
            self._measure(num_seqs, seconds / num_seqs)
        self._choose()
        self._running = self._wanted = 0

    def observe_end(self, num_tokens: int) -> None:
        """Takes the length of a sequence that has ended."""
        before = self.expected_length
        self.expected_length = num_tokens if before is None else before + 0.1 * (num_tokens - before)

    def observe_loss(self, num_seqs: int, seconds: float) -> None:
        """Takes the time that preemptions cost while this many sequences ran: to recompute or to move their blocks."""
        self._level_of(num_seqs).lost += seconds

    def _index(self, num_seqs: int) -> int:
        return min(bisect_left(self._sizes, num_seqs), len(self._levels) - 1)

    def _level_of(self, num_seqs: int) -> _Level:
        return self._levels[self._index(num_seqs)]

    def _measure(self, num_seqs: int, cost: float) -> None:
        index = self._index(num_seqs)
        level = self._levels[index]
        if not level.is_known:
            level.cost = min(level.cost, cost) if level.samples else cost
        else:
            change = min(max(cost / level.cost, 1 / _MOST_CHANGE), _MOST_CHANGE) ** _SMOOTHING
            for other in self._levels if index == self._last else [level]:
                other.cost *= change
        level.samples += 1
        level.seen, level.num_seqs = self._step, num_seqs
        level.tokens += num_seqs
        self._last = index

    def _choose(self) -> None:
        levels = self._levels
        known = [i for i, level in enumerate(levels) if level.is_known]
        top = known[-1] if known else -1
        # The next level to try: above the highest known one, and so far that the waiting request can reach it.
        if known and self._index(self._running) <= top:
            self._reach = min(max(top + 1, self._index(self._wanted)), len(levels) - 1)
        costs, lost = [], 0.0
        for i, level in enumerate(levels[: self._reach + 1]):
            lost = max(lost, level.lost / (level.tokens + _LEAST_STEPS * level.size))
            if level.is_known:
                cost = level.cost
            elif i == self._reach and i > top:
                size = (self._wanted + level.size) // 2 if self._wanted else level.size
                cost = _step_seconds([levels[k] for k in known[-2:]], size) / size
            elif i < top:
                around = bisect_left(known, i)
                cost = (
                    _step_seconds([levels[k] for k in known[max(0, around - 1) : around + 1]], level.size) / level.size
                )
            else:
                cost = math.inf  # the waiting request would exceed it
            costs.append(cost + lost)
        most = (1 + _MARGIN) * min(costs)
        self._current = next(i for i, cost in enumerate(costs) if cost <= most)


def _step_seconds(known: list[_Level], num_seqs: int) -> float:
    """The time of a step on a line through two known levels; alone, one has the fixed part of ``FLOOR / 2``."""
    if not known:
        return 0.0
    (low, least), (high, most) = [(level.num_seqs, level.num_seqs * level.cost) for level in (known[0], known[-1])]
    if high == low:
        low, least = -FLOOR // 2, 0.0
    return max(0.0, most + max(0.0, (most - least) / (high - low)) * (num_seqs - high))
