"""Drafts from a predicted output, which an answer follows, leaves and comes back to."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from octavo.config.options import SpeculativeConfig
from octavo.speculation.drafter import NgramDrafter, PredictionDrafter
from octavo.speculation.speculator import Speculator
from tests.speculation.test_drafters import Tokens

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
    assert not drafter._followed


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
        speculator.begin_step(1, 0)
        sequence = Tokens([1, 2, 3, 1, 2], number)
        speculator.propose(sequence, 4)
        speculator.observe([(number, 4, 0)])
        speculator.observe_step(1, 1, 4, 2.0)
        speculator.begin_step(1, 0)
        speculator.observe_step(1, 0, 0, 1.0)
    speculator.begin_step(1, 0)
    assert not speculator.propose(Tokens([1, 2, 3, 1, 2], 1000), 4)
    assert speculator.propose(Tokens([5], 1001, num_prompt_tokens=1, prediction=[6, 7]), 4) == [6, 7]
