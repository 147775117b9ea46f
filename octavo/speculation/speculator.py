"""A drafter at work: how many tokens it is asked for, what becomes of them, and what happens if it fails."""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from octavo.config.options import SpeculativeConfig
from octavo.core.errors import WorkerError
from octavo.core.stats import SpeculationStats
from octavo.speculation.drafter import (
    DraftedSequence,
    Drafter,
    DraftsOnWorkers,
    HeadDrafter,
    NgramDrafter,
    PredictionDrafter,
    SuffixDrafter,
)

# What steps cost, as they are measured, and how many draft tokens pay.

#: Measurements of one number of rows of which the median counts: other processes may have the processor in some.
_LATEST = 5
#: Steps after which a number of rows that has not occurred since is forgotten: contexts grow, and it may be an outlier.
_FORGET = 256
#: What the time of a token that a drafter catches up with counts for after a later one.
_COST_DECAY = 0.999
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
        kept = _COST_DECAY**tokens
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


# How many draft tokens a sequence gets: from its own acceptance, and from what the rows of a step cost now.

#: What a token counts for after each later one, in a sequence's acceptance and in that of all.
_DECAY, _DECAY_ALL = 0.9, 0.995
#: Draft tokens for which the acceptance of all sequences stands at the beginning of one.
_PRIOR = 3.0
#: Steps until a sequence that does not draft tries a token, at first and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512
#: Rows that are tried at once, and what more rows than ever before may be of the most so far.
_CHEAP_ROWS, _GROWTH = 8, 1.5
#: Proposals without a token after which one step, and the next as many, two, ... goes by before the next; most steps.
_MISSES, _LONGEST_REST = 4, 3
#: Steps without drafts at the beginning.
_PLAIN = 3
#: Steps after which the best lengths are computed anew.
_FRESH = 8
#: Share of the time that may go to proposing drafts to see whether they pay, and steps whose share can be saved up.
_TRIES_SHARE, _SAVED_STEPS = 0.01, 5000
#: How many times the seconds of catching up must be saved, so far as is known.
_MARGIN = 2.0
#: Tokens that a sequence is taken to have before any has ended, and how many ended ones their mean goes back.
_TOKENS, _MEAN_OF = 128.0, 32


@dataclass(slots=True)
class Pause:
    """Steps between tries of what does not pay."""

    length: int = _FIRST_PAUSE
    left: int = _FIRST_PAUSE

    def passes(self) -> bool:
        """A step more; whether something is to be tried in it. The next pause is twice as long."""
        self.left -= 1
        if self.left > 0:
            return False
        self.left = self.length = min(2 * self.length, _LONGEST_PAUSE)
        return True

    def reset(self) -> None:
        """It pays."""
        self.left = self.length = _FIRST_PAUSE


#: What is left of counts after so many tokens.
_KEPT, _KEPT_ALL = ([decay**n for n in range(66)] for decay in (_DECAY, _DECAY_ALL))


@dataclass(slots=True)
class Counts:
    """How well drafts were accepted: decayed counts of accepted tokens, and of drafts that failed at some token."""

    accepted: float
    failed: float

    @property
    def chance(self) -> float:
        """That a draft token is accepted when those before it are."""
        return self.accepted / (self.accepted + self.failed)


class Acceptance(Counts):
    """The counts of one sequence, which are also added to those of all sequences of its kind."""

    __slots__ = ("alike", "level", "misses", "pauses", "rest", "tokens", "tries")

    def __init__(self, alike: Counts, number: int) -> None:
        """Begins with the chance of all. Sequences of different ``number`` do not rest in the same steps."""
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
        """Adds a draft."""
        failed, alike, self.misses = accepted < drafted, self.alike, 0
        kept, kept_of_all = _KEPT[accepted + failed], _KEPT_ALL[accepted + failed]
        self.accepted = found = self.accepted * kept + accepted
        self.failed = lost = self.failed * kept + failed
        level = int(LEVELS * found / (found + lost))
        self.level = level if level < LEVELS else LEVELS - 1
        alike.accepted = alike.accepted * kept_of_all + accepted
        alike.failed = alike.failed * kept_of_all + failed


class FixedLength:
    """The same number for each sequence in each step."""

    def __init__(self, most: int) -> None:
        self._most = most

    def begin_step(self, num_seqs: int, num_prompt_tokens: int) -> int:
        """A step with so many decoding sequences begins: most draft tokens of all of them."""
        return num_seqs * self._most

    def length(self, seq_id: int, predicted: bool, backlog: int = 0) -> int:
        """Most draft tokens in this step of a sequence, which has a prediction or not.

        Its drafter has to catch up with ``backlog`` tokens.
        """
        return self._most

    def observe(self, drafts: list[tuple[int, int, int]]) -> None:
        """Drafts of a step were verified; each is (sequence id, tokens drafted, tokens accepted)."""

    def found_none(self, seq_id: int) -> None:
        """The drafter proposed nothing."""

    def observe_step(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        """A step without prompts took so long; of ``num_seqs`` sequences, ``num_drafting`` had ``num_drafts``."""

    def observe_prompts(self, rows: int, seconds: float) -> None:
        """A step with prompts took so long for so many rows."""

    @property
    def expected(self) -> int:
        """Draft tokens for which steps with prompts leave room."""
        return 0

    def observe_drafting(
        self, num_drafting: int, passes: int, seconds: float, catch_up_tokens: int, catch_up_seconds: float
    ) -> None:
        """The workers proposed drafts of up to ``passes`` tokens for so many sequences, and caught up with tokens.

        The seconds of both are apart from each other.
        """

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""


class AdaptiveLength(FixedLength):
    """As many as pay. A sequence whose drafts do not pay stops drafting, and tries again at growing intervals.

    With many sequences a row of drafts costs as much as the token of another sequence: then none drafts, but for one
    step now and then, in which the costs are measured.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._costs, self._drafting = StepCosts(), DraftingCosts()
        #: Seconds that tries may take; mean of the tokens of ended sequences, of how many.
        self._saved, self._mean_tokens, self._ended = 0.0, _TOKENS, 0
        #: Whether a sequence begins to draft in this step, where it is not known what catching up costs.
        self._has_begun = False
        #: Most tokens of each sequence.
        self._each = most
        #: Of all sequences without a prediction, and of all with one.
        self._all = (Counts(2.0, 1.0), Counts(2.0, 1.0))
        self._of: dict[int, Acceptance] = {}
        self._best = self._joint = [BestLength(most, 1.0)] * LEVELS
        #: Sequences of the last step that would have had drafts, had all.
        self._num_willing = 0
        #: Seconds of a row of steps with prompts, and draft tokens of steps without: means of the latest.
        self._prompt_row, self._expected = 0.0, 0.0
        #: Share of the sequences that have drafts, where they may.
        self._share = 1.0
        self._num_seqs, self._age, self._plain = 0, 0, 0
        #: Tries in which costs are measured while none drafts.
        self._tries = Pause()
        self._measuring = False

    def begin_step(self, num_seqs: int, num_prompt_tokens: int) -> int:
        """See ``FixedLength``."""
        if num_prompt_tokens:
            return self._begin_beside_prompts(num_seqs)
        if num_seqs != self._num_seqs or self._age >= _FRESH:
            self._compute_best(num_seqs)
            self._num_seqs, self._age = num_seqs, 0
        self._age += 1
        self._num_willing = 0
        if self._plain < _PLAIN or num_seqs < self._costs.smallest:
            self._plain += 1  # to know what a step takes without drafts
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
        """The best lengths by level, where those draft that will, and where all do.

        A pass of the workers' drafter costs each sequence the less the more there are.
        """
        costs, most = self._costs, self._most
        seconds = self._drafting.pass_seconds(num_seqs)
        if not seconds:
            self._best = self._joint = best_lengths(costs, num_seqs, max(1.0, self._share * num_seqs), most)
            return
        willing = min(num_seqs, max(1, self._num_willing))
        self._joint = best_lengths(costs, num_seqs, num_seqs, most, seconds)
        self._best = best_lengths(costs, num_seqs, willing, most, self._drafting.pass_seconds(willing))

    def _begin_beside_prompts(self, num_seqs: int) -> int:
        """As ``begin_step``: beside prompts a row takes its share of the step's time, as nothing is waited for."""
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
        """See ``FixedLength``."""
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
            cost, seconds = self._drafting.catch_up_seconds(backlog), self._seconds_to_come(own) / _MARGIN
            if not cost:  # one sequence shows with little what it costs
                has_begun, self._has_begun = self._has_begun, True
                return 0 if has_begun else min(2, best.length, self._each)
            if cost > joint.saved * seconds:
                return 0
            if cost > best.saved * seconds:
                self._num_willing += 1
                return 0
        self._num_willing += 1
        return best.length if best.length < self._each else self._each

    def _seconds_to_come(self, own: Acceptance) -> float:
        """What the tokens that will follow, so far as is known, take without drafts: this sequence's part of steps."""
        tokens = max(self._mean_tokens - own.tokens, own.tokens)
        return tokens * self._costs.seconds(self._num_seqs) / self._num_seqs

    def _try(self, backlog: int) -> int:
        """One token if the time for it is saved up, else none."""
        cost = self._drafting.catch_up_seconds(backlog) + self._drafting.pass_seconds(1)
        if cost > self._saved:
            return 0
        self._saved -= cost
        return 1

    def observe(self, drafts: list[tuple[int, int, int]]) -> None:
        """See ``FixedLength``."""
        of = self._of
        for seq_id, drafted, accepted in drafts:
            own = of.get(seq_id)
            if own is not None:
                own.observe(drafted, accepted)
                own.tokens += accepted

    def found_none(self, seq_id: int) -> None:
        """See ``FixedLength``: where nothing is found for long, the drafter is asked in every fourth step."""
        own = self._of[seq_id]
        own.misses += 1
        own.rest = min(own.misses // _MISSES, _LONGEST_REST)

    def observe_step(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        """See ``FixedLength``."""
        if seconds > 0:
            self._saved = min(self._saved, _SAVED_STEPS * _TRIES_SHARE * seconds) + _TRIES_SHARE * seconds
            largest = self._costs.largest
            self._costs.observe(num_seqs + num_drafts, seconds)
            if self._costs.largest > largest:  # what lies beyond was taken to cost as little
                self._age = _FRESH
        self._expected += 0.2 * (num_drafts - self._expected)
        if num_drafting:
            self._share += 0.1 * (num_drafting / num_seqs - self._share)

    def observe_prompts(self, rows: int, seconds: float) -> None:
        """See ``FixedLength``."""
        row = seconds / rows
        self._prompt_row += 0.2 * (row - self._prompt_row) if self._prompt_row else row

    @property
    def expected(self) -> int:
        """See ``FixedLength``: as many as steps had lately."""
        return math.ceil(self._expected - 0.5)

    def observe_drafting(
        self, num_drafting: int, passes: int, seconds: float, catch_up_tokens: int, catch_up_seconds: float
    ) -> None:
        """See ``FixedLength``."""
        if num_drafting:
            self._drafting.observe(num_drafting, passes, seconds)
        if catch_up_tokens:
            self._drafting.observe_catch_up(catch_up_tokens, catch_up_seconds)

    def forget(self, seq_id: int) -> None:
        """See ``FixedLength``."""
        own = self._of.pop(seq_id, None)
        if own is not None and own.tokens:
            self._ended = min(self._ended + 1, _MEAN_OF)
            self._mean_tokens += (own.tokens - self._mean_tokens) / self._ended


logger = logging.getLogger("octavo")


class Speculator:
    """Owns the drafters and the lengths of their drafts. Sequences for which one fails have no further drafts.

    The prediction of a request goes before the drafter of the engine, which has the sequence where it says nothing.
    """

    def __init__(self, drafter: Drafter | None, most: int, *, adaptive: bool) -> None:
        """``most``: draft tokens of a sequence in a step. Without a ``drafter``, predictions alone are drafted from."""
        self._drafter = drafter
        self._predictions = PredictionDrafter()
        #: Whether the number of draft tokens follows what they bring.
        self.adaptive = adaptive
        self._lengths = AdaptiveLength(most) if adaptive else FixedLength(most)
        self._failed: set[int] = set()
        self._logged = False
        self._draft_tokens = self._failures = 0
        #: Drafts by the number of their tokens that were accepted.
        self._drafts = [0] * (most + 1)

    def drafts(self, sequence: DraftedSequence) -> bool:
        """Whether drafts of it may ever be proposed."""
        return self._drafter is not None or bool(sequence.prediction)

    def begin_step(self, num_seqs: int, num_prompt_tokens: int) -> int:
        """A step of so many decoding sequences and tokens of prompts: most draft tokens of it."""
        return self._lengths.begin_step(num_seqs, num_prompt_tokens)

    def propose(self, sequence: DraftedSequence, most: int) -> list[int]:
        """Draft tokens of a sequence, at most ``most``."""
        seq_id, predicted, drafter = sequence.seq_id, bool(sequence.prediction), self._drafter
        backlog = drafter.backlog(sequence) if drafter is not None and not predicted else 0
        wanted = self._lengths.length(seq_id, predicted, backlog)
        if wanted > most:
            wanted = most
        if wanted <= 0 or seq_id in self._failed:
            return []
        try:
            found = self._predictions.propose(sequence, wanted) if predicted else []
            if not found and drafter is not None and not (predicted and drafter.backlog(sequence)):
                found = drafter.propose(sequence, wanted)
                if len(found) > wanted:
                    found = found[:wanted]
        except Exception as e:
            self._fail(sequence, e)
            return []
        if not found:
            self._lengths.found_none(seq_id)
        return found

    def observe(self, drafts: list[tuple[int, int, int]]) -> None:
        """Drafts of a step were verified; each is (sequence id, tokens drafted, tokens accepted)."""
        self._lengths.observe(drafts)
        for _, drafted, accepted in drafts:
            self._draft_tokens += drafted
            self._drafts[accepted] += 1

    def fail(self, sequence: DraftedSequence, message: str) -> None:
        """The workers could not propose tokens for the sequence."""
        self._fail(sequence, WorkerError(message))

    def observe_step(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        """A step without prompts took so long; of ``num_seqs`` sequences, ``num_drafting`` had ``num_drafts``."""
        self._lengths.observe_step(num_seqs, num_drafting, num_drafts, seconds)

    def observe_prompts(self, rows: int, seconds: float) -> None:
        """A step with prompts took so long for so many rows."""
        self._lengths.observe_prompts(rows, seconds)

    @property
    def expected(self) -> int:
        """Draft tokens for which steps with prompts leave room."""
        return self._lengths.expected

    def observe_drafting(
        self, num_drafting: int, passes: int, seconds: float, catch_up_tokens: int, catch_up_seconds: float
    ) -> None:
        """See ``FixedLength``."""
        self._lengths.observe_drafting(num_drafting, passes, seconds, catch_up_tokens, catch_up_seconds)

    def on_end(self, sequence: DraftedSequence) -> None:
        """The sequence has ended."""
        self._lengths.forget(sequence.seq_id)
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
        # A draft of which so many tokens were accepted had the first, the second, ... accepted.
        per_position = list(itertools.accumulate(reversed(self._drafts[1:])))[::-1]
        return SpeculationStats(sum(self._drafts), self._draft_tokens, sum(per_position), per_position, self._failures)

    def _fail(self, sequence: DraftedSequence, error: Exception) -> None:
        self._failed.add(sequence.seq_id)
        self._failures += 1
        self._log(error)

    def _log(self, error: Exception) -> None:
        if not self._logged:
            name = type(self._drafter or self._predictions).__name__
            logger.error("drafter %s failed; such requests go on without drafts", name, exc_info=error)
        self._logged = True


def make_speculator(config: SpeculativeConfig | None) -> Speculator:
    """What an engine with this option drafts with; without one, from predictions of requests alone."""
    config = config or SpeculativeConfig(method="prediction")
    return Speculator(_make_drafter(config), config.num_speculative_tokens, adaptive=config.adaptive)


def _make_drafter(config: SpeculativeConfig) -> Drafter | None:
    """None if nothing but predictions of requests is drafted from."""
    if config.drafts_on_workers:
        return DraftsOnWorkers() if config.method == "draft_model" else HeadDrafter()
    if config.method == "ngram":
        return NgramDrafter(config)
    return SuffixDrafter(config) if config.method == "suffix" else None


# Whether steps wait for the results of those before them, or are planned ahead of them.

#: Weight of the latest step in means.
_LATEST_STEPS = 0.2
#: Accepted tokens of a sequence and step for which is waited where a device's idle time is not known.
_LEAST = 0.02
#: What new sequences are taken to bring, so that some steps show it.
_NEW = 0.03
#: Most steps ahead until one waits, to see what drafts bring.
_LONGEST = 16


class Waiting:
    """Drafts are proposed behind known tokens: for them a step waits for the result before it, and the device for that.

    It pays if the tokens that drafts add to a step are a greater share than the time in which the device is idle.
    Where it does not, steps run ahead, and one after 1, 2, 4, ... of them waits.
    """

    def __init__(self) -> None:
        self._gain, self._idle = 1.0, 0.0
        self._pause, self._left = 1, 0

    @property
    def waits(self) -> bool:
        """Whether the next step waits."""
        return self._left <= 0

    def begin(self) -> None:
        """A sequence that may have drafts has arrived."""
        self._gain, self._left = max(self._gain, _NEW), 0

    def observe(self, waited: bool, accepted: float, idle: float) -> None:
        """A step without prompts was done; it has waited, or may have been planned ahead.

        ``accepted``: its draft tokens that were, a sequence. ``idle``: the device's seconds before it, by its own.
        """
        if not waited:
            self._left -= 1
            return
        self._gain += _LATEST_STEPS * (accepted - self._gain)
        self._idle += _LATEST_STEPS * (idle - self._idle)
        if self._gain > max(self._idle, _LEAST):
            self._pause, self._left = 1, 0
        else:
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST)
