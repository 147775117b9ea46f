"""Speculative decoding: a ``Speculator`` asks a drafter for tokens, and learns how many draft tokens pay."""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from octavo.config.options import SpeculativeConfig
from octavo.core.stats import SpeculationStats
from octavo.speculation.drafter import (
    DraftedSequence,
    Drafter,
    DraftsOnWorkers,
    NgramDrafter,
    PredictionDrafter,
    SuffixDrafter,
)

logger = logging.getLogger("octavo")


class Speculator:
    """Owns the drafters and the draft lengths. A sequence for which a drafter fails has no further drafts."""

    def __init__(self, drafter: Drafter | None, most: int, *, adaptive: bool) -> None:
        """``most``: draft tokens of a sequence in a step. Without a ``drafter``, only predictions are drafted from."""
        self._drafter = drafter
        self._predictions = PredictionDrafter()
        self.lengths = DraftLengths(most, adaptive=adaptive)
        self._failed: set[int] = set()
        self._logged = False
        self._draft_tokens = self._failures = 0
        #: Number of drafts, by their accepted tokens.
        self._drafts = [0] * (most + 1)

    def drafts(self, sequence: DraftedSequence) -> bool:
        return self._drafter is not None or bool(sequence.prediction)

    def propose(self, sequence: DraftedSequence, most: int) -> list[int]:
        seq_id, predicted, drafter = sequence.seq_id, bool(sequence.prediction), self._drafter
        backlog = drafter.backlog(sequence) if drafter is not None and not predicted else 0
        length = self.lengths.length(seq_id, predicted, backlog)
        if length > most:
            length = most
        if length <= 0 or seq_id in self._failed:
            return []
        try:
            tokens = self._predictions.propose(sequence, length) if predicted else []
            if not tokens and drafter is not None and not (predicted and drafter.backlog(sequence)):
                tokens = drafter.propose(sequence, length)
                if len(tokens) > length:
                    tokens = tokens[:length]
        except Exception as e:
            self.fail(sequence, e)
            return []
        if not tokens:
            self.lengths.observe_miss(seq_id)
        return tokens

    def observe(self, drafts: list[tuple[int, int, int]]) -> None:
        self.lengths.observe(drafts)
        for _, drafted, accepted in drafts:
            self._draft_tokens += drafted
            self._drafts[accepted] += 1

    def fail(self, sequence: DraftedSequence, error: Exception) -> None:
        self._failed.add(sequence.seq_id)
        self._failures += 1
        self._log(error)

    def on_end(self, sequence: DraftedSequence) -> None:
        self.lengths.forget(sequence.seq_id)
        self._failed.discard(sequence.seq_id)
        if sequence.prediction:
            self._predictions.on_end(sequence)
        if self._drafter is not None:
            try:
                self._drafter.on_end(sequence)
            except Exception as e:
                self._log(e)

    def stats(self) -> SpeculationStats | None:
        """Totals so far; None before the first draft where the engine has no drafter."""
        if self._drafter is None and not any(self._drafts) and not self._failures:
            return None
        # A draft with n accepted tokens counts at each of the first n positions.
        per_position = list(itertools.accumulate(reversed(self._drafts[1:])))[::-1]
        return SpeculationStats(sum(self._drafts), self._draft_tokens, sum(per_position), per_position, self._failures)

    def _log(self, error: Exception) -> None:
        if not self._logged:
            name = type(self._drafter or self._predictions).__name__
            logger.error("drafter %s failed; such requests go on without drafts", name, exc_info=error)
        self._logged = True


def make_speculator(config: SpeculativeConfig | None) -> Speculator:
    """Without a configuration or method, only predictions of requests are drafted from."""
    config = config or SpeculativeConfig(method="prediction")
    drafter: Drafter | None = None
    if config.drafts_on_workers:
        drafter = DraftsOnWorkers(catches_up=config.method == "draft_model")
    elif config.method == "ngram":
        drafter = NgramDrafter(config)
    elif config.method == "suffix":
        drafter = SuffixDrafter(config)
    return Speculator(drafter, config.num_speculative_tokens, adaptive=config.adaptive)


#: Weight of the latest step in means.
_LATEST_STEPS = 0.2
#: Accepted tokens per sequence and step that are worth waiting for where the device's idle time is unknown.
_LEAST = 0.02
#: Accepted tokens per sequence and step that new sequences are assumed to bring, so that a few steps try them.
_NEW = 0.03
#: Most steps planned ahead between two steps that wait, to see what drafts bring.
_LONGEST = 16


class Waiting:
    """Whether steps wait for the result before them, so that drafts can follow its tokens, or are planned ahead.

    Waiting pays if the accepted tokens of a step are a greater share of it than the device's idle time. Otherwise steps
    run ahead, and a step waits after 1, 2, 4, ... of them.
    """

    def __init__(self) -> None:
        self._gain, self._idle = 1.0, 0.0
        self._pause, self._left = 1, 0

    @property
    def waits(self) -> bool:
        return self._left <= 0

    def begin(self) -> None:
        """A sequence that may have drafts has arrived."""
        self._gain, self._left = max(self._gain, _NEW), 0

    def observe(self, waited: bool, accepted: float, idle: float) -> None:
        """A step without prompts had ``accepted`` tokens per sequence; the device idled for a share of its time."""
        if not waited:
            self._left -= 1
            return
        self._gain += _LATEST_STEPS * (accepted - self._gain)
        self._idle += _LATEST_STEPS * (idle - self._idle)
        if self._gain > max(self._idle, _LEAST):
            self._pause, self._left = 1, 0
        else:
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST)


#: Levels of acceptance that are distinguished.
LEVELS = 16
#: Decay per token of the acceptance rates: of one sequence, and of all.
_DECAY, _DECAY_ALL = 0.9, 0.995
#: Powers of the decays.
_KEPT, _KEPT_ALL = ([decay**n for n in range(66)] for decay in (_DECAY, _DECAY_ALL))
#: A new sequence starts with the acceptance rate of all, weighted as this number of draft tokens.
_PRIOR = 3.0
#: Steps until a sequence that does not draft tries a token, at first and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512
#: Rows that are tried at once, and the growth beyond the most rows so far.
_CHEAP_ROWS, _GROWTH = 8, 1.5
#: After 4, 8, 12 proposals without a token, a sequence rests for 1, 2, 3 steps after each further proposal.
_MISSES, _LONGEST_REST = 4, 3
#: Steps without drafts at the beginning.
_PLAIN = 3
#: Steps after which the best lengths are computed anew.
_FRESH = 8
#: Share of the time for drafts that test whether drafting pays, and steps whose share can be saved up.
_TRIES_SHARE, _SAVED_STEPS = 0.01, 5000
#: Catching up must save this multiple of its own seconds.
_MARGIN = 2.0
#: Assumed tokens of a sequence before any has ended, and ended sequences in their mean.
_TOKENS, _MEAN_OF = 128.0, 32


@dataclass(slots=True)
class Pause:
    length: int = _FIRST_PAUSE
    left: int = _FIRST_PAUSE

    def passes(self) -> bool:
        """Counts a step; whether to try in it. The next pause is twice as long."""
        self.left -= 1
        if self.left > 0:
            return False
        self.left = self.length = min(2 * self.length, _LONGEST_PAUSE)
        return True

    def reset(self) -> None:
        self.left = self.length = _FIRST_PAUSE


@dataclass(slots=True)
class Counts:
    """Decayed counts of accepted draft tokens, and of drafts with a rejected token."""

    accepted: float
    failed: float

    @property
    def chance(self) -> float:
        """Probability that a draft token is accepted when those before it are."""
        return self.accepted / (self.accepted + self.failed)


class Acceptance(Counts):
    """The counts of one sequence, which are also added to those of all sequences of its kind."""

    __slots__ = ("alike", "level", "misses", "pauses", "rest", "tokens", "tries")

    def __init__(self, alike: Counts, number: int) -> None:
        """Sequences of different ``number`` do not rest in the same steps."""
        super().__init__(_PRIOR * alike.chance, _PRIOR * (1 - alike.chance))
        self.alike, self.tries, self.pauses = alike, Pause(), False
        #: The chance in steps of 1 / ``LEVELS``.
        self.level = 0
        self.observe(0, 0)
        #: Proposals without a token since the last draft, and steps until the next one.
        self.misses, self.rest = number % _MISSES, 0
        #: Tokens of the sequence in steps in which it could have had drafts.
        self.tokens = 0

    def observe(self, drafted: int, accepted: int) -> None:
        failed, alike, self.misses = accepted < drafted, self.alike, 0
        kept, kept_of_all = _KEPT[accepted + failed], _KEPT_ALL[accepted + failed]
        self.accepted = hits = self.accepted * kept + accepted
        self.failed = lost = self.failed * kept + failed
        level = int(LEVELS * hits / (hits + lost))
        self.level = level if level < LEVELS else LEVELS - 1
        alike.accepted = alike.accepted * kept_of_all + accepted
        alike.failed = alike.failed * kept_of_all + failed


class DraftLengths:
    """Draft tokens of each sequence in each step: always ``most``, or, if ``adaptive``, as many as pay.

    A sequence whose drafts do not pay stops drafting, and tries again at growing intervals. With many sequences a row
    of drafts costs as much as the token of another sequence: then none drafts, but for steps that measure the costs.
    """

    def __init__(self, most: int, *, adaptive: bool = True) -> None:
        self._most, self.adaptive = most, adaptive
        self._costs, self._drafting = StepCosts(), DraftingCosts()
        #: Seconds that tries may take; mean length of ended sequences, and their number in it.
        self._saved, self._mean_tokens, self._ended = 0.0, _TOKENS, 0
        #: Whether a sequence begins to draft in this step, to measure what catching up costs.
        self._has_begun = False
        #: Most tokens of each sequence in this step.
        self._each = most
        #: Of all sequences without a prediction, and of all with one.
        self._all = (Counts(2.0, 1.0), Counts(2.0, 1.0))
        self._of: dict[int, Acceptance] = {}
        #: Best lengths by level, if only willing sequences draft, and if all do.
        self._best = self._joint = [BestLength(most, 1.0)] * LEVELS
        #: Sequences of the last step that would have had drafts, had all.
        self._num_willing = 0
        #: Seconds per row of steps with prompts, and draft tokens of steps without: means of the latest.
        self._prompt_row, self._expected = 0.0, 0.0
        #: Share of the sequences that have drafts, where they may.
        self._share = 1.0
        self._num_seqs, self._age, self._plain = 0, 0, 0
        #: Tries in which costs are measured while none drafts.
        self._tries = Pause()
        self._measuring = False

    def begin_step(self, num_seqs: int, num_prompt_tokens: int) -> int:
        """Begins a step of ``num_seqs`` decoding sequences; returns the most draft tokens of all of them."""
        if not self.adaptive:
            return num_seqs * self._most
        if num_prompt_tokens:
            return self._begin_beside_prompts(num_seqs)
        if num_seqs != self._num_seqs or self._age >= _FRESH:
            self._compute_best(num_seqs)
            self._num_seqs, self._age = num_seqs, 0
        self._age += 1
        self._num_willing = 0
        if self._plain < _PLAIN or num_seqs < self._costs.smallest:
            self._plain += 1  # to learn what a step takes without drafts
            self._age = _FRESH
            return 0
        self._has_begun = False
        self._measuring = not self._joint[-1].length
        if not self._measuring:
            self._tries.reset()
        elif self._tries.passes():
            self._age = _FRESH
        else:
            return 0
        # More rows than ever before are tried in small steps.
        limit = max(_CHEAP_ROWS, int(_GROWTH * max(num_seqs, self._costs.largest))) - num_seqs
        self._each = self._most
        if num_seqs > 1 and self._drafting.pass_seconds(num_seqs):
            # A pass of the workers' drafter costs little more for all sequences than for one: none has many more.
            level = min(LEVELS - 1, int(LEVELS * self._all[0].chance))
            self._each = max(1, min(limit // num_seqs, self._best[level].length))
        return limit

    def _compute_best(self, num_seqs: int) -> None:
        costs, most = self._costs, self._most
        seconds = self._drafting.pass_seconds(num_seqs)
        if not seconds:
            self._best = self._joint = best_lengths(costs, num_seqs, max(1.0, self._share * num_seqs), most)
            return
        # The more sequences share a pass of the workers' drafter, the less it costs each.
        willing = min(num_seqs, max(1, self._num_willing))
        self._joint = best_lengths(costs, num_seqs, num_seqs, most, seconds)
        self._best = best_lengths(costs, num_seqs, willing, most, self._drafting.pass_seconds(willing))

    def _begin_beside_prompts(self, num_seqs: int) -> int:
        """Beside prompts a row costs its share of the step's time, as the step is not memory-bound."""
        plain = self._costs.seconds(num_seqs)
        if not plain or not self._prompt_row or self._plain < _PLAIN:
            return 0
        drafting = max(1.0, self._share * num_seqs)
        price = (self._prompt_row + self._drafting.pass_seconds(drafting) / drafting) * num_seqs / plain
        self._best = self._joint = best_of([price * length for length in range(self._most + 1)])
        self._age, self._measuring, self._each = _FRESH, False, self._most
        self._num_willing, self._has_begun = 0, False
        return num_seqs * self._most if self._best[-1].length else 0

    def length(self, seq_id: int, predicted: bool, backlog: int = 0) -> int:
        """Most draft tokens of a sequence in this step; its drafter has to catch up with ``backlog`` tokens."""
        if not self.adaptive:
            return self._most
        own = self._of.get(seq_id)
        if own is None:
            own = self._of[seq_id] = Acceptance(self._all[predicted], seq_id)
        own.tokens += 1
        if own.rest:
            own.rest -= 1
            return 0
        if self._measuring:
            return self._try(backlog)
        level = own.level
        joint = self._joint[level]
        if not joint.length:
            own.pauses = True
            return self._try(backlog) if own.tries.passes() else 0
        if own.pauses:
            own.tries.reset()
            own.pauses = False
        best = self._best[level]
        if backlog:
            cost = self._drafting.catch_up_seconds(backlog)
            if not cost:  # one sequence shows with little what it costs
                has_begun, self._has_begun = self._has_begun, True
                return 0 if has_begun else min(2, best.length, self._each)
            # The sequence's share of the steps without drafts for the tokens that will probably follow.
            tokens = max(self._mean_tokens - own.tokens, own.tokens)
            seconds = tokens * self._costs.seconds(self._num_seqs) / self._num_seqs / _MARGIN
            if cost > joint.saved * seconds:
                return 0
            if cost > best.saved * seconds:
                self._num_willing += 1
                return 0
        self._num_willing += 1
        return best.length if best.length < self._each else self._each

    def _try(self, backlog: int) -> int:
        cost = self._drafting.catch_up_seconds(backlog) + self._drafting.pass_seconds(1)
        if cost > self._saved:
            return 0
        self._saved -= cost
        return 1

    @property
    def expected(self) -> int:
        """Draft tokens for which steps with prompts leave room: as many as steps had lately."""
        return math.ceil(self._expected - 0.5)

    def observe(self, drafts: list[tuple[int, int, int]]) -> None:
        """Drafts of a step were verified; each is (sequence id, tokens drafted, tokens accepted)."""
        of = self._of
        for seq_id, drafted, accepted in drafts:
            own = of.get(seq_id)
            if own is not None:
                own.observe(drafted, accepted)
                own.tokens += accepted

    def observe_miss(self, seq_id: int) -> None:
        """The drafter proposed no token; after many misses it is asked in every fourth step only."""
        if (own := self._of.get(seq_id)) is not None:
            own.misses += 1
            own.rest = min(own.misses // _MISSES, _LONGEST_REST)

    def observe_step(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        """A step without prompts was done; ``num_drafting`` of ``num_seqs`` sequences had ``num_drafts`` tokens."""
        if seconds > 0:
            self._saved = min(self._saved, _SAVED_STEPS * _TRIES_SHARE * seconds) + _TRIES_SHARE * seconds
            largest = self._costs.largest
            self._costs.observe(num_seqs + num_drafts, seconds)
            if self._costs.largest > largest:  # larger steps were assumed to cost as little
                self._age = _FRESH
        self._expected += 0.2 * (num_drafts - self._expected)
        if num_drafting:
            self._share += 0.1 * (num_drafting / num_seqs - self._share)

    def observe_prompts(self, rows: int, seconds: float) -> None:
        row = seconds / rows
        self._prompt_row += 0.2 * (row - self._prompt_row) if self._prompt_row else row

    def observe_drafting(
        self, num_drafting: int, passes: int, seconds: float, catch_up_tokens: int, catch_up_seconds: float
    ) -> None:
        """The workers proposed drafts of up to ``passes`` tokens; ``seconds`` do not include ``catch_up_seconds``."""
        if num_drafting and passes:  # drafts may all be empty
            self._drafting.passes.observe(num_drafting, seconds / passes)
        if catch_up_tokens:
            self._drafting.observe_catch_up(catch_up_tokens, catch_up_seconds)

    def forget(self, seq_id: int) -> None:
        own = self._of.pop(seq_id, None)
        if own is not None and own.tokens:
            self._ended = min(self._ended + 1, _MEAN_OF)
            self._mean_tokens += (own.tokens - self._mean_tokens) / self._ended


#: A number of rows costs the median of its latest measurements: other processes may disturb some.
_LATEST = 5
#: A number of rows that has not occurred for these steps is forgotten: contexts grow, and it may be an outlier.
_FORGET = 256
#: Decay per token of the measured costs of catching up.
_COST_DECAY = 0.999


class StepCosts:
    """Seconds of steps without prompts by their number of rows: interpolated, and extrapolated from the last two."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._latest: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}
        self._steps = 0
        #: By rows: the last step.
        self._seen: dict[int, int] = {}

    @property
    def smallest(self) -> int:
        """Fewest measured rows; 0 if there are none."""
        return self._rows[0] if self._rows else 0

    @property
    def largest(self) -> int:
        return self._rows[-1] if self._rows else 0

    def observe(self, rows: int, seconds: float) -> None:
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
            for old in [rows for rows in self._rows if self._seen[rows] < self._steps - _FORGET]:
                self._rows.remove(old)
                del self._latest[old], self._seconds[old], self._seen[old]

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step; 0 if nothing was measured."""
        rows, measured = _rounded(rows), self._rows
        if rows in self._seconds or not measured:
            return self._seconds.get(rows, 0.0)
        if len(measured) == 1 or rows < measured[0]:
            return self._seconds[measured[0]]
        at = min(bisect.bisect(measured, rows), len(measured) - 1)
        low, high = measured[at - 1], measured[at]
        share = (rows - low) / (high - low)
        return self._seconds[low] + max(0.0, share * (self._seconds[high] - self._seconds[low]))


class DraftingCosts:
    """Seconds in which the workers' own network proposes drafts; 0 if unknown.

    A *pass* proposes a token for each sequence that drafts; before, the network has to catch up with their tokens.
    """

    def __init__(self) -> None:
        self.passes = StepCosts()
        self._seconds = self._tokens = 0.0

    def observe_catch_up(self, tokens: int, seconds: float) -> None:
        kept = _COST_DECAY**tokens
        self._seconds, self._tokens = self._seconds * kept + seconds, self._tokens * kept + tokens

    def pass_seconds(self, num_drafting: float) -> float:
        return self.passes.seconds(max(1, round(num_drafting)))

    def catch_up_seconds(self, tokens: int) -> float:
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


def _rounded(rows: int) -> int:
    """Rounds numbers of rows above 16 so that 16 are distinguished up to each power of two."""
    shift = max(0, rows.bit_length() - 5)
    return rows >> shift << shift


class BestLength(NamedTuple):
    """The number of draft tokens of a sequence that pays, and the share of its time that it saves; 0 if none pays."""

    length: int
    saved: float


def best_lengths(
    costs: StepCosts, num_seqs: int, num_drafting: float, most: int, pass_seconds: float = 0.0
) -> list[BestLength]:
    """The best number of draft tokens of each sequence, for each of ``LEVELS`` of acceptance.

    Steps yield most tokens per second if a draft token is computed exactly when its chance of being accepted exceeds
    its cost in units of a token without drafts. ``num_drafting`` of ``num_seqs`` sequences have drafts;
    ``pass_seconds`` propose one more token for each of them.
    """
    plain = costs.seconds(num_seqs)
    price = [0.0] * (most + 1)  # by draft tokens of one sequence; in tokens
    if plain > 0:
        for length in range(1, most + 1):
            rows = max(1.0, num_drafting * length)
            # Few rows more cost too little to be measured, or just fill a tile: their share of more rows counts.
            span = max(round(rows), num_seqs // 4)
            # More rows never cost less: where they do, other processes have disturbed the measurements.
            extra = max(0.0, costs.seconds(num_seqs + span) - plain) * rows / span + length * pass_seconds
            price[length] = extra * num_seqs / plain / num_drafting
    return best_of(price)


def best_of(price: list[float]) -> list[BestLength]:
    """The best length for each of ``LEVELS`` of acceptance; ``price``: of 0, 1, 2, ... draft tokens, in tokens."""
    lengths = []
    for level in range(LEVELS):
        chance, power, expected, best, gain, saved = (level + 0.5) / LEVELS, 1.0, 0.0, 0, 0.0, 0.0
        for length in range(1, len(price)):
            power *= chance
            expected += power
            if expected - price[length] > gain + 1e-3:
                best, gain = length, expected - price[length]
                saved = gain / (1 + expected)
        lengths.append(BestLength(best, saved))
    return lengths
