"""Drafters against plain searches over all earlier places."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.options import SpeculativeConfig
from octavo.speculation import drafter as drafter_module
from octavo.speculation.drafter import History, NgramDrafter, PredictionDrafter, SuffixDrafter
from octavo.speculation.speculator import Speculator

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
        patch.setattr(drafter_module, "MAX_PLACES", 100)
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
        patch.setattr(drafter_module, "MAX_PLACES", 1000)
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


# Drafts from a predicted output, which an answer follows, leaves and comes back to.

IDS = st.integers(0, 3)


def test_it_is_followed_from_its_beginning_and_found_again_after_a_difference() -> None:
    drafter, prediction = PredictionDrafter(), list(range(100, 160))
    output: list[int] = []

    def propose(*tokens: int) -> list[int]:
        output.extend(tokens)
        return drafter.propose(Tokens([7, 100, 101, *output], num_prompt_tokens=3, prediction=prediction), 4)

    assert propose() == [100, 101, 102, 103]
    assert propose(100, 101, 102) == [103, 104, 105, 106]
    assert propose(9) == []  # something else
    assert propose(104) == []
    assert propose(105) == [106, 107, 108, 109]  # another token in the place of one
    assert propose(130) == []
    assert propose(131) == [132, 133, 134, 135]  # some left out
    assert propose(110) == [] and propose(111) == [112, 113, 114, 115]  # what stands further ahead
    assert propose(*range(112, 158)) == [158, 159]
    assert propose(158, 159) == [] and propose(5) == []  # beyond its end
    drafter.on_end(Tokens([7]))
    assert not drafter._predictions


@given(st.lists(IDS, min_size=1, max_size=30), st.lists(IDS, max_size=30), st.lists(IDS, max_size=5), st.data())
def test_the_place_is_that_of_a_search_over_all_places(
    prediction: list[int], output: list[int], prompt: list[int], data: st.DataObject
) -> None:
    drafter, known, place, agrees = PredictionDrafter(), 0, 0, True
    new: list[int] = []
    while known <= len(output):
        tokens = Tokens(prompt + output[:known], num_prompt_tokens=len(prompt), prediction=prediction)
        found = drafter.propose(tokens, 50)
        if not (agrees and prediction[place : place + len(new)] == new):
            matches = [
                (n, start >= place, -start)
                for start in range(len(prediction))
                for n in range(2, min(8, known) + 1)
                if prediction[start : start + n] == output[known - n : known]
            ]
            agrees = bool(matches)
            if agrees:
                longest, _, start = max(matches)
                place = longest - start
        else:
            place += len(new)
        assert found == (prediction[place:] if agrees else [])
        new = output[known : known + data.draw(st.integers(1, 4))]
        known += max(1, len(new))


def test_a_search_looks_at_so_many_tokens_only() -> None:
    drafter, rng = PredictionDrafter(), random.Random(1)
    prediction = [rng.randrange(1000) for _ in range(60_000)]
    far = prediction[50_000:50_010]
    assert drafter.propose(Tokens([5, *far], num_prompt_tokens=1, prediction=prediction), 3) == []
    near = prediction[9_000:9_010]
    assert (
        drafter.propose(Tokens([5, *near], seq_id=1, num_prompt_tokens=1, prediction=prediction), 3)
        == (prediction[9_010:9_013])
    )


def test_a_prediction_goes_before_the_drafter_of_the_engine_which_takes_over_where_it_says_nothing() -> None:
    class Ones(PredictionDrafter):
        def propose(self, sequence: object, num_tokens: int) -> list[int]:
            return [1] * num_tokens

    speculator = Speculator(Ones(), 3, adaptive=False)
    plain, predicted = Tokens([5], num_prompt_tokens=1), Tokens([5], 1, num_prompt_tokens=1, prediction=[6, 7, 8, 9])
    assert speculator.propose(plain, 9) == [1, 1, 1]
    assert speculator.propose(predicted, 9) == [6, 7, 8]
    assert speculator.propose(Tokens([5, 4], 1, num_prompt_tokens=1, prediction=[6, 7, 8, 9]), 9) == [1, 1, 1]
    alone = Speculator(None, 3, adaptive=False)
    assert alone.drafts(predicted) and not alone.drafts(plain)
    assert alone.propose(predicted, 2) == [6, 7] and alone.stats() is None


def test_sequences_without_a_prediction_do_not_lower_the_chance_of_those_with_one() -> None:
    speculator = Speculator(NgramDrafter(SpeculativeConfig(method="ngram")), 4, adaptive=True)
    for number in range(60):  # wrong each time, and four rows cost what a token does
        speculator.lengths.begin_step(1, 0)
        sequence = Tokens([1, 2, 3, 1, 2], number)
        speculator.propose(sequence, 4)
        speculator.observe([(number, 4, 0)])
        speculator.lengths.observe_step(1, 1, 4, 2.0)
        speculator.lengths.begin_step(1, 0)
        speculator.lengths.observe_step(1, 0, 0, 1.0)
    speculator.lengths.begin_step(1, 0)
    assert not speculator.propose(Tokens([1, 2, 3, 1, 2], 1000), 4)
    assert speculator.propose(Tokens([5], 1001, num_prompt_tokens=1, prediction=[6, 7]), 4) == [6, 7]
