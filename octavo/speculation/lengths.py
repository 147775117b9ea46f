"""How many draft tokens a sequence gets: from its own acceptance, and from what the rows of a step cost now."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.speculation.costs import LEVELS, StepCosts, best_lengths

#: What a token counts for after each later one, in a sequence's acceptance and in that of all.
_DECAY, _DECAY_ALL = 0.9, 0.995
#: Draft tokens for which the acceptance of all sequences stands at the beginning of one.
_PRIOR = 3.0
#: Steps until a sequence that does not draft tries again, at first and at most; each failure doubles them.
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 512
#: Rows that are tried at once, and what more rows than ever before may be of the most so far.
_CHEAP_ROWS, _GROWTH = 8, 1.5
#: Tokens of a try.
_TRY = 2
#: Steps after which the best lengths are computed anew.
_FRESH = 8


@dataclass(slots=True)
class Acceptance:
    """How well drafts were accepted: decayed counts of accepted tokens, and of drafts that failed at some token."""

    accepted: float
    failed: float
    #: Steps until the next try, and how many they will be after it, if it fails.
    wait: int = 0
    pause: int = _FIRST_PAUSE

    def observe(self, drafted: int, accepted: int, decay: float) -> None:
        """Adds a draft."""
        kept = decay ** (accepted + (accepted < drafted))
        self.accepted = self.accepted * kept + accepted
        self.failed = self.failed * kept + (accepted < drafted)

    @property
    def level(self) -> int:
        """The chance that a draft token is accepted when those before it are, in steps of 1 / ``LEVELS``."""
        return min(LEVELS - 1, int(LEVELS * self.accepted / (self.accepted + self.failed)))


class FixedLength:
    """The same number for each sequence in each step."""

    def __init__(self, most: int) -> None:
        self._most = most

    def begin_step(self, num_seqs: int, num_prompt_tokens: int) -> int:
        """A step with so many decoding sequences begins: most draft tokens of all of them."""
        return num_seqs * self._most

    def length(self, seq_id: int) -> int:
        """Most draft tokens of a sequence in this step."""
        return self._most

    def observe(self, seq_id: int, drafted: int, accepted: int) -> None:
        """A draft was verified."""

    def observe_step(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        """A step without prompts took so long; of ``num_seqs`` sequences, ``num_drafting`` had ``num_drafts``."""

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""


class AdaptiveLength(FixedLength):
    """As many as pay. A sequence whose drafts fail stops drafting, and tries again at growing intervals.

    With many sequences a row of drafts costs as much as the token of another sequence: then none drafts, but for one
    step now and then, in which the costs are measured.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._costs = StepCosts()
        self._all = Acceptance(2.0, 1.0)
        self._of: dict[int, Acceptance] = {}
        self._best = [most] * LEVELS
        #: Share of the sequences that have drafts, where they may.
        self._share = 1.0
        self._num_seqs, self._age = 0, 0
        #: Steps until the next in which costs are measured while none drafts.
        self._wait, self._pause = _FIRST_PAUSE, _FIRST_PAUSE
        self._measuring = False

    def begin_step(self, num_seqs: int, num_prompt_tokens: int) -> int:
        """See ``FixedLength``. Beside prompts, which are worth their rows, nothing is drafted."""
        if num_prompt_tokens:
            return 0
        if num_seqs != self._num_seqs or self._age >= _FRESH:
            self._best = best_lengths(self._costs, num_seqs, max(1.0, self._share * num_seqs), self._most)
            self._num_seqs, self._age = num_seqs, 0
        self._age += 1
        # More rows than ever before are tried in small steps.
        tried = max(_CHEAP_ROWS, int(_GROWTH * max(num_seqs, self._costs.largest)))
        if self._best[-1]:
            self._measuring, self._pause = False, _FIRST_PAUSE
            return tried - num_seqs
        self._wait -= 1
        self._measuring = self._wait <= 0
        if not self._measuring:
            return 0
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._wait, self._age = self._pause, _FRESH
        return tried - num_seqs

    def length(self, seq_id: int) -> int:
        """See ``FixedLength``."""
        own = self._of.get(seq_id)
        if own is None:
            chance = self._all.accepted / (self._all.accepted + self._all.failed)
            own = self._of[seq_id] = Acceptance(_PRIOR * chance, _PRIOR * (1 - chance))
        best = min(_TRY, self._most) if self._measuring else self._best[own.level]
        if best:
            return best
        own.wait -= 1
        return 0 if own.wait > 0 else min(_TRY, self._most)

    def observe(self, seq_id: int, drafted: int, accepted: int) -> None:
        """See ``FixedLength``."""
        self._all.observe(drafted, accepted, _DECAY_ALL)
        own = self._of.get(seq_id)
        if own is None:
            return
        own.observe(drafted, accepted, _DECAY)
        if accepted:
            own.pause = _FIRST_PAUSE
        elif own.wait <= 0:
            own.wait, own.pause = own.pause, min(2 * own.pause, _LONGEST_PAUSE)

    def observe_step(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        """See ``FixedLength``."""
        if seconds > 0:
            self._costs.observe(num_seqs + num_drafts, seconds)
        if num_drafting:
            self._share += 0.1 * (num_drafting / num_seqs - self._share)

    def forget(self, seq_id: int) -> None:
        """See ``FixedLength``."""
        self._of.pop(seq_id, None)
