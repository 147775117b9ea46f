"""Drafts from recent outputs of all requests, and from the sequence itself.

After Oliaro et al., "SuffixDecoding" (2024), section 4: the longest end of a sequence that occurred before decides. The
structure is that of a compressor's window (hash chains over a ring, as in zlib) instead of a tree: its memory is fixed.
"""

from __future__ import annotations

import zlib
from array import array

from octavo.core.speculative_options import SpeculativeConfig
from octavo.speculation.drafter import DraftedSequence, Drafter
from octavo.speculation.ngram import MAX_PLACES, NgramDrafter, continuation

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
