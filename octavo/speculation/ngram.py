"""Prompt lookup: what followed the last tokens when they occurred before in the same sequence.

Saxena, "Prompt Lookup Decoding" (2023). An index that grows with the sequence takes the place of the scan.
"""

from __future__ import annotations

from array import array

from octavo.core.speculative_options import SpeculativeConfig
from octavo.speculation.drafter import DraftedSequence, Drafter

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
