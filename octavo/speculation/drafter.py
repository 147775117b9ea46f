"""The interface of drafters."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from array import array
from typing import Protocol

from octavo.config.options import SpeculativeConfig

#: In place of a draft token: the workers propose one.
BY_WORKER = -1


class DraftedSequence(Protocol):
    """What a drafter sees of a sequence; it changes nothing of it."""

    @property
    def seq_id(self) -> int:
        """Never used again for another sequence."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt and what was generated: always longer than at the last call, and the same up to there."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache."""

    @property
    def prediction(self) -> list[int]:
        """What its output is likely to be, as the request says; empty if it says nothing."""

    @property
    def context(self) -> str:
        """What the tokens depend on besides those before them: the adapter, and a salt that keeps users apart."""


class Drafter(ABC):
    """Proposes tokens of running sequences. What it proposes changes the number of steps, never an answer."""

    @abstractmethod
    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        """At most ``num_tokens`` (1 or more) ids of the vocabulary that may follow ``sequence.token_ids``.

        Or ``BY_WORKER`` as often as the workers are to propose a token. Which ones of the last call were accepted,
        ``token_ids`` shows. Preemption changes nothing for a drafter.
        """

    def backlog(self, sequence: DraftedSequence) -> int:
        """Tokens that would have to be computed before it can propose any, besides those of the last steps."""
        return 0

    def on_end(self, sequence: DraftedSequence) -> None:  # noqa: B027  not every drafter keeps something
        """The sequence has ended, in whatever way; it may never have been proposed for."""


# Drafts that the workers propose, with a network of their own beside the model's.


class DraftsOnWorkers(Drafter):
    """Asks the workers for drafts, and estimates which tokens of a sequence their drafter has computed."""

    def __init__(self) -> None:
        #: Tokens of each sequence when it last asked, with those that it asked for.
        self._known: dict[int, int] = {}

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        """See ``Drafter``."""
        self._known[sequence.seq_id] = len(sequence.token_ids) + num_tokens
        return [BY_WORKER] * num_tokens

    def backlog(self, sequence: DraftedSequence) -> int:
        """See ``Drafter``: an estimate. What is in the prefix cache was most likely drafted for, too."""
        known = self._known.get(sequence.seq_id)
        return max(0, len(sequence.token_ids) - (sequence.num_cached_tokens if known is None else known))

    def on_end(self, sequence: DraftedSequence) -> None:
        """See ``Drafter``."""
        self._known.pop(sequence.seq_id, None)


class HeadDrafter(Drafter):
    """Asks the workers for drafts of a head, which computes every token beside the model: it is never behind."""

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        """See ``Drafter``."""
        return [BY_WORKER] * num_tokens


# Prompt lookup: what followed the last tokens when they occurred before in the same sequence.

#: Of a token in the key of an n-gram, which are equal only if the n-grams are.
_BITS = 32
#: Earlier places that are compared, latest first: bounds the time of a proposal.
MAX_PLACES = 16


class TokenIndex:
    """The places of one sequence that follow its n-grams of the least length, as chains from the latest to the first.

    Owns about 105 bytes for a token of text that does not repeat. A place is the position after the n-gram.
    """

    def __init__(self, least: int) -> None:
        """``least``: tokens of an n-gram."""
        self._least = least
        #: The key of the last ``least`` tokens, and how many tokens there were.
        self._key, self._known, self._mask = 0, 0, (1 << _BITS * least) - 1
        self._latest: dict[int, int] = {}
        #: The place before each one in its chain, -1 if there is none; of place i at i - least.
        self._before = array("q")

    def longest_match(self, token_ids: list[int], most: int) -> tuple[int, int]:
        """The longest end of ``token_ids``, of up to ``most`` tokens, that is also at an earlier place.

        The places before tokens that are new since the last call are added first.

        Returns:
            (place, length), the latest of equal ones among the latest ``MAX_PLACES``; (-1, 0) if there is none.
        """
        least, before, end = self._least, self._before, len(token_ids)
        key, latest, mask = self._key, self._latest, self._mask
        for new in range(self._known, end):
            if new >= least:
                before.append(latest.get(key, -1))
                latest[key] = new
            key = (key << _BITS | token_ids[new]) & mask
        self._key, self._known = key, end
        place = latest.get(key, -1) if end >= least else -1
        best, longest = -1, 0
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            # Most places are no better than the best so far: the token that would have to match shows it.
            if place > longest and token_ids[place - longest - 1] == token_ids[end - longest - 1]:
                length, limit = least, min(most, place)
                while length < limit and token_ids[place - length - 1] == token_ids[end - length - 1]:
                    length += 1
                if length > longest:
                    best, longest = place, length
                    if length == most:
                        break
            place = before[place - least]
        return best, longest


class _Followed:
    """A sequence, and where its last tokens were before."""

    __slots__ = ("index", "known", "place")

    def __init__(self, least: int) -> None:
        self.index = TokenIndex(least)
        #: Tokens at the last call, and the place of what followed them earlier; -1: they are new.
        self.known, self.place = 0, -1


class NgramDrafter(Drafter):
    """Drafts from the sequence's own tokens, prompt and output.

    While a sequence goes on as it did at a place, that is the longest match: no other is searched for.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max
        self._followed: dict[int, _Followed] = {}

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        """See ``Drafter``: what followed the longest match."""
        token_ids, followed = sequence.token_ids, self._follow(sequence)
        place, known, end = followed.place, followed.known, len(token_ids)
        followed.known = end
        if place >= 0 and token_ids[place : place + end - known] == token_ids[known:]:
            place += end - known
        else:
            place, _ = followed.index.longest_match(token_ids, self._most)
        followed.place = place
        if place < 0:
            return []
        tokens = token_ids[place : place + num_tokens]
        return tokens if len(tokens) == num_tokens else continuation(token_ids, place, num_tokens)

    def match(self, sequence: DraftedSequence) -> tuple[int, int]:
        """See ``TokenIndex.longest_match``."""
        return self._follow(sequence).index.longest_match(sequence.token_ids, self._most)

    def _follow(self, sequence: DraftedSequence) -> _Followed:
        found = self._followed.get(sequence.seq_id)
        if found is None:
            found = self._followed[sequence.seq_id] = _Followed(self._least)
        return found

    def on_end(self, sequence: DraftedSequence) -> None:
        """See ``Drafter``."""
        self._followed.pop(sequence.seq_id, None)


def continuation(token_ids: list[int], place: int, num_tokens: int) -> list[int]:
    """The tokens from ``place`` on; what repeats up to the end is taken to repeat further."""
    tokens = token_ids[place : place + num_tokens]
    while len(tokens) < num_tokens:
        tokens += tokens[: num_tokens - len(tokens)]
    return tokens


# Drafts from recent outputs of all requests, and from the sequence itself.

#: Tokens of the n-grams by which places in the history are found.
_KEY = 3
#: Token between two outputs; matches no id.
_SEPARATOR = -1


class History:
    """The latest tokens of ended sequences, and where each n-gram of them is.

    Owns ``BYTES_A_TOKEN`` for each token of its capacity, all allocated when it is made. Positions count all tokens
    that were ever added; those further back than the capacity are overwritten.
    """

    BYTES_A_TOKEN = 24

    def __init__(self, capacity: int) -> None:
        """``capacity`` in tokens."""
        self._capacity = capacity
        self._tokens = array("i", [_SEPARATOR]) * capacity
        #: What the tokens depend on, as a number.
        self._owners = array("i", [0]) * capacity
        #: Latest place of each n-gram that has this hash, and for each place the one before it: -1 if there is none.
        self._latest = array("q", [-1]) * capacity
        self._before = array("q", [-1]) * capacity
        self.num_added = 0

    def add(self, token_ids: list[int], owner: int) -> None:
        """Adds an output; of one that is longer than the capacity, the end is left."""
        capacity, tokens, owners = self._capacity, self._tokens, self._owners
        latest, before = self._latest, self._before
        token_ids = token_ids[-(capacity - 1) :]
        for offset, token in enumerate([_SEPARATOR, *token_ids]):
            position = self.num_added
            if offset > _KEY:  # the place before this token follows an n-gram of this output
                bucket = _bucket(token_ids, offset - 1, owner, capacity)
                before[position % capacity] = latest[bucket]
                latest[bucket] = position
            tokens[position % capacity], owners[position % capacity] = token, owner
            self.num_added += 1

    def longest_match(self, token_ids: list[int], most: int, owner: int) -> tuple[int, int]:
        """The longest end of ``token_ids``, of up to ``most`` tokens, that occurred with this owner.

        Returns:
            (place, length), the latest of equal ones among the latest ``MAX_PLACES``; (-1, 0) if there is none.
        """
        end = len(token_ids)
        if end < _KEY:
            return -1, 0
        capacity, tokens, first = self._capacity, self._tokens, max(0, self.num_added - self._capacity)
        place = self._latest[_bucket(token_ids, end, owner, capacity)]
        best, longest = -1, _KEY - 1
        for _ in range(MAX_PLACES):
            if place < first:
                break
            if self._owners[place % capacity] == owner:
                length, limit = 0, min(most, place - first, end)
                while length < limit and tokens[(place - length - 1) % capacity] == token_ids[end - length - 1]:
                    length += 1
                if length > longest:
                    best, longest = place, length
                    if length == most:
                        break
            place = self._before[place % capacity]
        return (best, longest) if best >= 0 else (-1, 0)

    def continuation(self, place: int, num_tokens: int) -> list[int]:
        """The tokens from ``place`` on, up to the end of their output."""
        found = []
        for position in range(place, min(place + num_tokens, self.num_added)):
            token = self._tokens[position % self._capacity]
            if token == _SEPARATOR:
                break
            found.append(token)
        return found


def _bucket(token_ids: list[int], end: int, owner: int, capacity: int) -> int:
    return hash((owner, *token_ids[end - _KEY : end])) % capacity


class SuffixDrafter(Drafter):
    """Drafts from the sequence's own tokens or from the history, whichever has the longer match."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.suffix_decoding_max_tree_depth
        bounds = {"prompt_lookup_max": self._most, "prompt_lookup_min": min(config.prompt_lookup_min, self._most)}
        self._own = NgramDrafter(config.model_copy(update=bounds))
        self._history = History(config.suffix_decoding_max_cached_tokens)

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        """See ``Drafter``."""
        token_ids = sequence.token_ids
        place, length = self._own.match(sequence)
        if length < self._most:
            shared, longer = self._history.longest_match(token_ids, self._most, _owner(sequence))
            if longer > length:
                return self._history.continuation(shared, num_tokens)
        return continuation(token_ids, place, num_tokens) if place >= 0 else []

    def on_end(self, sequence: DraftedSequence) -> None:
        """See ``Drafter``: the output enters the history, with the end of the prompt before it."""
        self._own.on_end(sequence)
        start = sequence.num_prompt_tokens
        if len(sequence.token_ids) > start:
            self._history.add(sequence.token_ids[max(0, start - self._most) :], _owner(sequence))


def _owner(sequence: DraftedSequence) -> int:
    """Tells contexts apart, alike in every process."""
    return zlib.crc32(sequence.context.encode()) & 0x7FFFFFFF


# Predicted outputs: a request brings a text that its answer is likely to repeat, such as a file to be edited.

#: Tokens that must agree where the prediction is found again, and most that are compared.
_LEAST, _MOST = 2, 8
#: Tokens of the prediction that are searched: bounds the time of a proposal.
_WINDOW = 1 << 14


class PredictionDrafter(Drafter):
    """Drafts what the prediction says next: from its beginning on, and after a difference from where it agrees again.

    That is behind the longest end of the output, of 2 to 8 tokens, that is in the prediction: of equal ones the next
    after the difference. Sequences without a prediction are not drafted.
    """

    def __init__(self) -> None:
        self._followed: dict[int, _Prediction] = {}

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        """See ``Drafter``."""
        if not sequence.prediction:
            return []
        followed = self._followed.get(sequence.seq_id)
        if followed is None:
            followed = _Prediction(sequence.prediction, sequence.num_prompt_tokens)
            self._followed[sequence.seq_id] = followed
        return followed.propose(sequence.token_ids, num_tokens)

    def on_end(self, sequence: DraftedSequence) -> None:
        """See ``Drafter``."""
        self._followed.pop(sequence.seq_id, None)


class _Prediction:
    """Where in its prediction one sequence is. Owns up to 4 bytes a token of it."""

    def __init__(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        self._tokens = token_ids
        #: The tokens as code points: a search for some of them is one for a text.
        self._text = "".join(map(chr, token_ids))
        self._num_prompt_tokens = num_prompt_tokens
        #: Tokens of the sequence that were looked at, and the place of the next one in the prediction.
        self._known, self._place = num_prompt_tokens, 0
        #: Whether the last tokens agree with those before the place.
        self._agrees = True

    def propose(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """What follows in the prediction; nothing while the place is not known."""
        place, new = self._place, token_ids[self._known :]
        self._known = len(token_ids)
        if self._agrees and self._tokens[place : place + len(new)] == new:
            place += len(new)
        else:
            place = self._find(token_ids)
        self._agrees = place >= 0
        if not self._agrees:
            return []
        self._place = place
        return self._tokens[place : place + num_tokens]

    def _find(self, token_ids: list[int]) -> int:
        """The place behind the longest end of the output; -1 if there is none."""
        text, start, found = self._text, self._place, -1
        end = "".join(map(chr, token_ids[max(self._num_prompt_tokens, len(token_ids) - _MOST) :]))
        for length in range(_LEAST, len(end) + 1):
            wanted = end[-length:]
            at = text.find(wanted, start, start + _WINDOW)
            if at < 0:
                at = text.find(wanted, 0, _WINDOW)
            if at < 0:
                break
            found = at + length
        return found
