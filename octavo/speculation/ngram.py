"""Prompt lookup: what followed the last tokens when they occurred before in the same sequence.

Saxena, "Prompt Lookup Decoding" (2023). An index that grows with the sequence takes the place of the scan.
"""

from __future__ import annotations

from array import array

from octavo.core.speculative_options import SpeculativeConfig
from octavo.speculation.drafter import DraftedSequence, Drafter

#: Earlier places that are compared, latest first: bounds the time of a proposal.
MAX_PLACES = 16


class TokenIndex:
    """The places of one sequence that follow its n-grams of the least length, as chains from the latest to the first.

    Owns about 105 bytes for a token of text that does not repeat. A place is the position after the n-gram.
    """

    def __init__(self, least: int) -> None:
        """``least``: tokens of an n-gram."""
        self._least = least
        self._latest: dict[int, int] = {}
        #: The place before each one in its chain, -1 if there is none; of place i at i - least.
        self._before = array("q")

    def add(self, token_ids: list[int]) -> None:
        """Adds the places up to the last token but one, of which the n-gram itself is still to be looked up."""
        least, latest, before = self._least, self._latest, self._before
        for place in range(least + len(before), len(token_ids)):
            key = hash(tuple(token_ids[place - least : place]))
            before.append(latest.get(key, -1))
            latest[key] = place

    def longest_match(self, token_ids: list[int], most: int) -> tuple[int, int]:
        """The longest end of ``token_ids``, of up to ``most`` tokens, that is also at an earlier place.

        Returns:
            (place, length), the latest of equal ones among the latest ``MAX_PLACES``; (-1, 0) if there is none.
        """
        least, end, before = self._least, len(token_ids), self._before
        if end < least:
            return -1, 0
        place = self._latest.get(hash(tuple(token_ids[-least:])), -1)
        best, longest = -1, 0
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            # Most places are no better than the best so far: the token that would have to match shows it.
            if place > longest and token_ids[place - longest - 1] == token_ids[end - longest - 1]:
                length, limit = 0, min(most, place)
                while length < limit and token_ids[place - length - 1] == token_ids[end - length - 1]:
                    length += 1
                if length > longest and length >= least:
                    best, longest = place, length
                    if length == most:
                        break
            place = before[place - least]
        return best, longest


class NgramDrafter(Drafter):
    """Drafts from the sequence's own tokens, prompt and output."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max
        self._indices: dict[int, TokenIndex] = {}

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        """See ``Drafter``: what followed the longest match."""
        place, _ = self.match(sequence)
        return continuation(sequence.token_ids, place, num_tokens) if place >= 0 else []

    def match(self, sequence: DraftedSequence) -> tuple[int, int]:
        """See ``TokenIndex.longest_match``."""
        index = self._indices.get(sequence.seq_id)
        if index is None:
            index = self._indices[sequence.seq_id] = TokenIndex(self._least)
        token_ids = sequence.token_ids
        index.add(token_ids)
        return index.longest_match(token_ids, self._most)

    def on_end(self, sequence: DraftedSequence) -> None:
        """See ``Drafter``."""
        self._indices.pop(sequence.seq_id, None)


def continuation(token_ids: list[int], place: int, num_tokens: int) -> list[int]:
    """The tokens from ``place`` on; what repeats up to the end is taken to repeat further."""
    tokens = token_ids[place : place + num_tokens]
    while len(tokens) < num_tokens:
        tokens += tokens[: num_tokens - len(tokens)]
    return tokens
