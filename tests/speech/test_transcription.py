"""The loop of a transcription, with a model that says what it is told."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import InvalidRequestError
from octavo.speech.segments import cut_answer
from octavo.speech.transcription import Answer, Language, Silence, TranscriptionParams, transcribe
from tests.speech.fake_speech import CODEC, KNOWN, MULTILINGUAL, TIME, FakeModel, said

GOOD = -0.2


def good(tokens: list[int]) -> Answer:
    return Answer(tokens, GOOD * (len(tokens) + 1))


def bad(tokens: list[int]) -> Answer:
    return Answer(tokens, -2.0 * (len(tokens) + 1))


def run(model: FakeModel, known: Any = KNOWN, **params: Any) -> Any:
    scores = params.pop("scores", False)
    return model.run(transcribe(TranscriptionParams(**params), known, CODEC, scores=scores))


def test_a_short_recording_is_one_window() -> None:
    model = FakeModel(5.0, lambda start, t: good([*said(" Hello there.", 0.0, 2.0), *said(" Bye.", 2.0, 4.0)]))
    made, segments = run(model)
    assert [(s.id, s.start, s.end, s.text) for s in segments] == [
        (0, 0.0, 2.0, " Hello there."),
        (1, 2.0, 4.0, " Bye."),
    ]
    assert made.text == "Hello there. Bye."
    assert made.segments == segments
    assert made.duration == 5.0
    assert model.windows == [0.0, 5.0]
    assert model.decodes[0].prompt == [KNOWN.start]
    assert model.decodes[0].temperature == 0.0
    assert made.completion_tokens == len(CODEC.encode(" Hello there. Bye.")) + 4


def test_the_next_window_begins_after_the_last_text_that_has_ended() -> None:
    def answer(start: float, temperature: float) -> Answer:
        if start == 0.0:  # the second text goes on beyond the window
            return good([*said(" One.", 0.0, 24.0), TIME + 1200, *CODEC.encode(" Tw")])
        return good(said(" Two.", 0.0, 10.0))

    model = FakeModel(40.0, answer)
    _, segments = run(model)
    assert model.windows == [0.0, 24.0, 40.0]
    assert [(s.start, s.end, s.text, s.seek) for s in segments] == [
        (0.0, 24.0, " One.", 0),
        (24.0, 34.0, " Two.", 2400),
    ]


def test_the_text_before_comes_before() -> None:
    model = FakeModel(50.0, lambda start, t: good(said(f" At {start:.0f}.", 0.0, 30.0)))
    run(model)
    first, second = model.decodes
    assert first.prompt == [KNOWN.start]
    assert second.prompt == [KNOWN.previous, *said(" At 0.", 0.0, 30.0), KNOWN.start]


def test_it_does_not_where_that_is_not_wanted_or_was_drawn_at_a_high_temperature() -> None:
    model = FakeModel(50.0, lambda start, t: good(said(" Text.", 0.0, 30.0)))
    run(model, condition_on_previous_text=False)
    assert model.decodes[1].prompt == [KNOWN.start]
    model = FakeModel(50.0, lambda start, t: good(said(" Text.", 0.0, 30.0)) if t > 0.5 or start else bad([TIME, TIME]))
    run(model)
    assert [decode.temperature for decode in model.decodes] == [0.0, 0.2, 0.4, 0.6, 0.0]
    assert model.decodes[-1].prompt == [KNOWN.start]


def test_prompt_and_hotwords() -> None:
    model = FakeModel(40.0, lambda start, t: good(said(" Text.", 0.0, 30.0)))
    run(model, prompt=" A story ", hotwords="Octavo")
    first, second = model.decodes
    hot = CODEC.encode(" Octavo")
    assert first.prompt == [KNOWN.previous, *hot, *CODEC.encode(" A story"), KNOWN.start]
    assert second.prompt == [KNOWN.previous, *hot, *CODEC.encode(" A story"), *said(" Text.", 0.0, 30.0), KNOWN.start]


def test_long_texts_before_are_cut_so_that_an_answer_has_room() -> None:
    model = FakeModel(300.0, lambda start, t: good(said(" And so on" * 15, 0.0, 30.0)))
    run(model, prompt="x" * 1000, compression_ratio_threshold=None)
    assert all(len(decode.prompt) + decode.max_tokens <= KNOWN.context for decode in model.decodes)
    assert all(decode.max_tokens == 224 for decode in model.decodes)
    assert model.decodes[0].prompt[:2] == [KNOWN.previous, ord("x")]


@pytest.mark.parametrize(
    ("wrong", "params"),
    [
        (bad(said(" Unlikely", 0.0, 4.0)), {}),
        (good(said(" la la la la la la la la la la la la la la la la la", 0.0, 4.0)), {}),
    ],
)
def test_an_answer_that_looks_wrong_is_drawn_again(wrong: Answer, params: dict[str, Any]) -> None:
    model = FakeModel(5.0, lambda start, t: wrong if t < 0.4 else good(said(" Right.", 0.0, 4.0)))
    made, segments = run(model, **params)
    assert made.text == "Right."
    assert [decode.temperature for decode in model.decodes] == [0.0, 0.2, 0.4]
    assert segments[0].temperature == 0.4
    assert len({decode.seed for decode in model.decodes}) == 3


def test_where_none_looks_right_the_likeliest_that_does_not_repeat_itself_is_taken() -> None:
    repeats = said(" no" * 40, 0.0, 4.0)

    def answer(start: float, temperature: float) -> Answer:
        if temperature == 0.0:
            return good(repeats)
        tokens = said(f" T{temperature}", 0.0, 4.0)
        return Answer(tokens, (-1.5 - (temperature != 0.6)) * (len(tokens) + 1))

    made, _ = run(FakeModel(5.0, answer))
    assert made.text == "T0.6"


def test_thresholds_can_be_off_and_temperatures_given() -> None:
    model = FakeModel(5.0, lambda start, t: bad(said(" la" * 40, 0.0, 4.0)))
    run(model, compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None)
    assert len(model.decodes) == 1
    model.asked.clear()
    run(model, temperature=[0.1, 0.3])
    assert [decode.temperature for decode in model.decodes] == [0.1, 0.3]


def test_a_silent_window_has_no_text() -> None:
    model = FakeModel(35.0, lambda start, t: bad(said(" Thanks for watching!", 0.0, 5.0)), no_speech=0.9)
    made, segments = run(model)
    assert segments == []
    assert made.text == ""
    assert model.windows == [0.0, 30.0, 35.0]
    assert [decode.temperature for decode in model.decodes] == [0.0, 0.0]  # silence is no reason to draw again


def test_a_window_without_a_signal_is_passed_over() -> None:
    model = FakeModel(70.0, lambda start, t: good(said(f" At {start:.0f}.", 0.0, 30.0)), nothing=(30.0,))
    made, _ = run(model)
    assert made.text == "At 0. At 60."
    assert made.duration == 70.0
    assert len(model.decodes) == 2


def test_a_likely_answer_counts_although_the_window_seems_silent() -> None:
    made, _ = run(FakeModel(5.0, lambda start, t: good(said(" Text.", 0.0, 5.0)), no_speech=0.9))
    assert made.text == "Text."


def test_silence_is_asked_for_where_something_depends_on_it() -> None:
    model = FakeModel(5.0, lambda start, t: good(said(" Text.", 0.0, 5.0)), no_speech=0.25)
    _, segments = run(model)
    assert segments[0].no_speech_prob is None
    assert Silence() not in model.asked
    _, segments = run(model, scores=True)
    assert segments[0].no_speech_prob == 0.25


def test_the_language_is_detected_once() -> None:
    model = FakeModel(45.0, lambda start, t: good(said(" Text.", 0.0, 30.0)), language=303)
    made, _ = run(model, MULTILINGUAL)
    assert made.language == "de"
    assert [ask for ask in model.asked if isinstance(ask, Language)] == [Language([302, 303, 304])]
    assert model.decodes[0].prompt == [301, 303, 311]
    assert model.decodes[1].prompt[-3:] == [301, 303, 311]


def test_a_language_may_be_said_and_translated() -> None:
    model = FakeModel(5.0, lambda start, t: good(said(" Text.", 0.0, 5.0)))
    made, _ = run(model, MULTILINGUAL, language="German", task="translate")
    assert made.language == "de"
    assert made.task == "translate"
    assert model.decodes[0].prompt == [301, 303, 310]


@pytest.mark.parametrize(
    ("known", "params", "message"),
    [
        (KNOWN, {"language": "de"}, "language must be 'en', not 'de': the model is English"),
        (KNOWN, {"task": "translate"}, "needs a multilingual model"),
        (MULTILINGUAL, {"language": "french"}, "'french' is none of the model's: en, de, ja"),
        (MULTILINGUAL, {"language": "klingon"}, "language: 'klingon' is not known"),
    ],
)
def test_what_the_model_cannot_do_is_refused(known: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        run(FakeModel(5.0, lambda start, t: good([])), known, **params)


def test_answers_without_times() -> None:
    model = FakeModel(40.0, lambda start, t: good(CODEC.encode(f" At {start:.0f}.")))
    made, segments = run(model, timestamps=False)
    assert made.text == "At 0. At 30."
    assert [(s.start, s.end) for s in segments] == [(0.0, 30.0), (30.0, 40.0)]
    assert model.decodes[0].prompt == [KNOWN.start, KNOWN.no_times]
    assert not model.decodes[0].has_times


def test_words_have_times() -> None:
    model = FakeModel(10.0, lambda start, t: good(said(" ab cd.", 0.0, 2.0)))
    _, segments = run(model, word_timestamps=True)
    assert segments[0].words is not None
    # A letter takes ten steps of 20 ms; the dot belongs to the word before it.
    assert [(w.word, w.start, w.end, w.probability) for w in segments[0].words] == [
        (" ab", 0.0, 0.6, 0.5),
        (" cd.", 0.6, 1.2, 0.5),
    ]


def test_no_answer_makes_more_windows_than_the_recording_has_seconds() -> None:
    model = FakeModel(60.0, lambda start, t: good([*said(" a", 0.0, 0.02), TIME + 1]))
    run(model, condition_on_previous_text=False)
    assert len(model.windows) <= 62


def test_an_empty_answer_is_no_segment() -> None:
    for tokens in ([], [TIME], [TIME, TIME + 5], said("  ", 0.0, 2.0)):
        made, segments = run(FakeModel(5.0, lambda start, t, tokens=tokens: good(tokens)))  # type: ignore[misc]
        assert segments == []
        assert made.text == ""


@pytest.mark.parametrize(
    ("tokens", "spans", "following"),
    [
        (CODEC.encode("ab"), [(0, 1500)], 1500),
        ([TIME, 97, TIME + 100], [(0, 100)], 1500),
        ([TIME, 97, TIME + 100, TIME + 100, 98], [(0, 100)], 100),
        ([TIME, 97, TIME + 100, TIME + 120, 98, TIME + 300], [(0, 100), (120, 300)], 1500),
        ([TIME, 97, TIME + 100, TIME + 120, 98, TIME + 300, TIME + 300], [(0, 100), (120, 300)], 300),
    ],
)
def test_answers_are_cut_at_pairs_of_times(tokens: list[int], spans: list[tuple[int, int]], following: int) -> None:
    found, after = cut_answer(tokens, 1500, KNOWN)
    assert [(span.start, span.end) for span in found] == spans
    assert after == following


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"task": "sing"}, "task must be 'transcribe' or 'translate', not 'sing'"),
        ({"language": 3}, "language must be text, not 3"),
        ({"temperature": -1.0}, r"temperature must be in \[0, 2\], not -1.0"),
        ({"temperature": ()}, "temperature must be 1 to 16 numbers, not 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"prompt": "x" * 10_001}, "prompt may have at most 10000 characters, not 10001"),
        ({"no_speech_threshold": "high"}, "no_speech_threshold must be a finite number"),
        ({"word_timestamps": 1}, "word_timestamps must be True or False, not 1"),
        ({"word_timestamps": True, "timestamps": False}, "needs timestamps=True"),
        ({"seed": 0.5}, "seed must be an integer"),
    ],
)
def test_parameters_that_are_wrong(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        TranscriptionParams(**params)
