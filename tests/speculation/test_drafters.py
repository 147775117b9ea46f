"""Drafters against plain searches over all earlier places."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.options import SpeculativeConfig
from octavo.speculation import drafter as ngram
from octavo.speculation import drafter as suffix
from octavo.speculation.drafter import History, NgramDrafter, SuffixDrafter

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@dataclass
class Tokens:
    """A sequence as a drafter sees it."""

    token_ids: list[int]
    seq_id: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    context: str = ""
    prediction: list[int] = field(default_factory=list)


def common_end(tokens: list[int], place: int, end: list[int], most: int) -> int:
    """How many tokens before ``place`` are the last ones of ``end``."""
    length = 0
    while length < min(most, place, len(end)) and tokens[place - 1 - length] == end[-1 - length]:
        length += 1
    return length


def searched(tokens: list[int], least: int, most: int) -> tuple[int, int]:
    """The latest of the longest matches, by comparing all earlier places."""
    lengths = [(common_end(tokens, place, tokens, most), place) for place in range(1, len(tokens))]
    found = max((pair for pair in lengths if pair[0] >= least), default=(0, -1))
    return found[1], found[0]


@given(TOKENS, st.integers(1, 4), st.integers(0, 4))
def test_the_longest_match_wins_and_of_equal_ones_the_latest(tokens: list[int], least: int, more: int) -> None:
    drafter = NgramDrafter(SpeculativeConfig(method="ngram", prompt_lookup_min=least, prompt_lookup_max=least + more))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "MAX_PLACES", 100)
        for end in range(1, len(tokens) + 1, 1 + len(tokens) // 7):  # the index grows with the sequence
            assert drafter.match(Tokens(tokens[:end])) == searched(tokens[:end], least, least + more)


def test_what_repeats_goes_on() -> None:
    drafter = NgramDrafter(SpeculativeConfig(method="ngram"))
    assert drafter.propose(Tokens([9, 1, 2, 3, 1, 2]), 4) == [3, 1, 2, 3]
    assert drafter.propose(Tokens([1, 2, 3, 4, 5, 6], seq_id=1), 4) == []
    assert drafter.propose(Tokens([7], seq_id=2), 4) == []
    drafter.on_end(Tokens([9], seq_id=0))
    assert set(drafter._followed) == {1, 2}


@given(st.lists(TOKENS, max_size=6), TOKENS, st.integers(16, 64), st.integers(3, 8))
def test_the_history_finds_what_a_search_over_its_latest_tokens_finds(
    outputs: list[list[int]], tokens: list[int], capacity: int, most: int
) -> None:
    history, kept = History(capacity), []
    for output in outputs:
        history.add(output, 5)
        kept += [-1, *output[-(capacity - 1) :]]
    kept = kept[-capacity:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "MAX_PLACES", 1000)
        place, length = history.longest_match(tokens, most, 5)
    # A place needs a token after it, and an n-gram before it that is still there.
    places = [p for p in range(1, len(kept)) if kept[p] != -1]
    best = max((common_end(kept, p, tokens, most), p) for p in places) if places else (0, -1)
    if best[0] < 3:
        assert (place, length) == (-1, 0)
    else:
        assert (length, place - (history.num_added - len(kept))) == best
        following = kept[best[1] :]
        following = following[: following.index(-1)] if -1 in following else following
        assert history.continuation(place, 5) == following[:5]
    assert history.longest_match(tokens, most, 6) == (-1, 0)  # another context


def test_outputs_of_other_requests_draft_if_their_context_is_the_same() -> None:
    drafter = SuffixDrafter(SpeculativeConfig(method="suffix"))
    rng = random.Random(0)
    output = [rng.randrange(1000) for _ in range(50)]
    drafter.on_end(Tokens([5, 6, *output], num_prompt_tokens=2, context="a"))
    assert drafter.propose(Tokens([8, *output[10:14]], seq_id=1, context="a"), 6) == output[14:20]
    assert drafter.propose(Tokens([8, *output[10:14]], seq_id=2, context="b"), 6) == []
    assert drafter.propose(Tokens([5, 6, output[0]], seq_id=3, context="a"), 2) == output[1:3]


def test_the_history_has_its_memory_from_the_beginning() -> None:
    history, rng = History(4096), random.Random(1)

    def num_bytes() -> int:
        arrays = (history._tokens, history._owners, history._latest, history._before)
        return sum(len(values) * values.itemsize for values in arrays)

    assert num_bytes() == 4096 * History.BYTES_A_TOKEN
    for _ in range(30):
        history.add([rng.randrange(50) for _ in range(rng.randrange(900))], rng.randrange(3))
    history.add(list(range(9000)), 1)
    assert num_bytes() == 4096 * History.BYTES_A_TOKEN
    assert history.longest_match(list(range(8990, 8999)), 24, 1)[1] == 9
