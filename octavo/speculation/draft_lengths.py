"""How many draft tokens a sequence gets: from its own acceptance, and from what the rows of a step cost now."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.speculation.costs import LEVELS, BestLength, DraftingCosts, StepCosts, best_lengths, best_of

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
