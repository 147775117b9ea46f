"""Drafters: guesses at the next tokens of a sequence, which a step verifies (vLLM calls them proposers)."""

from __future__ import annotations

import itertools
import zlib
from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass
from typing import Protocol

from octavo.config.options import SpeculativeConfig

#: Placeholder for a draft token that the workers propose.
BY_WORKER = -1


class DraftedSequence(Protocol):
    """A sequence as a drafter sees it; a drafter changes nothing of it."""

    @property
    def seq_id(self) -> int:
        """Never used again for another sequence."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output: always longer than at the last call, and the same up to there."""

    @property
    def num_prompt_tokens(self) -> int:
        pass

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were in the prefix cache."""

    @property
    def prediction(self) -> list[int]:
        """The output that the request predicts; may be empty."""

    @property
    def context(self) -> str:
        """What the KV entries depend on besides the tokens: the adapter, and a salt that separates users."""


class Drafter(ABC):
    """Proposes tokens of running sequences. Proposals change the number of steps, never an answer."""

    @abstractmethod
    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        """At most ``num_tokens`` (1 or more) ids of the vocabulary that may follow ``sequence.token_ids``.

        Or ``BY_WORKER`` once for each token that the workers are to propose.
        """

    def backlog(self, sequence: DraftedSequence) -> int:
        """Tokens that must be computed before it can propose any, besides those of the last steps."""
        return 0

    def on_end(self, sequence: DraftedSequence) -> None:  # noqa: B027  not every drafter keeps something
        """The sequence has ended, in whatever way; it may never have been proposed for."""


class DraftsOnWorkers(Drafter):
    """Drafts of a network or head beside the model, on the workers; estimates which tokens a network has computed."""

    def __init__(self, *, catches_up: bool = True) -> None:
        """``catches_up``: False of a head, which follows the model and so is at most a few tokens behind."""
        self._catches_up = catches_up
        #: By sequence: its tokens at the last proposal, and those proposed.
        self._covered: dict[int, int] = {}

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        self._covered[sequence.seq_id] = len(sequence.token_ids) + num_tokens
        return [BY_WORKER] * num_tokens

    def backlog(self, sequence: DraftedSequence) -> int:
        """An estimate: tokens in the prefix cache were most likely drafted for, too."""
        if not self._catches_up:
            return 0
        covered = self._covered.get(sequence.seq_id, sequence.num_cached_tokens)
        return max(0, len(sequence.token_ids) - covered)

    def on_end(self, sequence: DraftedSequence) -> None:
        self._covered.pop(sequence.seq_id, None)


# Prompt lookup: the tokens that followed an earlier occurrence of the last tokens in the same sequence.

#: Bits per token in the key of an n-gram; equal keys mean equal n-grams.
_BITS = 32
#: Earlier places to compare, latest first: bounds the time of a proposal.
MAX_PLACES = 16


class TokenIndex:
    """The places behind each n-gram of ``least`` tokens, the latest first: about 105 bytes per token of new text."""

    def __init__(self, least: int) -> None:
        self._least = least
        #: The key of the last ``least`` indexed tokens, and the number of indexed tokens.
        self._key, self._known, self._mask = 0, 0, (1 << _BITS * least) - 1
        self._latest: dict[int, int] = {}
        #: The place before each one in its chain, -1 if there is none; of place i at i - least.
        self._before = array("q")

    def longest_match(self, token_ids: list[int], most: int) -> tuple[int, int]:
        """The longest end of ``token_ids``, of up to ``most`` tokens, that also occurs earlier, as (place, length).

        Of equally long ones, the latest among the latest ``MAX_PLACES``; (-1, 0) if there is none.
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
            # Most places are no better than the best so far: one token shows it.
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


@dataclass(slots=True)
class _Followed:
    index: TokenIndex
    #: Tokens at the last call; the place of the tokens that followed them earlier, -1 if they are new.
    known: int = 0
    place: int = -1


class NgramDrafter(Drafter):
    """Drafts from the sequence's own tokens, prompt and output.

    While a sequence continues as it did at a place, that is the longest match: no other is searched for.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max
        self._followed: dict[int, _Followed] = {}

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
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
        return self._follow(sequence).index.longest_match(sequence.token_ids, self._most)

    def _follow(self, sequence: DraftedSequence) -> _Followed:
        followed = self._followed.get(sequence.seq_id)
        if followed is None:
            followed = self._followed[sequence.seq_id] = _Followed(TokenIndex(self._least))
        return followed

    def on_end(self, sequence: DraftedSequence) -> None:
        self._followed.pop(sequence.seq_id, None)


def continuation(token_ids: list[int], place: int, num_tokens: int) -> list[int]:
    """The tokens from ``place`` on; a repetition up to the end is assumed to go on."""
    tokens = token_ids[place : place + num_tokens]
    while len(tokens) < num_tokens:
        tokens += tokens[: num_tokens - len(tokens)]
    return tokens


# Drafts from recent outputs of all requests, and from the sequence itself.

#: Tokens per n-gram of the history; and the token between two outputs, which matches no id.
_KEY, _SEPARATOR = 3, -1


class History:
    """The latest tokens of ended sequences, and the places of each n-gram in them. Positions count all tokens added."""

    #: Allocated at once, for the whole capacity.
    BYTES_A_TOKEN = 24

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens = array("i", [_SEPARATOR]) * capacity
        self._owners = array("i", [0]) * capacity
        #: By hash of an n-gram its latest place; by place the one before it; -1 if there is none.
        self._latest = array("q", [-1]) * capacity
        self._before = array("q", [-1]) * capacity
        self.num_added = 0

    def add(self, token_ids: list[int], owner: int) -> None:
        """Adds an output, or its end if it exceeds the capacity; ``owner`` stands for the context of its tokens."""
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
        """``TokenIndex.longest_match`` among the tokens of this owner."""
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
        end = min(place + num_tokens, self.num_added)
        tokens = (self._tokens[position % self._capacity] for position in range(place, end))
        return list(itertools.takewhile(lambda token: token != _SEPARATOR, tokens))


def _bucket(token_ids: list[int], end: int, owner: int, capacity: int) -> int:
    return hash((owner, *token_ids[end - _KEY : end])) % capacity


class SuffixDrafter(Drafter):
    """Drafts from the sequence's own tokens or from the history, whichever has the longer match (suffix decoding)."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.suffix_decoding_max_tree_depth
        bounds = {"prompt_lookup_max": self._most, "prompt_lookup_min": min(config.prompt_lookup_min, self._most)}
        self._own = NgramDrafter(config.model_copy(update=bounds))
        self._history = History(config.suffix_decoding_max_cached_tokens)

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        token_ids = sequence.token_ids
        place, length = self._own.match(sequence)
        if length < self._most:
            shared, longer = self._history.longest_match(token_ids, self._most, _owner(sequence))
            if longer > length:
                return self._history.continuation(shared, num_tokens)
        return continuation(token_ids, place, num_tokens) if place >= 0 else []

    def on_end(self, sequence: DraftedSequence) -> None:
        """Adds the output to the history, with the end of the prompt before it."""
        self._own.on_end(sequence)
        start = sequence.num_prompt_tokens
        if len(sequence.token_ids) > start:
            self._history.add(sequence.token_ids[max(0, start - self._most) :], _owner(sequence))


def _owner(sequence: DraftedSequence) -> int:
    """A number for the context, the same in every process."""
    return zlib.crc32(sequence.context.encode()) & 0x7FFFFFFF


# Predicted outputs: a request brings a text that its answer is likely to repeat, such as a file to be edited.

#: Tokens that must match to find the place in the prediction again, and most that are compared.
_LEAST, _MOST = 2, 8
#: Tokens of the prediction that are searched: bounds the time of a proposal.
_WINDOW = 1 << 14


class PredictionDrafter(Drafter):
    """Drafts from the prediction: from its beginning on, and after a difference from where the output matches again.

    That is behind the longest end of the output, of 2 to 8 tokens, that occurs in the prediction.
    """

    def __init__(self) -> None:
        self._predictions: dict[int, _Prediction] = {}

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        if not sequence.prediction:
            return []
        prediction = self._predictions.get(sequence.seq_id)
        if prediction is None:
            text = "".join(map(chr, sequence.prediction))
            prediction = self._predictions[sequence.seq_id] = _Prediction(text, sequence.num_prompt_tokens)
        token_ids, place = sequence.token_ids, prediction.place
        new = token_ids[prediction.num_tokens :]
        prediction.num_tokens = len(token_ids)
        if prediction.matches and sequence.prediction[place : place + len(new)] == new:
            place += len(new)
        else:
            place = prediction.find(token_ids[max(sequence.num_prompt_tokens, len(token_ids) - _MOST) :])
        prediction.matches = place >= 0
        if not prediction.matches:
            return []
        prediction.place = place
        return sequence.prediction[place : place + num_tokens]

    def on_end(self, sequence: DraftedSequence) -> None:
        self._predictions.pop(sequence.seq_id, None)


@dataclass(slots=True)
class _Prediction:
    #: Its tokens as code points, up to 4 bytes each: ``str.find`` searches them.
    text: str
    #: Tokens of the sequence at the last call.
    num_tokens: int
    #: The place of the next token in the prediction.
    place: int = 0
    #: Whether the last tokens match those before the place.
    matches: bool = True

    def find(self, last_tokens: list[int]) -> int:
        """The place behind the longest end of the output; -1 if there is none."""
        text, start, place = self.text, self.place, -1
        end = "".join(map(chr, last_tokens))
        for length in range(_LEAST, len(end) + 1):
            at = text.find(end[-length:], start, start + _WINDOW)
            if at < 0:
                at = text.find(end[-length:], 0, _WINDOW)
            if at < 0:
                break
            place = at + length
        return place
