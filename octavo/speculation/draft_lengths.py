"""How many draft tokens a sequence gets: as many as pay, by its own acceptance and by what a row costs now."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass

#: What counts of acceptance are multiplied with for each later token: of one sequence, and of all.
_DECAY, _DECAY_ALL = 0.9, 0.995
#: Draft tokens for which the acceptance of all sequences stands at the beginning of one.
_PRIOR = 3.0
#: Tokens of a try, and steps between the tries of a sequence whose drafts do not pay: at first and at most.
_TRY, _FIRST_PAUSE, _LONGEST_PAUSE = 2, 16, 512
#: Sequences from which on the time of proposals counts, proposals without a token after which one step, and the next
#: as many two, ... goes by before the next; most steps.
_MANY, _MISSES, _LONGEST_REST = 16, 4, 3
#: Measurements of which the median counts, and steps after which one without drafts is measured again.
_LATEST, _FRESH = 5, 256
#: Share of the time that the tries of a drafter with a network may take, and steps for which it is saved up.
_TRIES_SHARE, _SAVED_STEPS = 0.01, 5000
#: Tokens that a sequence is taken to have before any has ended, and ended ones that their mean goes back.
_TOKENS, _MEAN_OF = 128.0, 32


class FixedLength:
    """The same number for each sequence in each step."""

    def __init__(self, most: int) -> None:
        self._most = most

    def begin_step(self, num_seqs: int, has_prompts: bool) -> int:
        """A step with so many decoding sequences begins, with prompts or not: most draft tokens of all of them."""
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

    def observe_step(self, num_seqs: int, num_drafts: int, seconds: float) -> None:
        """A step without prompts took so long for ``num_seqs`` sequences and their draft tokens."""

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


class MedianSeconds:
    """The median of the latest measurements, as other processes may have the processor in some; 0 before the first."""

    __slots__ = ("_latest", "age", "value")

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATEST)
        #: Steps since the latest one, as the owner counts them.
        self.value, self.age = 0.0, 0

    def add(self, seconds: float) -> None:
        """Adds a measurement."""
        self._latest.append(seconds)
        self.value, self.age = sorted(self._latest)[(len(self._latest) - 1) // 2], 0

    @property
    def is_fresh(self) -> bool:
        """Whether it need not be measured now; the first measurements follow each other sooner."""
        return bool(self._latest) and self.age < (_FRESH if len(self._latest) == _LATEST else _FRESH // 4)


@dataclass(slots=True)
class Counts:
    """How well drafts were accepted: decayed counts of accepted tokens, and of drafts that failed at some token."""

    accepted: float
    failed: float

    @property
    def chance(self) -> float:
        """That a draft token is accepted when those before it are: never quite 0 or 1."""
        return min(0.999, max(0.001, self.accepted / (self.accepted + self.failed)))

    def add(self, accepted: int, failed: int, decay: float) -> None:
        """Adds a draft."""
        kept = decay ** (accepted + failed)
        self.accepted = self.accepted * kept + accepted
        self.failed = self.failed * kept + failed


class SequenceDrafts(Counts):
    """The counts of one sequence, which are also added to those of all sequences of its kind, and its tries."""

    __slots__ = ("alike", "left", "log_chance", "misses", "now", "pause", "rest", "tokens")

    def __init__(self, alike: Counts, number: int) -> None:
        """Begins with the chance of all. Sequences of different ``number`` do not rest in the same steps."""
        super().__init__(_PRIOR * alike.chance, _PRIOR * (1 - alike.chance))
        self.alike = alike
        #: Steps between tries, and to the next one.
        self.pause = self.left = _FIRST_PAUSE
        #: Proposals without a token since the last draft, and steps until the next one.
        self.misses, self.rest = number % _MISSES, 0
        #: Tokens of the sequence in steps in which it could have had drafts.
        self.tokens = 0
        #: The chance now, and its logarithm.
        self.now = alike.chance
        self.log_chance = math.log(self.now)

    def observe(self, drafted: int, accepted: int) -> None:
        """Adds a draft."""
        failed = int(accepted < drafted)
        self.add(accepted, failed, _DECAY)
        self.alike.add(accepted, failed, _DECAY_ALL)
        self.tokens += accepted
        self.misses = 0
        self.now = self.chance
        self.log_chance = math.log(self.now)


class AdaptiveLength(FixedLength):
    """As many as pay. A sequence whose drafts do not pay stops drafting, and tries again at growing intervals.

    Steps give most tokens a second if a draft token is computed exactly when its chance of being accepted, which falls
    with each one before it, is more than its price: what it costs, in units of what a token costs without drafts.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._sequences: dict[int, SequenceDrafts] = {}
        #: Of all sequences without a prediction, and of all with one.
        self._all = (Counts(2.0, 1.0), Counts(2.0, 1.0))
        #: Seconds of steps without drafts by their sequences; of a token that the workers' drafter catches up with.
        self._plain: defaultdict[int, MedianSeconds] = defaultdict(MedianSeconds)
        self._catch_up = MedianSeconds()
        #: By the logarithm of a step's sequences, and for this step: what a draft token adds, and a pass of the
        #: workers' drafter, which proposes a token for each sequence that drafts.
        self._added: defaultdict[int, tuple[MedianSeconds, MedianSeconds]]
        self._added = defaultdict(lambda: (MedianSeconds(), MedianSeconds()))
        self._row, self._pass = self._added[1]
        #: Whether a step without drafts was measured; seconds of a token without drafts; the price of a draft token
        #: if all draft, and if those do that did lately.
        self._has_plain = False
        self._token_seconds, self._price_for_all, self._price, self._log_price = 1.0, 0.0, 0.0, 0.0
        #: Sequences of this step, those that draft at the price for all, and most tokens of each.
        self._num_seqs, self._num_willing, self._each = 0, 0, most
        #: Seconds that tries may take; draft tokens of steps and tokens of ended sequences: means of the latest.
        self._saved, self._expected = 0.0, 0.0
        self._mean_tokens, self._ended = _TOKENS, 0
        #: Whether a sequence begins to draft in this step, where it is not known what catching up costs.
        self._has_begun = False

    def begin_step(self, num_seqs: int, has_prompts: bool) -> int:
        """See ``FixedLength``. A new number of sequences begins without drafts, to know what its steps take."""
        plain = self._plain[num_seqs]
        plain.age += 1
        self._num_seqs = num_seqs
        self._row, self._pass = self._added[num_seqs.bit_length()]
        willing, self._num_willing = min(self._num_willing or num_seqs, num_seqs), 0
        if not (plain.is_fresh or (has_prompts and self._has_plain)):  # beside prompts it cannot be known
            return 0
        if plain.value:
            self._token_seconds = plain.value / num_seqs
        token = self._token_seconds
        self._price_for_all = (self._row.value + self._pass.value / num_seqs) / token
        self._price = (self._row.value + self._pass.value / willing) / token
        self._log_price = math.log(max(1e-9, self._price))
        self._each, self._has_begun = self._most, False
        if num_seqs > 1 and self._pass.value:
            # A pass costs little more for all sequences than for one: none has many more.
            self._each = max(1, min(self._most, int(self._log_price / math.log(self._all[0].chance))))
        return num_seqs * self._most

    def length(self, seq_id: int, predicted: bool, backlog: int = 0) -> int:
        """See ``FixedLength``."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            sequence = self._sequences[seq_id] = SequenceDrafts(self._all[predicted], seq_id)
        sequence.tokens += 1
        if sequence.rest:
            sequence.rest -= 1
            return 0
        if sequence.now <= self._price_for_all:
            sequence.left -= 1
            return 0 if sequence.left > 0 else self._try(sequence, backlog)
        sequence.pause = sequence.left = _FIRST_PAUSE
        if backlog and not self._pays_to_catch_up(sequence, backlog):
            return 0
        self._num_willing += 1
        if sequence.now <= self._price:
            return 0
        # The chance of the last one, sequence.now ** length, is still the price.
        length = int(self._log_price / sequence.log_chance)
        return length if length < self._each else self._each

    def _pays_to_catch_up(self, sequence: SequenceDrafts, backlog: int) -> bool:
        """Whether half of what the first draft tokens save in the tokens to come, so far as is known, pays for it."""
        if not (self._catch_up.value and self._row.value):  # one sequence shows what it costs
            has_begun, self._has_begun = self._has_begun, True
            return not has_begun
        to_come = max(self._mean_tokens - sequence.tokens, sequence.tokens) * self._token_seconds
        return 2 * backlog * self._catch_up.value < (sequence.now - self._price_for_all) * to_come

    def _try(self, sequence: SequenceDrafts, backlog: int) -> int:
        """Few tokens if the time for them is saved up, else none. The next pause is twice as long."""
        sequence.left = sequence.pause = min(2 * sequence.pause, _LONGEST_PAUSE)
        cost = backlog * self._catch_up.value + _TRY * self._pass.value
        if cost > self._saved:
            return 0
        self._saved -= cost
        return min(_TRY, self._most)

    def observe(self, drafts: list[tuple[int, int, int]]) -> None:
        """See ``FixedLength``."""
        for seq_id, drafted, accepted in drafts:
            sequence = self._sequences.get(seq_id)
            if sequence is not None:
                sequence.observe(drafted, accepted)

    def found_none(self, seq_id: int) -> None:
        """See ``FixedLength``: with many sequences one for which nothing is found is asked for less often."""
        sequence = self._sequences[seq_id]
        sequence.misses += 1
        if self._num_seqs >= _MANY:
            sequence.rest = min(sequence.misses // _MISSES, _LONGEST_REST)

    def observe_step(self, num_seqs: int, num_drafts: int, seconds: float) -> None:
        """See ``FixedLength``."""
        self._saved = min(self._saved, _SAVED_STEPS * _TRIES_SHARE * seconds) + _TRIES_SHARE * seconds
        self._expected += 0.2 * (num_drafts - self._expected)
        plain = self._plain[num_seqs]
        if not num_drafts:
            plain.add(seconds)
            self._has_plain = True
        elif plain.value:
            self._added[num_seqs.bit_length()][0].add(max(0.0, seconds - plain.value) / num_drafts)

    @property
    def expected(self) -> int:
        """See ``FixedLength``: as many as steps had lately."""
        return math.ceil(self._expected - 0.5)

    def observe_drafting(
        self, num_drafting: int, passes: int, seconds: float, catch_up_tokens: int, catch_up_seconds: float
    ) -> None:
        """See ``FixedLength``."""
        if num_drafting:
            self._pass.add(seconds / passes)
        if catch_up_tokens:
            self._catch_up.add(catch_up_seconds / catch_up_tokens)

    def forget(self, seq_id: int) -> None:
        """See ``FixedLength``."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None and sequence.tokens:
            self._ended = min(self._ended + 1, _MEAN_OF)
            self._mean_tokens += (sequence.tokens - self._mean_tokens) / self._ended
